"""Ids come back as they were, whatever they are; damaged ids are refused or at least in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emberkeep.codecs import pack_ids, unpack_ids
from emberkeep.errors import ConfigError, DamageError, FormatError, IdError
from tests.nightly import examples

LEAST, MOST = -(2**63), 2**63 - 1
RANGE, BITMAP, GAPS = range(3)
HEADER_BYTES = 40


def array(ids: object) -> np.ndarray:
    return np.array(ids, np.int64)


@st.composite
def id_sets(draw: st.DrawFn) -> np.ndarray:
    """Sets of every density and stride, at every place of the 64 bits."""
    count = draw(st.integers(0, 700))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([1.0, 1.05, 1.5, 4, 50, 1e6, 1e12, 1e16]))
    stride = draw(st.sampled_from([1, 1, 8, 1000]))
    units = np.unique(random.integers(0, max(1, int(count * spread)), count))
    first = draw(st.sampled_from([0, 5, -3, LEAST]))
    few = draw(st.lists(st.integers(LEAST, MOST), max_size=5))
    ids = array([first + stride * unit for unit in units.tolist() if stride * unit < 2**62])
    return np.unique(np.concatenate([ids, array(few)]))


@given(id_sets())
@settings(max_examples=examples(300))
@example(array([LEAST, MOST]))
@example(array([LEAST, -1, 0, MOST]))
@example(array([MOST]))
@example(array([]))
@example(np.arange(129))
@example(np.concatenate([np.arange(128), [MOST]]))
def test_ids_come_back(ids: np.ndarray) -> None:
    packed = pack_ids(ids)
    back = unpack_ids(packed, count=len(ids))
    assert back.dtype == np.int64
    assert np.array_equal(back, ids)
    assert len(packed) <= HEADER_BYTES + 8 * len(ids)


def some(density: float, stride: int = 1) -> np.ndarray:
    return np.flatnonzero(np.random.default_rng(0).random(100_000) < density) * stride


@pytest.mark.parametrize(
    ("ids", "kind", "most_bits"),
    [
        (np.arange(7, 100_007), RANGE, 0.01),
        (np.arange(100_000) * 8 + 3, RANGE, 0.01),
        (some(0.9), BITMAP, 1.12),
        (some(0.25), BITMAP, 4.1),
        (some(0.25, stride=8), BITMAP, 4.1),
        (some(0.05), GAPS, 7.4),
        (np.concatenate([np.arange(50_000), 10**9 + 100 * some(0.01)]), GAPS, 0.5),
        (np.random.default_rng(0).integers(LEAST, MOST, 1000), GAPS, 60),
    ],
)
def test_the_smallest_form_is_taken(ids: np.ndarray, kind: int, most_bits: float) -> None:
    ids = np.unique(ids)
    packed = pack_ids(ids)
    assert packed[1] == kind
    assert 8 * len(packed) / len(ids) <= most_bits
    assert np.array_equal(unpack_ids(packed, count=len(ids)), ids)


@pytest.mark.parametrize("ids", [[1, 0], [0, 0], [0, 1, 2, 1], [0, 8, 16, 16], [MOST, LEAST]])
def test_ids_out_of_order_are_refused(ids: list[int]) -> None:
    with pytest.raises(IdError, match="sort"):
        pack_ids(array(ids))


@pytest.mark.parametrize("ids", [np.zeros((2, 2), np.int64), np.zeros(2, np.int32)])
def test_other_arrays_are_refused(ids: np.ndarray) -> None:
    with pytest.raises(ConfigError):
        pack_ids(ids)


SETS = {
    "empty": array([]),
    "range": np.arange(300),
    "bitmap": some(0.5)[:300],
    "gaps": some(0.01)[:300],
    "gaps of 64 bits": np.concatenate([np.arange(150), [MOST]]),
    "wide gaps": array([LEAST, -3, 0, MOST]),
}


@pytest.mark.parametrize("name", SETS)
def test_another_length_is_refused(name: str) -> None:
    ids = SETS[name]
    packed = pack_ids(ids)
    for wrong in (packed[:-1], packed[:-8], packed[:3], np.append(packed, np.zeros(8, np.uint8))):
        with pytest.raises(DamageError):
            unpack_ids(wrong, count=len(ids))
    with pytest.raises(DamageError, match="expected"):
        unpack_ids(packed, count=len(ids) + 1)


@pytest.mark.parametrize("name", SETS)
def test_a_flipped_bit_never_breaks_the_order(name: str) -> None:
    """A digest tells that bytes changed; here nothing may be read or written out of bounds."""
    ids = SETS[name]
    packed = pack_ids(ids)
    for at in range(len(packed)):
        for bit in (0, 3, 7):
            wrong = packed.copy()
            wrong[at] ^= 1 << bit
            try:
                back = unpack_ids(wrong, count=len(ids))
            except (DamageError, FormatError):
                continue
            assert len(back) == len(ids)
            assert (back[1:] > back[:-1]).all()


def test_a_newer_version_is_refused() -> None:
    packed = pack_ids(np.arange(3))
    packed[0] = 2
    with pytest.raises(FormatError, match="release"):
        unpack_ids(packed, count=3)


@given(st.binary(min_size=HEADER_BYTES - 32, max_size=200), st.integers(0, 3))
@settings(max_examples=examples(200))
def test_random_bytes_never_crash(body: bytes, kind: int) -> None:
    packed = np.concatenate([pack_ids(array([5, 9]))[:32], np.frombuffer(body, np.uint8)])
    packed[1] = kind
    try:
        back = unpack_ids(packed, count=2)
    except DamageError:
        return
    assert back[0] < back[1]
