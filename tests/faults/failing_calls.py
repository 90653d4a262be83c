"""System calls that fail while a repository or a tier is used, each in turn.

An error is not absence. Whatever fails, the caller gets one of our errors and nothing hangs; once
the disk is well again, everything is there that was acknowledged, and the next process goes on
from it.

Calls of a local repository all go through its `Disk`. Those of a tier do not, so there the system's
own functions are replaced, for the files of that tier alone; what is read by the system's queue for
reads is out of reach, and covered by damage.
"""

from __future__ import annotations

import builtins
import errno
import itertools
import os
import random
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from emberkeep.blobs import Disk, LocalStore
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import EmberkeepError
from emberkeep.repository import (
    Collector,
    KeepLast,
    KeepNamed,
    Manifest,
    Pin,
    Repository,
    Writer,
    verify,
)
from emberkeep.tables import Adagrad, Table
from emberkeep.testing import FaultyDisk
from emberkeep.testing.contracts import check_content, save
from emberkeep.tiers import durable_open
from tests.contracts.engine import grads_of, state, wanted_of
from tests.faults.findings import Counts, LostVersionError, WrongRowsError, within
from tests.unit.tiers.test_tiered_slab import tiered

CODES = [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EMFILE, errno.EACCES, errno.EINTR]
POLICY = KeepLast(n=1) | KeepNamed()
PATIENCE_SECONDS = 60.0


class Unsynced(Disk):
    """No power is cut here, so nothing needs to reach the medium."""

    def sync(self, handle: int) -> None:
        pass


Action = Callable[[], object]

# -- a local repository ----------------------------------------------------------------------------


@dataclass
class Case:
    """One root in the state of the story, on a disk that can be made to fail."""

    store: LocalStore
    disk: FaultyDisk
    committed: list[Manifest]

    def writer(self) -> Writer:
        return Writer.open(Repository.open(self.store))


def listing(case: Case) -> Action:
    names = {info.name for info in case.store.list()}

    def act() -> None:
        assert {info.name for info in case.store.list()} == names

    return act


def resuming(case: Case) -> Action:
    """What a keeper does: opens what is there, or creates it; then the newest version."""

    def act() -> None:
        if Repository.exists(case.store):
            repository = Repository.open(case.store)
        else:
            repository = Repository.create(case.store, schema={})
        assert repository.latest() == case.committed[-1].version
        assert Writer.open(repository).newest == case.committed[-1].version

    return act


def saving(case: Case) -> Action:
    writer = case.writer()

    def act() -> None:
        writer.settle()
        case.committed.append(save(writer, 6, needs=[case.committed[0].version]))

    return act


def collecting(case: Case) -> Action:
    return Collector(case.writer(), policy=POLICY, grace=timedelta(0)).collect


def restoring(case: Case) -> Action:
    repository = Repository.open(case.store)

    def act() -> None:
        with Pin(repository) as pin:
            assert pin.version == case.committed[-1].version
            for manifest in repository.chain(pin.version):
                check_content(repository, manifest)
        repository.record_restore(pin.version)

    return act


OPERATIONS = [listing, resuming, saving, collecting, restoring]


def make_story(root: Path) -> list[Manifest]:
    """Two epochs, a tag, a pin, a mark of a gc that died, files of a save that died."""
    store = LocalStore(root, disk=Unsynced())
    repository = Repository.create(store, schema={})
    writer = Writer.open(repository)
    committed = [save(writer, step) for step in (1, 2, 3)]
    writer = Writer.open(repository)
    committed += [save(writer, 4), save(writer, 5, needs=[committed[1].version])]
    repository.tag("best", 1)
    Pin(repository, 3)
    writer.begin().add(b"never committed", kind="rows", suffix="bin")
    leftover = root / ".incomplete" / "4711-0123456789abcdef"
    leftover.write_bytes(b"half")
    os.utime(leftover, (0, 0))
    return committed


def linked(source: Path, target: Path) -> Path:
    """A copy that costs no bytes: objects are never changed in place."""
    for directory, _, files in os.walk(source):
        below = target / os.path.relpath(directory, source)
        below.mkdir()
        for file in files:
            os.link(os.path.join(directory, file), below / file)
    return target


_numbers = itertools.count()


