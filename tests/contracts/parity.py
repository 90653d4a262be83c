"""What every cluster with parity must do: lose shards and nothing with them.

A backend is tested by a subclass that says how a cluster is opened; shards are lost with `kill`.
Each test runs the same training twice, once without losses, and compares every row bit for bit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from emberkeep.erasure.codes import Parity, products
from emberkeep.erasure.rebuilder import Rebuilder
from emberkeep.errors import ShardLostError
from emberkeep.tables import Adagrad, Optimizer, Table
from tests.contracts.engine import OPTIMIZERS, grads_of, state, tables, wanted_of

# Shards, k, r, and how many are lost together.
SIZES = [(3, 2, 1, 1), (6, 4, 1, 1), (6, 4, 2, 2), (5, 3, 2, 2)]


def batch_of(random: np.random.Generator) -> dict[str, list[int]]:
    return {
        "fixed": random.choice(40, 15, replace=False).tolist(),
        "dynamic": random.choice(60, 9, replace=False).tolist(),
        "evicting": random.choice(40, 4, replace=False).tolist(),
        "wide": random.choice(30, 7, replace=False).tolist(),
    }


def push(cluster: Any, random: np.random.Generator) -> None:
    batch = batch_of(random)
    dims = {table.name: table.dim for table in cluster.tables}
    grads = {n: random.standard_normal((len(i), dims[n])) for n, i in batch.items()}
    cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)


def write(cluster: Any, random: np.random.Generator) -> None:
    """A change that is not a push."""
    kind = random.integers(0, 4)
    if kind == 0:
        cluster.delete("fixed", random.choice(40, 6, replace=False))
        cluster.delete("dynamic", random.choice(60, 6, replace=False))
    elif kind == 1:
        ids = random.choice(40, 5, replace=False)
        cluster.install("fixed", ids, cluster.read("fixed", random.choice(40, 5, replace=False)))
    elif kind == 2:
        for table in cluster.tables:
            ids = random.choice(30, 5, replace=False)
            cluster.upsert(table.name, ids, {"weight": random.standard_normal((5, table.dim))})
    else:
        ids = random.choice(60, 5, replace=False)
        cluster.install("dynamic", ids, cluster.read("dynamic", (ids + 7) % 60))


def pulled(cluster: Any, random: np.random.Generator) -> list[bytes]:
    return [rows.tobytes() for rows in cluster.pull(wanted_of(cluster, batch_of(random)))]


PLAIN = [
    Table("fixed", rows=40, dim=4),
    Table("dynamic", rows=None, capacity=80, dim=4),
]


def ones(cluster: Any, random: Random, counts: Counter[tuple[str, int]]) -> None:
    """A push whose gradients are 1: the accumulator of a row then counts its updates."""
    batch = {table.name: random.sample(range(40), 6) for table in cluster.tables}
    for name, ids in batch.items():
        counts.update((name, identity) for identity in ids)
    wanted = wanted_of(cluster, batch)
    cluster.push(wanted, [np.ones((w.ids.size, 4), np.float32) for w in wanted], lr=0.1)


def check_counts(cluster: Any, counts: Counter[tuple[str, int]]) -> None:
    for table in cluster.tables:
        ids, planes = cluster.read_all(table.name)
        found = dict(zip(ids.tolist(), planes["accumulator"].tolist(), strict=True))
        expected = {i: [float(n)] * 4 for (name, i), n in counts.items() if name == table.name}
        assert found == expected, "a push was lost, or applied twice"


class Histories:
    """Every value, of all planes together, that any row ever had."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], set[bytes]] = defaultdict(set)

    def add(self, table: str, ids: Any, planes: Any) -> None:
        for identity, row in _rows(ids, planes):
            self.values[table, identity].add(row)

    def add_all(self, cluster: Any) -> None:
        for table in cluster.tables:
            self.add(table.name, *cluster.read_all(table.name))

    def check(self, cluster: Any) -> None:
        for table in cluster.tables:
            for identity, row in _rows(*cluster.read_all(table.name)):
                assert row in self.values[table.name, identity], "a row that never was"


def _rows(ids: Any, planes: Any) -> Iterator[tuple[int, bytes]]:
    for i, identity in enumerate(ids.tolist()):
        yield identity, b"".join(planes[name][i].tobytes() for name in sorted(planes))


def check_parity(rebuilder: Rebuilder[Any]) -> None:
    """Every parity row of every host is the code of the rows as they are."""
    for member in rebuilder.members:
        assert member.host.complete
        assert member.host.unprotected_stripes == 0
        check_parity_of(rebuilder, member)


def check_parity_of(rebuilder: Rebuilder[Any], member: Any) -> None:
    """Every parity row of one host is the code of the rows as they are."""
    place, host = rebuilder.placement, member.host
    for slab, stripes in enumerate(host.stripes):
        for p in range(place.r):
            group = place.group_on(host.index, p)
            part = slice(p * stripes, (p + 1) * stripes)
            for layer, parity in (("records", host._records), ("marks", host._marks)):
                total = np.zeros_like(parity[slab][part]).view(np.uint8)
                for slot, index in enumerate(place.members(group)):
                    rows = np.arange(stripes) * place.k + slot
                    values = rebuilder.members[index].rows.values(slab, layer, rows)
                    total ^= products(host.code.coefficients[p][slot])[values.view(np.uint8)]
                assert np.array_equal(parity[slab][part].view(np.uint8), total)


