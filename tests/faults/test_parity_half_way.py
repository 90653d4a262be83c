"""Hosts of parity that meet an error half-way through what they do: parity that counts as whole is
the code of the rows, whatever line it was, and what was sent in vain may be sent again."""

from __future__ import annotations

import linecache
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest

from emberkeep.erasure import host as host_module
from emberkeep.erasure.messages import Differences, Fill, Message, Values
from emberkeep.errors import ParityLossError, PeerError, StreamError
from emberkeep.server.parity_sender import Sender
from emberkeep.server.parity_service import ParityService
from tests.contracts.parity import check_parity_of
from tests.faults.test_parity_protocol import ParityProtocol
from tests.faults.test_servers_return import CODED, World

FILE = host_module.__file__


@contextmanager
def failing(line: int) -> Iterator[list[int]]:
    """There is no memory when so many lines of `host.py` have run; says if that many were run."""
    left, failed = line, []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != FILE:
            return None
        # The end of a `with` is a line, too, at which an error would keep the lock.
        if event == "line" and "with " not in linecache.getline(FILE, frame.f_lineno):
            left -= 1
            if left < 0 and not failed:
                failed.append(frame.f_lineno)
                raise MemoryError("no memory for anything")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield failed
    finally:
        sys.settrace(before)


class Failing(ParityProtocol):
    """Messages of one kind fail at one line, and are sent again, as servers do."""

    kind: type | None = None
    line = 0
    failed = False

    def receive(self, message: Message, queue: deque[Message]) -> None:
        if isinstance(message.body, self.kind or ()) and not self.failed:
            with failing(self.line) as failed, suppress(MemoryError):
                super().receive(message, queue)
            self.failed = bool(failed)
        super().receive(message, queue)

    def lose(self, shard: int) -> None:
        self.dead = {shard}
        for key, queue in self.queues.items():
            if shard in key:
                queue.clear()
        self.notice()

    def bring_back(self) -> None:
        """Rows come from the parity that is left, then all parity is filled."""
        self.draining = True
        self.deliver_all()
        for _ in range(3):
            with suppress(StreamError):  # a decode whose parity has started over
                self.rebuilder.recover_marks()
                break
        for shard in range(self.place.n):
            for slab, missing in enumerate(self.rows(shard).missing):
                for _ in range(3):
                    with suppress(StreamError):
                        self.rebuilder.recover_rows(shard, slab, np.flatnonzero(missing))
                        break
            self.work(shard)


def lines(scenario: Callable[[int], bool], first: int) -> int:
    """Runs a scenario for every fifth line at which it can fail; how many those are."""
    line = first
    while scenario(line):
        line += 5
    return (line - first) // 5


@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("kind", [Differences, Values, Fill])
def test_a_message_that_fails_at_any_line_is_added_once(kind: type, first: int) -> None:
    def scenario(line: int) -> bool:
        machine = Failing()
        machine.start((4, 2, 2))
        machine.draining = True
        machine.push(Random(1), 12)
        machine.deliver_all()
        machine.lose(0)
        machine.rebuilder.recover_marks()
        # Decodes under way, so that changes go to them, too.
        machine.draining = False
        machine.decode(0, 0, np.flatnonzero(machine.rows(0).missing[0])[:2])
        machine.kind, machine.line = kind, line
        machine.draining = True
        machine.deliver_all()
        machine.draining = False
        machine.push(Random(2), 6)
        machine.bring_back()
        machine.decodes = []
        machine.teardown()
        return machine.failed

    assert lines(scenario, first) > 4


@pytest.mark.parametrize("first", range(5))
def test_undoing_may_fail_at_any_line(first: int) -> None:
    def scenario(line: int) -> bool:
        machine = Failing()
        machine.start((4, 2, 2))
        machine.push(Random(1), 12)
        for queue in (machine.queues[0, 3], machine.queues[1, 3]):
            while queue:  # the other hosts have heard nothing
                machine.receive(queue.popleft(), queue)
        host = machine.rebuilder.members[3].host
        roll, failures = host.roll, []

        def and_fail(source: int, number: int) -> Any:
            if not failures:
                with failing(line) as failed, suppress(MemoryError):
                    roll(source, number)
                failures.append(bool(failed))
            return roll(source, number)

        host.roll = and_fail  # type: ignore[method-assign]
        machine.lose(0)
        machine.bring_back()
        machine.teardown()
        return failures[0]

    assert lines(scenario, first) > 10


