"""How long a recovery is tried, and what it goes back to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import Buffer, MemoryStore
from emberkeep.blobs.wrapper import WrapperStore
from emberkeep.checkpoint import SaveSettings
from emberkeep.checkpoint.recovery import Home
from emberkeep.checkpoint.restore import load
from emberkeep.cluster.local.local_cluster import local
from emberkeep.errors import RecoveryError, ShardLostError, StorageError
from emberkeep.keeper.recoverer import Recoverer, make_recoverer
from emberkeep.keeper.repository_saver import RepositorySaver
from emberkeep.keeper.run_saver import save_first
from emberkeep.runtime.pool import Pool
from emberkeep.strategies import incremental, partial
from emberkeep.tables import Adagrad, Table
from emberkeep.testing.virtual_clock import VirtualClock
from tests.contracts.engine import state, wanted_of


def losing(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[float]:
    """When a recovery was tried whose every attempt loses a shard again, after so long."""
    clock, tried = VirtualClock(), []

    def lost(self: Recoverer) -> Any:
        clock.sleep(seconds)
        tried.append(clock.monotonic())
        raise ShardLostError([3])

    monkeypatch.setattr(Recoverer, "_lost", lambda self: [3])
    monkeypatch.setattr(Recoverer, "_plan_once", lost)
    nothing: Any = None
    recoverer = Recoverer(
        [], nothing, nothing, total_steps=None, steps=lambda: 0, go_back=None,
        tell=lambda *_: None, clock=clock,
    )  # fmt: skip
    with pytest.raises(RecoveryError, match="the last time 3: see why they end"):
        recoverer.recover()
    return tried


def test_recoveries_that_lose_shards_again_and_again_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = losing(monkeypatch, 240)
    assert [round(at) for at in tried] == [240, 480, 720, 960], "a quarter of an hour, not longer"


def test_a_first_version_that_loses_shards_again_and_again_is_given_up() -> None:
    clock, tried = VirtualClock(), []
    cluster = local(shards=2).open([Table("a", rows=8, dim=2)], Adagrad(lr=0.1), seed=0)

    def cut() -> None:
        tried.append(clock.monotonic())
        cluster.kill(1)
        raise ShardLostError([1])

    nothing: Any = None
    with pytest.raises(RecoveryError, match="the last time 1: see why they end"):
        save_first(nothing, [cluster], cut, clock)
    assert tried[1] - tried[0] < 0.1
    assert len(tried) < 1000
    assert tried[-1] > 0.9 * cluster.patience.total_seconds()


def test_a_first_version_is_cut_again_when_shards_are_replaced() -> None:
    clock, tried = VirtualClock(), []
    cluster = local(shards=2).open([Table("a", rows=8, dim=2)], Adagrad(lr=0.1), seed=0)

    class Saver:
        def wait(self) -> None:
            if len(tried) < 3:
                cluster.kill(0)
                raise ShardLostError([0])

    waiting: Any = Saver()
    save_first(waiting, [cluster], lambda: tried.append(cluster.lost()), clock)
    assert tried == [(), (), ()]


def test_a_server_that_refuses_at_once_is_not_asked_without_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A simulated trainer had asked, and a real one would have started, 10,000 in half a minute."""
    tried = losing(monkeypatch, 0.001)
    assert tried[1] - tried[0] < 0.1, "the first attempt may have met what is over by now"
    assert len(tried) < 1000
    assert tried[-1] > 15 * 60


class Deaf(WrapperStore):
    """Does what it is asked for and, while it is deaf, does not say so."""

    deaf = False

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        created = super().put_if_absent(name, data)
        self._answer()
        return created

    def get(self, name: str) -> bytes:
        self._answer()
        return super().get(name)

    def _answer(self) -> None:
        if self.deaf:
            raise StorageError("the store does not answer")


