"""The resumable reader: batches in one global order, with a place that can be saved.

Guarantees:

- One step of `world` workers takes `world · batch_size` consecutive samples, worker r the r-th
  slice: together they see what one worker with the larger batch sees.
- The state counts the samples of batches that `next` returned, over all workers, and nothing that
  was only prefetched. It resumes with another worker count and another batch size.
- A budget is exact: after `hand_out(n)` come n batches and then `StopIteration`, and nothing beyond
  them is read ahead. The next budget goes on with the next batch.
- What is lent is as exact, but its end is no end of the data: after `lend(n)` come at most n
  batches and then `StateError`, until it is renewed.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from emberkeep.data.sources import Batch, Cursor, Mark, Source, Window, whole_number
from emberkeep.errors import ConfigError, StateError
from emberkeep.runtime.background import Worker

STATE_VERSION = 1
# A batch is megabytes; one that takes longer hangs.
_PATIENCE = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the next global batch begins."""

    samples: int
    mark: Mark | None


class Reader:
    """Turns a source into batches, read ahead in a background thread.

    Belongs to one thread; a forked child may go on with its copy, which then reads on its own. An
    error of the background thread is raised by the `next` that would have returned the batch;
    nothing is counted, and the following `next` tries again from the same place.

    `limit` ends the data after so many samples of the source. The last batch may be smaller
    (on the later workers even empty, as all hand out the same number), or is left out
    with `drop_last`.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        prefetch: int = 2,
        limit: int | None = None,
        drop_last: bool = False,
    ) -> None:
        batch_size, rank = whole_number("batch_size", batch_size), whole_number("rank", rank)
        world, prefetch = whole_number("world", world), whole_number("prefetch", prefetch)
        limit = None if limit is None else whole_number("limit", limit)
        if batch_size < 1 or world < 1 or not 0 <= rank < world or prefetch < 0:
            raise ConfigError(
                "a reader needs batch_size >= 1, 0 <= rank < world and prefetch >= 0, not "
                f"batch_size={batch_size}, rank={rank}, world={world}, prefetch={prefetch}"
            )
        if limit is not None and limit < 0:
            raise ConfigError(f"limit must be 0 or more samples, not {limit}")
        self._fingerprint = source.fingerprint()
        self._source = source if limit is None else Window(source=source, stop=limit)
        self._limit = limit
        self._slice = _Slice(batch_size=batch_size, rank=rank, world=world, drop_last=drop_last)
        self._prefetch = prefetch
        self._place = _Place(samples=0, mark=None)
        self._budget: int | None = None
        self._lent: int | None = None
        self._unless_renewed = ""
        self._finished = False
        self._stream: _Feed | _Prefetcher | None = None
        self._stop: weakref.finalize[..., Reader] | None = None
        self._pid = os.getpid()

    @property
    def samples(self) -> int:
        """Samples handed out so far, over all workers, counted from the start of the source."""
        return self._place.samples

    @property
    def malformed(self) -> int:
        """Malformed lines passed over on the way to the end of the last batch handed out."""
        return (self._place.mark or {}).get("malformed", 0)

    @property
    def finished(self) -> bool:
        """Whether `next` has met the end of the data, as opposed to the end of a budget."""
        return self._finished

    def hand_out(self, batches: int | None) -> Reader:
        """Sets the budget: exactly so many batches until iteration stops; None lifts it.

        Replaces what is left of an earlier budget. Returns the reader, to be iterated.
        """
        batches = None if batches is None else whole_number("batches", batches)
        if batches is not None and batches < 0:
            raise ConfigError(f"a budget is 0 or more batches, not {batches}")
        self._budget = batches
        self._allow()
        return self

    def lend(self, batches: int | None, unless_renewed: str = "") -> None:
        """So many batches may be taken until this is called again; None takes the limit away.

        For a caller that acts between batches, as a keeper does: a loop that takes more has
        forgotten it, and would end early without a word if that were an end. It gets
        `StateError` with the message `unless_renewed`. The budget of `hand_out` is another and
        stays as it is.
        """
        batches = None if batches is None else whole_number("batches", batches)
        if batches is not None and batches < 0:
            raise ConfigError(f"0 or more batches can be lent, not {batches}")
        self._lent, self._unless_renewed = batches, unless_renewed
        self._allow()

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Batch:
        if self._budget == 0 or self._finished:
            raise StopIteration
        if self._lent == 0:
            raise StateError(self._unless_renewed)
        stream = self._own_stream() or self._start()
        self._spend(1)
        try:
            item = stream.take(self._allowance())
        except BaseException:
            self._spend(-1)
            self._drop_stream()
            raise
        if item is None:
            self._finished = True
            self._drop_stream()
            raise StopIteration
        batch, self._place = item
        return batch

    def peek(self) -> Batch | None:
        """The batch that `next` will hand out, if it lies ready; it does not count as handed out.

        None where it would have to be waited for, or neither the budget nor what was lent covers
        it.
        """
        stream = self._own_stream()
        covered = self._budget != 0 and self._lent != 0
        return stream.peek() if isinstance(stream, _Prefetcher) and covered else None

    @property
    def samples_per_step(self) -> int:
        """Those that all workers take together."""
        return self._slice.batch_size * self._slice.world

    def state_dict(self) -> dict[str, Any]:
        """A small dict of plain values; the same on every worker after the same step."""
        return {
            "version": STATE_VERSION,
            "source": self._fingerprint,
            "samples": self._place.samples,
            "mark": None if self._place.mark is None else dict(self._place.mark),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after the last batch that the saved reader handed out.

        The budget stays as it is. A state that does not fit is refused and changes nothing.
        """
        place = self._placed(state_dict)
        self._drop_stream()
        self._place = place
        self._finished = False

    def close(self) -> None:
        """Stops the background thread. The state stays readable; `next` would start it again."""
        self._drop_stream(wait=True)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _placed(self, state: dict[str, Any]) -> _Place:
        version = state.get("version")
        if not isinstance(version, int) or version < 1:
            raise StateError("this is no state of a reader: it has no version")
        if version > STATE_VERSION:
            raise StateError(
                f"the reader state has version {version}, this release reads up to "
                f"{STATE_VERSION}: upgrade emberkeep"
            )
        if state.get("source") != self._fingerprint:
            raise StateError(
                f"the reader state belongs to {state.get('source')}, this reader reads "
                f"{self._fingerprint}: resume with the same files in the same order, the same "
                "seed and the same transforms"
            )
        samples, mark = state.get("samples"), state.get("mark")
        if not isinstance(samples, int) or samples < 0:
            raise StateError(f"the reader state counts {samples!r} samples: it is damaged")
        if self._limit is not None and samples > self._limit:
            raise StateError(
                f"the reader state has passed {samples} samples, beyond this reader's limit of "
                f"{self._limit}: raise the limit"
            )
        if mark is not None and not (
            isinstance(mark, dict) and all(isinstance(value, int) for value in mark.values())
        ):
            raise StateError(f"the reader state has the mark {mark!r}: it is damaged")
        return _Place(samples=samples, mark=None if mark is None else dict(mark))

    def _allowance(self) -> int:
        """How many batches may lie ready: none that may not be taken."""
        limits = (self._budget, self._lent)
        return min([self._prefetch, *(limit for limit in limits if limit is not None)])

    def _allow(self) -> None:
        stream = self._own_stream()
        if isinstance(stream, _Prefetcher):
            stream.allow(self._allowance())

    def _spend(self, batches: int) -> None:
        if self._budget is not None:
            self._budget -= batches
        if self._lent is not None:
            self._lent -= batches

    def _own_stream(self) -> _Feed | _Prefetcher | None:
        if self._pid != os.getpid():
            # The thread stayed in the parent, and the parent's files share their offsets with
            # ours: neither may be used here.
            self._pid = os.getpid()
            self._stream = None
        return self._stream

    def _start(self) -> _Feed | _Prefetcher:
        feed = _Feed(self._source, self._place, self._slice)
        if self._prefetch == 0:
            self._stream = feed
            return feed
        prefetcher = _Prefetcher(feed, self._allowance())
        # The thread knows the prefetcher but not the reader, so a forgotten reader is collected
        # and takes its thread with it.
        self._stop = weakref.finalize(self, prefetcher.stop)
        self._stream = prefetcher
        return prefetcher

    def _drop_stream(self, *, wait: bool = False) -> None:
        stream = self._own_stream()
        self._stream = None
        if self._stop is not None:
            self._stop.detach()
            self._stop = None
        if isinstance(stream, _Prefetcher):
            stream.stop()
            if wait:
                stream.join()
        elif stream is not None:
            stream.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """Which part of each global batch a worker takes."""

    batch_size: int
    rank: int
    world: int
    drop_last: bool


