"""Plans as tables of cases; partial recovery against what was saved, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import Buffer, MemoryStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.checkpoint.recovery import Home, Losses, Recovery, plan, recover_partially
from emberkeep.checkpoint.restore import rows_of
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import ConfigError, StateError
from emberkeep.repository import KeepAll, Repository
from emberkeep.rows.priority import Priority
from emberkeep.runtime.pool import Pool
from emberkeep.tables import Adam, Table
from tests.contracts.cluster import rows_of as rows_on
from tests.contracts.engine import grads_of, state, wanted_of
from tests.nightly import checkered

PARTIAL = Recovery(scope="partial", most_pls=0.2)


@pytest.mark.parametrize(
    ("recovery", "given", "scope", "words"),
    [
        (PARTIAL, {}, "partial", "partially"),
        (Recovery(scope="partial", reason="it is cheap"), {}, "partial", "it is cheap"),
        (Recovery(), {}, "full", "fully"),
        (Recovery(reason="nothing may be lost"), {}, "full", "nothing may be lost"),
        (PARTIAL, {"lost": [0, 1, 2, 3]}, "full", "every shard"),
        (PARTIAL, {"saved": None}, "full", "no version"),
        (PARTIAL, {"going_back": True}, "full", "under way"),
        (Recovery(), {"unchanged": True}, "partial", "nothing is lost"),
        (Recovery(), {"unchanged": True, "lossy": True}, "partial", "as it has them, rounded"),
        (Recovery(), {"unchanged": True, "going_back": True}, "full", "under way"),
        (Recovery(), {"unchanged": True, "lost": [0, 1, 2, 3]}, "full", "fully"),
        (PARTIAL, {"step": 90}, "full", "from 0.03 to 0.23, and the job may lose 0.2"),
        (PARTIAL, {"step": 10}, "partial", ""),  # just saved: nothing is lost
    ],
)  # fmt: skip
def test_plans(recovery: Recovery, given: dict[str, Any], scope: str, words: str) -> None:
    known: dict[str, Any] = {
        "lost": [1], "shards": 4, "step": 50, "saved": 10, "total": 100, "going_back": False,
    }  # fmt: skip
    known.update(given)
    decided = plan(recovery, Losses(pls=0.03), known.pop("lost"), **known)
    assert decided.scope == scope
    assert words in decided.reason


def test_pls_counts_what_each_shard_lost_since_it_was_saved_or_recovered() -> None:
    losses = Losses()
    losses = losses.after([2], step=30, saved=20, total=100, shards=4)
    assert losses.pls == pytest.approx(10 / 400)
    losses = losses.after([2], step=36, saved=20, total=100, shards=4)  # 20 to 30 is counted
    assert losses.pls == pytest.approx(16 / 400)
    losses = losses.after([0, 2], step=40, saved=38, total=100, shards=4)
    assert losses.pls == pytest.approx(20 / 400)
    losses = losses.after([1], step=40, saved=40, total=100, shards=4)
    assert losses.pls == pytest.approx(20 / 400)
    assert losses.recovered_at == {2: 40, 0: 40, 1: 40}
    assert Losses.from_dict(losses.to_dict()) == losses
    assert Losses.from_dict({}) == Losses()
    # Losing every shard over the whole job loses everything.
    whole = Losses().after(range(4), step=100, saved=0, total=100, shards=4)
    assert whole.pls == pytest.approx(1)


@pytest.mark.parametrize("given", [{"scope": "some"}, {"most_pls": 1.5}, {"most_pls": -0.1}])
def test_impossible_recoveries_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Recovery(**given)


# -- rows ------------------------------------------------------------------------------------------

TABLES = [
    Table("large", rows=2000, dim=4),
    Table("dynamic", rows=None, capacity=900, dim=4),
    Table("evicting", rows=None, capacity=240, dim=4, on_full="evict_oldest"),
    Table("small", rows=20, dim=4),
]
LAYOUTS = ["full", "one_shot", "intermittent", "consecutive"]
KINDS = [None, "mfu", "ssu", "scar"]
SETTINGS = SaveSettings(retention=KeepAll(), grace=timedelta(0))


class LoggedStore(MemoryStore):
    """Knows which objects were read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def get(self, name: str) -> bytes:
        self.reads.append(name)
        return super().get(name)

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        self.reads.append(name)
        return super().get_range(name, start, length)


