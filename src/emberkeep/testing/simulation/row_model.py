"""What every row must be: the same pushes on shards that are objects and never fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from emberkeep._types import F32, I64, Json, Planes, RowIds
from emberkeep.checkpoint.overheads import pls_of_loss
from emberkeep.cluster.base import Cluster
from emberkeep.cluster.local.local_cluster import local
from emberkeep.errors import TableFullError
from emberkeep.server.pushes import RowGradients
from emberkeep.testing.simulation.scheduler import SimulationError, undisturbed
from emberkeep.testing.simulation.sim_options import Options

Rows = dict[str, tuple[I64, Planes]]
LR = 0.5


@dataclass(frozen=True, slots=True)
class Instant:
    """A model as it was: its rows and table state, the steps that each shard has, and PLS."""

    step: int
    rows: Rows
    state: Json
    applied: tuple[int, ...]
    pls: float


class RowModel:
    """No part of the simulation: whatever is done here is done at once."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.cluster: Cluster = local(shards=options.shards, threads=1).open(
            options.tables, options.optimizer, seed=options.seed
        )
        self.step = 0
        self.applied = [0] * options.shards
        self.pls = 0.0
        self.instants: list[Instant] = []
        self._batches: dict[tuple[int, int], RowGradients] = {}

    # -- what is trained -------------------------------------------------------------------------

    def batch(self, step: int, rank: int = 0) -> RowGradients:
        """The rows of a step and their gradients: the same whenever it is asked for."""
        if (step, rank) not in self._batches:
            random = np.random.default_rng((self._options.seed, step, rank))
            wanted, grads = [], []
            for group in self.cluster.groups:
                ids: list[I64] = []
                for table in (self.cluster.tables[t] for t in group):
                    limit = 60 if table.rows is None else table.rows
                    count = random.integers(0, min(self._options.batch, limit))
                    ids.append(np.sort(random.choice(limit, count, replace=False)))
                    if table.dynamic:
                        ids[-1] = ids[-1] * 0x9E3779B9 - (1 << 20)
                offsets = np.cumsum([0, *(part.size for part in ids)])
                wanted.append(RowIds(np.concatenate(ids).astype(np.int64), offsets))
                size = (int(offsets[-1]), self.cluster.tables[group[0]].dim)
                # Whole numbers, so that asynchronous sums are the same in any order.
                grads.append(random.integers(-4, 5, size).astype(np.float32))
            self._batches[step, rank] = (wanted, grads)
        return self._batches[step, rank]

    @undisturbed()
    def push(self, wanted: Sequence[RowIds], grads: Sequence[F32]) -> None:
        self.cluster.push(wanted, grads, lr=LR)

    @undisturbed()
    def take_step(self, ranks: int = 1) -> None:
        """One more step of the job was acknowledged."""
        self.step += 1
        parts = [self.batch(self.step, rank) for rank in range(ranks)]
        try:
            self.push(*(parts[0] if ranks == 1 else _averaged(parts)))
        except TableFullError as error:
            raise SimulationError(f"step {self.step} was not refused: {error}") from error
        self.applied = [count + 1 for count in self.applied]

    @undisturbed()
    def refuse_step(self) -> None:
        """One more step of the job was refused, for want of room."""
        self.step += 1
        try:
            self.push(*self.batch(self.step))
        except TableFullError:
            return
        raise SimulationError(f"step {self.step} was refused, and there is room for it")

    @undisturbed()
    def check_pull(self, wanted: Sequence[RowIds], pulled: Sequence[F32]) -> None:
        expected = self.cluster.pull(wanted)
        for ids, found, right in zip(wanted, pulled, expected, strict=True):
            if found.tobytes() != right.tobytes():
                wrong = ids.ids[(found != right).any(axis=1)].tolist()
                raise SimulationError(f"a pull of step {self.step + 1} has wrong rows {wrong[:5]}")

    # -- versions and losses ---------------------------------------------------------------------

    @undisturbed()
    def instant(self) -> int:
        """Remembers how everything is now; returns its number."""
        self.instants.append(
            Instant(self.step, self.rows(), self.cluster.table_state(), tuple(self.applied),
                    self.pls)
        )  # fmt: skip
        return len(self.instants) - 1

    @undisturbed()
    def rows(self) -> Rows:
        return rows_of(self.cluster)

    @undisturbed()
    def go_back(self, number: int) -> None:
        """Everything is as it was."""
        then = self.instants[number]
        self.cluster.clear()
        for table, (ids, planes) in then.rows.items():
            self.cluster.install(table, ids, planes)
        self.cluster.load_table_state(then.state)
        self.step, self.applied, self.pls = then.step, list(then.applied), then.pls

    @undisturbed()
    def lose(self, shards: Sequence[int], number: int, total: int) -> None:
        """Some shards have come back alone, as they were."""
        then, steps = self.instants[number], self.cluster.table_state()
        for table, (ids, planes) in then.rows.items():
            held = self.cluster.touched_ids(table)
            doomed, back = self.cluster.positions(table, held), self.cluster.positions(table, ids)
            for shard in shards:
                self.cluster.delete(table, held[doomed[shard]])
                order = back[shard]
                kept = {name: values[order] for name, values in planes.items()}
                self.cluster.install(table, ids[order], kept)
        self.cluster.load_table_state(steps)
        for shard in shards:
            lost = self.applied[shard] - then.applied[shard]
            self.pls += pls_of_loss(
                lost_samples=lost, total_samples=total, shards=len(self.applied)
            )
            self.applied[shard] = then.applied[shard]

    @undisturbed()
    def wrong(self, found: Rows, doubtful: Sequence[Sequence[RowGradients]] = ()) -> str:
        """What is wrong with rows; nothing if they are the same to the bit, with the first few of
        each worker's doubtful pushes, or none, as each shard has it."""
        right = self.rows()
        missing = set(range(len(self.applied)))
        wrong = ""
        for some in _beginnings(doubtful):
            number = self.instant()
            for push in some:
                self.push(*push)
            held = self.rows()
            self.go_back(number)
            self.instants.pop()
            for shard in sorted(missing):
                wrong = differences(self._of(shard, found), self._of(shard, held))
                if not wrong:
                    missing.discard(shard)
            if not missing:
                return ""
        return wrong or differences(found, right) or "shards differ"

    def _of(self, shard: int, rows: Rows) -> Rows:
        part: Rows = {}
        for table, (ids, planes) in rows.items():
            order = np.sort(self.cluster.positions(table, ids)[shard])
            part[table] = (ids[order], {name: values[order] for name, values in planes.items()})
        return part


