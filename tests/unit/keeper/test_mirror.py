"""Two places for one run: copies beside training, the newest of either, and what fails there."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep.blobs import LocalStore, MemoryStore
from emberkeep.checkpoint import SaveSettings
from emberkeep.errors import (
    ConfigError,
    FencedError,
    NoRepositoryError,
    StateError,
    StorageError,
)
from emberkeep.keeper.mirror import Mirror, MirrorStatus
from emberkeep.keeper.repository_saver import RepositorySaver
from emberkeep.repository import Repository, Writer, verify
from emberkeep.repository.maintenance.version_copy import Origin
from emberkeep.runtime.clock import SystemClock
from tests.nightly import by_night
from tests.servers import Farm, OnFarm

STEPS = 12
NOW = SaveSettings(grace=timedelta(0))


class Model(nn.Module):
    def __init__(self, cluster: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = ek.EmbeddingBags(
            [ek.Table("id", rows=200, dim=4)], optimizer=ek.Adagrad(lr=0.1),
            cluster=cluster or ek.local(shards=2),
        )  # fmt: skip
        self.dense = nn.Linear(4, 1)


class FailingStore(MemoryStore):
    """Refuses every call while it is `down`."""

    down = False

    def _asked(self) -> None:
        if self.down:
            raise StorageError("the network is down")

    def put(self, name: str, data: Any) -> int:
        self._asked()
        return super().put(name, data)

    def put_if_absent(self, name: str, data: Any) -> bool:
        self._asked()
        return super().put_if_absent(name, data)

    def get(self, name: str) -> bytes:
        self._asked()
        return super().get(name)

    def size(self, name: str) -> int:
        self._asked()
        return super().size(name)

    def list(self, prefix: str = "") -> Iterator[Any]:
        self._asked()
        return super().list(prefix)


class ClockAhead(SystemClock):
    """Of a machine whose clock was set wrong."""

    def now(self) -> datetime:
        return super().now() + timedelta(hours=1)


class Life:
    """One process of a run."""

    def __init__(self, where: Any, mirror: Any, *, seed: int = 0, **more: Any) -> None:
        self.model = Model(more.pop("cluster", None))
        self.events: list[tuple[str, Any]] = []
        self.seed = seed
        strategy = more.pop("strategy", ek.incremental(every=2, keep=2))
        self.keeper = ek.Keeper(
            where, self.model,
            [self.model.bags.optimizer, torch.optim.SGD(self.model.dense.parameters(), lr=0.1)],
            strategy=strategy, mirror=mirror, on_event=lambda *event: self.events.append(event),
            **{"settings": NOW, **more},
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*has no reader")
            self.resumed = self.keeper.resume()

    def train(self, until: int = STEPS) -> Life:
        while self.keeper.steps < until:
            ids = torch.randint(0, 200, (16,), generator=torch.Generator().manual_seed(
                self.keeper.steps + 1000 * self.seed))  # fmt: skip
            self.model.dense(self.model.bags({"id": ids})[:, 0]).sum().backward()
            for optimizer in self.keeper._parts.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.keeper.step()
        return self

    @property
    def mirror(self) -> Mirror:
        saver = self.keeper._saver
        assert isinstance(saver, RepositorySaver)
        assert saver._mirror is not None
        return saver._mirror

    def wait_for(self, until: Callable[[], bool]) -> Life:
        """Of the thread that copies."""
        self.keeper.wait()
        self.mirror._worker.wait(until, "the mirror", timedelta(seconds=30))
        return self

    def wait_for_fence(self) -> Life:
        """Not for the save under way, which raises once the fence is noticed."""
        self.mirror._worker.wait(
            lambda: self.mirror._fenced is not None, "the fence", timedelta(seconds=30)
        )
        return self

    def settle(self) -> Life:
        """Waits for saves and copies under way."""
        self.keeper.wait()
        return self.wait_for(lambda: self.status.step == self.keeper.durable)

    @property
    def status(self) -> MirrorStatus:
        found = self.keeper.mirror_status()
        assert found is not None
        return found

    def bits(self) -> dict[str, bytes]:
        return {name: value.numpy().tobytes() for name, value in self.model.state_dict().items()}

    def heard(self, name: str) -> list[Any]:
        return [details for event, details in self.events if event == name]


def steps_in(store: Any) -> list[int]:
    repository = Repository.open(store)
    return [repository.manifest(version).step for version in repository.versions()]


@pytest.mark.parametrize("layout", ["full", "one_shot", "intermittent", "consecutive"])
@pytest.mark.long
def test_a_run_goes_on_from_the_mirror_when_its_disk_is_gone(tmp_path: Path, layout: Any) -> None:
    mirror, strategy = MemoryStore(), ek.incremental(every=2, layout=layout, keep=2)
    first = Life(tmp_path / "first", mirror, strategy=strategy).train(7).settle()
    assert first.status.step == 6
    second = Life(tmp_path / "second", mirror, strategy=strategy)
    assert second.resumed is not None
    assert second.resumed.step == 6
    assert second.heard("brought_from_mirror")[0]["step"] == 6
    whole = Life(MemoryStore(), None, strategy=strategy).train()
    second.train().keeper.close()
    assert second.bits() == whole.bits()
    for store in (LocalStore(tmp_path / "second"), mirror):
        assert steps_in(store)[-1] == STEPS
        assert verify(Repository.open(store)).damages == ()
    third = Life(tmp_path / "third", mirror, strategy=strategy)
    assert third.bits() == whole.bits()


def test_copies_have_the_digests_of_what_they_are_copies_of(tmp_path: Path) -> None:
    mirror, local = MemoryStore(), LocalStore(tmp_path / "run")
    # Each place lets go of versions by itself: a copy may outlive what it is a copy of.
    strategy = ek.incremental(every=2, layout="one_shot", keep="all")
    Life(local, mirror, strategy=strategy).train().keeper.close()
    here, there = Repository.open(local), Repository.open(mirror)
    originals = {v: here.manifest(v) for v in here.versions()}
    for version in there.versions():
        copy = there.manifest(version)
        original = originals[Origin.of(copy).version]
        assert [(f.size, f.digest) for f in copy.files] == [
            (f.size, f.digest) for f in original.files
        ]
        assert copy.step == original.step
        assert copy.created >= original.created


def test_what_either_place_has_newer_is_resumed(tmp_path: Path) -> None:
    """A run that moves to another disk and back goes on with what is newest, wherever it is."""
    mirror = MemoryStore()
    Life(tmp_path / "a", mirror).train(4).keeper.close()
    Life(tmp_path / "b", mirror).train(8).keeper.close()
    back = Life(tmp_path / "a", mirror)
    assert back.resumed is not None
    assert back.resumed.step == 8  # its own disk has 4
    back.train(10)
    back.keeper.wait()
    # This time the mirror is behind: the disk counts, and the copy is made up for.
    behind = Life(tmp_path / "a", mirror)
    assert behind.resumed is not None
    assert behind.resumed.step == 10
    behind.train().keeper.close()
    assert steps_in(mirror)[-1] == STEPS


def test_a_copy_is_made_no_more_often_than_asked() -> None:
    mirror = MemoryStore()
    life = Life(MemoryStore(), mirror, mirror_every="5 steps")
    for step in (2, 4, 6, 8):
        life.train(step)
        life.keeper.wait()
        if step in (2, 8):
            life.settle()
    assert [copied["step"] for copied in life.heard("mirrored")] == [2, 8]
    life.train(STEPS - 1).keeper.close()  # the end of a run is copied in any case
    assert steps_in(mirror)[-1] == STEPS - 1


def test_retention_holds_in_both_places() -> None:
    local, mirror = MemoryStore(), MemoryStore()
    life = Life(local, mirror, strategy=ek.incremental(every=2, layout="full", keep=2))
    for step in range(2, STEPS + 1, 2):
        life.train(step).settle()
    life.keeper.close()
    assert steps_in(local) == steps_in(mirror) == [10, 12]


def test_a_mirror_that_fails_is_said_and_training_goes_on() -> None:
    mirror = FailingStore()
    life = Life(MemoryStore(), mirror)
    life.train(2).settle()

    def train_without_it() -> None:
        mirror.down = True
        life.train(6).wait_for(lambda: bool(life.heard("mirror_failed")))

    with pytest.warns(UserWarning, match=r"could not be copied to .*the network is down"):
        train_without_it()
    status = life.status
    assert (status.step, status.error) == (2, "the network is down")
    assert status.failing_since is not None
    assert re.search(r"emberkeep_mirror_failures_total [1-9]", life.keeper.metrics())
    mirror.down = False
    life.train(8).settle()  # it is tried again
    life.wait_for(lambda: life.status.error is None)
    assert life.heard("mirrored")[-1]["step"] == 8


def test_the_end_of_a_run_does_not_wait_for_ever_for_a_mirror() -> None:
    mirror, local = FailingStore(), MemoryStore()
    life = Life(local, mirror).train(3)
    life.settle()
    mirror.down = True
    with pytest.warns(UserWarning, match="has step 2, and the repository step 3"):
        life.keeper.close()
    assert steps_in(local)[-1] == 3
    mirror.down = False
    again = Life(local, mirror).settle()  # it is made up for
    assert steps_in(mirror)[-1] == 3
    again.keeper.close()


def test_the_last_version_is_copied_though_an_older_one_is_on_its_way(tmp_path: Path) -> None:
    """The end of a run asks for a copy that is not due, while that of an older version ends."""
    life = Life(tmp_path / "run", MemoryStore(), mirror_every="100 steps").train(2).settle()
    mirror, noted = life.mirror, life.mirror._note

    def note(*args: Any) -> None:
        mirror._note = noted  # type: ignore[method-assign]
        life.train(3)
        life.keeper.save()
        life.keeper.wait()
        mirror._wake(forced=True)  # as the end of the run does, with version 3 committed
        noted(*args)

    mirror._note = note  # type: ignore[method-assign]
    mirror._wake(forced=True)
    life.wait_for(lambda: mirror._step == 3)
    life.keeper.close()


def test_a_run_does_not_start_beside_a_mirror_that_it_cannot_see(tmp_path: Path) -> None:
    """The mirror may hold a newer version: training on from an older one would waste it, and where
    the disk is gone the run would start over."""
    mirror = FailingStore()
    Life(tmp_path / "run", mirror).train(4).keeper.close()
    mirror.down = True
    for where in ("run", "elsewhere"):
        with pytest.raises(StorageError, match=r"the run was not started.*leave mirror= out"):
            Life(tmp_path / where, mirror)
    assert not (tmp_path / "elsewhere").exists()
    assert Life(tmp_path / "run", None).resumed.step == 4  # type: ignore[union-attr]


def test_a_process_whose_mirror_another_has_taken_is_stopped(tmp_path: Path) -> None:
    """Their disks differ: nothing else would stop the earlier one."""
    mirror = MemoryStore()
    earlier = Life(tmp_path / "a", mirror).train(4).settle()
    later = Life(tmp_path / "b", mirror)
    assert later.resumed is not None
    earlier.train(6).wait_for_fence()
    with pytest.raises(FencedError):
        earlier.train(8)
    later.train().keeper.close()
    assert steps_in(mirror)[-1] == STEPS


def test_a_damaged_version_comes_back_from_the_mirror(tmp_path: Path) -> None:
    mirror, local = MemoryStore(), tmp_path / "run"
    first = Life(local, mirror).train(4)
    first.keeper.close()
    newest = Repository.open(LocalStore(local)).manifest(2)
    (local / newest.files[0].name).write_bytes(b"damage")
    with pytest.warns(UserWarning, match=r"is damaged.*version 2 \(step 4\) was repaired"):
        second = Life(local, mirror)
    assert second.resumed is not None
    assert second.resumed.step == 4
    assert second.bits() == first.bits()


def test_a_manifest_that_is_damaged_does_not_hide_what_the_mirror_has(tmp_path: Path) -> None:
    mirror, local = MemoryStore(), tmp_path / "run"
    first = Life(local, mirror).train(4)
    first.keeper.close()
    (local / Repository.open(LocalStore(local)).manifest(2).name).write_bytes(b"damage")
    second = Life(local, mirror)
    assert second.resumed is not None
    assert second.resumed.step == 4
    assert second.bits() == first.bits()


def test_a_listener_that_raises_fails_no_copy() -> None:
    def listen(event: str, _: Any) -> None:
        if event == "mirrored":
            raise RuntimeError("listener")

    life = Life(MemoryStore(), MemoryStore())
    life.mirror._listener = listen
    with pytest.warns(UserWarning, match="on_event\\('mirrored'\\) raised"):
        life.train(2).settle().keeper.close()
    assert life.status.failed == 0


def test_what_cannot_be_mirrored_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    with pytest.raises(ConfigError, match="a grid cannot be mirrored"):
        Life(store, MemoryStore(), strategy=ek.all_versions(every=2))
    with pytest.raises(ConfigError, match="is the same place"):
        Life(tmp_path / "run", str(tmp_path / "run"))
    for nowhere in ("", 5):
        with pytest.raises(ConfigError, match="is no place"):
            Life(store, nowhere)
    with pytest.raises(ConfigError, match="mirror_every= is for a mirror"):
        Life(store, None, mirror_every="2h")
    with pytest.raises(ConfigError, match="mirror_mb_per_second is for a mirror"):
        Life(store, None, settings=SaveSettings(mirror_mb_per_second=1))
    with pytest.raises(ConfigError, match="every='often' is no interval"):
        Life(store, MemoryStore(), mirror_every="often")
    assert not Repository.exists(store)
    other = MemoryStore()
    Life(other, None).train(3).keeper.close()
    Life(store, None).train(3).keeper.close()
    with pytest.raises(ConfigError, match="holds versions of another run"):
        Life(store, other)
    schema = {"shards": 1, "tables": {"x": {"rows": 1, "planes": {"weight": [1, "float32"]}}}}
    foreign = MemoryStore()
    Repository.create(foreign, schema=schema)
    with pytest.raises(StateError, match="does not fit the repository"):
        Life(MemoryStore(), foreign)


def test_a_run_that_must_exist_may_exist_in_the_mirror(tmp_path: Path) -> None:
    mirror = MemoryStore()
    with pytest.raises(NoRepositoryError, match="neither the repository nor its mirror"):
        Life(tmp_path / "a", mirror, must_exist=True)
    assert not Repository.exists(mirror)
    Life(tmp_path / "a", mirror).train(4).keeper.close()
    assert Life(tmp_path / "b", mirror, must_exist=True).resumed.step == 4  # type: ignore[union-attr]


@pytest.mark.parametrize("position", [*range(0, 40, 6), *by_night(range(3, 40, 6))])
@pytest.mark.long
def test_a_process_that_dies_in_a_copy_leaves_whole_versions(position: int) -> None:
    """Every call of the mirror's store, from some point on, never happens; another process starts
    with the disk, and one without."""

    class Dying(MemoryStore):
        left: int | None = None

        def _count(self) -> None:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise StorageError("dead")

        def put(self, name: str, data: Any) -> int:
            self._count()
            return super().put(name, data)

        def put_if_absent(self, name: str, data: Any) -> bool:
            self._count()
            return super().put_if_absent(name, data)

        def delete(self, names: Any) -> None:
            self._count()
            super().delete(names)

    mirror, local = Dying(), MemoryStore()
    life = Life(local, mirror, strategy=ek.incremental(every=1, layout="consecutive", keep=1))
    mirror.left = position
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        life.train(5)
        life.keeper.wait()
    life.mirror.give_up()
    life.mirror._worker.join(timedelta(seconds=30))
    mirror.left = None
    for version in Repository.open(mirror).versions():
        assert verify(Repository.open(mirror), [version]).damages == ()
    without_disk = Life(MemoryStore(), mirror)
    assert without_disk.resumed is None or without_disk.resumed.step <= 5
    with_disk = Life(local, mirror)
    assert with_disk.resumed.step == 5  # type: ignore[union-attr]
    assert with_disk.bits() == life.bits()


@pytest.mark.processes
def test_what_servers_write_to_the_first_place_is_mirrored(tmp_path: Path, farm: Farm) -> None:
    whole = Life(MemoryStore(), None).train(6)
    mirror, served = MemoryStore(), OnFarm(farm, shards=2)
    settings = SaveSettings(grace=timedelta(0), most_mb_per_second=0.01)
    life = Life(tmp_path / "a", mirror, cluster=served, settings=settings)
    try:
        assert life.keeper.shortest_interval == timedelta(seconds=(200 * 32 + 5 * 4) / 0.01e6)
        life.train(6).keeper.close()
    finally:
        life.model.bags.cluster.close()  # type: ignore[attr-defined]
        served.hosts.end()
    # Rows that servers held come back into another process, from the mirror.
    again = Life(tmp_path / "b", mirror)
    assert again.resumed is not None
    assert again.resumed.step == 6
    assert again.bits() == whole.bits()


def test_who_came_while_both_places_were_looked_at_is_taken_over_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take long; to be refused for what has happened since would leave nobody with the run,
    since the mirror is taken by then."""
    mirror, where = MemoryStore(), LocalStore(tmp_path / "run")
    Life(where, mirror).train(4).settle().keeper.close()
    follow = Mirror.follow

    def follows(self: Mirror, repository: Repository) -> None:
        follow(self, repository)
        monkeypatch.setattr(Mirror, "follow", follow)
        Writer.open(Repository.open(where))

    monkeypatch.setattr(Mirror, "follow", follows)
    life = Life(where, mirror, must_exist=True).train(8)
    assert life.resumed is not None
    life.keeper.close()
    assert steps_in(where)[-1] == steps_in(mirror)[-1] == 8
