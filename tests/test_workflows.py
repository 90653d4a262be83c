"""Workflows are such as GitHub accepts, and run what the project has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_steps_are_such_as_github_accepts(path: Path) -> None:
    """A list where a text is wanted makes the whole file invalid, and nothing is run."""
    for job in jobs(path).values():
        assert isinstance(job["runs-on"], str)
        assert 0 < job["timeout-minutes"] <= 360
    for step in steps(path):
        assert ("run" in step) != ("uses" in step), step
        for value in {**step.get("with", {}), **step.get("env", {})}.values():
            assert isinstance(value, str | int | bool), step


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_they_run_exists(path: Path) -> None:
    for step in steps(path):
        command = step.get("run", "")
        for target in re.findall(r"\bmake(?: \w+=\S+)* ([a-z]+)\b", command):
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
        for cached in step.get("with", {}).get("cache-dependency-path", "").split():
            assert (ROOT / cached).is_file(), cached


def test_tests_run_on_every_python_that_is_promised() -> None:
    ci, nightly = WORKFLOWS
    assert jobs(ci)["test"]["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    said = [step["run"] for step in steps(nightly) if "run" in step]
    assert any("hypothesis seed: $seed" in command for command in said)
    assert sum('--hypothesis-seed="$SEED"' in command for command in said) == 2


def test_every_hook_is_installed() -> None:
    """`pre-commit install` alone installs those of commits, unless the file names others."""
    found = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    installed = found.get("default_install_hook_types", ["pre-commit"])
    hooks = [hook for repository in found["repos"] for hook in repository["hooks"]]
    assert len(hooks) > 3
    for hook in hooks:
        assert set(hook.get("stages", found["default_stages"])) <= set(installed), hook["id"]
