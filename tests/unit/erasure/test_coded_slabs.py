"""What a write changes: differences taken by the optimizer's kernel, or from copies of rows."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest

from emberkeep._types import RowIds
from emberkeep.erasure import coded_slabs
from emberkeep.erasure.coded_slabs import Recorder, SlabRows, marks_of
from emberkeep.erasure.codes import Placement
from emberkeep.erasure.messages import Changed
from emberkeep.rows.slab import Slab
from emberkeep.runtime.pool import Pool
from emberkeep.tables import Adagrad, Optimizer, Table
from tests.contracts.engine import OPTIMIZERS

K = 3
ROWS = 200


class Interrupted(Exception):
    pass


def slab_of(optimizer: Optimizer, *, dynamic: bool = False) -> Slab:
    tables = [Table("a", rows=ROWS, dim=5), Table("b", rows=ROWS, dim=5)]
    if dynamic:
        tables.append(Table("c", rows=None, capacity=ROWS, dim=5))
    return Slab(tables, optimizer, pool=Pool(2))


def push(slab: Slab, random: np.random.Generator) -> None:
    parts = [random.choice(ROWS, 60, replace=False) for _ in slab.tables]
    wanted = RowIds(np.concatenate(parts), np.arange(len(parts) + 1) * 60)
    grads = random.standard_normal((wanted.ids.size, slab.dim)).astype(np.float32)
    slab.push(slab.check_push(wanted, grads), 0.1)


def coded(slab: Slab) -> tuple[Any, Any]:
    """Records and marks of all rows."""
    rows = np.arange(slab.rows)
    marks = marks_of(slab, rows)
    records = np.hstack([plane.view(np.uint32) for plane in slab.planes.values()])
    return np.where(marks[:, :1] != 0, records, 0), marks


def add(before: tuple[Any, Any], changed: Changed | None) -> tuple[Any, Any]:
    after = tuple(layer.copy() for layer in before)
    if changed is not None:
        for total, layer in zip(after, ("records", "marks"), strict=True):
            bounds, stripes, values = changed.of_layer(layer)  # type: ignore[arg-type]
            for slot in range(K):
                part = slice(bounds[slot], bounds[slot + 1])
                rows = stripes[part] * K + slot
                assert np.unique(rows).size == rows.size
                total[rows] ^= values[part]
    return after  # type: ignore[return-value]


def same(one: tuple[Any, Any], two: tuple[Any, Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_differences_lead_from_old_rows_to_new(
    name: str, max_norm: float | None, dynamic: bool
) -> None:
    spec = dataclasses.replace(OPTIMIZERS[name], max_norm=max_norm)
    watched, plain = (slab_of(spec, dynamic=dynamic) for _ in range(2))
    recorder = watched.recorder = Recorder(0, watched, K)
    for seed in range(4):
        before = coded(watched)
        for slab in (watched, plain):
            slab.dirty[:] = 0
            push(slab, np.random.default_rng(seed))
        assert same(coded(watched), coded(plain))
        assert np.array_equal(watched.dirty, plain.dirty)
        assert same(add(before, recorder.take()), coded(watched))
    assert recorder.take() is None


@pytest.mark.parametrize("moment", ["_prepare", "_over", "_after_write"])
@pytest.mark.parametrize("then", ["take", "push", "delete"])
def test_a_push_that_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, moment: str, then: str
) -> None:
    """Whatever it had changed by then is recorded with the next write."""
    slab = slab_of(Adagrad(lr=0.1))
    recorder = slab.recorder = Recorder(0, slab, K)
    push(slab, np.random.default_rng(0))
    recorder.take()
    before = coded(slab)
    going = getattr(slab, moment)

    def interrupted(*args: Any, **how: Any) -> Any:
        going(*args, **how)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(slab, moment, interrupted)
        with pytest.raises(Interrupted):
            push(slab, np.random.default_rng(1))
    if then == "push":
        push(slab, np.random.default_rng(2))
    elif then == "delete":
        slab.delete(0, np.arange(0, ROWS, 2))
    after = coded(slab)
    assert same(add(before, recorder.take()), after)
    push(slab, np.random.default_rng(3))
    assert same(add(after, recorder.take()), coded(slab))


def test_marks_of_many_rows_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_slabs, "_REVEAL_ROWS", 64, raising=False)
    lost, slab = (slab_of(Adagrad(lr=0.1), dynamic=True) for _ in range(2))
    push(lost, np.random.default_rng(3))
    _, marks = coded(lost)
    rows = SlabRows([slab], Placement(4, K, 1), lost=True)
    rows.install(0, "marks", np.arange(slab.rows), marks)
    rows.reveal()
    assert np.array_equal(marks_of(slab, np.arange(slab.rows)), marks)
    assert np.array_equal(rows.unknown(0, "records", np.arange(slab.rows)), marks[:, 0] != 0)
    assert rows.missing_rows == int(marks[:, 0].sum()) == 180
    assert slab.slots[2].count == 60


def test_what_marks_take_of_memory_does_not_grow_with_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coded_slabs, "_REVEAL_ROWS", 2**12, raising=False)
    count = 2**19
    slab = Slab([Table("a", rows=count, dim=1)], Adagrad(lr=0.1), pool=Pool(1))
    rows = SlabRows([slab], Placement(4, K, 1), lost=True)
    rows.install(0, "marks", np.arange(count), np.ones((count, 1), np.uint8))
    tracemalloc.start()
    try:
        rows.reveal()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows.missing_rows == count
    assert peak < count
