"""A snapshot is the state at one instant, whatever happens to the rows while it is copied."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import CancelledError, DeadlineError
from emberkeep.rows import snapshot as snapshots
from emberkeep.rows.copy_room import CopyRoom
from emberkeep.rows.snapshot import Chunk, Snapshot, freeze
from emberkeep.rows.tracker import SINCE_BASELINE, SINCE_VERSION
from emberkeep.tables import SGD, Adam, Table
from emberkeep.testing.virtual_clock import VirtualClock
from tests.contracts.engine import grads_of, wanted_of
from tests.nightly import examples

Rows = dict[str, dict[int, dict[str, bytes]]]

TABLES = [
    Table("fixed", rows=400, dim=3),
    Table("dynamic", rows=None, capacity=300, dim=3),
    Table("evicting", rows=None, capacity=80, dim=3, on_full="evict_oldest"),
]


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_SLICE_ROWS", 64)
    monkeypatch.setattr(snapshots, "_SLICE_WORDS", 2)


def opened() -> LocalCluster:
    cluster = local(threads=1).open(TABLES, Adam(lr=0.1, step="row"), seed=0)
    for slab in cluster.shards[0].slabs:
        slab.track()
    return cluster


def rows_of(cluster: LocalCluster) -> Rows:
    state: Rows = {}
    for table in cluster.tables:
        ids, planes = cluster.read_all(table.name)
        state[table.name] = {
            int(identity): {name: values[i].tobytes() for name, values in planes.items()}
            for i, identity in enumerate(ids)
        }
    return state


def apply(state: Rows, chunks: list[Chunk]) -> Rows:
    """What a reader makes of chunks on top of a state."""
    state = {table: dict(rows) for table, rows in state.items()}
    for chunk in chunks:
        assert (np.diff(chunk.ids) > 0).all()
        for i, identity in enumerate(chunk.ids.tolist()):
            if chunk.planes is None:
                state[chunk.table].pop(identity, None)
            else:
                state[chunk.table][identity] = {
                    name: values[i].tobytes() for name, values in chunk.planes.items()
                }
    return state


def disturb(cluster: LocalCluster, random: np.random.Generator) -> None:
    """A push, a deletion or an installation of random rows."""
    kind = random.integers(0, 10)
    if kind == 0:
        table = TABLES[random.integers(0, 3)].name
        cluster.delete(table, random.integers(0, 350, 15))
    elif kind == 1:
        ids = np.unique(random.integers(0, 350, 15))
        planes = cluster.read("fixed", ids)
        planes["weight"] += 1
        cluster.install("fixed", ids, planes)
    else:
        batch = {
            "fixed": random.choice(400, 30, replace=False).tolist(),
            "dynamic": random.choice(290, 20, replace=False).tolist(),
            "evicting": random.choice(200, 25, replace=False).tolist(),
        }
        grads = {name: random.standard_normal((len(ids), 3)) for name, ids in batch.items()}
        cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)


def frozen(cluster: LocalCluster, since: str | None) -> Snapshot:
    return freeze(cluster.shards[0].slabs, since=since)[0]


@pytest.mark.parametrize("ready_nbytes", [1, 2**30], ids=["as they are", "joined"])
@settings(
    max_examples=examples(20),
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32 - 1),
    before=st.integers(0, 8),
    plan=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=6),
)
def test_versions_follow_the_states_at_their_freezes(
    ready_nbytes: int,
    seed: int,
    before: int,
    plan: list[tuple[bool, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Increments since the last version and since the baseline, with failures in between; what
    pushes have saved is handed out as it is, or joined first."""
    monkeypatch.setattr(snapshots, "_READY_NBYTES", ready_nbytes)
    random = np.random.default_rng(seed)
    cluster = opened()
    for _ in range(before):
        disturb(cluster, random)
    baseline_state = rows_of(cluster)
    full = frozen(cluster, None)
    read = []
    for chunk in full.chunks(64):
        read.append(chunk)
        disturb(cluster, random)
    assert apply({t.name: {} for t in TABLES}, read) == baseline_state
    full.close([SINCE_VERSION, SINCE_BASELINE])
    version_state = baseline_state
    for failed, disturbances in plan:
        for _ in range(disturbances):
            disturb(cluster, random)
        for since, base in ((SINCE_VERSION, version_state), (SINCE_BASELINE, baseline_state)):
            now = rows_of(cluster)
            taken = frozen(cluster, since)
            read = []
            for chunk in taken.chunks(64):
                read.append(chunk)
                disturb(cluster, random)
            assert apply(base, read) == now
            commits = since == SINCE_VERSION and not failed
            taken.close([SINCE_VERSION] if commits else [])
            if commits:
                version_state = now


