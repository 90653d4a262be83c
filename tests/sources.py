"""Sources, parsed once for all tests of a process that look at them."""

from __future__ import annotations

import ast
from functools import cache


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """`ast.walk`, walked once."""
    return tuple(ast.walk(tree))
