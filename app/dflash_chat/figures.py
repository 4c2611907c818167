"""Numbers as a person reads them: bars, sparklines, sizes, durations. Pure text."""

from collections.abc import Sequence

_EIGHTHS = "▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉█"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as blocks, the tallest one full; zero is a gap."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    if top <= 0:
        return ""
    steps = (max(0, min(7, round(7 * value / top))) for value in shown)
    return "".join(_EIGHTHS[step] if value > 0 else " " for step, value in zip(steps, shown, strict=True))


def bar(part: float, width: int) -> str:
    """`part` in [0, 1] of `width` columns; what is not zero shows at least a sliver."""
    eighths = min(8 * width, max(round(8 * width * part), 1 if part > 0 else 0))
    return "█" * (eighths // 8) + (_PARTS[eighths % 8] if eighths % 8 else "")


def count(number: float) -> str:
    """1234 -> '1.2k'; below a thousand as it is."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            value = number / limit
            return f"{value:.1f}{unit}" if value < 100 and value % 1 >= 0.05 else f"{value:.0f}{unit}"
    return f"{number:.0f}"


def speed(tokens_per_second: float) -> str:
    """Three figures are enough."""
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 99.95 else f"{tokens_per_second:.1f}"


def seconds(value: float) -> str:
    """'0.31 s', '4.1 s', '38 s', '2 min 05 s'."""
    if value < 0.995:
        return f"{value:.2f} s"
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 59.5:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s"


def gigabytes(number: float) -> str:
    """Bytes in GB, without the unit."""
    return f"{number / 1e9:.1f}" if number < 99.95e9 else f"{number / 1e9:.0f}"


def size(number: float) -> str:
    """Bytes with a unit, small ones in MB."""
    return f"{gigabytes(number)} GB" if number >= 0.95e9 else f"{number / 1e6:.0f} MB"


def ago(value: float) -> str:
    """How long ago, roughly: 'now', '5 min', '3 h', '12 d'."""
    for limit, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= limit:
            return f"{value // limit:.0f} {unit}"
    return "now"


def plural(number: int, noun: str) -> str:
    """'1 turn', '2 turns', '1 204 turns'."""
    return f"{spaced(number)} {noun}{'' if number == 1 else 's'}"


def spaced(number: int) -> str:
    """Thousands apart by a thin gap: '12 345'."""
    return f"{number:,}".replace(",", " ")


def shorten(text: str, width: int) -> str:
    """One line of at most `width` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: max(0, width - 1)].rstrip() + "…"