def _fresh(below: Path) -> Path:
    """Another place for each case: nothing of one is taken for something of the next."""
    below.mkdir(exist_ok=True)
    return below / str(next(_numbers))


def begin(
    operation: Callable[[Case], Action], root: Path, committed: list[Manifest]
) -> tuple[Case, Action]:
    disk = FaultyDisk(Unsynced())
    case = Case(LocalStore(root, disk=disk), disk, list(committed))
    return case, operation(case)


def check_kept(case: Case, where: object) -> None:
    """A later process, on a disk that is well: all that retention keeps is there, and goes on."""
    repository = Repository.open(LocalStore(case.store._root, disk=Unsynced()))
    standing = repository.versions()
    for manifest in (case.committed[0], case.committed[1], case.committed[2], case.committed[-1]):
        if manifest.version not in standing:
            raise LostVersionError(f"{manifest.version} is gone after {where}")
        check_content(repository, manifest)
    assert repository.tags() == {"best": case.committed[0].version}
    writer = Writer.open(repository)
    latest = save(writer, 7, needs=[case.committed[-1].version])
    if repository.versions() != (*standing, latest.version):
        raise LostVersionError(f"{standing} became {repository.versions()} after {where}")
    assert verify(repository, deep=False).ok, where


def calls_of(root: Path, committed: list[Manifest], target: Path, operation: Any) -> list[str]:
    """What an operation asks of the disk when nothing fails."""
    case, act = begin(operation, linked(root, target), committed)
    case.disk.heal()
    act()
    calls = list(case.disk.calls)
    assert len(calls) >= 20
    return calls


def fail_call(
    root: Path, committed: list[Manifest], target: Path, operation: Callable[[Case], Action],
    at: int, code: int, for_good: bool,
) -> None:  # fmt: skip
    """Fails one call of an operation; then the disk is well, and the same process tries again."""
    target = _fresh(target)
    where = (operation.__name__, at, errno.errorcode[code], for_good)

    def run() -> None:
        case, act = begin(operation, linked(root, target), committed)
        case.disk.fail(at, code, for_good=for_good)
        with suppress(EmberkeepError):
            act()
        assert len(case.disk.calls) > at, where
        case.disk.heal()
        act()
        check_kept(case, where)

    within(PATIENCE_SECONDS, run)
    shutil.rmtree(target)


def check_operation(
    root: Path,
    committed: list[Manifest],
    target: Path,
    operation: Callable[[Case], Action],
    codes: Callable[[str], Iterable[int]],
) -> int:
    """Fails each call of an operation with each of its codes; how many cases that were."""
    cases = 0
    for at, call in enumerate(calls_of(root, committed, target / "whole", operation)):
        for code, for_good in itertools.product(codes(call), (False, True)):
            fail_call(root, committed, target / "cases", operation, at, code, for_good)
            cases += 1
    return cases


# -- a tier ----------------------------------------------------------------------------------------

_BY_PATH = (
    "open", "stat", "lstat", "listdir", "scandir", "rename", "replace", "link", "unlink", "mkdir",
)  # fmt: skip
_BY_HANDLE = (
    "fstat", "pread", "preadv", "write", "pwrite", "fsync", "posix_fallocate", "ftruncate",
)  # fmt: skip


