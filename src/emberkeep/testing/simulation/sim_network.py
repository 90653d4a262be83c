"""A network of simulated processes: messages take time, get lost, come twice, late or never.

Servers are `ShardService` objects. A message is handled by a thread of its server's process, so
that a server which is stopped or dead handles nothing. Who sends waits on virtual time.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import numpy as np

from emberkeep._types import U8, RowIds
from emberkeep.errors import ServerError
from emberkeep.runtime.clock import Clock
from emberkeep.runtime.crew import Crew
from emberkeep.server.epoch import Epoch, Session
from emberkeep.server.shard_service import ShardService
from emberkeep.testing.simulation.scheduler import (
    Process,
    Scheduler,
    SimulationError,
    Task,
    current_task,
)
from emberkeep.wire.protocol import (
    APPLY,
    CHECK,
    PREFETCH,
    PULL,
    PUSH,
    REFUSED,
    Request,
    Shape,
    check_protocol,
    is_frame,
    pack_request,
    refusal,
    unpack_frame,
)
from emberkeep.wire.security import Security

_START = datetime(2026, 1, 1, tzinfo=timezone.utc)
_REQUESTS = {PULL: "pull", PREFETCH: "prefetch", PUSH: "push", CHECK: "check", APPLY: "apply"}
# In the header of a request or reply.
_KIND_AT, _EPOCH_AT = 4, 16
_USUAL_SECONDS = 0.002
_SLOW_SECONDS = 4.0
_LATE_SECONDS = 25.0


class SimulatedClock:
    """The `Clock` of one process: all of them share the time, each has its own date."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self._scheduler = scheduler
        self._process = process

    def monotonic(self) -> float:
        return self._scheduler.seconds

    def now(self) -> datetime:
        return _START + timedelta(seconds=self._scheduler.seconds) + self._process.jumped

    def sleep(self, seconds: float) -> None:
        self._scheduler.block("time to pass", seconds)

    def wait_for(self, changed: Any, until: Callable[[], bool], seconds: float | None) -> bool:
        return bool(changed.wait_for(until, seconds))


@dataclass(slots=True)
class Weather:
    """What becomes of messages, as shares of all of them."""

    slow: float = 0.0
    """Take up to four seconds, either way."""
    drop: float = 0.0
    """Never arrive; the sender waits in vain."""
    lose: float = 0.0
    """Arrive, and their answer does not."""
    reset: float = 0.0
    """Are reported as failed at once, and arrive late or not at all."""
    repeat: float = 0.0
    """Arrive twice, the second time late."""

    def calm(self) -> None:
        self.slow = self.drop = self.lose = self.reset = self.repeat = 0.0


@dataclass(slots=True)
class Server:
    """A server process at an address."""

    process: Process
    service: ShardService


class _Reply:
    """What a sender waits for."""

    __slots__ = ("_scheduler", "_task", "done", "due", "error", "value", "what")

    def __init__(self, scheduler: Scheduler, what: str, due: float) -> None:
        self._scheduler = scheduler
        self.what = what
        self.due = due
        self.done = False
        self.value: Any = None
        self.error = ""
        self._task: Task | None = None

    def set(self, value: Any = None, error: str = "") -> None:
        if not self.done:
            self.done, self.value, self.error = True, value, error
            if self._task is not None:
                self._scheduler.wake(self._task)

    def wait(self) -> Any:
        if not self.done:
            self._task = current_task()
            if self._task is None:
                raise ServerError("the simulation is over")
            self._scheduler.block(self.what, self.due - self._scheduler.seconds)
            self._task = None
        if not self.done:
            self.done = True
            raise ServerError(f"{self.what} did not come in time")
        if self.error:
            raise ServerError(self.error)
        return self.value


