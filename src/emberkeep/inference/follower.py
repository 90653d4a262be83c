"""A read-only copy of the newest version, for serving: from storage alone, one refresh at a time.

A refresh reads what is new, builds the next state beside the one that readers see, and publishes it
by replacing one reference. Weights live in *slots*: a row that changed gets a new slot, and a slot
that a reader may still look at is never written. So lookups take no lock and never wait, each sees
one version whole, and a refresh that fails leaves no trace.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep._types import F32, I64, U64, Array, Json
from emberkeep.blobs import BlobStore, open_store
from emberkeep.checkpoint.contents import Hold, dense_arrays, dense_bytes, merged_rows
from emberkeep.errors import (
    ChangedError,
    ConfigError,
    DamageError,
    EmberkeepError,
    IdError,
    NoVersionError,
    StateError,
)
from emberkeep.kernels import hash_index, initial_values
from emberkeep.repository import Manifest, Repository, VersionId
from emberkeep.repository.grid.catalog import grid_of
from emberkeep.repository.manifest import needed_by
from emberkeep.repository.pieces import KIND, counts_of
from emberkeep.rows.snapshot import Chunk
from emberkeep.runtime import pool as pools
from emberkeep.runtime.memory import lazy_zeros
from emberkeep.tables import Normal, origin_from

_ATTEMPTS = 5
# Where a keeper puts what a model has beside rows.
_MODEL = "dense/model/"
_LEAST_SLOTS = 4096
_LOW = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Where rows that are not stored come from."""

    key: np.uint64
    kind: int
    a: np.float32
    b: np.float32

    @classmethod
    def of(cls, table: Json) -> _Origin | None:
        """None for tables of which every row is stored."""
        described = table.get("origin")
        if not isinstance(described, dict):
            return None
        try:
            key, init = origin_from(described)
            if not 0 <= key < 2**64 or max(map(abs, astuple(init))) > np.finfo(np.float32).max:
                raise ConfigError(f"{init} with the key {key} is none")
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            raise DamageError(
                f"repository.json is damaged: the schema names no origin of rows: {error}",
                name="repository.json",
            ) from error
        if isinstance(init, Normal):
            kind, a, b = initial_values.NORMAL, init.mean, init.std
        else:
            kind, a, b = initial_values.UNIFORM, init.low, init.high
        return cls(key=np.uint64(key), kind=kind, a=np.float32(a), b=np.float32(b))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """One table as readers see it: an index of its own into slots that stay as they are."""

    name: str
    limit: int | None
    origin: _Origin | None
    entries: U64
    count: int
    ids: I64
    weight_SD: F32

    def find(self, wanted: I64) -> tuple[I64, int]:
        """The slot of each id, -1 where it has none, and how many have none."""
        slots = np.empty(wanted.size, np.int64)
        return slots, int(hash_index.index_find(self.entries, self.ids, wanted, 0, slots))

    def slots(self) -> I64:
        """Every slot that is in use."""
        used = self.entries[self.entries != 0] & _LOW
        slots: I64 = used.astype(np.int64) - 1
        return slots

    def lookup(self, ids: npt.ArrayLike) -> F32:
        given = np.asarray(ids)
        if given.size and given.dtype.kind not in "iu":
            raise ConfigError(f"ids of table {self.name!r} must be integers, not {given.dtype}")
        wanted = np.ascontiguousarray(given.reshape(-1), np.int64)
        if self.limit is not None and wanted.size:
            outside = (wanted < 0) | (wanted >= self.limit)
            if outside.any():
                raise IdError(
                    f"table {self.name!r} has rows 0..{self.limit - 1}, id "
                    f"{wanted[outside][0]} is outside"
                )
        slots, unknown = self.find(wanted)
        out = np.empty((wanted.size, self.weight_SD.shape[1]), np.float32)
        if not unknown:
            np.take(self.weight_SD, slots, axis=0, out=out, mode="clip")
        else:
            known = slots >= 0
            out[known] = self.weight_SD[slots[known]]
            out[~known] = self._initial(wanted[~known])
        return out.reshape(*given.shape, out.shape[1])

    def _initial(self, ids: I64) -> F32:
        if self.origin is None:
            raise IdError(f"table {self.name!r} holds no row {ids[0]}: it was never stored")
        origin = self.origin
        out = np.empty((ids.size, self.weight_SD.shape[1]), np.float32)
        initial_values.initial_rows(origin.key, origin.kind, origin.a, origin.b, ids, out)
        return out