class Run:
    """A cluster that is trained and saved."""

    def __init__(
        self, layout: Any, kind: Any, *, shards: int = 3, seed: int = 0, store: Any = None
    ) -> None:
        self.cluster = local(shards=shards, threads=2).open(TABLES, Adam(lr=0.05), seed=1)
        self.random = np.random.default_rng(seed)
        self.store = store or LoggedStore()
        if not Repository.exists(self.store):
            Repository.create(self.store, schema=self.cluster.schema())
        priority = None if kind is None else Priority(kind=kind, fraction=0.2, period=1)
        self.keeper = Checkpointer(
            Repository.open(self.store),
            self.cluster,
            spec=VersionSpec(layout=layout, priority=priority),
            settings=SETTINGS,
        )
        self.step = 0

    @property
    def home(self) -> Home:
        return Home(self.cluster, {table.name: table.name for table in TABLES})

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            if self.random.random() < 0.4:
                self.cluster.delete("dynamic", self.random.integers(0, 500, 9))
                self.cluster.delete("large", self.random.integers(0, 2000, 9))
            batch = {
                table.name: np.unique(self.random.zipf(1.3, 40) % (table.rows or 500)).tolist()
                for table in TABLES
            }
            grads = {n: self.random.standard_normal((len(i), 4)) for n, i in batch.items()}
            self.cluster.push(wanted_of(self.cluster, batch), grads_of(self.cluster, grads), lr=0.1)
            self.step += 1

    def save(self, *, whole: bool = False) -> Any:
        self.keeper.save(self.step, whole=whole)
        return self.keeper.wait()

    def lose(self, *shards: int) -> Any:
        self.cluster.kill(*shards)
        return recover_partially(self.keeper, self.home, list(shards))


def saved_rows(repository: Repository, chain: list[Any]) -> Iterator[tuple[str, int, Any]]:
    """What versions on top of each other leave: the newest saved value of every row."""
    rows: dict[tuple[str, int], Any] = {}
    for manifest in chain:
        if manifest.layout["kind"] == "full":
            rows.clear()
        for chunk in rows_of(repository, manifest, Pool(1)):
            for i, identity in enumerate(chunk.ids.tolist()):
                if chunk.planes is None:
                    rows.pop((chunk.table, identity), None)
                else:
                    rows[chunk.table, identity] = {
                        name: values[i].tobytes() for name, values in chunk.planes.items()
                    }
    for (table, identity), planes in rows.items():
        yield table, identity, planes


@pytest.mark.parametrize(("layout", "kind"), checkered(LAYOUTS, KINDS))
@pytest.mark.long
def test_a_lost_shard_gets_the_newest_saved_value_of_every_row(layout: Any, kind: Any) -> None:
    run = Run(layout, kind)
    kinds = []
    for _ in range(7):
        run.train()
        kinds.append(run.save().layout["kind"])
    assert ("prioritised" in kinds) == (kind is not None)
    run.train()
    before = rows_on(run.cluster, [0, 2])
    state_before = run.cluster.table_state()
    newest = run.keeper.repository.versions()[-1]
    found = run.lose(1)
    assert found is not None
    assert found.version == newest
    assert rows_on(run.cluster, [0, 2]) == before
    # Tables go on counting where the survivors are; ticks stay behind those of all rows.
    for table, own in run.cluster.table_state().items():
        assert own["steps"] == state_before[table]["steps"] == run.step
    expected: dict[str, dict[int, Any]] = {table.name: {} for table in TABLES}
    chain = run.keeper.repository.chain(newest)
    for table, identity, planes in saved_rows(run.keeper.repository, chain):
        if run.cluster.positions(table, np.array([identity]))[1].size:
            expected[table][identity] = planes
    for table in TABLES:
        ids, planes = run.cluster.handles[1].read_all(table.name)
        got = {
            int(identity): {name: values[i].tobytes() for name, values in planes.items()}
            for i, identity in enumerate(ids)
        }
        assert got == expected[table.name]


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "kind", "seed"),
    [
        # By day each kind and each layout once.
        pytest.param(layout, kind, seed, marks=() if (n + m) % 4 == seed == 0 else pytest.mark.soak)
        for n, layout in enumerate(LAYOUTS)
        for m, kind in enumerate(KINDS)
        for seed in (0, 1)
    ],
)
def test_versions_after_a_partial_recovery_hold_all_that_they_must(
    layout: Any, kind: Any, seed: int
) -> None:
    """Whatever was lost in between, a whole version restores to the state at its step."""
    run = Run(layout, kind, seed=seed)
    states = {}
    for _ in range(14):
        run.train(int(run.random.integers(1, 3)))
        if run.random.random() < 0.4:
            lost = run.random.choice(3, int(run.random.integers(1, 3)), replace=False)
            run.lose(*lost.tolist())
            run.train()
        before, tables = state(run.cluster), run.cluster.table_state()
        manifest = run.save(whole=bool(run.random.random() < 0.3))
        if manifest.whole:
            states[manifest.version.number] = before, tables
    assert len(states) > 3
    for number, (rows, tables) in states.items():
        other = Run(layout, None, store=run.store)
        other.keeper.restore(number)
        assert state(other.cluster) == rows
        assert other.cluster.table_state() == tables


