"""From a repository into memory: what a version is loaded into, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

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


class Target(Protocol):
    """What rows are loaded into: a subject, or a part of one."""

    def load_table_state(self, state: Json) -> None: ...

    def clear(self) -> None: ...

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None: ...

    def delete(self, table: str, ids: I64) -> int: ...

    def forget_changes(self, *, keep_since_baseline: bool) -> None: ...


@runtime_checkable
class LoadsItself(Protocol):
    """A subject whose rows are in other processes: they read the version themselves."""

    def reaches(self, url: str) -> bool:
        """Whether they can open that store; otherwise the rows are read here and sent."""
        ...

    def load_version(self, repository: Repository, chain: Sequence[Manifest], pool: Pool) -> None:
        """As `load_rows` does."""
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
    if isinstance(subject, LoadsItself) and subject.reaches(repository.store.url):
        subject.load_version(repository, chain, pool)
    else:
        load_rows(repository, chain, subject, pool)
    return restored


def load_rows(
    repository: Repository,
    chain: Sequence[Manifest],
    target: Target,
    pool: Pool,
    *,
    shard: tuple[int, int] | None = None,
) -> None:
    """Replaces the rows of the target by those of the last version of the chain.

    With `shard`, (index, count), files of other shards are not read where the versions were saved
    by so many; the target passes over what is not its own.
    """
    target.clear()
    for earlier in chain:
        for chunk in ahead_of(rows_of(repository, earlier, pool, shard=shard)):
            if chunk.planes is None:
                target.delete(chunk.table, chunk.ids)
            else:
                target.install(chunk.table, chunk.ids, chunk.planes)
        if earlier.layout["kind"] == "full":
            target.forget_changes(keep_since_baseline=False)
    target.forget_changes(keep_since_baseline=True)
    target.load_table_state(chain[-1].layout["tables"])


def shortened(differences: Sequence[str], most: int = 6) -> str:
    """Differences for one line: the first ones, and how many more there are."""
    more = len(differences) - most
    return "; ".join([*differences[:most], *([f"and {more} more"] if more > 0 else [])])


def rows_of(
    repository: Repository,
    manifest: Manifest,
    pool: Pool,
    *,
    shard: tuple[int, int] | None = None,
) -> Iterator[Chunk]:
    """The rows that one version wrote itself, file by file; see `load_rows` for `shard`."""
    for file in manifest.of_kind(KIND):
        apart = shard is not None and manifest.layout["shards"] == shard[1]
        if not apart or (shard is not None and file.metadata["shard"] == shard[0]):
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
