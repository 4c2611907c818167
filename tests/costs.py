"""Seconds of a cycle of 1, 2, ... rows on several Macs, worked out on paper: nothing here was timed.

A 27B target at 4 bits, whose weights are read once a pass as long as the arithmetic keeps up; a DFlash 2
drafter at 4 bits, or in 16. `exact`: kernels that give every row the bits of a lone one. `tile`: matrix tiles
of 8 rows, and scalar lanes below.
"""

_VERIFY_MS = {  # passes of 1 to 8 exact rows; 8 and 16 rows on tiles; a draft at 4 bits
    "M1 Max": ((47, 47, 54, 67, 80, 94, 117, 132), (68, 122), 6.6),
    "M2 Max": ((47, 47, 50, 59, 71, 83, 104, 117), (61, 110), 6.6),
    "M3 Max": ((46, 46, 46, 50, 60, 70, 88, 98), (51, 91), 6.6),
    "M4 Max": ((35, 35, 36, 45, 53, 62, 78, 87), (45, 81), 5.2),
    "M5 Max": ((31, 31, 35, 44, 52, 61, 76, 86), (44, 80), 4.8),
}
DRAFT_16_BITS = 2.15
"""Times a draft at 4 bits."""


def curves() -> dict[str, tuple[float, ...]]:
    """By chip and kind."""
    found = {}
    for chip, (exact, (eight, sixteen), draft) in _VERIFY_MS.items():
        few = [min(ms, eight) for ms in exact[1:4]]
        found[f"{chip}, exact"] = _cycle(exact[0], exact[1:], draft)
        found[f"{chip}, exact, drafter in 16 bits"] = _cycle(exact[0], exact[1:], DRAFT_16_BITS * draft)
        found[f"{chip}, tile"] = _cycle(exact[0], [*few, *[eight] * 4, *[sixteen] * 8], draft)
    # A processor whose matrix product costs as much for every row: drafting can never pay.
    found["no gain"] = (0.010, 0.022, 0.032, 0.042, 0.052)
    return found


def _cycle(plain: float, verify: "tuple[float, ...] | list[float]", draft: float) -> tuple[float, ...]:
    return (plain / 1e3, *((ms + draft) / 1e3 for ms in verify))
