"""What --help says, and where the pages have each command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from emberkeep.cli import app
from tests.test_architecture import ROOT

PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_lines_are_broken_by_the_terminal_alone(name: str) -> None:
    assert not re.search(r"[^\n]\n[^\n]", COMMANDS[name].help)


def test_verify_says_that_it_checks_all_versions() -> None:
    (said,) = [option.help for option in COMMANDS["verify"].params if "--version" in option.opts]
    assert said == "A version or a tag; all by default."


def test_the_page_has_every_command_or_says_where_it_is() -> None:
    written = " ".join(re.findall(r"`([^`]+)`", PAGE) + re.findall(r"^emberkeep .*", PAGE, re.M))
    assert [n for n in COMMANDS if not re.search(rf"\b{n.split()[0]}\b", written)] == []
