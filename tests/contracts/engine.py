"""What every place that rows can live in must do, whatever it is made of.

A backend is tested by a subclass of three lines that says how a cluster is opened. The reference
is as plain as can be: a dictionary of rows, float32 arithmetic by numpy, one row at a time. Results
are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from emberkeep._types import RowIds
from emberkeep.errors import ConfigError, GradientError, IdError, StateError, TableFullError
from emberkeep.tables import (
    SGD,
    Adagrad,
    Adam,
    Momentum,
    Normal,
    Optimizer,
    RowWiseAdagrad,
    Table,
    Uniform,
)
from tests.nightly import examples

f32 = np.float32

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.1),
    "sgd clipped": SGD(lr=0.5, max_norm=0.3),
    "momentum": Momentum(lr=0.1, momentum=0.8),
    "nesterov": Momentum(lr=0.1, momentum=0.8, nesterov=True),
    "adagrad": Adagrad(lr=0.1, initial_accumulator_value=0.25),
    "row-wise adagrad": RowWiseAdagrad(lr=0.1),
    "adam": Adam(lr=0.05),
    "adam by row": Adam(lr=0.05, step="row"),
}


def tables(dim: int = 5) -> list[Table]:
    """A fixed table, a dynamic one, one that evicts, and one of another width."""
    return [
        Table("fixed", rows=40, dim=dim),
        Table("dynamic", rows=None, capacity=60, dim=dim, init=Normal(0.0, 0.1)),
        Table("evicting", rows=None, capacity=12, dim=dim, on_full="evict_oldest"),
        Table("wide", rows=30, dim=dim + 4, init=Uniform(-1.0, 0.5)),
    ]


def power(base: float, exponent: int) -> float:
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def update(spec: Optimizer, row: dict[str, Any], g: Any, lr: float, table_step: int) -> None:
    """One row's update in plain float32."""
    rate, weight = f32(lr), row["weight"]
    if isinstance(spec, SGD):
        weight -= rate * g
    elif isinstance(spec, Momentum):
        row["momentum"][:] = f32(spec.momentum) * row["momentum"] + g
        velocity = row["momentum"]
        weight -= rate * (g + f32(spec.momentum) * velocity if spec.nesterov else velocity)
    elif isinstance(spec, RowWiseAdagrad):
        sums = [f32(0)] * 4
        whole = g.size & ~3
        for d in range(whole):
            sums[d % 4] = sums[d % 4] + g[d] * g[d]
        for d in range(whole, g.size):
            sums[0] = sums[0] + g[d] * g[d]
        row["accumulator"] += ((sums[0] + sums[1]) + (sums[2] + sums[3])) / f32(g.size)
        weight -= (rate / (np.sqrt(row["accumulator"][0]) + f32(spec.eps))) * g
    elif isinstance(spec, Adagrad):
        row["accumulator"] += g * g
        weight -= rate * (g / (np.sqrt(row["accumulator"]) + f32(spec.eps)))
    elif isinstance(spec, Adam):
        first, second = row["first_moment"], row["second_moment"]
        beta1, beta2 = spec.betas
        step = table_step
        if spec.step == "row":
            row["step"] += 1
            step = int(row["step"][0])
        first[:] = (g - first) * f32(1.0 - beta1) + first
        second[:] = (g * g - second) * f32(1.0 - beta2) + second
        size = f32(lr * np.sqrt(1.0 - power(beta2, step)) / (1.0 - power(beta1, step)))
        weight -= size * (first / (np.sqrt(second) + f32(spec.eps)))
    if spec.max_norm is not None:
        square = float(np.cumsum(weight.astype(np.float64) ** 2)[-1])
        if square > spec.max_norm**2:
            weight *= f32(spec.max_norm / np.sqrt(square))