class View:
    """One version, whole and unchanging for as long as it is held.

    Use it for several lookups that must agree with each other. What newer versions replaced is
    kept in memory until the view is let go.
    """

    def __init__(self, manifest: Manifest, rows: Mapping[str, _Rows], dense: bytes | None) -> None:
        self.manifest = manifest
        self._rows = rows
        self._dense = dense

    @property
    def version(self) -> int:
        return self.manifest.version.number

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(self._rows)

    def lookup(self, table: str, ids: npt.ArrayLike) -> F32:
        """The weights of rows, [..., dim] for ids [...]; rows never trained as they begin."""
        rows = self._rows.get(table)
        if rows is None:
            raise ConfigError(f"there is no table {table!r}; there are {', '.join(self._rows)}")
        return rows.lookup(ids)

    def trained_rows(self, table: str) -> int:
        """How many rows of a table the version holds."""
        return self._rows[table].count

    def dense(self, *, whole: bool = False) -> dict[str, Array]:
        """The model's parameters and buffers by their own names, as `load_state_dict` takes them,
        read-only; empty if the version has none.

        With `whole` everything that is stored beside rows, optimizers too, by its place there; so
        also of a version that no keeper wrote.
        """
        kept = all(name.partition("/")[0] in ("dense", "reader") for name in self._arrays)
        if whole or not kept:
            return dict(self._arrays)
        return {
            name.removeprefix(_MODEL): array
            for name, array in self._arrays.items()
            if name.startswith(_MODEL)
        }

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        return {} if self._dense is None else dense_arrays(self.manifest.name, self._dense)