class SimulatedNetwork:
    """Servers by their addresses, who cannot reach whom, and the weather.

    `sent` counts messages by kind and by what became of them.
    """

    def __init__(self, scheduler: Scheduler, harness: Process) -> None:
        self.scheduler = scheduler
        self._harness = harness
        self.weather = Weather()
        self.servers: dict[str, Server] = {}
        self.sent: Counter[str] = Counter()
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._held: list[tuple[tuple[str, str], Callable[[], object]]] = []
        self._serving: dict[int, list[tuple[int, Server]]] = {}
        self.after_push: dict[str, tuple[Callable[[], object], bool]] = {}
        """By address: what happens as soon as the next push there has been answered, and whether
        that answer is lost."""
        self.awaited: dict[tuple[str, str, int], list[Callable[[], object]]] = {}
        """By who asks what, of its parity, for the how manieth time from now on: what happens right
        before the question is sent."""
        self._owed: dict[Process, list[tuple[_Reply, str]]] = {}
        """What processes are to answer, and to whom."""
        self.lags: dict[tuple[str, str], float] = {}
        """By path: how much longer everything takes on it."""
        self.late: Counter[str] = Counter()
        """By address: whether what is sent there comes late."""

    # -- who is there ----------------------------------------------------------------------------

    def start(self, process: Process, address: str) -> Server:
        """A server, empty, at an address where no other is."""
        service = ShardService(
            threads=1, transport=self.transport(process), clock=self.clock(process)
        )
        server = self.servers[address] = Server(process, service)
        return server

    def clock(self, process: Process) -> Clock:
        return SimulatedClock(self.scheduler, process)

    def transport(self, process: Process) -> SimulatedTransport:
        return SimulatedTransport(self, process)

    # -- partitions ------------------------------------------------------------------------------

    def cut(self, path: tuple[str, str]) -> None:
        """What goes from the first host to the second does not arrive, until it is mended."""
        self._cuts[path] += 1

    def mend(self, path: tuple[str, str]) -> None:
        """What was sent meanwhile may still arrive."""
        self._cuts[path] -= 1
        if not self._cuts[path]:
            held = [call for kept, call in self._held if kept == path]
            self._held = [(kept, call) for kept, call in self._held if kept != path]
            for call in held:
                self.scheduler.at(self._delay(path), call)

    def is_cut(self, path: tuple[str, str]) -> bool:
        return self._cuts[path] > 0

    def _travel(self, path: tuple[str, str], delay: float, arrive: Callable[[], object]) -> None:
        """Has something arrive, if the way is free when it is sent and when it arrives."""
        if self.is_cut(path):
            self._hold(path, arrive)
            return

        def come() -> None:
            if self.is_cut(path):
                self._hold(path, arrive)
            else:
                arrive()

        self.scheduler.at(delay, come)

    def _hold(self, path: tuple[str, str], arrive: Callable[[], object]) -> None:
        self.sent["cut off"] += 1
        if self.scheduler.random.random() < 0.5:
            self._held.append((path, arrive))

    def hang_up(self, process: Process) -> None:
        """A process has ended on a machine that goes on: its connections are closed, and who awaits
        an answer hears of that."""
        for reply, asker in self._owed.pop(process, ()):
            path = (process.host, asker)
            error = f"{reply.what} does not come: it has ended"
            self._travel(path, self._delay(path), partial(reply.set, error=error))

    # -- messages --------------------------------------------------------------------------------

    def asks(self, sender: Process, content: bytes) -> None:
        """A server, or the coordinator, asks a server something of its parity."""
        what = str(unpack_frame(content)[0]["ask"])
        waiting, self.awaited, due = self.awaited, {}, []
        for (who, asked, times), calls in waiting.items():
            times -= (who, asked) == (sender.host, what)
            if times:
                self.awaited[who, asked, times] = calls
            else:
                due += calls
        for call in due:
            call()

    def deliver(
        self, sender: Process, address: str, kind: str, deadline: timedelta,
        work: Callable[[ShardService, bool], Any], stream: _Stream | None = None,
    ) -> _Reply:  # fmt: skip
        """Sends a message; what is returned is set when the answer comes."""
        scheduler, weather = self.scheduler, self.weather
        due = scheduler.seconds + deadline.total_seconds()
        reply = _Reply(scheduler, f"the answer of {address} to {kind}", due)
        self.sent[kind] += 1
        server = self.servers.get(address) if stream is None else stream.server
        there, back = (sender.host, address), (address, sender.host)
        lot = scheduler.random.random()
        fate = "reset" if self.late[address] else ""
        for name in () if fate else ("drop", "lose", "reset", "repeat"):
            share = getattr(weather, name)
            if lot < share:
                fate = name
                break
            lot -= share
        if fate:
            self.sent[fate] += 1
        if scheduler.over or not sender.alive:
            reply.set(error=f"{address}: {kind} was not sent")
            return reply
        if stream is not None and stream.broken:
            if stream.broken == "reset":
                reply.set(error=f"{address}: {kind} failed: the connection is closed")
            return reply
        if server is None or not server.process.alive:
            refused = partial(reply.set, error=f"{address}: {kind} failed: it cannot be reached")
            self._travel(there, self._delay(there), refused)
            return reply
        if fate in ("drop", "reset") and stream is not None:
            stream.broken = fate
        if fate == "drop":
            return reply
        delay = self._delay(there)
        if fate == "reset":
            scheduler.at(delay, partial(reply.set, error=f"{address}: {kind} failed: reset"))
            if scheduler.random.random() < (0.1 if self.late[address] else 0.5):
                return reply
            delay += scheduler.random.random() ** 2 * _LATE_SECONDS

        def answered(answer: Any) -> None:
            unheard = fate == "lose"
            if kind in ("push", "apply") and address in self.after_push:
                strike, unheard = self.after_push.pop(address)
                strike()
            if kind == "admit":
                self.probe_later(0.05)
            if not unheard:
                arrives = scheduler.seconds + self._delay(back)
                if stream is not None:
                    arrives = stream.returns = max(stream.returns, arrives)
                self._travel(back, arrives - scheduler.seconds, partial(reply.set, answer))
            elif stream is not None:
                stream.broken = "drop"

        def arrive(*, again: bool) -> None:
            assert server is not None
            if not server.process.alive:
                reset = partial(reply.set, error=f"{address}: {kind} failed: it has ended")
                self._travel(back, self._delay(back), reset)
                return

            owed = [each for each in self._owed.get(server.process, ()) if not each[0].done]
            self._owed[server.process] = [*owed, (reply, sender.host)]

            def handle() -> None:
                answer = work(server.service, again)
                if not again:
                    answered(answer)

            if stream is None or again:
                scheduler.spawn(f"{kind} of {sender}", handle, server.process)
            else:
                stream.arrived(handle, f"{kind} of {sender}")

        arrives = scheduler.seconds + delay
        if stream is not None:
            arrives = stream.arrives = max(stream.arrives, arrives)
        self._travel(there, arrives - scheduler.seconds, partial(arrive, again=False))
        if fate == "repeat":
            late = delay + scheduler.random.random() ** 2 * _LATE_SECONDS
            self._travel(there, late, partial(arrive, again=True))
        return reply

    def _delay(self, path: tuple[str, str]) -> float:
        random = self.scheduler.random
        lag = self.lags.get(path, 0.0)
        if self.weather.slow and random.random() < self.weather.slow:
            self.sent["slow"] += 1
            return lag + random.random() * _SLOW_SECONDS
        return lag + random.random() * _USUAL_SECONDS

    # -- what must never be ----------------------------------------------------------------------

    def served(self, server: Server, blob: U8, reply: U8) -> None:
        """A server has answered a request. Nobody answers whose place another has taken."""
        epoch = server.service._epoch
        if int(reply[_KIND_AT]) == REFUSED or epoch is None:
            return
        asked = int.from_bytes(blob[_EPOCH_AT : _EPOCH_AT + 8].tobytes(), "little")
        known = self._serving.setdefault(epoch.shard.index, [])
        for other, beside in known:
            if beside is not server and beside.process.alive and other > asked:
                raise SimulationError(
                    f"{server.process} answered in epoch {asked} of shard {epoch.shard.index} "
                    f"after {beside.process} had served it in epoch {other}"
                )
        if (asked, server) not in known:
            known.append((asked, server))

    def probe_later(self, most: float = 30.0) -> None:
        """Has somebody ask servers, within so many seconds, what they may not answer."""
        seconds = self.scheduler.random.random() ** 2 * most
        self.scheduler.at(
            seconds, lambda: self.scheduler.spawn("probe", self._probe, self._harness)
        )

    def _probe(self) -> None:
        """Nobody answers in another epoch than its own, before it has its rows, or without a
        lease."""
        for server in list(self.servers.values()):
            epoch = server.service.epoch
            for shift in () if epoch is None else (-1, 0, 1):
                assert epoch is not None
                if not server.process.alive or server.process.paused:
                    continue
                blob = _empty_pull(epoch.number + shift, epoch.shape)
                may = shift == 0 and self._may_serve(epoch)
                reply = server.service.answer(blob, Session())
                may = may or (shift == 0 and self._may_serve(epoch))
                if int(reply[_KIND_AT]) != REFUSED and not may and server.service.epoch is epoch:
                    raise SimulationError(
                        f"{server.process} answered in epoch {epoch.number + shift}, it has "
                        f"{epoch.number}, is {epoch.shard.state} and has not heard of its "
                        f"coordinator for {self.scheduler.seconds - epoch.heard:.1f} s"
                    )

    def _may_serve(self, epoch: Epoch) -> bool:
        silent = self.scheduler.seconds - epoch.heard
        return epoch.shard.state == "serving" and silent <= epoch.lease_seconds


