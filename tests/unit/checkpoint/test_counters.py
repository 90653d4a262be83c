"""What a version says of its run is what is true of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emberkeep._types import RowIds
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.checkpoint.save import Extras
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.repository import Repository
from emberkeep.tables import SGD, Table


def test_counters_are_read_when_the_rows_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is lost in the freeze is recovered partially there: the rows of the version are
    those after the loss, and so must be its PLS."""
    cluster = local(shards=2, threads=1).open([Table("t", rows=10, dim=2)], SGD(lr=0.1), seed=1)
    ids = RowIds(np.arange(4), np.array([0, 4]))
    cluster.push([ids], [np.ones((4, 2), np.float32)], lr=0.1)
    repository = Repository.create(MemoryStore(), schema=cluster.schema())
    saver = Checkpointer(repository, cluster)
    pls = [0.0]
    freeze = LocalCluster.freeze

    def lose_and_freeze(self: LocalCluster, *args: Any) -> Any:
        pls[0] = 0.25
        return freeze(self, *args)

    monkeypatch.setattr(LocalCluster, "freeze", lose_and_freeze)
    saver.save(1, Extras(counters=lambda: {"pls": pls[0]}))
    manifest = saver.wait()
    assert manifest is not None
    assert manifest.counters == {"pls": 0.25}
    saver.close()
    cluster.close()
