"""Every example runs, says what it promises, and stays short."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
MOST_LINES = 80

# What each prints, in this order.
SAID = {
    "plain_torch": ["starts after step 0", "starts after step 40", "the same bits: True"],
    "own_tables": ["user:", "item:", "of 200,000,000", "loss:", "versions: 3"],
    "killed_server": ["kill -9", "shard 1 was back", "trained to step 60", "recoveries: 1 partial"],
    "larger_than_memory": [
        "starts after step 0", "ends after step 60", "starts after step 60", "ends after step 90",
    ],
    "serving_follower": ["step 15: version 1 of step 15", "the trainer's bits: True",
                         "step 60: version 4 of step 60", "dense parameters served"],
}  # fmt: skip

# Servers take seconds to start, where the others take one or two in all.
SLOWER = {"killed_server"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] if name in SLOWER else []) for name in SAID],
)
def test_an_example_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has loaded torch already."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)["main"](tmp_path)
    printed = rest = capsys.readouterr().out
    for text in SAID[name]:
        assert text in rest, printed
        rest = rest[rest.index(text) + len(text) :]
    assert "False" not in printed


def test_examples_are_short_and_all_of_them_are_run() -> None:
    found = {path.stem: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")}
    assert set(found) == set(SAID)
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name, source in found.items():
        assert len(source.splitlines()) <= MOST_LINES, name
        assert f"[{name}.py]({name}.py)" in listed
