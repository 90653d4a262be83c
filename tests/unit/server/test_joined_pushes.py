"""A step of several ranks that some of them send again, after their server was lost."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest

from emberkeep._types import RowIds
from emberkeep.cluster.shard import Shard
from emberkeep.errors import EpochError, ProtocolError, RankError
from emberkeep.runtime.pool import Pool
from emberkeep.server.epoch import Epoch, Session
from emberkeep.server.parity_service import ParityService
from emberkeep.tables import Adagrad, Table
from emberkeep.wire.protocol import APPLY, CHECK, PUSH, Request, settled_of
from tests.waiting import until

TABLE = Table("t", rows=None, capacity=50, dim=2)
WANTED = [RowIds(np.arange(3), np.array([0, 3]))]
GRADS = [np.ones((3, 2), np.float32)]


class FromParity:
    """A stream that knows of a step, all of it settled."""

    ledger = {"ranks": 19}  # noqa: RUF012
    from_parity = True

    def start_after(self, _: object) -> None: ...

    def settle(self, *_: Any) -> bool:
        return True

    def settled_push(self, _: str) -> int:
        return 19

    def note(self, *_: Any) -> None: ...


def request(kind: int, number: int, rank: int) -> Request:
    return Request(
        kind=kind, epoch=1, incarnation=7 + rank, number=number, rank=rank, world=2, lr=0.1,
        wanted=() if kind == APPLY else WANTED, grads=() if kind == APPLY else GRADS,
    )  # fmt: skip


@pytest.fixture
def epoch() -> Epoch:
    shard = Shard([TABLE], Adagrad(lr=0.1), pool=Pool(1))
    made = Epoch(
        1, shard, shards=1, coordinator="c", lease_seconds=60, meeting_seconds=0.01, pool=Pool(1),
        tables=[],
    )  # fmt: skip
    made.protect(cast(ParityService, FromParity()), 1, {})
    return made


def test_a_step_that_came_back_from_parity_is_not_checked_and_not_applied_again(
    epoch: Epoch,
) -> None:
    """Its shard died between the check and the answer: the ranks make the push again."""
    session = Session()
    for rank in range(2):
        for kind in (CHECK, APPLY):
            settled, waiting = settled_of(epoch.push(request(kind, 19, rank), session))
            assert (settled, waiting) == (19, False)
    assert epoch.shard.touched_ids("t").size == 0


def test_a_step_that_did_not_come_back_has_to_be_checked_again(epoch: Epoch) -> None:
    with pytest.raises(ProtocolError, match="not checked"):
        epoch.push(request(APPLY, 20, 0), Session())


@pytest.mark.parametrize("waits", [False, True])
def test_a_step_that_one_rank_sends_again_and_another_checks_is_applied_when_the_first_goes_on(
    epoch: Epoch, waits: bool
) -> None:
    """Rank 0 had its answer before the server was lost, so it pushes; rank 1 had none. Rank 0 pulls
    rows next, and must not find them without the step."""
    if waits:
        epoch.meeting_seconds = 60
        pushing = threading.Thread(target=epoch.push, args=(request(PUSH, 20, 0), Session()))
        pushing.start()
        until(lambda: epoch._meeting and 0 in epoch._meeting._step.parts, "the part of rank 0")
        epoch.push(request(CHECK, 20, 1), Session())
        pushing.join(60)
    else:
        with pytest.raises(RankError):
            epoch.push(request(PUSH, 20, 0), Session())  # its part stays
        epoch.push(request(CHECK, 20, 1), Session())
        epoch.push(request(PUSH, 20, 0), Session())
    expected = np.ones((3, 2), np.float32)
    assert np.array_equal(epoch.shard.read("t", np.arange(3))["accumulator"], expected)
    for rank, kind in ((1, APPLY), (0, PUSH), (1, APPLY)):
        epoch.push(request(kind, 20, rank), Session())
    assert np.array_equal(epoch.shard.read("t", np.arange(3))["accumulator"], expected)
    assert not epoch._held


def test_ranks_hear_why_a_step_failed_whatever_the_error(
    epoch: Epoch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They heard that a rank was missing, and not which."""

    def no_memory(*_: object) -> Any:
        raise MemoryError("no room to join")

    monkeypatch.setattr("emberkeep.server.epoch.join", no_memory)
    with pytest.raises(RankError):
        epoch.push(request(PUSH, 20, 0), Session())  # its part stays
    waits = epoch._meeting_of(2)._step
    with pytest.raises(MemoryError):
        epoch.push(request(PUSH, 20, 1), Session())
    assert waits.over
    assert "no room to join" in str(waits.error)
    monkeypatch.undo()
    with pytest.raises(RankError):
        epoch.push(request(PUSH, 20, 0), Session())
    epoch.push(request(PUSH, 20, 1), Session())
    expected = np.ones((3, 2), np.float32)
    assert np.array_equal(epoch.shard.read("t", np.arange(3))["accumulator"], expected)


@pytest.mark.parametrize("at", range(4))
def test_a_step_that_is_noted_half_way_is_over_for_all_ranks_or_for_none(
    epoch: Epoch, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank to which it was over went on to the next step, and another waited for it."""
    note, calls = epoch._ledger.note, 0

    def short(*given: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise MemoryError
        note(*given)

    monkeypatch.setattr(epoch._ledger, "note", short)
    for number in (20, 21):
        waiting = [0, 1]
        for rank in 8 * [0, 1]:
            if rank in waiting:
                with suppress(RankError, MemoryError):
                    try:
                        epoch.push(request(PUSH, number, rank), Session())
                    except EpochError:
                        return  # the shard has let its rows go: who recovers it knows what it had
                    waiting.remove(rank)
        assert not waiting
    accumulator = epoch.shard.read("t", np.arange(3))["accumulator"]
    assert np.array_equal(accumulator, 2 * np.ones((3, 2), np.float32))
