"""The index beside a tier's file: with it a restart finds what reading the whole file finds, and
whatever happens to the index itself, nothing else does."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from emberkeep.blobs.system_disk import Disk
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import DamageError
from emberkeep.kernels import batch_rows
from emberkeep.runtime.system_calls import read_at
from emberkeep.tables import Adagrad, Table
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.tiers import durable_open, durable_scan, log, segment_index, upkeep
from emberkeep.tiers.superblock import SLOT_NBYTES, START, read_head
from emberkeep.tiers.tiered_slab import TieredSlab
from tests.contracts.engine import grads_of, state, wanted_of
from tests.faults import test_tier_power as power
from tests.faults.test_tier_power import end, start
from tests.nightly import by_night
from tests.unit.tiers.test_tiered_slab import Unsynced, tiered

SEGMENT = 3 * 4096


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", SEGMENT)
    monkeypatch.setattr(durable_open, "DISK", Unsynced)


def slabs_of(cluster: LocalCluster) -> list[TieredSlab]:
    return [slab for shard in cluster.shards for slab in shard.tiers()]


def found(path: Path, shards: int) -> tuple[Any, int]:
    """All that an opening makes of a directory, which is left as it is, and how many segments it
    took from an index."""
    copy = path.parent / f"{path.name} opened"
    shutil.copytree(path, copy)
    cluster = start(copy, Disk, shards)
    everything = [cluster.tier_batch(), state(cluster), cluster.table_state()]
    indexed = 0
    for slab in slabs_of(cluster):
        head, file = slab.log.head, slab.log
        touched = np.empty(slab.rows, np.bool_)
        batch_rows.test_bits(slab.touched, np.arange(slab.rows), touched)
        by_row = [
            plane[touched].tobytes() for plane in file.layout.arrays if len(plane) == slab.rows
        ]
        arrays = (slab.positions, touched, file.live, file.generations, file.states)
        everything.append([a.tobytes() for a in arrays] + by_row)
        everything.append([file.sequence, slab.stamp, head.first_life, head.lives, head.free])
        indexed += len(file.index.unchecked)
    end(cluster)
    shutil.rmtree(copy)
    return everything, indexed


def without_index(path: Path) -> Path:
    """A copy in which no file has one."""
    copy = path.parent / f"{path.name} without"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    for file in copy.rglob("*.index"):
        file.unlink()
    return copy


class Compared:
    """A life of `test_tier_power` that begins with a look at what it finds in either way."""

    def __init__(self, live: power.Live) -> None:
        self.live = live
        self.indexed = 0

    def __call__(self, path: Path, *given: Any) -> Any:
        shards = given[-1]
        if (path / "tier").exists():
            expected, none = found(without_index(path), shards)
            assert none == 0
            same, indexed = found(path, shards)
            assert same == expected
            self.indexed += indexed
        return self.live(path, *given)


@pytest.mark.parametrize("seeds", [(500, 501, 502), *by_night([(503, 504, 505), (506, 507, 508)])])
@pytest.mark.parametrize("live", [power.live, power.live_with_clears])
def test_after_power_cuts_an_index_changes_nothing(
    tmp_path: Path, live: power.Live, seeds: tuple[int, ...]
) -> None:
    compared = Compared(live)
    for seed in seeds:
        path = tmp_path / str(seed)
        power.check_lives(path, seed, lives=6, shards=1 + seed % 2, live=compared)
    assert compared.indexed > 0  # or this test would be about nothing


def lived(path: Path, lives: int, seed: int = 0, shards: int = 2) -> list[dict[str, bytes]]:
    """Several lives that were killed; the indexes after each of them."""
    random, models = np.random.default_rng(seed), dict[int, Any]()
    path.mkdir()
    kept = []
    for _ in range(lives):
        power.live(path, random, models, shards)
        kept.append({file.name: file.read_bytes() for file in path.rglob("*.index")})
    return kept


@pytest.mark.parametrize("seed", [0, 1, *by_night(range(2, 6))])
def test_over_many_lives_an_index_changes_nothing(tmp_path: Path, seed: int) -> None:
    random, models = np.random.default_rng(seed), dict[int, Any]()
    path = tmp_path / "run"
    path.mkdir()
    compared = Compared(power.live_with_clears)
    for _ in range(8):
        compared(path, random, models, 2)
    assert compared.indexed > 10


def test_an_index_of_another_time_or_file_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "run"
    kept = lived(path, 6)
    expected, _ = found(without_index(path), 2)
    assert found(path, 2)[0] == expected
    # Another run of the same model, a run that went on from a copy, files in each other's places.
    others = [*kept, lived(tmp_path / "other", 2, seed=9)[-1]]
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    power.live(copy, np.random.default_rng(77), _models(copy), 2)
    others.append({file.name: file.read_bytes() for file in copy.rglob("*.index")})
    swapped = {name: kept[-1].get(name.replace("-0-", "-@-").replace("-1-", "-0-")
                                  .replace("-@-", "-1-"), b"") for name in kept[-1]}  # fmt: skip
    for files in [*others, swapped]:
        for file in path.rglob("*.index"):
            file.unlink()
        for name, content in files.items():
            (path / "tier" / name).write_bytes(content)
        assert found(path, 2)[0] == expected


def _models(path: Path) -> dict[int, Any]:
    """What a life that goes on from there is to find."""
    cluster = start(path, Disk, 2)
    models = {cluster.tier_batch() or 0: power.everything(cluster)}
    end(cluster)
    return models


def test_an_index_of_a_copy_that_ended_before_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have computed the same bits, as far as the copy went."""
    path, copy = tmp_path / "run", tmp_path / "copy"
    large(path, monkeypatch)
    shutil.copytree(path, copy)

    def go_on(where: Path, batches: Sequence[int]) -> Any:
        cluster = reopened(where)
        (slab,) = slabs_of(cluster)
        slab._upkeep.stop()  # both write the same blocks
        for batch in batches:
            wanted = wanted_of(cluster, {"t": list(range(60 * batch, 60 * batch + 60))})
            cluster.push(wanted, grads_of(cluster, {"t": np.ones((60, 30))}), lr=0.1)
            futures = cluster.prepare_tiers(batch)
            while not all(future.done() for future in futures):
                upkeep.run(slab)
            cluster.commit_tiers()
        after = state(cluster)
        end(cluster)
        return after

    go_on(copy, [2, 3])
    expected = go_on(path, [2, 3, 4, 5])
    short = Idle(copy)
    while short.index.missing or short.index.unchecked:
        short.look()
    end(short.cluster)
    shutil.copy(copy / "rows-0-0.index", path / "rows-0-0.index")
    cluster = reopened(path)
    assert cluster.tier_batch() == 5
    assert slabs_of(cluster)[0].log.index.unchecked  # most of it is believed
    assert state(cluster) == expected
    end(cluster)


