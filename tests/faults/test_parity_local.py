"""Parity over the shards of this process."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from emberkeep.cluster.local import local_parity
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.cluster.local.mail import Mail
from emberkeep.cluster.shard import Shard
from emberkeep.erasure import messages
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError
from emberkeep.tables import Adagrad, Optimizer, Table
from tests.contracts.engine import state, tables, wanted_of
from tests.contracts.parity import PLAIN, Histories, ParityContract, check_counts, ones, push
from tests.threads import started_since


class TestLocal(ParityContract):
    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int, parity: Parity | None
    ) -> LocalCluster:
        spec = local(shards=shards, threads=2, parity=parity)
        return spec.open(tables, optimizer, seed=5)


class SlowMail(Mail):
    """Delivers some of what waits, for some receivers, whenever a sender looks for room."""

    random = Random(0)

    def start(self) -> None:
        pass

    def wait_for_room(self) -> None:
        for receiver, queue in enumerate(self._queues):
            with self._delivering:
                for _ in range(self.random.choice((0, 0, 1, 3))):
                    if queue:
                        message = queue.popleft()
                        self._waiting_nbytes -= message.body.nbytes
                        self._receive([(receiver, message)])


def recorded(monkeypatch: pytest.MonkeyPatch) -> Histories:
    """The histories of all rows of all shards from here on."""
    histories = Histories()
    apply = Shard.apply

    def and_record(shard: Shard, pushes: Any, lr: float, push_number: Any = None) -> int:
        with shard.lock:
            number = apply(shard, pushes, lr, push_number)
            for slab, push in zip(shard.slabs, pushes, strict=True):
                for t, table in enumerate(slab.tables):
                    ids = push.wanted.ids[push.wanted.offsets[t] : push.wanted.offsets[t + 1]]
                    histories.add(table.name, ids, slab.read(t, ids))
        return number

    monkeypatch.setattr(Shard, "apply", and_record)
    return histories


@pytest.mark.parametrize("message_nbytes", [messages.MESSAGE_NBYTES, 64])
@pytest.mark.parametrize(("shards", "k", "r"), [(3, 2, 1), (5, 3, 2)])
def test_in_the_background_no_push_is_lost_and_none_applied_twice(
    monkeypatch: pytest.MonkeyPatch, shards: int, k: int, r: int, message_nbytes: int
) -> None:
    monkeypatch.setattr(messages, "MESSAGE_NBYTES", message_nbytes)
    monkeypatch.setattr(local_parity, "Mail", SlowMail)
    SlowMail.random = random = Random(7)
    histories = recorded(monkeypatch)
    spec = Parity(k=k, r=r, background=True, chunk_rows=8)
    cluster = local(shards=shards, threads=1, parity=spec).open(PLAIN, Adagrad(lr=0.1), seed=1)
    counts: Counter[tuple[str, int]] = Counter()
    undone = 0
    for step in range(60):
        ones(cluster, random, counts)
        if step % 6 == 5:
            undone += cluster.parity.lag > 0
            cluster.kill(*random.sample(range(shards), r))
            histories.check(cluster)
            check_counts(cluster, counts)
            cluster.rebuild()
    assert undone > 5
    cluster.rebuild()
    assert cluster.parity.protected
    check_counts(cluster, counts)


def test_many_workers_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    histories = recorded(monkeypatch)
    spec = Parity(k=2, r=1, background=True, window_nbytes=4096)
    cluster = local(shards=4, threads=2, parity=spec).open(PLAIN, Adagrad(lr=0.1), seed=1)
    totals = [Counter[tuple[str, int]]() for _ in range(3)]

    def work(number: int) -> None:
        random = Random(number)
        for _ in range(40):
            ones(cluster, random, totals[number])

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for shard in (2, 0, 3):
        cluster.pull(wanted_of(cluster, {"fixed": [1, 2, 3], "dynamic": [4]}))
        cluster.rebuild()
        cluster.kill(shard)
    for worker in workers:
        worker.join()
    check_counts(cluster, sum(totals, Counter()))
    histories.check(cluster)
    cluster.close()


@pytest.mark.parametrize("delivered", range(8))
def test_a_shard_that_dies_within_a_push(monkeypatch: pytest.MonkeyPatch, delivered: int) -> None:
    """After some shards have applied their part, and some hosts have heard of it."""
    clusters = [
        local(shards=4, threads=1, parity=parity).open(tables(), Adagrad(lr=0.1), seed=1)
        for parity in (Parity(k=2, r=2), None)
    ]
    for cluster in clusters:
        push(cluster, np.random.default_rng(0))
    protected = clusters[0]
    mail = protected._protection._mail  # type: ignore[union-attr]
    deliver, apply, left = mail.deliver, Shard.apply, [delivered]

    def partly() -> None:
        if not left:
            deliver()
            return
        for receiver, queue in enumerate(mail._queues):
            while queue and left[0]:
                left[0] -= 1
                mail._receive([(receiver, queue.popleft())])
        left.clear()
        protected.kill(1, 2)
        deliver()

    def dying(shard: Shard, *args: Any) -> int:
        if left and delivered % 2 and shard.index == 2:
            left.clear()
            protected.kill(1, 2)
        return apply(shard, *args)

    monkeypatch.setattr(mail, "deliver", partly)
    monkeypatch.setattr(Shard, "apply", dying)
    for cluster in clusters:
        push(cluster, np.random.default_rng(1))
    assert protected.parity is not None
    assert state(protected) == state(clusters[1])
    for cluster in clusters:
        push(cluster, np.random.default_rng(2))
    protected.rebuild()
    protected.kill(0, 3)
    assert state(protected) == state(clusters[1])


def test_status_tells_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_parity.LocalParity, "_sweep", lambda self: None)
    spec = Parity(k=2, r=1)
    cluster = local(shards=3, threads=1, parity=spec).open(PLAIN, Adagrad(lr=0.1), seed=1)
    random, counts = Random(0), Counter[tuple[str, int]]()
    for _ in range(4):
        ones(cluster, random, counts)
    before = cluster.parity
    assert before is not None
    assert before.protected
    assert before.messages == 4 * 3 * 2
    assert sum(before.updates) == 4 * 12
    cluster.kill(0)
    cluster.pull(wanted_of(cluster, {"fixed": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]}))
    during = cluster.parity
    assert during is not None
    assert not during.protected
    assert during.degraded_reads == 1
    assert during.missing_rows > 0
    assert during.unprotected_stripes > 0
    cluster.rebuild()
    after = cluster.parity
    assert after is not None
    assert after.protected
    assert after.rebuilt_rows >= during.missing_rows
    cluster.close()


def test_memory_of_untouched_rows_is_not_taken() -> None:
    table = Table("t", rows=2_000_000_000, dim=64)
    cluster = local(shards=3, threads=1, parity=Parity(k=2, r=1)).open(
        [table], Adagrad(lr=0.1), seed=1
    )
    ids = np.array([0, 1, 10**9, 2 * 10**9 - 1])
    cluster.push(wanted_of(cluster, {"t": ids.tolist()}), [np.ones((4, 64), np.float32)], lr=0.1)
    assert cluster.parity is not None
    assert cluster.parity.protected


def test_a_cluster_that_is_closed_leaves_no_threads() -> None:
    spec = Parity(k=2, r=1, background=True)
    before = set(threading.enumerate())
    cluster = local(shards=3, threads=1, parity=spec).open(PLAIN, Adagrad(lr=0.1), seed=1)
    ones(cluster, Random(0), Counter())
    assert started_since(before, "emberkeep-parity")
    cluster.close()
    assert not started_since(before, "emberkeep-parity")
    gone = weakref.ref(cluster)
    del cluster
    gc.collect()
    assert gone() is None


def test_what_cannot_be_protected_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 5 shards"):
        local(shards=4, parity=Parity(k=4, r=1))
    cluster = local(shards=3, parity=Parity(k=2, r=1)).open(PLAIN, Adagrad(lr=0.1), seed=1)
    cluster.protect(Parity(k=2, r=1))
    with pytest.raises(ConfigError, match="parity already"):
        cluster.protect(Parity(k=1, r=1))
