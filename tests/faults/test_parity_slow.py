"""Parity that is slow, not silent: it is waited for as long as hosts take what they are sent."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from emberkeep.cluster.outage import UnsettledError
from emberkeep.erasure import messages, rebuilder
from emberkeep.errors import PeerError, StreamError
from emberkeep.server import parity_sender
from emberkeep.testing.local_transport import Rule
from tests.faults.test_parity_partitions import TIMING, scene
from tests.faults.test_servers_return import CODED, World

_DEADLINE = TIMING.deadline.total_seconds()


def test_what_is_slow_is_waited_for_while_each_message_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some 500 messages, of which each takes a part of the deadline."""
    monkeypatch.setattr(messages, "MESSAGE_NBYTES", 40)
    monkeypatch.setattr(parity_sender, "_BATCH_MESSAGES", 1)
    with scene(background=True) as run:
        run.push()
        run.network.rules = [Rule(how="delay", kind="parity", by=timedelta(seconds=0.01))]
        began = run.network.clock.monotonic()
        run.push(25)
        run.cluster._flush()
        assert run.network.clock.monotonic() - began > 4 * _DEADLINE
        run.network.rules = []
        assert run.status.left_out_hosts == 0
        run.hosts.kill(0)
        run.check()


@pytest.mark.parametrize(
    ("streams", "waits"),
    [
        ([(0, 0.0), (3, 1.0)], True),
        ([(2, 2.9), (3, 1.0)], True),
        ([(2, 9.0), (3, 1.0)], False),  # one moves, and another does not
        ([(0, 0.0), (0, 0.0)], True),  # settled by now: the next attempt finds it so
    ],
)
def test_who_waits_for_peers_looks_at_every_stream(
    streams: list[tuple[int, float]], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(parity=CODED)
    deadline = world.cluster.timing.deadline.total_seconds()
    for handle, (lag, deadlines) in zip(world.cluster.handles, streams, strict=False):

        def status(lag: int = lag, silent: float = deadlines * deadline) -> Any:
            return {
                "parity": {"missing_rows": 0, "lag": lag, "left_out": [], "silent_seconds": silent}
            }

        monkeypatch.setattr(handle, "status", status)
    for handle in world.cluster.handles[len(streams) :]:
        monkeypatch.setattr(handle, "status", dict)
    error = UnsettledError("push 7 is not settled")
    with pytest.raises(PeerError, match="not known"):  # parity is not what that one waits for
        world.cluster._await_peers(PeerError("peers are not known"), 9 * deadline)
    if waits:
        assert not world.cluster._await_peers(error, 9 * deadline)
    else:
        with pytest.raises(PeerError, match="push 7"):
            world.cluster._await_peers(error, 9 * deadline)
    world.cluster.close()


def test_a_push_does_not_wait_for_those_that_came_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With others that push all the time, the end of the stream is never reached."""
    with scene() as run:
        run.push()
        service = run.services()[0]
        source, streams = service._source, service._streams
        monkeypatch.setattr(streams, "_await", lambda enough: enough())
        held = source.number + 1
        service.note("a", 5, held)
        service.note("b", 3, held + 1)
        source.number += 2
        for host in source.hosts:
            source.acknowledge(host, held)
        assert service.settle("a", 5)
        assert not service.settle("b", 3)
        assert not service.settle("a", 4)  # it is not known where that was said
        source.number -= 2


def test_marks_that_come_back_slowly_come_back_a_part_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has come back is not asked for again, and each part has all the time."""
    monkeypatch.setattr(rebuilder, "_ROUND_NBYTES", 100)
    with scene() as run:
        run.push()
        protection = run.cluster._protection
        assert protection is not None
        complete, attempts = protection.rebuilder._complete, 0

        def slow(started: Any) -> None:
            nonlocal attempts
            attempts += 1
            if attempts % 2:
                run.pass_time(1.5 * _DEADLINE)
                raise StreamError("a host was slow")
            complete(started)

        monkeypatch.setattr(protection.rebuilder, "_complete", slow)
        run.hosts.kill(0)
        run.push()
        assert attempts > 6
        assert run.status.recoveries == 1
        run.check()