def _empty_pull(epoch: int, shape: Shape) -> U8:
    """A pull of no row."""
    wanted = [RowIds(np.empty(0, np.int64), np.zeros(n + 1, np.int64)) for n in shape.tables_G]
    request = Request(
        kind=PULL, epoch=epoch, incarnation=0, number=0, rank=0, world=1, lr=0.0, wanted=wanted,
        grads=(),
    )  # fmt: skip
    return pack_request(request)


class _Stream:
    """One open stream: the server takes its requests in order, one at a time."""

    def __init__(self, network: SimulatedNetwork, server: Server) -> None:
        self.server = server
        self.session = Session()
        self.broken = ""
        """How it has ended: nothing gets through any more."""
        self.arrives = self.returns = 0.0
        self._scheduler = network.scheduler
        self._inbox: deque[Callable[[], object]] = deque()
        self._busy = False

    def arrived(self, handle: Callable[[], object], name: str) -> None:
        self._inbox.append(handle)
        if not self._busy:
            self._busy = True
            self._scheduler.spawn(name, self._work, self.server.process)

    def _work(self) -> None:
        try:
            while self._inbox:
                self._inbox.popleft()()
        finally:
            self._busy = False


class SimulatedTransport:
    """The `Transport` of one process."""

    def __init__(self, network: SimulatedNetwork, process: Process) -> None:
        self._network = network
        self._process = process

    def dial(self, address: str, security: Security) -> SimulatedChannel:
        return SimulatedChannel(self._network, self._process, address)

    def executor(self, most: int, name: str) -> Executor:
        return Crew(most, name, clock=self._network.clock(self._process))


