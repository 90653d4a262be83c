"""When rows are recorded to have died: exactly would be a piece for each version that ended some.

Rows of one birth that died one after the other can be one piece, which counts as dead when the last
of them is. Versions in between then read rows that they do not need; but each piece costs those
that read it something too, its entry in the catalog, its head, two digests. The steps are those
in which all versions together, each restored once, read least. So old versions stay
cheap however late extraction came, and a piece of n bytes, many times COST, falls into about
√(n/COST · ln age) pieces at most: two steps are one unless the rows of the first, times how long
they would be read in vain, come to more than the piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emberkeep._types import I32, I64

COST_NBYTES = 4096
"""What a piece costs a restore beside its rows: as much as to read so many bytes of them."""

# A piece that has ended is read and written once more if versions save so many times its bytes.
_LEAST_GAIN = 2


@dataclass(frozen=True, slots=True)
class Steps:
    """Deaths, ascending, and under which each is recorded. `vain_nbytes` is what the steps cost all
    versions together, and `single_nbytes` what a single one would."""

    deaths: I64
    recorded: I64
    vain_nbytes: int
    single_nbytes: int

    def record(self, deaths: I32) -> I32:
        """What is recorded for deaths that are among these; 0, for a row that lives, stays 0."""
        found = np.zeros_like(deaths)
        dead = deaths > 0
        found[dead] = self.recorded[np.searchsorted(self.deaths, deaths[dead])]
        return found


def steps_of(birth: int, parts: Sequence[tuple[I32, int]]) -> Steps:
    """For rows of one birth: deaths, 0 for those that live, and how many bytes a row has."""
    from emberkeep.kernels import recorded_deaths

    # Piece by piece: of the many rows of a birth no array is made.
    found: list[tuple[I64, I64]] = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for deaths, row_nbytes in parts:
        some, counts = np.unique(deaths[deaths > 0], return_counts=True)
        found.append((some.astype(np.int64), counts * max(1, row_nbytes)))
    each, sizes = (np.concatenate(column) for column in zip(*found, strict=True))
    values, inverse = np.unique(each, return_inverse=True)
    nbytes = np.bincount(inverse.reshape(-1), sizes, minlength=values.size).astype(np.int64)
    recorded = np.empty_like(values)
    vain = recorded_deaths.cheapest_steps(values, nbytes, birth, COST_NBYTES, recorded)
    last = int(values[-1]) if values.size else birth
    single = int((nbytes * (last - values)).sum()) + COST_NBYTES * (last - birth)
    return Steps(values, recorded, int(vain), single)


def worth_moving(birth: int, deaths: I32, row_nbytes: int) -> bool:
    """Whether the rows of a piece that all have died are to be divided by when they did, though
    it could stay as it is."""
    if deaths.size == 0 or deaths.min() == deaths.max():
        return False
    steps = steps_of(birth, [(deaths, row_nbytes)])
    gain = steps.single_nbytes - steps.vain_nbytes
    return gain > _LEAST_GAIN * deaths.size * row_nbytes
