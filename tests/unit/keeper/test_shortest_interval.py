"""The shortest interval between versions follows how they are stored now."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from torch import nn

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import SaveSettings, VersionSpec
from emberkeep.checkpoint.widths import Width, Widths
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.keeper.combined_subject import CombinedSubject
from emberkeep.keeper.interval import Limit, nbytes_by_table
from emberkeep.repository import KeepAll, Repository
from emberkeep.runtime.pool import Pool
from emberkeep.strategies import Every, Strategy
from emberkeep.testing.local_transport import LocalNetwork, LocalServers
from emberkeep.testing.virtual_clock import VirtualClock

SLOW = SaveSettings(most_mb_per_second=0.001)
ROWS = {"large": 1500, "small": 10}


class Model(nn.Module):
    def __init__(self, tables: Any = None) -> None:
        super().__init__()
        self.bags = ek.EmbeddingBags(
            tables or [ek.Table(name, rows=rows, dim=8) for name, rows in ROWS.items()],
            optimizer=ek.SGD(lr=0.1), cluster=ek.local(shards=2),
        )  # fmt: skip


def kept(store: Any = None, *, tables: Any = None, **more: Any) -> ek.Keeper:
    model = Model(tables)
    return ek.Keeper(
        store or MemoryStore(), model, model.bags.optimizer,
        strategy=more.pop("strategy", None) or ek.incremental(every=1000),
        total_steps=10_000, **more,
    )  # fmt: skip


def limit_of(keeper: ek.Keeper, events: list[Any] | None = None, **settings: Any) -> Limit:
    heard = [] if events is None else events
    return Limit(
        keeper._parts.subject, keeper._parts.dense, keeper._strategy,
        SaveSettings(most_mb_per_second=0.001, **settings),
        lambda *event: heard.append(event), keeper._saver,
    )  # fmt: skip


def nbytes_at(bits: int) -> int:
    return sum(ROWS.values()) * ek.codecs.Quantized(bits=bits).nbytes_per_row(8)


def seconds(limit: Limit) -> float:
    assert limit.shortest is not None
    return limit.shortest.total_seconds()


def restored_twice() -> MemoryStore:
    """A run that was restored twice from rounded rows, and expected to be once."""
    store = MemoryStore()
    keeper = kept(store, strategy=ek.incremental(every=1000, expected_restores=1))
    keeper.save()
    manifest: Any = keeper.wait()
    keeper.close(save=False)
    for _ in range(2):
        Repository.open(store).record_restore(manifest.version)
    return store


def test_restores_of_rounded_rows_are_counted() -> None:
    strategy = ek.incremental(every=1000, expected_restores=1)
    assert seconds(limit_of(kept(strategy=strategy))) == nbytes_at(2) / 1e3
    after = kept(restored_twice(), strategy=strategy)
    assert seconds(limit_of(after)) == nbytes_at(8) / 1e3


def test_a_keeper_counts_them_too() -> None:
    strategy = ek.incremental(every=1000, expected_restores=1)
    keeper = kept(restored_twice(), strategy=strategy, settings=SLOW)
    assert keeper.shortest_interval == timedelta(seconds=nbytes_at(8) / 1e3)


def test_widths_that_change_are_said_and_warned_of_with_the_next_version() -> None:
    every = nbytes_at(4) / 1e3 + 1
    keeper = kept(strategy=ek.incremental(every=timedelta(seconds=every), bits={"large": 2}))
    saver: Any = keeper._saver
    events: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limit = limit_of(keeper, events)
        limit.cut(0.0)
    assert len(events) == 1
    saver.use_widths(Widths(tables={"large": Width(bits=8), "small": Width(bits=8)}))
    with pytest.warns(UserWarning, match="and one is wanted every"):
        limit.cut(1.0)
    limit.cut(2.0)
    assert [name for name, _ in events] == ["bandwidth"] * 2
    assert events[1][1]["version_nbytes"] == nbytes_at(8)
    assert seconds(limit) == nbytes_at(8) / 1e3


def test_a_run_that_plans_is_not_warned_of_an_interval_that_it_has_left() -> None:
    keeper = kept(strategy=ek.auto(first="30s"))
    events: list[Any] = []
    with pytest.warns(UserWarning, match="and one is wanted every 30 s"):
        limit = limit_of(keeper, events)
    saver: Any = keeper._saver
    saver.follow(VersionSpec(layout="full", bits=8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limit.cut(0.0)
    assert len(events) == 2


def test_prioritised_versions_are_counted_up_to_the_next_whole_one() -> None:
    large, small = (ROWS[name] * 8 * 4 for name in ("large", "small"))
    nbytes = large + small + 7 * (large / 8 + small)  # small tables are there with all rows
    strategy = ek.partial(every="80s", priority="ssu", fraction=1 / 8)
    keeper = kept(strategy=strategy)
    with pytest.warns(
        UserWarning,
        match="with the 7 prioritised ones after it .* takes .* they are wanted every 1.3 min",
    ):
        limit = limit_of(keeper)
    assert seconds(limit) == nbytes / 1e3
    assert large + small < 80e3 < nbytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limit_of(kept(strategy=ek.partial(every="2min", priority="ssu", fraction=1 / 8)))


def test_an_interval_in_steps_is_looked_at_over_all_of_its_versions() -> None:
    strategy = ek.partial(every=800, priority="ssu", fraction=1 / 8)
    limit = limit_of(kept(strategy=strategy))
    limit.cut(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limit.due(seconds(limit) / 8 + 0.1)
    limit = limit_of(kept(strategy=strategy))
    limit.cut(0.0)
    with pytest.warns(UserWarning, match="one was due"):
        limit.due(seconds(limit) / 8 - 0.1)


def test_ids_that_are_random_are_counted() -> None:
    tables = [ek.Table("dynamic", rows=None, capacity=20_000, dim=16)]
    keeper = kept(tables=tables, strategy=ek.incremental(every=1000, bits=2, layout="full"))
    ids = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 15_000)
    bags: Any = keeper._parts.subject.homes()[0].cluster
    bags.install("dynamic", ids, {"weight": np.ones((ids.size, 16), np.float32)})
    keeper.save()
    manifest: Any = keeper.wait()
    (table,) = bags.tables
    most = sum(nbytes_by_table(keeper._parts.subject, keeper._strategy.spec).values())
    assert manifest.nbytes / ids.size <= most / table.slots


def test_an_interval_in_steps_is_watched_too_where_saves_are_given_up() -> None:
    limit = limit_of(kept(), overlap="cancel")
    limit.cut(0.0)
    with pytest.warns(UserWarning, match="one was due 1 s after .* come later than that"):
        limit.due(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limit.cut(2.0)
        limit.due(3.0)


def test_what_extraction_writes_is_said_not_to_be_counted() -> None:
    strategy = ek.incremental(every="1s", layout="grid")
    with pytest.warns(UserWarning, match="MB, not counting what extraction writes"):
        limit_of(kept(strategy=strategy))


def test_the_warning_with_a_version_names_the_line_of_the_user() -> None:
    model = Model()
    keeper = ek.Keeper(
        MemoryStore(), model, model.bags.optimizer, settings=SLOW,
        strategy=ek.incremental(every=timedelta(seconds=30), bits={"large": 2}),
    )  # fmt: skip
    saver: Any = keeper._saver
    saver._lift_limits()
    saver.use_widths(Widths(tables={"large": Width(bits=None)}))
    with pytest.warns(UserWarning, match="and one is wanted every 30 s") as warned:
        keeper.save()
    assert warned[0].filename == __file__
    keeper.close(save=False)


@pytest.mark.parametrize(("layout", "parts"), [("consecutive", 3), ("grid", 4)])
def test_servers_have_equal_parts_and_in_a_grid_so_has_this_process(
    layout: Any, parts: int
) -> None:
    network = LocalNetwork(VirtualClock())
    table = ek.Table("t", rows=300, dim=8)
    cluster = FlightCluster(
        [table], ek.SGD(lr=0.1), LocalServers(network, 3), seed=3, pool=Pool(1),
        clock=network.clock, transport=network.transport(),
    )  # fmt: skip
    keeper = kept()
    strategy = Strategy(
        spec=VersionSpec(layout=layout), schedule=Every(steps=1000), retention=KeepAll()
    )
    subject = CombinedSubject([("one", cluster)])
    limit = Limit(subject, keeper._parts.dense, strategy, SLOW, None)
    dense = keeper._parts.dense.nbytes()
    rows = sum(nbytes_by_table(subject, strategy.spec).values())
    wanted = rows / 3 * parts + dense * (parts if layout == "grid" else 1)
    assert seconds(limit) == pytest.approx(wanted / 1e3)
    cluster.close()
