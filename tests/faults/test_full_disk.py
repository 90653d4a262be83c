"""A disk without a free byte: gc works on it, and saving goes on afterwards."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from emberkeep.blobs import Disk, LocalStore
from emberkeep.blobs.wrapper import spending_reserve
from emberkeep.errors import FullError, SaveError
from emberkeep.repository import Collector, KeepLast, Repository, Writer
from emberkeep.repository.maintenance.verify import verify
from tests.unit.repositories import Run

ROOT = Path(__file__).parent.parent.parent
RESERVE = ".reserve"


class SmallDisk(Disk):
    """Holds so many bytes: what would need more fails, and changes nothing."""

    def __init__(self, root: Path) -> None:
        self.root, self.free = root, 2**40

    def fill(self) -> None:
        self.free = 0

    def _take(self, nbytes: int) -> None:
        if nbytes > self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.free -= nbytes

    def create(self, path: str) -> int:
        self._take(1)
        return super().create(path)

    def make_directory(self, path: str) -> None:
        self._take(1)
        super().make_directory(path)

    def write(self, handle: int, view: memoryview) -> None:
        self._take(len(view))
        super().write(handle, view)

    def allocate(self, handle: int, offset: int, nbytes: int) -> None:
        self._take(nbytes)
        super().allocate(handle, offset, nbytes)

    def unlink(self, path: str) -> None:
        status = os.stat(path)
        super().unlink(path)
        if status.st_nlink == 1:
            self.free += status.st_size


@pytest.mark.parametrize("layout", ["full", "consecutive", "grid"])
def test_gc_works_without_a_free_byte(layout: Any, tmp_path: Path) -> None:
    root, disk = tmp_path / "run", SmallDisk(tmp_path)
    store = LocalStore(root, disk=disk)
    run = Run(store=store, layout=layout)
    for _ in range(6):
        run.save()
    run.keeper.settle()
    disk.fill()
    with pytest.raises(FullError):  # what is no gc leaves the reserve alone
        store.put("somewhere/else", bytes(100))
    assert (root / RESERVE).exists()
    with spending_reserve(store):
        writer = Writer.open(Repository.open(store))
        collected = Collector(writer, policy=KeepLast(n=1), grace=timedelta(0)).collect()
    assert collected.removed
    assert disk.free > 0
    assert (root / RESERVE).exists()
    assert verify(Repository.open(store)).damages == ()


def test_a_trainer_whose_disk_was_full_goes_on(tmp_path: Path) -> None:
    """A save that finds no room lets gc remove what has come of age: the next one has room."""
    disk = SmallDisk(tmp_path)
    run = Run(store=LocalStore(tmp_path / "run", disk=disk), layout="full")
    for _ in range(3):
        run.save()
    run.keeper._collector._policy = KeepLast(n=1)
    disk.fill()
    with pytest.warns(UserWarning, match="disk is full"), pytest.raises(SaveError):
        run.save()
    assert run.save() == 4


SCRIPT = """
import os, sys
from pathlib import Path
from emberkeep.blobs import LocalStore
from emberkeep.cli import main
from tests.unit.repositories import Run

root = Path(sys.argv[1])
run = Run(store=LocalStore(root / "run"), layout="full")
for _ in range(5):
    run.save()
filler = os.open(root / "filler", os.O_WRONLY | os.O_CREAT)
for size in (2**16, 2**10, 1):
    try:
        while True:
            os.write(filler, bytes(size))
    except OSError:
        pass
assert os.statvfs(root).f_bavail == 0
sys.argv = ["emberkeep", "gc", str(root / "run"), "--yes", "--grace", "0", "--keep-last", "1"]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
assert [v.number for v in run.repository.versions()] == [5]
assert (root / "run" / ".reserve").exists()
"""


def test_emberkeep_gc_on_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=12m none {tmp_path}"
    new_space = ["unshare", "-Urm", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*new_space, mount], capture_output=True, timeout=20).returncode
    ):
        pytest.skip("this system lets nobody mount a file system of their own")
    done = subprocess.run(
        [*new_space, f'{mount} && exec "$0" -c "$1" {tmp_path}', sys.executable, SCRIPT],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
