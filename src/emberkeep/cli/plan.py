"""`emberkeep plan`: which strategy, which interval, at which cost."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
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
    from emberkeep.planning.measured_inputs import Inputs


@command
def plan(
    context: typer.Context,
    duration: Annotated[str, option("--duration", "Length of the job: 56h, 3d, 1h 30min.")],
    shards: Annotated[
        int | None, option("--shards", "Shards that hold the tables; needed without --tier.", "N")
    ] = None,
    mtbf: Annotated[
        str | None, option("--mtbf", "Mean time between failures of the whole job.")
    ] = None,
    failures: Annotated[
        Path | None,
        option("--failures", "Or a log of failures, one a line, to fit.", "FILE.csv|json"),
    ] = None,
    column: Annotated[
        str | None, option("--failures-column", "The column with their times.", "NAME")
    ] = None,
    until: Annotated[
        str | None,
        option("--failures-until", "When the log ends, if that is after its last failure.", "TIME"),
    ] = None,
    nodes: Annotated[
        int | None,
        option(
            "--failures-nodes",
            "The log is of so many machines: scale it to the shards of the job.",
            "N",
        ),
    ] = None,
    together: Annotated[
        int | None,
        option("--fail-together", "Shards that one failure takes; of a log what it says.", "N"),
    ] = None,
    save_time: Annotated[
        str | None, option("--save-time", "How long training stands still for a version.")
    ] = None,
    load_time: Annotated[str | None, option("--load-time", "How long loading takes.")] = None,
    reschedule_time: Annotated[
        str | None, option("--reschedule-time", "Until there is a new machine; 0 by default.")
    ] = None,
    repository: Annotated[
        str | None, option("--repository", "Measure save and load time of this one.", "URL")
    ] = None,
    measured: Annotated[
        Path | None,
        option("--measured", "What emberkeep measure --json has printed.", "FILE.json"),
    ] = None,
    pls: Annotated[
        float | None,
        option("--pls", "Share of updates that may be lost; 0.1 by default.", "SHARE"),
    ] = None,
    most_pls: Annotated[
        float | None,
        option("--most-pls", "A bound other than --pls; 1: --pls is an average.", "SHARE"),
    ] = None,
    accuracy_loss: Annotated[
        float | None, option("--accuracy-loss", "Or the AUC that may be lost.", "AUC")
    ] = None,
    slope: Annotated[
        list[str] | None,
        option(
            "--slope",
            "AUC lost per PLS of 1, as emulate fits it: 0.018, or cpr_ssu=0.003; repeatable.",
            "[NAME=]AUC",
        ),
    ] = None,
    slope_error: Annotated[
        float, option("--slope-error", "Standard error of the slope, as emulate prints it.", "AUC")
    ] = 0.0,
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
    memory_price: Annotated[
        float | None, option("--memory-price", "Price of a GB of memory for an hour.", "MONEY")
    ] = None,
    table_gb: Annotated[
        float | None, option("--table-gb", "All rows with their optimizer state.", "GB")
    ] = None,
    parity_slowdown: Annotated[
        float | None,
        option("--parity-slowdown", "How much slower steps are with parity: 0.02.", "SHARE"),
    ] = None,
    parity_r: Annotated[
        int | None,
        option("--parity-r", "Shards that parity brings back at once.", "N"),
    ] = None,
    tier: Annotated[
        bool,
        typer.Option("--tier", help="Compare rows in memory with rows in files, for what follows."),
    ] = False,
    row_bytes: Annotated[
        int | None, option("--row-bytes", "A row with its optimizer state.", "N")
    ] = None,
    skew: Annotated[
        str | None,
        option("--skew", "How ids are used: retail, criteo, uniform, or Zipf's exponent.", "SKEW"),
    ] = None,
    lookups: Annotated[
        int | None, option("--lookups", "Rows that a batch looks up.", "N")
    ] = None,
    step_time: Annotated[
        str | None, option("--step-time", "Of a batch, with all rows in memory.")
    ] = None,
    cache: Annotated[
        str | None,
        option("--cache", "Memory of the tier; what its machines have, if not given.", "SIZE"),
    ] = None,
    memory_machine: Annotated[
        str | None,
        option("--memory-machine", "memory=384GB price=3.03, of an hour.", "MACHINE"),
    ] = None,
    tier_machine: Annotated[
        str | None,
        option(
            "--tier-machine", "memory=192GB disk=756GB reads=400000 (a second) price=3.80.",
            "MACHINE",
        ),
    ] = None,
    jobs: Annotated[
        int, option("--jobs", "Simulate so many for percentiles; 0 for none.", "N")
    ] = 1000,
    page: Annotated[
        Path | None,
        typer.Option(
            "--page", "--report", metavar="FILE.html",
            help="Write a page with plots, data beside it.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:  # fmt: skip
    """Say how to recover and how often to save, what that costs, and why."""
    from emberkeep.checkpoint.failure_gaps import Gaps
    from emberkeep.checkpoint.overheads import Job
    from emberkeep.planning.advisor import Question, advise

    _refuse_others(context, tier=tier)
    if page is not None:
        from emberkeep.report.page import prepare

        prepare(page, reads=(failures, measured))
    if tier:
        from emberkeep.cli import _plan_tier

        _plan_tier.answer(
            duration=read_time("--duration", duration),
            step=None if step_time is None else read_time("--step-time", step_time),
            table_nbytes=None if table_gb is None else _nbytes(table_gb),
            row_nbytes=row_bytes, skew=skew, lookups=lookups, cache=cache,
            memory_machine=memory_machine, tier_machine=tier_machine, as_json=as_json,
        )  # fmt: skip
        return
    if shards is None:
        raise ConfigError("give --shards, or --tier to compare rows in memory and in files")
    if (mtbf is None) == (failures is None):
        raise ConfigError("give --mtbf, or --failures with a log of failures")
    if failures is None and (column or until or nodes):
        raise ConfigError("--failures-column, -until and -nodes are for --failures with a log")
    if slope_error and not slope:
        raise ConfigError("--slope-error is that of --slope: give that too")
    if machines is not None and price is None:
        raise ConfigError("--machines is for --price: give that too")
    log: FailureLog | None = None
    fitted: tuple[Fit, ...] = ()
    gaps = Gaps()
    counts: tuple[int, ...] = ()
    if failures is not None:
        log, fitted, between = _fitted(failures, column, nodes, shards, until)
        gaps = fitted[0].gaps()
        counts = _together(log, shards, together)
        if together is None:
            together = max(1, round(sum(counts) / len(counts)) if counts else 1)
    else:
        between = read_time("--mtbf", mtbf or "")
    inputs = _inputs(measured)
    if memory_price is not None and table_gb is None and inputs.table_nbytes is None:
        raise ConfigError("--memory-price is for the size of the tables: give --table-gb too")
    save, load = _costs(save_time, load_time, repository, inputs)
    reschedule = inputs.reschedule or timedelta(0)
    if reschedule_time is not None:
        reschedule = read_time("--reschedule-time", reschedule_time)
    job = Job(
        duration=read_time("--duration", duration),
        mtbf=between,
        shards=shards,
        failing_together=1 if together is None else together,
        save=save,
        load=load,
        reschedule=reschedule,
        gaps=gaps,
    )
    slopes = _slopes(slope)
    found = advise(
        Question(
            job=job,
            pls=pls,
            most_pls=most_pls,
            accuracy_loss=accuracy_loss,
            slopes=slopes,
            slope_error=_relative_error(slope_error, slopes),
            max_interval=read_time("--max-interval", max_interval) if max_interval else None,
            price=price,
            machines=machines,
            memory_price=memory_price,
            table_nbytes=inputs.table_nbytes if table_gb is None else _nbytes(table_gb),
            rows=inputs.rows,
            parity_slowdown=inputs.parity_slowdown if parity_slowdown is None else parity_slowdown,
            parity_r=parity_r,
            together=counts,
            quantized=inputs.quantized,
            tier=inputs.tier,
            jobs=jobs,
        )
    )
    decided = _decisions(repository)
    document = {**found.to_dict(), "failures": _failures(log, fitted), "decided": decided}
    if page is not None:
        from emberkeep.report.page import write
        from emberkeep.report.plan_page import plan_page

        drawn = plan_page(found, log=log, fitted=fitted, nodes=shards, decided=decided)
        rows = [{"strategy": name, **o.to_dict()} for name, o in found.strategies.items()]
        for row in rows:
            row.update({f"overhead_{part}": v for part, v in row.pop("breakdown").items()})
            row.update({f"simulated_{part}": v for part, v in (row.pop("simulated") or {}).items()})
        say(f"written: {write(page, drawn, document, rows)}")
    if as_json:
        print_json(document)
    else:
        _print(found, log, fitted)


# Of the two questions, memory or files (--tier) and how to recover: what is for one of them alone.
_TIER_ALONE = frozenset({"row_bytes", "skew", "lookups", "step_time", "cache", "memory_machine",
                         "tier_machine"})  # fmt: skip
_BOTH = frozenset({"duration", "table_gb", "tier", "as_json"})


def _refuse_others(context: typer.Context, *, tier: bool) -> None:
    """What would be read by nobody is refused: an answer must not look as if it had been."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name in ("DEFAULT", "DEFAULT_MAP") or name in _BOTH:
            continue
        if tier != (name in _TIER_ALONE):
            what = "is not for --tier: leave out one of them" if tier else "is for --tier alone"
            raise ConfigError(f"{parameter.opts[0]} {what}")


