"""What is not installed is named, with the way to get it; nothing of the core needs it."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.errors import ConfigError
from emberkeep.planning.failures import fits
from emberkeep.report.plots import check_available, drawing
from tests.test_layers import modules

EXTRAS = {"matplotlib", "scipy", "ray", "tensorboard"}
# A package of its own, which is imported by those alone who ask for it.
OWN_PACKAGE = "server.ray"


def test_plots_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    check_available()
    find_spec = importlib.util.find_spec

    def without(name: str, *args: Any) -> Any:
        return None if name == "matplotlib" else find_spec(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    for asked in (check_available, drawing().__enter__):
        with pytest.raises(ConfigError, match=r"pip install 'emberkeep\[plots\]'"):
            asked()


def test_fits_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ConfigError, match=r"pip install 'emberkeep\[plan\]'"):
        fits(np.arange(1.0, 40.0))


def imported_at_once(path: Path) -> set[str]:
    """The packages that a module imports when it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.long
def test_extras_are_imported_where_they_are_used() -> None:
    found = {
        module: sorted(EXTRAS & imported_at_once(path))
        for module, path in modules().items()
        if not module.startswith(OWN_PACKAGE)
    }
    assert {module: extras for module, extras in found.items() if extras} == {}
