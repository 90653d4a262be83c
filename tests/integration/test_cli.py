"""The command line without training: what it prints, what it refuses, what it imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import emberkeep
from emberkeep.cli import main
from emberkeep.train import run_config


def emberkeep_command(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "emberkeep.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", **(environment or {})},
    )


RUN_MAIN = """
import sys
sys.argv = {}
from emberkeep.cli import main
try:
    main()
except SystemExit:
    pass
"""


@pytest.mark.parametrize(
    "code",
    [
        "import emberkeep",
        "import emberkeep; emberkeep.Table, emberkeep.RowWiseAdagrad",
        RUN_MAIN.format(["emberkeep", "--help"]),
        RUN_MAIN.format(["emberkeep", "train", "--print-config"]),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    heavy = "{'torch', 'numba', 'pyarrow', 'scipy', 'matplotlib'}"
    check = f"\nimport sys\nassert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_exists() -> None:
    for name in emberkeep.__all__:
        assert getattr(emberkeep, name) is not None
    assert set(emberkeep.__all__) == {*emberkeep._HOME_OF, "__version__"}
    assert set(emberkeep.__all__) <= set(dir(emberkeep))
    with pytest.raises(AttributeError, match="no attribute 'Tabel'"):
        _ = emberkeep.Tabel


def test_help_and_version() -> None:
    shown = emberkeep_command("--help")
    assert shown.returncode == 0
    assert "train" in shown.stdout
    assert "warm" in shown.stdout
    assert emberkeep_command("--version").stdout == f"emberkeep {emberkeep.__version__}\n"


def test_a_printed_config_is_the_config_of_the_demo(tmp_path: Path) -> None:
    printed = emberkeep_command("train", "--print-config")
    assert printed.returncode == 0
    path = tmp_path / "run.toml"
    path.write_text(printed.stdout)
    assert run_config.load(path) == run_config.DEMO
    again = emberkeep_command("train", str(path), "--print-config", "--set", "run.seed=7")
    assert "seed = 7" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "config", "code", "complaint"),
    [
        ([], None, 2, "name a CONFIG.toml"),
        (["none.toml"], None, 2, "none.toml: no such file"),
        (["."], None, 2, ". is a directory"),
        (["run.toml", "--demo"], "", 2, "--demo has settings of its own"),
        (["run.toml"], "", 2, "run.toml: data.source is missing: choose one of synthetic"),
        (["run.toml"], "[data", 2, "run.toml is not valid TOML"),
        (["run.toml"], "[dta]\n", 2, "unknown section dta (did you mean data?)"),
        (["--demo", "--set", "run.batch_size=0"], None, 2, "run.batch_size must be 1 or more"),
        (["--demo", "--set", "run.batch_sise=1"], None, 2, "did you mean batch_size?"),
        (["--demo", "--set", "run"], None, 2, "--set takes section.key=value"),
        (["--demo", "--set", "optimizer.kind=sgd", "--set", "optimizer.eps=1"], None, 2,
         "optimizer.kind: sgd has no setting 'eps'"),
        (["--demo", "--set", "data.source=criteo"], None, 2, "paths must name the files"),
        (["--demo", "--set", "tables.kind=dynamic"], None, 2, "capacity must be set"),
        (["--demo", "--set", "tables.rows=10"], None, 2, "set data.rows_total"),
        (["--demo", "--tensorboard", "run.toml"], "", 2, "run.toml is a file"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line_and_an_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    config: str | None,
    code: int,
    complaint: str,
) -> None:
    if config is not None:
        (tmp_path / "run.toml").write_text(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["emberkeep", "train", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert complaint in err
    assert err.startswith("emberkeep: ")
    assert err.count("\n") == 1
    assert (ended.value.code, out) == (code, "")


def test_a_traceback_on_request() -> None:
    done = emberkeep_command("train", environment={"EMBERKEEP_TRACEBACK": "1"})
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


def test_an_unknown_option_is_misuse() -> None:
    done = emberkeep_command("train", "--demmo")
    assert done.returncode == 2
    assert "--demmo" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "emberkeep.cli", "train", "--print-config"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
