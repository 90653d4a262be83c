"""Words that engineers do not use, or that say less than a noun would, stay out of the project.

`told` may be a reply, a status, a digest or a list of events: the name says which. The others have
plain equivalents ("restart", "the caller", "separately", "local", "remote", "started", "own").
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SEARCHED = [
    "src", "docs", "tests", "benchmarks", "scripts", "examples", "README.md", "CHANGELOG.md",
    "CONTRIBUTING.md", "SECURITY.md",
]  # fmt: skip
SUFFIXES = {".py", ".md", ".toml", ".html", ".css"}

# An underscore is a boundary as well: `is_told` is the word, `foretold` is not.
BANNED = re.compile(
    r"(?<![a-z])(told|anew|whoever|apart|near|distant|begun|mine)(?![a-z])", re.IGNORECASE
)


def violations(text: str) -> Iterator[tuple[int, str]]:
    """(line, word) of every banned word in `text`."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in BANNED.finditer(line):
            yield number, found[1]


def searched() -> Iterator[Path]:
    for name in SEARCHED:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in SUFFIXES and file != Path(__file__):
                yield file


def test_banned_words_do_not_occur() -> None:
    files = list(searched())
    assert len(files) > 400
    found = [
        f"{file.relative_to(ROOT)}:{line}: {word}"
        for file in files
        for line, word in violations(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("told = reply()", ["told"]),
        ("x\nWhoever waits, waits; begun anew", ["Whoever", "begun", "anew"]),
        ("def test_it_is_told(): ...", ["told"]),
        ("self._mine, near_shards, Distant", ["mine", "near", "Distant"]),
        ("take it apart", ["apart"]),
        ("starts_anew(layout, sizes), told", ["anew", "told"]),
    ],
)
def test_a_violation_is_caught(text: str, words: list[str]) -> None:
    assert [word for _, word in violations(text)] == words


@pytest.mark.parametrize("text", ["nearly", "nearest", "apartment", "examined"])
def test_other_words_are_allowed(text: str) -> None:
    assert list(violations(text)) == []
