"""Batches in the files of servers, often, and versions in a repository, seldom: one run."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep.checkpoint.saver import Checkpointer
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.remote_tiers import RemoteTiers
from emberkeep.errors import (
    CancelledError,
    ConfigError,
    NoRepositoryError,
    SaveError,
    ShardLostError,
    StateError,
    StorageError,
)
from emberkeep.keeper.run_saver import DurableStep
from emberkeep.repository import Manifest, Writer
from emberkeep.runtime import pool
from emberkeep.strategies import Strategy
from emberkeep.tables import Optimizer, Table, Tier
from emberkeep.tiers import durable_open
from tests.contracts.engine import state as rows
from tests.servers import Farm, FarmLauncher

pytestmark = pytest.mark.filterwarnings("ignore:step .* was resumed and the keeper has no reader")
TABLES = [
    Table("a", rows=60, dim=4),
    Table("b", rows=None, capacity=40, dim=4, on_full="evict_oldest"),
    Table("c", rows=20, dim=3),
]
SHARDS = 3
TOTAL = 100


@pytest.fixture
def root() -> Iterator[Path]:
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=where, prefix="emberkeep-") as path:
        yield Path(path)


@pytest.fixture
def launcher(farm: Farm, root: Path) -> Iterator[FarmLauncher]:
    started = FarmLauncher(farm, SHARDS, tier=Tier(root / "t", memory=40_000))
    yield started
    started.end()


class OnServers:
    """Where rows live: the servers of a test."""

    def __init__(self, launcher: FarmLauncher, **options: Any) -> None:
        self.launcher, self.options = launcher, options

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        return FlightCluster(
            tables, optimizer, self.launcher, seed=seed, pool=pool.Pool(1), **self.options
        )


class Model(nn.Module):
    def __init__(self, tables: Sequence[Table], cluster: Any) -> None:
        super().__init__()
        self.bags = ek.EmbeddingBags(
            tables, optimizer=ek.Adagrad(lr=0.1), cluster=cluster, output="dict"
        )
        self.top = nn.Linear(11, 1)

    def forward(self, step: int) -> torch.Tensor:
        ids = {
            "a": (torch.arange(8) * 7 + step * 5) % 60,
            "b": (torch.arange(8) * 3 + step * 2) % 90,
            "c": (torch.arange(8) + step) % 20,
        }
        bags = self.bags({name: given.reshape(4, 2) for name, given in ids.items()})
        out: torch.Tensor = self.top(torch.cat([bags["a"], bags["b"], bags["c"]], 1))
        return out


class Run:
    """A model trained step by step, on ids that follow from the step."""

    def __init__(
        self, cluster: Any, where: Path | None, strategy: Strategy, *,
        tables: Sequence[Table] = TABLES, **options: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.model = Model(tables, cluster)
        self.optimizers = [
            self.model.bags.optimizer,
            torch.optim.Adam(self.model.top.parameters(), lr=0.01),
        ]
        self.events: list[tuple[str, Any]] = []
        try:
            self.keeper = ek.Keeper(
                where, self.model, self.optimizers, strategy=strategy, total_steps=TOTAL,
                on_event=self.hear, **options,
            )  # fmt: skip
        except BaseException:
            self.end()
            raise

    @property
    def cluster(self) -> Any:
        return self.model.bags.cluster

    def train(self, steps: int, *, wait: bool = True) -> Run:
        for _ in range(steps):
            self.model(self.keeper.steps).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.keeper.step()
            if wait:
                self.keeper.wait()
        return self

    def bits(self) -> list[Any]:
        dense = [parameter.detach().tolist() for parameter in self.model.top.parameters()]
        return [rows(self.cluster), dense]

    def hear(self, event: str, details: Any) -> None:
        self.events.append((event, details))

    def heard(self, event: str) -> list[Any]:
        return [details for name, details in self.events if name == event]

    def end(self) -> None:
        """As if the process were gone: nothing more is saved."""
        self.cluster.close()


def _train(model: Model, optimizers: Sequence[torch.optim.Optimizer], steps: int) -> None:
    for step in range(steps):
        model(step).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def plain(steps: int) -> list[Any]:
    """The bits of a run in memory, after so many steps."""
    torch.manual_seed(0)
    model = Model(TABLES, local(shards=SHARDS))
    optimizers = [model.bags.optimizer, torch.optim.Adam(model.top.parameters(), lr=0.01)]
    _train(model, optimizers, steps)
    dense = [parameter.detach().tolist() for parameter in model.top.parameters()]
    return [rows(model.bags.cluster), dense]


def rows_at(shard: int, steps: int) -> dict[str, str]:
    """What one shard holds after so many steps in memory."""
    torch.manual_seed(0)
    model = Model(TABLES, local(shards=SHARDS))
    optimizers = [model.bags.optimizer, torch.optim.Adam(model.top.parameters(), lr=0.01)]
    _train(model, optimizers, steps)
    handle = model.bags.cluster.handles[shard]
    return {table.name: str(handle.digest(table.name)) for table in TABLES}


OFTEN = ek.tiered(every=2, remote=6)


def test_a_run_goes_on_from_the_batch_that_servers_have(launcher: FarmLauncher, root: Path) -> None:
    first = Run(OnServers(launcher), root / "r", OFTEN)
    assert first.keeper.resume() is None
    first.train(9)
    saved = [(s["step"], s["version"]) for s in first.heard("saved")]
    assert [step for step, version in saved if version is None] == [2, 4, 6, 8]
    assert [step for step, version in saved if version is not None] == [0, 6]
    first.end()
    again = Run(OnServers(launcher), root / "r", OFTEN)
    assert again.keeper.resume() == DurableStep(8)
    assert again.bits() == plain(8)
    again.train(5)
    assert again.bits() == plain(13)
    last = again.keeper.close()
    assert isinstance(last, Manifest)
    assert last.step == 13
    again.end()
    ended = Run(OnServers(launcher), root / "r", OFTEN)
    kept = ended.keeper.resume()
    assert kept is not None
    assert kept.step == 13
    assert ended.bits() == plain(13)
    ended.end()
    # One batch, its state; the decision about it went when every server had recorded it.
    left = sorted(path.name for path in (root / "r" / "tiers").iterdir())
    assert [name.rpartition("-")[0] for name in left if name.startswith("step")] == []


@pytest.mark.parametrize("gone", ["one", "all"])
def test_files_that_are_gone_come_from_the_repository(
    launcher: FarmLauncher, root: Path, gone: str
) -> None:
    first = Run(OnServers(launcher), root / "r", OFTEN)
    first.keeper.resume()
    first.train(8)
    first.end()
    shutil.rmtree(root / "t" / "shard-1" if gone == "one" else root / "t")
    again = Run(OnServers(launcher), root / "r", OFTEN)
    kept = again.keeper.resume()
    assert isinstance(kept, Manifest)
    assert kept.step == 6
    assert again.bits() == plain(6)
    again.train(1).end()  # nothing is durable at 8 any more, for anybody
    third = Run(OnServers(launcher), root / "r", OFTEN)
    kept = third.keeper.resume()
    assert kept is not None
    assert kept.step == 6
    third.train(4)
    assert third.bits() == plain(10)
    third.end()


@pytest.mark.parametrize("after", [0, 1])
def test_a_server_that_is_killed_takes_all_back_to_the_batch(
    launcher: FarmLauncher, root: Path, after: int
) -> None:
    run = Run(OnServers(launcher), root / "r", OFTEN)
    run.keeper.resume()
    run.train(8 + after)
    launcher.kill(1)
    with run.keeper.surviving():
        run.train(1)
    assert run.keeper.steps == 8
    (made,) = run.heard("recovered")
    assert (made["scope"], made["step"], made["repeated_steps"]) == ("full", 8, after)
    assert run.bits() == plain(8)
    run.train(4)
    assert run.bits() == plain(12)
    run.end()


def test_a_server_that_is_killed_comes_back_alone_from_its_files(
    launcher: FarmLauncher, root: Path
) -> None:
    run = Run(OnServers(launcher), root / "r", ek.tiered(every=4, remote=50, recovery="partial"))
    run.keeper.resume()
    run.train(6)
    before = [run.cluster.handles[s].digest(t.name) for s in (0, 2) for t in TABLES]
    launcher.kill(1)
    shard = run.cluster.handles[1]
    with pytest.raises(ShardLostError):
        shard.digest("a")
    assert run.keeper.recover() is not None
    (made,) = run.heard("recovered")
    assert (made["scope"], made["shards"], made["version"]) == ("partial", (1,), None)
    assert made["pls"] == pytest.approx(2 / (TOTAL * SHARDS))
    assert before == [run.cluster.handles[s].digest(t.name) for s in (0, 2) for t in TABLES]
    run.train(2)
    assert run.keeper.steps == 8
    run.end()


def test_several_servers_are_lost_and_the_files_of_one_with_it(
    launcher: FarmLauncher, root: Path
) -> None:
    """One comes back from its files, the other from the repository, and that is counted."""
    run = Run(OnServers(launcher), root / "r", ek.tiered(every=4, remote=2, recovery="partial"))
    run.keeper.resume()
    run.train(6)  # batch 4, with a version of step 4
    run.keeper._saver._remote = ek.tiered(every=4, remote=50).remote  # and no other
    run.train(4)  # batch 8
    for shard in (1, 2):
        launcher.kill(shard)
    shutil.rmtree(root / "t" / "shard-2")
    expected = {1: rows_at(1, 8), 2: rows_at(2, 4)}
    made = run.keeper.recover(None)
    while made is None:  # the loss is noticed by the next call
        with pytest.raises(ShardLostError):
            run.cluster.handles[1].digest("a")
        made = run.keeper.recover(None)
    assert made.scope == "partial"
    assert run.keeper.steps == 10
    if made.shards == (1,):
        with pytest.raises(ShardLostError):
            run.cluster.handles[2].digest("a")
        assert run.keeper.recover(None) is not None
    # Shard 1 has lost steps 9 and 10, shard 2 those since the version.
    assert run.keeper.recoveries().pls == pytest.approx((2 + 6) / (TOTAL * SHARDS))
    for shard, rows_then in expected.items():
        assert {t.name: str(run.cluster.handles[shard].digest(t.name)) for t in TABLES} == rows_then
    run.train(2)
    run.end()


def lose_with_files(run: Run, launcher: FarmLauncher, tiers: Path, *shards: int) -> None:
    """Servers are killed, their files go, and it is noticed."""
    for shard in shards:
        launcher.kill(shard)
        shutil.rmtree(tiers / f"shard-{shard}")
        with pytest.raises(ShardLostError):
            run.cluster.handles[shard].digest("a")


def test_servers_without_files_load_at_the_same_time(
    launcher: FarmLauncher, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(OnServers(launcher), root / "r", ek.tiered(every=4, remote=4, recovery="partial"))
    run.keeper.resume()
    run.train(4)
    lose_with_files(run, launcher, root / "t", 1, 2)
    both, load = threading.Barrier(2, timeout=60), Checkpointer.restore_shard

    def meeting(*given: Any) -> Any:
        both.wait()  # for ever, if one were loaded after the other
        return load(*given)

    monkeypatch.setattr(Checkpointer, "restore_shard", meeting)
    made = run.keeper.recover(None)
    assert made is not None
    assert (made.scope, made.shards) == ("partial", (1, 2))
    for shard in (1, 2):
        digests = {t.name: str(run.cluster.handles[shard].digest(t.name)) for t in TABLES}
        assert digests == rows_at(shard, 4)
    run.end()


def test_a_version_that_is_named_gives_the_batch_up(launcher: FarmLauncher, root: Path) -> None:
    first = Run(OnServers(launcher), root / "r", OFTEN)
    first.keeper.resume()
    first.train(9)
    first.end()
    back = Run(OnServers(launcher), root / "r", OFTEN)
    kept = back.keeper.resume(2)
    assert kept is not None
    assert kept.step == 6
    assert back.bits() == plain(6)
    back.end()
    again = Run(OnServers(launcher), root / "r", OFTEN)
    kept = again.keeper.resume()
    assert kept is not None
    assert kept.step == 6
    again.end()


def test_rows_that_were_trained_since_go_back_too(launcher: FarmLauncher, root: Path) -> None:
    run = Run(OnServers(launcher), root / "r", OFTEN)
    run.keeper.resume()
    run.train(7)
    assert run.keeper.resume() == DurableStep(6)
    assert run.bits() == plain(6)
    run.train(3)
    assert run.bits() == plain(9)
    run.end()


def test_files_of_another_run_are_refused(launcher: FarmLauncher, root: Path) -> None:
    first = Run(OnServers(launcher), root / "r", OFTEN)
    first.keeper.resume()
    first.train(2).end()
    for strategy in (OFTEN, ek.incremental()):
        with pytest.raises(StateError, match=r"shard 0 at .* has files of another run"):
            Run(OnServers(launcher), root / "other", strategy)
    changed = [Table("a", rows=61, dim=4), *TABLES[1:]]
    with pytest.raises(StateError, match="belongs to another model: its table 'a'"):
        Run(OnServers(launcher), root / "r", OFTEN, tables=changed)
    again = Run(OnServers(launcher), root / "r", OFTEN)
    assert again.keeper.resume() == DurableStep(2)
    again.end()


def test_a_run_that_keeps_versions_alone_uses_files_as_memory(
    launcher: FarmLauncher, root: Path
) -> None:
    first = Run(OnServers(launcher), root / "r", OFTEN)
    first.keeper.resume()
    first.train(9).end()
    run = Run(OnServers(launcher), root / "r", ek.incremental(every=4, recovery="full"))
    kept = run.keeper.resume()
    assert kept is not None
    assert kept.step == 6
    run.train(3)  # version 8
    launcher.kill(0)
    with run.keeper.surviving():
        run.train(1)
    assert run.bits() == plain(8)
    run.end()


def test_what_cannot_be_is_refused(launcher: FarmLauncher, root: Path, farm: Farm) -> None:
    with pytest.raises(ConfigError, match=r"decided beside the versions.*give the keeper a repo"):
        Run(OnServers(launcher), None, ek.incremental())
    with pytest.raises(ConfigError, match="neither with prioritised"):
        replace(OFTEN, parity=ek.Parity(k=2, r=1))
    with pytest.raises(ConfigError, match="table 'a' has none: give tier="):
        Run(local(), root / "r", OFTEN)
    assert not (root / "r").exists()
    with pytest.raises(NoRepositoryError, match="must exist"):
        Run(OnServers(launcher), root / "new", OFTEN, must_exist=True)


def test_in_process_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    tier = Tier(root / "t", memory=60_000)
    tables = [replace(table, tier=tier) for table in TABLES]

    def start() -> Run:
        return Run(local(shards=SHARDS), root / "r", OFTEN, tables=tables)

    first = start()
    first.keeper.resume()
    first.train(9).end()
    again = start()
    assert again.keeper.resume() == DurableStep(8)
    assert again.bits() == plain(8)
    again.cluster.kill(1)
    with again.keeper.surviving():
        again.train(1)
    assert again.bits() == plain(8)
    again.train(2).end()
    back = start()
    kept = back.keeper.resume(2)
    assert kept is not None
    assert kept.step == 6
    back.end()
    third = start()
    kept = third.keeper.resume()
    assert kept is not None
    assert kept.step == 6
    assert third.bits() == plain(6)
    third.end()


@pytest.mark.parametrize("stopped", [False, True])
def test_what_is_durable_after_newer_versions_were_left_is_gone_on_from(
    root: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    tables = [replace(table, tier=Tier(root / "t", memory=60_000)) for table in TABLES]

    def start() -> Run:
        return Run(local(shards=SHARDS), root / "r", OFTEN, tables=tables)

    first = start()
    first.keeper.resume()
    first.train(13).end()
    back = start()
    kept = back.keeper.resume(2)
    assert kept is not None
    assert kept.step == 6
    if stopped:
        back.train(1)
        back.keeper.stop_after_step()
        with pytest.raises(SystemExit):
            back.train(1)
    else:
        back.train(2)
    back.end()
    again = start()
    kept = again.keeper.resume()
    assert kept is not None
    assert kept.step == 8
    assert again.bits() == plain(8)
    again.train(2).end()
    last = start()
    assert last.keeper.resume() == DurableStep(10)
    assert last.bits() == plain(10)
    last.end()


def in_process(root: Path, **options: Any) -> Run:
    tables = [replace(table, tier=Tier(root / "t", memory=60_000)) for table in TABLES]
    run = Run(local(shards=SHARDS), root / "r", OFTEN, tables=tables, **options)
    run.keeper.resume()
    return run


def test_a_version_that_is_due_does_not_wait_for_the_batch(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    run = in_process(root)
    run.train(5)
    saver: Any = run.keeper._saver
    prepare, go_on = saver._tier.tiers.prepare, threading.Event()

    def slow(batch: int) -> Any:
        prepared = prepare(batch)

        def when_allowed() -> None:
            assert go_on.wait(60)
            prepared()

        return when_allowed

    monkeypatch.setattr(saver._tier.tiers, "prepare", slow)
    saver._tier._patience = timedelta(milliseconds=1)  # who waits for the batch fails so
    run.train(1, wait=False)
    assert saver.busy
    assert saver._saving.committed.result(60).step == 6
    go_on.set()
    saver._tier._patience = timedelta(minutes=1)
    run.keeper.wait()
    run.end()


def whose_last_batch_fails(root: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> Any:
    """A run after step 4, of which the files are without."""
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    run = in_process(root)
    run.train(3)
    saver: Any = run.keeper._saver

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(saver._tier._state, "put", fail)
        run.train(1, wait=False)
        saver._tier.join()
    return run


def test_the_last_version_is_written_although_the_last_batch_failed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = whose_last_batch_fails(root, monkeypatch, StorageError("the disk is away"))
    saver: Any = run.keeper._saver
    with pytest.raises(StorageError, match="the disk is away"):
        run.keeper.close()
    run.end()
    newest = saver.repository.newest_whole()
    assert saver.repository.manifest(newest).step == 4


def test_a_batch_that_lost_shards_ended_does_not_end_the_last_version(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = whose_last_batch_fails(root, monkeypatch, ShardLostError([0]))
    last = run.keeper.close()
    assert last is not None
    assert last.step == 4
    assert len([s for s in run.heard("saved") if s["step"] == 4]) == 1
    run.end()


@pytest.mark.parametrize("kind", ["batch", "version"])
def test_a_listener_waits_for_what_is_saved_and_not_for_itself(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    got: list[Any] = []

    def listen(name: str, details: Any) -> None:
        if (
            name == "saved"
            and details["step"] == 6
            and (details["version"] is None) != (kind == "version")
        ):
            for call in (run.keeper.wait, run.keeper.save, run.keeper.close):
                try:
                    got.append(call())
                except Exception as error:
                    got.append(error)

    run = in_process(root)
    run.keeper._on_event = listen
    saver: Any = run.keeper._saver
    saver._patience = saver._tier._patience = timedelta(seconds=5)
    run.train(5)
    run.train(1, wait=False)
    run.keeper.wait()
    assert got[0].step == 6
    assert isinstance(got[0], Manifest) == (kind == "version")
    assert [type(error) for error in got[1:]] == [StateError, StateError]
    run.train(2)
    run.end()


# -- between prepare, decision and record --------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "durable"),
    [("before the decision", 4), ("after the decision", 4), ("opened before the decision", 2)],
)
def test_a_server_that_dies_in_a_commit(
    launcher: FarmLauncher, root: Path, monkeypatch: pytest.MonkeyPatch, moment: str, durable: int
) -> None:
    """The decision says which batch it comes back to, never what files hold."""
    run = Run(OnServers(launcher), root / "r", OFTEN)
    run.keeper.resume()
    run.train(3)
    decide = RemoteTiers._decide

    def dying(tiers: RemoteTiers, pending: Any, outcome: str) -> bool:
        monkeypatch.setattr(RemoteTiers, "_decide", decide)
        if moment == "after the decision":
            decided = decide(tiers, pending, outcome)
        launcher.kill(1)
        if moment == "opened before the decision":
            shard = run.cluster.handles[1]
            shard.lose()
            run.cluster.renew(1)
            object.__setattr__(pending, "epochs", {k: s.epoch for k, s in tiers._shards()})
        if moment != "after the decision":
            decided = decide(tiers, pending, outcome)
        return decided

    monkeypatch.setattr(RemoteTiers, "_decide", dying)
    for _ in range(2):
        with suppress(CancelledError), run.keeper.surviving():
            run.train(1)
    run.keeper.recover()
    assert run.keeper.steps >= durable
    monkeypatch.undo()
    run.end()
    again = Run(OnServers(launcher), root / "r", OFTEN)
    kept = again.keeper.resume()
    assert kept is not None
    assert again.bits() == plain(kept.step)
    assert kept.step >= durable
    again.end()


def test_a_run_that_is_asked_to_stop_makes_a_batch(launcher: FarmLauncher, root: Path) -> None:
    run = Run(OnServers(launcher), root / "r", ek.tiered(every=50, remote=4))
    run.keeper.resume()
    run.train(4)
    run.keeper.stop_after_step()
    with pytest.raises(SystemExit):
        run.train(1)
    (stopped,) = run.heard("stopped")
    assert stopped["saved_step"] == 5
    assert [s["version"] for s in run.heard("saved") if s["step"]] == [None]
    run.end()
    again = Run(OnServers(launcher), root / "r", OFTEN)
    assert again.keeper.resume() == DurableStep(5)
    assert again.bits() == plain(5)
    again.end()


def test_a_version_that_failed_is_made_with_the_next_batch(
    launcher: FarmLauncher, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(OnServers(launcher), root / "r", OFTEN)
    run.keeper.resume()
    run.train(5)
    begin = Writer.begin

    def failing(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(Writer, "begin", begin)
        raise StorageError("the store is away")

    monkeypatch.setattr(Writer, "begin", failing)
    with pytest.warns(UserWarning, match="saving step 6 failed"), pytest.raises(SaveError):
        run.train(1)
    run.train(2, wait=False)
    run.keeper.wait()
    assert [s["step"] for s in run.heard("saved") if s["version"]] == [0, 8]
    run.end()


def test_a_batch_whose_outcome_is_open_is_settled_before_the_run_goes_back(
    launcher: FarmLauncher, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(OnServers(launcher), root / "r", OFTEN)
    run.keeper.resume()
    run.train(5)
    saver: Any = run.keeper._saver
    tiers, store = saver._tier.tiers, saver.repository.store
    tiers.prepare(5)()
    store.put(tiers.pending_state(), store.get(tiers.durable_state()))
    assert tiers._decide(tiers._pending, "committed")  # and this process has not heard so

    def fail(*_: object) -> None:
        raise StorageError("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(tiers, "_decide", fail)
        with pytest.raises(StorageError, match="the store is away"):
            run.keeper.resume()
    assert run.keeper.resume(1).step == 0  # behind that batch: it must never come back
    assert tiers.batch() is None
    assert not [info.name for info in store.list("tiers") if "step-" in info.name]
    run.end()
    again = Run(OnServers(launcher), root / "r", OFTEN)
    assert again.keeper.resume().step == 0
    assert again.bits() == plain(0)
    again.end()


def test_a_store_that_is_away_for_a_batch_or_two_does_not_end_training(
    launcher: FarmLauncher, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(OnServers(launcher), root / "r", ek.tiered(every=2, remote=60))
    run.keeper.resume()
    run.train(3)
    saver: Any = run.keeper._saver

    def fail(*_: object) -> None:
        raise StorageError("the store is away")

    def train_without_store(steps: int) -> None:
        with monkeypatch.context() as patched:
            for call in ("put", "put_if_absent"):
                patched.setattr(saver._tier._state, call, fail)
            for _ in range(steps):
                run.train(1, wait=False)
                saver._tier.join()

    with pytest.warns(UserWarning, match="saving step 6 failed: the store is away"):
        train_without_store(4)  # that of step 4 was not given up by then
    run.train(1)
    assert saver._tier.whole == DurableStep(8)
    assert run.bits() == plain(8)
    with (
        pytest.warns(UserWarning, match="the store is away"),
        pytest.raises(SaveError, match="3 checkpoints in a row"),
    ):
        train_without_store(10)
    run.end()
    again = Run(OnServers(launcher), root / "r", OFTEN)
    assert again.keeper.resume() == DurableStep(8)
    assert again.bits() == plain(8)
    again.end()
