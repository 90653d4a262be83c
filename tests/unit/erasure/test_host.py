"""Sums of many rows over several hosts at once are those of one host after the other; parity that
starts over takes no memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from emberkeep.erasure.codes import Placement, products
from emberkeep.erasure.host import ParityHost, Sum, _add_up
from emberkeep.erasure.messages import Changed, Differences, Fill, Message, Point, Shape
from emberkeep.runtime.memory import resident_nbytes
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


MIB = 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="who knows what is resident?")
@pytest.mark.parametrize("how", ["refill", "start_over", "clear"])
def test_parity_that_starts_over_takes_no_memory(how: str) -> None:
    """A gigabyte of parity, of which a few rows are not zeros, at both ends of both units."""
    place, stripes = Placement(4, 2, 2), 2**20
    host = ParityHost(0, place, [Shape(rows=2 * stripes, words=128, mark_nbytes=9)])
    source = place.members(place.group_on(0, 0))[-1]
    slots = place.slots_on(source, 0)
    assert len(slots) == 2  # in both of its units
    host.follow(source, 1, 0, Point({}, ()))
    at = np.array([0, 1, 1000, stripes - 1])
    records = np.arange(at.size * 128, dtype=np.uint32).reshape(-1, 128) + 1
    marks = np.full((at.size, 9), 7, np.uint8)
    both = np.concatenate([at, at]), np.array([0, at.size, 2 * at.size])
    twice = np.concatenate([records, records]), np.concatenate([marks, marks])
    part = Changed(0, *both, twice[0], *both, twice[1])
    host.receive(Message(source, 1, 1, 0, Differences((part,), None, ())))
    assert all(host._records[0][p * stripes + at].all() for p, _ in slots)
    before = resident_nbytes()
    if how == "refill":
        host.refill(source)
    else:
        getattr(host, how)()
    assert resident_nbytes() - before < 100 * MIB
    assert host.complete == (how == "clear")
    for p, _ in slots:
        rows = p * stripes + at
        assert not host._records[0][rows].any()
        assert not host._marks[0][rows].any()
    if how == "clear":
        return
    for number, (p, slot) in enumerate(slots, start=2):
        fill = Fill(0, p, 0, slot, 0, stripes, at, records, marks)
        host.receive(Message(source, 1, number, 0, fill))
        times = products(host.code.coefficients[p][slot])
        rows = p * stripes + at
        assert np.array_equal(host._records[0][rows].view(np.uint8), times[records.view(np.uint8)])
        assert np.array_equal(host._marks[0][rows], times[marks])
