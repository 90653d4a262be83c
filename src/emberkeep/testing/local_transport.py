"""A network in one process: servers are objects, and messages fail by rule.

A message is delivered in the thread of who sends it, as the bytes that Flight would carry. Nothing
here sleeps but on the clock of the network, and what fails does so at once.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar

from emberkeep._types import U8
from emberkeep.errors import EmberkeepError, ServerError
from emberkeep.runtime.clock import Clock
from emberkeep.runtime.stopping import Stop
from emberkeep.server.epoch import Session
from emberkeep.server.shard_service import ShardService
from emberkeep.wire.protocol import APPLY, CHECK, PREFETCH, PULL, PUSH, check_protocol, is_frame
from emberkeep.wire.security import Security

_T = TypeVar("_T")

CLIENT = "client"
_REQUESTS = {PULL: "pull", PREFETCH: "prefetch", PUSH: "push", CHECK: "check", APPLY: "apply"}
_WORK_SECONDS = 0.05
_KIND_AT = 4  # in the header of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What becomes of some messages.

    - `how`: `refuse` (it does not arrive), `lose` (it does, and its answer is lost), `repeat` (it
      arrives twice), or `delay` (it arrives `by` later; who waits for it may have given up).
    - `kind`: an action, or pull, prefetch, push, check, apply; `parity` is what shards send to the
      hosts of their parity. None: any.
    - `server`: the address that it is sent to; None: any.
    - `at`: which of those, counted from 1 for each server and kind; None: all.
    - `share`: how many of them by lot. The lot depends on the seed of the network, server, kind and
      number alone, not on what other threads send.
    """

    how: Literal["refuse", "lose", "repeat", "delay"]
    kind: str | None = None
    server: str | None = None
    at: Collection[int] | None = None
    share: float = 1.0
    by: timedelta = timedelta(0)


class Event(NamedTuple):
    """A message and what became of it: `delivered`, `cut`, `late`, or `how` of a rule."""

    sender: str
    server: str
    kind: str
    number: int
    outcome: str


class LocalNetwork:
    """Servers by their addresses, which may be any names, and what is known to fail.

    Messages of one thread come in the order of sending, so `events` of them are the same in each
    run. Leases are renewed (`renew`), parity is sent (`parity`) and long work is done by threads
    of their own: how their messages lie among the others is up to the scheduler of the system.
    """

    def __init__(self, clock: Clock, *, seed: int = 0, rules: Sequence[Rule] = ()) -> None:
        self.clock = clock
        self.rules = list(rules)
        self.events: list[Event] = []
        self.servers: dict[str, ShardService] = {}
        self._senders: dict[str, LocalTransport] = {}
        self._seed = seed
        self._aside: frozenset[str] = frozenset()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._late: list[tuple[float, Event, ShardService, Callable[[], object]]] = []
        self._lock = threading.Lock()

    def start(self, address: str) -> ShardService:
        """A server, empty; one that was there is gone."""
        self.stop(address)
        transport = self._senders[address] = self.transport(address)
        service = ShardService(threads=1, transport=transport, clock=self.clock)
        self.servers[address] = service
        return service

    def stop(self, address: str) -> None:
        """Ends a server: it answers nothing, and what its threads still send does not arrive."""
        if self.servers.pop(address, None) is not None:
            self._senders.pop(address).ended = True

    def transport(self, sender: str = CLIENT) -> LocalTransport:
        """How messages of a sender travel: a client, or a server by its address."""
        return LocalTransport(self, sender)

    def partition(self, *names: str) -> None:
        """Cuts these, which still reach each other, off from all others; none: all is whole."""
        self._aside = frozenset(names)

    def deliver(
        self, sender: LocalTransport, server: str, kind: str, deadline: timedelta,
        work: Callable[[ShardService], _T],
    ) -> _T:  # fmt: skip
        """What a server makes of a message, if it arrives and its answer does."""
        with self._lock:
            self._counts[server, kind] += 1
            number = self._counts[server, kind]
            service = self.servers.get(server)
            rule = next((r for r in self.rules if self._hits(r, server, kind, number)), None)
            cut = (sender.name in self._aside) != (server in self._aside)
            if cut or service is None or sender.ended:
                outcome = "cut"
            else:
                outcome = "delivered" if rule is None else rule.how
            event = Event(sender.name, server, kind, number, outcome)
            self.events.append(event)
        self._deliver_late()
        if service is None or outcome in ("cut", "refuse"):
            raise ServerError(f"{server}: {kind} failed: it cannot be reached")
        if rule is not None and outcome == "delay":
            if rule.by > deadline:
                with self._lock:
                    due = self.clock.monotonic() + rule.by.total_seconds()
                    self._late.append((due, event, service, lambda: work(service)))
                self.clock.sleep(deadline.total_seconds())
                raise ServerError(f"{server} did not answer {kind} in time")
            self.clock.sleep(rule.by.total_seconds())
        if kind == "work":
            # Long work takes the machine's time, and virtual time passes for one who asks again
            # and again: without a rest it would be over before a thread has done anything.
            jobs = (service.long_work.job, service.rounds.job)
            wait([job[1] for job in jobs if job is not None], _WORK_SECONDS)
        answer = work(service)
        if outcome == "repeat":
            work(service)
        if outcome == "lose":
            raise ServerError(f"{server} did not answer {kind} in time")
        return answer

    def _hits(self, rule: Rule, server: str, kind: str, number: int) -> bool:
        lot = Random(f"{self._seed} {server} {kind} {number}").random
        return (
            rule.kind in (None, kind)
            and rule.server in (None, server)
            and (rule.at is None or number in rule.at)
            and (rule.share >= 1 or lot() < rule.share)
        )

    def _deliver_late(self) -> None:
        """Delivers what is due; nobody waits for an answer to it any more."""
        with self._lock:
            now = self.clock.monotonic()
            due = [late for late in self._late if late[0] <= now]
            self._late = [late for late in self._late if late[0] > now]
            self.events += [event._replace(outcome="late") for _, event, _, _ in due]
        for _, event, service, work in due:
            if self.servers.get(event.server) is service:
                with suppress(EmberkeepError):
                    work()


