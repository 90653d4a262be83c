"""Rows from outside: what may be written, and how it becomes whole rows of a slab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep._types import I64, Bools, Planes
from emberkeep.errors import IdError, StateError
from emberkeep.rows.push import outside
from emberkeep.rows.slab import Slab
from emberkeep.tables import Table

USED = "used"
"""The plane that a table that evicts keeps by itself."""


def checked(
    table: Table, shapes: Mapping[str, Sequence[Any]], ids: npt.ArrayLike, planes: Mapping[str, Any]
) -> tuple[I64, Planes]:
    """Ids and planes as they are stored; whatever cannot be written is refused, with no row
    changed. `shapes` are the planes of the table: a width and a type of numbers each."""
    where = f"table {table.name!r}"
    own_ids = _checked_ids(table, ids)
    own = {name: shape for name, shape in shapes.items() if name != USED}
    if not planes:
        raise StateError(f"{where}: no plane was given; rows have {', '.join(own)}")
    found: Planes = {}
    for name, given in planes.items():
        if name not in own:
            remedy = (
                "the table keeps it by itself: leave it out"
                if name == USED and name in shapes
                else f"rows have {', '.join(own)}; what the optimizer does not keep is left out"
            )
            raise StateError(f"{where} takes no plane {name!r}: {remedy}; no row was changed")
        width, kind = own[name]
        values = np.asarray(given)
        if width == 1 and values.ndim == 1:
            values = values[:, None]
        if values.shape != (own_ids.size, width):
            raise StateError(
                f"{where}, plane {name!r}: {own_ids.size} ids need shape "
                f"{(own_ids.size, width)}, not {np.asarray(given).shape}; no row was changed"
            )
        found[name] = _as_kind(where, name, own_ids, values, np.dtype(kind))
    return own_ids, found


def _checked_ids(table: Table, ids: npt.ArrayLike) -> I64:
    given = np.asarray(ids)
    if given.size == 0 and given.ndim == 1:
        return np.empty(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise IdError(
            f"table {table.name!r}: ids are integers in one dimension, not {given.dtype} "
            f"{given.shape}; no row was changed"
        )
    if given.dtype.kind == "u" and given.max() > np.iinfo(np.int64).max:
        raise IdError(
            f"table {table.name!r}: id {given.max()} does not fit 63 bits; no row was changed"
        )
    own: I64 = np.ascontiguousarray(given, np.int64)
    if table.rows is not None:
        wrong = np.flatnonzero((own < 0) | (own >= table.rows))
        if wrong.size:
            raise outside(table, int(own[wrong[0]]))
    ordered = np.sort(own)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if twice.size:
        raise IdError(
            f"table {table.name!r}: id {ordered[twice[0]]} is given twice, and which row counts is "
            "not known; no row was changed: give each id once"
        )
    return own


def _as_kind(
    where: str, plane: str, ids: I64, values: npt.NDArray[Any], kind: np.dtype[Any]
) -> npt.NDArray[Any]:
    if values.dtype.kind not in ("iu" if kind.kind == "i" else "fiu"):
        raise StateError(
            f"{where}, plane {plane!r} holds {kind}, not {values.dtype}; no row was changed"
        )
    if kind.kind == "i":
        limits = np.iinfo(kind)
        wrong = (values < limits.min) | (values > limits.max)
        reason = f"does not fit {kind}"
    else:
        with np.errstate(over="ignore"):
            values = values.astype(kind, copy=False)
        wrong = ~np.isfinite(values)
        reason = "is not finite"
    if wrong.any():
        first = int(np.flatnonzero(wrong.any(axis=1))[0])
        raise StateError(
            f"{where}, plane {plane!r}: the row of id {ids[first]} {reason}; no row was changed"
        )
    return np.ascontiguousarray(values, kind)


def check_room(slab: Slab, table: int, ids: I64) -> Bools:
    """Raises `TableFullError` if a table has no room for those of the ids that are new; returns
    which are not."""
    if table not in slab.slots:
        return np.ones(ids.size, np.bool_)
    wanted = slab.one_table(table, ids)
    found, unknown = slab.resolve(wanted)
    slab.check_room(table, slab.slots[table], wanted, found, unknown[table])
    return found >= 0


def write(slab: Slab, table: int, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
    """Writes the planes given; the others stay as they are, or as rows begin. Rows become trained
    ones, changed for every version and, where a table evicts, the newest."""
    wanted = slab.one_table(table, ids)
    before, _ = slab.resolve(wanted)
    whole = dict(planes)
    if any(slab.has_plane(table, name) and name not in whole for name in slab.planes):
        whole = {**slab.read(table, ids), **whole}
    if slab.has_plane(table, USED):
        first = slab.slots[table].next_tick
        whole[USED] = np.arange(first, first + ids.size, dtype=np.int64)[:, None]
    ranked = slab.ranking
    if ranked is not None:
        known = before[before >= 0]
        ranked.updating(known, 0, known.size)
    slab.install(wanted, whole)
    if ranked is not None:
        found, _ = slab.resolve(wanted)
        new = found[before < 0]
        ranked.updating(new, 0, new.size)
        ranked.updated(found, wanted.offsets)