def test_only_the_files_of_the_lost_shard_are_read() -> None:
    run = Run("consecutive", "mfu")
    manifests = []
    for _ in range(4):
        run.train(4)
        manifests.append(run.save())
    run.store.reads.clear()
    run.lose(2)
    files = {f.name: f.metadata["shard"] for m in manifests for f in m.of_kind("rows")}
    read = {files[name] for name in run.store.reads if name in files}
    assert read == {2}
    assert len(set(files.values())) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_version_of_another_number_of_shards_serves_as_well(layout: Any) -> None:
    first = Run(layout, None, shards=2)
    for _ in range(3):
        first.train()
        first.save(whole=True)
    run = Run(layout, None, shards=4, store=first.store)
    run.keeper.restore()
    run.step = first.step
    before = state(run.cluster)
    run.lose(0, 3)
    assert state(run.cluster) == before  # nothing was trained since
    run.train()
    run.lose(1)
    run.train()
    expected = state(run.cluster)
    run.save(whole=True)
    other = Run(layout, None, shards=3, store=first.store)
    other.keeper.restore()
    assert state(other.cluster) == expected


def test_without_a_version_a_lost_shard_starts_over() -> None:
    run = Run("full", None)
    run.train()
    assert run.lose(1) is None
    assert rows_on(run.cluster, [1])[1, "large"]["ids"] == b""
    assert run.cluster.lost() == ()


def test_a_full_recovery_passes_over_prioritised_versions() -> None:
    run = Run("intermittent", "ssu")
    run.train()
    first = run.save()
    before = state(run.cluster)
    for _ in range(3):
        run.train()
        assert not run.save().whole
    restored = run.keeper.restore()
    assert restored is not None
    assert restored.manifest.version == first.version
    assert state(run.cluster) == before
    with pytest.raises(StateError, match="prioritised"):
        run.keeper.restore(3)
    assert run.keeper.repository.newest_whole() == first.version


def test_whole_versions_come_once_in_every_round() -> None:
    run = Run("intermittent", "mfu")  # a fifth of the rows at a time
    kinds = []
    for _ in range(11):
        run.train(1)
        kinds.append(run.save().whole)
    assert kinds == [True, False, False, False, False] * 2 + [True]
    run.train(1)
    assert run.save(whole=True).whole  # whenever it is asked for
    run.train(1)
    assert not run.save().whole


def test_a_save_that_loses_its_shard_fails_and_nothing_else() -> None:
    run = Run("consecutive", "mfu")
    run.train()
    run.save()
    run.train()
    events: list[str] = []
    run.keeper._on_event = lambda name, _details: events.append(name)
    for whole in (True, False):
        frozen = run.cluster.freeze

        def freeze(since: Any, nbytes: int, frozen: Any = frozen) -> Any:
            parts = frozen(since, nbytes)
            run.cluster.kill(1)  # before a single row was copied
            return parts

        run.cluster.freeze = freeze  # type: ignore[method-assign]
        saving = run.keeper.save(run.step, whole=whole)
        run.keeper.join()
        assert saving.committed.exception() is not None
        run.cluster.freeze = frozen  # type: ignore[method-assign]
        recover_partially(run.keeper, run.home, [1])
    run.keeper.check(least=1)  # the store is not to blame
    assert events == ["save_failed"] * 2
    run.train()
    before = state(run.cluster)
    assert run.save(whole=True) is not None
    other = Run("consecutive", None, store=run.store)
    other.keeper.restore()
    assert state(other.cluster) == before


def test_clusters_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that was never lost is not looked at by a recovery."""
    run = Run("full", None)
    run.train()
    run.save(whole=True)
    monkeypatch.setattr(LocalCluster, "clear", lambda self: pytest.fail("cleared"))
    run.lose(0)
