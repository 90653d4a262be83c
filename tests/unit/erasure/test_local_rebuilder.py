"""Rows brought back straight from where the others are: the bits that the protocol would bring."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberkeep.cluster.local import local_parity
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.erasure import coded_slabs, local_rebuilder
from emberkeep.erasure.codes import Parity
from emberkeep.erasure.local_rebuilder import LocalRebuilder, rows_of
from emberkeep.erasure.rebuilder import Rebuilder
from emberkeep.tables import Adam
from tests.contracts.engine import state, tables
from tests.contracts.parity import check_parity, push, write
from tests.nightly import examples

SIZES = [(3, 2, 1), (2, 1, 1), (6, 4, 1), (6, 4, 2), (5, 3, 2)]


def opened(size: tuple[int, int, int], seed: int, pushes: int, share: float = 0.2) -> LocalCluster:
    n, k, r = size
    spec = Parity(k=k, r=r, chunk_rows=7, rebuild_share=share)
    cluster = local(shards=n, threads=2, parity=spec).open(tables(), Adam(lr=0.1), seed=1)
    random = np.random.default_rng(seed)
    for _ in range(pushes):
        push(cluster, random)
    if pushes:
        write(cluster, random)
    return cluster


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_rebuilder, "_MOST_NBYTES", 100)
    monkeypatch.setattr(coded_slabs, "_LEAST_ROWS", 1)  # so that threads share them


@settings(
    deadline=None,
    max_examples=examples(30),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    size=st.sampled_from(SIZES), seed=st.integers(0, 99), pushes=st.integers(0, 3), data=st.data()
)
def test_rows_and_parity_come_back_as_they_were(
    size: tuple[int, int, int], seed: int, pushes: int, data: st.DataObject
) -> None:
    cluster = opened(size, seed, pushes)
    before = state(cluster)
    for _ in range(2):
        gone = data.draw(st.sets(st.integers(0, size[0] - 1), min_size=1, max_size=size[2]))
        cluster.kill(*gone)
        assert cluster._from_parity()
        cluster.rebuild()
        assert state(cluster) == before
        assert cluster._protection is not None
        check_parity(cluster._protection.rebuilder)
    cluster.close()


@pytest.mark.parametrize("share", [1.0, 1e-9])
def test_a_push_brings_back_what_its_share_of_the_time_allows(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(local_parity, "_ALONE_SECONDS", 1e9)  # the thread beside does nothing
    cluster, other = (opened((6, 4, 1), 3, 2, share) for _ in range(2))
    cluster.kill(1)
    for each in (cluster, other):
        push(each, np.random.default_rng(5))
    status = cluster.parity
    assert status is not None
    assert status.protected == (share == 1.0)
    assert bool(status.missing_rows) == (share != 1.0)
    cluster.rebuild()
    assert state(cluster) == state(other)
    assert cluster._protection is not None
    check_parity(cluster._protection.rebuilder)
    cluster.close()
    other.close()


def test_a_push_does_not_fail_with_a_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_parity, "_ALONE_SECONDS", 1e9)
    cluster, other = (opened((6, 4, 1), 3, 2) for _ in range(2))
    cluster.kill(1)

    def fails(self: local_parity.LocalParity) -> bool:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(local_parity.LocalParity, "rebuild_chunk", fails)
        for each in (cluster, other):
            push(each, np.random.default_rng(5))
        cluster.close()  # the thread has nothing to do with it any more
    cluster.rebuild()
    assert state(cluster) == state(other)
    other.close()


def test_members_speak_only_where_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of a stripe lost: more than a sum of what is there."""
    spoken = []
    speak = Rebuilder._recover_parts
    monkeypatch.setattr(
        Rebuilder,
        "_recover_parts",
        lambda self, parts: (spoken.append(len(parts)), speak(self, parts)),
    )
    monkeypatch.setattr(LocalRebuilder, "fill", lambda *_: 0)
    cluster = opened((6, 4, 2), 3, 2)
    cluster.kill(1)
    assert cluster._from_parity()
    cluster.rebuild()
    assert not spoken
    cluster.close()
    cluster = opened((6, 4, 2), 3, 2)
    cluster.kill(1, 2)
    assert cluster._from_parity()
    cluster.rebuild()
    assert spoken
    cluster.close()


def test_a_lost_shard_lets_go_of_its_memory_at_once() -> None:
    """Its replacement takes as much again: both at a time may be more than there is."""
    cluster = opened((3, 2, 1), 5, 2)
    gc.collect()
    gc.disable()
    try:
        member = cluster._protection.rebuilder.members[1]  # type: ignore[union-attr]
        planes = [
            weakref.ref(plane) for slab in cluster.shards[1].slabs for plane in slab.planes.values()
        ]
        parity = [weakref.ref(records) for records in member.host._records]
        cluster.kill(1)
        assert all(ref() is None for ref in planes + parity)
        assert not rows_of(member).lost()
    finally:
        gc.enable()
    cluster.close()


@pytest.mark.parametrize("slab", [0, 1])
@pytest.mark.parametrize("before", [True, False])
def test_a_push_that_ends_half_way_is_in_the_parity(
    monkeypatch: pytest.MonkeyPatch, slab: int, before: bool
) -> None:
    """What was changed was changed: a shard that is lost next comes back as if nothing had been."""
    cluster = opened((3, 2, 1), 7, 2)
    broken = cluster.shards[0].slabs[slab]
    whole = broken.push

    def push_and_break(rebuilder: object, lr: float) -> None:
        if not before:
            whole(rebuilder, lr)  # type: ignore[arg-type]
        raise MemoryError

    monkeypatch.setattr(broken, "push", push_and_break)
    with pytest.raises(MemoryError):
        push(cluster, np.random.default_rng(9))
    monkeypatch.undo()
    left = state(cluster)
    cluster.kill(1)
    assert state(cluster) == left
    cluster.rebuild()
    assert cluster._protection is not None
    check_parity(cluster._protection.rebuilder)
    cluster.close()
