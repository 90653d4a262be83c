"""Digests of data files, made while they are written and checked before bytes are used.

A file has one digest over all its bytes, and one per block when it is longer than a block: so a
restore can use a long file block by block, or a range of it, in bounded memory and still never
sees a byte that was not checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from emberkeep.blobs.store import Buffer, as_buffers

BLOCK_NBYTES = 16 * 1024 * 1024
_SLICE_NBYTES = 1024 * 1024


def digest(data: Buffer) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class Digester:
    """Passes buffers on and remembers their size and digests."""

    def __init__(self, block_nbytes: int = BLOCK_NBYTES) -> None:
        self._block_nbytes = block_nbytes
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_128()
        self._in_block = 0
        self._finished_blocks: list[str] = []
        self.size = 0

    def passing(self, data: Buffer | Iterable[Buffer]) -> Iterator[memoryview]:
        for view in as_buffers(data):
            # In slices that stay in a core's cache from the first look at them to the last.
            for at in range(0, len(view), _SLICE_NBYTES):
                part = view[at : at + _SLICE_NBYTES]
                self.update(part)
                yield part

    def update(self, view: memoryview) -> None:
        self._whole.update(view)
        self.size += view.nbytes
        while view:
            part = view[: self._block_nbytes - self._in_block]
            self._block.update(part)
            self._in_block += part.nbytes
            view = view[part.nbytes :]
            if self._in_block == self._block_nbytes:
                self._finished_blocks.append(self._block.hexdigest())
                self._block.reset()
                self._in_block = 0

    @property
    def whole(self) -> str:
        """The digest of everything so far."""
        return str(self._whole.hexdigest())

    @property
    def blocks(self) -> tuple[str, ...]:
        """One digest per block, the last one maybe short; empty when a single block holds all."""
        if self.size <= self._block_nbytes:
            return ()
        last = (self._block.hexdigest(),) if self._in_block else ()
        return (*self._finished_blocks, *last)
