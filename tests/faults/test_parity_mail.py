"""Parity in one process: hosts that go while messages are delivered, deliveries that fail, threads
that give up. What is healthy stays protected, and what is not is said and filled again."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

import numpy as np
import pytest

from emberkeep.cluster.local import local_parity
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.cluster.local.mail import Mail
from emberkeep.cluster.shard import Shard
from emberkeep.erasure.coded_slabs import SlabRows
from emberkeep.erasure.codes import Parity
from emberkeep.erasure.host import ParityHost
from emberkeep.erasure.member import ParityMember
from emberkeep.erasure.source import Source
from emberkeep.errors import ShardLostError, StoppedError, StreamError
from emberkeep.runtime.background import Retry
from emberkeep.tables import Adagrad
from tests.contracts.engine import state
from tests.contracts.parity import PLAIN, check_counts, check_parity, ones

SHARDS, LOST = 3, 1
SOON = timedelta(seconds=60)


def opened(**parity: Any) -> LocalCluster:
    spec = Parity(**{"k": 2, "r": 1, "background": True, "chunk_rows": 8, **parity})
    return local(shards=SHARDS, threads=1, parity=spec).open(PLAIN, Adagrad(lr=0.1), seed=1)


def parity_of(cluster: LocalCluster) -> local_parity.LocalParity:
    assert cluster._protection is not None
    return cluster._protection


def whole(cluster: LocalCluster) -> None:
    """All is protected, and every parity row is the code of the rows."""
    cluster.rebuild()
    status = cluster.parity
    assert status is not None
    assert status.protected
    check_parity(parity_of(cluster).rebuilder)


# -- hosts that go while messages are delivered --------------------------------------------------

STEPS: list[tuple[type, str]] = [
    (Shard, "kill"), (Mail, "drop"), (SlabRows, "drop"), (ParityHost, "let_go"),
    (ParityHost, "seal"), (ParityHost, "roll"), (ParityHost, "follow"), (ParityHost, "refill"),
    (ParityHost, "drop"), (Source, "detach"), (ParityMember, "attach"),
]  # fmt: skip


class Noticed:
    """A lock that says when somebody has to wait for it."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._lock, self._say = threading.Lock(), say

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._say("waits")
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Beside:
    """Another thread: at one position, counted from 0, it writes to a healthy shard and delivers,
    until it has done so or has to wait."""

    def __init__(self, cluster: LocalCluster, at: int) -> None:
        self.cluster, self.at, self.position = cluster, at, 0
        self.said: queue.Queue[str] = queue.Queue()
        self.thread = threading.Thread(target=self.write)
        self.error: BaseException | None = None
        parity_of(cluster)._mail._delivering = Noticed(self.said.put)  # type: ignore[assignment]

    def step(self) -> None:
        if threading.current_thread() is self.thread:
            return
        if self.position == self.at:
            self.thread.start()
            self.said.get(timeout=60)
        self.position += 1

    def write(self) -> None:
        try:
            write(self.cluster)
            parity_of(self.cluster)._mail.deliver()
        except BaseException as error:
            self.error = error
        self.said.put("done")


def write(cluster: LocalCluster) -> None:
    """To a shard that nobody loses."""
    ids = np.arange(40)
    own = ids[cluster.positions("fixed", ids)[2]][:5]
    planes = {name: np.full((5, 4), 2.0, np.float32) for name in ("weight", "accumulator")}
    cluster.shards[2].install("fixed", own, planes)


def lose_and_recover(cluster: LocalCluster) -> None:
    cluster.kill(LOST)
    assert cluster._from_parity()


def start_over(cluster: LocalCluster) -> None:
    """As a recovery from a repository does, which has the rows that are there."""
    rows = {table.name: cluster.read_all(table.name) for table in cluster.tables}
    tables = cluster.table_state()
    cluster.renew(LOST)
    for name, (ids, planes) in rows.items():
        own = cluster.positions(name, ids)[LOST]
        shard = cluster.shards[LOST]
        shard.install(name, ids[own], {plane: v[own] for plane, v in planes.items()})
    cluster.serve(LOST)
    cluster.load_table_state(tables)


def positions(work: Callable[[LocalCluster], None]) -> int:
    """How many steps a work has."""
    with pytest.MonkeyPatch.context() as patch:
        return interleaved(work, -1, patch).position


