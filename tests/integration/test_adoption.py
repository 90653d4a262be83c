"""Servers outlive the trainer: the next one finds rows, goes back with them, or adopts them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import emberkeep as ek
from emberkeep.blobs.local_store import LocalStore
from emberkeep.cli._progress import resumed_line
from emberkeep.cluster.remote.processes import connect
from emberkeep.cluster.remote.remote_shard import RemoteShard
from emberkeep.errors import ConfigError, ServerError, ShardLostError
from emberkeep.repository import Repository
from emberkeep.server.server_watch import ServerWatch
from emberkeep.server.shard_service import ShardService
from emberkeep.tables import SGD, Table, Tier
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.wire.protocol import PROTOCOL, describe_table
from tests.integration.test_tiered_keeper import (
    OFTEN,
    SHARDS,
    TABLES,
    OnServers,
    Run,
    plain,
)
from tests.servers import Farm, FarmLauncher
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:step .* was resumed and the keeper has no reader")
EVERY_SIX = ek.incremental(every=6)


@pytest.fixture(params=["memory", "tier"])
def launcher(farm: Farm, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FarmLauncher]:
    tier = Tier(tmp_path / "t", memory=40_000) if request.param == "tier" else None
    started = FarmLauncher(farm, SHARDS, tier=tier)
    yield started
    started.end()


def left(launcher: FarmLauncher, where: Path, strategy: Any = EVERY_SIX, steps: int = 9) -> Run:
    """A run whose trainer has gone after so many steps; its servers have their rows."""
    run = Run(OnServers(launcher, on_restart="adopt"), where, strategy)
    run.keeper.resume()
    run.train(steps)

    def known() -> bool:  # with the next renewal of their leases
        return all(shard.status()["run"]["repository"] for shard in run.cluster.handles)

    until(known, "servers to know their run")
    run.end()
    return run


def test_rows_stay_and_what_is_applied_twice_is_counted(
    launcher: FarmLauncher, tmp_path: Path
) -> None:
    left(launcher, tmp_path / "r")
    run = Run(OnServers(launcher, on_restart="adopt"), tmp_path / "r", EVERY_SIX)
    assert run.cluster.adopted is not None
    kept = run.keeper.resume()
    assert kept is not None
    assert kept.step == run.keeper.steps == 6
    rows, dense = run.bits()
    assert rows == plain(9)[0]  # as they were
    assert dense == plain(6)[1]  # as of the version
    assert run.keeper.recoveries().samples_applied_twice == 3  # steps: there is no reader
    (resumed,) = run.heard("resumed")
    assert resumed["samples_applied_twice"] == 3
    assert "are applied to them twice" in resumed_line(resumed)

    def at(step: int) -> bool:  # the trainer's, as its servers hear it: rows are ahead of that
        return all(shard.status()["run"]["step"] == step for shard in run.cluster.handles)

    until(lambda: at(6), "servers to know the step")
    run.train(6)
    until(lambda: at(12), "servers to know the step")
    run.keeper.close()
    run.end()
    again = Run(OnServers(launcher), tmp_path / "r", EVERY_SIX)
    assert again.keeper.resume().step == 12
    assert again.keeper.recoveries().samples_applied_twice == 3  # versions know of it
    again.end()


def test_a_recovery_never_counts_on_rows_that_were_adopted_before(
    launcher: FarmLauncher, tmp_path: Path
) -> None:
    left(launcher, tmp_path / "r")
    run = Run(OnServers(launcher, on_restart="adopt"), tmp_path / "r", EVERY_SIX)
    assert run.cluster.adopted is not None
    assert run.keeper.resume(1).step == 6  # a version that is named brings rows, too
    assert run.cluster.adopted is None
    assert run.bits() == plain(6)
    run.train(8)
    launcher.kill(1)
    with pytest.raises(ShardLostError) as lost:
        run.train(3)
    run.keeper.recover(lost.value)
    assert run.keeper.steps == 12
    assert run.bits() == plain(12)
    run.end()


@pytest.mark.parametrize("how", ["renew", "clear", "start over", "warm start"])
def test_rows_are_adopted_no_more_once_they_are_gone_or_chosen(
    farm: Farm, tmp_path: Path, how: str
) -> None:
    servers = FarmLauncher(farm, SHARDS)
    left(servers, tmp_path / "r")
    run = Run(OnServers(servers, on_restart="adopt"), tmp_path / "r", EVERY_SIX)
    assert run.cluster.adopted is not None
    if how == "renew":
        run.cluster.renew(*range(SHARDS))
        run.cluster.serve(*range(SHARDS))
    elif how == "clear":
        run.cluster.clear()
    elif how == "start over":
        run.keeper.start_over()
        assert all(run.cluster.touched_ids(table.name).size == 0 for table in TABLES)
    else:
        run.keeper.resume(1, partial=True)
        assert run.bits() == plain(6)
    assert run.cluster.adopted is None
    run.end()
    servers.end()


def test_by_default_all_goes_back_with_the_same_bits(
    launcher: FarmLauncher, tmp_path: Path
) -> None:
    left(launcher, tmp_path / "r")
    run = Run(OnServers(launcher), tmp_path / "r", EVERY_SIX)
    assert run.keeper.resume().step == 6
    assert run.bits() == plain(6)
    assert run.keeper.recoveries().samples_applied_twice == 0
    run.end()


def test_batches_in_tiers_too(farm: Farm, tmp_path: Path) -> None:
    servers = FarmLauncher(farm, SHARDS, tier=Tier(tmp_path / "t", memory=40_000))
    left(servers, tmp_path / "r", OFTEN)
    run = Run(OnServers(servers, on_restart="adopt"), tmp_path / "r", OFTEN)
    assert run.keeper.resume().step == 8
    rows, dense = run.bits()
    assert (rows, dense) == (plain(9)[0], plain(8)[1])
    assert run.keeper.recoveries().samples_applied_twice == 1
    run.train(4).end()
    again = Run(OnServers(servers), tmp_path / "r", OFTEN)
    assert again.keeper.resume().step == 12
    again.end()
    servers.end()


@pytest.mark.filterwarnings("ignore:old versions could not be removed")
@pytest.mark.parametrize("what", ["manifest", "dense state"])
def test_the_network_falls_back_past_a_damaged_version_and_rows_stay(
    launcher: FarmLauncher, tmp_path: Path, what: str
) -> None:
    left(launcher, tmp_path / "r", steps=15)
    newest = Repository.open(LocalStore(tmp_path / "r")).manifest(2)
    names = [newest.name] if what == "manifest" else [f.name for f in newest.of_kind("dense")]
    for damaged in (tmp_path / "r" / name for name in names):
        damaged.chmod(0o644)
        damaged.write_bytes(b"damage")
    run = Run(OnServers(launcher, on_restart="adopt"), tmp_path / "r", EVERY_SIX)
    assert run.cluster.adopted is not None
    with pytest.warns(UserWarning, match=r"versions \[2\] are damaged and were passed over"):
        assert run.keeper.resume(fall_back=True).step == 6
    rows, dense = run.bits()
    assert (rows, dense) == (plain(15)[0], plain(6)[1])
    assert run.keeper.recoveries().samples_applied_twice == 9
    run.train(2)
    assert run.keeper.close().step == 8
    run.end()
    again = Run(OnServers(launcher), tmp_path / "r", EVERY_SIX)
    assert again.keeper.resume().step == 8
    again.end()


def test_rows_of_a_run_that_has_left_newer_versions_are_not_adopted(
    farm: Farm, tmp_path: Path
) -> None:
    """Beside them would stand the network of the newest. Those of its next version are."""
    servers = FarmLauncher(farm, SHARDS)
    left(servers, tmp_path / "r", steps=13)

    def goes_back(steps: int, run_known: bool) -> None:
        run = Run(OnServers(servers), tmp_path / "r", EVERY_SIX)
        run.keeper.resume(1)
        run.train(steps)

        def known() -> bool:
            runs = [shard.status()["run"]["repository"] for shard in run.cluster.handles]
            return all(runs) if run_known else not any(runs)

        until(known, "servers to know whose rows they have")
        for shard in run.cluster.handles:
            shard.release(run.cluster._coordinator, stay=True)
        run.end()

    goes_back(2, run_known=False)
    with pytest.warns(UserWarning, match="none are adopted"):
        run = Run(OnServers(servers, on_restart="adopt"), tmp_path / "r", EVERY_SIX)
    assert run.keeper.resume().step == 12
    assert run.bits() == plain(12)
    run.end()
    goes_back(7, run_known=True)
    run = Run(OnServers(servers, on_restart="adopt"), tmp_path / "r", EVERY_SIX)
    assert run.keeper.resume().step == 12
    assert run.bits() == [plain(13)[0], plain(12)[1]]
    run.end()
    servers.end()


@pytest.mark.parametrize("what", ["a server was started again", "another run", "another model"])
def test_rows_that_are_not_all_of_the_run_are_not_adopted(
    farm: Farm, tmp_path: Path, what: str
) -> None:
    servers = FarmLauncher(farm, SHARDS)
    left(servers, tmp_path / ("other" if what == "another run" else "r"))
    if what == "a server was started again":
        servers.replace(1, "")
    tables = [Table("a", rows=61, dim=4), *TABLES[1:]] if what == "another model" else TABLES
    where = tmp_path / ("m" if what == "another model" else "r")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run = Run(OnServers(servers, on_restart="adopt"), where, EVERY_SIX, tables=tables)
        kept = run.keeper.resume()
    assert any("none are adopted" in str(warning.message) for warning in heard)
    if what == "a server was started again":
        assert kept is not None
        assert run.bits() == plain(6)
    else:
        assert kept is None
        assert all(run.cluster.touched_ids(table.name).size == 0 for table in TABLES)
    run.end()
    servers.end()


@pytest.mark.parametrize("parent", [False, True])
def test_a_server_without_a_trainer_keeps_its_rows_for_a_while_and_ends(parent: bool) -> None:
    """One whose parent lives keeps them: that may only have been stopped."""
    clock, events = VirtualClock(), []
    service = ShardService(
        threads=1, clock=clock, on_event=lambda name, details: events.append(name)
    )
    ended = list[bool]()
    watch = ServerWatch(
        service, clock, keep_rows_for=None if parent else timedelta(minutes=30),
        on_dropped=lambda: ended.append(True),
    )  # fmt: skip
    table = Table("t", rows=9, dim=2)
    header = {
        "protocol": PROTOCOL, "epoch": 1, "coordinator": "x", "term": 1, "begins": True,
        "shard": 0, "shards": 1, "tables": [describe_table(table)], "seed": 0,
        "optimizer": SGD(lr=1.0).describe(), "lease_seconds": 15.0, "meeting_seconds": 5.0,
    }  # fmt: skip
    list(service.act("admit", header, {}))
    for minutes, held in ((1, True), (28, True), (2, parent)):
        clock.advance(timedelta(minutes=minutes))
        watch.look()
        assert (service.epoch is not None) == held
    assert ended == ([] if parent else [True])
    assert ("rows_dropped" in events) != parent


def test_rows_that_were_never_loaded_are_not_adopted(farm: Farm, tmp_path: Path) -> None:
    """A trainer that dies before it has loaded its version leaves servers that know their run and
    hold nothing of it: the next one would train on initial rows."""
    servers = FarmLauncher(farm, SHARDS)
    left(servers, tmp_path / "r")
    for shard in range(SHARDS):
        servers.replace(shard, "")
    dies = Run(OnServers(servers, on_restart="adopt"), tmp_path / "r", EVERY_SIX)

    def known() -> bool:
        return all(shard.status()["run"]["repository"] for shard in dies.cluster.handles)

    until(known, "servers to know their run")
    dies.end()
    run = Run(OnServers(servers, on_restart="adopt"), tmp_path / "r", EVERY_SIX)
    assert run.cluster.adopted is None
    assert run.keeper.resume().step == 6
    assert run.bits() == plain(6)
    run.end()
    servers.end()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_restart is rewind or adopt"):
        connect(["127.0.0.1:1"], on_restart="keep")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the parity of a run ends with its trainer"):
        connect(["127.0.0.1:1"] * 3, on_restart="adopt", parity=ek.Parity(k=2, r=1))


def test_one_server_that_is_held_up_does_not_end_an_adoption(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease of the trainer before may lapse here a moment later than there."""
    servers = FarmLauncher(farm, SHARDS)
    left(servers, tmp_path / "r")
    admit, refused = RemoteShard.admit, list[int]()

    def admitting(shard: RemoteShard, epoch: int, about: Any) -> None:
        if shard.index == 1 and not refused:
            refused.append(epoch)
            raise ServerError("it serves another run, whose coordinator is alive")
        admit(shard, epoch, about)

    monkeypatch.setattr(RemoteShard, "admit", admitting)
    run = Run(OnServers(servers, on_restart="adopt"), tmp_path / "r", EVERY_SIX)
    assert refused
    assert run.cluster.adopted is not None
    assert run.keeper.resume().step == 6
    assert run.bits()[0] == plain(9)[0]
    run.end()
    servers.end()
