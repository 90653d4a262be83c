"""What a version is made from and loaded into."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt

from emberkeep._types import I64, Json
from emberkeep.codecs import Codec
from emberkeep.repository import Draft, Manifest, Repository
from emberkeep.repository.grid.shard_extraction import RoundOrder, ShardRound
from emberkeep.rows.priority import Priority
from emberkeep.rows.snapshot import Cut, FrozenRows
from emberkeep.runtime.memory import Values

DENSE = "dense"


class Target(Protocol):
    """Rows that a version can be loaded into."""

    def load_table_state(self, state: Json) -> object: ...

    def clear(self) -> None:
        """Takes every row back to its initial state."""
        ...

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None: ...

    def delete(self, table: str, ids: I64) -> int: ...

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        """Nothing has changed since the version that was just loaded.

        With `keep_since_baseline` what changed since the last call still counts as changed since
        the baseline.
        """
        ...


class Subject(Target, Protocol):
    """What is protected: tables whose rows can be frozen, written and replaced."""

    def schema(self) -> Json:
        """Tables, planes and where untrained rows come from; a restore must agree with it."""
        ...

    def track(self, priority: Priority | None = None) -> None:
        """Starts to follow changes, and if asked to which rows matter most."""
        ...

    def freeze(self, since: str | None, buffer_nbytes: int) -> Cut[Sequence[FrozenRows]]:
        """Freezes all rows at one instant; snapshots by shard, with what tables know beside their
        rows, such as their step, of the same instant. Returns at once."""
        ...

    def forgot_changes(self) -> bool:
        """Whether some changes have been forgotten since the last call: rows came back, but not
        who had left. No increment can be trusted then, and the next version is a baseline."""
        ...


@runtime_checkable
class LimitsRows(Protocol):
    """A target with tables that can be full."""

    def check_room(self, state: Json) -> None:
        """Raises `TableFullError` if rows of a version, by the state of its tables, do not fit."""
        ...


@runtime_checkable
class NoticesEdits(Protocol):
    """Rows that others could change past those who track it."""

    def check_edits(self) -> None:
        """Raises `StateError` if that happened since they were frozen."""
        ...


@runtime_checkable
class LoadsItself(Protocol):
    """A subject whose rows are in other processes: they read the version themselves."""

    def reaches(self, url: str) -> bool:
        """Whether they can open that store; otherwise the rows are read here and sent."""
        ...

    def check_repository(self, url: str, repository: str | None) -> None:
        """Raises `ConfigError` unless each of them finds the repository of that id there, or
        none."""
        ...

    def load_version(
        self, repository: Repository, chain: Sequence[Manifest], names: Mapping[str, str]
    ) -> None:
        """As `load` and `load_shard` do. `names` are those that its tables have in versions."""
        ...


@runtime_checkable
class InstallsScattered(Protocol):
    """A target in this process, which takes rows from where they stand in what was read."""

    def install_scattered(
        self,
        tables: Sequence[str],
        offsets: Sequence[int],
        ids: I64,
        planes: Mapping[str, Values],
        *,
        busy: int = 0,
    ) -> None:
        """Rows of several tables: those of `tables[i]` at offsets[i]:offsets[i + 1]. So many
        threads are `busy` beside."""
        ...


@runtime_checkable
class WritesItself(Protocol):
    """Frozen rows in another process, which writes them to the store itself."""

    core_seconds: float
    """What that has taken there, once it has ended."""

    def reaches(self, url: str) -> bool:
        """Whether that process can open the store; otherwise the rows are fetched and written."""
        ...

    def write(
        self, draft: Draft, codecs: Mapping[str, Codec], *, threads: int, nice: int,
        piece_nbytes: int, cancelled: threading.Event, most_mb_per_second: float | None,
        background_share: float | None,
        grid: Sequence[str] | None,
    ) -> None:  # fmt: skip
        """Returns when the rows are in the store, and their files part of the draft; as pieces of a
        `grid` if the tables of the repository are given."""
        ...

    def took_place(self) -> None:
        """The version of these rows is there: learned after it was reported as failed."""
        ...


@runtime_checkable
class ExtractsItself(Protocol):
    """A subject whose shards are in other processes, which rearrange their parts of a grid."""

    @property
    def shard_count(self) -> int: ...

    def reaches(self, url: str) -> bool: ...

    def extract(
        self, url: str, order: RoundOrder, *, most_mb_per_second: float | None
    ) -> ShardRound:
        """Has the holder of the order's shard prepare a round."""
        ...
