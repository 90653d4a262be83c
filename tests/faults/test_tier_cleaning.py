"""Damage under the cleaner: a record that is moved is checked first, so none becomes valid."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.errors import DamageError
from emberkeep.kernels import log_records as kernels
from emberkeep.tiers import durable_open, log, upkeep
from emberkeep.tiers.superblock import START
from emberkeep.tiers.tiered_slab import TieredSlab
from tests.contracts.engine import state
from tests.faults.test_tier_faults import end, make_durable, start, train
from tests.unit.tiers.test_tiered_slab import Unsynced


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    monkeypatch.setattr(durable_open, "DISK", Unsynced)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A tier whose cleaner has a segment to clean, and which runs when the test says so."""
    cluster = start(tmp_path / "t")
    (slab,) = cluster.shards[0].tiers()
    slab._upkeep.stop()
    for seed in range(60):
        train(cluster, seed)
        if slab.log._cleanable() is not None:
            break
    yield cluster
    end(cluster)


def clean(slab: TieredSlab) -> None:
    for _ in range(1000):
        if not upkeep.run(slab):
            return
    raise AssertionError("the cleaner does not come to an end")


def worth_cleaning(slab: TieredSlab) -> int:
    segment = slab.log._cleanable()
    assert segment is not None
    assert slab.log.live[segment] > 0
    return segment