class Reference:
    """Rows in a dictionary. `initial` gives the planes of a row that was never trained."""

    def __init__(self, tables: Sequence[Table], optimizer: Optimizer, initial: Any) -> None:
        self.tables = {table.name: table for table in tables}
        self.optimizer = optimizer
        self.initial = initial
        self.rows: dict[str, dict[int, dict[str, Any]]] = {t.name: {} for t in tables}
        self.steps = 0

    def row(self, table: str, identity: int) -> dict[str, Any]:
        found = self.rows[table].get(identity)
        return self.initial(table, identity) if found is None else found

    def push(self, wanted: dict[str, list[int]], grads: dict[str, Any], lr: float) -> None:
        self.steps += 1
        for name, ids in wanted.items():
            table, rows = self.tables[name], self.rows[name]
            present = [i for i in ids if i in rows]
            for i in present:  # a dictionary keeps insertion order: the first is the oldest
                rows[i] = rows.pop(i)
            new = [i for i in ids if i not in rows]
            if table.on_full == "evict_oldest":
                for _ in range(len(rows) + len(new) - table.slots):
                    rows.pop(next(iter(rows)))
            for i in new:
                rows[i] = self.initial(name, i)
            for i, g in zip(ids, grads[name], strict=True):
                update(self.optimizer, rows[i], g, lr, self.steps)

    def upsert(self, name: str, ids: list[int], planes: dict[str, Any]) -> None:
        rows = self.rows[name]
        given = {i: rows.pop(i, None) for i in ids}
        if self.tables[name].on_full == "evict_oldest":
            for _ in range(len(rows) + len(ids) - self.tables[name].slots):
                rows.pop(next(iter(rows)))
        for at, i in enumerate(ids):
            rows[i] = given[i] or self.initial(name, i)
            rows[i].update({plane: values[at] for plane, values in planes.items()})


def some_planes(row: dict[str, Any], count: int, random: np.random.Generator) -> dict[str, Any]:
    """New values for some planes of rows like this one."""
    chosen = [name for name in row if random.random() < 0.6] or ["weight"]
    return {
        name: random.uniform(0, 5, (count, row[name].size)).astype(row[name].dtype)
        for name in chosen
    }


def wanted_of(cluster: Any, by_table: dict[str, list[int]]) -> list[RowIds]:
    """Ids by table name as the cluster wants them: slab by slab, tables in order."""
    out = []
    for group in cluster.groups:
        names = [cluster.tables[t].name for t in group]
        lists = [by_table.get(name, []) for name in names]
        offsets = np.cumsum([0, *map(len, lists)])
        out.append(RowIds(np.array([i for ids in lists for i in ids], np.int64), offsets))
    return out


def grads_of(cluster: Any, by_table: dict[str, Any]) -> list[Any]:
    out = []
    for group in cluster.groups:
        dim = cluster.tables[group[0]].dim
        parts = [by_table.get(cluster.tables[t].name, np.empty((0, dim), f32)) for t in group]
        out.append(np.concatenate(parts).astype(f32))
    return out


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Equal to the last bit: also the sign of zero, also NaN payloads."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def state(cluster: Any) -> dict[str, Any]:
    """Everything that a cluster holds, for comparison."""
    return {
        table.name: {
            "ids": (read := cluster.read_all(table.name))[0].tobytes(),
            **{plane: values.tobytes() for plane, values in read[1].items()},
        }
        for table in cluster.tables
    }


ids_of = {
    "fixed": st.integers(0, 39),
    "dynamic": st.integers(-(2**63), 2**63 - 1) | st.integers(0, 30),
    "evicting": st.integers(0, 25),
    "wide": st.integers(0, 29),
}
batch_strategy = st.fixed_dictionaries(
    {
        name: st.lists(ids, max_size=8 if name != "dynamic" else 5, unique=True)
        for name, ids in ids_of.items()
    }
)
operations = st.lists(
    st.tuples(st.just("push"), batch_strategy)
    | st.tuples(st.just("delete"), batch_strategy)
    | st.tuples(st.just("upsert"), batch_strategy)
    | st.tuples(st.just("pull"), batch_strategy),
    max_size=10,
)


