"""Errors in the middle of a call: a simulated server has no memory for a moment.

Where it strikes is a call of a method that takes memory, right before the method or right after
it: of a write, so that rows have a part of it, or of what tells others about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from emberkeep.erasure.host import ParityHost
from emberkeep.erasure.member import ParityMember
from emberkeep.rows.slab import Slab
from emberkeep.server.pushes import Ledger
from emberkeep.testing.simulation.scheduler import Process, current_task

_METHODS: tuple[tuple[type[Any], str], ...] = (
    (Slab, "check_push"),
    (Slab, "push"),
    (Slab, "_prepare"),
    (Slab, "install"),
    (Slab, "pull"),
    (Slab, "read"),
    (ParityMember, "record"),
    (ParityHost, "_sums_of"),
    (ParityHost, "_note"),
    (ParityHost, "begin"),
    (ParityHost, "syndromes"),
    (Ledger, "note"),
)


@dataclass(slots=True)
class Shortage:
    """The n-th of these calls of a process fails, once."""

    calls: int
    after: bool
    """Whether it has done its work by then."""

    def strikes(self) -> bool:
        self.calls -= 1
        return self.calls == 0


@contextmanager
def short_of_memory(
    short: dict[Process, Shortage], tell: Callable[[str], object]
) -> Iterator[None]:
    """As long as the body lasts, processes are short of memory as the mapping says."""
    before = [getattr(owner, name) for owner, name in _METHODS]
    for (owner, name), real in zip(_METHODS, before, strict=True):
        setattr(owner, name, _failing(f"{owner.__name__}.{name}", real, short, tell))
    try:
        yield
    finally:
        for (owner, name), real in zip(_METHODS, before, strict=True):
            setattr(owner, name, real)


def _failing(
    what: str, real: Callable[..., Any], short: dict[Process, Shortage],
    tell: Callable[[str], object],
) -> Callable[..., Any]:  # fmt: skip
    def call(*args: Any, **named: Any) -> Any:
        task = current_task() if short else None
        shortage = None if task is None else short.get(task.process)
        if task is None or shortage is None or not shortage.strikes():
            return real(*args, **named)
        del short[task.process]
        tell(f"{task.process} has no memory {'after' if shortage.after else 'for'} {what}")
        if shortage.after:
            real(*args, **named)
        raise MemoryError(f"injected: {what}")

    return call
