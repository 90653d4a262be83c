"""What a save may take of memory beside training, counted."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from emberkeep.cluster.local.local_cluster import local
from emberkeep.rows import snapshot
from emberkeep.tables import Adam, Table
from tests.contracts.engine import grads_of, wanted_of
from tests.waiting import until

ROWS, PUSHED = 3000, 50
TABLES = [Table("narrow", rows=ROWS, dim=8), Table("wide", rows=ROWS, dim=24)]
ROW_NBYTES = {"narrow": 3 * 4 * 8 + 4, "wide": 3 * 4 * 24 + 4}
BUFFER_NBYTES = 100_000


def push(cluster: Any, first: int) -> None:
    ids = [(first + i) % ROWS for i in range(PUSHED)]
    batch = {table.name: ids for table in TABLES}
    grads = {table.name: np.ones((PUSHED, table.dim)) for table in TABLES}
    cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)


def test_copies_of_all_shards_and_slabs_share_one_buffer(monkeypatch: Any) -> None:
    """Pushes wait once it is full, whichever slab they write to; a chunk is bounded in bytes."""
    monkeypatch.setattr(snapshot, "_CHUNK_NBYTES", 40_000)
    monkeypatch.setattr(snapshot, "_SLICE_ROWS", 64)
    cluster = local(shards=4, threads=1).open(TABLES, Adam(lr=0.1, step="row"), seed=0)
    for first in range(0, ROWS, PUSHED):
        push(cluster, first)
    cluster.track()
    frozen = [rows for shard in cluster.freeze(None, BUFFER_NBYTES) for rows in shard]
    pushed = 0

    def train() -> None:
        nonlocal pushed
        for first in range(0, ROWS, PUSHED):
            push(cluster, first)
            pushed += 1

    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()
    until(lambda: not trainer.is_alive() or any(rows.waits for rows in frozen), "a full buffer")
    held = sum(part.nbytes for rows in frozen for part in rows._saved)
    one_push = PUSHED * sum(ROW_NBYTES.values())
    assert BUFFER_NBYTES < held <= BUFFER_NBYTES + one_push
    assert pushed < ROWS // PUSHED

    taken = {table.name: 0 for table in TABLES}
    for rows in frozen:
        for chunk in rows.chunks(32768):
            assert chunk.planes is not None
            taken[chunk.table] += chunk.ids.size
            nbytes = sum(values.nbytes for values in chunk.planes.values())
            assert nbytes <= 40_000 + one_push
    trainer.join(30)
    assert not trainer.is_alive()
    assert taken == {table.name: ROWS for table in TABLES}
    for rows in frozen:
        rows.close(())
