"""A save and extraction share a collector, and may want to collect at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from emberkeep.blobs import BlobInfo, Buffer, MemoryStore
from emberkeep.checkpoint import Extras
from emberkeep.repository import Repository, verify
from tests.contracts.engine import state
from tests.contracts.layout import opened, started, train


class Meeting(MemoryStore):
    """Once a collection has listed versions, another is committed, whose files are older than the
    collection, and the next collection begins."""

    def __init__(self) -> None:
        super().__init__()
        self.rows_written, self.listed, self.committed = (threading.Event() for _ in range(3))

    def dense(self) -> bytes:
        self.rows_written.set()
        assert self.listed.wait(60)
        return b"dense"

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        created = super().put_if_absent(name, data)
        if name.startswith("versions/") and self.rows_written.is_set():
            self.committed.set()
        return created

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        if prefix == "data" and self.rows_written.is_set() and not self.listed.is_set():
            self.listed.set()
            assert self.committed.wait(60)
            # The collection of the save is through by then, where it does not wait for this one.
            threading.Event().wait(0.5)
        return super().list(prefix)


def test_what_is_committed_beside_a_collection_is_not_garbage_for_it() -> None:
    store, cluster, random = Meeting(), opened(), np.random.default_rng(0)
    keeper = started(cluster, store)
    train(cluster, random)
    keeper.save(1)
    keeper.wait()
    train(cluster, random)
    keeper.save(2, Extras(dense=store.dense))
    assert store.rows_written.wait(60)
    keeper._collector.collect()  # as the thread of extraction does
    keeper.wait()
    assert verify(Repository.open(store)).ok
    fresh = opened()
    assert started(fresh, store).restore() is not None
    assert state(fresh) == state(cluster)
