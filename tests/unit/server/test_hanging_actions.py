"""Actions that hang, as on a mount whose server is gone: leases are renewed all the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow.flight as flight
import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.errors import StorageError
from emberkeep.repository import Repository
from emberkeep.server import version_work
from emberkeep.server.flight_server import ShardServer
from emberkeep.server.shard_service import ShardService
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
