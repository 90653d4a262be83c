"""Iterating in a thread of its own, for work that must not hold up its caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TypeVar

from emberkeep.runtime.background import Worker
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.crew import Crew

_T = TypeVar("_T")

# An item may be gigabytes that come from far away.
_PATIENCE = timedelta(hours=1)


def ahead_of(
    items: Iterable[_T], depth: int = 4, nice: int = 0, *, clock: Clock = SYSTEM_CLOCK
) -> Generator[_T, None, None]:
    with Ahead(items, nice, depth, clock=clock) as running:
        yield from running


def in_order(
    calls: Iterable[tuple[int, Callable[[], _T]]], *, depth: int, nbytes: int, name: str,
    clock: Clock = SYSTEM_CLOCK,
) -> Generator[_T, None, None]:  # fmt: skip
    """What calls return, in their order, while later ones are under way: each stands with the bytes
    that it takes. Up to `depth` run at once, in threads of that name; together with what was not
    asked for yet, and what was asked for last, they take `nbytes` at most, or one call does.

    An error comes out where its call stands. To leave the iteration is to wait for what runs.
    """
    if depth == 1:
        for _, call in calls:
            yield call()
        return
    with Crew(depth, name, clock=clock) as crew:
        under_way: deque[tuple[int, Future[_T]]] = deque()
        waiting = iter(calls)
        following = next(waiting, None)
        taken = 0
        while following is not None or under_way:
            while following is not None and (
                not under_way or (taken + following[0] <= nbytes and len(under_way) < 2 * depth)
            ):
                taken += following[0]
                under_way.append((following[0], crew.submit(following[1])))
                following = next(waiting, None)
            size, result = under_way.popleft()
            yield result.result()
            del result
            taken -= size


class Ahead(Iterator[_T]):
    """Iterates in a thread of its own, a few items ahead; errors come out where they belong."""

    def __init__(
        self, items: Iterable[_T], nice: int = 0, depth: int = 4, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._clock = clock
        self._ready: deque[_T] = deque()
        self._depth = depth
        self._error: BaseException | None = None
        self._given_up = self._over = False
        self._worker = Worker("emberkeep-ahead", nice=nice, clock=clock)
        self._worker.do(partial(self._fill, items), self._ended)

    def _fill(self, items: Iterable[_T]) -> None:
        for item in items:
            with self._worker.changed:
                self._ready.append(item)
                del item
                self._worker.changed.notify_all()
                # Without a bound, as the caller may rest: leaving its block ends this.
                self._clock.wait_for(
                    self._worker.changed,
                    lambda: self._given_up or len(self._ready) < self._depth,
                    None,
                )
                if self._given_up:
                    return

    def _ended(self, error: BaseException | None) -> None:
        with self._worker.changed:
            self._error, self._over = error, True
            self._worker.changed.notify_all()

    def __next__(self) -> _T:
        with self._worker.changed:
            self._worker.wait(
                lambda: bool(self._ready) or self._over, "the next item read ahead", _PATIENCE
            )
            if not self._ready:
                raise self._error or StopIteration
            self._worker.changed.notify_all()
            return self._ready.popleft()

    def __enter__(self) -> Ahead[_T]:
        return self

    def __exit__(self, *_: object) -> None:
        with self._worker.changed:
            self._given_up = True
            self._ready.clear()
            self._worker.changed.notify_all()
        self._worker.close(_PATIENCE)
