"""Rebuilds of servers that meet an error which nobody has listed: said, bounded, started again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from emberkeep.errors import DeadlineError, StoppedError
from emberkeep.runtime.background import Retry
from emberkeep.server.parity_service import ParityService
from tests.faults.test_parity_partitions import SECOND, TIMING, Scene, push, scene
from tests.waiting import passing


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """No server can rebuild anything until it is cleared."""
    monkeypatch.setattr(Retry, "pause", lambda retry, _: retry.first.total_seconds())
    honest, broken = ParityService._rebuild_chunk, [True]

    def chunk(service: ParityService) -> bool:
        if broken:
            raise MemoryError("no memory")
        return honest(service)

    monkeypatch.setattr(ParityService, "_rebuild_chunk", chunk)
    return broken


@contextmanager
def given_up(broken: list[bool]) -> Iterator[Scene]:
    """A lost shard was replaced, and every server has given up rebuilding."""
    assert broken
    with scene() as run:
        run.push(3)
        run.hosts.kill(1)
        run.push()
        until_given_up(run)
        yield run


def until_given_up(run: Scene) -> None:
    passing(
        run.network.clock,
        lambda: all(service._rebuilds.stopped for service in run.services()),
        "every server to give up",
        SECOND / 4,
    )


def test_it_is_said_since_when(broken: list[bool]) -> None:
    with given_up(broken) as run:
        assert run.status.unprotected_since
        assert not run.status.protected
        assert all(service.status()["unprotected_since"] for service in run.services())


def test_one_who_waits_hears_of_it_and_has_it_begin_again(broken: list[bool]) -> None:
    with given_up(broken) as run:
        with pytest.raises(StoppedError, match="emberkeep-rebuild stopped"):
            run.cluster.rebuild()
        until_given_up(run)
        with pytest.raises(StoppedError, match="emberkeep-rebuild stopped"):
            run.cluster.freeze(None, 1 << 20)
        broken.clear()
        run.pass_time(2)
        run.cluster.rebuild()
        assert run.status.protected
        assert run.status.unprotected_since is None
        run.check()


def test_the_next_loss_has_it_begin_again(broken: list[bool]) -> None:
    with given_up(broken) as run:
        broken.clear()
        run.hosts.kill(1)
        run.push()
        run.check()
        assert not any(service._rebuilds.stopped for service in run.services())
        run.cluster.rebuild()
        assert run.status.protected


def test_nobody_waits_for_hosts_that_stay_away() -> None:
    with scene() as run:
        protection = run.cluster._protection
        assert protection is not None
        protection._timing = replace(TIMING, bulk=20 * SECOND)
        run.push(2)
        run.network.cut((0, 2), (2, 0))
        run.push()
        assert run.status.left_out_hosts == 2
        with pytest.raises(DeadlineError, match=r"shard 0 at server-0, shard 2 at server-2"):
            run.cluster.rebuild()
        push(run.cluster)