def _nbytes(gigabytes: float) -> int:
    if not (math.isfinite(gigabytes) and gigabytes > 0):
        raise ConfigError(f"--table-gb must be above 0, not {gigabytes:g}")
    return round(gigabytes * 1e9)


def _slopes(given: list[str] | None) -> dict[str, float]:
    """`0.018` is that of partial recovery, `cpr_ssu=0.003` of that strategy."""
    found = {}
    for text in given or ():
        name, _, value = text.rpartition("=")
        try:
            found[name.replace("-", "_").lower() or "cpr"] = float(value)
        except ValueError:
            raise ConfigError(
                f"--slope {text!r} is no slope: write 0.018, or cpr_ssu=0.003"
            ) from None
    return found


def _relative_error(error: float, slopes: dict[str, float]) -> float:
    """`--slope-error` as a share of the slope that it is the error of: that without a name, or the
    only one."""
    if not error:
        return 0.0
    if "cpr" not in slopes and len(slopes) > 1:
        raise ConfigError(
            f"--slope-error is that of one slope, and {len(slopes)} are given: give one, or the "
            "one that it belongs to without a name"
        )
    slope = slopes["cpr"] if "cpr" in slopes else next(iter(slopes.values()))
    return error / slope if slope else 0.0  # a slope of 0 is refused as such