class SystemFaults:
    """Fails calls of the system below one directory: chosen by count, as `FaultyDisk` does."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._lock = threading.Lock()
        self._handles: set[int] = set()
        self.calls: list[str] = []
        self._code = 0
        self.heal()

    def fail(self, kind: str, nth: int, code: int, *, for_good: bool) -> None:
        """The n-th call of a kind fails, the first one being 0; `for_good`, all after it too.

        Threads make calls in any order: those of one kind come in the same order mostly.
        """
        self.heal()
        self._code, self._kind, self._left, self._for_good = code, kind, nth + 1, for_good

    def heal(self) -> None:
        self._kind, self._left, self._for_good = "", 0, False
        self._broken = False
        self.calls = []

    @contextmanager
    def patched(self) -> Iterator[None]:
        real = {name: getattr(os, name) for name in (*_BY_PATH, *_BY_HANDLE, "close")}
        real_open = builtins.open
        for name in _BY_PATH:
            setattr(os, name, partial(self._by_path, name, real[name]))
        for name in _BY_HANDLE:
            setattr(os, name, partial(self._by_handle, name, real[name]))
        os.close = partial(self._close, real["close"])  # type: ignore[assignment]
        builtins.open = partial(self._by_path, "open", real_open)  # type: ignore[assignment]
        try:
            yield
        finally:
            builtins.open = real_open
            for name, function in real.items():
                setattr(os, name, function)

    def _count(self, name: str) -> None:
        with self._lock:
            self.calls.append(name)
            self._left -= name == self._kind
            fails = self._broken or (name == self._kind and self._left == 0)
            self._broken = fails and self._for_good
        if fails:
            raise OSError(self._code, os.strerror(self._code))

    def _by_path(self, name: str, real: Any, path: Any, *args: Any, **options: Any) -> Any:
        below = isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._root)
        if below:
            self._count(name)
        result = real(path, *args, **options)
        if below and name == "open" and isinstance(result, int):
            self._handles.add(result)
        return result

    def _by_handle(self, name: str, real: Any, handle: int, *args: Any) -> Any:
        if handle in self._handles:
            self._count(name)
        return real(handle, *args)

    def _close(self, real: Any, handle: int) -> None:
        self._handles.discard(handle)
        real(handle)


TABLES = [Table("a", rows=400, dim=4), Table("b", rows=None, capacity=60, dim=4)]
OPTIMIZER = Adagrad(lr=0.1)
SHARDS = 2


def start(path: Path) -> LocalCluster:
    made = tiered(TABLES, OPTIMIZER, path / "tier", 90 * SHARDS)
    return local(shards=SHARDS, threads=1).open(made, OPTIMIZER, seed=0)


def end(cluster: LocalCluster) -> None:
    for shard in cluster.shards:
        shard.kill()


def train(cluster: LocalCluster, seed: int) -> None:
    random_ = np.random.default_rng(seed)
    batch = {
        "a": random_.choice(400, 60, replace=False).tolist(),
        "b": random_.choice(50, 6, replace=False).tolist(),
    }
    grads = {name: random_.standard_normal((len(ids), 4)) for name, ids in batch.items()}
    cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)


@dataclass
class TierCase:
    """A tier in some state, and what it may come back with: at `durable` or a later batch."""

    path: Path
    models: dict[int, Any]
    durable: int
    cluster: LocalCluster | None = None

    def save(self, batch: int) -> None:
        assert self.cluster is not None
        self.models[batch] = state(self.cluster)
        prepared = self.cluster.prepare_tiers(batch)
        train(self.cluster, 1000 + batch)
        for future in prepared:
            future.result(PATIENCE_SECONDS)
        self.cluster.commit_tiers()
        self.durable = batch

    def check(self, where: object) -> None:
        if self.cluster is not None:
            with suppress(EmberkeepError):
                end(self.cluster)
        for _ in range(2):
            cluster = start(self.path)
            batch = cluster.tier_batch() or 0
            if batch < self.durable:
                raise LostVersionError(f"batch {self.durable} was durable, {batch} is: {where}")
            if state(cluster) != self.models[batch]:
                raise WrongRowsError(f"batch {batch} came back as it never was: {where}")
            end(cluster)
        self.durable = batch
        self.cluster = start(self.path)
        train(self.cluster, 77)
        self.save(99)
        end(self.cluster)


def opening(case: TierCase) -> Action:
    def act() -> None:
        case.cluster = start(case.path)
        assert case.cluster.tier_batch() == case.durable

    return act


def checkpointing(case: TierCase) -> Action:
    case.cluster = start(case.path)
    train(case.cluster, 1)

    def act() -> None:
        assert case.cluster is not None
        case.save(10)
        train(case.cluster, 2)
        case.save(11)

    return act


def cleaning(case: TierCase) -> Action:
    """Most of what is written is overwritten soon, so segments are cleaned and used again."""
    case.cluster = start(case.path)

    def act() -> None:
        assert case.cluster is not None
        for batch in range(20, 26):
            for turn in range(4):
                train(case.cluster, 10 * batch + turn)
            case.save(batch)

    return act


TIER_OPERATIONS = [opening, checkpointing, cleaning]


@cache
def _tier_model() -> tuple[dict[int, Any], int]:
    """What the tiers of these cases hold at the start."""
    with small_segments() as path:
        case = make_tier(path)
        return case.models, case.durable


def make_tier(path: Path) -> TierCase:
    case = TierCase(path, {}, 0, start(path))
    assert case.cluster is not None
    for batch in range(1, 6):
        for turn in range(3):
            train(case.cluster, 100 * batch + turn)
        case.save(batch)
    end(case.cluster)
    case.cluster = None
    return case


@contextmanager
def small_segments() -> Iterator[Path]:
    before, durable_open.SEGMENT_NBYTES = durable_open.SEGMENT_NBYTES, 8192
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    path = Path(tempfile.mkdtemp(dir=shared, prefix="emberkeep-"))
    try:
        yield path
    finally:
        durable_open.SEGMENT_NBYTES = before
        shutil.rmtree(path)


def begin_tier(root: Path, target: Path, operation: Any) -> tuple[TierCase, Action]:
    shutil.copytree(root, target)
    models, durable = _tier_model()
    case = TierCase(target, dict(models), durable)
    return case, operation(case)


def tier_calls_of(root: Path, target: Path, operation: Any) -> list[str]:
    faults = SystemFaults(target)
    with faults.patched():
        case, act = begin_tier(root, target, operation)
        faults.heal()
        act()
        calls = list(faults.calls)
        case.check(operation.__name__)
    shutil.rmtree(target)
    return calls


def fail_tier_call(
    root: Path, target: Path, operation: Any, calls: list[str], at: int, code: int, for_good: bool
) -> None:
    """Fails one call of an operation on a tier; then the disk is well, and a process opens it."""
    target = _fresh(target)
    kind, nth = calls[at], calls[:at].count(calls[at])
    where = (operation.__name__, kind, nth, errno.errorcode[code], for_good)
    faults = SystemFaults(target)

    def run() -> None:
        case, act = begin_tier(root, target, operation)
        faults.fail(kind, nth, code, for_good=for_good)
        with suppress(EmberkeepError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            act()
        faults.heal()
        case.check(where)

    with faults.patched():
        within(PATIENCE_SECONDS, run)
    shutil.rmtree(target)


# -- all of them -----------------------------------------------------------------------------------


Prepared = dict[Any, tuple[list[str], Callable[[int, int, bool], None]]]


@contextmanager
def prepared() -> Iterator[Prepared]:
    """Of each operation: the calls that it makes, and how to fail one of them."""
    with small_segments() as base:
        committed = make_story(base / "story")
        make_tier(base / "tiers")
        found: Prepared = {}
        for operation in OPERATIONS:
            calls = calls_of(base / "story", committed, base / "whole", operation)
            shutil.rmtree(base / "whole")
            fail = partial(fail_call, base / "story", committed, base / "cases", operation)
            found[operation] = calls, fail
        for operation in TIER_OPERATIONS:
            calls = tier_calls_of(base / "tiers", base / "whole", operation)
            tier_fail = partial(fail_tier_call, base / "tiers", base / "cases", operation, calls)
            found[operation] = calls, tier_fail
        yield found


def run(seed: int, cases: int) -> Counts:
    """So many cases drawn from a seed on; how many of what."""
    with prepared() as operations:
        return drawn(operations, seed, cases)


def drawn(operations: Prepared, seed: int, cases: int) -> Counts:
    """`run` over what is prepared already."""
    chance = random.Random(seed)
    counts: Counts = Counts()
    # Each kind of call as often as any other, however often it is made.
    by_kind = {
        operation: {
            kind: [at for at, call in enumerate(calls) if call == kind] for kind in set(calls)
        }
        for operation, (calls, _) in operations.items()
    }
    while counts["failing_calls"] < cases:
        operation = chance.choice(list(operations))
        kind = chance.choice(sorted(by_kind[operation]))
        at, code = chance.choice(by_kind[operation][kind]), chance.choice(CODES)
        operations[operation][1](at, code, chance.random() < 0.5)
        counts["failing_calls"] += 1
        counts[operation.__name__] += 1
        counts[kind] += 1
    return counts


def run_all(*chosen: Any) -> Counts:
    """Every call of operations, with every error, once and for good."""
    counts: Counts = Counts()
    with prepared() as operations:
        for operation in chosen:
            calls, fail = operations[operation]
            for at, code, for_good in itertools.product(range(len(calls)), CODES, (False, True)):
                fail(at, code, for_good)
                counts["failing_calls"] += 1
                counts[calls[at]] += 1
    return counts
