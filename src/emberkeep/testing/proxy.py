"""A TCP proxy between processes whose line can be cut, slowed, blackholed and reset.

What a network does to connections, on one machine and at a test's word. One supervised thread
carries all bytes of a proxy.
"""

from __future__ import annotations

import math
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Literal, get_args

from emberkeep.runtime.background import Worker
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.wire.security import split_address

Way = Literal["requests", "answers"]
WAYS: tuple[Way, ...] = get_args(Way)

_CHUNK = 1 << 16
_MOST_WAITING = 1 << 20
# Short messages are the transport's own: pings, windows, headers. A reply to a push is longer.
_LEAST_ANSWER = 40
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Clients connect to `address`, and reach the server at `target`.

    What the line does is one of these, until `heal` or another of them:

    - `cut`: packets are lost, one way or both. Connections stay open. As TCP sends lost packets
      again, what was sent meanwhile arrives after `heal`, unless its connection was closed.
    - `blackhole`: nothing that is sent on the connections of now, or on those made meanwhile, ever
      arrives, also after `heal`: they stay open and silent. Later connections work.
    - `half_open`: connections of now work; those made meanwhile are accepted and never answered.
    - `reset`: connections of now are reset, and those made meanwhile at once.
    - `delay`: everything arrives so much later.

    `point` has later connections reach another server. All calls are safe from any thread, and have
    taken effect when they return.
    """

    def __init__(
        self, target: str, *, host: str = "127.0.0.1", clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._target = split_address(target)[1:]
        self._clock = clock
        self._lock = threading.RLock()
        self._lines: set[_Line] = set()
        self._held: Collection[Way] = ()
        self._silent = self._deaf = self._resetting = False
        self._delay = 0.0
        self._losing = False
        self._watched_at = 0.0
        self.accepted = 0
        self.lost_answers = 0
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._awake, self._wake = socket.socketpair()
        self._awake.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._carrier = Worker("emberkeep-proxy", self._carry, clock=clock)
        self._carrier.wake()

    # -- what the line does ----------------------------------------------------------------------

    def heal(self) -> None:
        """The line works again."""
        self._become()

    def cut(self, *ways: Way) -> None:
        """Packets are lost: those of requests, of answers, or both."""
        self._become(held=ways or WAYS)

    def blackhole(self) -> None:
        """Everything vanishes, and what it was on never works again."""
        with self._lock:
            self._become(silent=True)
            for line in self._lines:
                line.silence()

    def half_open(self) -> None:
        """New connections are accepted and never answered."""
        self._become(deaf=True)

    def reset(self) -> None:
        """All connections are reset, and new ones too."""
        with self._lock:
            self._become(resetting=True)
            for line in list(self._lines):
                self._drop(line, reset=True)

    def delay(self, by: timedelta) -> None:
        """Everything arrives so much later."""
        self._become(delay=by.total_seconds())

    def lose_answer(self, losing: bool = True) -> None:
        """The next answer of a server is lost, and its connection with it; `lost_answers` counts
        them. `False`: it is not, if it has not come yet."""
        with self._lock:
            self._losing = losing

    def point(self, target: str) -> None:
        """New connections reach this server."""
        with self._lock:
            self._target = split_address(target)[1:]

    def close(self) -> None:
        """Ends all connections, and the thread."""
        self._carrier.stop()
        self._stir()
        self._carrier.join()
        with self._lock:
            for line in list(self._lines):
                self._drop(line)
            self._selector.close()
            for each in (self._listener, self._awake, self._wake):
                each.close()

    @property
    def connections(self) -> int:
        """How many are open."""
        with self._lock:
            return len(self._lines)

    def _become(
        self,
        *,
        held: Collection[Way] = (),
        silent: bool = False,
        deaf: bool = False,
        resetting: bool = False,
        delay: float = 0.0,
    ) -> None:
        self._carrier.check()
        with self._lock:
            self._held, self._silent, self._deaf = held, silent, deaf
            self._resetting, self._delay = resetting, delay
            self._stir()

    def _stir(self) -> None:
        with suppress(BlockingIOError):
            self._wake.send(b"\0")

    # -- carrying --------------------------------------------------------------------------------

    def _carry(self) -> float:
        for key, events in self._selector.select(self._rest()):
            with self._lock:
                if key.fileobj is self._awake:
                    with suppress(BlockingIOError):
                        self._awake.recv(_CHUNK)
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data.line in self._lines:
                    self._attempt(key.data.line, partial(self._read, key.data, events))
        with self._lock:
            self._watched_at = self._clock.monotonic()
            for line in list(self._lines):
                self._attempt(line, partial(self._write, line))
                if line in self._lines:
                    self._watch(line)
        return 0.0

    def _rest(self) -> float | None:
        """Until delayed bytes are due that were not when connections were last looked at."""
        with self._lock:
            due = [
                half.due
                for line in self._lines
                for half in line.halves
                if self._watched_at < half.due < math.inf and half.way not in self._held
            ]
        return max(0.0, min(due) - self._clock.monotonic()) if due else None

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        self.accepted += 1
        if self._resetting:
            _close(client, reset=True)
            return
        server = socket.socket()
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = _Line(client, server)
        self._lines.add(line)
        if self._silent or self._deaf:
            line.silence()
        else:
            server.connect_ex(self._target)

    def _attempt(self, line: _Line, call: Callable[[], object]) -> None:
        """Ends the connection if one side of it has ended."""
        try:
            call()
        except BlockingIOError:
            pass
        except OSError:
            self._drop(line, reset=True)
        else:
            if line.ended:
                self._drop(line)

    def _read(self, half: _Half, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            half.twin.connected = True
        if not (events & selectors.EVENT_READ and self._reads(half)):
            return
        data = half.source.recv(_CHUNK)
        if half.way == "answers" and self._losing and len(data) > _LEAST_ANSWER:
            self._losing = False
            self.lost_answers += 1
            self._drop(half.line, reset=True)
        else:
            half.take(data, self._clock.monotonic() + self._delay)

    def _write(self, line: _Line) -> None:
        for half in line.halves:
            if half.way not in self._held:
                half.give(self._watched_at)

    def _reads(self, half: _Half) -> bool:
        if half.line.silent:  # what a client sends vanishes; that it has ended is seen
            return half.way == "requests"
        return not (half.way in self._held or half.ended or half.nbytes > _MOST_WAITING)

    def _watch(self, line: _Line) -> None:
        """Has the thread wake up for what a connection can do now."""
        for half in line.halves:
            events = selectors.EVENT_READ if self._reads(half) else 0
            twin = half.twin
            if not twin.connected or (twin.due <= self._watched_at and twin.way not in self._held):
                events |= selectors.EVENT_WRITE
            known = self._selector.get_map().get(half.source)
            if known is None and events:
                self._selector.register(half.source, events, half)
            elif known is not None and not events:
                self._selector.unregister(half.source)
            elif known is not None and known.events != events:
                self._selector.modify(half.source, events, half)

    def _drop(self, line: _Line, *, reset: bool = False) -> None:
        self._lines.discard(line)
        for half in line.halves:
            with suppress(KeyError):
                self._selector.unregister(half.source)
            _close(half.source, reset=reset)


class _Line:
    """A client's connection and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.silent = False
        self.requests = _Half("requests", client, server, self)
        self.answers = _Half("answers", server, client, self)
        self.answers.connected = True  # the client is

    @property
    def halves(self) -> tuple[_Half, _Half]:
        return self.requests, self.answers

    def silence(self) -> None:
        self.silent = True
        for half in self.halves:
            half.connected = True
            half.waiting.clear()

    @property
    def ended(self) -> bool:
        """Whether one side has ended and the other has got all of it."""
        return any(half.ended and not half.waiting for half in self.halves)


class _Half:
    """One way of a connection: what was read and is not yet written."""

    def __init__(self, way: Way, source: socket.socket, target: socket.socket, line: _Line) -> None:
        self.way, self.source, self.target, self.line = way, source, target, line
        self.connected = False
        self.ended = False
        self.waiting: deque[tuple[float, memoryview]] = deque()

    @property
    def twin(self) -> _Half:
        return self.line.answers if self.way == "requests" else self.line.requests

    @property
    def nbytes(self) -> int:
        return sum(len(data) for _, data in self.waiting)

    @property
    def due(self) -> float:
        """When the first of what waits is to be written; never, if nothing waits."""
        return self.waiting[0][0] if self.waiting else math.inf

    def take(self, data: bytes, due: float) -> None:
        if not data:
            self.ended = True
        elif not self.line.silent:
            self.waiting.append((due, memoryview(data)))

    def give(self, now: float) -> None:
        while self.connected and self.due <= now:
            due, data = self.waiting.popleft()
            try:
                sent = self.target.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                self.waiting.appendleft((due, data[sent:]))
                return


def _close(end: socket.socket, *, reset: bool) -> None:
    if reset:
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()