class LocalTransport:
    """The `Transport` of one sender. What others make at once is made in turn."""

    def __init__(self, network: LocalNetwork, sender: str) -> None:
        self.name = sender
        self.ended = False
        self._network = network

    def dial(self, address: str, security: Security) -> LocalChannel:
        return LocalChannel(self._network, self, address)

    def executor(self, most: int, name: str) -> Executor:
        return _InTurn()


class LocalChannel:
    """A `Channel` to a server of the network."""

    def __init__(self, network: LocalNetwork, sender: LocalTransport, address: str) -> None:
        self._network = network
        self._sender = sender
        self._address = address
        self._stream: tuple[ShardService, Session] | None = None
        self._replies: deque[U8 | ServerError] = deque()

    def call(self, kind: str, content: bytes, deadline: timedelta) -> Iterator[Any]:
        yield from self._network.deliver(
            self._sender, self._address, kind, deadline,
            lambda service: list(service.answer_action(kind, content)),
        )  # fmt: skip

    def open(self, command: bytes) -> None:
        check_protocol("the client", json.loads(command))
        self._stream = (self._network.servers[self._address], Session())

    def send(self, blob: U8, deadline: timedelta) -> None:
        if self._stream is None:
            raise ServerError(f"{self._address}: there is no stream")
        served, session = self._stream
        kind = "parity" if is_frame(blob) else _REQUESTS[int(blob[_KIND_AT])]

        def answer(service: ShardService) -> U8:
            if service is not served:
                raise ServerError(f"{self._address} has ended the stream")
            return service.answer(blob, session)

        try:
            reply = self._network.deliver(self._sender, self._address, kind, deadline, answer)
        except ServerError as error:
            self._replies.append(error)
        else:
            self._replies.append(reply)

    def receive(self) -> U8:
        reply = self._replies.popleft()
        if isinstance(reply, ServerError):
            raise reply
        return reply

    def settled(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        self._stream = None


class _InTurn(Executor):
    """Makes calls at once, in the thread of the caller."""

    def submit(self, call: Callable[..., _T], /, *given: Any, **named: Any) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(call(*given, **named))
        except BaseException as error:
            future.set_exception(error)
        return future


class LocalServers:
    """A `Launcher` of servers of a network.

    A server is ended before another takes its place. With `lease` it is not, as if it could not be
    reached: its lease is waited for, and the other has an address of its own.
    """

    def __init__(
        self, network: LocalNetwork, shards: int, *, lease: timedelta | None = None
    ) -> None:
        self._network = network
        self._lease = lease
        self.stop = Stop(network.clock)
        self._addresses = [f"server-{shard}" for shard in range(shards)]
        for address in self._addresses:
            network.start(address)

    @property
    def count(self) -> int:
        return len(self._addresses)

    def address(self, shard: int) -> str:
        return self._addresses[shard]

    def kill(self, shard: int) -> None:
        self._network.stop(self._addresses[shard])

    @property
    def replaceable(self) -> bool:
        return True

    def gone(self, shard: int, life: str) -> bool:
        service = self._network.servers.get(self._addresses[shard])
        return service is None or service.life != life

    def replace(self, shard: int, life: str) -> str:
        if self._lease is None:
            self.kill(shard)
        else:
            self._network.clock.sleep(1.5 * self._lease.total_seconds())
            self._addresses[shard] += "'"
        self._network.start(self._addresses[shard])
        return self._addresses[shard]

    def close(self) -> None:
        """They end with the network."""
