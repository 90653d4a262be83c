"""Sources of samples and the resumable reader. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emberkeep.data.criteo import Criteo
    from emberkeep.data.parquet import Category, Parquet
    from emberkeep.data.reader import Reader
    from emberkeep.data.sources import Batch, Cursor, Mark, Resumable, Source, Window, split
    from emberkeep.data.synthetic import KAGGLE_ROWS, Skew, Synthetic, field_rows, skewed_ids

__all__ = [
    "KAGGLE_ROWS",
    "Batch",
    "Category",
    "Criteo",
    "Cursor",
    "Mark",
    "Parquet",
    "Reader",
    "Resumable",
    "Skew",
    "Source",
    "Synthetic",
    "Window",
    "field_rows",
    "skewed_ids",
    "split",
]

_MODULES = {
    "criteo": ["Criteo"],
    "parquet": ["Category", "Parquet"],
    "reader": ["Reader"],
    "sources": ["Batch", "Cursor", "Mark", "Resumable", "Source", "Window", "split"],
    "synthetic": ["KAGGLE_ROWS", "Skew", "Synthetic", "field_rows", "skewed_ids"],
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
