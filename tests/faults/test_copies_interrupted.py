"""A push that fails, or is interrupted, while it copies rows for a save: what it meant to take
is in nobody's hands, so the save must fail, and never be a version without those rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import emberkeep as ek
from emberkeep.blobs import open_store
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import SaveError, ShardLostError
from emberkeep.repository import Repository
from emberkeep.rows import snapshot as snapshots
from emberkeep.rows.saved_rows import SavesWithUpdate
from emberkeep.rows.snapshot import Snapshot, freeze
from emberkeep.tables import Adam, Table
from tests.contracts.engine import grads_of, wanted_of

ROWS, DIM = 640, 16


def fail_once(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], *, updating: bool = False
) -> None:
    """The next push that copies rows ends where it makes room for them, or just before it updates
    them."""
    if updating:
        run = SavesWithUpdate.run

        def interrupted(*_: Any) -> None:
            monkeypatch.setattr(SavesWithUpdate, "run", run)
            raise error("in the middle of a push")

        monkeypatch.setattr(SavesWithUpdate, "run", interrupted)
        return
    room_for = snapshots.room_for

    def failing(*shape: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return room_for(*shape)
        monkeypatch.setattr(snapshots, "room_for", room_for)
        raise error("in the middle of a push")

    monkeypatch.setattr(snapshots, "room_for", failing)


def frozen() -> tuple[LocalCluster, Callable[[list[int]], None], Snapshot]:
    """A cluster all of whose rows were trained, how they are trained on, and a snapshot of it."""
    cluster = local(threads=1).open([Table("t", rows=ROWS, dim=DIM)], Adam(lr=0.1), seed=0)
    (slab,) = cluster.shards[0].slabs
    slab.track()

    def push(ids: list[int]) -> None:
        grads = grads_of(cluster, {"t": np.ones((len(ids), DIM))})
        cluster.push(wanted_of(cluster, {"t": ids}), grads, lr=0.1)

    push(list(range(ROWS)))
    (taken,) = freeze([slab], since=None)
    return cluster, push, taken


def rows_of(cluster: LocalCluster) -> dict[int, bytes]:
    ids, planes = cluster.read_all("t")
    return {
        int(each): b"".join(values[i].tobytes() for values in planes.values())
        for i, each in enumerate(ids)
    }


@pytest.mark.parametrize("updating", [False, True], ids=["making room", "updating"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_snapshot_without_some_rows_is_not_handed_out(
    error: type[BaseException], updating: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, push, taken = frozen()
    fail_once(monkeypatch, error, updating=updating)
    with pytest.raises(error):
        push([3, 5, 7])
    push([11, 13])  # of a run that goes on
    with pytest.raises(SaveError, match="a push ended, interrupted or without memory"):
        list(taken.chunks(64))
    taken.close([])
    state = rows_of(cluster)
    (again,) = freeze(cluster.shards[0].slabs, since=None)
    read = {
        int(each): b"".join(values[i].tobytes() for values in chunk.planes.values())
        for chunk in again.chunks(64)
        for i, each in enumerate(chunk.ids)
        if chunk.planes is not None
    }
    assert read == state
    again.close([])


@pytest.mark.parametrize("later", [False, True], ids=["at once", "in later pushes"])
def test_a_save_that_has_failed_goes_no_further(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader stops at the next chunk, and nothing is copied for it any more."""
    _, push, taken = frozen()
    chunks = taken.chunks(64)
    next(chunks)
    fail_once(monkeypatch, MemoryError, updating=True)
    with pytest.raises(MemoryError):
        push([300])
    if later:
        push([301, 302])
    assert not taken._saved
    with pytest.raises(SaveError, match="a push ended"):
        next(chunks)
    taken.close([])


def test_a_loss_does_not_hide_rows_that_nobody_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader has come to the end when a push fails, and the shard is dropped for it."""
    cluster, push, taken = frozen()
    copy = taken._copy

    def failing(*given: Any) -> Any:
        fail_once(monkeypatch, MemoryError, updating=True)
        with pytest.raises(MemoryError):
            push([3])
        with monkeypatch.context() as patch:
            patch.setattr(taken, "_check_readable", lambda: None)  # as if it had been asked before
            found = copy(*given)  # all others
        cluster.kill(0)
        return found

    monkeypatch.setattr(taken, "_copy", failing)
    with pytest.raises(ShardLostError):
        list(taken.chunks(ROWS))


def test_it_is_no_version_and_the_next_one_has_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = threading.Event()
    chunks = snapshots.Snapshot.chunks

    def late(self: Any, *given: Any) -> Iterator[Any]:
        assert stepped.wait(60)
        yield from chunks(self, *given)

    monkeypatch.setattr(snapshots.Snapshot, "chunks", late)
    bags = ek.EmbeddingBags([ek.Table("item", rows=64, dim=4)], optimizer=ek.SGD(lr=0.1))

    def step() -> None:
        bags({"item": torch.arange(64)}).sum().backward()
        bags.optimizer.step()

    with ek.Keeper(tmp_path, bags, bags.optimizer, strategy=ek.incremental(every=99)) as keeper:
        step()
        keeper.save()
        fail_once(monkeypatch, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            step()
        stepped.set()
        with pytest.warns(UserWarning, match="a push ended"), pytest.raises(SaveError):
            keeper.wait()
        assert Repository.open(open_store(str(tmp_path))).versions() == ()
        keeper.save()
        version = keeper.wait()
        assert version is not None
        saved = {name: values.copy() for name, values in bags.cluster.read_all("item")[1].items()}
    again = ek.EmbeddingBags([ek.Table("item", rows=64, dim=4)], optimizer=ek.SGD(lr=0.1))
    with ek.Keeper(tmp_path, again, again.optimizer, strategy=ek.incremental(every=99)) as keeper:
        keeper.resume()
        found = again.cluster.read_all("item")[1]
        assert {k: v.tobytes() for k, v in found.items()} == {
            k: v.tobytes() for k, v in saved.items()
        }
