"""`docs/architecture.md` is true: what it names exists, and its layers are those of the test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_layers import LAYERS, PACKAGE

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def spans(page: str) -> list[str]:
    """Everything between single backticks, outside of fenced blocks."""
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    return re.findall(r"`([^`]+)`", prose)


def is_named(span: str) -> bool:
    """Whether it is the name of a file, of a function in one, or of a package."""
    return re.fullmatch(r"[\w/]+(\.py(:[\w.]+)?|/)", span) is not None


def problem(span: str) -> str | None:
    """What is wrong with a name: the file, the package or the function that is not there."""
    path, _, function = span.partition(":")
    found = [base / path for base in (PACKAGE, ROOT) if (base / path).exists()]
    if not found:
        return f"{path} does not exist"
    if not function:
        return None
    body: list[ast.stmt] = ast.parse(found[0].read_text(encoding="utf-8")).body
    for name in function.split("."):
        inside = [node for node in body if name in defined(node)]
        if not inside:
            return f"{path} has no {function}"
        body = getattr(inside[0], "body", [])
    return None


def defined(node: ast.stmt) -> set[str]:
    """The names of a function, a class or a constant."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_what_the_page_names_exists() -> None:
    named = [span for span in spans(PAGE) if is_named(span)]
    assert len(named) > 80
    assert [found for span in named if (found := problem(span))] == []


def test_every_package_is_described() -> None:
    described = set(re.findall(r"^\| `(\w+)/` \|", PAGE, flags=re.MULTILINE))
    assert described == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_the_drawing_is_that_of_the_layer_test() -> None:
    exist = {path.stem for path in PACKAGE.iterdir()}
    drawn = re.findall(r"^ ?\d+ ((?: \w+| {2}\w+)+)  ", PAGE, flags=re.MULTILINE)
    assert [sorted(line.split()) for line in drawn] == [
        sorted(name for name in layer if name in exist) for layer in LAYERS
    ]


@pytest.mark.parametrize(
    ("span", "complaint"),
    [
        ("cluster/shard.py:Shard.check", None),
        ("cluster/outage.py:surviving", None),
        ("server/ray/", None),
        ("wire/protocol.py:PROTOCOL", None),
        ("kernels/recorded_updates.py:RECORDING", None),
        ("cluster/shards.py", "cluster/shards.py does not exist"),
        ("serving/", "serving/ does not exist"),
        ("cluster/shard.py:Shard.fly", "cluster/shard.py has no Shard.fly"),
    ],
)
def test_a_wrong_name_is_caught(span: str, complaint: str | None) -> None:
    assert is_named(span)
    assert problem(span) == complaint
