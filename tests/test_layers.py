"""Imports go downward only: every module of the package is parsed and held against `LAYERS`.

Parsing instead of importing sees every import, also those inside functions and those for type
checkers only: what may not be imported at run time may not be named either.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import emberkeep
from tests.sources import nodes, parsed

PACKAGE = Path(__file__).parent.parent / "src" / "emberkeep"

# Top-down, by the first part of a module's name. A module may import modules of the layers below
# its own, and no others: entries on one line are siblings and know nothing of each other.
LAYERS: list[list[str]] = [
    ["cli"],
    ["report", "testing"],  # `emberkeep simulate` runs what `testing` ships
    ["planning"],
    ["train", "integrations"],
    ["keeper"],
    ["strategies", "nn", "models", "server", "inference", "inspect"],
    ["checkpoint"],
    ["cluster"],
    ["erasure", "tiers", "repository"],
    ["rows", "codecs", "blobs", "wire", "data"],
    ["runtime", "tables"],
    ["kernels", "config", "errors", "_types"],
]

# These may be imported by everybody, also by their siblings, and import nothing themselves.
EVERYBODYS = {"errors", "_types"}

# Heavy or replaceable libraries, and the only places that may name them.
CONFINED: dict[str, list[str]] = {
    "numba": ["kernels"],
    "llvmlite": ["kernels"],
    "ray": ["server.ray"],
    # Files of torch are read and written by torch, imported only when one is met.
    "torch": ["nn", "keeper", "models", "train", "integrations", "inspect.torch_files"],
}

MOST_MODULES_AT_THE_TOP = 6
MOST_LINES = 600
# Modules that are longer, and how long they may be. Numbers go down, entries go away.
LONGER: dict[str, int] = {}

WHERE = "tests/test_layers.py"


def covers(entry: str, module: str) -> bool:
    return module == entry or module.startswith(entry + ".")


def top_of(module: str) -> str:
    return module.split(".")[0]


def layer_of(module: str) -> int | None:
    """The place of a module (its name without the package) in `LAYERS`; None where it has none."""
    for place, entries in enumerate(LAYERS):
        if top_of(module) in entries:
            return place
    return None


def imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of everything that `source` imports, at any depth.

    `from a import b` yields `a.b`: b may be a module or a name in one.
    """
    inside = f"emberkeep.{module}".rstrip(".").split(".")
    if not is_package:
        inside = inside[:-1]
    for node in nodes(parsed(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = inside[: len(inside) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def resolve(name: str, known: set[str]) -> str:
    """The module below `emberkeep` that `name` is or lives in; empty for the package itself."""
    target = name.partition(".")[2]
    while target and target not in known:
        target = target.rpartition(".")[0]
    return target


def violations(source: str, module: str, known: set[str], is_package: bool = False) -> list[str]:
    """What is wrong with the imports of one module, one line each.

    `module` is the name below `emberkeep`, empty for the package itself; `known` holds the names of
    all modules, to tell `from package import module` from `from module import name`.
    """
    if not module:
        return []  # re-exports the public names of every layer
    own = layer_of(module)
    if own is None:
        return [f"emberkeep.{module} has no layer: add {top_of(module)!r} to LAYERS in {WHERE}"]
    found = []
    for line, name in imports_of(source, module, is_package):
        at = f"emberkeep.{module}, line {line}:"
        top = name.split(".")[0]
        if name == "emberkeep.__version__":
            continue
        if top != "emberkeep":
            allowed = CONFINED.get(top)
            if allowed is not None and not any(covers(entry, module) for entry in allowed):
                found.append(f"{at} {top} may be imported in {', '.join(allowed)} alone")
            continue
        target = resolve(name, known)
        if not target:
            found.append(f"{at} imports from the package itself; name the module instead")
            continue
        below = layer_of(target)
        if below is None or top_of(target) == top_of(module):
            continue  # a target without a layer is reported where it is parsed
        if top_of(module) in EVERYBODYS:
            found.append(f"{at} is everybody's, and imports emberkeep.{target}")
        elif below == own and top_of(target) not in EVERYBODYS:
            found.append(f"{at} imports its sibling emberkeep.{target}")
        elif below < own:
            found.append(f"{at} imports upward: emberkeep.{target}")
    return found


def modules() -> dict[str, Path]:
    """Every module of the package by its name below `emberkeep`."""
    named = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


@cache
def import_graph() -> dict[str, set[str]]:
    """Every module but the package itself, with the modules that it imports."""
    known = modules()
    names = set(known)
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        if not module:
            continue
        graph[module] = set()
        for _, name in imports_of(
            path.read_text(encoding="utf-8"), module, path.name == "__init__.py"
        ):
            target = resolve(name, names) if name.startswith("emberkeep.") else ""
            if target and target != module:
                graph[module].add(target)
    return graph


def test_imports_go_downward() -> None:
    known = modules()
    names = set(known)
    found = [
        line
        for module, path in known.items()
        for line in violations(
            path.read_text(encoding="utf-8"), module, names, path.name == "__init__.py"
        )
    ]
    assert not found, "\n".join(found)


def test_no_cycles_between_modules() -> None:
    """Inside one package the order is free, a cycle is not."""
    assert find_cycle(import_graph()) == []


def test_no_cycles_between_packages() -> None:
    """Packages and their sub-packages; a package re-exports names of its own sub-packages."""
    known = modules()
    packages = {module for module, path in known.items() if path.name == "__init__.py"}

    def package_of(module: str) -> str:
        return module if module in packages else module.rpartition(".")[0]

    graph: dict[str, set[str]] = {}
    for module, targets in import_graph().items():
        if module not in packages:
            own = package_of(module)
            graph.setdefault(own or module, set()).update(
                package_of(target) or target for target in targets if package_of(target) != own
            )
    assert find_cycle(graph) == []


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """A path that ends where it begins, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for after in sorted(graph.get(node, ())):
            if cycle := visit(after, [*path, node]):
                return cycle
        done.add(node)
        return []

    for start in sorted(graph):
        if cycle := visit(start, []):
            return cycle
    return []


def test_a_file_name_occurs_once() -> None:
    """A file's name leads to one file; commands of the CLI are named by users."""
    names = Counter(
        path.stem
        for module, path in modules().items()
        if path.name != "__init__.py" and top_of(module) != "cli"
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_package_takes_the_name_of_something_public() -> None:
    """A package becomes an attribute of `emberkeep` when it is first imported: one called `parity`
    would stand where `ek.parity` was, as soon as anything needs it."""
    public = set(emberkeep.__all__)
    assert not public & {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}


def test_few_modules_at_the_top() -> None:
    at_the_top = [path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]
    assert len(at_the_top) <= MOST_MODULES_AT_THE_TOP, at_the_top


def test_modules_are_short() -> None:
    lines = {
        module: len(path.read_text(encoding="utf-8").splitlines())
        for module, path in modules().items()
    }
    found = [
        f"emberkeep.{module} has {count} lines, {LONGER.get(module, MOST_LINES)} are allowed"
        for module, count in lines.items()
        if count > LONGER.get(module, MOST_LINES)
    ]
    assert not found, "\n".join(found)
    shorter = [module for module in LONGER if lines.get(module, 0) <= MOST_LINES]
    assert not shorter, f"no longer too long, take them out of LONGER in {WHERE}: {shorter}"


KNOWN = {
    "train", "models", "nn", "tables", "data", "rows", "kernels", "kernels.heads", "errors", "cli",
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("tables", "from emberkeep.nn import EmbeddingBags", "imports upward: emberkeep.nn"),
        ("tables", "from emberkeep import nn", "imports upward: emberkeep.nn"),
        ("tables", "import emberkeep.nn", "imports upward: emberkeep.nn"),
        ("tables", "from . import nn", "imports upward: emberkeep.nn"),
        ("tables", "from .nn import EmbeddingBags", "imports upward: emberkeep.nn"),
        ("kernels.heads", "from ..nn import EmbeddingBags", "imports upward: emberkeep.nn"),
        ("tables", "def late():\n    import emberkeep.nn", "line 2: imports upward"),
        (
            "tables",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from emberkeep import nn",
            "line 3: imports upward",
        ),
        ("blobs", "from emberkeep.data import Reader", "sibling emberkeep.data"),
        ("errors", "from emberkeep.kernels import heads", "is everybody's, and imports"),
        ("tables", "import torch.nn.functional", "torch may be imported in"),
        ("nn", "from numba import njit", "numba may be imported in kernels alone"),
        ("nn", "from emberkeep import Table", "from the package itself"),
        ("novelty", "import os", "add 'novelty' to LAYERS in tests/test_layers.py"),
    ],
)
def test_a_violation_is_caught(module: str, source: str, complaint: str) -> None:
    found = violations(source, module, KNOWN)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("train", "from emberkeep.nn import EmbeddingBags\nimport torch\nimport tomllib"),
        (
            "kernels.heads",
            "from emberkeep.errors import IdError\nfrom . import heads\nimport numba",
        ),
        ("", "from emberkeep.nn import EmbeddingBags"),
    ],
)
def test_a_downward_import_is_allowed(module: str, source: str) -> None:
    assert violations(source, module, KNOWN) == []


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
