"""Failure logs: CSV or JSON files as monitoring systems export them.

A line is a failure with the time when it began, or a run with the time until it failed or ended.
What was taken for what is in `FailureLog.taken`, so that a wrong guess is seen and can be
corrected.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import numpy.typing as npt

from emberkeep._types import F64
from emberkeep.checkpoint.overheads import RAREST
from emberkeep.config import read_text
from emberkeep.errors import ConfigError, DataError

FEWEST = 5
"""A distribution is not fitted to fewer gaps."""

_FORMATS = ("%m/%d/%Y %H:%M", "%m/%d/%y %H:%M", "%m/%d/%Y %H:%M:%S", "%d.%m.%Y %H:%M")
_EPOCH = (1e8, 1e10)  # seconds since 1970 for dates of 1973 to 2286
_PER_SECOND = (1, 1e3, 1e6, 1e9)  # what such a number may count; no two can be confused
_TIME_WORDS = ("start", "fail", "began", "begin", "occur", "time", "date")
_GAP_WORDS = ("gap", "between", "ttf", "tbf", "until", "uptime", "interval", "lifetime")
_SPAN_WORDS = (*_GAP_WORDS, "duration", "elapsed")  # of what is no date, however large
_NODE_WORDS = ("node", "host", "machine", "server", "shard")
_ENDED_WORDS = ("failed", "event", "censored", "status", "outcome", "exit", "reason")
_UNITS = {
    "milliseconds": 1 / 3_600_000, "seconds": 1 / 3600, "minutes": 1 / 60, "hours": 1.0,
    "days": 24.0,
}  # fmt: skip
_UNIT_WORDS = {
    "ms": "milliseconds", "msec": "milliseconds", "millisecond": "milliseconds",
    "s": "seconds", "sec": "seconds", "second": "seconds",
    "m": "minutes", "min": "minutes", "minute": "minutes",
    "h": "hours", "hr": "hours", "hour": "hours", "d": "days", "day": "days",
}  # fmt: skip
# What says of a run that it did not fail, by the sense of the column's name.
_FAILED = {"1", "true", "yes", "failed", "failure", "fail", "error", "crashed", "killed", "lost"}
_ENDED = {"0", "false", "no", "completed", "complete", "finished", "success", "succeeded", "ok",
          "running", "censored", "alive"}  # fmt: skip
_LEAST_READABLE = 0.5
WITHIN = timedelta(minutes=1)
"""Machines that go down so soon after one another are one failure: nothing has recovered yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLog:
    """Failures that were observed. What began within less than `WITHIN` of another is one failure
    with it."""

    source: str
    gaps_hours: F64
    """Between one failure and the next, none of them 0."""
    together: float
    """Machines per failure, on average."""
    counts: tuple[int, ...]
    """Machines of each failure; none where the log does not tell."""
    nodes: int | None
    """How many different machines are named; None where no column names them."""
    taken: tuple[str, ...]
    """What was taken for what, in sentences."""
    censored_hours: F64
    """Times without a failure that nobody saw the end of: runs that ended well, and the time from
    the last failure to the end of the log."""
    failures: int

    @property
    def mtbf(self) -> timedelta:
        """All time that was watched, for each failure that ended some of it; whatever distribution
        fits best."""
        watched = float(self.gaps_hours.sum() + self.censored_hours.sum())
        return watched / len(self.gaps_hours) * timedelta(hours=1)


