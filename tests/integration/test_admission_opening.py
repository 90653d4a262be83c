"""While a server opens the files of its tier it belongs to the run that it was admitted to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from emberkeep._types import Json
from emberkeep.errors import EmberkeepError, EpochError, FencedError, ServerError, TierError
from emberkeep.server import tier_service
from emberkeep.server.shard_service import ShardService
from emberkeep.tables import SGD, Table, Tier
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.wire.protocol import PROTOCOL, describe_table
from tests.waiting import until

LEASE = 15.0


def header(coordinator: str, epoch: int, term: int, *, begins: bool = True) -> Json:
    return {
        "protocol": PROTOCOL, "epoch": epoch, "coordinator": coordinator, "term": term,
        "begins": begins, "shard": 0, "shards": 1, "seed": 0,
        "tables": [describe_table(Table("t", rows=9, dim=2))],
        "optimizer": SGD(lr=1.0).describe(), "lease_seconds": LEASE, "meeting_seconds": 5.0,
    }  # fmt: skip


class Opened:
    """A server whose files are opened when the test says so; `error` is what that meets."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.gate, self.error = threading.Event(), list[EmberkeepError]()
        self.clock = VirtualClock()
        self.service = ShardService(threads=1, tier=Tier(path, memory=100_000), clock=self.clock)
        real = tier_service.open_shard

        def slowly(*args: Any, **options: Any) -> Any:
            assert self.gate.wait(30)
            if self.error:
                raise self.error.pop()
            return real(*args, **options)

        patch.setattr(tier_service, "open_shard", slowly)

    def act(self, kind: str, header: Json) -> Json:
        return next(iter(self.service.act(kind, header, {})))[0]

    def admit(self, coordinator: str, *, begins: bool = True) -> int:
        status = self.act("status", {})
        epoch = status["last_epoch"] + 1
        self.act("admit", header(coordinator, epoch, status["term"] + begins, begins=begins))
        return int(epoch)

    def work(self, coordinator: str, epoch: int) -> Json:
        return self.act("work", {"epoch": epoch, "coordinator": coordinator})

    def opens(self, coordinator: str, epoch: int) -> None:
        self.gate.set()
        until(lambda: self.work(coordinator, epoch)["done"], "files to be open")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    opened = Opened(tmp_path / "t", monkeypatch)
    yield opened
    opened.gate.set()
    job = opened.service.long_work.job
    if job is not None:
        job[1].exception(30)
    if opened.service.epoch is not None:
        opened.service.let_go(opened.service.epoch)


def test_another_waits_for_the_lease_of_the_one_whose_files_are_opened(server: Opened) -> None:
    assert server.admit("A") == 1
    status = server.act("status", {})
    assert (status["epoch"], status["state"], status["coordinator"]) == (1, "recovering", "A")
    assert not status["lapsed"]
    assert server.service.page.not_ready() == "shard 0 opens its files"
    assert "state_recovering" in server.service.page.text()
    with pytest.raises(ServerError, match="serves another run"):
        server.admit("B")
    with pytest.raises(EpochError):  # nor does it hear what becomes of the files
        server.work("B", 1)
    server.clock.advance(timedelta(seconds=0.8 * LEASE))
    server.work("A", 1)  # who asks is alive
    server.clock.advance(timedelta(seconds=0.8 * LEASE))
    with pytest.raises(ServerError, match="serves another run"):
        server.admit("B")
    server.opens("A", 1)
    assert server.act("serve", {"epoch": 1}) == {}
    assert server.service.epoch is not None
    assert server.service.epoch.coordinator == "A"


@pytest.mark.parametrize("how", ["silent", "released"])
def test_one_that_ends_while_files_are_opened_is_followed_by_another(
    server: Opened, how: str
) -> None:
    server.admit("A")
    if how == "silent":
        server.clock.advance(timedelta(seconds=1.1 * LEASE))
    else:
        server.act("release", {"epoch": 1, "coordinator": "A"})
    assert server.admit("B") == 2
    server.opens("B", 2)
    with pytest.raises(EpochError):
        server.work("A", 1)
    assert server.service.epoch is not None
    assert (server.service.epoch.number, server.service.epoch.coordinator) == (2, "B")


def test_numbers_go_on_after_what_was_admitted_has_gone(server: Opened) -> None:
    server.admit("A")
    server.error.append(TierError("its disk is away"))
    server.gate.set()
    job = server.service.long_work.job
    assert job is not None
    assert isinstance(job[1].exception(30), TierError)
    assert server.act("status", {})["state"] == "empty"  # nobody waits for a lease
    with pytest.raises(EpochError, match="epoch 1 is over"):
        server.act("admit", header("B", 1, 2))
    assert server.admit("B") == 2
    server.opens("B", 2)
    server.act("release", {"epoch": 2, "coordinator": "B"})
    assert server.admit("C") == 3


def test_an_admission_that_fails_fences_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server without a tier: nothing of the epoch before has changed."""
    service = ShardService(threads=1)

    def act(kind: str, header: Json) -> Json:
        return next(iter(service.act(kind, header, {})))[0]

    act("admit", header("A", 1, 1))

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(tier_service, "open_shard", fail)
        with pytest.raises(MemoryError):
            act("admit", header("B", 2, 2, begins=False))
    act("admit", header("A", 2, 1))
    with pytest.raises(FencedError):
        act("admit", header("C", 3, 0))
