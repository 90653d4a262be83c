"""Digests of data files, made while they are written and checked before bytes are used.

A file that one block holds has one digest, over all its bytes. A longer one has a digest per block,
so that a restore can use it block by block, or a range of it, in bounded memory and still never
sees a byte that was not checked; its own digest is that of the block digests, so that no byte is
looked at twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from emberkeep.blobs.store import Buffer, as_buffers

BLOCK_NBYTES = 16 * 1024 * 1024


def digest(data: Buffer) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class Digester:
    """Passes buffers on and remembers their size and digests. Every byte is looked at once."""

    def __init__(self, block_nbytes: int = BLOCK_NBYTES) -> None:
        self._block_nbytes = block_nbytes
        self._block = xxhash.xxh3_128()
        self._in_block = 0
        self._finished_blocks: list[str] = []
        self.size = 0

    def passing(self, data: Buffer | Iterable[Buffer]) -> Iterator[memoryview]:
        for view in as_buffers(data):
            self.update(view)
            yield view

    def update(self, view: memoryview) -> None:
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
        """The digest of everything so far: of the bytes if one block holds them, else of the block
        digests, joined."""
        if self.size > self._block_nbytes:
            return digest("".join(self.blocks).encode())
        return self._finished_blocks[0] if self._finished_blocks else self._block.hexdigest()

    @property
    def blocks(self) -> tuple[str, ...]:
        """One digest per block, the last one maybe short; empty when a single block holds all."""
        if self.size <= self._block_nbytes:
            return ()
        last = (self._block.hexdigest(),) if self._in_block else ()
        return (*self._finished_blocks, *last)
