"""What a coordinator asks of the files of a server, asked twice, late, or for an epoch that is
over: no outcome of one batch is that of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep._types import RowIds
from emberkeep.cluster.shard import Shard
from emberkeep.errors import CancelledError, EpochError, ShardLostError, TierError
from emberkeep.runtime.pool import Pool
from emberkeep.server import tier_service
from emberkeep.server.epoch import Epoch
from emberkeep.tables import Adagrad, Table, Tier
from emberkeep.tiers.tiered_slab import TieredSlab
from tests.waiting import until

WANTED = [RowIds(np.arange(3), np.array([0, 3]))]


def epoch_of(number: int, shard: Shard) -> Epoch:
    epoch = Epoch(
        number, shard, shards=1, coordinator="c", lease_seconds=60, meeting_seconds=0.01,
        pool=Pool(1), tables=[],
    )  # fmt: skip
    epoch.whole = True
    return epoch


@pytest.fixture
def epoch(tmp_path: Path) -> Iterator[Epoch]:
    tables = [Table("t", rows=10, dim=2, tier=Tier(tmp_path / "t", memory=10_000))]
    shard = Shard(tables, Adagrad(lr=0.1), pool=Pool(1))
    shard.serve()
    yield epoch_of(1, shard)
    shard.kill()


class Server:
    """One shard whose batches are decided in `outcomes`; `meanwhile` happens once, while the
    outcome of a batch is looked up."""

    def __init__(self, epoch: Epoch, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.epoch, self.home = epoch, home
        self.outcomes: dict[str, bool] = {}
        self.meanwhile: Callable[[], object] | None = None
        monkeypatch.setattr(tier_service, "took_place", self._took_place)

    def _took_place(self, point: Any, *_: object) -> bool:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return self.outcomes[point.nonce]

    @property
    def slab(self) -> TieredSlab:
        (slab,) = self.epoch.shard.tier_slabs()
        return slab

    def push(self) -> None:
        shard = self.epoch.shard
        shard.apply(shard.check(WANTED, [np.ones((3, 2), np.float32)]), 0.1)

    def prepare(self, batch: int, nonce: str, epoch: Epoch | None = None) -> Any:
        about = {"batch": batch, "nonce": nonce, "home": self.home, "run": "r"}
        return tier_service.ask(epoch or self.epoch, {"ask": "prepare", **about})

    def await_prepared(self, batch: int, nonce: str) -> None:
        about = {"ask": "prepared", "batch": batch, "nonce": nonce}
        until(lambda: tier_service.ask(self.epoch, about)["prepared"], "the batch")

    def record(self, nonce: str, *, committed: bool) -> bool:
        about = {"ask": "record", "nonce": nonce, "committed": committed}
        return bool(tier_service.ask(self.epoch, about)["recorded"])


@pytest.fixture
def server(epoch: Epoch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(epoch, f"file://{tmp_path}/r", monkeypatch)


@pytest.mark.parametrize("committed", [True, False])
def test_an_attempt_that_hangs_in_the_store_leaves_the_next_batch_alone(
    server: Server, committed: bool
) -> None:
    """It asks what became of the batch before; a second attempt records that and goes on."""
    server.push()
    server.prepare(1, "before")
    server.await_prepared(1, "before")
    server.outcomes["before"] = committed
    server.push()

    def second() -> None:
        server.prepare(2, "a")
        server.await_prepared(2, "a")

    server.meanwhile = second
    server.prepare(2, "a")
    head = server.slab.log.head
    assert head.prepared is not None
    assert head.prepared.nonce == "a"
    assert (head.committed is not None and head.committed.nonce == "before") is committed
    server.await_prepared(2, "a")
    assert server.record("a", committed=True)
    assert server.slab.batch == 2


def test_a_batch_that_was_recorded_is_not_prepared_again(server: Server) -> None:
    """Rows of a later step would have its name, and a decision that says that it took place."""
    server.push()
    server.prepare(1, "a")
    server.await_prepared(1, "a")
    assert server.record("a", committed=True)
    committed = server.slab.log.head.committed
    server.push()
    with pytest.raises(EpochError, match="late"):
        server.prepare(1, "a")
    assert server.slab.saving is None
    assert server.slab.log.prepared is None
    assert server.slab.log.head.committed == committed
    server.prepare(2, "b")
    server.await_prepared(2, "b")
    with pytest.raises(EpochError, match="late"):
        server.prepare(1, "a")
    server.await_prepared(2, "b")
    assert server.record("b", committed=True)


def test_an_attempt_of_an_epoch_that_is_over_settles_nothing(server: Server) -> None:
    """Its rows were adopted while it hung in the store, and the next epoch has prepared."""
    server.push()
    server.prepare(1, "before")
    server.await_prepared(1, "before")
    server.outcomes["before"] = False
    before = server.epoch

    def adopted() -> None:
        shard = before.hand_over()
        tier_service.settle(shard)
        server.epoch = epoch_of(2, shard)
        server.prepare(2, "b")
        server.await_prepared(2, "b")

    server.meanwhile = adopted
    with pytest.raises(ShardLostError):
        server.prepare(2, "a", before)
    server.await_prepared(2, "b")
    assert server.slab.log.prepared is not None
    with pytest.raises(ShardLostError):
        tier_service.ask(before, {"ask": "abandon"})
    assert server.record("b", committed=True)


def test_an_attempt_that_is_repeated_tells_of_the_pushes_that_its_rows_hold(
    server: Server,
) -> None:
    """Another worker's push may come between the two."""
    server.push()
    server.epoch._ledger.note(7, 1)
    first = server.prepare(1, "a")
    server.push()
    server.epoch._ledger.note(7, 2)
    assert server.prepare(1, "a") == first == {"pushes": {"7": 1}}
    assert server.epoch.pushes() == {"7": 2}


