"""Whole rows from what was staged of them: bucket by bucket, joined by id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from emberkeep._types import I64, Array, Bools, Json, Planes
from emberkeep.errors import DataError
from emberkeep.inspect.intake import USED
from emberkeep.inspect.plane_names import WEIGHT
from emberkeep.inspect.staged_rows import Stage
from emberkeep.kernels import hash_index
from emberkeep.rows.snapshot import Chunk

_CHUNK_ROWS = 32768


@dataclass(slots=True)
class TableTotals:
    """What was joined, by table."""

    rows: dict[str, int] = field(default_factory=dict)
    new: dict[str, int] = field(default_factory=dict)
    filled: dict[str, list[str]] = field(default_factory=dict)


class Joiner:
    """Joins what was staged; with `union` also rows that the repository holds and no file brought.

    `state` is what tables know beside their rows; it is brought up to date as rows are handed out.
    """

    def __init__(
        self, stage: Stage, tables: Mapping[str, Json], *, fill: Mapping[str, float], union: bool,
        first: bool, state: Json,
    ) -> None:  # fmt: skip
        """`first` says that the repository holds no rows yet."""
        self._first = first
        self._stage = stage
        self._tables = tables
        self._fill = fill
        self._union = union
        self.state = {name: dict(table) for name, table in state.items()}
        self.totals = TableTotals()
        self.imported = list(dict.fromkeys(family.table for family in stage.families))

    def buckets(self, table: str) -> int:
        return next(f.buckets for f in self._stage.families if f.table == table)

    def needed(self) -> dict[str, list[str]]:
        """Of each table that must be read from the repository: its planes that are needed."""
        found = {}
        for table in self.imported:
            own = self._tables[table]
            given = [set(f.planes) for f in self._stage.families if f.table == table]
            always = set.intersection(*given)
            lacking = [p for p in own["planes"] if p not in always and p != USED]
            if self._union:
                found[table] = list(own["planes"])
            elif lacking or own.get("rows") is None:
                found[table] = lacking
        return found

    def chunks(self) -> Iterator[Chunk]:
        for table in self.imported:
            self.totals.rows[table] = 0
            families = [
                (at, family)
                for at, family in enumerate(self._stage.families)
                if family.table == table
            ]
            held = next((at for at, family in families if family.held), None)
            given = [at for at, family in families if not family.held]
            for bucket in range(self.buckets(table)):
                yield from self._bucket(table, bucket, given, held)

    def _bucket(
        self, table: str, bucket: int, given: list[int], held: int | None
    ) -> Iterator[Chunk]:
        brought = [_sorted(table, self._stage.read(at, bucket)) for at in given]
        before = None if held is None else _sorted(table, self._stage.read(held, bucket))
        own = _all_ids(brought)
        ids, imported = own, own.size
        known = np.zeros(imported, np.bool_)
        if before is not None:
            known = np.isin(ids, before["id"], assume_unique=True)
            if self._union:
                ids = np.union1d(ids, before["id"])
        if not ids.size:
            return
        planes: Planes = {}
        filled: dict[str, Bools] = {}
        for name, (width, kind) in self._tables[table]["planes"].items():
            planes[name] = np.empty((ids.size, width), kind)
            filled[name] = np.zeros(ids.size, np.bool_)
        for records in brought:
            at = np.searchsorted(ids, records["id"])
            for name in _planes_of(records):
                if filled[name][at].any():
                    twice = records["id"][filled[name][at]][0]
                    raise DataError(
                        f"table {table!r}: the {name} of id {twice} comes twice, by two files or "
                        "tensors; nothing was imported: leave one out"
                    )
                planes[name][at], filled[name][at] = records[name], True
        self._date(table, ids, own, planes, filled)
        if before is not None:
            at = np.searchsorted(ids, before["id"])
            at = np.minimum(at, ids.size - 1)
            match = ids[at] == before["id"]
            for name in _planes_of(before):
                lacking = match & ~filled[name][at]
                planes[name][at[lacking]] = before[name][lacking]
                filled[name][at[lacking]] = True
        self._complete(table, ids, planes, filled)
        self.totals.rows[table] += imported
        if before is not None or self._first:  # else it was not looked at
            new = imported - int(known.sum())
            self.totals.new[table] = self.totals.new.get(table, 0) + new
        if "rows" in self.state.get(table, {}):
            self._count(table, own[~known])
        for start in range(0, ids.size, _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            yield Chunk(table, ids[part], {name: values[part] for name, values in planes.items()})

    def _date(
        self, table: str, ids: I64, own: I64, planes: Planes, filled: dict[str, Bools]
    ) -> None:
        """Where a table evicts, imported rows are its newest."""
        if USED not in planes:
            return
        state = self.state[table]
        at = np.searchsorted(ids, own)
        first = max(1, int(state["tick"]))
        planes[USED][at, 0] = np.arange(first, first + own.size)
        filled[USED][at] = True
        state["tick"] = first + own.size
        state["ticks"] = [state["tick"]] * len(state.get("ticks", [0]))

    def _complete(self, table: str, ids: I64, planes: Planes, filled: dict[str, Bools]) -> None:
        """Planes of new rows that nobody brought begin as the user says; weights must be there."""
        for name, there in filled.items():
            if there.all():
                continue
            if name == WEIGHT:
                raise DataError(
                    f"table {table!r}: id {ids[~there][0]} is new, and no file brings its weight; "
                    "nothing was imported: bring the weights too"
                )
            planes[name][~there] = self._fill.get(name, 0)
            names = self.totals.filled.setdefault(table, [])
            if name not in names:
                names.append(name)

    def _count(self, table: str, new: I64) -> None:
        """How many rows each shard holds: by it a restore knows whether there is room."""
        rows_S = list(self.state[table]["rows"])
        counts_ST = np.zeros((len(rows_S), 1), np.int64)
        order = np.empty(new.size, np.int64)
        offsets = np.array([0, new.size])
        dynamic = np.array([True])
        hash_index.route(new, offsets, dynamic, len(rows_S), counts_ST, order)
        self.state[table]["rows"] = [
            int(rows + count) for rows, count in zip(rows_S, counts_ST[:, 0], strict=True)
        ]


def _sorted(table: str, records: Array) -> Array:
    """Records by id; an id that comes twice is refused."""
    ids = np.ascontiguousarray(records["id"])
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    twice = np.flatnonzero(ids[1:] == ids[:-1])
    if twice.size:
        raise DataError(
            f"table {table!r}: id {ids[twice[0]]} comes twice, and which row counts is not known; "
            "nothing was imported: remove one"
        )
    return records.take(order)


def _all_ids(brought: Sequence[Array]) -> I64:
    """The ids of sorted records, ascending, each once."""
    if len(brought) == 1:
        return np.ascontiguousarray(brought[0]["id"])
    return np.unique(np.concatenate([records["id"] for records in brought]))


def _planes_of(records: Array) -> tuple[str, ...]:
    return (records.dtype.names or ())[1:]
