"""Sums of many rows over several hosts at once are those of one host after the other."""

from __future__ import annotations

import numpy as np
import pytest

from emberkeep.erasure.host import Sum, _add_up
from emberkeep.runtime.pool import Pool


def sums_of(random: np.random.Generator, hosts: int) -> list[list[Sum]]:
    """Three sums for each host, into the same rows; wide and narrow, plain and scaled."""
    made: list[list[Sum]] = []
    for host in range(hosts):
        target = random.integers(0, 2**32, (9000, 5 + host), np.uint32)
        made.append([])
        for coefficient in (1, 29, 1):
            stripes = random.choice(4000, 3000, replace=False)
            values = random.integers(0, 2**32, (stripes.size, target.shape[1]), np.uint32)
            first = int(random.integers(0, 5000))
            made[-1].append((target, stripes, first, values, np.uint32(coefficient)))
    return made


@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_threads_change_nothing(hosts: int) -> None:
    expected, found = (sums_of(np.random.default_rng(hosts), hosts) for _ in range(2))
    _add_up(expected, None)
    _add_up([*found, []], Pool(3))
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one[0][0], other[0][0])
