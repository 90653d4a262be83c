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
from emberkeep.kernels import _jit

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
    environment = {"XDG_CACHE_HOME": str(package / "user"), **environment}
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


def test_another_copy_of_the_source_compiles_nothing_again(
    compiled: tuple[Path, Any], package: Path
) -> None:
    """A fresh clone, another environment: what counts is what the source says, not where it is."""
    user = str(compiled[0] / "user")
    first = run_kernels(package, XDG_CACHE_HOME=user)
    assert first.stdout == "2\n"
    assert "compiling" not in first.stderr
    # Beside the source it stays when the user's cache goes, as in the image of a container.
    assert "compiling" not in run_kernels(package).stderr


def test_what_decides_about_a_kernel_is_in_the_name_of_the_shared_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def named(**environment: str) -> str:
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            return _jit._shared_directory.__wrapped__(_jit.__file__)

    usual = named(HOME="/somewhere", XDG_CACHE_HOME="")
    assert usual.startswith("/somewhere/.cache/emberkeep/kernels/")
    assert usual == named(HOME="/somewhere", XDG_CACHE_HOME="", OTHER="1")
    assert usual != named(HOME="/somewhere", XDG_CACHE_HOME="", NUMBA_OPT="0")
    monkeypatch.setattr(_jit, "_source_stamp", lambda _: b"another source")
    assert usual != named(HOME="/somewhere", XDG_CACHE_HOME="")


def test_directories_that_nobody_has_used_for_long_go(tmp_path: Path) -> None:
    used, unused = tmp_path / "used", tmp_path / "unused"
    for directory in (used, unused):
        _jit._mark_used(directory)
        (directory / "a.nbi").write_bytes(b"")
    for directory in (used, unused):
        os.utime(directory, (1e9, 1e9))
    _jit._mark_used(used)
    assert unused.exists()
    _jit._mark_used(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "used"]


@pytest.mark.parametrize("last", ["one", "two"])
def test_processes_that_save_at_once_do_not_get_what_the_other_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """With numba's files, the index of one led to the code of the other, for other types."""
    files = {name: _jit._Files(str(tmp_path), "kernel", b"stamp") for name in ("one", "two")}
    writes: dict[str, list[Any]] = {"one": [], "two": []}
    with monkeypatch.context() as patched:
        for name, file in files.items():  # each sees an empty index, and writes later
            for method in ("_save_index", "_save_data"):
                write = getattr(file, method)
                patched.setattr(
                    file, method, lambda *given, n=name, w=write: writes[n].append((w, given))
                )
            file.save(name, name.upper())
    first = "one" if last == "two" else "two"
    for index, name in ((0, first), (0, last), (1, last), (1, first)):
        write, given = writes[name][index]
        write(*given)
        for key, file in files.items():
            assert file.load(key) in (None, key.upper())
    assert files[first].load(first) == first.upper()


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc", "*"])
@pytest.mark.parametrize("left", [0, 10])
def test_files_that_were_cut_short_are_made_again(tmp_path: Path, kind: str, left: int) -> None:
    files = _jit._Files(str(tmp_path), "kernel", b"stamp")
    files.save("key", "compiled")
    assert files.load("key") == "compiled"
    for file in tmp_path.glob(kind):
        os.truncate(file, left)
    assert files.load("key") is None
    files.save("key", "compiled")
    assert files.load("key") == "compiled"


@pytest.mark.parametrize(("changed", "void"), [("hash_index", True), ("quantize", False)])
def test_a_change_voids_the_kernels_that_import_it(
    compiled: tuple[Path, Any], tmp_path: Path, changed: str, void: bool
) -> None:
    package = copy(compiled[0] / "emberkeep", tmp_path)
    with (package / f"emberkeep/kernels/{changed}.py").open("a") as file:
        file.write("\n# changed\n")
    assert ("compiling" in run_kernels(package).stderr) == void


@pytest.mark.soak
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


@pytest.mark.soak
def test_no_cache_directory_at_all_still_computes(package: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = run_kernels(package, FEW, NUMBA_CACHE_DIR=str(blocked / "below"))
    assert done.stdout == "2\n"