class EngineContract:
    """Subclass it and say how a cluster is opened."""

    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int = 0, threads: int = 2
    ) -> Any:
        raise NotImplementedError

    def reference(self, cluster: Any) -> Reference:
        fresh = self.open(cluster.tables, cluster.optimizer)

        def initial(table: str, identity: int) -> dict[str, Any]:
            planes = fresh.read(table, np.array([identity]))
            return {name: values[0] for name, values in planes.items() if name != "used"}

        return Reference(cluster.tables, cluster.optimizer, initial)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
    @settings(
        max_examples=examples(60),
        phases=[Phase.explicit, Phase.generate],  # a history shrinks slowly, and reads well as is
        suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    )
    @given(history=operations, seed=st.integers(0, 2**32 - 1))
    def test_any_history_equals_the_reference_bit_for_bit(
        self, optimizer: Optimizer, history: list[Any], seed: int
    ) -> None:
        cluster = self.open(tables(), optimizer)
        reference = self.reference(cluster)
        random = np.random.default_rng(seed)
        for operation, batch in history:
            wanted = wanted_of(cluster, batch)
            if operation == "push":
                grads = {
                    name: random.standard_normal((len(ids), reference.tables[name].dim)).astype(f32)
                    for name, ids in batch.items()
                }
                lr = float(random.uniform(0.01, 0.2))
                cluster.push(wanted, grads_of(cluster, grads), lr=lr)
                reference.push(batch, grads, lr)
            elif operation == "delete":
                for name, ids in batch.items():
                    gone = sum(reference.rows[name].pop(i, None) is not None for i in ids)
                    assert cluster.delete(name, np.array(ids, np.int64)) == gone
            elif operation == "upsert":
                for name, ids in batch.items():
                    planes = some_planes(reference.initial(name, 0), len(ids), random)
                    cluster.upsert(name, np.array(ids, np.int64), planes)
                    reference.upsert(name, ids, planes)
            else:
                for group, weights in zip(cluster.groups, cluster.pull(wanted), strict=True):
                    names = [cluster.tables[t].name for t in group]
                    want = [reference.row(n, i)["weight"] for n in names for i in batch[n]]
                    assert_same_bits(weights, np.array(want, f32).reshape(weights.shape))
        for name, rows in reference.rows.items():
            ids, planes = cluster.read_all(name)
            assert ids.tolist() == sorted(rows)
            assert cluster.touched_ids(name).tolist() == sorted(rows)
            for plane, values in planes.items():
                if plane != "used":
                    want = [rows[i][plane] for i in sorted(rows)]
                    assert_same_bits(values, np.array(want, values.dtype).reshape(values.shape))

    @pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
    def test_thread_counts_give_the_same_bits(self, optimizer: Optimizer) -> None:
        big = [Table("a", rows=5000, dim=16), Table("b", rows=None, capacity=9000, dim=16)]
        states = []
        for threads in (1, 2, 4):
            cluster = self.open(big, optimizer, threads=threads)
            random = np.random.default_rng(3)
            for _ in range(6):
                batch = {
                    "a": random.choice(5000, 2000, replace=False).tolist(),
                    "b": random.integers(-(2**62), 2**62, 700).tolist(),
                }
                grads = {n: random.standard_normal((len(i), 16)) for n, i in batch.items()}
                cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)
            states.append(state(cluster))
        assert states[0] == states[1] == states[2]

    @pytest.mark.parametrize(
        ("break_it", "error", "words"),
        [
            ("id too large", IdError, ["'fixed'", "0..39", "40"]),
            ("negative id", IdError, ["'fixed'", "-1"]),
            ("nan", GradientError, ["'evicting'", "id 7"]),
            ("infinity", GradientError, ["'wide'", "id 2"]),
            ("full", TableFullError, ["'dynamic'", "60 of 60", "999", "evict_oldest"]),
            ("too many at once", TableFullError, ["'evicting'", "capacity"]),
        ],
    )
    def test_a_refused_push_names_table_and_id_and_changes_no_row(
        self, break_it: str, error: type[Exception], words: list[str]
    ) -> None:
        cluster = self.open(tables(), Adagrad(lr=0.1))
        filled = {"fixed": [3], "dynamic": list(range(60)), "evicting": [1, 7], "wide": [5]}
        ones = {t.name: np.ones((len(filled[t.name]), t.dim), f32) for t in cluster.tables}
        cluster.push(wanted_of(cluster, filled), grads_of(cluster, ones), lr=0.1)
        before = state(cluster)
        batch: dict[str, list[int]] = {"fixed": [4, 3], "evicting": [7, 8], "wide": [1, 2]}
        if break_it == "id too large":
            batch["fixed"] = [3, 40]
        elif break_it == "negative id":
            batch["fixed"] = [3, -1]
        elif break_it == "full":
            batch["dynamic"] = [5, 999]
        elif break_it == "too many at once":
            batch["evicting"] = list(range(13))
        by_name = {t.name: t for t in cluster.tables}
        grads = {n: np.ones((len(ids), by_name[n].dim), f32) for n, ids in batch.items()}
        if break_it == "nan":
            grads["evicting"][0, 3] = np.nan
        elif break_it == "infinity":
            grads["wide"][1, -1] = -np.inf
        with pytest.raises(error) as refused:
            cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)
        for word in words:
            assert word in str(refused.value)
        assert state(cluster) == before

    def test_reading_changes_nothing(self) -> None:
        cluster = self.open(tables(), SGD(lr=0.1))
        batch = {"fixed": [1, 2], "dynamic": [5, -9], "evicting": [3], "wide": [0]}
        before = state(cluster)
        first = cluster.pull(wanted_of(cluster, batch))
        again = cluster.pull(wanted_of(cluster, batch))
        for a, b in zip(first, again, strict=True):
            assert_same_bits(a, b)
        assert state(cluster) == before
        assert cluster.touched_ids("dynamic").size == 0

    def test_the_row_trained_least_recently_is_evicted_first(self) -> None:
        table = Table("t", rows=None, capacity=3, dim=2, on_full="evict_oldest")
        cluster = self.open([table], SGD(lr=0.1))

        def push(*ids: int) -> list[int]:
            grads = [np.ones((len(ids), 2), f32)]
            cluster.push(wanted_of(cluster, {"t": list(ids)}), grads, lr=0.1)
            return list(cluster.touched_ids("t"))

        assert push(1, 2, 3) == [1, 2, 3]
        assert push(1) == [1, 2, 3]
        assert push(4) == [1, 3, 4]  # 2 was the oldest; 1 had been trained again
        assert push(5, 3) == [3, 4, 5]  # 3 is of this push: 1 goes although 3 was older

    def test_rows_that_were_read_and_installed_elsewhere_are_the_same(self) -> None:
        source = self.open(tables(), Adam(lr=0.1, step="row"))
        batch = {"fixed": [1, 9], "dynamic": [5, -9], "evicting": [3, 4], "wide": [0]}
        random = np.random.default_rng(0)
        by_name = {t.name: t for t in source.tables}
        for _ in range(3):
            grads = {n: random.standard_normal((len(i), by_name[n].dim)) for n, i in batch.items()}
            source.push(wanted_of(source, batch), grads_of(source, grads), lr=0.1)
        target = self.open(tables(), Adam(lr=0.1, step="row"))
        for table in source.tables:
            target.install(table.name, *source.read_all(table.name))
        assert state(target) == state(source)

    def test_installed_rows_keep_their_age(self) -> None:
        table = Table("t", rows=None, capacity=3, dim=2, on_full="evict_oldest")
        source, target = (self.open([table], SGD(lr=0.1)) for _ in range(2))
        for identity in (7, 5, 6):
            source.push(wanted_of(source, {"t": [identity]}), [np.ones((1, 2), f32)], lr=0.1)
        target.install("t", *source.read_all("t"))
        for cluster in (source, target):
            cluster.push(wanted_of(cluster, {"t": [1]}), [np.ones((1, 2), f32)], lr=0.1)
            assert cluster.touched_ids("t").tolist() == [1, 5, 6]

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda planes: planes.pop("accumulator"),
            lambda planes: planes.update(step=planes["accumulator"]),
            lambda planes: planes.update(weight=planes["weight"][:, :-1]),
            lambda planes: planes.update(weight=planes["weight"].astype(np.float64)),
        ],
    )
    def test_rows_that_do_not_fit_are_refused_whole(self, spoil: Callable[[Any], object]) -> None:
        cluster = self.open(tables(), Adagrad(lr=0.1))
        planes = cluster.read("fixed", np.array([1, 2]))
        spoil(planes)
        before = state(cluster)
        with pytest.raises(StateError, match="'fixed'"):
            cluster.install("fixed", np.array([1, 2]), planes)
        assert state(cluster) == before

    @pytest.mark.parametrize(
        ("table", "ids", "planes", "error", "words"),
        [
            ("fixed", [3, 40], {"weight": (2, 5)}, IdError, ["'fixed'", "40"]),
            ("fixed", [3, -1], {"weight": (2, 5)}, IdError, ["'fixed'", "-1"]),
            ("fixed", [3, 4, 3], {"weight": (3, 5)}, IdError, ["id 3", "twice"]),
            ("fixed", [0.5], {"weight": (1, 5)}, IdError, ["integers", "float64"]),
            ("fixed", [3, 4], {"weight": (2, 4)}, StateError, ["(2, 5)", "(2, 4)"]),
            ("fixed", [3, 4], {"weight": (3, 5)}, StateError, ["(2, 5)", "(3, 5)"]),
            ("fixed", [3], {"exp_avg": (1, 5)}, StateError, ["exp_avg", "accumulator"]),
            ("fixed", [3], {}, StateError, ["no plane", "weight"]),
            ("evicting", [3], {"used": (1, 1)}, StateError, ["used", "by itself"]),
            ("evicting", range(13), {"weight": (13, 5)}, TableFullError, ["capacity"]),
            ("dynamic", [5, 999], {"weight": (2, 5)}, TableFullError, ["60 of 60", "999"]),
            ("dynamic", [2**63], {"weight": (1, 5)}, IdError, ["63 bits"]),
            ("nobody", [1], {"weight": (1, 5)}, ConfigError, ["'nobody'", "fixed"]),
        ],
    )
    def test_a_refused_upsert_says_why_and_changes_no_row(
        self, table: str, ids: Any, planes: Any, error: type[Exception], words: list[str]
    ) -> None:
        cluster = self.open(tables(), Adagrad(lr=0.1))
        cluster.upsert("dynamic", np.arange(60), {"weight": np.ones((60, 5))})
        cluster.upsert("evicting", [1, 7], {"weight": np.ones((2, 5))})
        before = state(cluster)
        given = {name: np.ones(shape) for name, shape in planes.items()}
        with pytest.raises(error) as refused:
            cluster.upsert(table, np.array(list(ids)), given)
        for word in words:
            assert word in str(refused.value)
        assert state(cluster) == before

    @pytest.mark.parametrize(
        ("plane", "values"),
        [
            ("weight", np.array([[1, 2, np.nan, 4, 5]])),
            ("weight", np.array([[1, 2, 1e300, 4, 5]])),
            ("weight", np.array([["a"] * 5])),
            ("step", np.array([[2**40]])),
            ("step", np.array([[1.5]])),
        ],
    )
    def test_values_that_a_plane_cannot_hold_are_refused(self, plane: str, values: Any) -> None:
        cluster = self.open(tables(), Adam(lr=0.1, step="row"))
        with pytest.raises(StateError, match=f"'fixed', plane '{plane}'"):
            cluster.upsert("fixed", [7], {plane: values})
        assert cluster.touched_ids("fixed").size == 0

    def test_upserted_rows_are_trained_on_and_the_last_to_be_evicted(self) -> None:
        table = Table("t", rows=None, capacity=3, dim=2, on_full="evict_oldest")
        cluster = self.open([table], Adagrad(lr=0.1))
        cluster.upsert("t", [1, 2, 3], {"weight": np.full((3, 2), 0.5, np.float16)})
        cluster.upsert("t", [1], {"accumulator": [[4.0, 4.0]]})
        cluster.upsert("t", [4], {"weight": np.ones((1, 2), np.float64)})
        ids, planes = cluster.read_all("t")
        assert ids.tolist() == [1, 3, 4]
        assert planes["weight"].tolist() == [[0.5, 0.5], [0.5, 0.5], [1.0, 1.0]]
        assert planes["accumulator"].tolist() == [[4.0, 4.0], [0.0, 0.0], [0.0, 0.0]]
        cluster.push(wanted_of(cluster, {"t": [1]}), [np.ones((1, 2), f32)], lr=0.1)
        assert cluster.read("t", np.array([1]))["accumulator"].tolist() == [[5.0, 5.0]]
