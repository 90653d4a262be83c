"""Calls that not every system has: each fall-back is forced, alone and all of them together."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.runtime import memory, pool, system_calls

FORCED = """
import builtins, errno, fcntl, os, sys, ctypes, mmap
import numba, numpy, pyarrow, pyarrow.flight, torch, obstore, xxhash, safetensors, typer
import multiprocessing, asyncio, subprocess, socket  # before they could look at the platform

for gone in (
    "O_DIRECT", "sched_getaffinity", "sched_yield", "posix_fallocate", "preadv", "RWF_NOWAIT",
):
    delattr(os, gone)
fcntl.F_FULLFSYNC = 12345  # the system refuses it, as macOS does for some file systems
used = []
opened, exists = builtins.open, os.path.exists
def open_without_proc(file, *args, **kwargs):
    if str(file).startswith("/proc"):
        raise FileNotFoundError(errno.ENOENT, "no /proc", str(file))
    return opened(file, *args, **kwargs)
builtins.open = open_without_proc
sys.platform = "darwin"
from emberkeep.kernels import log_reads
assert not log_reads.HAS_AIO
"""

TRAINED = """
import emberkeep as ek
from pathlib import Path

def model(path):
    tier = ek.Tier(path / "tier", memory="8MB")
    bags = ek.EmbeddingBags(
        [ek.Table("a", rows=3000, dim=8, tier=tier), ek.Table("b", rows=None, capacity=500, dim=4)],
        optimizer=ek.Adagrad(lr=0.1), cluster=ek.local(shards=1, threads=2),
    )
    return bags, torch.nn.Sequential(bags)

def train(keeper, bags, steps):
    for step in range(steps):
        ids = torch.arange(step * 50, step * 50 + 400) % 3000
        out = bags({"a": ids, "b": ids % 400})
        sum(values.sum() for values in out.values()).backward()
        bags.optimizer.step()
        bags.optimizer.zero_grad()
        keeper.step()

root = Path(sys.argv[1])
bags, net = model(root / "first")
with ek.Keeper(str(root / "run"), net, bags.optimizer, strategy=ek.incremental(every=4)) as keeper:
    train(keeper, bags, 9)
    assert not bags.cluster.tier_status()[0].direct
    assert not bags.cluster.tier_status()[0].deep
expected = {name: bags.cluster.digest(name) for name in ("a", "b")}
bags.cluster.close()
bags, net = model(root / "second")
with ek.Keeper(str(root / "run"), net, bags.optimizer, strategy=ek.incremental(every=4)) as keeper:
    keeper.resume()
    assert {name: bags.cluster.digest(name) for name in ("a", "b")} == expected
bags.cluster.close()
print("same rows")
"""


@pytest.mark.processes
def test_a_run_with_a_tier_and_versions_needs_no_call_of_linux_alone(tmp_path: Path) -> None:
    script = textwrap.dedent(FORCED) + textwrap.dedent(TRAINED)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "same rows" in ended.stdout


def test_kernels_finish_without_a_call_that_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_yield")
    system_calls.give_way()


def test_threads_are_counted_and_left_alone_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBERKEEP_THREADS", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert pool.default_threads() == os.cpu_count()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "setpriority")
    pool.be_nice(19)


def test_bytes_are_read_at_an_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    handle = os.open(tmp_path / "f", os.O_RDONLY)
    monkeypatch.delattr(os, "preadv")
    view = memoryview(bytearray(6))
    assert system_calls.read_at(handle, view, 3) == 6
    assert bytes(view) == b"345678"
    assert system_calls.read_at(handle, view, 8) == 2
    os.close(handle)


@pytest.mark.parametrize("how", ["missing", "refused"])
def test_files_are_made_long_enough(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "missing":
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", _raising(errno.EOPNOTSUPP))
    with open(tmp_path / "f", "wb") as file:
        system_calls.allocate(file.fileno(), 4096, 8192)
        system_calls.allocate(file.fileno(), 0, 10)
    assert (tmp_path / "f").stat().st_size == 12288


def test_a_full_disk_is_no_missing_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _raising(errno.ENOSPC))
    with open(tmp_path / "f", "wb") as file, pytest.raises(OSError) as full:
        system_calls.allocate(file.fileno(), 0, 10)
    assert full.value.errno == errno.ENOSPC


@pytest.mark.parametrize(("code", "falls_back"), [(0, False), (errno.ENOTSUP, True)])
def test_bytes_go_to_the_medium_on_a_mac(
    code: int, falls_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def full(handle: int, command: int) -> None:
        assert command == 51
        asked.append("full")
        if code:
            raise OSError(code, "refused")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full)
    monkeypatch.setattr(os, "fsync", lambda handle: asked.append("fsync"))
    with open(tmp_path / "f", "wb") as file:
        system_calls.sync(file.fileno())
    assert asked == (["full", "fsync"] if falls_back else ["full"])


class _Libc:
    """A C library with just the calls named; they do what `os.link` and `os.unlink` can do."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, getattr(self, f"_{name}"))

    def _renamex_np(self, source: bytes, target: bytes, flags: int) -> int:
        assert flags == 4
        try:
            os.link(source, target)
        except FileExistsError:
            ctypes.set_errno(errno.EEXIST)
            return -1
        os.unlink(source)
        return 0


def test_files_are_renamed_without_replacing_on_a_mac(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: _Libc("renamex_np"))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    Path(a).write_bytes(b"1")
    system_calls.rename_new(a, b)
    assert Path(b).read_bytes() == b"1"
    Path(a).write_bytes(b"2")
    with pytest.raises(FileExistsError):
        system_calls.rename_new(a, b)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: _Libc())
    with pytest.raises(OSError) as missing:
        system_calls.rename_new(a, str(tmp_path / "c"))
    assert missing.value.errno == errno.ENOSYS


def test_the_command_of_a_process_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    with_proc = system_calls.command_line(os.getpid())
    monkeypatch.setattr(Path, "exists", lambda self: False)
    try:
        subprocess.run(["ps", "-p", "1"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("this machine has no ps, and needs none: it has /proc")
    without = system_calls.command_line(os.getpid())
    assert b"python" in with_proc
    assert b"python" in without
    assert system_calls.command_line(2**22 + 1) == b""


def test_memory_without_huge_pages_or_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    class Area(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(errno.EINVAL, "no huge pages")

    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", Area)
        assert memory.lazy_zeros((2**20, 4), np.float32)[5, 1] == 0
    monkeypatch.setattr("builtins.open", _raising(errno.ENOENT))
    assert memory.resident_nbytes() > 2**20
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.lazy_zeros((100, 4), np.float32).sum() == 0


def _raising(code: int) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call