def _averaged(parts: Sequence[RowGradients]) -> RowGradients:
    """The parts of ranks as one push, row by row; sums of whole numbers are exact."""
    wanted, grads = [], []
    for g, first in enumerate(parts[0][0]):
        ids, sums = [], []
        for t in range(first.offsets.size - 1):
            totals: dict[int, F32] = {}
            for some, some_grads in parts:
                low, high = some[g].offsets[t], some[g].offsets[t + 1]
                for row in range(low, high):
                    name = int(some[g].ids[row])
                    totals[name] = totals.get(name, np.float32(0)) + some_grads[g][row]
            ids.append(sorted(totals))
            sums += [totals[name] / np.float32(len(parts)) for name in ids[-1]]
        offsets = np.cumsum([0, *map(len, ids)])
        wanted.append(RowIds(np.array([i for some in ids for i in some], np.int64), offsets))
        size = (len(sums), parts[0][1][g].shape[1])
        grads.append(np.array(sums, np.float32).reshape(size))
    return wanted, grads


def _beginnings(workers: Sequence[Sequence[RowGradients]]) -> Iterator[list[RowGradients]]:
    for counts in product(*(range(len(pushes) + 1) for pushes in workers)):
        yield [push for pushes, n in zip(workers, counts, strict=True) for push in pushes[:n]]


def rows_of(cluster: Cluster) -> Rows:
    return {table.name: cluster.read_all(table.name) for table in cluster.tables}


def differences(found: Rows, right: Rows) -> str:
    """What is wrong with rows; nothing if they are the same to the bit."""
    for table, (ids, planes) in right.items():
        other_ids, others = found[table]
        if other_ids.tobytes() != ids.tobytes():
            odd = sorted(set(other_ids.tolist()) ^ set(ids.tolist()))
            return f"table {table!r} has other rows, among them {odd[:5]}"
        for name, values in planes.items():
            if others[name].tobytes() != values.tobytes():
                rows: Any = (others[name] != values).any(axis=1)
                return f"table {table!r}, plane {name!r}: rows {ids[rows].tolist()[:5]} are wrong"
    return ""
