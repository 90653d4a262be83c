"""Writes that are too large for one message, and recoveries that ask about more rows than one
frame can name. Limits are scaled down, so that a few rows are as many as millions are."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from emberkeep.erasure import messages
from emberkeep.erasure.member import ParityMember
from emberkeep.erasure.messages import Changed, Differences, Message
from emberkeep.errors import ShardLostError
from tests.faults.test_parity_left_out import Leaving
from tests.faults.test_parity_protocol import SIZES, ParityProtocol, Push

SOURCE = 2


@pytest.fixture(autouse=True)
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message has room for a row or two of those that the machines have."""
    monkeypatch.setattr(messages, "MESSAGE_NBYTES", 24, raising=False)


def pushed(size: tuple[int, int, int]) -> tuple[ParityProtocol, list[Message]]:
    """A push that every host holds, and the messages of a second one that nobody holds yet."""
    machine = ParityProtocol()
    machine.start(size)
    for number in (1, 2):
        machine.draining = True
        machine.deliver_all()
        machine.draining = False
        push = Push("a", number, 0, list(range(9)), 3)
        push.apply(machine.perfect[SOURCE])
        machine.todo[SOURCE].append(push)
        machine.work(SOURCE)
    said = list(machine.queues[SOURCE, machine.place.hosts(SOURCE)[0]])
    assert len(said) > 3, "the push is in one message"
    return machine, said


def lose(machine: ParityProtocol, shard: int) -> None:
    machine.dead = {shard}
    for key, queue in machine.queues.items():
        if shard in key:
            queue.clear()
    machine.notice()


@pytest.mark.parametrize("size", [(4, 2, 2), (5, 3, 2), (4, 3, 1)])
@pytest.mark.parametrize("others", ["nothing", "the same", "all but the last", "all"])
def test_a_push_is_undone_whole_where_its_source_dies_in_the_midst_of_it(
    size: tuple[int, int, int], others: str
) -> None:
    """One host has the first of its messages alone, another has more or less of them."""
    machine, said = pushed(size)
    first, *rest = machine.place.hosts(SOURCE)
    counts = {"nothing": 0, "the same": 1, "all but the last": len(said) - 1, "all": len(said)}
    for host in machine.place.hosts(SOURCE):
        for _ in range(1 if host == first else counts[others]):
            queue = machine.queues[SOURCE, host]
            machine.receive(queue.popleft(), queue)
    machine.settle()  # nothing of it is, although all may hold a part
    lose(machine, SOURCE)
    source = machine.rebuilder.members[SOURCE].source
    assert source.number == said[0].number - 1
    assert source.ledger == {"a": 1}
    assert source.state == (1,)
    assert [push.number for push in machine.todo[SOURCE]] == [2]
    for host in rest:
        assert machine.rebuilder.members[host].host.held(SOURCE) >= said[0].number - 1
    machine.teardown()


def test_a_recovery_that_is_made_again_goes_back_to_the_same_point() -> None:
    """The server that was to take the place was lost, too, after hosts had undone the push."""
    machine, said = pushed((5, 3, 2))
    first, *rest = machine.place.hosts(SOURCE)
    for host in rest:
        queue = machine.queues[SOURCE, host]
        while queue:
            machine.receive(queue.popleft(), queue)
    machine.dead = {SOURCE}
    for key, queue in machine.queues.items():
        if SOURCE in key:
            queue.clear()

    def replace(*_: object) -> ParityMember:
        raise ShardLostError((SOURCE,))

    with pytest.raises(ShardLostError):
        machine.rebuilder.recover([SOURCE], replace)
    for host in (first, *rest):
        assert machine.rebuilder.members[host].host.seal(SOURCE) == said[0].number - 1
    machine.notice()
    machine.teardown()


def test_a_push_that_every_host_holds_whole_stays() -> None:
    machine, said = pushed((5, 3, 2))
    for host in machine.place.hosts(SOURCE):
        queue = machine.queues[SOURCE, host]
        while queue:
            machine.receive(queue.popleft(), queue)
    source = machine.rebuilder.members[SOURCE].source
    assert source.settled == said[-1].number
    lose(machine, SOURCE)
    assert machine.rebuilder.members[SOURCE].source.ledger == {"a": 2}
    machine.teardown()


def test_a_push_is_settled_with_its_last_message_and_belongs_to_it() -> None:
    machine, said = pushed((5, 3, 2))
    source = machine.rebuilder.members[SOURCE].source
    bodies = [message.body for message in said]
    assert all(isinstance(body, Differences) for body in bodies)
    assert [body.push for body in bodies] == [None] * (len(said) - 1) + [("a", 2)]  # type: ignore[union-attr]
    for _ in said:
        assert source.settled == said[0].number - 1
        for host in machine.place.hosts(SOURCE):
            queue = machine.queues[SOURCE, host]
            machine.receive(queue.popleft(), queue)
    assert source.settled == said[-1].number
    machine.teardown()


@pytest.mark.parametrize("size", SIZES)
def test_long_lives_of_cut_pushes(size: tuple[int, int, int]) -> None:
    for seed in range(2):
        machine = ParityProtocol()
        machine.start(size)
        machine.live(Random(seed), 300)
        machine.teardown()


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_right_whatever_is_left_out_of_cut_pushes(size: tuple[int, int, int]) -> None:
    machine = Leaving()
    machine.start(size)
    machine.run(Random(7), 8)
    machine.teardown()


def changed(slab: int, rows: int, marked: int, k: int = 3) -> Changed:
    random = np.random.default_rng(rows)
    bounds, marked_bounds = (
        np.sort(np.append(random.integers(0, count + 1, k - 1), [0, count]))
        for count in (rows, marked)
    )
    return Changed(
        slab, np.arange(rows), bounds, random.integers(0, 2**32, (rows, 2), np.uint32),
        np.arange(marked), marked_bounds, random.integers(0, 256, (marked, 9), np.uint8),
    )  # fmt: skip


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [changed(0, 1, 0)],
        [changed(0, 1, 1)],
        [changed(0, 20, 0), changed(1, 0, 20), changed(2, 17, 5)],
        [changed(0, 0, 0), changed(1, 40, 40)],
    ],
)
def test_what_is_cut_is_what_was_changed(parts: list[Changed]) -> None:
    said = messages.of_write(parts, ("a", 1), (7,))
    for body in said:
        assert body.nbytes <= messages.MESSAGE_NBYTES + 16 + 17
        assert body.state == (7,)
    assert [body.more for body in said] == [True] * (len(said) - 1) + [False]
    for part in parts:
        pieces = [piece for body in said for piece in body.parts if piece.slab == part.slab]
        for layer in messages.LAYERS:
            bounds, stripes, values = part.of_layer(layer)
            for slot in range(bounds.size - 1):
                found_stripes, found_values = [], []
                for piece in pieces:
                    some, at, what = piece.of_layer(layer)
                    assert some[0] == 0
                    assert some[-1] == at.size == len(what)
                    found_stripes += at[some[slot] : some[slot + 1]].tolist()
                    found_values += what[some[slot] : some[slot + 1]].tolist()
                assert found_stripes == stripes[bounds[slot] : bounds[slot + 1]].tolist()
                assert found_values == values[bounds[slot] : bounds[slot + 1]].tolist()
