"""The long work of a server on versions: to write its frozen rows, to load a version, and to
prepare rounds of extraction in the part of a grid that is its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from emberkeep._types import Json
from emberkeep.checkpoint.version_files import write_held
from emberkeep.codecs import codec_from_dict
from emberkeep.errors import ProtocolError
from emberkeep.repository import Repository, VersionId
from emberkeep.repository.grid.shard_extraction import RoundOrder, ShardExtraction
from emberkeep.rows.snapshot import FrozenRows
from emberkeep.runtime.bandwidth import Bandwidth
from emberkeep.runtime.clock import Clock
from emberkeep.runtime.pool import Pool
from emberkeep.server.counted_writer import CountedWriter
from emberkeep.server.epoch import Epoch
from emberkeep.server.version_load import load_rows

Work = Callable[[], Json]


def to_write(
    epoch: Epoch, snapshots: Sequence[FrozenRows], header: Json, *, cancelled: threading.Event,
    advance: Callable[[], object], bandwidth: Bandwidth, clock: Clock,
) -> Work:  # fmt: skip
    """Writes frozen rows as pieces of a version, straight to the store; the answer has the files.

    With `grid`, the tables of the repository, they are pieces of a grid. The `bandwidth` is limited
    as the header says.
    """
    store = epoch.store(header["url"])
    codecs = {plane: codec_from_dict(spec) for plane, spec in header["codecs"].items()}
    version = VersionId.parse(header["version"])
    # Not the shard's number: a model may have several clusters, each with a first shard.
    part = int(header.get("part", epoch.shard.index))
    files = CountedWriter(
        store, version, str(header["nonce"]), part=part,
        block_nbytes=int(header["block_nbytes"]), advance=advance,
    )  # fmt: skip
    for snapshot in snapshots:
        snapshot.rename(header["names"])
    epoch.versions.writes(version)
    # As orders arrive, not as they are carried out: the newest says what holds.
    bandwidth.limit(header.get("most_mb_per_second"))

    def write() -> Json:
        with files:
            core_seconds = write_held(
                files, snapshots, codecs, shard=epoch.shard.index, cancelled=cancelled,
                threads=int(header["threads"]), nice=int(header["nice"]),
                piece_nbytes=int(header["piece_nbytes"]), bandwidth=bandwidth,
                background_share=header.get("background_share"), clock=clock,
                birth=version.number, grid=header.get("grid"),
            )  # fmt: skip
        written = [file.to_json() for file in files.written]
        return {"files": written, "core_seconds": core_seconds}

    return write


def to_load(
    epoch: Epoch, header: Json, *, pool: Pool, advance: Callable[[], object], clock: Clock
) -> Work:
    """Replaces all rows by the shard's part of a version."""
    store, version = epoch.store(header["url"]), VersionId.parse(header["version"])
    names = header["names"]

    def load() -> Json:
        # Not before: a store that hangs would keep a thread of those that answer.
        repository = Repository.open(store, clock=clock)
        return load_rows(epoch, repository, version, names, pool, advance)

    return load


class GridWork:
    """Rounds of extraction in the part of a grid that the shard of this server writes.

    What is known of living rows is kept from round to round, for the grid that the last order was
    about. The `bandwidth` is for all that the server writes of versions: rounds and saves together
    keep to the share that the newest of them came with.
    """

    def __init__(self, advance: Callable[[], object], clock: Clock) -> None:
        self._advance = advance
        self._clock = clock
        self.bandwidth = Bandwidth(None, clock=clock)
        self._extraction: tuple[str, ShardExtraction] | None = None

    def to_extract(self, epoch: Epoch, header: Json) -> Work:
        """Prepares a round as `RoundOrder` says; the answer is a `ShardRound`."""
        store, url = epoch.store(header["url"]), str(header["url"])
        order = RoundOrder.from_json(header["order_of_round"])
        if order.shard != epoch.shard.index:
            raise ProtocolError(f"this is shard {epoch.shard.index}, not {order.shard}")
        self.bandwidth.limit(header.get("most_mb_per_second"))

        def extract() -> Json:
            known = self._extraction
            if known is None or known[0] != url or known[1].grid != order.grid:
                repository = Repository.open(store, clock=self._clock)
                made = ShardExtraction(repository, order.grid, order.shard, self._advance)
                made.bandwidth = self.bandwidth
                known = self._extraction = url, made
            return {"round": known[1].run(order).to_json()}

        return extract

    def forget(self) -> None:
        """Lets go of what is known of rows."""
        self._extraction = None
