"""Types that everybody shares: arrays by what they hold, and the ids of one slab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Words = npt.NDArray[Any]
"""Records, as 32-bit words, or marks, as bytes."""
Planes = dict[str, npt.NDArray[Any]]
Json = dict[str, Any]
Rates = float | Sequence[float]
"""The learning rate of all slabs, or of each."""


@dataclass(frozen=True, slots=True)
class RowIds:
    """Unique ids of the tables of one slab: those of table t at offsets[t]:offsets[t + 1]."""

    ids: I64
    offsets: I64

    def table_of(self, position: int) -> int:
        return int(np.searchsorted(self.offsets, position, side="right")) - 1

    def part(self, start: int, stop: int) -> RowIds:
        """Those at some positions."""
        ids = self.ids[start:stop]
        return RowIds(ids, np.clip(self.offsets - start, 0, ids.size))
