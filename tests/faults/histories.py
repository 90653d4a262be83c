"""Random histories as wide as the API, beside a plain dictionary that knows every row.

A history is one repository and the lives of the processes that use it. Each life draws its options:
layout, codecs, retention, shards, tiers, how saves overlap. It trains, deletes, saves, tags, forks,
collects, goes back to any version, meets a store that loses answers, dies, is replaced and comes
back as a zombie. The model computes rows one by one in float32, and remembers every version that
was saved. Whatever is restored, by anybody, is compared with it bit for bit; rows of a quantized
version with the codec's own round trip of the model's rows.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.checkpoint.restore import load
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.codecs import Codec, codec_from_dict
from emberkeep.errors import (
    ConfigError,
    FencedError,
    NoVersionError,
    SaveError,
    StateError,
    StorageError,
)
from emberkeep.repository import (
    Collector,
    KeepAll,
    KeepEvery,
    KeepLast,
    KeepNamed,
    Manifest,
    Pin,
    Repository,
    RetentionPolicy,
    VersionFacts,
    VersionId,
    fork,
    verify,
)
from emberkeep.repository.grid.catalog import before_in_grid, grid_of
from emberkeep.repository.policies import LAYOUTS, Grid
from emberkeep.rows.priority import Priority
from emberkeep.runtime.pool import Pool
from emberkeep.tables import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, Table
from emberkeep.testing import Fault, FaultStore, ProcessDied
from emberkeep.tiers import durable_open
from tests.contracts.engine import grads_of, update, wanted_of
from tests.faults.findings import Counts, LostVersionError, WrongRowsError
from tests.unit.tiers.test_tiered_slab import Unsynced, tiered

NOW = timedelta(0)
POOL = Pool(1)
_EVICTED = re.compile(r"(\d+) of \d+ rows had no room and were evicted")
TABLES = [
    Table("fixed", rows=50, dim=4),
    Table("dynamic", rows=None, capacity=150, dim=4),
    Table("evicting", rows=None, capacity=25, dim=4, on_full="evict_oldest"),
    Table("wide", rows=20, dim=7),
]
IDS = {"fixed": 50, "dynamic": 70, "evicting": 60, "wide": 20}
OPTIMIZERS: list[Optimizer] = [
    SGD(lr=0.1), Adagrad(lr=0.1), RowWiseAdagrad(lr=0.1), Adam(lr=0.05, step="row"),
]  # fmt: skip
RETENTION: list[RetentionPolicy] = [
    KeepAll(), KeepAll(), KeepLast(n=1), KeepLast(n=3) | KeepNamed(),
    KeepEvery(m=3) | KeepLast(n=2) | KeepNamed(),
]  # fmt: skip
SHARDS = (1, 2, 3)

Key = tuple[str, int]
Planes = dict[str, Any]
Row = tuple[int, Planes]
"""Which write made the row what it is, and its planes."""


def planes_of(planes: Planes, at: int) -> Planes:
    """One row. The ticks of tables that evict say when it was used, not what it is."""
    return {name: values[at].copy() for name, values in planes.items() if name != "used"}


def bits(planes: Planes) -> bytes:
    return b"".join(planes[name].tobytes() for name in sorted(planes))


def rows_of(cluster: LocalCluster) -> dict[Key, Planes]:
    found = {}
    for table in TABLES:
        ids, planes = cluster.read_all(table.name)
        for at, identity in enumerate(ids.tolist()):
            found[table.name, identity] = planes_of(planes, at)
    return found


def _steps(tables: Any) -> Any:
    return {name: table["steps"] for name, table in tables.items()}


@dataclass
class Shadow:
    """A version as it was when it was cut."""

    rows: dict[Key, Row]
    state: Any
    shards: int
    must_be_whole: bool
    allowed: dict[Key, set[bytes]] | None = None


class Model:
    """Every version that was saved, by its step, and as which of them versions stand."""

    def __init__(self) -> None:
        self.cuts: dict[int, Shadow] = {}
        self.steps: dict[VersionId, int] = {}
        self.manifests: dict[VersionId, Manifest] = {}
        self.expected: set[VersionId] = set()

    def see(self, manifest: Manifest) -> None:
        """Takes in a version that stands."""
        version = manifest.version
        if manifest.step not in self.cuts:
            raise WrongRowsError(f"version {version} holds step {manifest.step}: nobody saved it")
        self.steps[version] = manifest.step
        self.manifests[version] = manifest
        cut = self.cuts[manifest.step]
        if cut.must_be_whole and manifest.layout["kind"] not in ("full", "prioritised"):
            raise WrongRowsError(
                f"version {version} of {cut.shards} shards builds on one of another number"
            )

    def allowed(self, version: VersionId) -> dict[Key, set[bytes]]:
        """The bits that each row of a version may have: those of the row when it was cut, passed
        through the codecs of the version; or, if nobody wrote it since, what it may have in the
        version that this one builds on."""
        manifest, cut = self.manifests[version], self.cuts[self.steps[version]]
        if cut.allowed is not None:
            return cut.allowed
        codecs = {
            plane: codec_from_dict(given) for plane, given in manifest.layout["codecs"].items()
        }
        parent = None
        if manifest.layout["kind"] != "full":
            parent = before_in_grid(manifest) if grid_of(manifest) else manifest.needs[0]
        inherited = self.allowed(parent) if parent is not None else {}
        before = self.cuts[self.steps[parent]].rows if parent is not None else {}
        stored = self._coded(cut.rows, codecs)
        cut.allowed = {key: {content} for key, content in stored.items()}
        for key, (write, _) in cut.rows.items():
            if key in before and before[key][0] == write:
                cut.allowed[key] |= inherited[key]
        return cut.allowed

    def _coded(self, rows: dict[Key, Row], codecs: dict[str, Codec]) -> dict[Key, bytes]:
        """Rows after the round trip through codecs, which treat each row for itself."""
        found = {}
        for table in TABLES:
            keys = [key for key in rows if key[0] == table.name]
            if not keys:
                continue
            planes = {
                plane: np.stack([rows[key][1][plane] for key in keys]) for plane in rows[keys[0]][1]
            }
            for plane, codec in codecs.items():
                if plane in planes:
                    coded = codec.encode(planes[plane], POOL)
                    width = planes[plane].shape[1]
                    planes[plane] = codec.decode(coded, rows=len(keys), width=width)
            for at, key in enumerate(keys):
                found[key] = bits({plane: values[at] for plane, values in planes.items()})
        return found

    def compare(self, version: VersionId, found: dict[Key, Planes], evicted: int = 0) -> None:
        """Raises unless rows are those of a version, but for as many as were said to be evicted."""
        allowed = self.allowed(version)
        missing, extra = allowed.keys() - found.keys(), found.keys() - allowed.keys()
        if extra or len(missing) != evicted or any(table != "evicting" for table, _ in missing):
            raise WrongRowsError(
                f"version {version}: rows {sorted(missing)[:5]} are missing, {sorted(extra)[:5]} "
                "were deleted before it"
            )
        wrong = [key for key, planes in found.items() if bits(planes) not in allowed[key]]
        if wrong:
            raise WrongRowsError(f"version {version}: rows {wrong[:5]} are not what they were")


@dataclass
class Life:
    """A process: its cluster, its checkpointer, and the rows that it should have."""

    cluster: LocalCluster
    checkpointer: Checkpointer
    retention: RetentionPolicy
    tier: int | None
    rows: dict[Key, Row] = field(default_factory=dict)
    resumed_shards: int | None = None
    """How many shards had saved the version that it goes on from, until it has saved one."""
    tags: set[str] = field(default_factory=set)

    @property
    def repository(self) -> Repository:
        return self.checkpointer.repository


class History:
    """One repository and all that happens to it, as the seed says."""

    def __init__(self, seed: int, root: Path) -> None:
        self.random = np.random.default_rng(seed)
        self.counts: Counts = Counts(histories=1)
        self.root = root
        self.memory = MemoryStore()
        self.optimizer = self.pick(OPTIMIZERS)
        self.model = Model()
        self.clean: Repository | None = None
        self.step = self.writes = 0
        self.zombies: list[Life] = []
        self.tiers: dict[int, dict[Key, Row]] = {}
        self.fresh = self.open_cluster(1)
        self.tags: dict[str, VersionId] = {}

    def pick(self, choices: Any) -> Any:
        return choices[int(self.random.integers(len(choices)))]

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def open_cluster(self, shards: int, tier: bool = False) -> LocalCluster:
        tables = TABLES
        if tier:
            path = self.root / f"tier-{shards}"
            tables = tiered(TABLES, self.optimizer, path, 70 * shards)
        return local(shards=shards, threads=1).open(tables, self.optimizer, seed=3)

    # -- lives -----------------------------------------------------------------------------------

    def start(self) -> Life:
        """A process takes over, with options of its own."""
        shards, tier = self.pick(SHARDS), self.chance(0.2)
        cluster = self.open_cluster(shards, tier)
        store = FaultStore(self.memory)
        if self.clean is None:
            Repository.create(self.memory, schema=cluster.schema())
            self.clean = Repository.open(self.memory)
        layout = self.pick(LAYOUTS)
        rules = Grid(
            ratio=self.pick([0.0, 0.1, 0.3, 1.0]), concatenate=self.chance(0.7), resets=False,
            storage_budget_nbytes=self.pick([None, None, 20_000]),
            most_behind=self.pick([1, 8]), behind=self.pick(["skip", "wait"]),
        )  # fmt: skip
        spec = VersionSpec(
            layout=layout, bits=self.pick([None, None, None, 8, 4, 2]),
            quantize_optimizer=self.chance(0.2), grid=rules if layout == "grid" else None,
            priority=Priority(fraction=0.4) if layout != "grid" and self.chance(0.2) else None,
        )  # fmt: skip
        retention = self.pick(RETENTION)
        settings = SaveSettings(
            retention=retention, grace=NOW, overlap=self.pick(["wait", "cancel"]), threads=1,
            nice=0, piece_nbytes=self.pick([700, 2**20]), buffer_nbytes=self.pick([3000, 2**28]),
            max_failures=100,
        )  # fmt: skip
        checkpointer = Checkpointer(Repository.open(store), cluster, spec=spec, settings=settings)
        life = Life(cluster, checkpointer, retention, shards if tier else None)
        if life.tier is not None:
            life.rows = dict(self.tiers.get(shards, {}))
            self.check_memory(life)  # back at its durable batch
        self.counts["lives"] += 1
        return life

    def end(self, life: Life) -> None:
        """Closes properly, or is forgotten as it is; it may come back."""
        if life.tier is not None:
            # The next process can open the tier.
            self.settle(life)
            life.cluster.close()
        elif self.chance(0.5):
            self.settle(life)
            life.checkpointer.close()
        else:
            self.zombies.append(life)

    def settle(self, life: Life) -> None:
        with contextlib.suppress(SaveError, StorageError):
            life.checkpointer.wait()
        life.checkpointer.settle()

    def live(self) -> None:
        """One life: from a version, or from nothing, through some saves."""
        life = self.start()
        try:
            versions = self.versions()
            how = self.random.random()
            if versions and how < 0.45:
                self.resume(life, None)
            elif versions and how < 0.85:
                self.resume(life, self.pick(versions))
            for _ in range(int(self.random.integers(2, 9))):
                self.act(life)
            self.end(life)
        except ProcessDied:
            self.counts["deaths"] += 1
            self.revive_store(life)
            life.checkpointer.join()
            if life.tier is not None:
                life.cluster.close()
            self.take_in()
            self.check_retention(life.retention)

    def act(self, life: Life) -> None:
        random = self.random.random()
        if random < 0.5:
            self.train(life)
            self.save(life)
        elif random < 0.6:
            self.delete(life)
        elif random < 0.66:
            self.collect(life)
        elif random < 0.74 and self.versions():
            self.resume(life, self.pick(self.versions()))
        elif random < 0.80:
            self.tag(life)
        elif random < 0.84:
            self.fork()
        elif random < 0.88:
            self.wake_zombie(life)
        elif random < 0.94 and life.tier is not None:
            self.make_durable(life)
        elif self.versions():
            self.check(self.pick(self.versions()))

    # -- training --------------------------------------------------------------------------------

    def train(self, life: Life) -> None:
        """One batch, and the same row by row in the model."""
        batch = {
            name: np.unique(
                (most * self.random.random(3 if name == "wide" else 8) ** 2).astype(np.int64)
            ).tolist()
            for name, most in IDS.items()
        }
        dims = {table.name: table.dim for table in TABLES}
        grads = {
            name: self.random.standard_normal((len(ids), dims[name])).astype(np.float32)
            for name, ids in batch.items()
        }
        life.cluster.push(wanted_of(life.cluster, batch), grads_of(life.cluster, grads), lr=0.1)
        self.writes += 1
        for name, ids in batch.items():
            first = self.fresh.read(name, np.array(ids, np.int64))
            for at, identity in enumerate(ids):
                _, before = life.rows.get((name, identity), (0, planes_of(first, at)))
                planes = {plane: values.copy() for plane, values in before.items()}
                update(self.optimizer, planes, grads[name][at], 0.1, 0)
                life.rows[name, identity] = self.writes, planes
        # Who leaves a full table depends on its shards; that somebody left is all that counts.
        held = set(life.cluster.touched_ids("evicting").tolist())
        gone = [key for key in life.rows if key[0] == "evicting" and key[1] not in held]
        assert not {identity for _, identity in gone} & {*batch["evicting"]}
        for key in gone:
            del life.rows[key]
        self.counts["evictions"] += len(gone)

    def delete(self, life: Life) -> None:
        """Ids that are there and ids that are not."""
        name = self.pick(list(IDS))
        ids = np.unique(self.random.integers(0, IDS[name], int(self.random.integers(1, 7))))
        gone = sum(life.rows.pop((name, i), None) is not None for i in ids.tolist())
        self.writes += 1
        assert life.cluster.delete(name, ids) == gone
        self.counts["deletions"] += 1

    def check_memory(self, life: Life) -> None:
        found = rows_of(life.cluster)
        expected = {key: bits(planes) for key, (_, planes) in life.rows.items()}
        if {key: bits(planes) for key, planes in found.items()} != expected:
            raise WrongRowsError("rows in memory are not what was trained")

    # -- versions --------------------------------------------------------------------------------

    def versions(self) -> tuple[VersionId, ...]:
        assert self.clean is not None
        return self.clean.versions()

    def whole(self) -> list[VersionId]:
        return [v for v in self.versions() if self.model.manifests[v].whole]

    def save(self, life: Life) -> None:
        """A version, with training beside it, maybe over a store that fails."""
        self.settle(life)
        self.take_in()
        self.check_memory(life)
        self.step += 1
        shards = life.cluster.shard_count
        elsewhere = life.resumed_shards not in (None, shards)
        self.model.cuts[self.step] = Shadow(
            dict(life.rows), life.cluster.table_state(), shards, elsewhere
        )
        broken = self.chance(0.3)
        if broken:
            self.break_store(life)
        whole = self.chance(0.7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                life.checkpointer.save(self.step, whole=whole)
                if self.chance(0.5):
                    self.train(life)
                    if self.chance(0.3):
                        self.delete(life)
                manifest = life.checkpointer.wait()
                life.checkpointer.settle()
            except (SaveError, StorageError) as error:
                if not broken:
                    raise LostVersionError("a save over a store that is well has failed") from error
                self.counts["failed saves"] += 1
                manifest = None
            finally:
                self.heal_store(life)
        self.take_in()
        if manifest is not None:
            self.counts["saves"] += 1
            life.resumed_shards = None
            self.model.see(manifest)
            self.model.expected.add(manifest.version)
        self.check_retention(life.retention)

    def take_in(self) -> None:
        """Versions whose commit was reported as failed may stand all the same."""
        assert self.clean is not None
        for version in self.versions():
            if version not in self.model.manifests:
                self.model.see(self.clean.manifest(version))

    def check_retention(self, policy: RetentionPolicy) -> None:
        """What a gc had to keep stands; what stands now is expected from now on."""
        standing = set(self.versions())
        candidates = sorted(self.model.expected | standing)
        tags = {version: name for name, version in self.tags.items()}
        facts = [VersionFacts(version=v, tags=(tags[v],) if v in tags else ()) for v in candidates]
        kept = {*policy.keep(facts), *candidates[-1:]}
        if not kept <= standing:
            raise LostVersionError(
                f"{sorted(kept - standing)} of {candidates} are gone under {policy}"
            )
        self.model.expected = standing
        self.tags = {name: version for name, version in self.tags.items() if version in standing}

    def fits(self, version: VersionId, shards: int) -> bool:
        """Whether so many shards have room for the version: each has some to spare."""
        cut = self.model.cuts[self.model.steps[version]]
        held = sum(table == "evicting" for table, _ in cut.rows)
        return shards >= cut.shards or held <= (TABLES[2].capacity or 0)

    def resume(self, life: Life, version: VersionId | None) -> None:
        """The run goes on from a version, the newest unless one is given."""
        self.settle(life)
        self.take_in()
        if version is not None and version not in self.versions():
            return
        if version is not None and not self.model.manifests[version].whole:
            with contextlib.suppress(StateError):
                life.checkpointer.restore(version.number)
                raise WrongRowsError(f"{version} is a prioritised version, and was restored")
            return
        if version is None and not self.whole():
            return
        if not self.fits(version or self.whole()[-1], life.cluster.shard_count):
            return
        restored = life.checkpointer.restore(None if version is None else version.number)
        if restored is None:
            raise LostVersionError("nothing was restored")
        resumed = restored.manifest.version
        if resumed != (version or self.whole()[-1]):
            raise LostVersionError(f"{resumed} was restored, not {version or self.whole()[-1]}")
        found = rows_of(life.cluster)
        self.model.compare(resumed, found)
        cut = self.model.cuts[self.model.steps[resumed]]
        life.rows = {key: (cut.rows[key][0], planes) for key, planes in found.items()}
        life.resumed_shards = cut.shards
        state = life.cluster.table_state()
        if cut.shards != life.cluster.shard_count:  # each counts the ticks of its own rows
            state, cut_state = _steps(state), _steps(cut.state)
        else:
            cut_state = cut.state
        if state != cut_state:
            raise WrongRowsError(f"version {resumed}: {state} is not the state of its cut")
        self.counts["resumes"] += 1
        self.counts["restores"] += 1

    def check(self, version: VersionId, repository: Repository | None = None) -> None:
        """A reader with any number of shards finds the version as it was."""
        if not self.model.manifests[version].whole:
            return
        repository = repository or Repository.open(self.memory)
        cluster = self.open_cluster(self.pick(SHARDS))
        cluster.track()
        try:
            with warnings.catch_warnings(record=True) as warned, Pin(repository, version):
                warnings.simplefilter("always", RuntimeWarning)
                load(repository, version, cluster, POOL)
        except NoVersionError:
            if version in self.versions():
                raise
            return  # retention, in the background
        said = [_EVICTED.search(str(warning.message)) for warning in warned]
        evicted = sum(int(match[1]) for match in said if match)
        self.model.compare(version, rows_of(cluster), evicted)
        self.counts["restores"] += 1
        self.counts["rows evicted by restores"] += evicted

    def collect(self, life: Life) -> None:
        self.settle(life)
        self.take_in()
        policy = self.pick(RETENTION)
        with contextlib.suppress(StorageError):
            Collector(life.checkpointer.writer, policy=policy, grace=NOW).collect()
        self.check_retention(policy)
        self.counts["collections"] += 1

    def tag(self, life: Life) -> None:
        versions = self.versions()
        if self.tags and self.chance(0.3):
            name = self.pick(sorted(self.tags))
            life.repository.untag(name)
            del self.tags[name]
        elif versions:
            version, name = self.pick(versions), f"tag-{self.pick(range(4))}"
            try:
                life.repository.tag(name, version)
                self.tags[name] = version
            except (ConfigError, NoVersionError):
                return
        self.counts["tags"] += 1

    def fork(self) -> None:
        if not self.versions():
            return
        version = self.pick(self.versions())
        assert self.clean is not None
        target = MemoryStore()
        try:
            copy = fork(self.clean, version, target)
        except NoVersionError:
            return  # retention, in the background
        if not verify(copy).ok:
            raise WrongRowsError(f"the fork of {version} is damaged")
        self.check(version, copy)
        self.counts["forks"] += 1

    def wake_zombie(self, life: Life) -> None:
        """A process that was replaced wakes up: it saves and deletes nothing."""
        if not self.zombies:
            return
        self.settle(life)
        zombie = self.zombies.pop(int(self.random.integers(len(self.zombies))))
        before = self.versions()
        self.step += 1
        try:
            if self.chance(0.3):
                Collector(zombie.checkpointer.writer, policy=KeepLast(n=1), grace=NOW).collect()
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    zombie.checkpointer.save(self.step)
                    zombie.checkpointer.wait()
        except (FencedError, SaveError):
            self.counts["zombies"] += 1
        else:
            raise LostVersionError("a process that was replaced has acted on the repository")
        if self.versions() != before:
            raise LostVersionError(
                f"a process that was replaced has made {self.versions()} of {before}"
            )

    # -- what goes wrong -------------------------------------------------------------------------

    def store_of(self, life: Life) -> FaultStore:
        store = life.repository.store
        assert isinstance(store, FaultStore)
        return store

    def break_store(self, life: Life) -> None:
        store = self.store_of(life)
        if self.chance(0.4):  # the answer to a commit is lost, and the store is silent for a while
            silent = self.pick([1, 3, 6])

            def lose(number: int, method: str, name: str) -> None:
                if method == "put_if_absent" and name.startswith(("versions/", "grid/")):
                    store.faults[number] = Fault.LOSE
                    store.faults.update((number + k, Fault.FAIL) for k in range(1, silent))
                    store.before = None

            store.before = lose
            return
        fault = self.pick([Fault.FAIL, Fault.LOSE, Fault.DELAY, Fault.DIE_BEFORE, Fault.DIE_AFTER])
        first = store.count + int(self.random.integers(0, 30))
        store.faults = dict.fromkeys(range(first, first + self.pick([1, 1, 3])), fault)

    def heal_store(self, life: Life) -> None:
        store = self.store_of(life)
        store.before = None
        store.faults.clear()
        store.deliver()
        if store._dead:
            raise ProcessDied

    def revive_store(self, life: Life) -> None:
        """The threads of a process that has died are still there: they see a store without it."""
        life.repository.store = FaultStore(MemoryStore())

    def make_durable(self, life: Life) -> None:
        self.step += 1
        for future in life.cluster.prepare_tiers(self.step):
            future.result(60)
        life.cluster.commit_tiers()
        assert life.tier is not None
        self.tiers[life.tier] = dict(life.rows)
        self.counts["durable batches"] += 1

    def check_all(self) -> None:
        """At the end: every version that stands, and what verify says."""
        self.take_in()
        versions = self.versions()
        if not self.model.expected <= {*versions}:
            raise LostVersionError(f"{self.model.expected - {*versions}} are not there any more")
        for version in versions:
            self.check(version)
        assert self.clean is not None
        report = verify(self.clean)
        if not report.ok:
            raise WrongRowsError(f"a healthy repository is called damaged: {report.damages[:3]}")


@contextlib.contextmanager
def small_tiers() -> Iterator[Path]:
    """Tiers with small segments that need not reach a medium, below a directory of their own."""
    before = durable_open.SEGMENT_NBYTES, durable_open.DISK
    durable_open.SEGMENT_NBYTES, durable_open.DISK = 16384, Unsynced  # type: ignore[misc]
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(dir=shared, prefix="emberkeep-"))
    try:
        yield root
    finally:
        durable_open.SEGMENT_NBYTES, durable_open.DISK = before  # type: ignore[misc]
        shutil.rmtree(root)


def history(seed: int, lives: int = 6) -> Counts:
    """One history; raises what it finds, with the seed that repeats it."""
    with small_tiers() as root:
        found = History(seed, root)
        try:
            for _ in range(lives):
                found.live()
            found.check_all()
        except AssertionError as error:
            raise type(error)(f"{error} (history {seed} of {lives} lives)") from error
        return found.counts


def run(seed: int, histories: int, seconds: float = math.inf) -> Counts:
    """So many histories from a seed on, or until the time is over; how much of what they saw."""
    counts: Counts = Counts()
    until = time.monotonic() + seconds
    while counts["histories"] < histories and time.monotonic() < until:
        counts += history(seed + counts["histories"])
    return counts