class ParityContract:
    """Everything below holds for any cluster that `open` makes."""

    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int, parity: Parity | None
    ) -> Any:
        raise NotImplementedError

    def kill(self, cluster: Any, *shards: int) -> None:
        cluster.kill(*shards)

    def open_plain(self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int) -> Any:
        """One that loses nothing, to compare with."""
        return self.open(tables, optimizer, shards=shards, parity=None)

    def run(
        self, optimizer: Optimizer, size: tuple[int, int, int, int], seed: int, *, losses: bool,
        steps: int = 14, **settings: Any,
    ) -> tuple[dict[Any, Any], list[list[bytes]]]:  # fmt: skip
        """Trains, pulls, deletes and installs; with losses, shards die at random moments."""
        shards, k, r, together = size
        parity = Parity(k=k, r=r, chunk_rows=64, **settings) if losses else None
        cluster = self.open(tables(), optimizer, shards=shards, parity=parity)
        random, chance = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        seen = []
        for step in range(steps):
            if losses and chance.random() < 0.35:
                # What the last loss took is back, or these would be more than parity bears.
                cluster.rebuild()
                self.kill(cluster, *chance.choice(shards, together, replace=False).tolist())
            if step % 4 == 3:
                write(cluster, random)
            seen.append(pulled(cluster, random))
            push(cluster, random)
        return state(cluster), seen

    @pytest.mark.parametrize(
        ("name", "size"),
        [
            # What is coded is the bytes of planes: each optimizer once by day, each size twice.
            pytest.param(name, size, marks=() if nth % 4 == at else pytest.mark.soak)
            for nth, name in enumerate(OPTIMIZERS)
            for at, size in enumerate(SIZES)
        ],
    )
    def test_losses_leave_no_trace(self, name: str, size: tuple[int, int, int, int]) -> None:
        spec = OPTIMIZERS[name]
        expected = self.run(spec, size, seed=3, losses=False)
        assert self.run(spec, size, seed=3, losses=True) == expected

    def test_a_second_loss_during_a_rebuild(self) -> None:
        random = np.random.default_rng(0)
        spec = Parity(k=3, r=2, chunk_rows=48, rebuild_share=1e-3)
        protected = self.open(tables(), Adagrad(lr=0.1), shards=6, parity=spec)
        plain = self.open_plain(tables(), Adagrad(lr=0.1), shards=6)
        clusters = [protected, plain]
        for step in range(15):
            seed = int(random.integers(2**31))
            for cluster in clusters:
                push(cluster, np.random.default_rng(seed))
            if step % 5 == 4:
                protected.rebuild()
                self.kill(protected, step % 6)
                assert pulled(protected, np.random.default_rng(1)) == pulled(
                    plain, np.random.default_rng(1)
                )
                self.kill(protected, (step + 1) % 6)
        assert protected.parity.recoveries >= 3
        assert state(protected) == state(plain)
        protected.rebuild()
        assert protected.parity.protected

    def test_too_many_losses_are_said(self) -> None:
        cluster = self.open(tables(), Adagrad(lr=0.1), shards=4, parity=Parity(k=3, r=1))
        push(cluster, np.random.default_rng(0))
        self.kill(cluster, 0, 2)
        with pytest.warns(UserWarning, match="more than parity"), pytest.raises(ShardLostError):
            pulled(cluster, np.random.default_rng(0))

    def test_parity_of_rows_that_were_trained_before(self) -> None:
        random = np.random.default_rng(0)
        cluster = self.open(tables(), Adagrad(lr=0.1), shards=4, parity=None)
        for _ in range(5):
            push(cluster, random)
        before = state(cluster)
        cluster.protect(Parity(k=3, r=1))
        cluster.rebuild()
        assert cluster.parity.protected
        self.kill(cluster, 1)
        assert state(cluster) == before

    def test_rows_from_outside_are_protected_as_soon_as_they_are_there(self) -> None:
        random = np.random.default_rng(0)
        cluster = self.open(tables(), Adagrad(lr=0.1), shards=4, parity=Parity(k=3, r=1))
        push(cluster, random)
        cluster.upsert("fixed", np.arange(40), {"weight": random.standard_normal((40, 5))})
        before = state(cluster)
        self.kill(cluster, 1)
        assert state(cluster) == before
        cluster.rebuild()
        self.kill(cluster, 3)
        # The call that meets the loss is made again on all shards.
        cluster.upsert("dynamic", np.arange(50), {"weight": np.ones((50, 5))})
        cluster.rebuild()  # one loss at a time is what this parity bears
        self.kill(cluster, 0)
        assert cluster.read("dynamic", np.arange(50))["weight"].tolist() == [[1.0] * 5] * 50

    def test_clearing_and_loading(self) -> None:
        random = np.random.default_rng(0)
        cluster = self.open(tables(), Adagrad(lr=0.1), shards=4, parity=Parity(k=2, r=2))
        for _ in range(4):
            push(cluster, random)
        rows = {table.name: cluster.read_all(table.name) for table in cluster.tables}
        state = cluster.table_state()
        push(cluster, random)
        self.kill(cluster, 3)
        cluster.read_all("fixed")
        cluster.clear()
        for name, (ids, planes) in rows.items():
            cluster.install(name, ids, planes)
        cluster.load_table_state(state)
        cluster.rebuild()
        self.kill(cluster, 0, 1)
        for name, (ids, planes) in rows.items():
            found, again = cluster.read_all(name)
            assert np.array_equal(found, ids)
            assert all(np.array_equal(again[plane], planes[plane]) for plane in planes)
        assert cluster.table_state() == state