@pytest.mark.parametrize("seed", range(4))
def test_failure_after_failure(seed: int) -> None:
    """Also what is done about one may fail."""
    random = Random(seed)
    machine = ParityProtocol()
    machine.start((3, 2, 1))
    receive, tries, share = machine.receive, 0, 0.7

    def often(message: Message, queue: deque[Message]) -> None:
        nonlocal tries
        while random.random() < share:
            tries += 1
            with failing(random.randrange(60)), suppress(MemoryError):
                receive(message, queue)
        receive(message, queue)

    machine.receive = often  # type: ignore[method-assign]
    for _ in range(4):
        machine.push(random, 5)
        machine.deliver(random, 8)
        for member in machine.rebuilder.members:
            if member.host.complete and not any(machine.queues.values()):
                check_parity_of(machine.rebuilder, member)
        machine.fill(2)
    assert tries > 10
    share = 0.0
    machine.teardown()


# -- servers -------------------------------------------------------------------------------------


def once(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """One call of a function that hosts use finds no memory."""
    real, met = getattr(host_module, name), []

    def fail_first(*args: Any, **more: Any) -> Any:
        if not met:
            met.append(name)
            raise MemoryError("no memory for a temporary")
        return real(*args, **more)

    monkeypatch.setattr(host_module, name, fail_first)
    return met


@pytest.mark.parametrize("name", ["products", "_add_up"])
def test_rows_are_right_after_a_server_was_short_of_memory(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    world = World(parity=CODED)
    heard: list[str] = []
    for server in world.network.servers.values():
        server.events._on_event = lambda event, details: heard.append(f"{event} {details}")
    met = once(monkeypatch, name)
    world.push()
    assert met
    world.cluster.rebuild()
    for shard in range(3):
        world.launcher.kill(shard)
        world.push()
        world.cluster.rebuild()
    world.check()
    assert any("failed" in event and "MemoryError" in event for event in heard)


def test_an_error_of_a_host_is_answered_in_words_that_the_sender_understands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    troubles: list[str] = []
    failed = Sender._failed

    def and_note(sender: Sender, error: BaseException) -> None:
        failed(sender, error)
        troubles.append(sender.trouble)

    monkeypatch.setattr(Sender, "_failed", and_note)
    world = World(parity=CODED)
    once(monkeypatch, "_add_up")
    world.push()
    assert troubles == ["the server is short of memory: MemoryError('no memory for a temporary')"]


def test_rows_whose_parity_starts_over_before_they_are_back_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is given a row that was decoded from what is left of it."""
    world = World(parity=CODED)
    world.push()
    monkeypatch.setattr(ParityService, "_sweep", lambda _: None)
    world.launcher.kill(0)
    world.push(ids=[])  # notices the loss
    services = [
        world.network.servers[name].epoch.parity_service
        for name in (world.launcher.address(shard) for shard in range(3))
    ]
    host, standing = services[2]._host, services[2].member.standing
    assert standing().complete
    assert services[0].status()["missing_rows"]
    receive, add_up = host.receive, host_module._add_up

    def fail_once(message: Message) -> int:
        del host.receive  # type: ignore[misc]
        met = once(monkeypatch, "_add_up")
        try:
            return receive(message)
        finally:
            assert met
            monkeypatch.setattr(host_module, "_add_up", add_up)

    host.receive = fail_once  # type: ignore[method-assign]
    world.push(ids=[1])
    assert not standing().complete
    assert not world.cluster.parity.protected
    with pytest.raises(PeerError, match="none can be decoded"):
        services[0]._decode(*services[0]._rows.next_missing(100))
    with pytest.raises(ParityLossError, match="recover from the repository"):
        world.cluster._protection.rebuilder.check([0])
    assert world.cluster._protection.rebuilder.hopeless([]) == [0]