def test_the_buffer_of_saved_rows_is_bounded_by_waiting() -> None:
    cluster = local(threads=1).open([Table("t", rows=6400, dim=8)], Adam(lr=0.1), seed=0)
    slab = cluster.shards[0].slabs[0]
    slab.track()
    everything = wanted_of(cluster, {"t": list(range(6400))})
    cluster.push(everything, [np.ones((6400, 8), np.float32)], lr=0.1)
    (taken,) = freeze([slab], since=None, room=CopyRoom(1000))
    state = rows_of(cluster)
    cluster.push(everything, [np.ones((6400, 8), np.float32)], lr=0.1)  # fills the buffer
    pusher = threading.Thread(
        target=cluster.push, args=(everything, [np.ones((6400, 8), np.float32)]), kwargs={"lr": 0.1}
    )
    pusher.start()
    while not taken.waits:
        pusher.join(0.001)
        assert pusher.is_alive()
    read = list(taken.chunks(4096))
    pusher.join()
    assert apply({"t": {}}, read) == state
    assert taken.waits == 1
    taken.close([])


def test_a_push_does_not_wait_for_ever_for_a_save_that_hangs() -> None:
    cluster = local(threads=1).open([Table("t", rows=640, dim=8)], Adam(lr=0.1), seed=0)
    slab = cluster.shards[0].slabs[0]
    slab.track()
    everything, grads = wanted_of(cluster, {"t": list(range(640))}), np.ones((640, 8), np.float32)
    cluster.push(everything, [grads], lr=0.1)
    clock = VirtualClock(pace=1e6)
    (taken,) = freeze([slab], since=None, room=CopyRoom(1000, clock))
    cluster.push(everything, [grads], lr=0.1)  # fills the buffer
    state = rows_of(cluster)
    with pytest.raises(DeadlineError, match="a save to take rows that a push is about to change"):
        cluster.push(everything, [grads], lr=0.1)
    assert rows_of(cluster) == state
    list(taken.chunks(4096))
    cluster.push(everything, [grads], lr=0.1)
    taken.close([])


def test_a_cancelled_snapshot_keeps_the_changes_for_the_next() -> None:
    cluster = opened()
    disturb(cluster, np.random.default_rng(9))
    cancelled = threading.Event()
    taken = frozen(cluster, SINCE_VERSION)
    cancelled.set()
    with pytest.raises(CancelledError):
        list(taken.chunks(64, cancelled))
    taken.close([])
    state: Any = rows_of(cluster)
    again = frozen(cluster, SINCE_VERSION)
    assert apply({t.name: {} for t in TABLES}, list(again.chunks(64))) == state


def test_slabs_that_cannot_all_be_frozen_are_not_frozen_at_all() -> None:
    cluster = local(shards=1, threads=1).open(
        [Table("narrow", rows=60, dim=4), Table("wide", rows=60, dim=8)], SGD(lr=0.1), seed=0
    )
    first, second = cluster.shards[0].slabs
    for slab in (first, second):
        slab.track()
    (open_one,) = freeze([second], since=None)
    with pytest.raises(AssertionError, match="one snapshot at a time"):
        freeze([first, second], since=None)
    open_one.close(())
    for taken in freeze([first, second], since=None):
        taken.close(())


@pytest.mark.parametrize("ready_nbytes", [1, 2**30], ids=["as they are", "joined"])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_copied_while_pushes_go_on_in_any_order(
    threads: int, ready_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither waits for the other: a copy that a push may have torn is dropped, and the push has
    saved the row."""
    monkeypatch.setattr(snapshots, "_READY_NBYTES", ready_nbytes)
    monkeypatch.setattr(snapshots, "LEAST_ROWS", 16)
    rows, dim = 3000, 16
    table = Table("t", rows=rows, dim=dim)
    cluster = local(threads=threads).open([table], Adam(lr=0.1, step="row"), seed=0)
    (slab,) = cluster.shards[0].slabs
    slab.track()
    random = np.random.default_rng(threads)

    def push(ids: Any) -> None:
        grads = grads_of(cluster, {"t": np.ones((ids.size, dim))})
        cluster.push(wanted_of(cluster, {"t": ids.tolist()}), grads, lr=0.1)

    push(random.permutation(rows))
    for _ in range(4):
        frozen, torn = rows_of(cluster), 0
        (snapshot,) = freeze([slab], since=None)
        take = snapshot._source.take

        def between(at: Any, out: Any, pool: Any = None, take: Any = take) -> Any:
            """A push comes when rows are listed, and another when they are copied."""
            nonlocal torn
            if pool is not None:
                return take(at, out, pool)
            push(random.permutation(rows)[:400])
            take(at, out)
            push(random.permutation(rows)[:400])
            torn += 1
            return None

        monkeypatch.setattr(snapshot._source, "take", between)
        chunks = list(snapshot.chunks(512))
        snapshot.close(())
        assert torn >= 3
        assert sum(chunk.ids.size for chunk in chunks) == rows
        assert apply({"t": {}}, chunks) == frozen
