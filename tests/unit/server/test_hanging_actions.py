"""Actions that hang, as on a mount whose server is gone: leases are renewed all the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow.flight as flight
import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.errors import ConfigError, ServerError, StorageError
from emberkeep.repository import Repository
from emberkeep.runtime.clock import SYSTEM_CLOCK
from emberkeep.server import version_work
from emberkeep.server.flight_server import ShardServer
from emberkeep.server.shard_service import ShardService
from emberkeep.server.store_looks import StoreLooks
from emberkeep.tables import SGD, Table
from emberkeep.wire.protocol import PROTOCOL, describe_table, pack_frame, unpack_frame

TABLE = Table("t", rows=4, dim=2)
URL = "memory://"
HEADER: dict[str, Any] = {
    "protocol": PROTOCOL, "epoch": 1, "coordinator": "c", "shard": 0, "shards": 1, "term": 1,
    "tables": [describe_table(TABLE)], "optimizer": SGD(lr=0.1).describe(), "seed": 0,
    "lease_seconds": 60, "meeting_seconds": 1,
}  # fmt: skip


@pytest.fixture
def service() -> ShardService:
    made = ShardService(threads=1)
    list(made.act("admit", HEADER, {}))
    return made


@pytest.fixture
def server(service: ShardService) -> Iterator[ShardServer]:
    made = ShardServer(service)
    yield made
    made.shutdown()


def ask(server: ShardServer, kind: str, **header: Any) -> Any:
    action = SimpleNamespace(type=kind, body=pack_frame({**HEADER, **header}))
    (result,) = server.do_action(None, action)
    return unpack_frame(result.body)[0]


def test_a_lease_is_renewed_and_let_go_while_all_other_actions_hang(server: ShardServer) -> None:
    while server._actions.acquire(blocking=False):
        pass
    with pytest.raises(flight.FlightUnavailableError, match="too many actions"):
        ask(server, "table_state")
    assert ask(server, "renew", clock=0.0)["state"] == "recovering"
    assert ask(server, "status")["epoch"] == 1
    ask(server, "release")
    assert server.served.epoch is None


def test_each_of_these_is_bounded_alone(server: ShardServer) -> None:
    """A look at the status may hang, too, and must not hold up a renewal."""
    while server._urgent["status"].acquire(blocking=False):
        pass
    with pytest.raises(flight.FlightUnavailableError, match="too many actions"):
        ask(server, "status")
    ask(server, "renew", clock=0.0)
    ask(server, "table_state")


def test_a_trainer_that_is_refused_is_logged() -> None:
    said: list[tuple[str, Any]] = []
    service = ShardService(
        threads=1, place=(0, 1), on_event=lambda event, details: said.append((event, details))
    )
    list(service.act("admit", HEADER, {}))
    for change, error in (
        ({"epoch": 2, "coordinator": "other", "begins": True}, ServerError),
        ({"epoch": 2, "shard": 1, "shards": 2}, ConfigError),
    ):
        with pytest.raises(error) as refused:
            list(service.act("admit", {**HEADER, "trainer": "ada/7", **change}, {}))
        event, details = said[-1]
        assert (event, details["trainer"]) == ("refused", "ada/7")
        assert details["error"] == str(refused.value)
    assert service.events.refused_trainers == 2
    last = service.events.last
    assert last is not None
    assert last["event"] == "admitted"


def test_a_store_that_hangs_keeps_one_thread_and_is_named(
    service: ShardService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberkeep.server.store_looks._PATIENCE_SECONDS", 0.01, raising=False)
    hangs, ended = threading.Event(), threading.Event()
    calls, found = [None], []

    def exists(_: object) -> bool:
        if calls:
            calls.pop()
            hangs.set()
            ended.wait(60)
        return False

    def look() -> Any:
        return list(service.act("repository", {**HEADER, "url": URL}, {}))

    monkeypatch.setattr(Repository, "exists", staticmethod(exists))
    first = threading.Thread(target=lambda: found.extend(look()))
    first.start()
    assert hangs.wait(60)
    try:
        with pytest.raises(StorageError, match=f"{URL} does not answer this server"):
            look()
    finally:
        ended.set()
        first.join(60)
    assert found == look() == [({"repository": None}, {})]


def test_a_store_that_hangs_keeps_nobody_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberkeep.server.store_looks._PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr("emberkeep.server.store_looks._MOST_STORES", 2)
    hang, ended = threading.Semaphore(0), threading.Event()

    def store(url: str) -> Any:
        return SimpleNamespace(url=url)

    def exists(at: Any) -> bool:
        if at.url.startswith("hangs"):
            hang.release()
            ended.wait(60)
        return False

    monkeypatch.setattr(Repository, "exists", staticmethod(exists))
    looks = StoreLooks(SYSTEM_CLOCK)
    threads = []
    try:
        for url in ("hangs://a", "hangs://b"):
            assert looks.repository_at(store("sound://")) is None
            threads.append(threading.Thread(target=looks.repository_at, args=[store(url)]))
            threads[-1].start()
            assert hang.acquire(timeout=60)
        with pytest.raises(StorageError, match="hangs://b does not answer this server"):
            looks.repository_at(store("hangs://b"))
        # So many hang that another might take the last thread.
        with pytest.raises(StorageError, match="hangs://a, hangs://b do not answer this server"):
            looks.repository_at(store("sound://"))
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)
    assert looks.repository_at(store("sound://")) is None


def test_a_load_opens_its_store_beside_the_threads_that_answer(
    service: ShardService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hanging(*_: object, **__: object) -> Any:
        raise AssertionError("opened by the request itself")

    monkeypatch.setattr(version_work.Repository, "open", staticmethod(hanging))
    epoch = service.epoch
    assert epoch is not None
    monkeypatch.setattr(epoch, "store", lambda _: MemoryStore())
    version_work.to_load(
        epoch, {"url": URL, "version": "1-1", "names": {}}, pool=service._pool,
        advance=lambda: None, clock=service._clock,
    )  # fmt: skip
