"""From a repository into memory: what a version is loaded into, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from emberkeep.errors import StateError
from emberkeep.pool import Pool
from emberkeep.repository import Manifest, Repository, VersionId
from emberkeep.repository.ahead import ahead_of
from emberkeep.repository.documents import Json
from emberkeep.repository.pieces import KIND, read_chunks
from emberkeep.snapshot import Chunk, FrozenShards

I64 = npt.NDArray[np.int64]

DENSE = "dense"


class Subject(Protocol):
    """What is protected: tables whose rows can be frozen, written and replaced."""

    def schema(self) -> Json:
        """Tables, planes and where untrained rows come from; a restore must agree with it."""
        ...

    def track(self) -> None:
        """Starts to follow changes."""
        ...

    def freeze(self, since: str | None, buffer_nbytes: int) -> FrozenShards:
        """Freezes all rows at one instant; snapshots by shard. Returns at once."""
        ...

    def table_state(self) -> Json:
        """What tables know beside their rows, such as their step."""
        ...

    def load_table_state(self, state: Json) -> None: ...

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A version that was brought back."""

    manifest: Manifest
    dense: bytes | None
    lost: tuple[VersionId, ...] = ()


Fits = Callable[[Restored], object]


def load(
    repository: Repository,
    version: VersionId,
    subject: Subject,
    pool: Pool,
    fits: Fits | None = None,
) -> Restored:
    """Replaces every row of the subject by those of a version."""
    chain = repository.chain(version)
    manifest = chain[-1]
    check_schema(repository.schema, subject.schema())
    files = manifest.of_kind(DENSE)
    restored = Restored(manifest=manifest, dense=repository.read(files[0]) if files else None)
    if fits is not None:
        fits(restored)
    subject.clear()
    for earlier in chain:
        for chunk in ahead_of(rows_of(repository, earlier, pool)):
            if chunk.planes is None:
                subject.delete(chunk.table, chunk.ids)
            else:
                subject.install(chunk.table, chunk.ids, chunk.planes)
        if earlier.layout["kind"] == "full":
            subject.forget_changes(keep_since_baseline=False)
    subject.forget_changes(keep_since_baseline=True)
    subject.load_table_state(manifest.layout["tables"])
    return restored


def shortened(differences: Sequence[str], most: int = 6) -> str:
    """Differences for one line: the first ones, and how many more there are."""
    more = len(differences) - most
    return "; ".join([*differences[:most], *([f"and {more} more"] if more > 0 else [])])


def rows_of(repository: Repository, manifest: Manifest, pool: Pool) -> Iterator[Chunk]:
    """The rows that one version wrote itself, file by file."""
    for file in manifest.of_kind(KIND):
        yield from read_chunks(file.name, repository.stream(file), pool)


def check_schema(saved: Json, present: Json) -> None:
    """Refuses to mix runs: names every table and plane that differs."""
    wrong = []
    for name in sorted({*saved["tables"], *present["tables"]}):
        was, now = saved["tables"].get(name), present["tables"].get(name)
        if was is None:
            wrong.append(f"table {name!r} is not in the repository")
        elif now is None:
            wrong.append(f"table {name!r} of the repository is not in the model")
        else:
            wrong.extend(
                f"table {name!r}: {key} was {was.get(key)}, is {now.get(key)}"
                for key in sorted({*was, *now})
                if was.get(key) != now.get(key)
            )
    if wrong:
        raise StateError(
            "the model does not fit the repository: "
            + shortened(wrong)
            + "; build the model as it was saved, or use another repository"
        )
