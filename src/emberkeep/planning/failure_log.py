"""Failure logs: CSV files as monitoring systems export them.

A line is a failure with the time when it began, or a run with the time until it failed. What was
taken for what is in `FailureLog.taken`, so that a wrong guess is seen and can be corrected.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np

from emberkeep._types import F64
from emberkeep.config import read_text
from emberkeep.errors import ConfigError, DataError

FEWEST = 5
"""A distribution is not fitted to fewer gaps."""

_FORMATS = ("%m/%d/%Y %H:%M", "%m/%d/%y %H:%M", "%m/%d/%Y %H:%M:%S", "%d.%m.%Y %H:%M")
_EPOCH = (1e8, 1e10)  # seconds since 1970 for dates of 1973 to 2286
_TIME_WORDS = ("start", "fail", "began", "begin", "occur", "time", "date")
_GAP_WORDS = ("gap", "between", "ttf", "tbf", "until", "uptime", "interval", "lifetime")
_NODE_WORDS = ("node", "host", "machine", "server")
_HOURS = {"s": 1 / 3600, "sec": 1 / 3600, "min": 1 / 60, "h": 1.0, "hour": 1.0, "day": 24.0}
_LEAST_READABLE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLog:
    """Failures that were observed. What began at the same moment is one failure."""

    source: str
    gaps_hours: F64
    """Between one failure and the next, none of them 0."""
    together: float
    """Lines per failure, on average."""
    nodes: int | None
    """How many different machines are named; None where no column names them."""
    taken: tuple[str, ...]
    """What was taken for what, in sentences."""

    @property
    def failures(self) -> int:
        return len(self.gaps_hours) + 1

    @property
    def mtbf(self) -> timedelta:
        """The mean of the gaps, whatever distribution fits them best."""
        return float(self.gaps_hours.mean()) * timedelta(hours=1)


def read_failures(path: str | Path, *, column: str | None = None) -> FailureLog:
    """The failures of a CSV file; `column` names what holds their times, where the guess is wrong.

    A column of times is taken as failures as they began; a column of numbers as time until a
    failure, or where the numbers only grow as time since some start, in the unit that its name
    says or else in hours. Lines without a value there are left out and counted.
    """
    header, lines = _lines(Path(path))
    values = list(itertools.zip_longest(*lines, fillvalue=""))
    times = {place: _timestamps(cells) for place, cells in enumerate(values)}
    numbers = {place: _numbers(cells) for place, cells in enumerate(values)}
    if column is not None:
        place = _place(header, column, path)
    else:
        place = _guess(header, times, numbers, path)
    name = _name(header, place)
    hours, are_gaps, what = _hours(name, times[place], numbers[place])
    known = hours[np.isfinite(hours)]
    taken = [f"{path}: {what}"]
    if len(known) < _LEAST_READABLE * len(hours):
        raise DataError(f"{path}: {name} holds neither times nor numbers; name another column")
    if len(known) < len(hours):
        taken.append(f"{len(hours) - len(known)} of {len(hours)} lines have no value there")
    if are_gaps:
        gaps, together = known[known > 0], 1.0
    else:
        moments, counts = np.unique(known, return_counts=True)
        gaps, together = np.diff(moments), float(counts.mean())
        if len(moments) < len(known):
            taken.append(f"{len(known)} lines are {len(moments)} failures: some began together")
    if len(gaps) < FEWEST:
        raise DataError(
            f"{path}: {len(gaps)} gaps between failures are too few to fit: there must be {FEWEST}"
        )
    nodes = _nodes(header, values)
    return FailureLog(
        source=str(path), gaps_hours=gaps, together=together, nodes=nodes, taken=tuple(taken)
    )


def _lines(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header, empty where there is none, and the lines."""
    text = read_text(path, "CSV", DataError)
    kept = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not kept:
        raise DataError(f"{path} holds no lines")
    delimiter = max(",;\t|", key=kept[0].count)
    rows = [[cell.strip() for cell in row] for row in csv.reader(kept, delimiter=delimiter)]
    has_header = not any(
        math.isfinite(parsed(cell)) for cell in rows[0] for parsed in (_timestamp, _number)
    )
    header, lines = (rows[0], rows[1:]) if has_header else ([], rows)
    if not lines:
        raise DataError(f"{path} holds a header and no lines")
    return header, lines


