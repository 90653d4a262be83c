"""States that are loaded into tables: rows without an age, without planes, and too many of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import emberkeep as ek
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.runtime.pool import Pool
from emberkeep.testing.local_transport import LocalNetwork, LocalServers
from emberkeep.testing.virtual_clock import VirtualClock

DIM = 2


def bags_of(optimizer: Any = None, *, shards: int = 1, **table: Any) -> ek.EmbeddingBags:
    return ek.EmbeddingBags(
        [ek.Table("t", rows=None, dim=DIM, **table)], optimizer=optimizer or ek.SGD(lr=0.5),
        cluster=ek.local(shards=shards, threads=1),
    )  # fmt: skip


def train(bags: ek.EmbeddingBags, *ids: int) -> None:
    bags({"t": torch.tensor(ids)}).sum().backward()
    bags.optimizer.step()


def weights(bags: ek.EmbeddingBags, *ids: int) -> list[list[float]]:
    found: list[list[float]] = bags.rows("t", list(ids))["weight"].tolist()
    return found


def check_eviction(bags: ek.EmbeddingBags) -> None:
    """The table holds rows 1, 2 and 3 of ones, and has no room for more."""
    train(bags, 9)
    assert len(bags.touched_ids("t")) == 3
    kept = [row for row in bags.touched_ids("t").tolist() if row != 9]
    train(bags, kept[1], 8)
    assert weights(bags, kept[1]) == [[0.5, 0.5]]
    assert {*bags.touched_ids("t").tolist()} == {kept[1], 8, 9}


def test_rows_that_come_without_an_age_are_evicted_like_others() -> None:
    bags = bags_of(capacity=3, on_full="evict_oldest")
    state = {"rows.t.ids": torch.tensor([1, 2, 3]), "rows.t.weight": torch.ones(3, DIM)}
    bags.load_state_dict(state, strict=False)
    check_eviction(bags)


@pytest.mark.parametrize("how", ["loaded", "upserted"])
def test_rows_without_an_age_are_the_newest_whatever_accumulators_begin_with(how: str) -> None:
    optimizer = ek.Adagrad(lr=0.5, initial_accumulator_value=5.0)
    bags = bags_of(optimizer, capacity=8, on_full="evict_oldest")
    for _ in range(4):
        train(bags, 101, 102, 103, 104)
    before = bags.rows("t", [101, 102, 103, 104])["used"]
    assert before.min() > 5
    if how == "loaded":
        state = {"rows.t.ids": torch.tensor([1, 2, 3]), "rows.t.weight": torch.ones(3, DIM)}
        bags.load_state_dict(state, strict=False)
    else:
        bags.upsert("t", [1, 2, 3], torch.ones(3, DIM))
    rows = bags.rows("t", [1, 2, 3])
    assert rows["used"].min() > before.max()
    assert torch.equal(rows["accumulator"], torch.full((3, DIM), 5.0))


def test_an_id_that_is_not_there_has_no_age() -> None:
    optimizer = ek.Adagrad(lr=0.5, initial_accumulator_value=5.0)
    rows = bags_of(optimizer, capacity=3, on_full="evict_oldest").rows("t", [1])
    assert rows["used"].tolist() == [[0]]
    assert rows["accumulator"].tolist() == [[5.0] * DIM]


@pytest.mark.filterwarnings("ignore:.*has no reader")
def test_rows_of_a_version_without_ages_are_evicted_like_others(tmp_path: Path) -> None:
    whole = bags_of(capacity=3)
    whole.upsert("t", [1, 2, 3], {"weight": torch.ones(3, DIM)})
    with ek.Keeper(tmp_path / "old", whole, whole.optimizer) as keeper:
        keeper.save()
    bags = bags_of(capacity=3, on_full="evict_oldest")
    with ek.Keeper(tmp_path / "new", bags, bags.optimizer) as keeper:
        keeper.resume(source=tmp_path / "old", partial=True)
        check_eviction(bags)


def test_a_state_without_the_planes_of_the_optimizer_is_not_taken_for_whole() -> None:
    plain, other = bags_of(capacity=9), bags_of(ek.Adagrad(lr=0.5), capacity=9)
    train(plain, 1, 2)
    with pytest.raises(RuntimeError, match=r"rows\.t\.accumulator"):
        other.load_state_dict(plain.state_dict())
    found = other.load_state_dict(plain.state_dict(), strict=False)
    assert found.missing_keys == ["rows.t.accumulator"]
    assert weights(other, 1, 2) == weights(plain, 1, 2)


def test_a_state_that_one_shard_has_no_room_for_leaves_all_rows_as_they_were() -> None:
    bags = bags_of(shards=2, capacity=8)
    first, second = bags.cluster.positions("t", np.arange(200))
    train(bags, *first[:5].tolist(), *second[:3].tolist())
    before = {name: plane.tolist() for name, plane in bags.state_dict().items()}
    ids = torch.tensor([*first[20:25].tolist(), *second[20:29].tolist()])
    state = {"rows.t.ids": ids, "rows.t.weight": torch.ones(14, DIM)}
    with pytest.raises(RuntimeError, match="capacity"):
        bags.load_state_dict(state, strict=False)
    assert {name: plane.tolist() for name, plane in bags.state_dict().items()} == before


def test_a_table_within_the_name_of_another_has_rows_of_its_own() -> None:
    def make() -> ek.EmbeddingBags:
        tables = [ek.Table(name, rows=5, dim=DIM) for name in ("a", "a.b", "a.weight")]
        return ek.EmbeddingBags(tables, optimizer=ek.Adagrad(lr=0.5))

    bags, loaded = make(), make()
    bags({name: torch.tensor([i]) for i, name in enumerate(bags.features)}).sum().backward()
    bags.optimizer.step()
    state = bags.state_dict()
    loaded.load_state_dict(state)
    for i, name in enumerate(bags.features):
        assert loaded.touched_ids(name).tolist() == [i]
        assert torch.equal(loaded.rows(name, [i])["weight"], bags.rows(name, [i])["weight"])
    with pytest.raises(RuntimeError, match=r"rows\.a\.c\.weight"):
        loaded.load_state_dict({**state, "rows.a.c.weight": torch.ones(1, DIM)})


class _OnNetwork:
    """Servers in this process, as a place for rows."""

    def __init__(self) -> None:
        self.network = LocalNetwork(VirtualClock())

    def open(self, tables: Any, optimizer: Any, *, seed: int) -> FlightCluster:
        return FlightCluster(
            tables, optimizer, LocalServers(self.network, 2), seed=seed, pool=Pool(1),
            transport=self.network.transport(), clock=self.network.clock,
        )  # fmt: skip


def test_no_row_goes_before_all_is_there_that_takes_its_place() -> None:
    """Rows were read from servers when the table was empty already: one that was lost then left it
    so."""
    place = _OnNetwork()
    bags = ek.EmbeddingBags(
        [ek.Table("t", rows=None, dim=DIM, capacity=90)],
        optimizer=ek.Adagrad(lr=0.5, initial_accumulator_value=0.25), cluster=place,
    )  # fmt: skip
    train(bags, *range(20))
    state = {"rows.t.ids": torch.arange(5, 30), "rows.t.weight": torch.ones(25, DIM)}
    place.network.events.clear()
    bags.load_state_dict(state, strict=False)
    kinds = [event.kind for event in place.network.events]
    assert "read" not in kinds[kinds.index("delete") :]
    assert bags.touched_ids("t").tolist() == [*range(5, 30)]
    rows = bags.rows("t", range(5, 30))
    assert torch.equal(rows["weight"], torch.ones(25, DIM))
    assert torch.equal(rows["accumulator"], torch.full((25, DIM), 0.25))
    bags.cluster.close()


def test_rows_are_as_they_were_where_their_deletion_fails_half_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bags = bags_of(shards=2, capacity=30)
    train(bags, *range(10))
    before = weights(bags, *range(10))
    real, left = bags.cluster.delete, [None]

    def delete(table: str, ids: Any) -> int:
        if left:
            left.pop()
            real(table, ids[::2])
            raise MemoryError("no room")
        return real(table, ids)

    monkeypatch.setattr(bags.cluster, "delete", delete)
    state = {"rows.t.ids": torch.arange(3), "rows.t.weight": torch.ones(3, DIM)}
    with pytest.raises(MemoryError):
        bags.load_state_dict(state, strict=False)
    assert weights(bags, *range(10)) == before
    assert bags.touched_ids("t").tolist() == [*range(10)]
