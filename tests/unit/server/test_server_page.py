"""One server as an operator sees it: status, metrics, readiness, and events without a request."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from emberkeep._types import Json
from emberkeep.errors import EpochError
from emberkeep.runtime.background_failures import background_failures
from emberkeep.server.server_events import ServerEvents
from emberkeep.server.server_watch import Parent, ServerWatch
from emberkeep.server.shard_service import ShardService
from emberkeep.tables import SGD, Table
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.wire.protocol import PROTOCOL, describe_table
from tests.waiting import until

RUN = "0123456789abcdef"


class Server:
    """A service whose clock and events are the test's."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.events: list[tuple[str, Json]] = []
        self.served = ShardService(
            threads=1, clock=self.clock, on_event=lambda *event: self.events.append(event)
        )
        self.watch = ServerWatch(self.served, self.clock)

    def ask(self, kind: str, header: Json | None = None, **arrays: Any) -> Json:
        ((reply, _),) = self.served.act(kind, header or {}, arrays)
        return reply

    def admit(self, epoch: int = 1, run: str = RUN) -> None:
        self.ask(
            "admit",
            {
                "protocol": PROTOCOL, "epoch": epoch, "coordinator": run, "shard": 1, "shards": 2,
                "tables": [describe_table(Table("t", rows=100, dim=4))], "seed": 0,
                "optimizer": SGD(lr=1.0).describe(), "lease_seconds": 15.0,
                "meeting_seconds": 60.0, "term": 1, "trainer": "node7/123",
            },
        )  # fmt: skip

    def renew(self, **run: Any) -> None:
        header = {"epoch": 1, "coordinator": RUN, "run": run, "clock": self.clock.monotonic()}
        self.ask("renew", header)

    def heard(self) -> list[str]:
        self.watch.look()
        names = [event for event, _ in self.events]
        self.events.clear()
        return names

    def figures(self) -> dict[str, float]:
        text = self.served.page.text()
        return {
            sample.name.removeprefix("emberkeep_"): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@pytest.fixture
def server() -> Server:
    return Server()


def test_status_names_node_process_memory_run_and_step(server: Server) -> None:
    empty = server.ask("status")
    assert (empty["node"], empty["pid"]) == (socket.gethostname(), os.getpid())
    assert empty["memory_nbytes"] > 10e6
    assert empty["metrics"]["pulls"] == 0  # also before a run: a rate needs two figures
    assert empty["last_event"] is None
    server.served.page.log = "/x/server-1.log"
    server.admit()
    ids = np.arange(1, 99, 2)
    server.ask("install", {"epoch": 1, "table": "t"}, **{"": ids, "weight": np.ones((49, 4), "f4")})
    server.ask("load_table_state", {"epoch": 1, "tables": {"t": {"steps": 41, "tick": 0}}})
    server.clock.sleep(3)
    status = server.ask("status")
    assert status["run"] == {
        "id": RUN,
        "name": "",
        "trainer": "node7/123",
        "step": 41,
        "repository": "",
    }
    assert (status["rows"], status["row_nbytes"]) == (49, 49 * 16)
    assert (status["lease_age_seconds"], status["lease_seconds"]) == (3, 15)
    assert status["log"] == "/x/server-1.log"
    assert status["last_event"]["event"] == "admitted"
    server.renew(step=43, name="nightly", version=7, pls=0.5)
    assert server.ask("status")["run"] == {
        "id": RUN, "name": "nightly", "trainer": "node7/123", "step": 43, "repository": ""
    }  # fmt: skip


def test_metrics_have_memory_rows_lease_restarts_and_the_run(server: Server) -> None:
    assert server.figures()["state_empty"] == 1
    server.admit()
    server.clock.sleep(4)
    server.served.events.refuse_token("DoAction")
    with server.served.events.connected("ipv4:127.0.0.1:5", RUN):
        found = server.figures()
    assert found["streams"] == found["connections_total"] == found["refused_tokens_total"] == 1
    assert found["lease_age_seconds"] == 4
    assert found["lease_seconds"] == 15
    assert found["admissions_total"] == found["epoch"] == found["state_recovering"] == 1
    assert found["rows"] == found["row_bytes"] == found["step"] == 0
    assert found["process_resident_memory_bytes"] > 10e6
    assert f'emberkeep_rows{{run="{RUN}",shard="1"}}' in server.served.page.text()
    assert f'emberkeep_run_info{{name="",run="{RUN}",shard="1",trainer="node7/123"}} 1.0' in (
        server.served.page.text()
    )


def test_it_is_ready_when_it_serves_and_its_lease_lives(server: Server) -> None:
    not_ready = server.served.page.not_ready
    assert "no run has taken it" in str(not_ready())
    server.admit()
    assert not_ready() == "shard 1 is recovering"
    server.ask("serve", {"epoch": 1})
    assert not_ready() is None
    server.clock.sleep(15.5)
    assert "last heard of 15.5 s ago, 15 s are allowed" in str(not_ready())
    server.renew()
    assert not_ready() is None
    server.served.drain(0.0)
    assert not_ready() == "it is shutting down"


def test_a_lease_that_expires_and_resumes_is_logged(server: Server) -> None:
    server.admit()
    server.ask("serve", {"epoch": 1})
    assert server.heard() == ["admitted", "serving"]
    server.clock.sleep(15)
    assert server.heard() == []
    server.clock.sleep(1)
    server.watch.look()
    assert server.events == [
        (
            "lease_expired",
            {"epoch": 1, "shard": 1, "run": RUN, "silent_seconds": 16.0, "lease_seconds": 15.0},
        )
    ]
    assert server.figures()["lease_expired_total"] == 1
    assert server.ask("status")["last_event"]["event"] == "lease_expired"
    assert server.heard() == ["lease_expired"]
    server.clock.sleep(20)
    assert server.heard() == []  # once
    server.renew()
    server.watch.look()
    ((event, details),) = server.events
    assert (event, details["expired_seconds"]) == ("lease_resumed", 21)  # not when it was seen


def test_who_connects_is_logged_and_does_not_hide_the_last_event(server: Server) -> None:
    server.admit()
    with server.served.events.connected("ipv4:10.0.0.7:5", RUN):
        server.clock.sleep(2)
    (_, connected, disconnected) = server.events
    assert connected == ("connected", {"peer": "ipv4:10.0.0.7:5", "run": RUN})
    assert disconnected[1]["seconds"] == 2
    assert server.ask("status")["last_event"]["event"] == "admitted"


def test_a_trainer_that_asks_again_and_again_is_refused_once() -> None:
    said: list[str] = []
    events = ServerEvents(lambda _, about: said.append(about["trainer"]))

    def ask(trainer: str, *, admitted: bool = False) -> None:
        with suppress(EpochError), events.refusing("run", trainer):
            if not admitted:
                raise EpochError("another one holds the lease")

    for trainer in ("a", "a", "b", "a", "b"):
        ask(trainer)
    assert said == ["a", "b"]
    ask("a", admitted=True)
    ask("a")
    assert said == ["a", "b", "a"]
    assert events.refused_trainers == 3
    for number in range(1000):
        ask(str(number))
    assert len(events._refused) < 100


def test_failures_of_background_threads_are_logged(server: Server) -> None:
    assert server.heard() == []
    background_failures.count("emberkeep-test", OSError("disk\non fire"))
    server.watch.look()
    ((event, details),) = server.events
    assert event == "background_failed"
    assert (details["thread"], details["error"]) == ("emberkeep-test", "OSError: disk on fire")
    assert not details["stopped"]


def test_parity_that_is_behind_is_logged_once_with_its_end(server: Server) -> None:
    server.admit()

    class Service:
        from_parity = True

        def status(self) -> Json:
            return status

    status = {"missing_rows": 0, "rebuilt_rows": 0, "unprotected_since": 0.0,
              "unprotected_stripes": 0}  # fmt: skip
    epoch = server.served.epoch
    assert epoch is not None
    epoch.parity_service = Service()  # type: ignore[assignment]
    assert server.heard() == ["admitted"]
    status |= {"missing_rows": 9, "unprotected_since": server.clock.now().timestamp() - 7}
    assert server.heard() == ["recovering", "unprotected"]
    server.clock.advance(timedelta(seconds=2))
    status |= {"missing_rows": 0, "rebuilt_rows": 9, "unprotected_stripes": 3}
    server.watch.look()
    assert server.events[0][1] == {
        "epoch": 1, "shard": 1, "run": RUN, "scope": "parity", "rows": 9, "seconds": 2.0
    }  # fmt: skip
    assert server.heard() == ["recovered"]
    status |= {"unprotected_since": 0.0, "unprotected_stripes": 0}
    server.watch.look()
    ((event, details),) = server.events
    assert (event, details["unprotected_seconds"]) == ("protected", 9)  # not when it was seen


def test_upkeep_is_done_also_where_looking_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """By it a server finds out that it is to end."""
    server, done = Server(), list[bool]()
    watch = ServerWatch(server.served, server.clock, upkeep=lambda: done.append(True))

    def fail() -> None:
        raise OSError("no status")

    monkeypatch.setattr(watch, "look", fail)
    watch.start()
    until(lambda: done, "upkeep")
    watch.close()


# -- the process that has started a server -----------------------------------------------------

NOBODY = 2**22 + 1  # beyond what Linux hands out


def test_a_parent_is_gone_when_this_process_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = Parent(os.getppid())
    assert not parent.gone
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert parent.gone


def test_a_parent_that_was_gone_before_it_was_looked_at_is_noticed() -> None:
    assert Parent(NOBODY).gone


def test_what_stands_between_a_server_and_its_trainer_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = Parent(os.getpid())  # alive, and not what has forked this process
    assert not parent.gone
    monkeypatch.setattr(os, "getppid", lambda: NOBODY)
    assert parent.gone


def test_process_1_of_a_container_is_a_parent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not Parent(1).gone
