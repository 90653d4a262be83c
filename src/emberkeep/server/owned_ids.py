"""Which ids are a shard's own: what clients send, and versions hold, is held against it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emberkeep._types import I64, RowIds
from emberkeep.cluster.shard import Shard
from emberkeep.errors import ProtocolError
from emberkeep.kernels import hash_index
from emberkeep.rows.lookup import unique_ids
from emberkeep.runtime.pool import Pool


class OwnedIds:
    """The ids of one of `shards` shards: an id of another would be taken for a row of this one."""

    def __init__(self, shard: Shard, shards: int) -> None:
        self.index = shard.index
        self.shards = shards
        self._dynamic_G = [np.array([shard.tables[t].dynamic for t in g]) for g in shard.groups]
        self._dynamic = {table.name: np.array([table.dynamic]) for table in shard.tables}

    def of(self, table: str, ids: I64) -> I64:
        """The positions of the ids that this shard owns."""
        dynamic = self._dynamic.get(table)
        if dynamic is None:
            raise ProtocolError(f"there is no table {table!r}"[:200])
        counts_ST = np.zeros((self.shards, 1), np.int64)
        order = np.empty(ids.size, np.int64)
        hash_index.route(ids, np.array([0, ids.size]), dynamic, self.shards, counts_ST, order)
        ends = np.cumsum(counts_ST[:, 0])
        return order[ends[self.index] - counts_ST[self.index, 0] : ends[self.index]]

    def check(self, table: str, ids: I64) -> None:
        """Refuses rows that are not this shard's."""
        if self.of(table, ids).size != ids.size:
            raise self._not_owned()

    def check_wanted(self, wanted: Sequence[RowIds]) -> None:
        """Refuses a pull or a push of rows that are not this shard's."""
        for ids, dynamic_T in zip(wanted, self._dynamic_G, strict=True):
            counts_ST = np.zeros((self.shards, dynamic_T.size), np.int64)
            order = np.empty(ids.ids.size, np.int64)
            hash_index.route(ids.ids, ids.offsets, dynamic_T, self.shards, counts_ST, order)
            if counts_ST[self.index].sum() != ids.ids.size:
                raise self._not_owned()

    def _not_owned(self) -> ProtocolError:
        return ProtocolError(
            f"ids of other shards were sent to shard {self.index} of {self.shards}"
        )


def check_unique(wanted: Sequence[RowIds], pool: Pool) -> None:
    """Refuses a push that names a row twice."""
    for ids in wanted:
        if unique_ids(ids.ids, ids.offsets, pool)[0].ids.size != ids.ids.size:
            raise ProtocolError("a push names every row once")