class Follower:
    """Serves the newest version of a repository, and moves on when asked to.

    - `refresh` applies the newest version whole, or raises and leaves everything as it was. It
      reads what is new: the increments since its version where they build on it; all rows
      after a new baseline, or when the run was taken back to an earlier version.
    - Lookups may run in any number of threads, beside a refresh too.
    - Memory: one copy of the weights of all trained rows, their ids and an index; during a
      refresh also the rows that change; optimizer planes are not kept.
    - Needs to read only. If it may also write, it pins what it reads, so that gc waits for it;
      otherwise it plans again when gc was faster.
    """

    def __init__(
        self, location: str | os.PathLike[str] | BlobStore, *, pool: pools.Pool | None = None
    ) -> None:
        """Opens a repository by URL, path or store. Nothing is served before `refresh`."""
        is_path = isinstance(location, str | os.PathLike)
        self._store: BlobStore = open_store(location) if is_path else location  # type: ignore[arg-type,assignment]
        self._repository = Repository.open(self._store)
        self._pool = pool or pools.shared()
        self._view: View | None = None
        self._chain: tuple[VersionId, ...] = ()
        self._needs: dict[VersionId, tuple[VersionId, ...]] = {}
        # What the newest version of the chain wrote itself: an increment that counts from the same
        # baseline may replace it only if it covers all of that.
        self._top: dict[str, I64] = {}
        self._arenas = {
            name: _Arena(table["planes"]["weight"][0])
            for name, table in self._repository.tables.items()
        }
        self._retired: list[tuple[weakref.ref[View], dict[str, I64]]] = []
        self._refreshing = threading.Lock()

    @property
    def version(self) -> int | None:
        """The number of the version that is served."""
        return None if self._view is None else self._view.version

    def view(self) -> View:
        """The version that is served, to be held for several lookups."""
        view = self._view
        if view is None:
            raise StateError(f"nothing of {self._store.url} is served yet: call refresh() first")
        return view

    def lookup(self, table: str, ids: npt.ArrayLike) -> F32:
        """`View.lookup` of the version that is served now."""
        return self.view().lookup(table, ids)

    def dense(self, *, whole: bool = False) -> dict[str, Array]:
        """`View.dense` of the version that is served now."""
        return self.view().dense(whole=whole)

    def refresh(self) -> int | None:
        """Moves to the newest version; its number, or None if there is nothing new.

        `DamageError` names a damaged file; the version served before stays.
        """
        with self._refreshing:
            if Repository.open(self._store).id != self._repository.id:
                raise StateError(
                    f"{self._store.url} now holds another repository: make a new follower"
                )
            failure: EmberkeepError | None = None
            for _ in range(_ATTEMPTS):
                newest = self._repository.newest_whole()
                served = self._view and self._view.manifest.version
                if newest is None or newest == served:
                    return None
                try:
                    self._move_to(newest)
                except (ChangedError, DamageError, NoVersionError) as error:
                    # Under an unchanged history a missing file is damage; else gc was faster.
                    moved_on = self._repository.newest_whole() != newest
                    if not isinstance(error, ChangedError) and not moved_on:
                        raise
                    failure = error
                else:
                    return newest.number
            assert failure is not None
            raise failure

    # -- details ---------------------------------------------------------------------------------

    def _move_to(self, newest: VersionId) -> None:
        self._reclaim()
        with Hold(self._repository, newest) as hold:
            chain = self._plan(newest)
            shared = _shared(self._chain, chain)
            undone = self._chain[shared:]
            if self._in_one_grid(newest):
                moved = self._build(chain, 0, hold, {}, after=self.version)
            elif shared and not undone:
                moved = self._build(chain, shared, hold, {})
            elif shared and len(undone) == 1:
                moved = self._build(chain, shared, hold, self._top)
            else:
                moved = False
            if not moved:
                self._build(chain, 0, hold, {})
        self._needs = {version: self._needs[version] for version in chain}

    def _in_one_grid(self, newest: VersionId) -> bool:
        """Whether the version that is served lies before the newest in the same grid."""
        served = None if self._view is None else self._view.manifest
        if served is None or grid_of(served) is None or served.version >= newest:
            return False
        return grid_of(self._repository.manifest(newest)) == grid_of(served)

    def _plan(self, newest: VersionId) -> tuple[VersionId, ...]:
        """The versions that make up the newest, oldest first; reads manifests not yet known."""

        def needs(version: VersionId) -> tuple[VersionId, ...]:
            if version not in self._needs:
                self._needs[version] = self._repository.manifest(version).needs
            return self._needs[version]

        return tuple(sorted(needed_by([newest], needs)))

    def _build(
        self, chain: Sequence[VersionId], start: int, hold: Hold, to_cover: Mapping[str, I64],
        after: int | None = None,
    ) -> bool:  # fmt: skip
        """Applies chain[start:] and publishes it, unless it leaves rows of `to_cover` as they are.

        With start 0 nothing of the state before is taken over, except rows that are the same;
        unless the state is that of version `after` of the same grid.
        """
        manifests = [self._repository.manifest(version) for version in chain[start:]]
        builds: dict[str, _Build] = {}
        top: dict[str, list[I64]] = defaultdict(list)
        covered: dict[str, list[I64]] = defaultdict(list)
        tables = self._repository.tables
        before = {} if self._view is None else self._view._rows
        counts = _row_counts(manifests)
        for name, arena in self._arenas.items():
            arena.expect(counts[name])
        try:
            if start == 0 and after is None:
                for name, table in tables.items():
                    rows = before.get(name) or self._arenas[name].no_rows(name, table)
                    builds[name] = _Build(self._arenas[name], rows, from_scratch=True)
            for manifest, chunk in merged_rows(
                self._repository, manifests, self._pool, after=after
            ):
                hold.renew()
                name = chunk.table
                if name not in builds:
                    builds[name] = _Build(self._arenas[name], before[name], from_scratch=False)
                builds[name].apply(chunk)
                if len(chain) > 1 and manifest is manifests[-1]:
                    top[name].append(chunk.ids)
                if name in to_cover:
                    covered[name].append(chunk.ids)
            for name, ids in to_cover.items():
                if not np.isin(ids, _joined(covered[name])).all():
                    raise _NotCovered
            newest = manifests[-1] if manifests else self._repository.manifest(chain[-1])
            view = View(
                newest,
                {name: builds[name].rows if name in builds else before[name] for name in tables},
                dense_bytes(self._repository, newest),
            )
        except BaseException as error:
            for build in builds.values():
                build.abandon()
            if isinstance(error, _NotCovered):
                return False
            raise
        if self._view is not None:
            retired = {name: build.retired() for name, build in builds.items()}
            self._retired.append((weakref.ref(self._view), retired))
        self._view = view
        self._chain = tuple(chain)
        self._top = {name: _joined(parts) for name, parts in top.items()}
        return True

    def _reclaim(self) -> None:
        """Frees the slots of views that nobody holds; those of older views may be theirs too."""
        while self._retired and self._retired[0][0]() is None:
            for name, slots in self._retired.pop(0)[1].items():
                self._arenas[name].give_back(slots)


class _NotCovered(Exception):
    """An increment leaves rows as they are that the state before it does not have from it."""


