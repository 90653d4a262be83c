"""One class runs background threads: every module is parsed for threads of its own.

A thread that nobody supervises dies of an error that nobody has listed, and leaves who waits for it
waiting.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests.sources import nodes, parsed
from tests.test_clocks import full_name, imported, sources

MAKERS = {
    "threading.Thread", "threading.Timer", "_thread.start_new_thread",
    "concurrent.futures.ThreadPoolExecutor", "concurrent.futures.thread.ThreadPoolExecutor",
    "multiprocessing.pool.ThreadPool",
}  # fmt: skip

# Modules that start threads themselves, and why. Entries go away, none is added.
ALLOWED = {
    "testing.contracts": "callers that race each other are what is tested",
    "testing.interleave": "the scheduler of the interleavings: its threads stand for processes",
    "testing.simulation.scheduler": "the scheduler of simulations: its threads carry all others",
}


def violations(source: str) -> Iterator[str]:
    tree = parsed(source)
    names = imported(tree)
    for node in nodes(tree):
        makers: list[ast.expr] = []
        if isinstance(node, ast.Call):
            makers = [node.func]
        elif isinstance(node, ast.ClassDef):
            makers = node.bases
        for maker in makers:
            if (made := full_name(maker, names)) in MAKERS:
                yield f"line {maker.lineno}: {made}; use Worker or Crew of emberkeep.runtime"


@cache
def found() -> dict[str, list[str]]:
    listed = {
        module: list(violations(source))
        for module, source in sources("").items()
        if not module.startswith("runtime.")
    }
    return {module: lines for module, lines in listed.items() if lines}


def test_threads_are_supervised() -> None:
    assert [
        f"emberkeep.{module}, {line}"
        for module, lines in found().items()
        if module not in ALLOWED
        for line in lines
    ] == []


def test_the_list_of_exceptions_shrinks() -> None:
    assert set(ALLOWED) <= set(found())


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nthreading.Thread(target=print).start()",
        "from threading import Thread as T\nclass A(T): ...",
        "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(3)",
        "import concurrent.futures as f\nf.ThreadPoolExecutor(3)",
    ],
)
def test_a_violation_is_caught(source: str) -> None:
    assert len(list(violations(source))) == 1


LOCKS = {f"threading.{name}" for name in ("Lock", "RLock", "Condition", "Event", "Semaphore")}


def locks_by_default(source: str) -> list[str]:
    """A default of a dataclass is what `threading` had when the class was made: a lock that is real
    in a simulation, too, where a run then stands still."""
    tree = parsed(source)
    names = imported(tree)
    factories = [
        node.value
        for node in nodes(tree)
        if isinstance(node, ast.keyword) and node.arg == "default_factory"
    ]
    return [
        f"line {made.lineno}: make it in __init__"
        for made in factories
        if full_name(made, names) in LOCKS
    ]


def test_locks_are_made_when_an_object_is() -> None:
    assert [
        f"emberkeep.{module}, {line}"
        for module, source in sources("").items()
        if not module.startswith("testing.")
        for line in locks_by_default(source)
    ] == []
    assert len(locks_by_default("import threading\nfield(default_factory=threading.Lock)")) == 1
