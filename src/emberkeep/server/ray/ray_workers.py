"""Processes that train together, as actors of Ray: started, heard, asked to stop, and ended."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from emberkeep import errors
from emberkeep._types import Json
from emberkeep.errors import EmberkeepError, ServerError
from emberkeep.runtime.background import end_all
from emberkeep.server.ray.ray_session import connected_ray, join_run, run_name

_START_SECONDS = 120.0
# How long the others have to say what they met once one of them has failed.
_LAST_WORDS_SECONDS = 3.0
_MOST_MESSAGES = 100_000


class Mailbox:
    """Between a worker and the process that has started it. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Bounded: the other side may be stopped for a while.
        self._messages: deque[Any] = deque(maxlen=_MOST_MESSAGES)
        self._asked = 0
        self._on_ask: Callable[[int], object] | None = None

    def send(self, message: Any) -> None:
        """Plain values, taken in the order in which they were sent."""
        with self._lock:
            self._messages.append(message)

    def take(self) -> list[Any]:
        """What was sent since the last call."""
        with self._lock:
            messages = list(self._messages)
            self._messages.clear()
        return messages

    def ask(self, number: int) -> None:
        """Asks the worker to stop, as the signal of that number would."""
        with self._lock:
            self._asked = number
            hear = self._on_ask
        if hear is not None:
            hear(number)

    def on_ask(self, hear: Callable[[int], object]) -> None:
        """Has `hear` called when the worker is asked to stop, now if it was."""
        with self._lock:
            self._on_ask, asked = hear, self._asked
        if asked:
            hear(asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One of the processes that train together."""

    rank: int
    world: int
    meeting: str
    """Host and port where rank 0 waits for the others."""
    together: bool
    """Whether all of them are on one node."""
    run: str
    """Names the process that has started them."""


Work = Callable[[Json, Place, Mailbox], Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a worker has failed: its process died, or an error ended it."""

    rank: int
    reason: str
    died: bool = False
    error: EmberkeepError | None = None
    """The error, if it is one of ours."""


class _TrainWorker:
    """The actor: its process is the worker, which runs in a thread of it."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()

    def where(self) -> tuple[str, str, int, int]:
        """Node, its address, a port that is free there, and the process."""
        ray = connected_ray()
        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), address, port, os.getpid()

    def run(self, work: Work, config: Json, place: Place) -> Json:
        """What the work returns, or the error of ours that ended it: not all can be pickled."""
        join_run(place.run)
        try:
            return {"result": work(config, place, self._mailbox)}
        except EmberkeepError as error:
            return {"error": type(error).__name__, "message": str(error)}

    def take(self) -> list[Any]:
        return self._mailbox.take()

    def ask(self, number: int) -> None:
        self._mailbox.ask(number)


class WorkerGroup:
    """`workers` processes that run `work`, once: when one of them fails all of them end."""

    def __init__(self, work: Work, config: Json, *, workers: int, cpus: float) -> None:
        ray = connected_ray()
        self.ended = False
        self.result: Json | None = None
        """What rank 0 has returned, once all have ended well."""
        self.failures: list[Failure] = []
        """How workers have failed, those that died first; empty if all ended well."""
        self._pids = [0] * workers
        self._runs: list[Any] = []
        kind = ray.remote(_TrainWorker).options(num_cpus=cpus, max_concurrency=4)
        self._actors = [kind.remote() for _ in range(workers)]
        try:
            self._begin(work, config)
        except BaseException:
            self.close()
            raise

    def _begin(self, work: Work, config: Json) -> None:
        ray = connected_ray()
        asked = [actor.where.remote() for actor in self._actors]
        _, left = ray.wait(asked, num_returns=len(asked), timeout=_START_SECONDS)
        if left:
            raise ServerError(
                f"{len(asked)} workers did not start within {_START_SECONDS:g} s: does the Ray "
                "cluster have room for them?"
            )
        replies = [self._reply(rank, answer) for rank, answer in enumerate(asked)]
        if self._end_if_failed(replies):
            return
        self._pids = [pid for *_, pid in replies]
        together = len({node for node, *_ in replies}) == 1
        meeting = f"{'127.0.0.1' if together else replies[0][1]}:{replies[0][2]}"
        world = len(self._actors)
        for rank, actor in enumerate(self._actors):
            place = Place(
                rank=rank, world=world, meeting=meeting, together=together, run=run_name()
            )  # fmt: skip
            self._runs.append(actor.run.remote(work, config, place))

    def poll(self, seconds: float) -> list[Any]:
        """Waits for so long, or until the workers have ended; what rank 0 has sent since."""
        if self.ended:
            return []
        ray = connected_ray()
        replies, left = self._wait(seconds)
        if left and _failures(replies):
            replies, left = self._wait(_LAST_WORDS_SECONDS)
        messages: list[Any] = []
        with suppress(ray.exceptions.RayError):  # it is gone, which its run says
            messages = ray.get(self._actors[0].take.remote(), timeout=_LAST_WORDS_SECONDS)
        if not self._end_if_failed(replies) and not left:
            self.result = replies[0]["result"]
            self.close()
        return messages

    def ask_to_stop(self, number: int) -> None:
        """Asks rank 0, which stops all of them after a step."""
        self._actors[0].ask.remote(number)

    def close(self) -> None:
        """Ends them at once, whatever they do."""
        ray = connected_ray()
        self.ended = True
        end_all(*(partial(ray.kill, actor, no_restart=True) for actor in self._actors))

    def _wait(self, seconds: float) -> tuple[list[Any], list[Any]]:
        """The replies of those that have ended, and the runs of the others."""
        done, left = connected_ray().wait(
            self._runs, num_returns=len(self._runs), timeout=seconds
        )  # fmt: skip
        ended = [rank for rank, run in enumerate(self._runs) if run in done]
        return [self._reply(rank, self._runs[rank]) for rank in ended], left

    def _reply(self, rank: int, answer: Any) -> Any:
        """What a worker has answered; a `Failure` if it could not."""
        ray = connected_ray()
        try:
            reply = ray.get(answer)
        except ray.exceptions.RayActorError:
            pid = f" (process {self._pids[rank]})" if self._pids[rank] else ""
            return Failure(rank=rank, reason=f"worker {rank}{pid} died", died=True)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            return Failure(rank=rank, reason=f"worker {rank}: {_last_line(cause)}")
        if isinstance(reply, dict) and "error" in reply:
            known = _error(reply)
            return Failure(rank=rank, reason=f"worker {rank}: {known}", error=known)
        return reply

    def _end_if_failed(self, replies: list[Any]) -> bool:
        self.failures = sorted(
            _failures(replies), key=lambda one: (not one.died, one.error is None, one.rank)
        )
        if self.failures:
            self.close()
        return bool(self.failures)


def _failures(replies: list[Any]) -> list[Failure]:
    return [reply for reply in replies if isinstance(reply, Failure)]


def _error(reply: Json) -> EmberkeepError:
    """An error of a worker with its class and text; what else it held stays there."""
    kind: type[EmberkeepError] = getattr(errors, reply["error"], EmberkeepError)
    return kind.__new__(kind, reply["message"])


def _last_line(error: BaseException) -> str:
    """The line of a long story that says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)
