"""`emberkeep plan`: which strategy, which interval, at which cost."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emberkeep.cli._options import option, read_time
from emberkeep.cli._repository import emit, print_json, print_table
from emberkeep.cli._shell import command, say
from emberkeep.errors import ConfigError

if TYPE_CHECKING:
    from emberkeep.planning.advisor import Plan
    from emberkeep.planning.failure_log import FailureLog
    from emberkeep.planning.failures import Fit


@command
def plan(
    duration: Annotated[str, option("--duration", "Length of the job: 56h, 3d, 1h 30min.")],
    shards: Annotated[int, option("--shards", "Shards that hold the tables.", "N")],
    mtbf: Annotated[
        str | None, option("--mtbf", "Mean time between failures of the whole job.")
    ] = None,
    failures: Annotated[
        Path | None,
        option("--failures", "Or a log of failures, one a line, to fit.", "FILE.csv"),
    ] = None,
    column: Annotated[
        str | None, option("--failures-column", "The column with their times.", "NAME")
    ] = None,
    nodes: Annotated[
        int | None,
        option(
            "--failures-nodes",
            "The log is of so many machines: scale it to the shards of the job.",
            "N",
        ),
    ] = None,
    together: Annotated[int, option("--fail-together", "Shards that one failure takes.", "N")] = 1,
    save_time: Annotated[
        str | None, option("--save-time", "How long training stands still for a version.")
    ] = None,
    load_time: Annotated[str | None, option("--load-time", "How long loading takes.")] = None,
    reschedule_time: Annotated[
        str, option("--reschedule-time", "Until there is a new machine.")
    ] = "0s",
    repository: Annotated[
        str | None, option("--repository", "Measure save and load time of this one.", "URL")
    ] = None,
    pls: Annotated[
        float | None,
        option("--pls", "Share of updates that may be lost; 0.1 by default.", "SHARE"),
    ] = None,
    accuracy_loss: Annotated[
        float | None, option("--accuracy-loss", "Or the AUC that may be lost.", "AUC")
    ] = None,
    slope: Annotated[
        float | None, option("--slope", "AUC lost per PLS of 1, as emulate fits it.", "AUC")
    ] = None,
    max_interval: Annotated[
        str | None, option("--max-interval", "Save at least this often.")
    ] = None,
    price: Annotated[
        float | None, option("--price", "Price of a machine for an hour.", "MONEY")
    ] = None,
    machines: Annotated[
        int | None,
        option("--machines", "That stand still together; as many as shards by default.", "N"),
    ] = None,
    parity_slowdown: Annotated[
        float | None,
        option("--parity-slowdown", "How much slower steps are with parity: 0.02.", "SHARE"),
    ] = None,
    report: Annotated[
        Path | None, option("--report", "Write a page with plots, data beside it.", "FILE.html")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say how to recover and how often to save, what that costs, and why."""
    from emberkeep.checkpoint.overheads import Job
    from emberkeep.planning.advisor import Question, advise

    if (mtbf is None) == (failures is None):
        raise ConfigError("give --mtbf, or --failures with a log of failures")
    log: FailureLog | None = None
    fitted: tuple[Fit, ...] = ()
    if failures is not None:
        log, fitted, between = _fitted(failures, column, nodes, shards)
    else:
        between = read_time("--mtbf", mtbf or "")
    save, load = _costs(save_time, load_time, repository)
    job = Job(
        duration=read_time("--duration", duration),
        mtbf=between,
        shards=shards,
        failing_together=together,
        save=save,
        load=load,
        reschedule=read_time("--reschedule-time", reschedule_time),
    )
    found = advise(
        Question(
            job=job,
            pls=pls,
            accuracy_loss=accuracy_loss,
            slope=slope,
            max_interval=read_time("--max-interval", max_interval) if max_interval else None,
            price=price,
            machines=machines,
            parity_slowdown=parity_slowdown,
        )
    )
    document = {**found.to_dict(), "failures": _failures(log, fitted)}
    if report is not None:
        from emberkeep.report.page import write
        from emberkeep.report.plan_page import plan_page

        page = plan_page(found, log=log, fitted=fitted, nodes=shards)
        rows = [{"strategy": name, **o.to_dict()} for name, o in found.strategies.items()]
        for row in rows:
            row.update({f"overhead_{part}": v for part, v in row.pop("breakdown").items()})
        say(f"written: {write(report, page, document, rows)}")
    if as_json:
        print_json(document)
    else:
        _print(found, log, fitted)


