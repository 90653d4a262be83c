"""The frozen rows of one shard as data files of a version."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

from emberkeep.codecs import Codec
from emberkeep.repository import Draft
from emberkeep.repository.grid.bundles import SUFFIX as BUNDLE_SUFFIX
from emberkeep.repository.grid.bundles import BundleStream, streams
from emberkeep.repository.pieces import KIND, SUFFIX, Piece, pieces
from emberkeep.repository.writer import FileWriter
from emberkeep.rows.snapshot import Chunk, FrozenRows
from emberkeep.runtime.bandwidth import Bandwidth
from emberkeep.runtime.clock import Clock
from emberkeep.runtime.core_time import Budget, CoreTime, CountedPool
from emberkeep.runtime.crew import Crew
from emberkeep.runtime.memory import buffers_kept
from emberkeep.runtime.pool import Pool
from emberkeep.runtime.readahead import Ahead

# Of narrow rows; of others a chunk is bounded in bytes. Each takes hundreds of calls of Python.
_CHUNK_ROWS = 2**16
# Buffers that wait for the disk: two chunks, with what stands before each. Where training has all
# cores, threads wait for their turns, and with fewer buffers the disk waits, too.
_AHEAD = 4


def write_pieces(
    files: Draft | FileWriter, frozen: Sequence[FrozenRows], codecs: Mapping[str, Codec],
    pool: Pool, *, piece_nbytes: int, nice: int, shard: int, cancelled: threading.Event,
    bandwidth: Bandwidth, budget: Budget,
) -> None:  # fmt: skip
    """The frozen rows of one shard as pieces; copying and encoding run ahead of the upload."""
    chunks = _chunks(frozen, budget, cancelled)
    cut = pieces(chunks, codecs, pool, piece_nbytes=piece_nbytes, metadata={"shard": shard})
    _write(files, cut, SUFFIX, nice, cancelled, bandwidth, budget)


def write_held(
    files: FileWriter, frozen: Sequence[FrozenRows], codecs: Mapping[str, Codec], *, threads: int,
    nice: int, piece_nbytes: int, shard: int, cancelled: threading.Event,
    bandwidth: Bandwidth, background_share: float | None, clock: Clock, birth: int,
    grid: Sequence[str] | None,
) -> float:  # fmt: skip
    """`write_pieces` for a process that holds rows of another's run, or `write_bundles` if tables
    of a `grid` are given; the core-seconds that it took.

    In threads that yield: the one that calls is to load rows as fast as it can, and a thread that
    has yielded once cannot take that back.
    """
    cores = CoreTime()
    budget = Budget(background_share, cores, clock=clock)
    pool = CountedPool(threads, cores, nice=nice)

    def write() -> None:
        with cores.counting():
            if grid is None:
                write_pieces(
                    files, frozen, codecs, pool, piece_nbytes=piece_nbytes, nice=nice, shard=shard,
                    cancelled=cancelled, bandwidth=bandwidth, budget=budget,
                )  # fmt: skip
            else:
                write_bundles(
                    files, frozen, codecs, pool, birth=birth, tables=grid, file_nbytes=piece_nbytes,
                    nice=nice, shard=shard, cancelled=cancelled, bandwidth=bandwidth,
                    budget=budget,
                )  # fmt: skip

    with Crew(1, "emberkeep-write", nice=nice, clock=clock) as crew:
        crew.submit(write).result()
    return cores.seconds


def write_bundles(
    files: Draft | FileWriter, frozen: Sequence[FrozenRows], codecs: Mapping[str, Codec],
    pool: Pool, *, birth: int, tables: Sequence[str], file_nbytes: int, nice: int, shard: int,
    cancelled: threading.Event, bandwidth: Bandwidth, budget: Budget,
) -> None:  # fmt: skip
    """`write_pieces` for a grid, in its version number `birth`; `tables` are those of the
    repository, in its order."""
    chunks = _chunks(frozen, budget, cancelled)
    cut = streams(
        chunks, codecs, pool, birth=birth, tables=list(tables),
        file_nbytes=file_nbytes, metadata={"shard": shard},
    )  # fmt: skip
    _write(files, cut, BUNDLE_SUFFIX, nice, cancelled, bandwidth, budget)


def _write(
    files: Draft | FileWriter, cut: Iterable[Piece | BundleStream], suffix: str, nice: int,
    cancelled: threading.Event, bandwidth: Bandwidth, budget: Budget,
) -> None:  # fmt: skip
    with buffers_kept():
        for each in cut:
            with Ahead(budget.cores.iterating(each.stream()), nice, _AHEAD) as stream:
                paced = bandwidth.passing(budget.cores.noting(stream), cancelled)
                files.add(paced, kind=KIND, suffix=suffix, metadata=each.metadata)


def _chunks(
    frozen: Sequence[FrozenRows], budget: Budget, cancelled: threading.Event
) -> Iterator[Chunk]:
    """The rows, no faster than the budget allows, unless pushes wait for them to be taken."""
    for rows in frozen:
        yield from _paced(rows, budget, cancelled)


def _paced(rows: FrozenRows, budget: Budget, cancelled: threading.Event) -> Iterator[Chunk]:
    for chunk in rows.chunks(_CHUNK_ROWS, cancelled):
        yield chunk
        del chunk
        budget.rest(lambda: rows.pressed, cancelled)
