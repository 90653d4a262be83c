"""The parity protocol as a state machine: losses at every point, against a perfect history.

Shards are small arrays and the network is a queue for every pair, delivered in any order that the
queues allow. Whatever is lost and whenever, after everything has been brought back each shard has
applied each push exactly once, in order, and every parity row is the code of the rows.
"""

from __future__ import annotations

import contextlib
from collections import deque
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from emberkeep._types import I64, Bools, Words
from emberkeep.erasure.codes import Placement
from emberkeep.erasure.host import ParityHost
from emberkeep.erasure.member import ParityMember, begin
from emberkeep.erasure.messages import Changed, Layer, Message, Point, Shape
from emberkeep.erasure.rebuilder import Decode, Rebuilder
from emberkeep.erasure.source import Source
from emberkeep.errors import ParityLossError, StreamError
from tests.contracts.parity import check_parity
from tests.nightly import examples

SHAPES = (Shape(rows=11, words=2, mark_nbytes=1), Shape(rows=6, words=1, mark_nbytes=9))
randoms = st.integers(0, 2**32).map(Random)
MOVES = ("push", "deliver", "finish", "sweep", "fill", "go_on", "kill", "settle", "ask_for_marks")
WEIGHTS = (30, 30, 12, 5, 4, 6, 2, 2, 3)
SIZES = [(3, 2, 1), (2, 1, 1), (4, 2, 2), (5, 3, 2), (4, 3, 1)]


class ToyRows:
    """Rows of one shard: records and marks as they are coded."""

    def __init__(self, shard: int, *, lost: bool = False) -> None:
        # Shards differ in size, as the last rows of a table fall to some of them.
        self.sizes = [shape.rows - shard % 2 for shape in SHAPES]
        self.data: dict[Layer, list[Any]] = {
            "records": [np.zeros((s.rows, s.words), np.uint32) for s in SHAPES],
            "marks": [np.zeros((s.rows, s.mark_nbytes), np.uint8) for s in SHAPES],
        }
        self.blind = lost
        self.missing = [np.zeros(shape.rows, bool) for shape in SHAPES]
        self.k = 0

    def values(self, slab: int, layer: Layer, rows: I64) -> Words:
        data = self.data[layer][slab]
        out = np.zeros((rows.size, data.shape[1]), data.dtype)
        present = rows < len(data)
        out[present] = data[rows[present]]
        return out

    def unknown(self, slab: int, layer: Layer, rows: I64) -> Bools:
        if self.blind:
            return np.ones(rows.size, bool)
        out = np.zeros(rows.size, bool)
        if layer == "records":
            present = rows < self.missing[slab].size
            out[present] = self.missing[slab][rows[present]]
        return out

    def lost(self, slot: int | None = None) -> bool:
        if self.blind:
            return True
        step = slice(None) if slot is None else slice(slot, None, self.k)
        return any(bool(missing[step].any()) for missing in self.missing)

    def trained(self, slab: int, slot: int, start: int, stop: int) -> I64:
        rows = np.arange(start, stop) * self.k + slot
        rows = rows[rows < SHAPES[slab].rows]
        return rows[self.data["marks"][slab][rows, 0] != 0] // self.k

    def install(self, slab: int, layer: Layer, rows: I64, values: Words) -> None:
        wanted = (rows < SHAPES[slab].rows) & self.unknown(slab, layer, rows)
        self.data[layer][slab][rows[wanted]] = values[wanted]
        if layer == "records":
            self.missing[slab][rows[wanted]] = False

    def reveal(self) -> None:
        self.blind = False
        self.missing = [marks[:, 0] != 0 for marks in self.data["marks"]]


