"""Kernels against plain references: the index of ids, initial values, unique rows, the cache."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.kernels import batch_rows, hash_index, initial_values
from emberkeep.rows.slots import Slots

# Ids that collide: few home positions, so that runs of entries form, shift and wrap around.
some_ids = st.sampled_from([*range(20), -1, -(2**63), 2**63 - 1, *range(2**40, 2**40 + 20)])


@given(
    history=st.lists(
        st.tuples(st.booleans(), st.lists(some_ids, unique=True, max_size=12)), max_size=30
    )
)
def test_the_index_is_a_dictionary(history: list[tuple[bool, list[int]]]) -> None:
    slots = Slots(60, np.zeros(60, np.int64), None)
    model: dict[int, int] = {}
    for insert, ids in history:
        if insert:
            new = [i for i in ids if i not in model]
            given_slots = slots.insert(np.array(new, np.int64))
            assert not set(given_slots.tolist()) & set(model.values())
            model.update(zip(new, given_slots.tolist(), strict=True))
        else:
            gone = [i for i in ids if i in model]
            slots.remove(np.array(gone, np.int64), np.array([model.pop(i) for i in gone], np.int64))
        everything = np.array([*range(20), -1, -(2**63), 2**63 - 1, 2**40, 2**40 + 7], np.int64)
        found = np.empty(everything.size, np.int64)
        unknown = slots.find(everything, 1000, found)
        expected = [model[i] + 1000 if i in model else -1 for i in everything.tolist()]
        assert found.tolist() == expected
        assert unknown == expected.count(-1)
        assert slots.count == len(model)


@given(
    operations=st.lists(
        st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 2**31)), max_size=40
    )
)
def test_the_oldest_slots_are_found_in_order(operations: list[tuple[bool, int, int]]) -> None:
    capacity = 5000  # large enough for the queue to hold a part of the slots only
    slots = Slots(capacity, np.zeros(capacity, np.int64), np.zeros(capacity, np.int64))
    order: dict[int, None] = {}
    filled = slots.insert(np.arange(capacity, dtype=np.int64))
    slots.touch(filled)
    order.update(dict.fromkeys(filled.tolist()))
    for evict, count, seed in operations:
        if evict:
            expected = list(order)[: count * 40]
            assert slots.take_oldest(len(expected), lambda _: None).tolist() == expected
            for slot in expected:
                del order[slot]
        else:
            touched = np.random.default_rng(seed).choice(list(order), count * 40, replace=False)
            slots.touch(touched)
            for slot in touched.tolist():
                order[slot] = order.pop(slot)
        if len(order) < 800:
            return


@given(
    counts=st.lists(st.lists(st.integers(-3, 12), max_size=40), min_size=1, max_size=5),
)
def test_unique_rows_come_in_the_order_of_first_occurrence(counts: list[list[int]]) -> None:
    ids = np.array([i for table in counts for i in table], np.int64)
    offsets = np.cumsum([0, *map(len, counts)])
    staged, inverse = np.empty(ids.size, np.int64), np.empty(ids.size, np.int32)
    found = np.empty(len(counts), np.int64)
    batch_rows.dedupe(0, len(counts), ids, offsets, staged, inverse, found)
    for t, table in enumerate(counts):
        unique = list(dict.fromkeys(table))
        assert staged[offsets[t] : offsets[t] + found[t]].tolist() == unique
        assert [unique[i] for i in inverse[offsets[t] : offsets[t + 1]]] == table


@given(present=st.sets(st.integers(0, 700)))
def test_bits_are_listed_and_counted(present: set[int]) -> None:
    bits = np.zeros(11, np.uint64)
    batch_rows.set_bits(bits, np.array(sorted(present), np.int64))
    found = np.empty(batch_rows.count_bits(bits, 0, 11), np.int64)
    assert batch_rows.list_bits(bits, 0, 11, found) == len(present)
    assert found.tolist() == sorted(present)
    asked = np.arange(704)
    answer = np.empty(704, np.bool_)
    batch_rows.test_bits(bits, asked, answer)
    assert set(asked[answer].tolist()) == present


def weights(kind: int, a: float, b: float, ids: int, dim: int, key: int = 7) -> np.ndarray:
    out = np.empty((ids, dim), np.float32)
    initial_values.initial_rows(
        np.uint64(key), kind, np.float32(a), np.float32(b), np.arange(ids, dtype=np.int64), out
    )
    return out


def test_initial_values_are_the_same_bits_for_ever() -> None:
    """Rows that were never trained are stored nowhere: these values are part of the format."""
    uniform, normal = (
        weights(initial_values.UNIFORM, -0.05, 0.05, 3, 5),
        weights(initial_values.NORMAL, 0, 1, 3, 5),
    )
    assert uniform.tobytes().hex() == UNIFORM_BITS
    assert normal.tobytes().hex() == NORMAL_BITS


UNIFORM_BITS = (
    "289944bd4077f4bac7e64b3d3211873cf01f36bdc5d8023d9a1bf43c50cc29bb4006833a00499b3b"
    "a0ea88bc16d1be3cc14a1b3deb1e3fbdcd251cbd"
)
NORMAL_BITS = (
    "926803c087903fbd1d543640ca03da3ef527ccbf2acc693fce9d553f8e1985bd6b4acd3cf3d9f33d"
    "f130ddbec6271f3ff9d7953fd6a1eabf812e97bf"
)


def test_uniform_values_fill_their_range_evenly() -> None:
    values = weights(initial_values.UNIFORM, -2.0, 1.0, 4000, 25).ravel()
    assert values.min() >= -2.0
    assert values.max() < 1.0
    counts = np.histogram(values, bins=50, range=(-2.0, 1.0))[0]
    expected = values.size / 50
    assert ((counts - expected) ** 2 / expected).sum() < 100  # chi square, 49 degrees of freedom


def test_normal_values_are_normal() -> None:
    values = np.sort(weights(initial_values.NORMAL, 3.0, 0.5, 4000, 25).astype(np.float64).ravel())
    ranks = (np.arange(values.size) + 0.5) / values.size
    distance = np.abs([NormalDist(3.0, 0.5).cdf(v) for v in values[::50]] - ranks[::50]).max()
    assert distance < 1.95 / values.size**0.5  # Kolmogorov-Smirnov at 0.1%
    assert abs(values).max() < 3.0 + 0.5 * 7


def test_rows_tables_and_columns_are_independent() -> None:
    one, other = (weights(initial_values.NORMAL, 0, 1, 3000, 8, key=key) for key in (1, 2))
    pairs = np.corrcoef(np.concatenate([one, other], axis=1).T)
    assert np.abs(pairs - np.eye(16)).max() < 0.1
    assert abs(np.corrcoef(one[:-1].ravel(), one[1:].ravel())[0, 1]) < 0.03


def test_a_row_does_not_depend_on_its_neighbours_or_the_width_before_it() -> None:
    wide, narrow = (
        weights(initial_values.UNIFORM, 0, 1, 6, 9),
        weights(initial_values.UNIFORM, 0, 1, 6, 4),
    )
    assert wide[:, :4].tobytes() == narrow.tobytes()


def test_routing_sends_every_id_to_one_shard_in_order() -> None:
    ids = np.random.default_rng(0).integers(0, 10**6, 500)
    offsets, dynamic = np.array([0, 200, 500]), np.array([False, True])
    counts, order = np.zeros((4, 2), np.int64), np.empty(500, np.int64)
    hash_index.route(ids, offsets, dynamic, 4, counts, order)
    assert sorted(order.tolist()) == list(range(500))
    at = 0
    for shard in range(4):
        fixed = order[at : at + counts[shard, 0]]
        assert (ids[fixed] % 4 == shard).all()
        assert (np.diff(fixed) > 0).all()
        at += counts[shard].sum()
    assert (counts[:, 1] > 40).all()
