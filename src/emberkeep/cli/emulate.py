"""`emberkeep emulate`: the strategies side by side under the same failures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from emberkeep.cli._options import option, read_time
from emberkeep.cli._repository import print_json, print_table
from emberkeep.cli._shell import command, say

if TYPE_CHECKING:
    from emberkeep.planning.emulator import Emulation, Progress
    from emberkeep.report.emulation_page import Table
    from emberkeep.report.page import Page

Sweep = Literal["pls", "failures", "fraction"]


@command
def emulate(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG.toml", help="What to train; by default a small task."),
    ] = None,
    sweep: Annotated[
        Sweep | None,
        option(
            "--sweep",
            "Over targets (pls), over failures (failures), or random runs, PLS against AUC "
            "(fraction).",
            "WHAT",
        ),
    ] = None,
    strategies: Annotated[
        list[str] | None,
        option("--strategy", "Only this one; repeatable: full, partial, cpr, cpr_mfu, …", "NAME"),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        option("--set", "Replace one setting of the training; repeatable.", "SECTION.KEY=VALUE"),
    ] = None,
    duration: Annotated[str, option("--duration", "Length of the job.")] = "56h",
    mtbf: Annotated[str, option("--mtbf", "Mean time between failures of the job.")] = "28h",
    failures: Annotated[
        Path | None,
        option("--failures", "Draw failures from the best fit to this log.", "FILE.csv"),
    ] = None,
    count: Annotated[
        int | None, option("--count", "So many failures instead of the expected number.", "N")
    ] = None,
    shards: Annotated[int, option("--shards", "Shards that hold the tables.", "N")] = 8,
    together: Annotated[int, option("--fail-together", "Shards that one failure takes.", "N")] = 1,
    save_time: Annotated[str, option("--save-time", "Of training, for a version.")] = "5.7min",
    load_time: Annotated[str, option("--load-time", "How long loading takes.")] = "2.5min",
    reschedule_time: Annotated[
        str, option("--reschedule-time", "Until there is a new machine.")
    ] = "2.5min",
    pls: Annotated[float, option("--pls", "Share of updates that may be lost.", "SHARE")] = 0.1,
    runs: Annotated[
        int, option("--runs", "Random runs per strategy (--sweep fraction).", "N")
    ] = 60,
    seed: Annotated[int, option("--seed", "Of the failures.", "N")] = 0,
    report: Annotated[
        Path, option("--report", "The page that is written, data beside it.", "FILE.html")
    ] = Path("emulation.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train under each strategy with the same failures; say what each costs and how good it gets.

    The defaults are the CPR paper's job: 56 hours with two failures, on 8 shards.
    """
    from emberkeep.checkpoint.overheads import Job
    from emberkeep.planning.emulator import Emulation, small_task
    from emberkeep.planning.sweeps import SHORT
    from emberkeep.report.page import write
    from emberkeep.report.plots import check_available
    from emberkeep.train.run_config import load

    check_available()
    job = Job(
        duration=read_time("--duration", duration),
        mtbf=read_time("--mtbf", mtbf),
        shards=shards,
        failing_together=together,
        save=read_time("--save-time", save_time),
        load=read_time("--load-time", load_time),
        reschedule=read_time("--reschedule-time", reschedule_time),
    )
    times = None
    if failures is not None:
        from emberkeep.planning.failure_log import read_failures
        from emberkeep.planning.failures import fits

        log = read_failures(failures)
        best = fits(log.gaps_hours)[0]
        times = best.draw(job.duration, seed=seed)
        say(f"{'. '.join(log.taken)}; {len(times)} failures drawn from a {best.name} fit")
    changes = [*(SHORT if sweep == "fraction" else ()), *(overrides or ())]
    spec = Emulation(
        settings=small_task(changes) if config is None else load(config, overrides or ()),
        job=job,
        pls=pls,
        count=count,
        times=times,
        seed=seed,
    )
    # Read when torch is loaded, in every process: see `emberkeep train`.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with _progress() as progress:
        shown = (
            _compared(spec, strategies, progress)
            if sweep is None
            else _swept(spec, sweep, strategies, runs, progress)
        )
    path = write(report, shown.page, shown.document, shown.rows)
    if as_json:
        print_json(shown.document)
    else:
        print_table(*shown.table, right=[c for c in shown.table[0][1:] if c != "note"])
    beside = ", ".join(path.with_suffix(suffix).name for suffix in (".json", ".csv"))
    say(f"written: {path}; data in {beside}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What a command leaves: JSON, a page, lines of a CSV file, and a table for the terminal."""

    document: dict[str, Any]
    page: Page
    rows: list[dict[str, Any]]
    table: Table


def _compared(spec: Emulation, strategies: list[str] | None, progress: Progress) -> _Shown:
    from emberkeep.planning.emulator import STRATEGIES, emulate, named
    from emberkeep.report import emulation_page as pages

    found = emulate(spec, [named(n) for n in strategies or STRATEGIES], progress=progress)
    document = found.to_dict()
    return _Shown(
        document=document,
        page=pages.emulation_page(found),
        rows=[pages.flat({"strategy": n, **o}) for n, o in document["strategies"].items()],
        table=pages.outcome_table(found),
    )


def _swept(
    spec: Emulation, sweep: Sweep, strategies: list[str] | None, runs: int, progress: Progress
) -> _Shown:
    from emberkeep.planning import sweeps
    from emberkeep.planning.emulator import named
    from emberkeep.report import emulation_page as pages

    names = [named(name) for name in strategies or ()]
    document: dict[str, Any] = {"sweep": sweep}
    if sweep == "pls":
        points, alone = sweeps.over_targets(spec, names or ("cpr", "cpr_ssu"), progress=progress)
        page, table = pages.targets_page(points, alone), pages.targets_table(points)
    elif sweep == "failures":
        chosen = names[0] if names else "cpr"
        points, alone = sweeps.over_failures(spec, chosen, progress=progress)
        page, table = pages.failures_page(points), pages.failures_table(points)
    else:
        points = sweeps.over_random_runs(
            spec, names or ("cpr", "cpr_mfu", "cpr_ssu"), runs=runs, progress=progress
        )
        lines = sweeps.lines(points)
        document["lines"] = {name: asdict(line) for name, line in lines.items()}
        page, table = pages.losses_page(points, lines), pages.lines_table(lines)
    document["points"] = [point.to_dict() for point in points]
    return _Shown(
        document=document,
        page=page,
        rows=[pages.flat(point) for point in document["points"]],
        table=table,
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """Runs as they end: a bar on a terminal, otherwise lines at tenths."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        parts = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Bar(*parts, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return

    def line(done: int, total: int) -> None:
        if done * 10 // total > (done - 1) * 10 // total:
            print(f"training: {done} of {total} runs", file=sys.stderr, flush=True)

    yield line