def _together(log: FailureLog, shards: int, given: int | None) -> tuple[int, ...]:
    """How many shards each failure of the log takes; as a log that names its machines has it."""
    if given is not None or not log.counts:
        return ()
    counts = tuple(min(count, shards) for count in log.counts)
    if max(counts) > 1:
        say(
            f"a failure takes {sum(counts) / len(counts):.3g} shards on average, as in the log; "
            "--fail-together sets another number"
        )
    return counts


def _fitted(
    path: Path, column: str | None, nodes: int | None, shards: int, until: str | None
) -> tuple[FailureLog, tuple[Fit, ...], timedelta]:
    """The log, the distributions fitted to it, and the MTBF of the job."""
    from emberkeep.planning.failure_log import read_failures
    from emberkeep.planning.failures import fits, scaled_mtbf

    end = None
    if until is not None:
        try:
            end = datetime.fromisoformat(until.replace("Z", "+00:00"))
        except ValueError:
            raise ConfigError(
                f"--failures-until {until!r} is no time: write 2026-01-31T12:00"
            ) from None
        end = end if end.tzinfo else end.replace(tzinfo=timezone.utc)
    log = read_failures(path, column=column, until=end)
    for line in log.taken:
        say(line)
    fitted = fits(log.gaps_hours, log.censored_hours)
    if nodes is None:
        machines = "1 machine is" if log.nodes == 1 else f"{log.nodes} machines are"
        named = f" ({machines} named there)" if log.nodes else ""
        say(f"its MTBF is taken for that of the job{named}; --failures-nodes N would scale it")
        return log, fitted, log.mtbf
    return log, fitted, scaled_mtbf(log.mtbf, nodes=nodes, to=shards)


def _inputs(path: Path | None) -> Inputs:
    from emberkeep.planning.measured_inputs import Inputs, read_inputs

    return Inputs() if path is None else read_inputs(path)


def _costs(
    save_time: str | None, load_time: str | None, repository: str | None, inputs: Inputs
) -> tuple[timedelta, timedelta]:
    """Save and load time: as given, and what is not given as measured."""
    save = inputs.save if save_time is None else read_time("--save-time", save_time)
    load = inputs.load if load_time is None else read_time("--load-time", load_time)
    if repository is None:
        if save is None or load is None:
            raise ConfigError(
                "give --save-time and --load-time, or --repository or --measured to have them "
                "measured"
            )
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


def _decisions(repository: str | None) -> list[dict[str, Any]]:
    if repository is None:
        return []
    from emberkeep.cli._repository import open_repository
    from emberkeep.planning.measurements import decisions

    return decisions(open_repository(repository)[0])


def _failures(log: FailureLog | None, fitted: tuple[Fit, ...]) -> dict[str, Any] | None:
    if log is None:
        return None
    return {
        "source": log.source,
        "count": log.failures,
        "censored": int(log.censored_hours.size),
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
    from emberkeep.planning.advisor import TITLES, time_text
    from emberkeep.report.plan_page import plan_table

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
