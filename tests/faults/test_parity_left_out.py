"""Streams that go on without a host that holds nothing: what is settled stays settled, and no row
is decoded from parity that is behind. The machine of `test_parity_protocol` with two more moves."""

from __future__ import annotations

from random import Random

import pytest

from emberkeep.erasure.messages import Differences, Point
from emberkeep.erasure.source import Source
from emberkeep.errors import ParityLossError, StreamError
from tests.faults.test_parity_protocol import SIZES, ParityProtocol, Push

NOTHING = Differences((), None, ())


class Leaving(ParityProtocol):
    """Hosts are left out by sources, and come back."""

    def cut(self, source: int, host: int) -> None:
        self.queues[source, host].clear()
        member = self.rebuilder.members[source]
        member.leave_out(host)
        if not member.source.hosts:  # nobody else could tell of it
            self.rebuilder.left_out[source] = set(self.place.hosts(source))
            member.source.known_left_out(self.place.hosts(source))

    def mend(self, source: int, host: int) -> None:
        """What a coordinator does when the host answers again."""
        members = self.rebuilder.members
        self.rebuilder.left_out.pop(source, None)
        members[host].host.refill(source)
        number, point = members[source].attach(host)
        members[host].host.follow(source, members[source].source.epoch, number, point)

    def left_out(self) -> list[tuple[int, int]]:
        members = self.rebuilder.members
        return [
            (source, host)
            for source, host in self.queues
            if not self.dead & {source, host} and host not in members[source].source.hosts
        ]

    def finish(self) -> None:
        try:
            super().finish()
        except StreamError:  # the parity that was asked has started over since
            self.decodes, self.mark_decodes = [], None

    def decode(self, shard: int, slab: int, missing: object) -> None:
        """Rows whose parity is left out wait until it is back."""
        standings = self.rebuilder._standings()
        group_of = self.place.groups(shard)
        lost = {g: sum(standings[m].lost_K[s] for s, m in enumerate(self.place.members(g)))
                for g, _ in group_of}  # fmt: skip
        if all(lost[g] <= len(self.rebuilder._parities(g, standings)) for g, _ in group_of):
            super().decode(shard, slab, missing)  # type: ignore[arg-type]

    def whole(self) -> bool:
        standings = self.rebuilder._standings(self.dead)
        return not self.dead and all(s.complete and not any(s.lost_K) for s in standings.values())

    def run(self, random: Random, rounds: int) -> int:
        """Rounds in which a host is left out in the midst of pushes and shards are lost; how many
        losses were borne with a host left out."""
        borne = 0
        for _ in range(rounds):
            source = random.randrange(self.place.n)
            host = random.choice(self.place.hosts(source))
            self.push(random, random.randint(1, 6))
            self.deliver(random, random.randint(0, 12))
            self.cut(source, host)
            self.push(random, random.randint(1, 6))
            self.deliver(random, random.randint(0, 30))
            gone = {random.choice([source, host, random.randrange(self.place.n)])}
            try:
                self.rebuilder.check(gone)
            except ParityLossError:
                gone = set()
            borne += bool(gone)
            self.dead = gone
            for key, queue in self.queues.items():
                if gone & set(key):
                    queue.clear()
            if gone:
                self.notice()
            self.bring_back()
        return borne

    def bring_back(self) -> None:
        """Everybody answers again: all is whole once rows and parity were brought back."""
        self.draining = True
        self.deliver_all()
        for pair in self.left_out():
            self.mend(*pair)
        self.rebuilder.recover_marks()
        for shard in range(self.place.n):
            for slab, missing in enumerate(self.rows(shard).missing):
                self.rebuilder.recover_rows(shard, slab, missing.nonzero()[0])
            self.work(shard)
        while self.rebuilder.fill(3):
            pass
        self.draining = False
        self.decodes, self.mark_decodes = [], None
        assert self.whole()
        self.rows_are_what_they_should_be()


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_right_whatever_is_left_out_and_lost(size: tuple[int, int, int]) -> None:
    borne = 0
    for seed in range(2):
        machine = Leaving()
        machine.start(size)
        borne += machine.run(Random(seed), 8)
        machine.teardown()
    assert borne or size == (2, 1, 1)  # whose shards have one host each