_Item = tuple[Batch, _Place]


class _Feed:
    """The batches of one worker from one place on, read when asked for."""

    def __init__(self, source: Source, place: _Place, part: _Slice) -> None:
        self._source = source
        self._place = place
        self._part = part
        self._cursor: Cursor | None = None

    def take(self, _allowance: int = 0) -> _Item | None:
        """The next batch and the place behind its global batch, or None at the end."""
        if self._cursor is None:
            self._cursor = self._source.open(self._place.samples, self._place.mark)
        part, cursor = self._part, self._cursor
        whole = part.batch_size * part.world
        before = part.batch_size * part.rank
        passed = cursor.skip(before) if before else 0
        batch = cursor.read(part.batch_size if passed == before else 0)
        passed += len(batch)
        after = whole - before - part.batch_size
        if after and len(batch) == part.batch_size:
            passed += cursor.skip(after)
        if passed == 0 or (part.drop_last and passed < whole):
            return None
        self._place = _Place(samples=self._place.samples + passed, mark=cursor.mark())
        return batch, self._place

    def close(self) -> None:
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None


class _Prefetcher:
    """A thread that keeps up to `allowance` batches ready, in order."""

    def __init__(self, feed: _Feed, allowance: int) -> None:
        self._feed = feed
        self._allowance = allowance
        self._ready: deque[_Item | None] = deque()
        self._stopped = False
        self._pid = os.getpid()
        # No bound method: the thread keeps the feed until it has closed it.
        self._worker = Worker("emberkeep-reader", partial(_Prefetcher._read, self))
        # A reentrant lock: a collected reader may call `stop` from within any of these methods.
        self._changed = self._worker.changed
        self._worker.wake()

    def allow(self, allowance: int) -> None:
        with self._changed:
            self._allowance = allowance
        self._worker.wake()

    def take(self, allowance: int) -> _Item | None:
        """The next batch, waited for; from then on up to `allowance` may lie ready."""
        with self._changed:
            self._worker.wait(
                lambda: bool(self._ready) or self._worker.stopped, "the next batch", _PATIENCE
            )
            if not self._ready:
                raise self._worker.error or AssertionError
            item = self._ready.popleft()
            self._allowance = allowance
        self._worker.wake()
        return item

    def peek(self) -> Batch | None:
        with self._changed:
            item = self._ready[0] if self._ready else None
        return None if item is None else item[0]

    def stop(self) -> None:
        """Asks the thread to end and drops what is ready; in a forked child there is none."""
        if self._pid == os.getpid():
            with self._changed:
                self._stopped = True
                self._ready.clear()
            self._worker.wake()

    def join(self) -> None:
        self._worker.join(_PATIENCE)

    def _read(self) -> float | None:
        """Reads the next batch if there is room for it; training may rest as long as it likes."""
        with self._changed:
            over = self._stopped
            if not over and len(self._ready) >= self._allowance:
                return None
        try:
            item = None if over else self._feed.take()
        except BaseException:
            self._feed.close()
            raise  # ends the thread; comes out where the batch is taken
        if item is None:
            self._feed.close()
            self._worker.stop()
        with self._changed:
            if not self._stopped:
                self._ready.append(item)
            self._changed.notify_all()
        return 0