class SimulatedChannel:
    """A `Channel` to a server of the network."""

    def __init__(self, network: SimulatedNetwork, process: Process, address: str) -> None:
        self._network = network
        self._process = process
        self._address = address
        self._stream: _Stream | None = None
        self._replies: deque[_Reply] = deque()

    def call(self, kind: str, content: bytes, deadline: timedelta) -> Iterator[Any]:
        if self._network.awaited and kind == "member":
            self._network.asks(self._process, content)
        reply = self._network.deliver(
            self._process, self._address, kind, deadline,
            lambda service, _again: list(service.answer_action(kind, content)),
        )  # fmt: skip
        yield from reply.wait()

    def open(self, command: bytes) -> None:
        check_protocol("the client", json.loads(command))
        server = self._network.servers.get(self._address)
        if server is None:
            raise ServerError(f"{self._address}: opening a stream failed: it cannot be reached")
        self._stream = _Stream(self._network, server)

    def send(self, blob: U8, deadline: timedelta) -> None:
        stream = self._stream
        if stream is None:
            raise ServerError(f"{self._address}: there is no stream")
        kind = "parity" if is_frame(blob) else _REQUESTS[int(blob[_KIND_AT])]
        sent = blob.copy()

        def work(service: ShardService, again: bool) -> U8:
            # A message that comes twice comes on another stream.
            session = Session() if again else stream.session
            try:
                reply = service.answer(sent, session)
            except Exception as error:  # a bug must end one request, not the server
                service.failed(error)
                reply = refusal(error, 0)
            if kind != "parity":
                self._network.served(stream.server, sent, reply)
            return reply

        self._replies.append(
            self._network.deliver(self._process, self._address, kind, deadline, work, stream=stream)
        )

    def receive(self) -> U8:
        if not self._replies:
            raise ServerError(f"{self._address}: nothing is awaited any more")
        reply: U8 = self._replies.popleft().wait()
        return reply

    def settled(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        self._stream = None
        for reply in self._replies:
            reply.set(error=f"{self._address}: the connection was closed")
        self._replies.clear()
