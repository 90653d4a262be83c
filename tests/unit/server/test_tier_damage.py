"""What a damage is of decides what becomes of a tiered server's rows: with a file of its tier they
are lost, with anything else they are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from emberkeep._types import Json, RowIds
from emberkeep.cluster.shard import Shard
from emberkeep.errors import DamageError
from emberkeep.server.epoch import Epoch
from emberkeep.server.shard_service import ShardService
from emberkeep.server.tier_service import ServerTier
from emberkeep.tables import SGD, Table, Tier
from emberkeep.tiers import durable_open, upkeep
from emberkeep.tiers.durable_open import tier_files
from emberkeep.tiers.superblock import START
from emberkeep.wire.protocol import PROTOCOL, describe_table, error_from, pack_frame, unpack_frame
from tests.waiting import until

TABLES = [Table("t", rows=9, dim=2), Table("wide", rows=9, dim=4)]
SHARD = 1


class Server:
    """One that serves shard 1, of which some rows were trained."""

    def __init__(self, path: Path, tables: Sequence[Table] = TABLES) -> None:
        self.tier, self.tables = Tier(path, memory=400_000), tables
        self.service = ShardService(threads=1, tier=self.tier)
        self.admit(1)
        if tables is not TABLES:
            return
        empty = RowIds(np.empty(0, np.int64), np.array([0, 0]))
        rows = [RowIds(np.array([1, 3]), np.array([0, 2])), empty]
        grads = [np.ones((2, 2), np.float32), np.empty((0, 4), np.float32)]
        shard = self.epoch.shard
        shard.apply(shard.check(rows, grads), 1.0)

    def admit(self, epoch: int) -> None:
        header = {
            "protocol": PROTOCOL, "epoch": epoch, "coordinator": "A", "term": 1, "begins": True,
            "shard": SHARD, "shards": 2, "seed": 0, "lease_seconds": 60.0, "meeting_seconds": 5.0,
            "tables": [describe_table(t) for t in self.tables],
            "optimizer": SGD(lr=1.0).describe(),
        }  # fmt: skip
        self.act("admit", header)
        until(lambda: self.act("work", {"epoch": epoch, "coordinator": "A"})["done"], "open files")
        self.act("serve", {"epoch": epoch})

    @property
    def epoch(self) -> Epoch:
        assert self.service.epoch is not None
        return self.service.epoch

    @property
    def shard(self) -> Shard:
        return self.epoch.shard

    def act(self, kind: str, header: Json) -> Json:
        (answer,) = self.service.answer_action(kind, pack_frame(header))
        return unpack_frame(answer)[0]

    def meets(self, name: str | None, patch: pytest.MonkeyPatch) -> Json:
        """The answer to an action that meets a damage."""

        def damaged(*_: object) -> None:
            raise DamageError("it is damaged", name=name)

        with patch.context() as within:
            within.setattr("emberkeep.repository.Repository.exists", damaged)
            return self.act("repository", {"epoch": 1, "url": f"file://{self.tier.path}/r"})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    opened = Server(tmp_path / "t")
    yield opened
    if opened.service.epoch is not None:
        opened.service.let_go(opened.service.epoch)


def test_a_damaged_repository_takes_no_rows(server: Server, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "repository.json").write_bytes(b'{"xxh3_128":"00","body":{}}\n')
    answer = server.act("repository", {"epoch": 1, "url": f"file://{tmp_path}/r"})
    assert isinstance(error_from(answer), DamageError)
    assert sum(slab.trained for slab in server.shard.tier_slabs()) == 2


@pytest.mark.parametrize("name", ["grid", "repository.json", "rows-0-0.tier", "x.tier", "", None])
def test_a_damage_of_anything_else_takes_no_rows(
    server: Server, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fall_back=True` needs to know that it was a damage."""
    assert isinstance(error_from(server.meets(name, monkeypatch)), DamageError)
    assert sum(slab.trained for slab in server.shard.tier_slabs()) == 2


