"""What was measured on a machine and a store, with units, as a file that plans are made from."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from emberkeep._types import Json
from emberkeep.config import read_text
from emberkeep.errors import DataError
from emberkeep.planning.candidates import Measurement

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What is known by measurement; None where it was not measured."""

    save: timedelta | None = None
    """Training stands still so long for a version."""
    write: timedelta | None = None
    """From the cut of a version until it is durable."""
    load: timedelta | None = None
    reschedule: timedelta | None = None
    """From the death of a server until another serves in its place, empty."""
    step: timedelta | None = None
    table_nbytes: int | None = None
    rows: int | None = None
    parity_slowdown: float | None = None
    quantized: Measurement | None = None
    tier: Measurement | None = None

    def to_dict(self) -> Json:
        """Keys end with their unit."""
        document: Json = {"format": FORMAT}
        for name in ("save", "write", "load", "reschedule", "step"):
            time = getattr(self, name)
            document[f"{name}_seconds"] = None if time is None else time.total_seconds()
        for name in ("table_nbytes", "rows", "parity_slowdown"):
            document[name] = getattr(self, name)
        for name in ("quantized", "tier"):
            found = getattr(self, name)
            document[name] = None if found is None else {
                "save_seconds": found.save.total_seconds(),
                "load_seconds": found.load.total_seconds(),
                "slowdown": found.slowdown,
                "bits": found.bits,
                "memory_share": found.memory_share,
            }  # fmt: skip
        return document


def read_inputs(path: str | Path) -> Inputs:
    """A file that `emberkeep measure --json` has written; a key that it does not know is refused,
    since its unit might be another."""
    try:
        document = json.loads(read_text(Path(path), "JSON", DataError))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is no JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DataError(
            f"{path} is not what emberkeep measure --json prints, or of another release: measure "
            "again"
        )
    known = Inputs().to_dict()
    unknown = [key for key in document if key not in known]
    if unknown:
        raise DataError(f"{path}: {unknown[0]!r} is not known; measure again")
    given: dict[str, Any] = {}
    for key, value in document.items():
        if key == "format" or value is None:
            continue
        if key in ("quantized", "tier"):
            given[key] = _measurement(path, key, value)
        elif key.endswith("_seconds"):
            given[key.removesuffix("_seconds")] = _time(path, key, value)
        elif key == "parity_slowdown":
            given[key] = _number(path, key, value)
        else:
            given[key] = _whole(path, key, value)
    return Inputs(**given)


def _measurement(path: str | Path, key: str, value: Any) -> Measurement:
    if not isinstance(value, dict):
        raise DataError(f"{path}: {key!r} is no measurement")
    known = ("save_seconds", "load_seconds", "slowdown", "bits", "memory_share")
    unknown = [name for name in value if name not in known]
    if unknown:
        raise DataError(f"{path}: '{key}.{unknown[0]}' is not known; measure again")
    bits = value.get("bits")
    return Measurement(
        save=_time(path, f"{key}.save_seconds", value.get("save_seconds")),
        load=_time(path, f"{key}.load_seconds", value.get("load_seconds")),
        slowdown=_number(path, f"{key}.slowdown", value.get("slowdown", 0.0)),
        bits=None if bits is None else _whole(path, f"{key}.bits", bits),
        memory_share=_number(path, f"{key}.memory_share", value.get("memory_share", 0.0), -1.0),
    )


def _time(path: str | Path, key: str, value: Any) -> timedelta:
    try:
        return timedelta(seconds=_number(path, key, value))
    except OverflowError:
        raise DataError(f"{path}: {key} is longer than any time: {value!r}") from None


def _whole(path: str | Path, key: str, value: Any) -> int:
    number = _number(path, key, value)
    if number != int(number):
        raise DataError(f"{path}: {key} must be a whole number, not {value!r}")
    return int(value)


def _number(path: str | Path, key: str, value: Any, least: float = 0.0) -> float:
    wrong = isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300
    if wrong or not math.isfinite(value) or value < least:
        raise DataError(f"{path}: {key} must be a number of {least:g} or more, not {value!r}")
    return float(value)
