"""Power cuts on a local root: after any system call, with any part of what was not synced.

The calls behind a history of saves and gc are recorded. For every prefix of them a disk is built
that may have been left by a power cut at that point; the last acknowledged version must be there.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from random import Random

import pytest

from emberkeep.blobs import Disk, LocalStore
from emberkeep.errors import NoRepositoryError
from emberkeep.repository import Collector, KeepLast, Manifest, Repository, Writer, verify
from emberkeep.testing import RecordingDisk, power_cut
from emberkeep.testing.contracts import check_content, save
from tests.nightly import some

ROOT = "deep/root"


def record(base: Path) -> tuple[RecordingDisk, list[tuple[int, Manifest]]]:
    """The calls of a history, and after how many of them each version was acknowledged."""
    disk = RecordingDisk()
    repository = Repository.create(LocalStore(base / ROOT, disk=disk), schema={})
    acknowledged: list[tuple[int, Manifest]] = []
    for _ in range(2):
        writer = Writer.open(repository)
        collector = Collector(writer, policy=KeepLast(n=1), grace=timedelta(0))
        for _ in range(2):
            needs = [writer.newest] if len(acknowledged) % 2 else None
            manifest = save(writer, len(acknowledged) + 1, needs=needs)
            acknowledged.append((len(disk.calls), manifest))
            collector.collect()
    return disk, acknowledged


class Unsynced(Disk):
    """For the time after the power cut, when nothing is at stake."""

    def sync(self, handle: int) -> None:
        pass


def check_after(
    disk: RecordingDisk,
    acknowledged: list[tuple[int, Manifest]],
    cut: int,
    base: Path,
    target: Path,
    random: Random | None,
) -> None:
    target.mkdir()
    power_cut(disk.calls[:cut], str(base), str(target), random=random)
    known = [manifest for at, manifest in acknowledged if at <= cut]
    store = LocalStore(target / ROOT, disk=Unsynced())
    try:
        repository = Repository.open(store)
    except NoRepositoryError:
        assert not known
        return
    if known:
        for manifest in repository.chain(known[-1].version):
            check_content(repository, manifest)
    newest = repository.latest()
    if newest is not None:
        repository.chain(newest)
    report = verify(repository)
    assert report.ok, (cut, report.damages)
    # The machine comes up again and training goes on.
    manifest = save(Writer.open(repository), 100)
    check_content(repository, manifest)
    assert repository.latest() == manifest.version


def test_only_what_was_synced_survives(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    disk, acknowledged = record(base)
    assert len(disk.calls) > 100
    assert any(call[0] == "unlink" and "/versions/" in call[1] for call in disk.calls)
    for cut in some(range(len(disk.calls) + 1)):
        check_after(disk, acknowledged, cut, base, tmp_path / str(cut), None)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_any_part_of_what_was_not_synced_survives(tmp_path: Path, seed: int) -> None:
    base = tmp_path / "base"
    base.mkdir()
    disk, acknowledged = record(base)
    random = Random(seed)
    for cut in some(range(len(disk.calls) + 1), 1):
        check_after(disk, acknowledged, cut, base, tmp_path / str(cut), random)


def test_the_model_of_the_disk_finds_a_missing_sync(tmp_path: Path) -> None:
    """The test above has teeth: without the sync of directories it fails."""

    class Forgetful(RecordingDisk):
        def sync_directory(self, path: str) -> None:
            pass

    base = tmp_path / "base"
    base.mkdir()
    disk = Forgetful()
    LocalStore(base / ROOT, disk=disk).put("a", b"x")
    power_cut(disk.calls, str(base), str(tmp_path / "after"))
    assert list((tmp_path / "after").rglob("a")) == []
