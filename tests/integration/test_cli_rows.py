"""`emberkeep import` and `export` as users type them: what they print, refuse, and go on from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch

from tests.integration.test_cli_repository import Shell, root, run, shell
from tests.unit.repositories import Run

__all__ = ["root", "run", "shell"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {
        "user/id": np.arange(5, 305, dtype=np.int64) ** 3,
        "user/weight": np.ones((300, 4), np.float32),
        "user/accumulator": np.full((300, 4), 2, np.float32),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "rows.safetensors")
    return tmp_path / "rows.safetensors"


def test_a_repository_begins_with_rows_of_a_file(shell: Shell, file: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    assert shell("import", target, "--from", file) == 23  # there is none
    assert shell("import", target, "--from", file, "--init") == 0
    assert "user: 300 rows, 300 of them new" in shell.out
    assert f"version 1 (step 0) of {target}: 300 rows imported from safetensors" in shell.out
    assert shell("import", target, "--from", file, "--init", "--yes") == 0
    assert "is this import already" in shell.out
    assert shell("verify", target) == 0
    assert not list(tmp_path.glob(".*"))


def test_an_import_says_all_as_json(shell: Shell, file: Path, tmp_path: Path) -> None:
    found = shell.json("import", tmp_path / "new", "--from", file, "--init", "--optimizer", "adam",
                       "--map", "user=people", "--seed", 3)  # fmt: skip
    assert found == {
        "version": 1, "step": 0, "rows": {"people": 300}, "new": {"people": 300},
        "filled": {"people": ["first_moment", "second_moment"]},
        "passed_over": ["user.accumulator"], "formats": ["safetensors"], "created": True,
        "resumed": False, "already_there": False,
    }  # fmt: skip


def test_columns_are_named_by_the_user(shell: Shell, root: Path, tmp_path: Path) -> None:
    vectors = pa.array(np.random.default_rng(0).random((40, 6)).tolist())
    columns = {"uid": np.arange(40), "emb": vectors, "other": vectors}
    pq.write_table(pa.table(columns), tmp_path / "part-0.parquet")
    asked = ["import", root, "--yes", "--from", tmp_path / "part-0.parquet"]
    assert shell(*asked) == 2
    assert "which column holds the ids" in shell.err
    assert "--ids COLUMN, of uid, emb, other" in shell.err
    assert shell(*asked, "--ids", "uids", "--vector", "emb") == 2
    assert "has no column 'uids'" in shell.err
    assert shell(*asked, "--ids", "uid", "--vector", "emb") == 2
    assert "--map OLD=NEW" in shell.err
    found = shell.json(*asked, "--ids", "uid", "--vector", "emb", "--table", "dynamic")
    assert found["rows"] == {"dynamic": 40}
    assert found["step"] == 400
    assert shell("verify", root) == 0
    again = shell.json(*asked, "--ids", "uid", "--vector", "other", "--table", "dynamic")
    assert not again["already_there"]  # another column of the same file
    assert again["version"] == found["version"] + 1


def test_a_trainer_that_may_be_at_work_is_not_fenced_unasked(
    shell: Shell, root: Path, run: Run, file: Path
) -> None:
    assert shell("import", root, "--from", file, "--map", "user=dynamic") in (2, 3)
    asked = ["import", root, "--from", file, "--table", "dynamic", "--dim-change", "pad"]
    assert shell(*asked) == 2
    assert "an import would fence it" in shell.err
    assert "--yes" in shell.err
    assert shell(*asked, "--yes") == 0
    assert "299 of them new; rows that came without begin with first_moment=0" in shell.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--from", "nowhere"], 3, "nowhere does not exist"),
        (["--from", "rows.safetensors", "--map", "user"], 2, "--map takes OLD=NEW"),
        (["--from", "rows.safetensors", "--map", "a=b"], 2, "nothing is called a"),
        (["--from", "rows.safetensors", "--fill", "x=y"], 2, "--fill takes PLANE=NUMBER"),
        (["--from", "rows.safetensors", "--optimizer", "adm"], 2, "--optimizer is one of sgd"),
        (["--from", "rows.safetensors", "--ids", "a"], 2, "is no Parquet or Arrow file"),
        (["--from", "text"], 3, "none of safetensors"),
        (["--from", "."], 3, "rows.safetensors"),
    ],
)
def test_mistakes_are_said_in_one_line(
    arguments: list[str], code: int, words: str, shell: Shell, file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("no rows")
    if arguments == ["--from", "."]:
        (tmp_path / "rows.safetensors").write_bytes(b"\x08" + bytes(7) + b"{not so}")
    assert shell("import", "new", *arguments, "--init") == code, shell.err
    assert words in shell.err
    assert len(shell.err.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_options_of_a_new_repository_need_one(shell: Shell, root: Path, file: Path) -> None:
    assert shell("import", root, "--from", file, "--optimizer", "adam") == 2
    assert "add --init" in shell.err


@pytest.mark.parametrize(
    "how",
    [  # killed: by day in test_importer
        signal.SIGINT,
        pytest.param(signal.SIGKILL, marks=pytest.mark.soak),
        pytest.param(signal.SIGTERM, marks=pytest.mark.soak),
    ],
)
def test_a_command_that_is_ended_goes_on_when_it_is_typed_again(how: int, tmp_path: Path) -> None:
    rows = 30_000
    tensors = {"user/id": np.arange(rows) * 7, "user/weight": np.ones((rows, 16), np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "rows.safetensors")
    # Ended where it is known how far it is: after the second entry of the journal.
    script = (
        f"""
