"""Pulls and pushes as requests to shards: what each of them is sent, and how much at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from emberkeep._types import F32, I64, U8, RowIds
from emberkeep.cluster.base import Routed
from emberkeep.cluster.shard_handle import ShardHandle
from emberkeep.errors import ConfigError
from emberkeep.kernels import batch_rows as row_kernels
from emberkeep.rows.push import not_finite, outside
from emberkeep.tables import Table
from emberkeep.wire.protocol import APPLY, MAX_MESSAGE_NBYTES, MAX_ROWS, Request, pack_request

PULL_NBYTES = 2**28
"""What one shard is asked for at a time: rows and their ids."""
_SPARE_NBYTES = 2**16  # for the header, and the offsets of many tables


def packed(request: Request, routed: Routed, shards: Sequence[ShardHandle]) -> list[U8]:
    """A request for each of these shards, with its part of the rows."""
    blobs = []
    for shard in shards:
        parts = [parts_S[shard.index] for parts_S in routed]
        wanted = [] if request.kind == APPLY else [ids for ids, _ in parts]
        own = replace(request, epoch=shard.epoch, wanted=wanted)
        blobs.append(pack_request(own, [positions for _, positions in parts]))
    return blobs


def pull_parts(routed: Routed, dims_G: Sequence[int]) -> list[Routed]:
    """The same rows, no more of them at a time than a shard is asked for."""
    count = 1
    for s in range(len(routed[0]) if routed else 0):
        count = max(count, -(-_nbytes(routed, dims_G, s) // PULL_NBYTES))
        count = max(count, *(-(-parts_S[s][1].size // MAX_ROWS) for parts_S in routed))
    if count == 1:
        return [routed]
    return [
        [[_cut(part, index, count) for part in parts_S] for parts_S in routed]
        for index in range(count)
    ]


def check_push(routed: Routed, dims_G: Sequence[int]) -> None:
    """Refuses a push that cannot be sent to a shard: it is one message, so that it is applied
    whole or not at all."""
    for s in range(len(routed[0]) if routed else 0):
        nbytes = _nbytes(routed, dims_G, s) + _SPARE_NBYTES
        rows_G = [parts_S[s][1].size for parts_S in routed]
        if nbytes > MAX_MESSAGE_NBYTES or max(rows_G) > MAX_ROWS:
            raise ConfigError(
                f"a push of {sum(rows_G)} rows ({nbytes / 2**30:.2f} GiB) to shard {s} is more "
                f"than one message holds: {MAX_MESSAGE_NBYTES / 2**30:.2f} GiB, and {MAX_ROWS} "
                "rows of tables of one width; no row was changed: use smaller batches, or more "
                "shards"
            )


def check_rows(
    tables_G: Sequence[Sequence[Table]], limits_G: Sequence[I64], wanted: Sequence[RowIds],
    grads: Sequence[F32], *, finite: bool,
) -> None:  # fmt: skip
    """Refuses what one shard would refuse after others have applied it."""
    for g, ids in enumerate(wanted):
        limits_T = limits_G[g]
        scratch = np.empty(ids.ids.size, np.int64)
        bases_T = np.zeros(limits_T.size, np.int64)
        bad = row_kernels.fixed_rows(ids.ids, ids.offsets, limits_T, bases_T, 1, scratch)
        if bad >= 0:
            raise outside(tables_G[g][ids.table_of(bad)], int(ids.ids[bad]))
        if not finite:
            bad = row_kernels.first_nonfinite(0, grads[g].shape[0], grads[g])
            if bad >= 0:
                raise not_finite(tables_G[g][ids.table_of(bad)], int(ids.ids[bad]))


def rows_nbytes(routed: Routed, dims_G: Sequence[int]) -> int:
    """What ids and rows of all shards take: one is heard when all were sent theirs."""
    return sum(_nbytes(routed, dims_G, s) for s in range(len(routed[0]) if routed else 0))


def _nbytes(routed: Routed, dims_G: Sequence[int], shard: int) -> int:
    """What ids of a shard and a row of floats for each of them take."""
    return sum(
        parts_S[shard][1].size * (8 + 4 * dim) for parts_S, dim in zip(routed, dims_G, strict=True)
    )


def _cut(part: tuple[RowIds, I64], index: int, count: int) -> tuple[RowIds, I64]:
    """One of so many parts of a shard's rows, about as large as the others."""
    ids, positions = part
    first, after = positions.size * index // count, positions.size * (index + 1) // count
    offsets = np.clip(ids.offsets, first, after) - first
    return RowIds(ids.ids[first:after], offsets), positions[first:after]