@pytest.mark.filterwarnings("ignore:saving step")
def test_a_shard_does_not_go_back_behind_a_version_whose_commit_was_not_heard() -> None:
    """The next version builds on it: rows that had changed in it, and are older on the shard that
    came back, would be missing there."""
    tables = [Table("t", rows=40, dim=2)]
    cluster = local(shards=2, threads=1).open(tables, Adagrad(lr=0.1), seed=3)
    store, steps = Deaf(MemoryStore()), 0
    saver = RepositorySaver(
        store, cluster, partial(every=1, priority=None, layout="consecutive", keep="all"),
        about={}, settings=SaveSettings(threads=1, max_failures=9), exclusive=False,
        must_exist=False, on_event=lambda *_: None, clock=VirtualClock(),
    )  # fmt: skip
    recoverer = make_recoverer(
        partial(every=1, priority=None), [Home(cluster, {"t": "t"})], saver, total_steps=9,
        steps=lambda: steps, go_back=None, tell=lambda *_: None, clock=VirtualClock(),
    )  # fmt: skip
    assert recoverer is not None

    def train(ids: list[int]) -> None:
        nonlocal steps
        wanted = wanted_of(cluster, {"t": ids})
        cluster.push(wanted, [np.ones((w.ids.size, 2), np.float32) for w in wanted], lr=0.1)
        steps += 1
        saver.cut(steps, None, recoverer.counters)
        saver.join()

    train(list(range(40)))
    store.deaf = True
    train([1, 2, 3, 4])
    store.deaf = False
    cluster.kill(1)
    made = recoverer.recover()
    assert made is not None
    assert (made.scope, made.version, made.pls) == ("partial", 2, 0.0)
    train([7, 8])
    found = local(shards=2, threads=1).open(tables, Adagrad(lr=0.1), seed=3)
    assert saver.whole is not None
    load(saver.repository, saver.whole.version, found, Pool(1))
    assert saver.whole.version.number == 3
    assert state(found) == state(cluster)


@pytest.mark.parametrize("dead", [(1,), ()], ids=["another is lost", "none is lost"])
def test_a_shard_that_comes_back_with_its_rows_meanwhile_is_not_named_as_lost(
    dead: tuple[int, ...],
) -> None:
    """One was out of reach when the recovery was decided, and answers before it begins."""
    tables = [Table("t", rows=40, dim=2)]
    cluster = local(shards=3, threads=1).open(tables, Adagrad(lr=0.1), seed=3)
    heard: list[dict[str, Any]] = []
    strategy = partial(every=1, priority=None, keep="all")
    saver = RepositorySaver(
        MemoryStore(), cluster, strategy, about={}, settings=SaveSettings(threads=1),
        exclusive=False, must_exist=False, on_event=lambda *_: None, clock=VirtualClock(),
    )  # fmt: skip
    recoverer = make_recoverer(
        strategy, [Home(cluster, {"t": "t"})], saver, total_steps=9, steps=lambda: 2,
        go_back=None, tell=lambda _, details: heard.append(details), clock=VirtualClock(),
    )  # fmt: skip
    assert recoverer is not None

    def train(ids: list[int]) -> None:
        wanted = wanted_of(cluster, {"t": ids})
        cluster.push(wanted, [np.ones((w.ids.size, 2), np.float32) for w in wanted], lr=0.1)

    train(list(range(40)))
    saver.cut(1, None, recoverer.counters)
    saver.join()
    train(list(range(40)))
    for shard in dead:
        cluster.kill(shard)
    lost, learn, silent = cluster.lost, saver.learn_outcome, [0]

    def learn_outcome() -> None:
        silent.clear()
        learn()

    cluster.lost = lambda: (*silent, *lost())  # type: ignore[method-assign]
    saver.learn_outcome = learn_outcome  # type: ignore[method-assign]
    made = recoverer.recover()
    assert [details["shards"] for details in heard if "scope" in details] == [(1,)] * len(dead)
    if not dead:
        assert made is None
        return
    assert made is not None
    assert (made.scope, made.shards) == ("partial", (1,))
    assert made.pls == pytest.approx(1 / 27)


def test_shards_that_a_full_recovery_has_emptied_are_not_named_as_lost() -> None:
    """When one more is lost on the way, none of them serves: only two had lost anything."""
    cluster = local(shards=4, threads=1).open([Table("t", rows=40, dim=2)], Adagrad(lr=0.1), seed=3)
    strategy = incremental(every=1, keep="all")
    saver = RepositorySaver(
        MemoryStore(), cluster, strategy, about={}, settings=SaveSettings(threads=1),
        exclusive=False, must_exist=False, on_event=lambda *_: None, clock=VirtualClock(),
    )  # fmt: skip
    deaths = [2]

    def go_back() -> Any:
        if deaths:
            cluster.kill(shard := deaths.pop())
            raise ShardLostError([shard])
        return saver.whole

    recoverer = make_recoverer(
        strategy, [Home(cluster, {"t": "t"})], saver, total_steps=9, steps=lambda: 2,
        go_back=go_back, tell=lambda *_: None, clock=VirtualClock(),
    )  # fmt: skip
    assert recoverer is not None
    saver.cut(1, None, recoverer.counters)
    saver.join()
    cluster.kill(0)
    made = recoverer.recover(ShardLostError([0]))
    assert made is not None
    assert (made.scope, made.shards) == ("full", (0, 2))
    assert recoverer.summary().failures == 2