class NoLock(contextlib.AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        pass


class Push:
    """Moves some rows of one slab on; what it makes of a row depends on what was there."""

    def __init__(self, worker: str, number: int, slab: int, rows: list[int], kind: int) -> None:
        self.worker, self.number, self.slab, self.kind = worker, number, slab, kind
        self.rows = np.array(sorted(set(rows)), np.int64)

    def apply(self, rows: ToyRows) -> None:
        records, marks = rows.data["records"][self.slab], rows.data["marks"][self.slab]
        if self.kind == 0:  # a deletion
            records[self.rows] = 0
            marks[self.rows] = 0
        else:
            records[self.rows] = records[self.rows] * np.uint32(5) + np.uint32(self.kind)
            marks[self.rows, 0] = 1
            marks[self.rows, 1:] = self.kind % 251


class ParityProtocol(RuleBasedStateMachine):
    """One cluster. `dead` shards are gone and nobody has noticed yet."""

    @initialize(size=st.sampled_from(SIZES))
    def start(self, size: tuple[int, int, int]) -> None:
        n, k, r = size
        self.place = Placement(n, k, r)
        self.queues: dict[tuple[int, int], deque[Message]] = {
            (source, host): deque() for source in range(n) for host in self.place.hosts(source)
        }
        self.dead: set[int] = set()
        self.draining = False
        self.perfect = [ToyRows(shard) for shard in range(n)]
        self.pushes: list[list[Push]] = [[] for _ in range(n)]  # in the order that shards took them
        self.todo: list[deque[Push]] = [deque() for _ in range(n)]
        self.sent = 0
        self.decodes: list[Decode] = []
        self.mark_decodes: list[Decode] | None = None
        empty = Point({}, (0,))
        members = [self.member(shard, 1, 0, empty, lost=False) for shard in range(n)]
        self.rebuilder = Rebuilder(self.place, members, self.deliver_all)
        begin(members)

    def member(
        self, shard: int, epoch: int, number: int, point: Point, *, lost: bool
    ) -> ParityMember:
        rows = ToyRows(shard, lost=lost)
        rows.k = self.place.k
        source = Source(shard, epoch, self.place.hosts(shard), number=number, point=point)
        host = ParityHost(shard, self.place, SHAPES, complete=not lost)

        def post(to: int, message: Message) -> None:
            if to not in self.dead and shard not in self.dead:
                self.queues[shard, to].append(message)

        return ParityMember(
            source=source, host=host, rows=rows, placement=self.place, lock=NoLock(), post=post
        )

    def rows(self, shard: int) -> ToyRows:
        rows = self.rebuilder.members[shard].rows
        assert isinstance(rows, ToyRows)
        return rows

    # -- the network -----------------------------------------------------------------------------

    def deliver_all(self) -> None:
        if self.draining:
            for queue in self.queues.values():
                while queue:
                    self.receive(queue.popleft(), queue)

    def receive(self, message: Message, queue: deque[Message]) -> None:
        (_, host) = next(key for key, value in self.queues.items() if value is queue)
        held = self.rebuilder.members[host].host.receive(message)
        self.rebuilder.members[message.source].source.acknowledge(host, held)

    @rule(random=randoms, messages=st.integers(1, 30))
    def deliver(self, random: Random, messages: int) -> None:
        for _ in range(messages):
            waiting = [key for key, queue in self.queues.items() if queue]
            if not waiting:
                return
            source, host = random.choice(waiting)
            queue = self.queues[source, host]
            self.receive(queue.popleft(), queue)

    @rule(random=randoms)
    def deliver_twice(self, random: Random) -> None:
        waiting = [key for key, queue in self.queues.items() if queue]
        if waiting:
            source, host = random.choice(waiting)
            queue = self.queues[source, host]
            message = queue.popleft()
            self.receive(message, queue)
            self.receive(message, queue)
            if queue and len(queue) > 1:
                with pytest.raises(StreamError, match="send what is between"):
                    self.receive(queue[1], queue)

    # -- workers ---------------------------------------------------------------------------------

    @rule(random=randoms, pushes=st.integers(1, 8))
    def push(self, random: Random, pushes: int) -> None:
        for _ in range(pushes):
            shard, slab = random.randrange(self.place.n), random.randrange(2)
            size = self.perfect[shard].sizes[slab]
            rows = [random.randrange(size) for _ in range(random.randint(1, 4))]
            self.sent += 1
            push = Push(random.choice("ab"), self.sent, slab, rows, random.randint(0, 5))
            push.apply(self.perfect[shard])
            self.todo[shard].append(push)
            self.work(shard)

    @rule(random=randoms, pushes=st.integers(1, 8), messages=st.integers(1, 30))
    def push_and_deliver(self, random: Random, pushes: int, messages: int) -> None:
        self.push(random, pushes)
        self.deliver(random, messages)

    @rule()
    def go_on(self) -> None:
        for shard in range(self.place.n):
            self.work(shard)

    def work(self, shard: int) -> None:
        """Applies what a shard has to do, or asks for the first rows that it lacks."""
        while self.todo[shard] and shard not in self.dead:
            push, rows = self.todo[shard][0], self.rows(shard)
            if rows.blind:
                return
            missing = push.rows[rows.unknown(push.slab, "records", push.rows)]
            if missing.size:
                if not self.dead:
                    self.decode(shard, push.slab, missing)
                return
            member = self.rebuilder.members[shard]
            # A worker that is not sure sends again: what was applied is not applied twice.
            if member.source.ledger.get(push.worker, 0) < push.number:
                self.apply(member, rows, push)
                self.pushes[shard].append(push)
            self.todo[shard].popleft()

    def apply(self, member: ParityMember, rows: ToyRows, push: Push) -> None:
        k = self.place.k
        records, marks = (rows.data[layer][push.slab] for layer in ("records", "marks"))
        before = records[push.rows].copy(), marks[push.rows].copy()
        push.apply(rows)
        after = records[push.rows] ^ before[0], marks[push.rows] ^ before[1]
        order = np.argsort(push.rows % k, kind="stable")
        bounds = np.searchsorted(push.rows[order] % k, np.arange(k + 1))
        stripes = push.rows[order] // k
        part = Changed(
            push.slab, stripes, bounds, after[0][order], stripes, bounds, after[1][order]
        )
        state = (member.source.state[0] + 1,)
        member.record([part], (push.worker, push.number), state)

    def decode(self, shard: int, slab: int, missing: I64) -> None:
        for group, slot in self.place.groups(shard):
            in_slot = missing[missing % self.place.k == slot]
            if in_slot.size:
                stripes = in_slot // self.place.k
                self.decodes.append(self.rebuilder.start(group, slab, "records", stripes))

    # -- losses ----------------------------------------------------------------------------------

    @rule(random=randoms, both=st.booleans(), noticed=st.booleans(), marks=st.booleans())
    def kill(self, random: Random, both: bool, noticed: bool, marks: bool) -> None:
        living = [shard for shard in range(self.place.n) if shard not in self.dead]
        gone = {random.choice(living) for _ in range(1 + both)}
        hurt = {
            member.index
            for member in self.rebuilder.members
            if any(member.standing().lost_K) or not member.host.complete
        }
        standings = self.rebuilder._standings(self.dead | gone)
        for shard in self.dead | gone:
            hurt |= set(self.rebuilder._late(shard, standings))
        try:
            self.rebuilder.check(self.dead | gone)
        except ParityLossError:
            assert len(self.dead | gone | hurt) > self.place.r
            return
        self.dead |= gone
        for (source, host), queue in self.queues.items():
            if source in gone or host in gone:
                queue.clear()
        if noticed:
            self.notice()
            if marks:
                self.bring_marks_back()

    @precondition(lambda self: self.dead)
    @rule()
    def notice(self) -> None:
        lost, self.dead = sorted(self.dead), set()
        settled = {shard: self.rebuilder.members[shard].source.settled for shard in lost}
        epochs = {shard: self.rebuilder.members[shard].source.epoch + 1 for shard in lost}

        def replace(shard: int, number: int, point: Point) -> ParityMember:
            assert number >= settled[shard], "a settled push was lost"
            return self.member(shard, epochs[shard], number, point, lost=True)

        points = self.rebuilder.recover(lost, replace)
        self.decodes, self.mark_decodes = [], None
        for shard, point in points.items():
            taken = self.pushes[shard]
            kept = [p for p in taken if p.number <= point.ledger.get(p.worker, 0)]
            assert taken[: len(kept)] == kept, "what was kept is not the beginning"
            assert point.state == (len(kept),)
            self.pushes[shard] = kept
            self.todo[shard].extendleft(reversed(taken[len(kept) :]))

    @precondition(lambda self: not self.dead)
    @rule()
    def settle(self) -> None:
        for member in self.rebuilder.members:
            for host in member.source.hosts:
                self.rebuilder.members[host].host.settle(member.index, member.source.settled)

    # -- bringing back ---------------------------------------------------------------------------

    @precondition(lambda self: not self.dead)
    @rule()
    def bring_marks_back(self) -> None:
        self.draining = True
        self.rebuilder.recover_marks()
        self.draining, self.mark_decodes = False, None

    @precondition(lambda self: not self.dead)
    @rule()
    def ask_for_marks(self) -> None:
        if self.mark_decodes is None and any(self.rows(s).blind for s in range(self.place.n)):
            marks = self.rebuilder.lost_marks(self.rebuilder.blind())
            self.mark_decodes = self.rebuilder.start_all(list(marks))

    @precondition(lambda self: not self.dead)
    @rule()
    def finish(self) -> None:
        self.decodes = [d for d in self.decodes if not self.rebuilder.finish(d)]
        if self.mark_decodes is not None:
            left = [d for d in self.mark_decodes if not self.rebuilder.finish(d)]
            self.mark_decodes = left or None
            if not left:
                for member in self.rebuilder.members:
                    if self.rows(member.index).blind:
                        member.reveal()

    @precondition(lambda self: not self.dead)
    @rule(slab=st.integers(0, 1), count=st.integers(1, 8))
    def sweep(self, slab: int, count: int) -> None:
        for shard in range(self.place.n):
            rows = self.rows(shard)
            missing = np.flatnonzero(rows.missing[slab])
            if missing.size and not rows.blind:
                self.decode(shard, slab, missing[:count])

    @precondition(lambda self: not self.dead)
    @rule(stripes=st.integers(1, 4))
    def fill(self, stripes: int) -> None:
        self.rebuilder.fill(stripes)

    @rule(random=randoms, moves=st.integers(1, 60))
    def live(self, random: Random, moves: int) -> None:
        """Many moves at once: chance alone seldom does one thing to the end."""
        for _ in range(moves):
            move = random.choices(MOVES, WEIGHTS)[0]
            if move == "kill":
                self.kill(random, random.random() < 0.3, random.random() < 0.7,
                          random.random() < 0.7)  # fmt: skip
            elif move == "push":
                self.push(random, random.randint(1, 4))
            elif move == "deliver":
                self.deliver(random, random.randint(1, 12))
            elif self.dead:
                self.notice()
            elif move == "sweep":
                self.sweep(random.randrange(2), random.randint(1, 8))
            elif move == "fill":
                self.fill(random.randint(1, 4))
            else:
                getattr(self, move)()
            self.rows_are_what_they_should_be()

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def rows_are_what_they_should_be(self) -> None:
        """A row that is known is, up to pushes that wait, the row of the perfect history."""
        if not hasattr(self, "place"):
            return
        for shard in range(self.place.n):
            rows, waiting = self.rows(shard), self.todo[shard]
            if rows.blind or waiting or shard in self.dead:
                continue
            for slab, missing in enumerate(rows.missing):
                found, expected = (x.data["records"][slab] for x in (rows, self.perfect[shard]))
                assert np.array_equal(found[~missing], expected[~missing])

    def teardown(self) -> None:
        if not hasattr(self, "place"):
            return
        if self.dead:
            self.notice()
        self.draining = True
        self.deliver_all()
        self.rebuilder.recover_marks()
        for shard in range(self.place.n):
            for slab, missing in enumerate(self.rows(shard).missing):
                self.rebuilder.recover_rows(shard, slab, np.flatnonzero(missing))
            self.work(shard)
            assert not self.todo[shard]
        while self.rebuilder.fill(3):
            pass
        self.deliver_all()
        for shard in range(self.place.n):
            for layer in ("records", "marks"):
                for found, expected in zip(
                    self.rows(shard).data[layer], self.perfect[shard].data[layer], strict=True
                ):
                    assert np.array_equal(found, expected)
        check_parity(self.rebuilder)


def _run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        ParityProtocol,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_nothing_is_lost_whatever_is_lost() -> None:
    _run(examples(240), 12)


def test_a_decode_that_began_before_a_loss_is_refused() -> None:
    """It may have heard of what was rolled back since: its rows would be rows that never were."""
    machine = ParityProtocol()
    machine.start((5, 3, 2))
    machine.draining = True
    machine.push(Random(1), 40)
    machine.deliver_all()

    def lose(shard: int) -> None:
        machine.dead = {shard}
        for (source, host), queue in machine.queues.items():
            if shard in (source, host):
                queue.clear()
        machine.notice()
        machine.rebuilder.recover_marks()

    lose(0)
    missing = np.flatnonzero(machine.rows(0).missing[0])
    assert missing.size
    machine.decode(0, 0, missing)
    started = list(machine.decodes)
    machine.deliver_all()
    lose(1)
    for decode in started:
        with pytest.raises(StreamError, match="lost since it began"):
            machine.rebuilder.finish(decode)
    assert machine.rows(0).missing[0][missing].all()
    machine.teardown()


def test_a_member_is_heard_once_about_a_decode_and_a_decode_begins_once() -> None:
    """What it has, said twice, would be taken out of the sum again: rows that never were."""
    machine = ParityProtocol()
    machine.start((5, 3, 2))
    machine.draining = True
    machine.push(Random(1), 40)
    machine.deliver_all()
    machine.dead = {0}
    machine.notice()
    machine.rebuilder.recover_marks()
    machine.decode(0, 0, np.flatnonzero(machine.rows(0).missing[0]))
    assert machine.decodes
    members = machine.rebuilder.members
    for decode in machine.decodes:
        for member in machine.place.members(decode.wanted.group):
            members[member].send_values([decode.wanted])
        machine.deliver_all()
        for host in decode.hosts:
            members[host].host.begin([decode.wanted])
    machine.finish()
    assert not machine.decodes
    assert not machine.rows(0).missing[0].any()
    machine.rows_are_what_they_should_be()
    machine.teardown()


def test_a_host_that_was_filled_ahead_of_others_is_filled_again() -> None:
    """It has rows of a lost shard as they were after what the other hosts hold, and no message
    that would undo it."""
    machine = ParityProtocol()
    machine.start((5, 3, 2))
    new, behind, source = 0, 1, 2

    def push(number: int) -> None:
        push = Push("a", number, 0, list(range(9)), 3)
        push.apply(machine.perfect[source])
        machine.todo[source].append(push)
        machine.work(source)

    def deliver() -> None:
        for (sender, host), queue in machine.queues.items():
            while queue and (sender, host) != (source, behind):
                machine.receive(queue.popleft(), queue)

    def lose(shard: int) -> None:
        machine.dead = {shard}
        for key, queue in machine.queues.items():
            if shard in key:
                queue.clear()
        machine.notice()

    push(1)
    machine.draining = True
    machine.deliver_all()
    machine.draining = False
    push(2)
    lose(new)
    machine.ask_for_marks()
    deliver()
    machine.finish()
    host = machine.rebuilder.members[new].host
    while machine.rebuilder.fill(3):
        deliver()
    assert host.complete
    assert host.streams[source][0] > machine.rebuilder.members[behind].host.held(source)
    lose(source)
    assert not host.complete
    machine.teardown()


def test_parity_that_starts_over_takes_nothing_of_a_server_that_is_replaced() -> None:
    """A host asks for rows as soon as its parity starts over. The server that still lives there in
    its old epoch would fill it with rows that are about to be replaced."""
    machine = ParityProtocol()
    machine.start((3, 1, 1))
    machine.draining = True
    machine.push(Random(1), 40)
    machine.deliver_all()
    before = machine.rebuilder.members[0]
    refused = 0

    def replace(shard: int, number: int, point: Point) -> ParityMember:
        nonlocal refused
        for host in machine.place.hosts(shard):
            held = machine.rebuilder.members[host].host
            for p, slab, source, filled in held.to_fill():
                if source == shard:
                    before.send_fill(host, p, slab, filled, held.stripes[slab])
            for message in machine.queues[shard, host]:
                with pytest.raises(StreamError, match="was replaced and must stop"):
                    held.receive(message)
                refused += 1
            machine.queues[shard, host].clear()
        return machine.member(shard, before.source.epoch + 1, 0, point, lost=False)

    machine.rebuilder.start_over([0], replace)
    assert refused
    assert not all(machine.rebuilder.members[h].host.complete for h in machine.place.hosts(0))


def test_rows_whose_parity_is_out_of_reach_are_not_taken_for_untrained_ones() -> None:
    """A replacement that does not reach the host of its parity goes on without it: what it has
    lost cannot be decoded then, and must not be found to be nothing."""
    machine = ParityProtocol()
    machine.start((3, 1, 1))
    machine.draining = True
    machine.push(Random(1), 40)
    machine.deliver_all()
    assert machine.rows(0).trained(0, 0, 0, 99).size
    machine.dead = {0}
    for (source, host), queue in machine.queues.items():
        if 0 in (source, host):
            queue.clear()
    machine.notice()
    (host,) = machine.place.hosts(0)
    machine.rebuilder.members[0].leave_out(host)
    with pytest.raises(StreamError, match="none can be decoded"):
        machine.rebuilder.recover_marks()
    assert machine.rows(0).blind


def _live(size: tuple[int, int, int], lives: int) -> None:
    for seed in range(lives):
        machine = ParityProtocol()
        machine.start(size)
        machine.live(Random(seed), 400)
        machine.teardown()


@pytest.mark.parametrize("size", SIZES)
def test_long_lives(size: tuple[int, int, int]) -> None:
    _live(size, examples(16))


@pytest.mark.soak
def test_nothing_is_lost_in_long_runs() -> None:
    _run(500, 40)
    for size in SIZES:
        _live(size, 100)