def _timestamp(cell: str) -> float:
    """Seconds since 1970; NaN where the cell is no time. A time without a zone is UTC."""
    try:
        parsed = datetime.fromisoformat(cell.replace("Z", "+00:00"))
    except ValueError:
        number = _number(cell)
        if _EPOCH[0] <= number <= _EPOCH[1]:
            return number
        for form in _FORMATS:
            try:
                parsed = datetime.strptime(cell, form)
                break
            except ValueError:
                continue
        else:
            return math.nan
    if parsed.tzinfo is None:
        parsed = parsed.replace(tzinfo=timezone.utc)
    return parsed.timestamp()


def _number(cell: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _timestamps(cells: Sequence[str]) -> F64:
    return np.array([_timestamp(cell) for cell in cells])


def _numbers(cells: Sequence[str]) -> F64:
    return np.array([_number(cell) for cell in cells])


def _name(header: Sequence[str], place: int) -> str:
    named = place < len(header) and header[place]
    return f"column {header[place]!r}" if named else f"column {place + 1}"


def _place(header: Sequence[str], column: str, path: str | Path) -> int:
    if column in header:
        return list(header).index(column)
    have = f"it has {', '.join(header)}" if header else "it has no header"
    raise ConfigError(f"{path} has no column {column!r}: {have}")


def _guess(
    header: Sequence[str],
    times: dict[int, F64],
    numbers: dict[int, F64],
    path: str | Path,
) -> int:
    """The column that most likely says when failures were: a time before a number, a telling name
    before any other, the first one last."""

    def readable(values: F64) -> bool:
        return float(np.isfinite(values).mean()) >= _LEAST_READABLE

    def by_name(words: Sequence[str]) -> Callable[[int], tuple[int, int]]:
        def key(place: int) -> tuple[int, int]:
            name = header[place].lower() if place < len(header) else ""
            ranks = [rank for rank, word in enumerate(words) if word in name]
            return (min(ranks, default=len(words)), place)

        return key

    for columns, words in ((times, _TIME_WORDS), (numbers, (*_GAP_WORDS, *_TIME_WORDS))):
        candidates = [place for place, values in columns.items() if readable(values)]
        if candidates:
            return min(candidates, key=by_name(words))
    raise DataError(f"{path}: no column holds times or numbers")


def _hours(name: str, times: F64, numbers: F64) -> tuple[F64, bool, str]:
    """The values of a column in hours, whether they are gaps, and what they were taken for."""
    if np.isfinite(times).mean() >= _LEAST_READABLE:
        return times / 3600, False, f"{name} holds the times when failures began"
    words = re.findall(r"[a-z]+", name.lower())
    units = [unit for word in words for unit in (word, word.removesuffix("s")) if unit in _HOURS]
    unit = units[0] if units else "h"
    hours = numbers * _HOURS[unit]
    known = hours[np.isfinite(hours)]
    tells_gaps = any(word in name.lower() for word in _GAP_WORDS)
    long = {"s": "seconds", "sec": "seconds", "min": "minutes", "day": "days"}.get(unit, "hours")
    if not tells_gaps and len(known) > 1 and np.all(np.diff(known) >= 0):
        return hours, False, f"{name} holds {long} from a start to each failure"
    return hours, True, f"{name} holds {long} until a failure"


def _nodes(header: Sequence[str], values: Sequence[Sequence[str]]) -> int | None:
    for word in _NODE_WORDS:
        for place, name in enumerate(header):
            if word in name.lower() and place < len(values):
                return len(set(values[place]) - {""})
    return None
