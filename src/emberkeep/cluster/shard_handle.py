"""What a cluster asks of one shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy.typing as npt

from emberkeep._types import I64, Bools, Json, Planes
from emberkeep.cluster.shard import State
from emberkeep.cluster.table_states import NO_EDIT, Edit
from emberkeep.rows.priority import Priority
from emberkeep.rows.row_digest import RowDigest
from emberkeep.rows.snapshot import Cut, FrozenRows


class ShardHandle(Protocol):
    """What a cluster asks of one shard, in process or over a wire; pulls and pushes go to all
    shards together, each kind of cluster in its own way.

    While its `state` is "recovering" a shard takes what a recovery brings (`install`, `delete`,
    `clear`, `load_table_state`, `forget_changes`, `track`) and refuses everything else; a lost one
    refuses everything. Both refuse with `ShardLostError`, and nothing has changed then.
    """

    @property
    def index(self) -> int: ...

    @property
    def epoch(self) -> int:
        """The life that this handle speaks to: a replacement has a later one."""
        ...

    @property
    def state(self) -> State: ...

    def read(self, table: str, ids: I64) -> Planes: ...

    def read_all(self, table: str) -> tuple[I64, Planes]: ...

    def touched_ids(self, table: str) -> I64: ...

    def digest(self, table: str) -> RowDigest: ...

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None: ...

    def check_upsert(self, table: str, ids: I64) -> Bools: ...

    def upsert(
        self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]], edit: Edit = NO_EDIT
    ) -> None: ...

    def delete(self, table: str, ids: I64, edit: Edit = NO_EDIT) -> int: ...

    def table_state(self) -> Json: ...

    def load_table_state(self, state: Json) -> Json:
        """Goes on from a state; returns how many rows the dynamic tables among them hold."""
        ...

    def clear(self) -> None: ...

    def track(self, priority: Priority | None = None) -> None: ...

    def freeze(self, since: str | None, buffer: int) -> Cut[FrozenRows]: ...

    def forget_changes(self, *, keep_since_baseline: bool) -> None: ...

    def serve(self) -> None: ...