def read_failures(
    path: str | Path, *, column: str | None = None, until: datetime | None = None
) -> FailureLog:
    """The failures of a CSV or JSON file; `column` names what holds their times, where the guess is
    wrong; `until` is when the log ends, which counts as time without a failure.

    A column of times is taken as failures as they began; a column of numbers as time until a
    failure, or where the numbers only grow as time since some start, in the unit that its name
    says or else in hours. Lines without a value there are left out and counted. Runs that another
    column says did not fail are time without a failure.
    """
    header, lines, entries = _lines(Path(path))
    values = list(itertools.zip_longest(*lines, fillvalue=""))
    times = {
        place: _timestamps(cells, numbers=not _is_span(header, place))
        for place, cells in enumerate(values)
    }
    numbers = {place: _numbers(cells) for place, cells in enumerate(values)}
    if column is not None:
        place = _place(header, column, path)
    else:
        place = _guess(header, times, numbers, path)
    name = _name(header, place)
    hours, are_gaps, what = _hours(name, times[place], numbers[place])
    known = hours[np.isfinite(hours)]
    taken = [f"{path}: {what}"]
    if known.size and np.abs(known).max() > RAREST / timedelta(hours=1):
        raise DataError(
            f"{path}: {name} holds {np.abs(known).max():.3g} hours, which is no time; name another "
            "column, or its unit in its name"
        )
    if len(known) < _LEAST_READABLE * len(hours):
        raise DataError(f"{path}: {name} holds neither times nor numbers; name another column")
    if len(known) < len(hours):
        taken.append(f"{len(hours) - len(known)} of {len(hours)} lines have no value there")
    counts: tuple[int, ...] = ()
    censored: F64 = np.empty(0)
    if are_gaps:
        failed, judged = _failed(header, values, skip=place)
        # What one entry took is one failure after one gap.
        once = np.zeros(len(hours), np.bool_)
        once[np.unique(entries, return_index=True)[1]] = True
        kept = np.isfinite(hours) & (hours > 0) & once
        wrong = int(((hours <= 0) & once).sum())
        if wrong:
            taken.append(f"{wrong} of {once.sum()} values are not above 0, and left out")
        gaps, censored = hours[kept & failed], hours[kept & ~failed]
        failures = len(gaps)
        if censored.size:
            taken.append(f"{censored.size} runs did not fail, by {judged}: time without a failure")
        if until is not None:
            raise ConfigError(f"{path} holds times until failures: an end of the log is of no use")
    else:
        gaps, counts = _moments(hours, _machines(header, values))
        failures = len(counts)
        if failures < len(known):
            taken.append(
                f"{len(known)} lines are {failures} failures: some began together or within a "
                f"minute, {np.mean(counts):.3g} machines at a time on average"
            )
        if until is not None:
            quiet = until.timestamp() / 3600 - float(known.max())
            if quiet < 0 or not np.isfinite(times[place]).any():
                raise ConfigError(f"{path}: the log cannot end at {until}, before its last failure")
            censored = np.array([quiet])
            taken.append(f"no failure in the last {quiet:.1f} h of the log")
    if len(gaps) < FEWEST:
        what = f"{len(gaps)} gap{'' if len(gaps) == 1 else 's'} between failures"
        left_out = "".join(f"; {text}" for text in taken[1:])
        raise DataError(
            f"{path}: {what} are too few to fit, there must be {FEWEST}{left_out}: give --mtbf"
        )
    return FailureLog(
        source=str(path), gaps_hours=gaps, together=float(np.mean(counts)) if counts else 1.0,
        counts=counts, nodes=_nodes(header, values), taken=tuple(taken), censored_hours=censored,
        failures=failures,
    )  # fmt: skip


def _moments(hours: F64, machines: Sequence[str] | None) -> tuple[F64, tuple[int, ...]]:
    """The gaps between moments at which something failed, and how many machines did at each: lines,
    or where machines are named so many different ones."""
    order = [line for line in np.argsort(hours, kind="stable") if math.isfinite(hours[line])]
    moments: list[float] = []
    taken: list[set[str]] = []
    last = -math.inf
    for line in order:
        if not moments or (hours[line] - last) * 3600 >= WITHIN.total_seconds() - 1e-3:
            moments.append(float(hours[line]))
            taken.append(set())
        last = float(hours[line])
        name = str(line) if machines is None or not machines[line] else machines[line]
        taken[-1].add(name)
    return np.diff(moments), tuple(len(machines_down) for machines_down in taken)


def _failed(
    header: Sequence[str], values: Sequence[Sequence[str]], *, skip: int
) -> tuple[npt.NDArray[np.bool_], str]:
    """Which lines are runs that failed, and the column that says so; all, where none does."""
    lines = len(values[0])
    for place, name in enumerate(header[: len(values)]):
        words = re.findall(r"[a-z]+", name.lower())
        if place == skip or not any(word in _ENDED_WORDS for word in words):
            continue
        cells = [cell.lower() for cell in values[place]]
        if "exit" in words:  # 137 is as much of a failure as 1
            cells = [cell if math.isnan(code := _number(cell)) else str(int(code != 0))
                     for cell in cells]  # fmt: skip
        known = {*cells} - {""}
        if known and known <= _FAILED | _ENDED and known & _ENDED:
            failed = np.array([cell in _FAILED for cell in cells])
            if "censored" in words:  # 1 says that it was not seen to fail
                failed = np.array([cell in ("0", "false", "no") for cell in cells])
            return failed, _name(header, place)
    return np.ones(lines, np.bool_), ""


_Lines = tuple[list[str], list[list[str]], list[int]]