def test_a_damaged_index_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "run"
    lived(path, 3, shards=1)
    expected, _ = found(without_index(path), 1)
    whole, indexed = found(path, 1)
    assert whole == expected
    file = path / "tier" / "rows-0-0.index"
    content = file.read_bytes()
    random = np.random.default_rng(0)
    used = np.flatnonzero(np.frombuffer(content, np.uint8))
    fewer = 0
    for _ in range(25):
        flipped = bytearray(content)
        flipped[int(random.choice(used))] ^= 1 << int(random.integers(8))
        file.write_bytes(flipped)
        same, count = found(path, 1)
        assert same == expected
        fewer += count < indexed
    assert fewer
    for length in [0, 1, 4095, *random.integers(0, len(content), 12).tolist()]:
        file.write_bytes(content[:length])
        assert found(path, 1)[0] == expected
    file.write_bytes(os.urandom(len(content)))
    assert found(path, 1)[0] == expected


def test_where_a_head_is_damaged_every_segment_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run"
    lived(path, 3, shards=1)
    assert found(path, 1)[1] > 0
    for file in path.rglob("*.tier"):
        _, newest = read_head(str(file))
        with file.open("r+b") as opened:
            opened.seek((newest % 2) * SLOT_NBYTES)  # the older one
            opened.write(os.urandom(600))
    whole, indexed = found(path, 1)
    assert indexed == 0
    assert whole[:3] == found(without_index(path), 1)[0][:3]


