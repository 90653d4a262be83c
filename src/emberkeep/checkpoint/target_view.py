"""The one way to see targets under the names of versions, some of their tables or rows alone.

Versions are loaded into a `TargetView` and nothing else, whatever holds the rows. So a capability
of a target (`InstallsScattered`, `LoadsItself`) is looked for on the target itself, and no wrapper
can forget to pass it on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np

from emberkeep._types import I64, Json
from emberkeep.checkpoint.targets import (
    ExtractsItself,
    InstallsScattered,
    LimitsRows,
    Subject,
    Target,
)
from emberkeep.cluster.base import Cluster
from emberkeep.cluster.table_states import of_shard
from emberkeep.repository.grid.extraction import Remote
from emberkeep.runtime.bandwidth import Bandwidth
from emberkeep.runtime.memory import Values


@dataclass(frozen=True, slots=True, eq=False)
class ViewPart:
    """One target of a view; tables are called by their names in versions."""

    target: Target
    names: Mapping[str, str]
    """The name in versions → the target's own."""
    own_rows: Callable[[str, I64], I64] | None = None
    """Where in ids of a table those stand that are the target's: others are passed over."""
    own_state: Callable[[Json], Json] | None = None
    """The target's part of the state of tables."""

    def install(self, table: str, ids: I64, planes: Mapping[str, Values]) -> None:
        if self.own_rows is not None:
            own = self.own_rows(self.names[table], ids)
            if own.size < ids.size:
                ids, planes = ids[own], {name: values[own] for name, values in planes.items()}
        arrays = {name: np.asarray(values) for name, values in planes.items()}
        self.target.install(self.names[table], ids, arrays)

    def install_scattered(
        self, tables: Sequence[str], offsets: Sequence[int], ids: I64,
        planes: Mapping[str, Values], *, busy: int,
    ) -> None:  # fmt: skip
        ranges = list(zip(tables, offsets, offsets[1:], strict=False))
        if not isinstance(self.target, InstallsScattered):
            for table, start, stop in ranges:
                some = {name: values[start:stop] for name, values in planes.items()}
                self.install(table, ids[start:stop], some)
            return
        if self.own_rows is not None:
            own_T = [
                start + self.own_rows(self.names[t], ids[start:end]) for t, start, end in ranges
            ]
            if sum(own.size for own in own_T) < offsets[-1] - offsets[0]:
                offsets = np.cumsum([0, *(own.size for own in own_T)]).tolist()
                own = np.concatenate(own_T)
                ids, planes = ids[own], {name: values[own] for name, values in planes.items()}
        own_names = [self.names[table] for table in tables]
        self.target.install_scattered(own_names, offsets, ids, planes, busy=busy)

    def delete(self, table: str, ids: I64) -> int:
        if self.own_rows is not None:
            ids = ids[self.own_rows(self.names[table], ids)]
        return self.target.delete(self.names[table], ids)

    def check_room(self, state: Json) -> None:
        if isinstance(self.target, LimitsRows):
            self.target.check_room(self._known(state))

    def load_table_state(self, state: Json) -> None:
        known = self._known(state)
        self.target.load_table_state(known if self.own_state is None else self.own_state(known))

    def _known(self, state: Json) -> Json:
        return {own: state[name] for name, own in self.names.items() if name in state}


class TargetView:
    """Targets as one, which takes rows by the names of versions; tables that no target has are
    passed over."""

    def __init__(self, parts: Sequence[ViewPart]) -> None:
        self.parts = tuple(parts)
        self._homes = {name: part for part in self.parts for name in part.names}

    def clear(self) -> None:
        for part in self.parts:
            part.target.clear()

    def install(self, table: str, ids: I64, planes: Mapping[str, Values]) -> None:
        if table in self._homes:
            self._homes[table].install(table, ids, planes)

    def install_scattered(
        self, tables: Sequence[str], offsets: Sequence[int], ids: I64,
        planes: Mapping[str, Values], *, busy: int = 0,
    ) -> None:  # fmt: skip
        """As `InstallsScattered`; a target that is none is given the rows of each table together.

        Tables of one target that follow each other reach it at once.
        """
        first = 0
        for part, run in groupby(tables, self._homes.get):
            some = list(run)
            last = first + len(some)
            if part is not None:
                part.install_scattered(some, offsets[first : last + 1], ids, planes, busy=busy)
            first = last

    def delete(self, table: str, ids: I64) -> int:
        return self._homes[table].delete(table, ids) if table in self._homes else 0

    def load_table_state(self, state: Json) -> None:
        for part in self.parts:
            part.load_table_state(state)

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        for part in self.parts:
            part.target.forget_changes(keep_since_baseline=keep_since_baseline)


def view_of(subject: Subject) -> TargetView:
    """A subject under its own names, unless it is a view already."""
    if isinstance(subject, TargetView):
        return subject
    return TargetView([ViewPart(subject, {name: name for name in subject.schema()["tables"]})])


def shard_view(cluster: Cluster, shard: int, names: Mapping[str, str] | None = None) -> TargetView:
    """One shard of a cluster alone, as it is now: rows of other shards are passed over."""
    part = ViewPart(
        cluster.handles[shard],
        {table.name: table.name for table in cluster.tables} if names is None else names,
        own_rows=lambda table, ids: cluster.positions(table, ids)[shard],
        own_state=partial(of_shard, shard=shard, count=cluster.shard_count),
    )
    return TargetView([part])


def extractor_of(subject: Subject, url: str, bandwidth: Bandwidth, shard: int) -> Remote | None:
    """Who prepares rounds of extraction in the part of a shard, if it is not this process; with
    one of the parts of `bandwidth`, which is that of its saves, too."""
    for part in view_of(subject).parts:
        target = part.target
        if not isinstance(target, ExtractsItself) or not target.reaches(url):
            continue
        if shard < target.shard_count:
            return partial(target.extract, url, most_mb_per_second=bandwidth.share())
    return None
