"""Workers have working directories of their own: what they are sent names files absolutely."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from emberkeep import config
from emberkeep.train.run_config import DEMO, RunConfig, demo

PATHS = re.compile(r"paths?|.*_paths?|.*_file|.*directory|authority|certificate")


def test_every_path_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    text = config.to_toml(DEMO).replace('source = "synthetic"', 'source = "criteo"')
    text = text.replace("paths = []", 'paths = ["day_0", "/data/day_1", "s3://bucket/day_2"]')
    given = config.parse(
        RunConfig, text, source="a test",
        overrides=["tables.rows=100", "checkpoint.path=runs/1", "tier.path=../tier"],
    )  # fmt: skip
    sent = config.absolute(given)
    assert sent.data.paths == (str(tmp_path / "day_0"), "/data/day_1", "s3://bucket/day_2")
    assert sent.checkpoint.path == str(tmp_path / "runs/1")
    assert sent.tier.path == str(tmp_path.parent / "tier")
    assert config.absolute(sent) == sent


def test_urls_and_what_is_not_set_stay() -> None:
    assert config.absolute(DEMO) == DEMO
    for url in ("s3://bucket/run", "memory://run", "file:///run"):
        assert config.absolute(demo([f"checkpoint.path={url}"])).checkpoint.path == url


def test_no_setting_that_is_a_path_is_forgotten() -> None:
    def unmarked(settings: Any, prefix: str) -> list[str]:
        found = []
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            if dataclasses.is_dataclass(value):
                found += unmarked(value, f"{prefix}{field.name}.")
            elif PATHS.fullmatch(field.name) and not field.metadata["path"]:
                found.append(f"{prefix}{field.name}")
        return found

    assert unmarked(DEMO, "") == []
