"""Speed-up by category and block size, as an SVG file."""

from xml.sax.saxutils import escape

from dflash_mlx.benchmark.report import Report

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 360, 48, 24, 48
COLOURS = ("#3b6fb6", "#d9822b", "#4a9a5b", "#8a5fb0", "#b0493f", "#6b6b6b")


def svg(report: Report) -> str:
    """Bars with their intervals; the line at 1 is plain decoding."""
    groups = {**report.categories, "all": report.overall}
    speedups = [f.speedup for by_mode in groups.values() for f in by_mode.values()]
    # The intervals of one or two prompts go far beyond all bars, and are cut off.
    most = 1.1 * max(2.0, *(min(i.high, 2 * i.mean) for i in speedups))
    plot = HEIGHT - TOP - BOTTOM

    def y(value: float) -> float:
        return TOP + plot * (1 - min(value, most) / most)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in range(int(most) + 1):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}x</text>')
    group_width = (WIDTH - LEFT) / len(groups)
    bar = 0.8 * group_width / len(report.modes)
    for number, (name, by_mode) in enumerate(groups.items()):
        start = LEFT + (number + 0.1) * group_width
        for index, mode in enumerate(report.modes):
            interval, x = by_mode[mode].speedup, start + index * bar
            colour, top = COLOURS[index % len(COLOURS)], y(interval.mean)
            parts.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{0.9 * bar:.1f}" height="{y(0) - top:.1f}" '
                f'fill="{colour}"><title>{escape(name)}, block {escape(mode)}: {interval}</title></rect>'
            )
            middle = x + 0.45 * bar
            parts.append(
                f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{y(interval.low):.1f}" '
                f'y2="{y(interval.high):.1f}" stroke="black"/>'
            )
        centre = start + 0.4 * group_width
        parts.append(f'<text x="{centre:.1f}" y="{y(0) + 18}" text-anchor="middle">{escape(name)}</text>')
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y(1):.1f}" y2="{y(1):.1f}" stroke="black"/>')
    for index, mode in enumerate(report.modes):
        x = LEFT + 110 * index
        parts.append(
            f'<rect x="{x}" y="{HEIGHT - 18}" width="10" height="10" fill="{COLOURS[index % len(COLOURS)]}"/>'
            f'<text x="{x + 15}" y="{HEIGHT - 9}">block {escape(mode)}</text>'
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
