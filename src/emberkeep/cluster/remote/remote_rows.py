"""The frozen rows of a shard on a server, as a checkpointer sees them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Protocol

from emberkeep._types import Json
from emberkeep.blobs import is_shared
from emberkeep.cluster.remote.timing import Timing
from emberkeep.cluster.shard import State
from emberkeep.codecs import Codec
from emberkeep.errors import CancelledError, ShardLostError
from emberkeep.repository import Draft
from emberkeep.repository.manifest import FileRef
from emberkeep.rows.snapshot import Chunk
from emberkeep.runtime.fields import Fields
from emberkeep.wire.connection import Connection


class FrozenShard(Protocol):
    """What frozen rows ask of their shard."""

    index: int
    epoch: int
    state: State
    timing: Timing
    saved_pushes: dict[str, int]
    wholly_saved: dict[str, int]

    def dialed(self) -> AbstractContextManager[Connection]: ...

    def ordered(self, kind: str, header: Json) -> Json: ...

    def until_done(
        self, kind: str, header: Json, cancelled: threading.Event | None = None
    ) -> Json: ...


class RemoteRows:
    """The frozen rows of a server: it writes them to the store itself, or sends them."""

    def __init__(
        self, shard: FrozenShard, freeze: int, pushes: dict[str, int], *, whole: bool
    ) -> None:
        self._shard, self._epoch, self._freeze = shard, shard.epoch, freeze
        self._pushes, self._whole = pushes, whole
        self._names: dict[str, str] = {}
        self.held_seconds = self.core_seconds = 0.0
        self.pressed = False  # only the server knows, and its own budget heeds it

    def rename(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    def reaches(self, url: str) -> bool:
        """Whether a server can write there itself."""
        return is_shared(url)

    def write(
        self, draft: Draft, codecs: Mapping[str, Codec], *, threads: int, nice: int,
        piece_nbytes: int, cancelled: threading.Event, most_mb_per_second: float | None = None,
        background_share: float | None = None,
        grid: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """Returns when the server has written its rows, and their files are part of the draft."""
        header = {
            "url": draft.url, "version": str(draft.version), "nonce": draft.nonce,
            "part": draft.next_part(), "block_nbytes": draft.block_nbytes, "names": self._names,
            "threads": threads, "nice": nice, "piece_nbytes": piece_nbytes,
            "most_mb_per_second": most_mb_per_second, "background_share": background_share,
            "codecs": {plane: codec.to_dict() for plane, codec in codecs.items()},
            "grid": grid,
        }  # fmt: skip
        answer = self._shard.until_done("write", header, cancelled)
        files = (Fields("the answer of a server", file) for file in answer["files"])
        draft.adopt([FileRef.of(file) for file in files])
        self.core_seconds = float(answer.get("core_seconds", 0.0))

    def chunks(self, rows: int, cancelled: threading.Event | None = None) -> Iterator[Chunk]:
        # With the number of the freeze: a request that was given up, and is read late, must not
        # take rows of the next one.
        header = {"epoch": self._epoch, "freeze": self._freeze, "rows": rows}
        shard = self._shard
        if shard.epoch != self._epoch:
            raise ShardLostError((shard.index,))
        with shard.dialed() as connection:
            for about, arrays in connection.stream("chunks", header, deadline=shard.timing.bulk):
                if cancelled is not None and cancelled.is_set():
                    raise CancelledError("the snapshot was cancelled for a newer one")
                ids = arrays.pop("")
                table = str(self._names.get(about["table"], about["table"]))
                yield Chunk(table, ids, None if about["tombstones"] else arrays)

    def took_place(self) -> None:
        self._shard.saved_pushes = self._pushes
        if self._whole:
            self._shard.wholly_saved = self._pushes

    def close(self, advanced: Collection[str]) -> None:
        shard = self._shard
        if advanced:  # the version is there, whatever has become of the server
            self.took_place()
        if shard.epoch != self._epoch or shard.state == "lost":
            return
        header = {"epoch": self._epoch, "advanced": list(advanced)}
        # A server that does not answer is gone, and its cursors with it, or the next freeze puts
        # the rows back: a row that is saved once too often is no harm.
        with suppress(ShardLostError), shard.dialed() as connection:
            ordered = shard.ordered("close", header)
            reply, _ = connection.act("close", ordered, deadline=shard.timing.deadline)
            self.held_seconds = float(reply.get("held_seconds", 0.0))