class _Arena:
    """The slots of one table, and which of them are free."""

    def __init__(self, dim: int) -> None:
        self.ids: I64 = np.empty(0, np.int64)
        self.weight_SD: F32 = np.empty((0, dim), np.float32)
        self._fresh = 0
        self._free: list[I64] = []

    def no_rows(self, name: str, table: Json) -> _Rows:
        return _Rows(
            name=name,
            limit=table.get("rows"),
            origin=_Origin.of(table),
            entries=np.zeros(16, np.uint64),
            count=0,
            ids=self.ids,
            weight_SD=self.weight_SD,
        )

    def expect(self, count: int) -> None:
        """Makes room for so many slots at once, instead of growing while they are filled."""
        free = sum(slots.size for slots in self._free)
        self._reserve(self._fresh + max(0, count - free))

    def take(self, count: int) -> I64:
        """Slots that no view can see."""
        taken: list[I64] = []
        missing = count
        while missing and self._free:
            last = self._free.pop()
            if last.size > missing:
                self._free.append(last[missing:])
                last = last[:missing]
            taken.append(last)
            missing -= last.size
        self._reserve(self._fresh + missing)
        taken.append(np.arange(self._fresh, self._fresh + missing, dtype=np.int64))
        self._fresh += missing
        return np.concatenate(taken)

    def give_back(self, slots: I64) -> None:
        if slots.size:
            self._free.append(slots)

    def _reserve(self, slots: int) -> None:
        """Makes room; memory is taken when a slot is first written, so twice the need is cheap.

        Views keep the arrays that they began with, in which their slots stay as they are.
        """
        if slots <= self.ids.size:
            return
        size = max(_LEAST_SLOTS, 2 * slots)
        ids: Any = lazy_zeros((size,), np.int64)
        weight: Any = lazy_zeros((size, self.weight_SD.shape[1]), np.float32)
        ids[: self._fresh] = self.ids[: self._fresh]
        weight[: self._fresh] = self.weight_SD[: self._fresh]
        self.ids, self.weight_SD = ids, weight


class _Build:
    """The next state of one table. Readers see nothing of it before it is published."""

    def __init__(self, arena: _Arena, before: _Rows, *, from_scratch: bool) -> None:
        self._arena = arena
        self._before = before
        self._from_scratch = from_scratch
        entries = np.zeros(16, np.uint64) if from_scratch else before.entries.copy()
        self.rows = replace(before, entries=entries, count=0 if from_scratch else before.count)
        self._taken: list[I64] = []
        self._replaced: list[I64] = []

    def apply(self, chunk: Chunk) -> None:
        """Puts or removes rows. No id may come twice."""
        seen, _ = self._before.find(chunk.ids)
        if chunk.planes is None:
            if not self._from_scratch:
                self._remove(chunk.ids[seen >= 0], seen[seen >= 0])
            return
        weight = np.ascontiguousarray(chunk.planes["weight"], np.float32)
        same = seen >= 0
        # Bits, not values: NaN equals itself here, and -0.0 is not 0.0.
        old = self._before.weight_SD[seen[same]].view(np.uint32)
        same[same] = (old == weight[same].view(np.uint32)).all(axis=1)
        changed = ~same
        new = self._arena.take(int(changed.sum()))
        self._taken.append(new)
        self._arena.weight_SD[new] = weight[changed]
        if self._from_scratch:
            self._insert(chunk.ids[same], seen[same])
        else:
            replaced = changed & (seen >= 0)
            self._remove(chunk.ids[replaced], seen[replaced])
        self._insert(chunk.ids[changed], new)

    def _remove(self, ids: I64, slots: I64) -> None:
        hash_index.index_remove(self.rows.entries, self._arena.ids, ids)
        self._replaced.append(slots)
        self.rows = replace(self.rows, count=self.rows.count - ids.size)

    def _insert(self, ids: I64, slots: I64) -> None:
        arena, rows = self._arena, self.rows
        count = rows.count + ids.size
        entries = rows.entries
        if 3 * count > 2 * entries.size:
            used = rows.slots()
            size = entries.size
            while 3 * count > 2 * size:
                size *= 2
            entries = np.zeros(size, np.uint64)
            hash_index.index_insert(entries, arena.ids, arena.ids[used], used)
        hash_index.index_insert(entries, arena.ids, ids, slots)
        self.rows = replace(
            rows, entries=entries, count=count, ids=arena.ids, weight_SD=arena.weight_SD
        )

    def retired(self) -> I64:
        """The slots that the state before has and this one has not."""
        if not self._from_scratch:
            return _joined(self._replaced)
        return np.setdiff1d(self._before.slots(), self.rows.slots(), assume_unique=True)

    def abandon(self) -> None:
        for slots in self._taken:
            self._arena.give_back(slots)


def _row_counts(manifests: Sequence[Manifest]) -> Counter[str]:
    """How many rows of each table the versions wrote; some maybe several times."""
    counts: Counter[str] = Counter()
    for file in (file for manifest in manifests for file in manifest.of_kind(KIND)):
        counts.update(counts_of(file, "rows"))
    return counts


def _joined(parts: Sequence[I64]) -> I64:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _shared(one: Sequence[VersionId], other: Sequence[VersionId]) -> int:
    """How many versions both chains begin with."""
    count = 0
    for own, others in zip(one, other, strict=False):
        if own != others:
            break
        count += 1
    return count
