"""The frozen rows of one shard as data files of a version."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from emberkeep.codecs import Codec
from emberkeep.repository import Draft
from emberkeep.repository.grid.bundles import SUFFIX as BUNDLE_SUFFIX
from emberkeep.repository.grid.bundles import streams
from emberkeep.repository.pieces import KIND, SUFFIX, pieces
from emberkeep.repository.writer import FileWriter
from emberkeep.rows.snapshot import FrozenRows
from emberkeep.runtime.bandwidth import Bandwidth
from emberkeep.runtime.core_time import CoreTime
from emberkeep.runtime.pool import Pool
from emberkeep.runtime.readahead import Ahead

_CHUNK_ROWS = 32768


def write_pieces(
    files: Draft | FileWriter, frozen: Sequence[FrozenRows], codecs: Mapping[str, Codec],
    pool: Pool, *, piece_nbytes: int, nice: int, shard: int, cancelled: threading.Event,
    bandwidth: Bandwidth, cores: CoreTime,
) -> None:  # fmt: skip
    """The frozen rows of one shard as pieces; copying and encoding run ahead of the upload."""
    chunks = (chunk for rows in frozen for chunk in rows.chunks(_CHUNK_ROWS, cancelled))
    for piece in pieces(chunks, codecs, pool, piece_nbytes=piece_nbytes, metadata={"shard": shard}):
        with Ahead(cores.iterating(piece.stream()), nice) as stream:
            paced = bandwidth.passing(stream, cancelled)
            files.add(paced, kind=KIND, suffix=SUFFIX, metadata=piece.metadata)


def write_bundles(
    files: Draft | FileWriter, frozen: Sequence[FrozenRows], codecs: Mapping[str, Codec],
    pool: Pool, *, birth: int, tables: Sequence[str], file_nbytes: int, nice: int, shard: int,
    cancelled: threading.Event, bandwidth: Bandwidth, cores: CoreTime,
) -> None:  # fmt: skip
    """`write_pieces` for a grid, in its version number `birth`; `tables` are those of the
    repository, in its order."""
    chunks = (chunk for rows in frozen for chunk in rows.chunks(_CHUNK_ROWS, cancelled))
    for bundle in streams(
        chunks, codecs, pool, birth=birth, tables=list(tables),
        file_nbytes=file_nbytes, metadata={"shard": shard},
    ):  # fmt: skip
        with Ahead(cores.iterating(bundle.stream()), nice) as stream:
            paced = bandwidth.passing(stream, cancelled)
            files.add(paced, kind=KIND, suffix=BUNDLE_SUFFIX, metadata=bundle.metadata)
