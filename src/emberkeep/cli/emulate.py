"""`emberkeep emulate`: the strategies side by side under the same failures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from emberkeep.cli._options import option, read_time
from emberkeep.cli._repository import print_json, print_table
from emberkeep.cli._shell import command, say
from emberkeep.errors import ConfigError

if TYPE_CHECKING:
    from emberkeep.planning.emulator import Emulation, Progress
    from emberkeep.planning.failures import Fit
    from emberkeep.report.emulation_page import Table
    from emberkeep.report.page import Page

Sweep = Literal["pls", "failures", "fraction"]
ClusterKind = Literal["local", "servers", "ray"]


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
    mtbf: Annotated[
        str | None,
        option("--mtbf", "Mean time between failures; 28h, or what --count or --failures says."),
    ] = None,
    failures: Annotated[
        Path | None,
        option("--failures", "Draw failures from the best fit to this log.", "FILE.csv|json"),
    ] = None,
    count: Annotated[
        int | None, option("--count", "So many failures instead of the expected number.", "N")
    ] = None,
    shards: Annotated[int, option("--shards", "Shards that hold the tables.", "N")] = 8,
    together: Annotated[
        int | None,
        option("--fail-together", "Shards that one failure takes; 1, or as in the log.", "N"),
    ] = None,
    cluster: Annotated[
        ClusterKind | None,
        option("--cluster", "Where the shards are: local, or servers that are killed.", "KIND"),
    ] = None,
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
    from emberkeep.checkpoint.failure_gaps import Gaps
    from emberkeep.checkpoint.overheads import Job
    from emberkeep.planning.emulator import Emulation, small_task
    from emberkeep.planning.sweeps import SHORT
    from emberkeep.report.page import prepare, write
    from emberkeep.report.plots import check_available
    from emberkeep.train.run_config import load

    check_available()
    prepare(report, reads=(config, failures))
    length = read_time("--duration", duration)
    between, fit, taken = _failing(length, mtbf, failures, count, shards)
    job = Job(
        duration=length,
        mtbf=between,
        shards=shards,
        failing_together=taken if together is None else together,
        save=read_time("--save-time", save_time),
        load=read_time("--load-time", load_time),
        reschedule=read_time("--reschedule-time", reschedule_time),
        gaps=Gaps() if fit is None else fit.gaps(),
    )
    changes = [*(SHORT if sweep == "fraction" else ()), *(overrides or ())]
    settings = small_task(changes) if config is None else load(config, overrides or ())
    kind = settings.cluster.kind if cluster is None else cluster
    if kind == "connect":
        raise ConfigError(
            "emulation kills servers, and those at addresses are not its own: use --cluster "
            "servers, ray or local"
        )
    settings = replace(
        settings,
        cluster=replace(settings.cluster, kind=kind, shards=shards, addresses=(), workers=1),
    )
    spec = Emulation(settings=settings, job=job, pls=pls, count=count, fit=fit, seed=seed)
    if fit is not None and sweep is None:
        say(f"{len(spec.failures())} failures drawn from a {fit.name} fit")
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


def _failing(
    length: timedelta, mtbf: str | None, failures: Path | None, count: int | None, shards: int
) -> tuple[timedelta, Fit | None, int]:
    """The MTBF, what gaps are drawn from if there is a log, and how many shards fail together."""
    if sum(given is not None for given in (mtbf, failures, count)) > 1:
        raise ConfigError("--mtbf, --count and --failures each say how often: give one of them")
    if count is not None:
        # Strategies plan for as many failures as there will be; none is less than one.
        return length / max(count, 0.5), None, 1
    if failures is None:
        return read_time("--mtbf", mtbf or "28h"), None, 1
    from emberkeep.planning.failure_log import read_failures
    from emberkeep.planning.failures import fits

    log = read_failures(failures)
    say(". ".join(log.taken))
    fit = fits(log.gaps_hours, log.censored_hours)[0]
    return log.mtbf, fit, min(shards, max(1, round(log.together)))


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
