"""The habits of those who use the command line: short configurations, names, paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from emberkeep.blobs import LocalStore
from emberkeep.config import to_toml
from emberkeep.train import build
from emberkeep.train.run_config import demo, load
from tests.integration.test_cli_repository import Shell
from tests.integration.test_train import SMALL
from tests.unit.repositories import Run

FIVE_LINES = """\
data.source = "parquet"
data.paths = ["logs"]
data.dense = ["price", "age"]
data.categories = ["user", "item"]
tables.rows = 500
"""


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run = Run(store=LocalStore(tmp_path / "run"))
    for _ in range(3):
        run.save(1)
    run.repository.tag("best", 2)
    return tmp_path / "run"


def test_a_directory_of_80_files_of_text_by_five_lines(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    (tmp_path / "logs").mkdir()
    for part in range(80):
        numbers = [str(round(x, 2)) if x > 0.3 else "" for x in random.random(50)]
        ids = [str(i) if i % 7 else "" for i in random.integers(0, 300, 50)]
        columns = {
            "label": [str(int(x)) for x in random.integers(0, 2, 50)],
            "price": numbers, "age": numbers[::-1], "user": ids, "item": ids[::-1],
        }  # fmt: skip
        pq.write_table(pa.table(columns), tmp_path / "logs" / f"part-{part}.snappy.parquet")
    (tmp_path / "logs" / "_SUCCESS").touch()
    (tmp_path / "run.toml").write_text(FIVE_LINES)
    monkeypatch.chdir(tmp_path)
    small = [p for s in ("model.bottom=[8]", "model.top=[8]", "tables.dim=4") for p in ("--set", s)]
    result = shell.json("train", "run.toml", *small)
    assert result["samples"] + result["test_samples"] == 80 * 50
    assert np.isfinite(result["loss"])


def test_tag_and_untag_speak_json_and_end_as_documented(shell: Shell, root: Path) -> None:
    assert shell.json("tag", root, "good", "--version", "1") == {"tag": "good", "version": 1}
    assert shell("tag", root, "good") == 2
    assert shell.json("tag", root, "good", "--move") == {"tag": "good", "version": 3}
    assert shell.json("untag", root, "good") == {"tag": "good", "version": None}
    assert shell("untag", root, "good") == 24
    assert "no tag 'good': there are best" in shell.err


def test_restore_makes_the_directories_above(shell: Shell, root: Path, tmp_path: Path) -> None:
    into = tmp_path / "new" / "deeper" / "dir"
    assert shell("restore", root, "-o", into) == 0
    assert (into / "version.json").is_file()
    (tmp_path / "file").touch()
    assert shell("restore", root, "-o", tmp_path / "file" / "x" / "y") == 20
    assert "cannot be made" in shell.err


def test_an_empty_path_is_no_repository(shell: Shell) -> None:
    assert shell("versions", "") == 2
    assert "empty path" in shell.err


def test_set_can_leave_a_key_out(shell: Shell, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    assert shell("train", "--print-config") == 0
    config.write_text(shell.out.replace("# path =", 'path = "runs/1"', 1))
    assert "runs/1" in str(load(config))
    settings = load(config, ["checkpoint.path=", "tier.path=", "optimizer.lr="])
    assert settings.checkpoint.path is None
    assert settings.tier.path is None
    assert settings.optimizer.lr == 0.02
    assert shell("train", config, "--set", "data.source=") == 2
    assert "data.source is missing" in shell.err


def _small(shell: Shell, *overrides: str) -> tuple[Any, str]:
    sets = [part for override in (*SMALL, *overrides) for part in ("--set", override)]
    result = shell.json("train", "--demo", *sets)
    return result, shell.err


def test_an_optimizer_for_one_table(shell: Shell, tmp_path: Path) -> None:
    own = ["optimizer.tables.C1.kind=adam", "optimizer.tables.C1.lr=0.5"]
    plain, _ = _small(shell)
    changed, _ = _small(shell, *own)
    assert plain["digest"] != changed["digest"]
    settings = demo([*SMALL, *own, "tables.pooling=max"])
    config = tmp_path / "run.toml"
    config.write_text(to_toml(settings))
    assert load(config) == settings
    inputs = build.inputs(settings)
    bags = build.embeddings(settings, inputs.rows)
    assert {t.name: t.optimizer is not None for t in bags.tables}["C1"]
    assert [g["lr"] for g in bags.optimizer.param_groups] == [0.5, 0.02]
    assert bags.tables[0].pooling == "max"
    sets = [part for s in (*SMALL, "optimizer.tables.nope.lr=1") for part in ("--set", s)]
    assert shell("train", "--demo", *sets) == 2
    assert "optimizer.tables names nope" in shell.err


def test_a_run_starts_from_what_fits_of_another(shell: Shell, tmp_path: Path) -> None:
    old = f"checkpoint.path={tmp_path / 'old'}"
    _small(shell, old)
    new = [
        f"checkpoint.path={tmp_path / 'new'}", f"checkpoint.start_from={tmp_path / 'old'}",
        "tables.dim=6", "optimizer.kind=adagrad", "run.seed=3",
    ]  # fmt: skip
    first, said = _small(shell, *new)
    assert "started from version" in said
    assert "not taken along: table 'C1': dim was 4, is 6: new columns start as they are" in said
    assert "not taken along: the data starts over" in said
    assert first["steps"] == 11
    # Started again, it goes on with its own version.
    again, said = _small(shell, *new)
    assert "resumed from version" in said
    assert "started from" not in said
    assert again["digest"] == first["digest"]
    assert shell("train", "--demo", "--set", f"checkpoint.start_from={tmp_path / 'old'}") == 2