def _fitted(
    path: Path, column: str | None, nodes: int | None, shards: int
) -> tuple[FailureLog, tuple[Fit, ...], timedelta]:
    """The log, the distributions fitted to it, and the MTBF of the job."""
    from emberkeep.planning.failure_log import read_failures
    from emberkeep.planning.failures import fits, scaled_mtbf

    log = read_failures(path, column=column)
    for line in log.taken:
        say(line)
    if nodes is None:
        named = f" ({log.nodes} machines are named there)" if log.nodes else ""
        say(f"its MTBF is taken for that of the job{named}; --failures-nodes N would scale it")
        return log, fits(log.gaps_hours), log.mtbf
    return log, fits(log.gaps_hours), scaled_mtbf(log.mtbf, nodes=nodes, to=shards)


def _costs(
    save_time: str | None, load_time: str | None, repository: str | None
) -> tuple[timedelta, timedelta]:
    """Save and load time: as given, and what is not given as measured."""
    save = None if save_time is None else read_time("--save-time", save_time)
    load = None if load_time is None else read_time("--load-time", load_time)
    if repository is None:
        if save is None or load is None:
            raise ConfigError("give --save-time and --load-time, or --repository to measure them")
        return save, load
    from emberkeep.cli._repository import open_repository
    from emberkeep.planning.measurements import load_time as measured_load
    from emberkeep.planning.measurements import save_time as measured_save

    opened, _ = open_repository(repository)
    if save is None:
        save = measured_save(opened)
        say(f"training stood still for {save.total_seconds():.3g} s per version, by its counters")
    if load is None:
        load = measured_load(opened)
        say(f"its newest version was read and decoded in {load.total_seconds():.3g} s just now")
    return save, load


def _failures(log: FailureLog | None, fitted: tuple[Fit, ...]) -> dict[str, Any] | None:
    if log is None:
        return None
    return {
        "source": log.source,
        "count": log.failures,
        "mtbf_hours": log.mtbf / timedelta(hours=1),
        "together": log.together,
        "nodes": log.nodes,
        "taken": list(log.taken),
        "best": fitted[0].name,
        "fits": {
            fit.name: {
                "parameters": list(fit.parameters),
                "mean_hours": fit.mean / timedelta(hours=1),
                "aic": fit.aic,
                "rmse": fit.rmse,
            }
            for fit in fitted
        },
    }


def _print(plan: Plan, log: FailureLog | None, fitted: tuple[Fit, ...]) -> None:
    from emberkeep.planning.advisor import time_text
    from emberkeep.report.plan_page import TITLES, plan_table

    job = plan.question.job
    if log is not None:
        print_table(
            ["distribution", "mean", "AIC", "RMSE of survival"],
            [(f.name, time_text(f.mean), f"{f.aic:,.0f}", f"{f.rmse:.2%}") for f in fitted],
            right=("mean", "AIC", "RMSE of survival"),
        )
        emit(f"best fit: {fitted[0].name}; observed MTBF {time_text(log.mtbf)}\n")
    emit(
        f"{time_text(job.duration)} on {job.shards} shards, {job.failing_together} failing "
        f"together every {time_text(job.mtbf)}: {job.failures:.3g} failures expected"
    )
    columns, rows = plan_table(plan)
    print_table(columns, rows, right=columns[1:-1])
    emit(f"\nrecommended: {TITLES[plan.recommended]}\n{plan.reason}")
    for warning in plan.warnings:
        emit(f"note: {warning}")
