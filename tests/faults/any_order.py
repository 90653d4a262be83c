"""Calls of a store that are made at once, in an order that a seed chooses."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from emberkeep.blobs import BlobStore
from emberkeep.testing.stores import WrapperStore


class AnyOrderStore(WrapperStore):
    """A store like one behind a network: calls that do not depend on each other are under way at
    once, and which of them takes effect first is chance.

    They are made by the thread that waits for one of them, so a run is a function of its seed. What
    nobody has waited for may be made long after, or never, as by a process that has ended."""

    def __init__(self, inner: BlobStore, seed: int) -> None:
        super().__init__(inner)
        self._order = _AnyOrder(seed)

    @property
    def calls_at_once(self) -> Executor:
        return self._order


class _AnyOrder(Executor):
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._under_way: list[_Later] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        later = _Later(self, lambda: call(*args, **kwargs))
        self._under_way.append(later)
        while self._under_way and self._random.random() < 0.2:
            self.make_one()
        return later

    def make_one(self) -> None:
        """One of those that are under way takes effect."""
        chosen = self._random.randrange(len(self._under_way))
        self._under_way.pop(chosen).make()


class _Later(Future[Any]):
    def __init__(self, order: _AnyOrder, call: Callable[[], Any]) -> None:
        super().__init__()
        self._order = order
        self._call = call

    def make(self) -> None:
        try:
            self.set_result(self._call())
        except BaseException as error:
            self.set_exception(error)

    def cancel(self) -> bool:
        """It is under way, whether its effect is seen or not."""
        return False

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self._order.make_one()
        return super().result(timeout)
