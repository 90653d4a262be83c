"""Time comes from a clock that was handed in: every guarded module is parsed for other sources.

What reads the machine's clock, or waits on a lock without one, cannot run on virtual time: its
leases, graces and deadlines could be tested by waiting for them alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.sources import nodes, parsed

PACKAGE = Path(__file__).parent.parent / "src" / "emberkeep"

GUARDED = [
    "blobs", "checkpoint", "cluster", "erasure", "keeper", "repository", "server", "tiered", "wire",
]  # fmt: skip

# Functions that read or spend the machine's time, by the module or class that has them.
READS = {
    "time": {
        "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep",
    },
    "datetime.datetime": {"now", "utcnow", "today"},
    "datetime.date": {"today"},
}  # fmt: skip
WAITERS = {"Event", "Condition", "Barrier"}
WAITS = {"wait", "wait_for"}


def imported(tree: ast.Module) -> dict[str, str]:
    """What each name stands for that the module imports."""
    names = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """`time.sleep`, whatever the module calls it; empty for what is no plain name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        inner = full_name(node.value, names)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def last_name(node: ast.AST) -> str:
    """`changed` of `self._worker.changed`, of `changed` and of `changed()`."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_waiter(node: ast.AST | None, names: dict[str, str]) -> bool:
    """Whether an expression makes one of threading's objects, or an annotation names one."""
    return node is not None and any(
        full_name(inner, names).removeprefix("threading.") in WAITERS for inner in ast.walk(node)
    )


