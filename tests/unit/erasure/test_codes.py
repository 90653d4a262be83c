"""The field, the coefficients and the placement, over every size that is used."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.erasure.codes import (
    POLYNOMIAL,
    Code,
    Parity,
    Placement,
    inverse,
    inverted,
    multiply,
    products,
)
from emberkeep.errors import ConfigError
from emberkeep.kernels import galois

SHAPES = [(n, k, r) for n in range(2, 9) for k in range(1, n) for r in range(1, n - k + 1)]
elements = st.integers(0, 255)


def slow_product(a: int, b: int) -> int:
    total = 0
    for bit in range(8):
        if b >> bit & 1:
            total ^= a << bit
    for bit in range(14, 7, -1):
        if total >> bit & 1:
            total ^= POLYNOMIAL << (bit - 8)
    return total


def test_products_are_those_of_polynomials() -> None:
    for a in range(256):
        assert products(a).tolist() == [slow_product(a, b) for b in range(256)]
        if a:
            assert multiply(a, inverse(a)) == 1


@given(
    coefficient=elements,
    words=st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=5, max_size=5), max_size=6),
)
def test_the_kernel_adds_products_of_bytes(coefficient: int, words: list[list[int]]) -> None:
    rows = np.array(words, np.uint32).reshape(-1, 5)
    target = np.arange(50, dtype=np.uint32).reshape(10, 5)
    at = np.arange(9, 9 - len(rows), -1)
    expected = target.copy()
    for i, place in enumerate(at):
        expected[place] ^= products(coefficient)[rows[i : i + 1].view(np.uint8)].view(np.uint32)[0]
    galois.add_product(0, len(rows), target, at, 0, rows, np.uint32(coefficient))
    assert np.array_equal(target, expected)


@pytest.mark.parametrize(("n", "k", "r"), SHAPES)
def test_any_r_losses_of_a_stripe_can_be_solved(n: int, k: int, r: int) -> None:
    code = Code(k, r)
    assert set(code.coefficients[0]) == {1}
    random = np.random.default_rng(k * 16 + r)
    data = random.integers(0, 256, k).tolist()
    parity = [_sum(code.coefficients[p], data) for p in range(r)]
    for lost in combinations(range(k + r), r):
        unknown = [s for s in lost if s < k]
        left = [p for p in range(r) if k + p not in lost]
        known = [0 if s in unknown else data[s] for s in range(k)]
        for parities in combinations(left, len(unknown)):
            syndromes = [parity[p] ^ _sum(code.coefficients[p], known) for p in parities]
            solution = code.solution(unknown, parities)
            assert [_sum(row, syndromes) for row in solution] == [data[s] for s in unknown]


def _sum(coefficients: object, values: object) -> int:
    total = 0
    for c, v in zip(coefficients, values, strict=True):  # type: ignore[call-overload]
        total ^= multiply(c, v)
    return total


def test_a_singular_matrix_is_refused() -> None:
    with pytest.raises(ArithmeticError, match="no inverse"):
        inverted([[1, 2], [1, 2]])


@pytest.mark.parametrize(("n", "k", "r"), SHAPES)
def test_every_row_of_a_stripe_is_on_a_shard_of_its_own(n: int, k: int, r: int) -> None:
    place = Placement(n, k, r)
    seen: Counter[tuple[int, int]] = Counter()
    for shard in range(n):
        for slot in range(k):
            group = place.group(shard, slot)
            assert place.members(group)[slot] == shard
            hosts = [place.host(group, p) for p in range(r)]
            assert len({*place.members(group), *hosts}) == k + r
            for p, host in enumerate(hosts):
                assert place.group_on(host, p) == group
                assert (p, slot) in place.slots_on(shard, host)
                assert host in place.hosts(shard)
                assert shard in place.sources(host)
                seen[host, p] += 1
        assert len(place.hosts(shard)) == len(place.sources(shard)) == k + r - 1
        assert sum(len(place.slots_on(shard, host)) for host in place.hosts(shard)) == k * r
    # Balance: parity p of every shard serves the same number of rows, and so do all p together.
    assert set(seen.values()) == {k}
    assert len(seen) == n * r


def test_what_cannot_work_is_refused() -> None:
    for bad in ({"k": 0}, {"r": 0}, {"k": 256}, {"chunk_rows": 0}, {"rebuild_share": 0.0}):
        with pytest.raises(ConfigError):
            Parity(**bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs 5 shards or more, the cluster has 4"):
        Parity(k=4, r=1).check_shards(4)
