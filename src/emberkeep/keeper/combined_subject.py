"""Several subjects as one: torch's tables and the clusters behind emberkeep's own modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from emberkeep._types import Json
from emberkeep.checkpoint.recovery import Home
from emberkeep.checkpoint.target_view import TargetView, ViewPart
from emberkeep.checkpoint.targets import Subject
from emberkeep.cluster.base import Cluster
from emberkeep.rows.priority import Priority
from emberkeep.rows.snapshot import Cut, FrozenRows, closed_if_raised


class CombinedSubject(TargetView):
    """Subjects that are cut at one instant.

    A table keeps its own name while that is unique; where several modules have a table of one
    name, those of emberkeep's modules get the path of their module before it.
    """

    def __init__(self, subjects: Sequence[tuple[str, Subject]]) -> None:
        self._subjects = [subject for _, subject in subjects]
        own = [list(subject.schema()["tables"]) for subject in self._subjects]
        count = Counter(name for names in own for name in names)
        # Of each subject: its own name of a table → the name in versions.
        self._names = [
            {name: f"{path}.{name}" if path and count[name] > 1 else name for name in names}
            for (path, _), names in zip(subjects, own, strict=True)
        ]
        super().__init__(
            [
                ViewPart(subject, {saved: name for name, saved in names.items()})
                for subject, names in zip(self._subjects, self._names, strict=True)
            ]
        )

    def homes(self) -> list[Home]:
        """The clusters among the subjects, with the names that their tables have in versions."""
        return [
            Home(part.target, part.names) for part in self.parts if isinstance(part.target, Cluster)
        ]

    def schema(self) -> Json:
        schemas = [subject.schema() for subject in self._subjects]
        return {
            "shards": max((schema["shards"] for schema in schemas), default=1),
            "tables": {
                names[name]: table
                for schema, names in zip(schemas, self._names, strict=True)
                for name, table in schema["tables"].items()
            },
        }

    def track(self, priority: Priority | None = None) -> None:
        for subject in self._subjects:
            subject.track(priority)

    def freeze(self, since: str | None, buffer_nbytes: int) -> Cut[Sequence[FrozenRows]]:
        share = buffer_nbytes // max(1, len(self._subjects))
        cuts: list[Cut[Sequence[FrozenRows]]] = []
        tables: Json = {}
        with closed_if_raised() as taken:
            for subject, names in zip(self._subjects, self._names, strict=True):
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

    def forgot_changes(self) -> bool:
        return sum(subject.forgot_changes() for subject in self._subjects) > 0  # each is asked