def test_files_record_the_outcome_of_the_batch_that_is_meant_and_no_other(server: Server) -> None:
    server.push()
    server.prepare(1, "a")
    server.await_prepared(1, "a")
    assert not server.slab.commit("b")
    assert not server.slab.log.unprepare("b")
    assert server.slab.log.prepared is not None
    assert server.slab.commit("a")
    assert not server.slab.commit("a")
    assert server.slab.log.prepared is None


@pytest.mark.parametrize("tables", [1, 2])
def test_a_batch_that_a_file_has_no_room_for_is_no_batch_that_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: int
) -> None:
    """Upkeep lets go of it at once; the coordinator, which asks later, hears why: it would take a
    batch that was given up for one that made room for newer work, and raise nothing."""
    tier = Tier(tmp_path / "t", memory=10_000)
    dims = range(2, 2 + tables)
    shard = Shard(
        [Table(f"t{dim}", rows=10, dim=dim, tier=tier) for dim in dims], Adagrad(lr=0.1),
        pool=Pool(1),
    )  # fmt: skip
    shard.serve()
    server = Server(epoch_of(1, shard), f"file://{tmp_path}/r", monkeypatch)
    slab = shard.tier_slabs()[-1]

    def full(*_: object, **__: object) -> None:
        raise TierError("the file cannot grow")

    with monkeypatch.context() as patch:
        patch.setattr(slab.log, "reserve_head", full)
        server.prepare(1, "a")
        until(lambda: slab.saving is None, "upkeep to give it up")
        for _ in range(2):  # the answer may get lost
            with pytest.raises(TierError, match="cannot grow"):
                server.await_prepared(1, "a")
    server.outcomes["a"] = False
    server.prepare(2, "b")
    with pytest.raises(TierError, match="cannot grow"):
        server.await_prepared(1, "a")
    server.await_prepared(2, "b")
    assert server.record("b", committed=True)
    shard.kill()


def test_a_batch_that_made_room_for_the_next_was_given_up(server: Server) -> None:
    server.push()
    server.prepare(1, "a")
    server.outcomes["a"] = False
    server.prepare(2, "b")
    with pytest.raises(CancelledError, match="batch 1 was given up"):
        server.await_prepared(1, "a")
    with pytest.raises(CancelledError, match="batch 7 was given up"):  # of which nothing is known
        server.await_prepared(7, "x")
    server.await_prepared(2, "b")