def bindings(tree: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Every variable, attribute, parameter and property, with what it is or is declared to be."""
    for node in nodes(tree) if isinstance(tree, ast.Module) else ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((last_name(target), node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign):
            yield last_name(node.target), node.annotation
            yield last_name(node.target), node.value
        elif isinstance(node, ast.arg):
            yield node.arg, node.annotation
        elif isinstance(node, ast.FunctionDef):
            yield node.name, node.returns


def waiters_of(trees: Iterable[ast.Module]) -> set[str]:
    """The names that hold an `Event`, a `Condition` or a `Barrier` of `threading`, made in place,
    declared, or taken from another such name."""
    found, aliases = set[str](), list[tuple[str, str]]()
    for tree in trees:
        names = imported(tree)
        for name, value in bindings(tree):
            if is_waiter(value, names):
                found.add(name)
            elif isinstance(value, ast.Name | ast.Attribute):
                aliases.append((name, last_name(value)))
    while more := {name for name, source in aliases if source in found} - found:
        found |= more
    return found - {""}


def violations(source: str, waiters: set[str]) -> Iterator[str]:
    """What a module does past the clock, one line each."""
    tree = parsed(source)
    names = imported(tree)
    for node in nodes(tree):
        if not isinstance(node, ast.Attribute | ast.Name):
            continue
        owner, _, called = full_name(node, names).rpartition(".")
        if called in READS.get(owner, ()):
            yield f"line {node.lineno}: {owner}.{called} is the machine's; use the clock handed in"
        elif isinstance(node, ast.Attribute) and node.attr in WAITS:
            waiter = last_name(node.value)
            if waiter in waiters or is_waiter(node.value, names):
                yield (
                    f"line {node.lineno}: {waiter}.{node.attr} waits on the machine's time; use "
                    "clock.wait_for, runtime.clock.Event or Worker.wait"
                )


def sources(*packages: str) -> dict[str, str]:
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text(encoding="utf-8")
        for package in packages
        for path in sorted((PACKAGE / package).rglob("*.py"))
    }


HANDED_ON = ("clock", "transport")
Takers = dict[str, dict[str, set[str]]]


def takers_of(modules: dict[str, str]) -> Takers:
    """For each of `HANDED_ON`: the functions and classes that take one, with their packages."""
    takers: Takers = {word: {} for word in HANDED_ON}
    for module, source in modules.items():
        package = f"emberkeep.{module}".rsplit(".", 1)[0]
        for node in parsed(source).body:
            inner = node.body if isinstance(node, ast.ClassDef) else []
            functions = {
                f"{node.name}.{method.name}".removesuffix(".__init__"): method
                for method in inner
                if isinstance(node, ast.ClassDef)
                and isinstance(method, ast.FunctionDef)
                and (method.name == "__init__" or method.decorator_list)
            }
            if isinstance(node, ast.FunctionDef):
                functions[node.name] = node
            for name, function in functions.items():
                for word in takes(function):
                    takers[word].setdefault(name, set()).add(package)
    return takers


def takes(function: ast.FunctionDef) -> list[str]:
    given = [arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)]
    return [word for word in HANDED_ON if word in given]


def has(node: ast.AST) -> set[str]:
    """What a function is handed, or an object keeps: `self.clock` or `self._clock`."""
    if isinstance(node, ast.FunctionDef):
        return set(takes(node))
    names = bindings(node) if isinstance(node, ast.ClassDef) else ()
    return {name.lstrip("_") for name, _ in names} & set(HANDED_ON)


def forgotten(source: str, module: str, takers: Takers) -> Iterator[str]:
    """Calls that could be handed the clock or transport of their object, and are not."""
    tree = parsed(source)
    package = f"emberkeep.{module}".rsplit(".", 1)[0]
    names = imported(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.setdefault(node.name, f"{package}.{node.name}")
    for owner in tree.body:
        for word in sorted(has(owner)):
            for call in ast.walk(owner):
                if not isinstance(call, ast.Call):
                    continue
                called = full_name(call.func, names)
                given = [*call.args, *(keyword.value for keyword in call.keywords)]
                last = called.rsplit(".", 2)[1:]  # a function or class, or a method of one
                packages = {
                    package
                    for name in (".".join(last), last[-1] if last else "")
                    for package in takers[word].get(name, ())
                }
                if not any(called.startswith(f"{package}.") for package in packages):
                    continue
                handed = any(
                    last_name(inner).lstrip("_") == word for arg in given for inner in ast.walk(arg)
                ) or any(keyword.arg in (None, word) for keyword in call.keywords)
                if not handed:
                    yield f"line {call.lineno}: {called} is not handed the {word}"


@cache
def found() -> dict[str, list[str]]:
    """Every guarded module that does something past the clock, and what."""
    guarded = sources(*GUARDED)
    # Of `Worker` and others below: `changed` is theirs.
    below = sources("runtime").values()
    waiters = waiters_of(parsed(source) for source in (*guarded.values(), *below))
    listed = {module: list(violations(source, waiters)) for module, source in guarded.items()}
    return {module: lines for module, lines in listed.items() if lines}


def test_time_comes_from_a_clock() -> None:
    assert [
        f"emberkeep.{module}, {line}" for module, lines in found().items() for line in lines
    ] == []


def test_a_clock_that_was_handed_in_is_handed_on() -> None:
    takers = takers_of(sources(""))
    listed = {
        module: list(forgotten(source, module, takers))
        for module, source in sources(*GUARDED).items()
    }
    assert [
        f"emberkeep.{module}, {line}" for module, lines in listed.items() for line in lines
    ] == []


TAKERS = """
class Taker:
    def __init__(self, clock=None): ...
    @classmethod
    def open(cls, clock=None): ...
def take(x, *, clock=None, transport=None): ...
"""


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("Taker()", 1),
        ("Taker.open()", 1),
        ("take(1, transport=2)", 1),
        ("Taker(self._clock)", 0),
        ("take(1, clock=self._clock)", 0),
        ("take(1, **self._over)", 0),
        ("Other()", 0),
    ],
)
def test_a_forgotten_clock_is_caught(body: str, count: int) -> None:
    source = f"""
from emberkeep.x.takers import Taker, take
class A:
    def __init__(self, clock):
        self._clock = clock
    def f(self):
        {body}
class Without:
    def f(self):
        Taker()
"""
    assert len(list(forgotten(source, "y.a", takers_of({"x.takers": TAKERS})))) == count


@pytest.mark.parametrize(
    "source",
    [
        "import time\nstart = time.monotonic()",
        "import time as t\nt.sleep(1)",
        "from time import perf_counter as now\nnow()",
        "import time\nDelays = dict(sleep=time.sleep)",
        "from datetime import datetime\ndatetime.now()",
        "import datetime\ndatetime.datetime.utcnow()",
        "import threading\nthreading.Event().wait(1)",
        "from threading import Event\nstop = Event()\nstop.wait()",
        "import threading\ndef f(stop: threading.Event | None):\n    stop.wait(3)",
        """
import threading
class A:
    def f(self):
        self.first = threading.Condition()
        self.second = self.first
        self.second.wait_for(bool)
""",
        """
import threading
from dataclasses import field
class A:
    done: object = field(default_factory=threading.Event)
def f(a):
    a.done.wait()
""",
        """
import threading
class A:
    @property
    def changed(self) -> threading.Condition: ...
def f(a):
    a.worker.changed.wait(1)
""",
    ],
)
def test_a_violation_is_caught(source: str) -> None:
    waiters = waiters_of([parsed(source)])
    assert len(list(violations(source, waiters))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.strftime('%Y', time.gmtime())",
        "from datetime import datetime\ndatetime.fromisoformat('2026-01-01')",
        "clock.sleep(clock.monotonic())\nself._clock.now()",
        "import threading\nchanged = threading.Condition()\nclock.wait_for(changed, bool, 1.0)",
        "from emberkeep.runtime.clock import Event\ndone = Event()\ndone.wait(patience)",
        "import threading\nlock = threading.Lock()\nself._worker.wait(bool, 'a', patience)",
    ],
)
def test_what_a_clock_gives_is_allowed(source: str) -> None:
    assert list(violations(source, waiters_of([parsed(source)]))) == []
