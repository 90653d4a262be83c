"""Rows of a state dict as a table stores them: cast as torch casts, or refused in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emberkeep._types import I64, Array, Planes
from emberkeep.errors import ConfigError, StateError
from emberkeep.nn.jagged import to_ids
from emberkeep.tables import Table


def ids_and_planes(
    table: Table, saved: Mapping[str, Any], shapes: Mapping[str, Sequence[Any]]
) -> tuple[I64, Planes]:
    """The ids and planes that a state holds of a table; raises `StateError` or `IdError` for what
    no table could mean.

    Floats of any width become what planes hold. A fixed table may come without ids if all of its
    rows do, in their order, as the weight of an `nn.Embedding`.
    """
    where = f"table {table.name!r}"
    planes = {
        name: as_array(f"{where}, plane {name!r}", value, shapes.get(name))
        for name, value in saved.items()
        if name not in ("ids", "origin", "steps")
    }
    rows = planes["weight"].shape[0] if planes["weight"].ndim else 0
    if "ids" not in saved:
        if table.rows != rows:
            what = f"all of its {table.rows} rows" if table.rows else "ids"
            raise StateError(f"{where}: weights without ids; give {what}, nothing was loaded")
        return np.arange(rows), planes
    try:
        ids = to_ids(saved["ids"], table.name)
    except ConfigError as error:
        raise StateError(f"{where}: {error}; nothing was loaded") from error
    if ids.ndim != 1:
        raise StateError(f"{where}: ids have one dimension, not shape {ids.shape}")
    if np.unique(ids).size != ids.size:
        raise StateError(f"{where}: the state names an id twice")
    return ids, planes


def steps_of(table: Table, saved: Mapping[str, Any]) -> int:
    """The steps that a state says its rows have taken; 0 where it does not say."""
    value = saved.get("steps", 0)
    try:
        steps = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise StateError(
            f"table {table.name!r}: steps are a whole number, not {value!r}; nothing was loaded"
        ) from error
    if steps < 0:
        raise StateError(f"table {table.name!r}: steps are 0 or more, not {steps}")
    return steps


def as_array(where: str, value: Any, shape: Sequence[Any] | None = None) -> Array:
    """A tensor of numbers in host memory; cast to the type of the plane where that is a cast that
    torch makes, too: floats to floats."""
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise StateError(
                f"{where} takes a tensor of numbers, not a {type(value).__name__}"
            ) from error
    if value.layout != torch.strided:
        raise StateError(f"{where} takes a dense tensor, not {value.layout}: use to_dense()")
    found = value.detach().cpu()
    wanted = None if shape is None else np.dtype(shape[1])
    # numpy has no type for bfloat16 and float8; as float32 they are the same numbers.
    if found.is_floating_point() and found.dtype not in (torch.float16, torch.float64):
        found = found.float()
    array: Array = found.numpy()
    if wanted is not None and wanted.kind == "f" and array.dtype.kind in "fiu":
        with np.errstate(over="ignore"):
            array = np.ascontiguousarray(array, wanted)
    return array
