"""How records lie in blocks of a tier's file, and memory that blocks can be read to."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from emberkeep._types import I64, U64, Array, Bools
from emberkeep.kernels.log_records import HEADER

BLOCK = 4096


def aligned(nbytes: int) -> U64:
    """Words that direct reads and writes can use."""
    words: U64 = np.frombuffer(
        mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint64
    )
    return words[: nbytes // 8]


def bytes_of(words: U64) -> memoryview:
    """The same memory, for reads and writes."""
    return memoryview(words.view(np.uint8).data)


@dataclass(frozen=True, slots=True)
class Layout:
    """How records look: the planes of a row, one after the other."""

    addresses: I64
    widths: I64
    by_row: Bools
    arrays: tuple[Array, ...]
    """What the addresses point to, kept alive."""

    @property
    def record_words(self) -> int:
        return 2 + -(-int(self.widths.sum()) // 8)

    @property
    def block_nbytes(self) -> int:
        return -(-(HEADER + 8 * self.record_words) // BLOCK) * BLOCK

    def segment_blocks(self, segment_nbytes: int) -> int:
        return max(1, segment_nbytes // self.block_nbytes)

    def onto(self, arrays: Sequence[Array]) -> Layout:
        """The same records, read to other arrays; for planes that are not by row."""
        pairs = zip(arrays, self.by_row, self.addresses, strict=True)
        addresses = [a if fixed else array.ctypes.data for array, fixed, a in pairs]
        return replace(self, addresses=np.array(addresses, np.int64), arrays=tuple(arrays))


def layout_of(framed: Sequence[Array], by_row: Sequence[Array]) -> Layout:
    """Planes indexed by frame, then planes indexed by row."""
    arrays = (*framed, *by_row)
    return Layout(
        np.array([array.ctypes.data for array in arrays], np.int64),
        np.array([array.strides[0] for array in arrays], np.int64),
        np.array([False] * len(framed) + [True] * len(by_row)),
        arrays,
    )