def interleaved(work: Callable[[LocalCluster], None], at: int, patch: pytest.MonkeyPatch) -> Beside:
    patch.setattr(Mail, "start", lambda _: None)  # messages are delivered when the test says so
    patch.setattr(local_parity.LocalParity, "_sweep", lambda _: None)
    cluster = opened()
    twin = local(shards=SHARDS, threads=1).open(PLAIN, Adagrad(lr=0.1), seed=1)
    for seed in range(3):
        for one in (cluster, twin):
            ones(one, Random(seed), Counter())
    parity_of(cluster).flush()
    for one in (cluster, twin):  # on its way when the shard goes
        ones(one, Random(3), Counter())
    beside = Beside(cluster, at)

    def hooked(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            beside.step()
            return method(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as hooks:
        for kind, name in STEPS:
            hooks.setattr(kind, name, hooked(getattr(kind, name)))
        work(cluster)
    if at >= 0:
        beside.thread.join(60)
        assert not beside.thread.is_alive()
        assert beside.error is None
        write(twin)
    for seed in (4, 5):
        for one in (cluster, twin):
            ones(one, Random(seed), Counter())
        parity_of(cluster).flush()
    whole(cluster)
    assert state(cluster) == state(twin)
    cluster.kill(0)
    assert state(cluster) == state(twin)
    cluster.close()
    return beside


@pytest.mark.parametrize("work", [lose_and_recover, start_over])
def test_a_host_that_goes_ends_no_delivery_to_others(work: Callable[[LocalCluster], None]) -> None:
    """A write to a healthy shard is delivered at each step of a loss and of a recovery."""
    count = positions(work)
    assert count >= 3
    for at in range(count):
        with pytest.MonkeyPatch.context() as patch:
            interleaved(work, at, patch)


# -- deliveries that fail ------------------------------------------------------------------------


class Failing:
    """Fails the next `times` calls, after doing the first half of them."""

    def __init__(self, work: Callable[..., Any], error: BaseException) -> None:
        self.work, self.error, self.times = work, error, 0

    def __call__(self, letters: Any, pool: Any) -> Any:
        if self.times:
            self.times -= 1
            self.work(letters[: len(letters) // 2], pool)
            raise self.error
        return self.work(letters, pool)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    monkeypatch.setattr(Retry, "pause", lambda *_: 0)
    made = Failing(local_parity.receive_together, StreamError("this cannot be"))
    monkeypatch.setattr(local_parity, "receive_together", made)
    return made


def trained(cluster: LocalCluster, counts: Counter[Any], *seeds: int) -> None:
    for seed in seeds:
        ones(cluster, Random(seed), counts)
        parity_of(cluster).flush()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.filterwarnings("ignore:rows are not protected")
def test_parity_that_is_not_what_the_rows_are_starts_over(
    failing: Failing, background: bool
) -> None:
    cluster, counts = opened(background=background), Counter[Any]()
    trained(cluster, counts, 0, 1)
    for seed in range(2, 5):
        failing.times = 1
        trained(cluster, counts, seed)
        assert failing.times == 0
        trained(cluster, counts, seed + 10)
        whole(cluster)
        cluster.kill(seed % 3)
        check_counts(cluster, counts)
        whole(cluster)
    cluster.close()


def test_it_is_said_since_when_rows_are_not_protected(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_parity.LocalParity, "_sweep", lambda _: None)
    cluster, counts = opened(background=False), Counter[Any]()
    failing.times = 1
    trained(cluster, counts, 0)
    status = cluster.parity
    assert status is not None
    assert status.unprotected_since is not None
    assert not status.protected
    with pytest.warns(UserWarning, match="rows are not protected: StreamError"):
        trained(cluster, counts, 1)
    trained(cluster, counts, 2)  # said once
    assert parity_of(cluster)._mail.waiting == 0
    with pytest.raises(StoppedError, match="StreamError: this cannot be"):
        cluster.close()
    whole(cluster)
    check_counts(cluster, counts)
    cluster.close()


def test_a_run_that_shall_stop_stops_before_a_row_changes(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_parity.LocalParity, "_sweep", lambda _: None)
    cluster, counts = opened(background=False, unprotected="stop"), Counter[Any]()
    trained(cluster, counts, 0)
    failing.times = 1
    with pytest.raises(StreamError, match="this cannot be"):
        trained(cluster, counts, 1)
    before = state(cluster)
    with pytest.raises(StoppedError, match="no row was changed"):
        trained(cluster, Counter(), 2)
    assert state(cluster) == before
    whole(cluster)
    trained(cluster, counts, 3)
    check_counts(cluster, counts)
    cluster.close()


@pytest.mark.filterwarnings("ignore:rows are not protected")
def test_rows_that_were_to_come_from_that_parity_are_lost(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row is made from it; the repository is what is left, and parity is kept again after."""
    monkeypatch.setattr(local_parity.LocalParity, "_sweep", lambda _: None)
    cluster, counts = opened(background=False), Counter[Any]()
    trained(cluster, counts, 0, 1, 2)
    rows = {table.name: cluster.read_all(table.name) for table in cluster.tables}
    cluster.kill(LOST)
    cluster._from_parity()
    assert cluster.parity is not None
    assert cluster.parity.missing_rows
    failing.times = 1
    cluster.load_table_state(cluster.table_state())
    with pytest.warns(UserWarning, match="more than parity"), pytest.raises(ShardLostError):
        cluster.read_all("fixed")
    assert cluster.lost() == (LOST,)
    cluster.renew(LOST)
    for name, (ids, planes) in rows.items():
        own = cluster.positions(name, ids)[LOST]
        cluster.install(name, ids[own], {plane: v[own] for plane, v in planes.items()})
    cluster.serve(LOST)
    check_counts(cluster, counts)
    whole(cluster)
    cluster.kill(0)
    check_counts(cluster, counts)
    cluster.close()


@pytest.mark.filterwarnings("ignore:rows are not protected")
def test_pushes_in_the_background_do_not_wait_for_ever(failing: Failing) -> None:
    cluster, counts = opened(window_nbytes=1), Counter[Any]()
    failing.times = 1
    for seed in range(30):
        ones(cluster, Random(seed), counts)
    assert failing.times == 0
    whole(cluster)
    check_counts(cluster, counts)
    cluster.close()


# -- threads that give up ------------------------------------------------------------------------


def test_a_sweeper_that_has_given_up_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retry, "pause", lambda *_: 0)
    cluster, counts = opened(background=False), Counter[Any]()
    trained(cluster, counts, 0, 1, 2)
    parity = parity_of(cluster)
    honest, broken = parity.rebuild_chunk, [True]

    def chunk() -> bool:
        if broken:
            raise MemoryError("no memory")
        return honest()

    monkeypatch.setattr(parity, "rebuild_chunk", chunk)
    cluster.kill(LOST)
    cluster._from_parity()
    first = parity._rebuilds
    with pytest.raises(StoppedError):
        first.wait(lambda: False, "the failure", SOON)
    status = cluster.parity
    assert status is not None
    assert status.unprotected_since is not None
    trained(cluster, counts, 3)  # goes on, and tries again with each push
    broken.clear()
    trained(cluster, counts, 4)
    assert parity._rebuilds is not first
    whole(cluster)
    check_counts(cluster, counts)
    cluster.close()


# -- pushes that are given up --------------------------------------------------------------------


def test_what_shards_have_applied_of_a_push_that_fails_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Acknowledged pushes before it, and its own parts, are sent again to a replacement."""
    monkeypatch.setattr(Mail, "start", lambda _: None)
    cluster, counts = opened(), Counter[Any]()
    for seed in range(2):
        ones(cluster, Random(seed), counts)
    apply = Shard.apply

    def no_memory(shard: Shard, *args: Any) -> int:
        if shard.index == 2:
            raise MemoryError("no memory")
        return apply(shard, *args)

    monkeypatch.setattr(Shard, "apply", no_memory)
    given_up: Counter[Any] = Counter()
    with pytest.raises(MemoryError):
        ones(cluster, Random(2), given_up)
    monkeypatch.setattr(Shard, "apply", apply)
    for (name, identity), count in given_up.items():
        owner = next(s for s, at in enumerate(cluster.positions(name, np.array([identity])))
                     if at.size)  # fmt: skip
        if owner != 2:
            counts[name, identity] += count
    cluster.kill(0)
    check_counts(cluster, counts)
    cluster.close()
