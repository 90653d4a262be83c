"""What is not seen is not absent, and what is there belongs to one process."""

from __future__ import annotations

import errno
import fcntl
import os
import select
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emberkeep.cluster.local.local_cluster import local
from emberkeep.errors import DamageError, TierError
from emberkeep.tables import Table, Tier
from emberkeep.tiers import directory, durable_open
from tests.contracts.engine import state
from tests.faults.lives import Nursery
from tests.faults.test_tier_faults import (
    OPTIMIZER,
    TABLES,
    end,
    make_durable,
    start,
    train,
    trained,
)
from tests.unit.keeper.test_tier_keeper import Run, resumed, saved
from tests.unit.tiers.test_tiered_slab import Unsynced


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    monkeypatch.setattr(durable_open, "DISK", Unsynced)


def content_of(path: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOTDIR])
def test_an_error_is_not_an_absent_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    trained(tmp_path / "t")
    before = content_of(tmp_path / "t")
    honest = {name: getattr(os, name) for name in ("stat", "lstat")}

    def failing(name: str) -> Any:
        def look(path: Any, *args: Any, **options: Any) -> os.stat_result:
            if str(path).endswith("rows-0-0.tier"):
                raise OSError(code, os.strerror(code), path)
            result: os.stat_result = honest[name](path, *args, **options)
            return result

        return look

    with monkeypatch.context() as patched:
        for name in honest:
            patched.setattr(os, name, failing(name))
        with pytest.raises(TierError, match=os.strerror(code)):
            start(tmp_path / "t")
    assert content_of(tmp_path / "t") == before


def test_a_link_to_a_disk_that_is_not_there_is_not_replaced(tmp_path: Path) -> None:
    before = trained(tmp_path / "t")
    file = tmp_path / "t" / "rows-0-0.tier"
    os.mkdir(tmp_path / "disk")
    os.rename(file, tmp_path / "disk" / file.name)
    os.symlink(tmp_path / "disk" / file.name, file)
    os.rename(tmp_path / "disk", tmp_path / "unmounted")
    with pytest.raises(TierError, match="cannot be opened"):
        start(tmp_path / "t")
    assert file.is_symlink()
    os.rename(tmp_path / "unmounted", tmp_path / "disk")
    cluster = start(tmp_path / "t")
    assert cluster.tier_batch() == 12
    assert state(cluster) == before
    end(cluster)


def test_a_state_without_its_rows_is_no_new_tier(tmp_path: Path) -> None:
    saved(tmp_path / "t", 3)
    file = tmp_path / "t" / "rows-0-0.tier"
    os.rename(file, tmp_path / "elsewhere")
    before = content_of(tmp_path / "t")
    with pytest.raises(DamageError, match=r"rows-0-0\.tier.*[Mm]ount.*remove .*state") as raised:
        Run(tmp_path / "t")
    assert "step-3" in str(raised.value)
    assert content_of(tmp_path / "t") == before
    os.rename(tmp_path / "elsewhere", file)
    assert resumed(tmp_path / "t") == 3
    # To start over is a decision of the user's.
    os.unlink(file)
    for left in (tmp_path / "t" / "state").glob("step-*"):
        left.unlink()
    assert resumed(tmp_path / "t") is None


# -- one process ---------------------------------------------------------------------------------


def open_and_end(path: str) -> None:
    """What another process does."""
    try:
        start(Path(path))
    except TierError as error:
        print("refused", error)
    else:
        print("opened")


def other_process(nursery: Nursery, path: Path) -> str:
    log = path.parent / "log"
    code = nursery.live("call", "tests.faults.test_tier_absence:open_and_end", str(path), log=log)
    assert code == 0, log.read_text()
    return log.read_text()


def test_a_new_tier_is_locked_before_anything_is_there(nursery: Nursery, tmp_path: Path) -> None:
    """The holder of the lock alone decides what there is, also where there is nothing yet."""
    os.mkdir(tmp_path / "t")
    held = os.open(tmp_path / "t" / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(TierError, match="in use"):
        start(tmp_path / "t")
    assert os.listdir(tmp_path / "t") == ["lock"]
    os.close(held)
    cluster = start(tmp_path / "t")
    assert "refused" in other_process(nursery, tmp_path / "t")
    assert (tmp_path / "t" / "lock").exists()
    train(cluster, 0)
    make_durable(cluster, 1)
    end(cluster)
    assert "opened" in other_process(nursery, tmp_path / "t")


def open_and_leave_a_child(path: str, fifo: str) -> None:
    """Ends when its child runs, which lives until somebody has written."""
    cluster = start(Path(path))
    ready, up = os.pipe()
    if os.fork():
        os.read(ready, 1)
        os._exit(0)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.write(up, b"1")
    select.select([reading], [], [])
    assert cluster is not None
    os._exit(0)


def test_children_do_not_inherit_the_lock(nursery: Nursery, tmp_path: Path) -> None:
    log, fifo = tmp_path / "log", tmp_path / "fifo"
    os.mkfifo(fifo)
    life = "tests.faults.test_tier_absence:open_and_leave_a_child"
    code = nursery.live("call", life, str(tmp_path / "t"), str(fifo), log=log)
    assert code == 0, log.read_text()
    cluster = start(tmp_path / "t")  # although the child is alive
    end(cluster)
    writing = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)  # fails where nobody reads
    os.write(writing, b"1")
    os.close(writing)


def test_a_file_system_without_locks_is_refused_unless_one_process_alone_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_handle: int, _kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(TierError, match=r"no locks.*exclusive=True"):
        start(tmp_path / "t")
    assert os.listdir(tmp_path / "t") == ["lock"]
    tier = Tier(tmp_path / "t", memory="1MB", exclusive=True)
    tables: list[Table] = [replace(table, tier=tier) for table in TABLES]
    cluster = local(threads=2).open(tables, OPTIMIZER, seed=0)
    with pytest.raises(TierError, match="in use"):  # in one process it is known anyway
        local(threads=2).open(tables, OPTIMIZER, seed=0)
    end(cluster)


def test_a_failed_opening_lets_go_of_what_it_had_opened(tmp_path: Path) -> None:
    cluster = start(tmp_path / "t", shards=3)
    train(cluster, 0)
    make_durable(cluster, 1)
    end(cluster)
    os.rename(tmp_path / "t" / "rows-1-0.tier", tmp_path / "elsewhere")
    with pytest.raises(DamageError) as held:
        start(tmp_path / "t", shards=3)
    os.rename(tmp_path / "elsewhere", tmp_path / "t" / "rows-1-0.tier")
    again = start(tmp_path / "t", shards=3)  # although the error, and all that it saw, is alive
    assert again.tier_batch() == 1
    end(again)
    assert held.value.__traceback__ is not None
    assert str(tmp_path / "t") not in directory._held
