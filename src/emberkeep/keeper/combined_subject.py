"""Several subjects as one: torch's tables and the clusters behind emberkeep's own modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy.typing as npt

from emberkeep._types import I64
from emberkeep.checkpoint.recovery import Home
from emberkeep.checkpoint.restore import load_rows
from emberkeep.checkpoint.targets import LoadsItself, Subject
from emberkeep.cluster.base import Cluster
from emberkeep.repository import Manifest, Repository
from emberkeep.rows.priority import Priority
from emberkeep.rows.snapshot import Cut, FrozenRows, closed_if_raised
from emberkeep.runtime.pool import Pool


class _Here:
    """Some of several subjects as the target of a load; rows of others are passed over."""

    def __init__(self, parts: Sequence[tuple[Subject, Mapping[str, str]]]) -> None:
        self._parts = parts
        self._homes = {
            told: (subject, name) for subject, names in parts for name, told in names.items()
        }

    def clear(self) -> None:
        for subject, _ in self._parts:
            subject.clear()

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        if table in self._homes:
            subject, name = self._homes[table]
            subject.install(name, ids, planes)

    def delete(self, table: str, ids: I64) -> int:
        if table not in self._homes:
            return 0
        subject, name = self._homes[table]
        return subject.delete(name, ids)

    def load_table_state(self, state: dict[str, Any]) -> None:
        for subject, names in self._parts:
            subject.load_table_state(
                {name: state[told] for name, told in names.items() if told in state}
            )

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        for subject, _ in self._parts:
            subject.forget_changes(keep_since_baseline=keep_since_baseline)


class CombinedSubject:
    """Subjects that are cut at one instant.

    A table keeps its own name while that is unique; where several modules have a table of one
    name, those of emberkeep's modules get the path of their module before it.
    """

    def __init__(self, parts: Sequence[tuple[str, Subject]]) -> None:
        self._parts = [subject for _, subject in parts]
        own = [list(subject.schema()["tables"]) for subject in self._parts]
        count = Counter(name for names in own for name in names)
        self._names = [
            {name: f"{path}.{name}" if path and count[name] > 1 else name for name in names}
            for (path, _), names in zip(parts, own, strict=True)
        ]
        self._homes = {
            told: (subject, name)
            for subject, names in zip(self._parts, self._names, strict=True)
            for name, told in names.items()
        }

    def homes(self) -> list[Home]:
        """The clusters among the parts, with the names that their tables have here."""
        return [
            Home(subject, {told: name for name, told in names.items()})
            for subject, names in zip(self._parts, self._names, strict=True)
            if isinstance(subject, Cluster)
        ]

    def schema(self) -> dict[str, Any]:
        schemas = [subject.schema() for subject in self._parts]
        return {
            "shards": max((schema["shards"] for schema in schemas), default=1),
            "tables": {
                names[name]: table
                for schema, names in zip(schemas, self._names, strict=True)
                for name, table in schema["tables"].items()
            },
        }

    def track(self, priority: Priority | None = None) -> None:
        for subject in self._parts:
            subject.track(priority)

    def freeze(self, since: str | None, buffer_nbytes: int) -> Cut[Sequence[FrozenRows]]:
        share = buffer_nbytes // max(1, len(self._parts))
        cuts: list[Cut[Sequence[FrozenRows]]] = []
        tables: dict[str, Any] = {}
        with closed_if_raised() as taken:
            for subject, names in zip(self._parts, self._names, strict=True):
                cut = subject.freeze(since, share)
                cuts.append(cut)
                taken.extend(snapshot for shard in cut for snapshot in shard)
                for snapshot in (snapshot for shard in cut for snapshot in shard):
                    snapshot.rename(names)
                tables |= {names[name]: state for name, state in cut.tables.items()}
        return Cut(
            (
                [snapshot for shard in shards for snapshot in shard]
                for shards in zip_longest(*cuts, fillvalue=[])
            ),
            tables,
        )

    def load_table_state(self, state: dict[str, Any]) -> None:
        for subject, names in zip(self._parts, self._names, strict=True):
            mine = {name: state[told] for name, told in names.items() if told in state}
            subject.load_table_state(mine)

    def reaches(self, url: str) -> bool:
        """Whether the rows of some part are elsewhere, with those who can read the store."""
        return any(isinstance(part, LoadsItself) and part.reaches(url) for part in self._parts)

    def load_version(
        self,
        repository: Repository,
        chain: Sequence[Manifest],
        pool: Pool,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """What is elsewhere loads itself; the rest is loaded here."""
        here: list[tuple[Subject, Mapping[str, str]]] = []
        for part, told in zip(self._parts, self._names, strict=True):
            if isinstance(part, LoadsItself) and part.reaches(repository.store.url):
                part.load_version(repository, chain, pool, told)
            elif part.schema()["tables"]:
                here.append((part, told))
        if here:
            load_rows(repository, chain, _Here(here), pool)

    def clear(self) -> None:
        for subject in self._parts:
            subject.clear()

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        subject, name = self._homes[table]
        subject.install(name, ids, planes)

    def delete(self, table: str, ids: I64) -> int:
        subject, name = self._homes[table]
        return subject.delete(name, ids)

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        for subject in self._parts:
            subject.forget_changes(keep_since_baseline=keep_since_baseline)

    def forgot_changes(self) -> bool:
        return sum(subject.forgot_changes() for subject in self._parts) > 0  # each is asked