def live_record(slab: TieredSlab, segment: int) -> tuple[int, int]:
    """A row whose newest record is in that segment, and where in the file its block starts."""
    log = slab.log
    places = slab.positions.astype(np.int64) - 1
    row = int(np.flatnonzero((places >= 0) & (places // log.slots == segment))[0])
    return row, START + int(places[row]) // log.per_block * log.block_nbytes


def change(slab: TieredSlab, offset: int, content: bytes) -> None:
    with open(slab.log.path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def flip(slab: TieredSlab, offset: int) -> None:
    with open(slab.log.path, "rb") as file:
        file.seek(offset)
        (byte,) = file.read(1)
    change(slab, offset, bytes([byte ^ 1]))


def test_a_flipped_byte_stays_damage_when_its_segment_is_cleaned(cluster: LocalCluster) -> None:
    (slab,) = cluster.shards[0].tiers()
    segment = worth_cleaning(slab)
    row, block = live_record(slab, segment)
    place = int(slab.positions[row]) - 1
    slot = place % slab.log.per_block
    flip(slab, block + kernels.HEADER + slot * 8 * slab.log.layout.record_words + 16)
    with open(slab.log.path, "rb") as file:
        file.seek(START + segment * 16384)
        before = file.read(16384)
    with pytest.warns(RuntimeWarning, match=rf"segment {segment}.*left where it is"):
        clean(slab)
    assert int(slab.positions[row]) - 1 == place
    with open(slab.log.path, "rb") as file:
        file.seek(START + segment * 16384)
        assert file.read(16384) == before
    # What cannot be read back is not declared durable.
    with pytest.raises(DamageError, match=f"segment {segment}"):
        cluster.prepare_tiers(1)
    assert slab.saving is None
    if slab.frames.frame_of[row] == 0:
        with pytest.raises(DamageError, match="not what was written"):
            state(cluster)


@pytest.mark.parametrize("count", [2**31, 0])
def test_a_damaged_count_indexes_nothing(cluster: LocalCluster, count: int) -> None:
    (slab,) = cluster.shards[0].tiers()
    segment = worth_cleaning(slab)
    row, block = live_record(slab, segment)
    place = int(slab.positions[row])
    change(slab, block + 8, count.to_bytes(4, "little"))
    with pytest.warns(RuntimeWarning, match="left where it is"):
        clean(slab)
    assert int(slab.positions[row]) == place


def test_a_count_beyond_its_block_is_damage_even_under_a_valid_checksum() -> None:
    words = np.zeros(2 * 512, np.uint64)
    salt = np.uint64(7)
    kernels.seal(words, 512, 10, 20, 1, 5, 1, 0, salt)
    words[512 + 1] = np.uint64(11) | (np.uint64(1) << np.uint64(32))
    words[512] = kernels.checksum(words[512:], salt, 1, 1)
    generations, sequences = np.empty(2, np.int64), np.empty(2, np.int64)
    kernels.check_blocks(words, 512, 10, 0, salt, generations, sequences)
    assert generations.tolist() == [1, -1]
    assert sequences.tolist() == [5, -1]


def test_damage_is_survived_once_all_its_rows_have_newer_records(cluster: LocalCluster) -> None:
    """The damaged segment is not used again by this process, and no longer in anybody's way."""
    (slab,) = cluster.shards[0].tiers()
    segment = worth_cleaning(slab)
    _, block = live_record(slab, segment)
    flip(slab, block + 100)
    with pytest.warns(RuntimeWarning, match="left where it is"):
        clean(slab)
    cluster.clear()
    train(cluster, 1)
    clean(slab)
    futures = cluster.prepare_tiers(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clean(slab)
    for future in futures:
        future.result(0)
    cluster.commit_tiers()
    assert segment not in slab.log._free
    before = state(cluster)
    path = Path(slab.log.path).parent
    end(cluster)
    again = start(path)
    assert state(again) == before
    make_durable(again, 2)
    end(again)


def test_damage_that_is_met_when_its_rows_have_newer_records_is_in_nobodys_way(
    cluster: LocalCluster,
) -> None:
    """By a save of rows as they were, say, which were overwritten before it got to read them."""
    (slab,) = cluster.shards[0].tiers()
    segment = worth_cleaning(slab)
    places = slab.positions.astype(np.int64) - 1
    there = (places >= 0) & (places // slab.log.slots == segment)
    rows = np.flatnonzero(there & (slab.frames.frame_of == 0))
    with slab.lock:
        read = slab.take(rows, {"weight": slab._held_by(rows)["weight"]})
    assert read is not None
    flip(slab, START + int(places[rows[0]]) // slab.log.per_block * slab.log.block_nbytes + 100)
    cluster.clear()
    train(cluster, 1)
    clean(slab)
    assert slab.log.live[segment] == 0
    with pytest.raises(DamageError, match="not what was written"):
        read()
    assert cluster.tier_status()[0].damaged == 0
    futures = cluster.prepare_tiers(1)
    clean(slab)
    for future in futures:
        future.result(0)
    cluster.commit_tiers()
    for seed in range(100, 130):
        train(cluster, seed)
        clean(slab)
    assert segment not in slab.log._free  # its next bytes might not last either
    assert not slab.log.live[segment]


def test_a_segment_is_not_used_again_while_somebody_reads_it(cluster: LocalCluster) -> None:
    (slab,) = cluster.shards[0].tiers()
    segment = worth_cleaning(slab)
    places = slab.positions.astype(np.int64) - 1
    there = (places >= 0) & (places // slab.log.slots == segment)
    rows = np.flatnonzero(there & (slab.frames.frame_of == 0))
    expected = slab._held_by(rows)["weight"]
    found = np.zeros_like(expected)
    with slab.lock:
        read = slab.take(rows, {"weight": found})  # a save or a pull, before it gets to read
    assert read is not None
    generation = slab.log.generations[segment]
    for seed in range(100, 160):
        clean(slab)
        train(cluster, seed)
    assert slab.log.generations[segment] == generation
    read()
    assert found.tobytes() == expected.tobytes()
    assert segment in slab.log._free or slab.log.generations[segment] > generation


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOMEM], ids=errno.errorcode.get)
def test_a_segment_that_cannot_be_read_to_be_cleaned_ends_nothing(
    cluster: LocalCluster, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cleaner's thread would be gone, and with it the shard. A lack of memory is no damage."""
    (slab,) = cluster.shards[0].tiers()
    segment = worth_cleaning(slab)
    before = state(cluster)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(log, "read_at", fail)
        clean(slab)
    said = [str(warning.message) for warning in caught]
    assert bool(said) == any(f"segment {segment}:" in line for line in said) == (code == errno.EIO)
    clean(slab)
    assert cluster.tier_status()[0].damaged == len(said)
    assert slab.log._cleanable() != segment
    assert state(cluster) == before


def test_no_memory_for_rows_that_are_moved_is_not_passed_over(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some may have a place already, which nobody would write to any more."""
    (slab,) = cluster.shards[0].tiers()
    worth_cleaning(slab)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(slab.log, "extend", fail)
    with pytest.raises(OSError, match="memory"):
        clean(slab)