def test_what_a_life_has_left_in_free_segments_is_never_taken_for_rows(tmp_path: Path) -> None:
    """A power cut may leave any of it, without the first block too: opening does not look."""
    random = np.random.default_rng(1)

    def life(batches: range) -> tuple[Any, list[tuple[str, int]]]:
        cluster = start(tmp_path, Disk, 1)
        for batch in batches:
            for _ in range(12):
                power.train(cluster, random)
            for future in cluster.prepare_tiers(batch):
                future.result(60)
            cluster.commit_tiers()
        if not batches:
            for _ in range(40):
                power.train(cluster, random)
        logs = [slab.log for slab in slabs_of(cluster)]
        used = [
            (file.path, START + int(segment) * file.segment_blocks * file.block_nbytes)
            for file in logs
            for segment in np.flatnonzero(file.generations > file.head.life << 32)
        ]
        bits = power.everything(cluster)
        end(cluster)
        return bits, used

    life(range(1, 6))
    _, used = life(range(0))
    for name, offset in used:
        with open(name, "r+b") as file:
            file.seek(offset)
            file.write(bytes(4096))
    expected, again = life(range(6, 7))
    assert set(again) & set(used)  # or this test would be about nothing
    cluster = start(tmp_path, Disk, 1)
    assert cluster.tier_batch() == 6
    assert power.everything(cluster) == expected
    end(cluster)


class FullBeside(Disk):
    """A disk on which nothing can be done with an index, in one way."""

    fails, code = "", errno.EIO
    handles: ClassVar[set[int]] = set()

    def _maybe(self, what: str, concerned: bool) -> None:
        if concerned and what == type(self).fails:
            raise OSError(self.code, os.strerror(self.code))

    def create(self, path: str) -> int:
        self._maybe("create", path.endswith(".index"))
        return super().create(path)

    def open(self, path: str, *, direct: bool) -> int:
        self._maybe("open", path.endswith(".index"))
        handle = super().open(path, direct=direct)
        (self.handles.add if path.endswith(".index") else self.handles.discard)(handle)
        return handle

    def write_at(self, handle: int, view: memoryview, offset: int) -> None:
        self._maybe("write_at", handle in self.handles)
        super().write_at(handle, view, offset)

    def unlink(self, path: str) -> None:
        self._maybe("unlink", path.endswith(".index"))
        super().unlink(path)


def test_an_index_that_is_given_up_takes_no_flush_with_it(idle: Idle) -> None:
    """By upkeep, while another thread notes that its blocks are in the file."""

    class GivenUp(dict[int, segment_index.Noted]):
        def get(self, *given: Any) -> Any:
            found = super().get(*given)
            self.clear()
            return found

    index, words = idle.index, np.zeros(64 * 512, np.uint64)
    index.begin(1, 1, 1, 1)
    index._noted = GivenUp(index._noted)
    index.written(1, words)
    assert not index._noted
    end(idle.cluster)