@pytest.mark.parametrize("by", ["name", "path"])
@pytest.mark.parametrize("number", [0, 1])
def test_rows_are_lost_with_a_file_of_the_tier(
    server: Server, by: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = server.shard.tier_slabs()[number]
    path = Path(slab.log.path)
    answer = server.meets(path.name if by == "name" else str(path), monkeypatch)
    assert answer["error"] == "EpochError"
    assert server.service.epoch is None


@pytest.mark.parametrize("asked", ["read", "prepare"])
def test_damage_that_opening_has_not_read_is_not_met_over_and_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """The opening after the one that went by the index reads the file, and moves it."""
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 3 * 4096)
    server = Server(tmp_path / "t", [Table("t", rows=4000, dim=2)])
    shard = server.shard
    rows = [RowIds(np.arange(1, 4000, 2), np.array([0, 2000]))]
    shard.apply(shard.check(rows, [np.ones((2000, 2), np.float32)]), 1.0)
    (slab,) = shard.tier_slabs()
    slab.checkpoint(1, shard.table_state(), "nonce").result(60)
    assert slab.commit("nonce")
    upkeep.run(slab)
    server.service.let_go(server.epoch)
    server.admit(2)
    (slab,) = server.shard.tier_slabs()
    assert slab.trained == 2000
    segment = next(iter(slab.log.index.unchecked))
    block = 3 * segment + 1  # neither the first nor the last
    with open(slab.log.path, "r+b") as file:
        file.seek(START + block * 4096 + 40)
        file.write(b"damage")
    if asked == "read":
        row = int(np.flatnonzero(slab.positions == block * slab.log.per_block + 1)[0])
        ids = np.array([2 * row + 1])
        (answer,) = server.service.answer_action(
            "read", pack_frame({"epoch": 2, "table": "t"}, {"ids": ids})
        )
        assert unpack_frame(answer)[0]["error"] == "EpochError"
    else:
        slab.log.index.due = 0
        with pytest.warns(RuntimeWarning, match="1 blocks that were durable"):
            upkeep.run(slab)
        monkeypatch.setattr(Epoch, "store", lambda *_: None)
        ask = {"ask": "prepare", "batch": 2, "nonce": "next", "home": "", "run": ""}
        answer = server.act("tier", {"epoch": 2, **ask})
        assert answer["error"] == "EpochError"
    assert server.service.epoch is None
    server.admit(3)
    assert {file.name for file in (tmp_path / "t" / "shard-1" / "damaged").iterdir()} == {
        "rows-1-0.tier"
    }
    assert [slab.trained for slab in server.shard.tier_slabs()] == [0]
    server.service.let_go(server.epoch)


def test_the_index_goes_with_its_file(tmp_path: Path) -> None:
    tier, here = ServerTier(Tier(tmp_path / "t", memory=100_000)), tmp_path / "t" / "shard-1"
    (here / "damaged").mkdir(parents=True)
    names = {"rows-1-0.index", "rows-1-0.tier", "rows-1-1.tier"}
    for name in names:
        (here / name).write_bytes(b"rows")
    (here / "damaged" / "rows-1-1.index").write_bytes(b"of the files before")
    assert tier.move_damaged(1) == str(here / "damaged")
    assert {file.name for file in (here / "damaged").iterdir()} == names
    assert {file.name for file in here.iterdir()} == {"damaged", "lock"}


def test_every_file_that_a_shard_has_is_known_for_one(tmp_path: Path) -> None:
    tier = ServerTier(Tier(tmp_path / "t", memory=100_000))
    tables = tier.holding(TABLES, 12)
    ((top, names),) = tier_files(tables, 20, only=12).items()
    assert top == tier.directory(12)
    assert len(names) == 2
    assert all(tier.holds(12, name) and tier.holds(12, f"{top}/{name}") for name in names)
    assert not any(tier.holds(1, name) or tier.holds(12, f"{top}/x/{name}") for name in names)
