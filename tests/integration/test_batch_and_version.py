"""Which of batch and version a tiered run goes on from, and what it knows by then."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import emberkeep as ek
from emberkeep.blobs.local_store import LocalStore
from emberkeep.cluster.local.local_cluster import local
from emberkeep.errors import DamageError, NoVersionError, StateError
from emberkeep.keeper.run_saver import DurableStep
from emberkeep.repository import Repository
from emberkeep.runtime.clock import SystemClock
from emberkeep.strategies import Strategy
from emberkeep.tables import Tier
from emberkeep.tiers import durable_open
from tests.integration.test_adoption import left as left_on_servers
from tests.integration.test_tiered_keeper import OFTEN, SHARDS, TABLES, OnServers, Run, plain
from tests.servers import Farm, FarmLauncher

pytestmark = pytest.mark.filterwarnings("ignore:step .* was resumed and the keeper has no reader")


class Place:
    """One run that is started again and again."""

    def __init__(self, root: Path, servers: FarmLauncher | None) -> None:
        self.root, self.servers = root, servers

    def start(self, strategy: Strategy = OFTEN, **options: Any) -> Run:
        where = self.root / "r"
        if self.servers is not None:
            return Run(OnServers(self.servers), where, strategy, **options)
        tables = [replace(t, tier=Tier(self.root / "t", memory=60_000)) for t in TABLES]
        return Run(local(shards=SHARDS), where, strategy, tables=tables, **options)

    def train(self, steps: int, strategy: Strategy = OFTEN, **options: Any) -> Run:
        run = self.start(strategy, **options)
        run.keeper.resume()
        run.train(steps).end()
        return run


@pytest.fixture(params=["in process", "on servers"])
def place(
    tmp_path: Path, farm: Farm, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    if request.param == "in process":
        yield Place(tmp_path, None)
        return
    servers = FarmLauncher(farm, SHARDS, tier=Tier(tmp_path / "t", memory=40_000))
    yield Place(tmp_path, servers)
    servers.end()


@pytest.mark.parametrize("why", ["is not there", "does not fit", "is damaged"])
def test_a_version_that_does_not_come_back_leaves_the_batch(
    place: Place, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.train(9)
    run = place.start()
    if why == "is not there":
        with pytest.raises(NoVersionError):
            run.keeper.resume(99)
    elif why == "does not fit":

        def refuse(_: object) -> None:
            raise StateError("another model")

        monkeypatch.setattr(run.keeper._state, "fit", refuse)
        with pytest.raises(StateError, match="another model"):
            run.keeper.resume(2)
    else:
        for path in (place.root / "r" / "data").rglob("*"):
            if path.is_file():
                path.chmod(0o644)
                path.write_bytes(path.read_bytes()[:-9] + b"\0damaged\0")
        with pytest.raises(DamageError):
            run.keeper.resume(2)
    run.end()
    again = place.start()
    assert again.keeper.resume() == DurableStep(8)
    assert again.bits() == plain(8)
    again.end()


@pytest.mark.parametrize("left", ["batch", "given up"])
def test_a_run_that_starts_over_begins_without_the_rows_of_the_batch(
    place: Place, left: str
) -> None:
    place.train(9)
    if left == "given up":  # files still have it
        back = place.start()
        back.keeper.resume(1)
        back.end()
    run = place.start()
    run.keeper.start_over()
    assert run.keeper.steps == 0
    assert run.bits() == plain(0)
    assert run.train(4).bits() == plain(4)
    run.end()
    again = place.start()
    assert again.keeper.resume().step == 4
    assert again.bits() == plain(4)
    again.end()


def test_rows_that_a_new_run_was_given_stay(place: Place) -> None:
    run = place.start()
    run.model(0).square().mean().backward()
    run.model.bags.optimizer.step()
    given = run.bits()
    assert given != plain(0)
    run.keeper.save()
    run.keeper.wait()
    assert run.bits() == given
    run.end()


def test_a_batch_that_was_given_up_stays_so_when_its_files_are_there_again(
    farm: Farm, tmp_path: Path
) -> None:
    servers = FarmLauncher(farm, SHARDS, tier=Tier(tmp_path / "t", memory=40_000))
    place, files, away = Place(tmp_path, servers), tmp_path / "t" / "shard-1", tmp_path / "away"
    place.train(8)
    files.rename(away)  # a disk that is not mounted
    without = place.start()
    assert without.keeper.resume().step == 6
    without.train(1).end()
    shutil.rmtree(files)
    away.rename(files)
    again = place.start()
    assert again.keeper.resume().step == 6
    assert again.bits() == plain(6)
    assert again.train(4).bits() == plain(10)
    again.end()
    servers.end()


def test_a_batch_knows_of_failures_and_of_what_was_applied_twice(place: Place) -> None:
    run = place.start()
    run.keeper.resume()
    run.train(3)
    run.keeper._recoverer._applied_twice = 5
    run.keeper._recoverer._failures_before = 2
    run.train(1).end()
    again = place.start()
    assert again.keeper.resume() == DurableStep(4)
    known = again.keeper.recoveries()
    assert (known.failures, known.samples_applied_twice) == (2, 5)
    again.end()


def damage_newest(root: Path, what: str) -> None:
    """The manifest of the newest version, or the files that it names."""
    repository = Repository.open(LocalStore(root))
    newest = repository.versions()[-1]
    names = [newest.manifest_name]
    if what == "files":
        names = [file.name for file in repository.manifest(newest).files]
    for path in (root / name for name in names):
        path.chmod(0o644)
        path.write_bytes(b"damage")


@pytest.mark.filterwarnings("ignore:old versions could not be removed")
@pytest.mark.parametrize("fall_back", [False, True])
def test_a_damaged_manifest_stops_no_run_whose_files_have_the_batch(
    place: Place, fall_back: bool
) -> None:
    place.train(9)
    damage_newest(place.root / "r", "manifest")
    run = place.start()
    with pytest.warns(UserWarning, match=r"versions \[2\] are damaged and were passed over"):
        assert run.keeper.resume(fall_back=fall_back) == DurableStep(8)
    assert run.bits() == plain(8)
    run.train(4).end()
    assert versions_of(run) == [10, 12]  # the first is due by the version that can be read
    again = place.start()
    assert again.keeper.resume() == DurableStep(12)
    assert again.bits() == plain(12)
    again.end()


def test_without_files_a_run_falls_back_past_a_damaged_manifest(place: Place) -> None:
    strategy = ek.tiered(every=2, remote=4)
    place.train(9, strategy)
    damage_newest(place.root / "r", "manifest")
    shutil.rmtree(place.root / "t")
    run = place.start(strategy)
    with pytest.raises(DamageError, match="fall_back=True"):
        run.keeper.resume()
    with pytest.warns(UserWarning, match=r"versions \[3\] are damaged and were passed over"):
        assert run.keeper.resume(fall_back=True).step == 4
    assert run.bits() == plain(4)
    run.end()


@pytest.mark.filterwarnings("ignore:old versions could not be removed")
@pytest.mark.parametrize("what", ["manifest", "files"])
def test_a_run_falls_back_to_its_batch_before_it_does_to_an_older_version(
    place: Place, what: str
) -> None:
    """The end of a run is a version; its last batch comes before that."""
    run = place.start()
    run.keeper.resume()
    run.train(9)
    assert run.keeper.close().step == 9
    run.end()
    damage_newest(place.root / "r", what)
    again = place.start()
    if what == "files":
        with pytest.raises(DamageError):
            again.keeper.resume()
    with pytest.warns(UserWarning, match=r"versions \[3\] are damaged and were passed over"):
        assert again.keeper.resume(fall_back=True) == DurableStep(8)
    assert again.bits() == plain(8)
    assert again.train(4).bits() == plain(12)
    again.end()


@pytest.mark.parametrize("how", ["starts over", "goes back"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_batch_that_a_run_has_gone_on_without_does_not_come_back(
    place: Place, how: str, steps: int
) -> None:
    """A run with versions alone leaves files as they are: what it has saved is of a later time than
    their batch, whichever number of steps it has made."""
    place.train(9)
    between = place.start(ek.incremental(every=60))
    if how == "starts over":
        between.keeper.start_over()
    else:
        assert between.keeper.resume().step == 6
    between.train(steps)
    step = between.keeper.steps
    assert between.keeper.close().step == step
    between.end()
    again = place.start()
    assert again.keeper.resume().step == step
    assert again.bits() == plain(step)
    assert again.train(4).bits() == plain(step + 4)
    again.end()


def test_the_batch_before_a_version_of_the_same_run_comes_back(place: Place) -> None:
    """Whichever process has made which of them."""
    place.train(9)
    place.train(1)  # from batch 8, without a version
    again = place.start()
    assert again.keeper.resume() == DurableStep(8)
    assert again.bits() == plain(8)
    again.end()


@pytest.mark.filterwarnings("ignore:old versions could not be removed")
def test_a_run_falls_back_from_a_batch_whose_state_is_damaged(place: Place) -> None:
    place.train(9)
    states = place.root / ("t/state" if place.servers is None else "r/tiers")
    (damaged,) = states.glob("step-*")
    damaged.write_bytes(b"damage")
    run = place.start()
    with pytest.raises(DamageError, match=r"fall_back=True"):
        run.keeper.resume()
    with pytest.warns(UserWarning, match="the batch of step 8 was passed over: .*step-8"):
        assert run.keeper.resume(fall_back=True).step == 6
    assert run.bits() == plain(6)
    assert run.train(4).bits() == plain(10)
    run.end()
    again = place.start()
    assert again.keeper.resume() == DurableStep(10)
    again.end()


class Later(SystemClock):
    """The machine's clock, so many minutes on; what is monotonic begins with each process."""

    def __init__(self, minutes: int) -> None:
        self._ahead = timedelta(minutes=minutes)

    def now(self) -> datetime:
        return super().now() + self._ahead


def versions_of(run: Run) -> list[int]:
    return [saved["step"] for saved in run.heard("saved") if saved["version"] is not None]


def test_a_version_is_due_by_its_age_however_often_the_process_is_started(place: Place) -> None:
    strategy = ek.tiered(every=2, remote="1h")
    starts = [(0, [0]), (40, []), (80, [6]), (130, []), (150, [10]), (0, [])]
    for minutes, versions in starts:
        assert versions_of(place.train(2, strategy, clock=Later(minutes))) == versions


def test_after_adoption_the_next_version_comes_when_it_is_due(farm: Farm, tmp_path: Path) -> None:
    servers = FarmLauncher(farm, SHARDS, tier=Tier(tmp_path / "t", memory=40_000))
    left_on_servers(servers, tmp_path / "r", OFTEN)
    run = Run(OnServers(servers, on_restart="adopt"), tmp_path / "r", OFTEN)
    assert run.keeper.resume() == DurableStep(8)
    assert versions_of(run.train(4)) == [12]
    run.end()
    servers.end()