@pytest.mark.soak
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_right_in_many_runs(size: tuple[int, int, int]) -> None:
    for seed in range(100):
        machine = Leaving()
        machine.start(size)
        machine.run(Random(seed), 20)
        machine.teardown()


def stream() -> Source:
    return Source(0, 1, (1, 2, 3), point=Point({}, ()))


def test_settled_waits_until_all_others_know_who_is_left_out() -> None:
    source = stream()
    for _ in range(5):
        source.message(NOTHING)
    source.acknowledge(1, 5)
    source.acknowledge(2, 5)
    source.acknowledge(3, 2)
    source.leave_out(3)
    assert source.message(NOTHING).goes_to == (1, 2)
    assert (source.hosts, source.settled) == ([1, 2], 2)
    source.acknowledge(1, 6)
    assert source.settled == 2
    source.acknowledge(2, 6)
    assert source.settled == 6
    source.acknowledge(3, 9)  # late: it counts no more
    assert source.settled == 6


def test_a_stream_without_hosts_settles_when_the_coordinator_knows_that_nobody_holds_it() -> None:
    source = stream()
    source.message(NOTHING)
    for host in (1, 2, 3):
        source.leave_out(host)
        source.message(NOTHING)
    assert (source.hosts, source.settled) == ([], 0)
    source.known_left_out([1, 2])
    assert source.settled == 0
    source.known_left_out([1, 2, 3])
    assert source.settled == 4
    assert source.attach(2)[0] == 4
    assert source.message(NOTHING).goes_to == (2,)
    assert source.settled == 4


def test_a_host_that_is_attached_again_counts_again() -> None:
    source = stream()
    source.leave_out(3)
    source.message(NOTHING)
    source.attach(3)
    assert source.message(NOTHING).goes_to == (1, 2, 3)
    for host in (1, 2):
        source.acknowledge(host, 2)
    assert source.settled == 1
    source.detach(3)
    assert source.settled == 2


def pushed(machine: ParityProtocol, source: int, number: int) -> None:
    push = Push("a", number, 0, list(range(9)), 3)
    push.apply(machine.perfect[source])
    machine.todo[source].append(push)
    machine.work(source)


def deliver_to(machine: ParityProtocol, *hosts: int) -> None:
    for (_, host), queue in machine.queues.items():
        while queue and host in hosts:
            machine.receive(queue.popleft(), queue)


def test_a_push_that_was_settled_without_a_host_survives_its_shard() -> None:
    """The host that was left out believes that it is whole: it must not decide what is kept."""
    machine = Leaving()
    machine.start((4, 2, 2))
    source = 0
    out, *others = machine.place.hosts(source)
    pushed(machine, source, 1)
    machine.cut(source, out)
    pushed(machine, source, 2)
    deliver_to(machine, *others)
    assert machine.rebuilder.members[source].source.settled == 3  # with what says who is left out
    machine.dead = {source}
    machine.notice()  # fails if a settled push is undone
    assert not machine.rebuilder.members[out].host.complete
    machine.bring_back()
    machine.teardown()


def test_what_only_the_shard_knew_is_remembered_by_who_recovers_it() -> None:
    machine = Leaving()
    machine.start((3, 2, 1))
    for host in machine.place.hosts(0):
        machine.cut(0, host)
    pushed(machine, 0, 1)
    machine.rebuilder.left_out[0] = set(machine.place.hosts(0))
    with pytest.raises(ParityLossError):
        machine.rebuilder.check({0})


def test_parity_that_is_being_filled_is_not_asked() -> None:
    machine = Leaving()
    machine.start((3, 2, 1))
    pushed(machine, 0, 1)
    machine.draining = True
    machine.deliver_all()
    machine.dead = {0}
    machine.notice()
    machine.rebuilder.recover_marks()
    group, slot = machine.place.groups(0)[0]
    missing = machine.rows(0).missing[0].nonzero()[0]
    stripes = missing[missing % 2 == slot] // 2
    started = machine.rebuilder.start(group, 0, "records", stripes)
    host = machine.rebuilder.members[machine.place.host(group, 0)].host
    host.refill(next(s for s in machine.place.members(group) if s != 0))
    with pytest.raises(StreamError, match="began"):
        machine.rebuilder.finish(started)
    with pytest.raises(StreamError, match="being filled"):
        host.begin([started.wanted])
