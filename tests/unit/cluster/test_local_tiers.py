"""What belongs to the rows of a batch is found by the batch that files have, not by its number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs.local_store import LocalStore
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.local.local_tiers import LocalTiers
from emberkeep.errors import MissingObjectError, TierError
from emberkeep.keeper.tier_saver import TierSaver
from emberkeep.runtime.clock import SYSTEM_CLOCK
from emberkeep.tables import Adagrad, Table, Tier
from emberkeep.tiers.log import RowLog
from tests.contracts.engine import grads_of, wanted_of


class Run:
    """Rows in a tier, and the name of their step in the place of everything else."""

    def __init__(self, path: Path, shards: int = 1) -> None:
        tables = [Table("a", rows=20, dim=2, tier=Tier(path, memory=100_000))]
        self.cluster = local(shards=shards).open(tables, Adagrad(lr=0.1), seed=0)
        self.state = LocalStore(path / "state")
        self.tiers = LocalTiers([self.cluster], self.state)

    def train(self) -> None:
        wanted = wanted_of(self.cluster, {"a": list(range(20))})
        grads = grads_of(self.cluster, {"a": np.ones((20, 2))})
        self.cluster.push(wanted, grads, lr=0.1)

    def prepare(self, batch: int, content: bytes) -> None:
        self.tiers.prepare(batch)()
        self.state.put(self.tiers.pending_state(), content)

    def make_durable(self, batch: int, content: bytes) -> None:
        self.prepare(batch, content)
        self.tiers.commit()
        self.tiers.tidy()

    def held(self) -> bytes:
        return self.state.get(self.tiers.durable_state())

    def resumable(self) -> Any:
        saver = TierSaver(
            self.tiers, self.state, "", on_event=lambda *_: None, clock=SYSTEM_CLOCK
        )  # fmt: skip
        try:
            return saver.resumable()
        finally:
            saver.close()

    def names(self) -> list[str]:
        return sorted(info.name for info in self.state.list() if info.name.startswith("step-"))


def test_a_batch_that_was_not_decided_brings_no_old_rows_back(tmp_path: Path) -> None:
    """The run went back behind a batch, and came to the same number again."""
    run = Run(tmp_path / "t")
    run.train()
    run.make_durable(1100, b"old")
    run.tiers.forget()
    run.train()
    run.prepare(1100, b"new")
    run.cluster.close()  # and there it dies
    again = Run(tmp_path / "t")
    assert again.tiers.batch() == 1100  # the old rows
    assert again.resumable() is None
    with pytest.raises(MissingObjectError):
        again.held()
    again.train()
    again.make_durable(1100, b"newest")
    assert len(again.names()) == 1
    again.cluster.close()
    third = Run(tmp_path / "t")
    assert third.resumable() == 1100
    assert third.held() == b"newest"
    third.cluster.close()


def test_the_state_of_a_run_from_before_is_found(tmp_path: Path) -> None:
    """Its name had no nonce; the next batch's has."""
    run = Run(tmp_path / "t")
    run.train()
    run.make_durable(5, b"five")
    (name,) = run.names()
    run.cluster.close()
    (tmp_path / "t" / "state" / name).rename(tmp_path / "t" / "state" / "step-5.safetensors")
    again = Run(tmp_path / "t")
    assert again.resumable() == 5
    assert again.held() == b"five"
    again.tiers.tidy()
    assert again.held() == b"five"
    again.train()
    again.make_durable(6, b"six")
    assert again.held() == b"six"
    assert again.names() == [again.tiers.durable_state()]
    again.tiers.forget()
    again.train()
    again.prepare(6, b"not decided")
    again.cluster.close()
    third = Run(tmp_path / "t")
    assert third.resumable() is None
    third.cluster.close()


def test_what_one_file_could_not_record_is_forgotten_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was decided: opening the files brings it back, but nothing that belongs to it."""
    run = Run(tmp_path / "t", shards=2)
    run.train()
    run.make_durable(1, b"one")
    run.train()
    run.prepare(2, b"two")
    (last,) = run.cluster.shards[1].tiers()
    commit = RowLog.commit

    def fails(log: RowLog, nonce: str) -> bool:
        if log is last.log:
            raise TierError("broken")
        return commit(log, nonce)

    monkeypatch.setattr(RowLog, "commit", fails)
    with pytest.raises(TierError, match="broken"):
        run.tiers.commit()
    run.tiers.forget()
    run.cluster.close()
    monkeypatch.undo()
    again = Run(tmp_path / "t", shards=2)
    assert again.tiers.batch() == 2
    assert again.resumable() is None
    again.cluster.close()
