"""Curves of a training as one SVG file."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_mlx.train.fit import Point

WIDTH, HEIGHT, LEFT, GAP = 640, 180, 56, 44
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#7f7f7f")

Line = list[tuple[float, float]]


def draw_curves(points: Sequence[Point]) -> str:
    """Loss, held-out tau and slot accuracies against the response tokens learned from."""
    measured = [p for p in points if p.tau is not None]
    slots = [
        [(p.tokens, p.slots[i]) for p in measured] for i in range(len(measured[0].slots) if measured else 0)
    ]
    charts: list[tuple[str, list[Line]]] = [
        ("loss", [[(p.tokens, p.loss) for p in points]]),
        ("held-out tau", [[(p.tokens, p.tau) for p in measured if p.tau is not None]]),
        ("slot accuracy, given that all slots before were right", [list(line) for line in slots]),
    ]
    height = GAP + len(charts) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, (title, lines) in enumerate(charts):
        parts += _chart(title, lines, GAP + number * (HEIGHT + GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(title: str, lines: list[Line], top: int) -> list[str]:
    dots = [dot for line in lines for dot in line]
    parts = [f'<text x="{LEFT}" y="{top - 8}">{title}</text>']
    if not dots:
        return parts
    right = max(x for x, _ in dots) or 1
    low, high = min(y for _, y in dots), max(y for _, y in dots)
    span = high - low or 1
    bottom = top + HEIGHT - 20
    for value in (low, (low + high) / 2, high):
        y = bottom - (value - low) / span * (HEIGHT - 20)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    parts.append(f'<text x="{WIDTH - 10}" y="{bottom + 16}" text-anchor="end">{right:,.0f} tokens</text>')
    for colour, line in zip(COLOURS * 2, lines, strict=False):
        path = " ".join(
            f"{LEFT + x / right * (WIDTH - 10 - LEFT):.1f},{bottom - (y - low) / span * (HEIGHT - 20):.1f}"
            for x, y in line
        )
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return parts
