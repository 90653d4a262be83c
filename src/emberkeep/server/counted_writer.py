"""Files of a version that say how far they are on their way to the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from emberkeep._types import Json
from emberkeep.blobs import BlobStore
from emberkeep.blobs.store import Buffer
from emberkeep.repository import VersionId
from emberkeep.repository.manifest import FileRef
from emberkeep.repository.writer import FileWriter


class CountedWriter(FileWriter):
    """Calls `advance` for each buffer that the store takes."""

    def __init__(
        self, store: BlobStore, version: VersionId, nonce: str, *, part: int, block_nbytes: int,
        advance: Callable[[], object],
    ) -> None:  # fmt: skip
        super().__init__(store, version, nonce, part=part, block_nbytes=block_nbytes)
        self._advance = advance

    def add(
        self, data: Buffer | Iterable[Buffer], *, kind: str, suffix: str,
        metadata: Json | None = None,
    ) -> FileRef:  # fmt: skip
        buffers = [data] if isinstance(data, bytes | bytearray | memoryview) else data
        return super().add(self._passing(buffers), kind=kind, suffix=suffix, metadata=metadata)

    def _passing(self, buffers: Iterable[Buffer]) -> Iterator[Buffer]:
        for buffer in buffers:
            self._advance()
            yield buffer
