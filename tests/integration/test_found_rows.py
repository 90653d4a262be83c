"""Files that hold a batch when they are opened, and a run that has not asked for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import emberkeep as ek
from emberkeep.cluster.local.local_cluster import local
from emberkeep.errors import StateError
from emberkeep.keeper.run_saver import DurableStep
from emberkeep.tables import Tier
from emberkeep.tiers import durable_open
from tests.integration.test_batch_and_version import Place
from tests.integration.test_tiered_keeper import SHARDS, TABLES, Model, OnServers, plain
from tests.servers import Farm, FarmLauncher

pytestmark = pytest.mark.filterwarnings("ignore:step .* was resumed and the keeper has no reader")
SELDOM = ek.incremental(every=50)
BATCHES = replace(ek.tiered(every=2, remote=60), recovery=None)
"""Without a version of the beginning."""


@pytest.fixture(params=["in process", "on servers"])
def place(
    tmp_path: Path, farm: Farm, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """Where a run has made step 8 durable, and has no version."""
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    servers = None
    if request.param == "on servers":
        servers = FarmLauncher(farm, SHARDS, tier=Tier(tmp_path / "t", memory=40_000))
    place = Place(tmp_path, servers)
    place.train(9, BATCHES)
    yield place
    if servers is not None:
        servers.end()


def model(place: Place) -> Model:
    """Nobody keeps it."""
    torch.manual_seed(0)
    if place.servers is not None:
        return Model(TABLES, OnServers(place.servers))
    return Model(
        [replace(t, tier=Tier(place.root / "t", memory=60_000)) for t in TABLES],
        local(shards=SHARDS),
    )


def refusal(place: Place) -> Any:
    where = r"/t/shard-\d" if place.servers is not None else "/t"
    return pytest.raises(StateError, match=rf"{where} has the rows of step 8, .* remove the files")


def test_without_a_keeper_they_are_refused(place: Place) -> None:
    alone = model(place)
    with refusal(place):
        alone(0)
    alone.bags.cluster.close()
    again = place.start()  # and the batch is there as it was
    assert again.keeper.resume() == DurableStep(8)
    assert again.bits() == plain(8)
    again.end()


def test_rows_that_were_loaded_in_their_place_are_trained(place: Place) -> None:
    torch.manual_seed(0)
    source = Model(TABLES, local(shards=SHARDS))
    alone = model(place)
    alone.load_state_dict(source.state_dict())
    alone(0).square().mean().backward()
    alone.bags.optimizer.step()
    source(0).square().mean().backward()
    source.bags.optimizer.step()
    for table in ("a", "b", "c"):
        assert alone.bags.cluster.digest(table) == source.bags.cluster.digest(table)
    alone.bags.cluster.close()


def test_a_run_with_versions_alone_and_none_yet_is_refused(place: Place) -> None:
    run = place.start(SELDOM)
    with refusal(place):
        run.keeper.resume()
    with refusal(place):
        run.keeper.save()
    with refusal(place):
        run.model(0)
    run.keeper.close(save=False)
    run.end()


def test_it_can_start_over(place: Place) -> None:
    run = place.start(SELDOM)
    run.keeper.start_over()
    assert run.bits() == plain(0)
    assert run.train(4).bits() == plain(4)
    run.end()


def test_a_version_takes_their_place(place: Place) -> None:
    place.train(6)  # version 12, batch 14
    run = place.start(SELDOM)
    assert run.keeper.resume().step == 12
    assert run.train(1).bits() == plain(13)
    run.end()


def test_a_batch_that_was_given_up_does_not_come_back(place: Place) -> None:
    back = place.start(BATCHES)
    back.keeper._saver._tier.forget()  # the beginning of starting over, which is cut off here
    back.end()
    run = place.start(BATCHES)
    assert run.keeper.resume() is None
    assert run.bits() == plain(0)
    assert run.train(4).bits() == plain(4)
    run.end()


def test_a_batch_that_not_all_servers_have_does_not_come_back(farm: Farm, tmp_path: Path) -> None:
    servers = FarmLauncher(farm, SHARDS, tier=Tier(tmp_path / "t", memory=40_000))
    place, files, away = Place(tmp_path, servers), tmp_path / "t" / "shard-1", tmp_path / "away"
    place.train(8, BATCHES)
    files.rename(away)  # a disk that is not mounted
    run = place.start()
    with pytest.raises(StateError, match=r"not all servers have .*no version.*start_over\(\)"):
        run.keeper.resume()
    run.end()
    shutil.rmtree(files)
    away.rename(files)
    again = place.start()
    assert again.keeper.resume() == DurableStep(8)
    assert again.bits() == plain(8)
    again.end()
    servers.end()