@pytest.mark.parametrize("fails", ["create", "open", "write_at", "unlink"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_an_error_of_the_index_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, code: int
) -> None:
    monkeypatch.setattr(FullBeside, "code", code)
    monkeypatch.setattr(FullBeside, "fails", fails)
    random = np.random.default_rng(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cluster = start(tmp_path, FullBeside, 1)
        for batch in (1, 2):
            for _ in range(25):
                power.train(cluster, random)
            for future in cluster.prepare_tiers(batch):
                future.result(60)
            cluster.commit_tiers()
        expected = power.everything(cluster)
        end(cluster)
    said = [str(warning.message) for warning in caught if ".index" in str(warning.message)]
    assert len(said) == len(set(said)) == (0 if fails == "unlink" else 2)  # one for each file
    monkeypatch.setattr(FullBeside, "fails", "")
    again = start(tmp_path, FullBeside, 1)
    assert again.tier_batch() == 2
    assert power.everything(again) == expected
    end(again)


def test_an_index_that_cannot_be_written_fails_nothing_where_warnings_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FullBeside, "fails", "create")
    monkeypatch.setattr(durable_open, "DISK", FullBeside)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        large(tmp_path / "t", monkeypatch)
    assert not [*(tmp_path / "t").rglob("*.index")]
    end(reopened(tmp_path / "t"))


def large(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file of many blocks a segment, with a durable batch; what it comes back with."""
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 64 * 4096)
    cluster = reopened(path)
    for first in range(0, 12_000, 500):
        ids = {"t": list(range(first, first + 500))}
        cluster.push(wanted_of(cluster, ids), grads_of(cluster, {"t": np.ones((500, 30))}), lr=0.1)
    before = state(cluster)
    for future in cluster.prepare_tiers(1):
        future.result(60)
    cluster.commit_tiers()
    (slab,) = slabs_of(cluster)
    upkeep.run(slab)
    end(cluster)
    return before


def reopened(path: Path) -> LocalCluster:
    optimizer = Adagrad(lr=0.1)
    tables = tiered([Table("t", rows=12_000, dim=30)], optimizer, path, 1000)
    return local(threads=2).open(tables, optimizer, seed=0)


def test_a_restart_reads_a_small_share_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = large(tmp_path / "t", monkeypatch)
    nbytes = 0

    def counted(*given: Any) -> int:
        nonlocal nbytes
        got = read_at(*given)
        nbytes += got
        return got

    for module in (log, segment_index):
        monkeypatch.setattr(module, "read_at", counted)
    cluster = reopened(tmp_path / "t")
    size = (tmp_path / "t" / "rows-0-0.tier").stat().st_size
    assert nbytes < 0.2 * size
    (status,) = cluster.tier_status()
    assert status.segments - 2 <= status.unchecked <= status.segments
    assert state(cluster) == before
    end(cluster)


class Idle:
    """A file that was opened by its index, and upkeep that runs when the test says so."""

    def __init__(self, path: Path, before: Any = None) -> None:
        self.path, self.before = path, before
        self.open()

    def open(self) -> None:
        self.cluster = reopened(self.path)
        (self.slab,) = slabs_of(self.cluster)
        self.slab._upkeep.stop()
        self.index = self.slab.log.index

    def damage(self) -> int:
        """Damages a record of a segment that nobody has read; its row."""
        segment = min(self.index.unchecked)
        row = int(np.flatnonzero(self.slab.positions == segment * self.slab.log.slots + 200)[0])
        block = (int(self.slab.positions[row]) - 1) // self.slab.log.per_block
        with open(self.slab.log.path, "r+b") as file:
            file.seek(START + block * 4096 + 40)
            file.write(b"damage")
        return row

    def look(self) -> None:
        self.index.due = 0
        upkeep.run(self.slab)

    def look_at_all(self) -> None:
        while self.index.unchecked:
            self.look()

    def check_undurable(self) -> None:
        (status,) = self.cluster.tier_status()
        assert status.damaged == 1
        with pytest.raises(DamageError, match="segment"):
            self.cluster.prepare_tiers(2)


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Idle:
    return Idle(tmp_path / "t", large(tmp_path / "t", monkeypatch))


def test_damage_that_opening_has_not_read_is_found_by_the_first_read(idle: Idle) -> None:
    row = idle.damage()
    with pytest.raises(DamageError, match="not what was written"):
        idle.cluster.pull(wanted_of(idle.cluster, {"t": [row]}))
    idle.check_undurable()
    end(idle.cluster)


@pytest.mark.parametrize("how", ["damaged", "unreadable"])
def test_damage_that_opening_has_not_read_is_found_in_time(
    idle: Idle, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = len(idle.index.unchecked)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if how == "damaged":
        idle.damage()
    for seen in range(waiting):
        with monkeypatch.context() as patch:
            if how == "unreadable" and seen == 0:
                patch.setattr(log, "read_at", fail)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                idle.look()
        assert bool(caught) == (seen == 0 if how == "unreadable" else bool(caught))
    assert idle.cluster.tier_status()[0].unchecked == 0
    idle.check_undurable()
    end(idle.cluster)


def test_nothing_is_read_for_an_index_that_is_given_up(idle: Idle) -> None:
    end(idle.cluster)
    (idle.path / "rows-0-0.index").unlink()
    idle.open()
    assert len(idle.index.missing) > 10
    idle.index.distrust()
    idle.look()
    assert idle.index.rest(0.0) is None
    end(idle.cluster)


@pytest.mark.parametrize("where", [(durable_scan, "aligned"), (log, "read_at")], ids=str)
@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no memory")], ids=repr)
def test_a_look_that_has_no_memory_is_made_later(
    idle: Idle, error: Exception, where: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = set(idle.index.unchecked)

    def fail(*_: object) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*where, fail)
        idle.look()
    assert idle.index.unchecked == waiting
    assert idle.index.due > idle.slab.log.clock.monotonic() + 1
    idle.look_at_all()
    assert idle.cluster.tier_status()[0].damaged == 0
    end(idle.cluster)


def test_what_opening_had_to_read_has_an_entry_soon(idle: Idle) -> None:
    """Also the segment that a life had not filled, and all of a file that had no index."""
    end(idle.cluster)
    (idle.path / "rows-0-0.index").unlink()
    idle.open()
    assert not idle.index.unchecked
    waiting = len(idle.index.missing)
    assert waiting > 10
    for _ in range(waiting):
        idle.look()
    assert not idle.index.missing
    end(idle.cluster)
    idle.open()
    assert len(idle.index.unchecked) == waiting
    assert not idle.index.missing
    assert state(idle.cluster) == idle.before
    end(idle.cluster)


def test_segments_are_looked_at_one_by_one_and_not_at_once(idle: Idle) -> None:
    clock, waiting = VirtualClock(), len(idle.index.unchecked)
    idle.slab.log.clock = clock
    idle.index.postpone(clock.monotonic())
    clock.sleep(9)
    upkeep.run(idle.slab)
    assert len(idle.index.unchecked) == waiting  # training that starts has the disk to itself
    clock.sleep(1)
    for _ in range(2):
        upkeep.run(idle.slab)
        assert len(idle.index.unchecked) == waiting - 1
    assert idle.slab._keep_up() == pytest.approx(0.04)
    clock.sleep(0.05)
    upkeep.run(idle.slab)
    assert len(idle.index.unchecked) == waiting - 2
    end(idle.cluster)


def test_rows_are_not_lost_because_an_index_says_so(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with it: the file is read before anybody calls it damaged."""
    end(idle.cluster)
    decode = segment_index.SegmentIndex._decode

    def wrong(self: segment_index.SegmentIndex, segment: int, words: Any) -> Any:
        entry = decode(self, segment, words)
        if entry is not None:
            entry.codes[0] |= np.uint64(1)  # deleted
        return entry

    monkeypatch.setattr(segment_index.SegmentIndex, "_decode", wrong)
    idle.open()
    assert state(idle.cluster) == idle.before
    assert not idle.index.unchecked
    assert not (idle.path / "rows-0-0.index").exists()
    end(idle.cluster)


def test_a_segment_whose_rows_are_gone_is_not_looked_at(idle: Idle) -> None:
    idle.cluster.clear()
    for future in idle.cluster.prepare_tiers(2):
        upkeep.run(idle.slab)
        future.result(0)
    idle.cluster.commit_tiers()
    assert not idle.index.unchecked
    assert idle.index.rest(0.0) is None
    end(idle.cluster)


def test_a_file_that_starts_over_has_no_index_of_the_one_before(tmp_path: Path) -> None:
    cluster = start(tmp_path, Disk, 1)
    stale = tmp_path / "tier" / "rows-0-0.index"
    end(cluster)
    stale.write_bytes(b"of an earlier file")
    cluster = start(tmp_path, Disk, 1)
    assert not stale.exists()
    end(cluster)


def _pull(idle: Idle, row: int) -> None:
    with pytest.raises(DamageError, match="not what was written"):
        idle.cluster.pull(wanted_of(idle.cluster, {"t": [row]}))


def _look(idle: Idle, _: int) -> None:
    with pytest.warns(RuntimeWarning, match="damaged"):
        idle.look_at_all()


@pytest.mark.parametrize("fails", ["", "unlink"])
@pytest.mark.parametrize("meet", [_pull, _look])
def test_the_opening_after_a_damage_was_met_finds_it(
    idle: Idle, meet: Callable[[Idle, int], None], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server would come back with it over and over, and no batch were durable any more."""
    monkeypatch.setattr(FullBeside, "fails", fails)
    monkeypatch.setattr(idle.index, "_disk", FullBeside())
    meet(idle, idle.damage())
    end(idle.cluster)
    with pytest.raises(DamageError, match="segment 0: 1 blocks that were durable are damaged"):
        idle.open()
