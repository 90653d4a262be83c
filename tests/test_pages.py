"""Pages for readers are true: links lead somewhere, and what CONTRIBUTING.md names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import emberkeep
from emberkeep.cli import app
from tests.test_architecture import is_named, problem, spans

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")],
    key=lambda page: page.relative_to(ROOT).as_posix(),
)
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

# [text](target), ![text](target), <img src="target">; an address of the web is not looked at.
_LINK = re.compile(r'(?:\]\(|(?:src|href|srcset)=")([^)\s"]+)')
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def prose(page: str) -> str:
    """Without code, in which brackets and hashes mean other things."""
    return re.sub(
        r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    )


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    for heading in _HEADING.findall(text):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


def broken(page: Path, text: str) -> Iterator[str]:
    """Links of a page that lead nowhere."""
    for target in _LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or not file.is_relative_to(ROOT):
            yield f"{page.relative_to(ROOT)}: {target} does not exist"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8") if path else text):
            yield f"{page.relative_to(ROOT)}: {target} has no such heading"


def test_links_lead_somewhere() -> None:
    assert len(PAGES) > 30
    assert [
        found for page in PAGES for found in broken(page, page.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a](docs/tables.md) ![b](docs/pictures/layers.svg) [c](https://b.c/d)", None),
        ("[a](docs/tier.md#the-file) [b](#three-lines)\n## Three lines", None),
        ("`[a](b)`\n```\n[a](b)\n```", None),
        ("[a](docs/table.md)", "docs/table.md does not exist"),
        ("[a](../elsewhere.md)", "../elsewhere.md does not exist"),
        ("[a](docs/tier.md#the-fire)", "docs/tier.md#the-fire has no such heading"),
        ('<img src="docs/none.svg">', "docs/none.svg does not exist"),
    ],
)
def test_a_broken_link_is_caught(text: str, complaint: str | None) -> None:
    found = list(broken(ROOT / "README.md", text))
    assert found == ([] if complaint is None else [f"README.md: {complaint}"])


def test_what_contributing_names_exists() -> None:
    named = [span for span in spans(CONTRIBUTING) if is_named(span)]
    assert len(named) > 50
    assert [found for span in named if (found := problem(span))] == []
    other = re.findall(r"`([\w./-]+\.(?:md|toml|txt|yml))`", CONTRIBUTING)
    assert [name for name in other if not (ROOT / name).exists()] == []


def test_every_suite_has_a_place_in_contributing() -> None:
    suites = {
        name
        for folder in ("tests/contracts", "src/emberkeep/testing")
        for path in (ROOT / folder).glob("*.py")
        for name in re.findall(r"^class (\w+Contract)\b", path.read_text(), flags=re.MULTILINE)
    }
    assert len(suites) >= 6
    assert [suite for suite in suites if suite not in CONTRIBUTING] == []


def test_every_page_of_the_documentation_is_listed() -> None:
    """In docs/index.md, and in the navigation of the site."""
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")}
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    own = pages - {"index.md"} - {page for page in pages if page.startswith("api/")}
    assert sorted(page for page in own if f"({page})" not in index) == []
    assert sorted(page for page in pages if f": {page}\n" not in site) == []


def test_every_public_name_stands_in_the_reference() -> None:
    """In the table of docs/api/index.md, and with its docstring on one of the pages."""
    public = set(emberkeep.__all__) - {"__version__"}
    pages = {page.stem: page.read_text(encoding="utf-8") for page in ROOT.glob("docs/api/*.md")}
    listed = re.findall(r"^\| (`.*?) \|", pages["index"], flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(listed))) == public
    made = set(re.findall(r"^::: (\S+)", "\n".join(pages.values()), flags=re.MULTILINE))
    # Errors are on the page of their module.
    described = {name.rpartition(".")[2] for name in made} | {
        name for name in public if getattr(emberkeep, name).__module__ in made
    }
    assert public - described == set()


def test_pictures_are_as_the_script_draws_them() -> None:
    """Those that follow from the code; that of a result follows from the last long run."""
    code = (
        "import sys; sys.path.insert(0, 'scripts'); import draw_pictures as d\n"
        "for name in ('architecture.svg', 'layers.svg'):\n"
        "    assert (d.PICTURES / name).read_text() == d.DRAWN[name](), name"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, f"run python scripts/draw_pictures.py\n{ended.stderr}"


def test_every_command_stands_in_the_docs() -> None:
    docs = "\n".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/*.md"))

    def names(group: Any, before: str = "") -> Iterator[str]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from names(command, f"{before}{name} ")
            else:
                yield before + name

    assert len(found := list(names(typer.main.get_command(app)))) > 20
    assert [name for name in found if f"emberkeep {name}" not in docs] == []
