"""When kernels are compiled, and where they are kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import emberkeep

FEW = """
import numpy as np
from emberkeep.kernels import batch_rows
bits = np.zeros(2, np.uint64)
batch_rows.set_bits(bits, np.array([3, 70]))
print(batch_rows.count_bits(bits, 0, 2))
"""
# One more, which holds copies of kernels of other modules.
SCRIPT = f"""{FEW}
batch_rows.write_first_nonfinite(np.zeros(256, np.int64), np.zeros((2, 4), np.float32))
"""


def run_kernels(
    package: Path, script: str = SCRIPT, **environment: str
) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k != "EMBERKEEP_QUIET"}
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**inherited, "PYTHONPATH": str(package), **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip


def copy(source: Path, where: Path, *ignored: str) -> Path:
    shutil.copytree(source, where / "emberkeep", ignore=shutil.ignore_patterns(*ignored))
    return where


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that has compiled nothing yet."""
    return copy(Path(emberkeep.__file__).parent, tmp_path, "__pycache__")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A copy whose kernels have been compiled, and what that process said."""
    where = tmp_path_factory.mktemp("compiled")
    package = copy(Path(emberkeep.__file__).parent, where, "__pycache__")
    return package, run_kernels(package)


def test_compilation_is_announced_once_and_cached(compiled: tuple[Path, Any]) -> None:
    package, first = compiled
    second = run_kernels(package)
    assert first.stdout == second.stdout == "2\n"
    assert first.stderr.count("compiling kernels, first run only") == 1
    assert "compiling" not in second.stderr


@pytest.mark.parametrize(("changed", "void"), [("hash_index", True), ("quantize", False)])
def test_a_change_voids_the_kernels_that_import_it(
    compiled: tuple[Path, Any], tmp_path: Path, changed: str, void: bool
) -> None:
    package = copy(compiled[0] / "emberkeep", tmp_path)
    with (package / f"emberkeep/kernels/{changed}.py").open("a") as file:
        file.write("\n# changed\n")
    assert ("compiling" in run_kernels(package).stderr) == void


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a mount")
def test_a_warm_cache_on_a_read_only_medium_is_used(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    run_kernels(package, FEW, NUMBA_CACHE_DIR=str(cache))
    command = f"mount --bind -o ro {cache} {cache} && exec {sys.executable} -c '{FEW}'"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        env={**os.environ, "PYTHONPATH": str(package), "NUMBA_CACHE_DIR": str(cache),
             "EMBERKEEP_QUIET": ""},
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode and "mount" in done.stderr:
        pytest.skip("mounting is not allowed here")
    assert done.stdout == "2\n", done.stderr
    assert "compiling" not in done.stderr


def test_no_cache_directory_at_all_still_computes(package: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = run_kernels(package, FEW, NUMBA_CACHE_DIR=str(blocked / "below"))
    assert done.stdout == "2\n"