import os
from emberkeep.inspect import importer, row_sources, staged_rows
importer.JOURNAL_NBYTES = row_sources.CHUNK_NBYTES = 200_000
importer.Import.run.__kwdefaults__["journal_nbytes"] = 200_000
noted = []
before = staged_rows.Stage.note
def note(self, *args):
    before(self, *args)
    noted.append(args)
    if len(noted) == 2 and "END" in os.environ:
        os.kill(os.getpid(), {how})
staged_rows.Stage.note = note
"""
        "from emberkeep.cli import main\nmain()\n"
    )
    command = [sys.executable, "-c", script, "import", "new"]
    command += ["--from", "rows.safetensors", "--init"]
    environment = {**os.environ, "END": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == (130 if how == signal.SIGINT else -how), ended.stderr
    if how == signal.SIGINT:
        assert "start the same import again" in ended.stderr
    assert (tmp_path / ".new.import").is_dir()
    assert not (tmp_path / "new").exists()
    del environment["END"]
    again = subprocess.run(
        [*command, "--json"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    found: Any = json.loads(again.stdout)
    assert found["resumed"]
    assert found["rows"] == {"user": rows}
    assert not (tmp_path / ".new.import").exists()


def test_the_end_of_a_path_says_what_is_written(shell: Shell, root: Path, tmp_path: Path) -> None:
    for name, start in (
        ("a.safetensors", None), ("a.pt", b"PK\x03\x04"), ("fixed.parquet", b"PAR1"),
        ("fixed.arrow", b"ARROW1"), ("fixed.feather", b"ARROW1"), ("FIXED.PARQUET", b"PAR1"),
    ):  # fmt: skip
        assert shell("export", root, "-o", tmp_path / name, "--table", "fixed") == 0, shell.err
        if start is not None:
            assert (tmp_path / name).read_bytes().startswith(start)
    assert shell("export", root, "-o", tmp_path / "all.parquet") == 0
    assert (tmp_path / "all.parquet" / "fixed.parquet").read_bytes().startswith(b"PAR1")
    assert shell("export", root, "-o", tmp_path / "x.csv") == 2
    assert "name the kind by --format" in shell.err
    assert not (tmp_path / "x.csv").exists()


def test_names_of_other_systems(shell: Shell, root: Path, tmp_path: Path) -> None:
    asked = ["export", root, "-o", tmp_path / "a.pt", "--table", "fixed", "--names"]
    assert shell(*asked, "torchrec") == 0
    assert set(torch.load(tmp_path / "a.pt", weights_only=True)) == {
        "embedding_bags.fixed.id", "embedding_bags.fixed.weight",
        "embedding_bags.fixed.weight.fixed.exp_avg", "embedding_bags.fixed.weight.fixed.exp_avg_sq",
        "embedding_bags.fixed.weight.fixed.step",
    }  # fmt: skip
    assert shell(*asked, "fbgemm", "--force") == 0
    assert "embedding_bags.fixed.weight.fixed.momentum1" in torch.load(
        tmp_path / "a.pt", weights_only=True
    )
    assert shell("export", root, "-o", tmp_path / "d", "--format", "dynamicemb", "--table",
                 "fixed", "--names", "torch") == 2  # fmt: skip
