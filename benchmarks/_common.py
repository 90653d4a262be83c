"""What all benchmarks share: arguments, interleaved timing, and how results are reported.

A benchmark declares its config (geometry, never changed by `--quick`), measures, and calls
`report`. With `--json` the last line printed is one JSON object `{"config": …, "figures": …}`.
A full run also writes `results/<name>.json` and `results/<name>.md`, with machine and versions.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asked for."""

    name: str
    quick: bool
    json: bool
    chosen: Mapping[str, str] = field(default_factory=dict)


def options(file: str, summary: str, choices: Mapping[str, Sequence[str]] | None = None) -> Options:
    """Parses the arguments that every benchmark takes; `file` is the benchmark's `__file__`.

    `choices` are arguments of its own: name → what can be chosen, the default first.
    """
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument(
        "--quick", action="store_true", help="fewer repeats, within 45 s; writes no files"
    )
    parser.add_argument(
        "--json", action="store_true", help="end with one JSON object: config and figures"
    )
    for name, values in (choices or {}).items():
        parser.add_argument(f"--{name}", choices=values, default=values[0])
    given = parser.parse_args()
    chosen = {name: getattr(given, name) for name in choices or {}}
    return Options(name=Path(file).stem, quick=given.quick, json=given.json, chosen=chosen)


def interleaved_ms(
    contenders: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 2, lead: int = 0
) -> dict[str, float]:
    """Median milliseconds of each contender.

    They take turns: a machine that slows down for a while slows all of them. The order turns
    round from repeat to repeat, so that none always runs in the wake of the same other. With
    `lead`, each first runs so often unmeasured in every turn: what is measured then runs in the
    wake of its own, with the processor's caches as training would leave them.
    """
    for _ in range(warmup):
        for run in contenders.values():
            run()
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for repeat in range(repeats):
        for name in order if repeat % 2 == 0 else reversed(order):
            for _ in range(lead):
                contenders[name]()
            start = time.perf_counter()
            contenders[name]()
            taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def timed(step: Callable[[], None], count: int) -> list[float]:
    """Seconds of each of so many steps."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


@contextmanager
def instructions() -> Iterator[Callable[[], int | None]]:
    """How many instructions all threads, and what they start, have run since; None where the
    machine offers no count of them (perf_event_open)."""
    number = {"x86_64": 298, "aarch64": 241}.get(platform.machine())
    # Hardware event 1, of user code alone, inherited by what is started: attributes of version 0.
    about = struct.pack("=IIQQQQQIIQ", 0, 64, 1, 0, 0, 0, 1 << 1 | 1 << 5 | 1 << 6, 0, 0, 0)
    files: list[int] = []
    if number is not None and platform.system() == "Linux":
        call = ctypes.CDLL(None, use_errno=True).syscall
        threads = [int(thread) for thread in os.listdir("/proc/self/task")]
        files = [call(number, about, thread, -1, -1, 0) for thread in threads]
    offered = bool(files) and min(files) >= 0

    def count() -> int | None:
        return sum(struct.unpack("=Q", os.read(f, 8))[0] for f in files) if offered else None

    try:
        yield count
    finally:
        for file in files:
            if file >= 0:
                os.close(file)


def criteo_batches(
    features: Sequence[str], *, rows: int, batch: int, dense: int, count: int
) -> list[tuple[Any, dict[str, Any], Any]]:
    """Batches of the shape of Criteo's: dense columns, one skewed id per feature, labels."""
    import numpy as np
    import torch

    from emberkeep.data import skewed_ids

    random = np.random.default_rng(0)
    made = []
    for number in range(count):
        ids = {
            name: torch.from_numpy(
                skewed_ids(rows, batch, skew=1.05, seed=table, start=number * batch)
            )
            for table, name in enumerate(features)
        }
        columns = torch.from_numpy(random.random((batch, dense), np.float32))
        labels = torch.from_numpy((random.random(batch) < 0.25).astype(np.float32))
        made.append((columns, ids, labels))
    return made


def machine() -> dict[str, object]:
    """Where the figures come from."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of what was compared; a missing package is left out."""
    found = {}
    for package in ("emberkeep", "torch", "numba", "numpy", *packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def report(
    given: Options,
    *,
    config: Mapping[str, Any],
    figures: Mapping[str, float],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    packages: Sequence[str] = (),
    whole: bool = True,
    by: str | None = None,
) -> None:
    """Prints the table; a full run also writes it, with config, figures, machine and versions.

    One that was not `whole` leaves the files of the last whole run alone. `by` is what it was
    called with, if not by its name alone.
    """
    document = {
        "config": {**config, "quick": given.quick},
        "figures": {name: round(value, 4) for name, value in figures.items()},
    }
    table = _table(columns, rows)
    print(table)
    for note in notes:
        print(f"\n{note}")
    if not given.quick and whole:
        _write(given.name, by or f"{given.name}.py", document, table, notes, packages)
    if given.json:
        print(json.dumps(document), flush=True)


def _write(
    name: str,
    by: str,
    document: Mapping[str, Any],
    table: str,
    notes: Sequence[str],
    packages: Sequence[str],
) -> None:
    where, what = machine(), versions(*packages)
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    RESULTS.mkdir(exist_ok=True)
    everything = {**document, "machine": where, "versions": what, "taken": when}
    (RESULTS / f"{name}.json").write_text(json.dumps(everything, indent=2) + "\n")
    parts = [
        f"# {name}",
        f"Taken {when} by `python benchmarks/{by}`.",
        table,
        *notes,
        _list("Figures", document["figures"]),
        _list("Config", document["config"]),
        _list("Machine", where),
        _list("Versions", what),
    ]
    (RESULTS / f"{name}.md").write_text("\n\n".join(parts) + "\n")
    print(f"\nwritten to benchmarks/results/{name}.md and .json")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns also line up in a terminal."""
    cells = [list(columns), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])


def _list(title: str, values: Mapping[str, Any]) -> str:
    return "\n".join([f"## {title}", "", *(f"- {key}: {value}" for key, value in values.items())])


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return 0.0