def _lines(path: Path) -> _Lines:
    """The header, empty where there is none, the lines, and of which entry of the log each is."""
    text = read_text(path, "CSV", DataError)
    if text.lstrip()[:1] in ("[", "{"):
        return _json_lines(text, path)
    kept = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not kept:
        raise DataError(f"{path} holds no lines")
    delimiter = max(",;\t|", key=kept[0].count)
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(kept, delimiter=delimiter)]
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from None
    has_header = not any(
        math.isfinite(parsed(cell)) for cell in rows[0] for parsed in (_timestamp, _number)
    )
    header, lines = (rows[0], rows[1:]) if has_header else ([], rows)
    if not lines:
        raise DataError(f"{path} holds a header and no lines")
    return header, lines, list(range(len(lines)))


def _json_lines(text: str, path: Path) -> _Lines:
    """A JSON document with a list of objects or numbers, or one object a line."""
    try:
        try:
            document = json.loads(text)
        except json.JSONDecodeError:
            document = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {error}") from None
    if isinstance(document, dict):
        lists = {key: value for key, value in document.items() if isinstance(value, list) and value}
        chosen = lists.get("failures") or (next(iter(lists.values())) if len(lists) == 1 else None)
        document = [document] if document and not lists else chosen
    if not document:
        raise DataError(f"{path}: a JSON log is a list of failures, or has one under 'failures'")
    if all(isinstance(entry, dict) for entry in document):
        header = list(dict.fromkeys(key for entry in document for key in entry))
        lines = [[_cell(entry.get(key)) for key in header] for entry in document]
        entries = list(range(len(lines)))
        # A failure that lists what it took is a line for each.
        for key in [k for k in header if any(isinstance(e.get(k), list) for e in document)]:
            at = header.index(key)
            listed = [value if isinstance(value := entry.get(key), list) and value else [None]
                      for entry in document]  # fmt: skip
            entries = [number for number, each in enumerate(listed) for _ in each]
            lines = [
                [*line[:at], _cell(one), *line[at + 1 :]]
                for each, line in zip(listed, lines, strict=True)
                for one in each
            ]
            break
        return header, lines, entries
    if any(isinstance(entry, dict | list) for entry in document):
        raise DataError(f"{path}: a JSON log holds objects, or numbers and times, not lists")
    return [], [[_cell(entry)] for entry in document], list(range(len(document)))


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def _timestamp(cell: str, *, numbers: bool = True) -> float:
    """Seconds since 1970; NaN where the cell is no time. A time without a zone is UTC; `numbers`
    may be seconds since 1970, or milli-, micro- or nanoseconds."""
    number = _number(cell)
    if not numbers and math.isfinite(number):
        return math.nan
    # Before dates: thirteen digits may pass for one of the year 1700.
    for per_second in _PER_SECOND:
        if _EPOCH[0] <= number / per_second <= _EPOCH[1]:
            return number / per_second
    try:
        parsed = datetime.fromisoformat(cell.replace("Z", "+00:00"))
    except ValueError:
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


def _timestamps(cells: Sequence[str], *, numbers: bool) -> F64:
    return np.array([_timestamp(cell, numbers=numbers) for cell in cells])


def _is_span(header: Sequence[str], place: int) -> bool:
    name = header[place].lower() if place < len(header) else ""
    return any(word in name for word in _SPAN_WORDS)


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
    words = re.findall(r"[a-z]+", name.lower().removeprefix("column"))
    named = [
        _UNIT_WORDS[form]
        for word in words
        for form in (word, word.removesuffix("s"))
        if form in _UNIT_WORDS
    ]
    # A bare "m" or "d" may be anything; a word that can only be a unit goes before it.
    unit = max(named, key=lambda found: any(found in word for word in words), default="hours")
    hours = numbers * _UNITS[unit]
    known = hours[np.isfinite(hours)]
    tells_gaps = any(word in name.lower() for word in _GAP_WORDS)
    if not tells_gaps and len(known) > 1 and np.all(np.diff(known) >= 0):
        return hours, False, f"{name} holds {unit} from a start to each failure"
    return hours, True, f"{name} holds {unit} until a failure"


def _machines(header: Sequence[str], values: Sequence[Sequence[str]]) -> Sequence[str] | None:
    """The column that names machines."""
    for word in _NODE_WORDS:
        for place, name in enumerate(header):
            if word in name.lower() and place < len(values):
                return values[place]
    return None


def _nodes(header: Sequence[str], values: Sequence[Sequence[str]]) -> int | None:
    named = _machines(header, values)
    return None if named is None else len(set(named) - {""})
