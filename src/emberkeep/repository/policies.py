"""What the next version holds: pure decisions from the history of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Layout = Literal["full", "one_shot", "intermittent", "consecutive"]
LAYOUTS: tuple[Layout, ...] = ("full", "one_shot", "intermittent", "consecutive")

# Up to how many restores each bit-width keeps the loss of accuracy negligible (Check-N-Run, 6.2).
_RESTORES_OF_BITS = ((1, 2), (3, 3), (20, 4))


def starts_anew(layout: Layout, sizes: Sequence[float]) -> bool:
    """Whether the next version is a new baseline.

    `sizes` are the increments since the baseline, oldest first, each as a fraction of the
    baseline. An intermittent layout starts anew when what a fresh start costs by the same point
    next time, 1 + ΣS, is no more than going on with increments as large as the last, (i + 1)·S_i.
    """
    if layout == "full":
        return True
    if layout != "intermittent" or not sizes:
        return False
    return 1.0 + sum(sizes) <= (len(sizes) + 1) * sizes[-1]


def bits_for(expected_restores: int, restores: int) -> int:
    """The narrowest codec for a run that expects this many restores and has had so many.

    A run that was restored more often than it expected falls back to 8 bits.
    """
    if restores > expected_restores:
        return 8
    for most, bits in _RESTORES_OF_BITS:
        if expected_restores <= most:
            return bits
    return 8
