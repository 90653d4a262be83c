"""One save: what a version is made of, how far it has come, and how it ends."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from emberkeep._types import Json
from emberkeep.checkpoint.codec_choice import Choice
from emberkeep.checkpoint.increment_chain import Chain
from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.checkpoint.targets import WritesItself
from emberkeep.checkpoint.widths import loses
from emberkeep.codecs import Codec
from emberkeep.errors import CancelledError, StateError
from emberkeep.repository import Manifest, VersionId
from emberkeep.rows.snapshot import Cut, FrozenRows
from emberkeep.rows.tracker import PRIORITISED, SINCE_BASELINE, SINCE_VERSION
from emberkeep.runtime.background import Worker
from emberkeep.runtime.clock import Clock, Event, overdue

_K = TypeVar("_K")

# Who waits looks so often whether the process is being stopped: no signal ends a wait.
_LOOK = timedelta(seconds=0.2)
# A wait is no shorter: what is left of a float second may be no time to a timedelta.
_MOMENT = timedelta(milliseconds=1)

Counters: TypeAlias = "Json | Callable[[], Json]"
"""What a version says of its run. A function is called once the rows are frozen: shards that are
lost in the freeze are recovered in it, and the version says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a version holds beside rows: dense state as safetensors, the rest as plain data.

    `dense` may be a function that makes the bytes; it is called in the background.
    """

    dense: bytes | Callable[[], bytes] | None = None
    reader: Json = field(default_factory=dict)
    user: Json = field(default_factory=dict)
    counters: Counters = field(default_factory=dict)


class Saving(Generic[_K]):
    """A save under way: `copied` when no row is needed any more, `committed` when it is durable,
    `ended` when nothing of it is left to do. However it ends, all three are done."""

    def __init__(self, step: int, pause: timedelta, clock: Clock, *, whole: bool = True) -> None:
        self.step = step
        self.pause = pause
        self.whole = whole
        self.started = clock.monotonic()
        self.copied: Future[None] = Future()
        self.committed: Future[_K] = Future()
        self.cancelled = threading.Event()
        self.ended = Event(clock)
        # Whether a newer save may not give it up.
        self.spared = False


class BackgroundSaver(Generic[_K]):
    """Saves one after another beside training, in a supervised thread.

    A save that is committed stays so, whatever comes after. One that fails has ended both its
    futures before anything is cleaned up, and `_failures` has the error, so that a second fault
    hides nothing. A listener that raises is warned of: it cannot fail a save.
    """

    def __init__(
        self, thread: str, what: str, where: str, patience: timedelta, *, clock: Clock,
        nice: int = 0, on_event: Callable[[str, Json], object] | None,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._what, self._where, self._patience = what, where, patience
        self._on_event = on_event or (lambda _name, _details: None)
        self._saving: Saving[_K] | None = None
        self._saves_in: int | None = None
        self._worker = Worker(thread, nice=nice, clock=clock)
        self._seen: BaseException | None = None
        self._failures: list[BaseException] = []
        self._cancelled = 0
        self.stopping: Callable[[], object] = lambda: False
        """Whether the process is being stopped: calls that wait for a save then lift its limits."""

    @property
    def busy(self) -> bool:
        return self._saving is not None and not self._saving.ended.is_set()

    @property
    def committed_step(self) -> int | None:
        """The step of the last save, once it is committed, if it was a whole one."""
        saving = self._saving
        if saving is None or not saving.committed.done() or saving.committed.exception():
            return None
        return saving.step if saving.whole else None

    @property
    def saves_here(self) -> bool:
        """Whether a save is under way in this very thread, which tells listeners of it."""
        return self._saves_in == threading.get_ident()

    def check_caller(self) -> None:
        """Raises `StateError` where a call would wait for itself."""
        if self.saves_here:
            raise StateError(
                f"on_event is called by the thread that ends the {self._what}, and what was called "
                "there waits for that end: only note the event, and call it in the training loop"
            )

    def join(self, timeout: timedelta | None = None) -> bool:
        """Waits until no save is under way, however it ends; False if that takes longer. Refused
        in the thread that saves, as every call that waits so. What is waited for does not rest."""
        return self._join(timeout, unless_stopping=False)

    def join_unless_stopping(self) -> bool:
        """`join`, for one who has something else to do once the process is being stopped: whether
        no save is under way."""
        return self._join(None, unless_stopping=True)

    def _join(self, timeout: timedelta | None, *, unless_stopping: bool) -> bool:
        self.check_caller()
        saving = self._saving
        if saving is None:
            return True
        most = self._patience if timeout is None else timeout
        until = self._clock.monotonic() + most.total_seconds()
        with self._awaited():
            while not saving.ended.is_set():
                stopping = self._look()
                left = until - self._clock.monotonic()
                if (stopping and unless_stopping) or (timeout is not None and left <= 0):
                    return saving.ended.is_set()
                if left <= 0:
                    what = f"the {self._what} of step {saving.step} {self._where}"
                    raise overdue(what, self._patience)
                saving.ended.wait(min(max(timedelta(seconds=left), _MOMENT), _LOOK))
        return True

    def _look(self) -> bool:
        """Whether the process is being stopped, in which case nothing is limited any more."""
        stopping = bool(self.stopping())
        if stopping:
            self._lift_limits()
        return stopping

    def _awaited(self) -> AbstractContextManager[None]:
        """A save that is under way in the body is waited for."""
        return nullcontext()

    def _lift_limits(self) -> None:
        """Nothing of what limits saves holds any more."""

    def learn_outcome(self) -> None:
        """Returns when it is known what became of every save."""
        self.join()

    def wait(self) -> _K | None:
        """Waits for the save under way; returns what it made. Raises if it failed. A listener has
        what its event is about at once."""
        if self._saving is None:
            return None
        if not (self.saves_here and self._saving.committed.done()):
            self.join()
        self.check(least=1)
        return self._saving.committed.result()

    def hurry(self) -> None:
        """Writes as fast as it can from now on, which it does anyway unless it has a limit."""
        self._lift_limits()

    def leave(self, left: timedelta) -> None:
        """Ends what may follow the last save within the time that is `left`."""

    def check(self, least: int | None = None) -> None:
        """Raises what made saves fail, if there were enough of them, or `least`."""
        raise NotImplementedError

    def _start(self, saving: Saving[_K], write: Callable[[], None]) -> None:
        before, self._saving = self._saving, saving
        try:
            self._worker.do(partial(self._run, saving, write), partial(self._ended, saving))
        except Exception:  # no interrupt: the write may be under way
            self._saving = before
            raise

    def _run(self, saving: Saving[_K], write: Callable[[], None]) -> None:
        self._saves_in = threading.get_ident()
        try:
            write()
        except CancelledError as error:  # is no error of the thread, and holds on to no rows
            saving.committed.set_exception(error.with_traceback(None))

    def _ended(self, saving: Saving[_K], error: BaseException | None) -> None:
        try:
            error = error or saving.committed.exception(0)
            if error is not None:
                self._settle(saving, error)
        finally:
            self._saves_in = None
            saving.ended.set()

    def _settle(self, saving: Saving[_K], error: BaseException) -> None:
        if not saving.copied.done():
            saving.copied.set_exception(error)
        if not saving.committed.done():
            saving.committed.set_exception(error)
        elif saving.committed.exception() is None:
            warnings.warn(
                f"step {saving.step} is saved, but what follows a save failed: {error!r}",
                stacklevel=1,
            )
            return
        if isinstance(error, CancelledError):
            self._cancelled += 1
            self._tell("save_cancelled", {"step": saving.step, "cancelled": self._cancelled})
        else:
            if self._is_fault(error):
                self._failures.append(error)
            # A save that lost shards have ended is due again: its rows were not at fault.
            details = {"step": saving.step, "error": str(error), "due": not self._is_fault(error)}
            self._tell("save_failed", details)
        self._clean_up(saving, error)

    def _is_fault(self, error: BaseException) -> bool:
        """Whether `check` is to raise it: rows that were lost are no fault of the store."""
        raise NotImplementedError

    def _clean_up(self, saving: Saving[_K], error: BaseException) -> None:
        """After a save that failed or was given up."""
        raise NotImplementedError

    def _unseen(self) -> list[BaseException]:
        """What the cleaning up after a save met, once."""
        error, seen = self._worker.error, self._seen
        self._seen = error
        return [] if error is None or error is seen else [error]

    def _tell_saved(
        self, saving: Saving[_K], *, version: int | None, kind: str, nbytes: int,
        held_seconds: float = 0.0, core_seconds: float | None = None,
    ) -> None:  # fmt: skip
        """`core_seconds` are those of background threads, on servers too, from the cut to the
        commit; None where they are not counted."""
        details = {
            "version": version, "step": saving.step, "kind": kind, "nbytes": nbytes,
            "held_seconds": held_seconds, "whole": saving.whole,
            "pause_ms": saving.pause.total_seconds() * 1e3,
            "core_seconds": core_seconds,
            "commit_ms": (self._clock.monotonic() - saving.started) * 1e3,
        }  # fmt: skip
        self._tell("saved", details)

    def _tell(self, event: str, details: Json) -> None:
        try:
            self._on_event(event, details)
        except Exception as error:
            # A listener must not be able to fail a save, least of all a committed one.
            warnings.warn(f"on_event({event!r}) raised {error!r}", stacklevel=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What one version is made of, from the freeze to the commit."""

    saving: Saving[Manifest]
    frozen: Cut[Sequence[FrozenRows]]
    """By shard, with the state of their tables."""
    extras: Extras
    counters: Json
    since: str | None
    """What the rows have changed since; None for all rows."""
    choice: Choice
    spec: VersionSpec

    @property
    def codecs(self) -> dict[str, Codec]:
        return self.choice.codecs

    @property
    def in_grid(self) -> bool:
        return self.spec.layout == "grid"

    @property
    def advanced(self) -> list[str]:
        """The cursors that forget the rows once they are committed."""
        if self.since == PRIORITISED:
            return [PRIORITISED]
        return [SINCE_VERSION] if self.since else [SINCE_VERSION, SINCE_BASELINE]

    def layout(self, chain: Chain, version: VersionId, tables: Mapping[str, Json]) -> Json:
        """What the manifest of this `version` says of its rows, after those of `chain`."""
        since = self.since
        layout: Json = {
            "kind": "full" if since is None else since,
            "layout": self.spec.layout,
            "shards": len(self.frozen),
            "codecs": {plane: codec.to_dict() for plane, codec in self.codecs.items()},
            "why": self.choice.why,
            "lossy": (since is not None and chain.lossy) or loses(self.codecs, tables),
            "sizes": [*chain.sizes] if since else [],
            "baseline_nbytes": chain.nbytes if since else None,
            "tables": self.frozen.tables,
        }
        if self.in_grid:
            layout["grid"] = str(version if since is None else chain.baseline)
            layout["before"] = None if since is None else str(chain.newest)
        return layout

    @property
    def held_seconds(self) -> float:
        """How long pushes were held up by the copies of their rows, once it is closed. Servers hold
        theirs at the same time, shards of this process one after another."""
        shards = [sum(rows.held_seconds for rows in shard) for shard in self.frozen]
        parallel = all(isinstance(rows, WritesItself) for shard in self.frozen for rows in shard)
        return max(shards, default=0.0) if parallel else sum(shards)

    @property
    def core_seconds_elsewhere(self) -> float:
        """What servers have spent on writing their rows."""
        return sum(
            rows.core_seconds
            for shard in self.frozen
            for rows in shard
            if isinstance(rows, WritesItself)
        )

    def close(self, advanced: Sequence[str]) -> None:
        for rows in (rows for shard in self.frozen for rows in shard):
            rows.close(advanced)

    def took_place(self) -> None:
        """It was closed as a failed one, and its version is there."""
        for rows in (rows for shard in self.frozen for rows in shard):
            if isinstance(rows, WritesItself):
                rows.took_place()
