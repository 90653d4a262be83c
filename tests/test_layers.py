"""Imports go downward only: every module of the package is parsed and held against `LAYERS`.

Parsing instead of importing sees every import, also those inside functions and those for type
checkers only: what may not be imported at run time may not be named either.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "emberkeep"

# Top-down. A module may import modules of the layers below its own, and no others. An entry covers
# a module, or a package with everything in it. Entries on one line are siblings and know nothing
# of each other.
LAYERS: list[list[str]] = [
    ["cli", "testing"],
    ["report"],
    ["planning"],
    ["train"],
    ["models"],
    ["keeper"],
    ["nn"],
    ["data"],
    ["strategies"],
    ["cluster.ray"],
    ["serving"],
    ["recovery"],
    ["difference", "export", "follower", "inspection", "picture"],
    ["contents"],
    ["checkpoint"],
    ["loading"],
    ["cluster"],
    ["shard"],
    ["erasure"],
    ["repository"],
    ["tiered"],
    ["lookup"],
    ["slab"],
    ["snapshot"],
    ["slots"],
    ["tracking", "priority", "codecs", "blobs", "tables"],
    ["pool"],
    ["kernels"],
    ["config", "memory", "metrics", "overheads", "prometheus"],
    ["errors"],
]

# Heavy or replaceable libraries, and the only places that may name them.
CONFINED: dict[str, list[str]] = {
    "numba": ["kernels"],
    "llvmlite": ["kernels"],
    "ray": ["cluster.ray"],
    "torch": ["nn", "keeper", "models", "train"],
}

WHERE = "tests/test_layers.py"


def covers(entry: str, module: str) -> bool:
    return module == entry or module.startswith(entry + ".")


def layer_of(module: str) -> int | None:
    """The place of a module (its name without the package) in `LAYERS`; None where it has none."""
    for place, entries in enumerate(LAYERS):
        if any(covers(entry, module) for entry in entries):
            return place
    return None


def entry_of(module: str) -> str:
    return next(e for entries in LAYERS for e in entries if covers(e, module))


def imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of everything that `source` imports, at any depth.

    `from a import b` yields both `a.b` and `a`: b may be a module or a name in one.
    """
    inside = f"emberkeep.{module}".rstrip(".").split(".")
    if not is_package:
        inside = inside[:-1]
    for node in ast.walk(ast.parse(source)):
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
        return [
            f"emberkeep.{module} has no layer: add {module.split('.')[0]!r} to LAYERS in {WHERE}"
        ]
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
        if below is None or entry_of(target) == entry_of(module):
            continue  # a target without a layer is reported where it is parsed
        if below == own:
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


def test_imports_go_downward() -> None:
    known = modules()
    found = [
        line
        for module, path in known.items()
        for line in violations(
            path.read_text(encoding="utf-8"), module, set(known), path.name == "__init__.py"
        )
    ]
    assert not found, "\n".join(found)


def test_no_cycles_between_modules() -> None:
    """Inside one entry of `LAYERS` the order is free, a cycle is not."""
    known = modules()
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        if not module:
            continue
        graph[module] = set()
        for _, name in imports_of(
            path.read_text(encoding="utf-8"), module, path.name == "__init__.py"
        ):
            target = resolve(name, set(known)) if name.startswith("emberkeep.") else ""
            if target and target != module:
                graph[module].add(target)
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


KNOWN = {"train", "models", "nn", "tables", "codecs", "kernels", "kernels.rows", "errors", "cli"}


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("tables", "from emberkeep.nn import EmbeddingBags", "imports upward: emberkeep.nn"),
        ("tables", "from emberkeep import nn", "imports upward: emberkeep.nn"),
        ("tables", "import emberkeep.nn", "imports upward: emberkeep.nn"),
        ("tables", "from . import nn", "imports upward: emberkeep.nn"),
        ("tables", "from .nn import EmbeddingBags", "imports upward: emberkeep.nn"),
        ("kernels.rows", "from ..nn import EmbeddingBags", "imports upward: emberkeep.nn"),
        ("tables", "def late():\n    import emberkeep.nn", "line 2: imports upward"),
        (
            "tables",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from emberkeep import nn",
            "line 3: imports upward",
        ),
        ("tables", "from emberkeep.codecs import Float32", "sibling emberkeep.codecs"),
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
        ("kernels.rows", "from emberkeep.errors import IdError\nfrom . import rows\nimport numba"),
        ("", "from emberkeep.nn import EmbeddingBags"),
    ],
)
def test_a_downward_import_is_allowed(module: str, source: str) -> None:
    assert violations(source, module, KNOWN) == []


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
