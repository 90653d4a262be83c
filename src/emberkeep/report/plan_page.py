"""The page of `emberkeep plan`: strategies side by side, failures as they were fitted, scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import numpy as np

from emberkeep._types import F64, Json
from emberkeep.errors import ConfigError
from emberkeep.planning.advisor import TITLES, Option, Plan, time_text
from emberkeep.planning.candidates import Candidate, candidates
from emberkeep.planning.failure_log import FailureLog
from emberkeep.planning.failures import HOUR, Fit, Scaling, observed_survival, scaled_mtbf
from emberkeep.report.page import Page
from emberkeep.report.plots import COLOURS, Plot, drawing, legend_of, stacked_bars

_SCALES = np.unique(np.round(np.geomspace(1, 64, 13)).astype(int))


def plan_page(
    plan: Plan,
    *,
    log: FailureLog | None = None,
    fitted: Sequence[Fit] = (),
    nodes: int,
    decided: Sequence[Json] = (),
) -> Page:
    """`nodes` is how many machines the MTBF of the plan belongs to; `decided` is what a run that
    plans itself has chosen so far."""
    job = plan.question.job
    page = Page(
        title="What failures will cost, and what to do about it",
        summary=f"Recommended: {TITLES[plan.recommended]}. {plan.reason[0].upper()}"
        f"{plan.reason[1:]}.",
    )
    count = job.failing_together
    failing = "1 fails" if count == 1 else f"{count} fail together"
    page.text(
        f"A job of {time_text(job.duration)} on {job.shards} shards, of which "
        f"{failing} every {time_text(job.mtbf)} on average. A version "
        f"takes {time_text(job.save)} of training, loading one {time_text(job.load)}, a new "
        f"machine {time_text(job.reschedule)}."
    )
    for warning in plan.warnings:
        page.text(f"Note: {warning}.")
    page.heading("Strategies")
    page.plot(overhead_plot(plan), "Overhead in percent of the job, by what it comes from.")
    columns, rows = plan_table(plan)
    page.table(
        columns, rows, texts=("", "what it means"),
        chosen=list(plan.strategies).index(plan.recommended),
    )  # fmt: skip
    simulated = [(name, o) for name, o in plan.strategies.items() if o.spread is not None]
    if simulated:
        page.heading("Not every job is average")
        page.text(
            f"{plan.question.jobs:,} simulated jobs under each strategy, struck at random moments, "
            "also while they save and recover: the overhead that half, nine of ten and 99 of 100 "
            "stay below, and the PLS that 95 of 100 do."
        )
        page.table(
            ["", "expected", "simulated mean", "half", "9 of 10", "99 of 100", "PLS, 95 of 100"],
            [
                [TITLES[name], _percent(o.overhead.total),
                 *(_percent(v) for v in (o.spread.mean, o.spread.p50, o.spread.p90, o.spread.p99)),
                 f"{o.spread.pls_p95:.3g}"]
                for name, o in simulated if o.spread is not None
            ],
        )  # fmt: skip
    if decided:
        page.heading("What the run has decided")
        page.table(
            ["step", "recovery", "interval", "layout", "bits", "reason"],
            [
                [str(d["step"]), d["scope"], time_text(timedelta(seconds=d["interval_seconds"])),
                 d["layout"], "exact" if d["bits"] is None else str(d["bits"]), d["reason"]]
                for d in decided
            ],
            texts=("recovery", "layout", "reason"),
        )  # fmt: skip
    page.heading("More machines")
    page.plot(
        scaling_plot(plan, nodes),
        "Overhead over the number of machines, for two ideas of how the time between failures "
        "shrinks with it. Save, load and rescheduling times are held as they are.",
    )
    if log is not None and fitted:
        page.heading("Failures")
        page.text(". ".join(log.taken) + ".")
        page.plot(
            survival_plot(log.gaps_hours, log.censored_hours, fitted),
            "Left: the share of failures with a longer gap. Right: failures per hour after "
            "so long without one.",
        )
        page.table(
            ["distribution", "mean", "AIC", "RMSE of the curve"],
            [(f.name, time_text(f.mean), f"{f.aic:,.0f}", f"{f.rmse:.2%}") for f in fitted],
            chosen=0,
        )
    return page


def plan_table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Columns and rows for people, of a page or of a terminal. Columns that nothing is known for
    are left out."""
    options = plan.strategies.values()
    shown = {
        "overhead": True,
        "hours": True,
        "9 of 10 below": any(option.spread for option in options),
        "interval": True,
        "PLS": True,
        "AUC loss": bool(plan.question.slopes) or plan.question.quantized is not None,
        "memory": True,
        "cost": any(option.cost is not None for option in options),
    }
    columns = [column for column, known in shown.items() if known]
    rows = []
    for name, option in plan.strategies.items():
        cells = _cells(option)
        rows.append([TITLES[name], *(cells[column] for column in columns), option.note])
    return ["", *columns, "what it means"], rows


def _cells(option: Option) -> dict[str, str]:
    if option.interval is None:
        return {**dict.fromkeys(("overhead", "hours", "9 of 10 below", "PLS", "AUC loss", "memory",
                                 "cost"), ""), "interval": "none"}  # fmt: skip
    spread, loss, error = option.spread, option.accuracy_loss, option.accuracy_error
    return {
        "overhead": _percent(option.overhead.total),
        "hours": f"{option.lost_hours:.2f}" if math.isfinite(option.lost_hours) else "",
        "9 of 10 below": "" if spread is None else _percent(spread.p90),
        "interval": time_text(option.interval),
        "PLS": f"{option.pls:.3g}",
        "AUC loss": "" if loss is None else f"{loss:.5f} ± {error or 0.0:.5f}",
        "memory": _memory(option),
        "cost": "" if option.cost is None or math.isinf(option.cost) else f"{option.cost:,.0f}",
    }


def _memory(option: Option) -> str:
    if option.memory_nbytes is not None:
        return "0" if not option.memory_nbytes else f"{option.memory_nbytes / 1e9:+,.2f} GB"
    return "0" if not option.memory_share else f"{option.memory_share:+.0%}"


def _percent(share: float) -> str:
    return "never ends" if share == math.inf else f"{100 * share:.2f}%"


def overhead_plot(plan: Plan) -> Plot:
    shown = {
        name: option
        for name, option in plan.strategies.items()
        if option.interval is not None and math.isfinite(option.overhead.total)
    }
    parts = [{part: 100 * v for part, v in asdict(o.overhead).items()} for o in shown.values()]
    with drawing(height=3.2) as (plot, (axes,)):
        stacked_bars(axes, [TITLES[name] for name in shown], parts)
        axes.set_ylabel("overhead, % of the job")
        legend_of(axes, ncols=1)
    return plot


def survival_plot(gaps_hours: F64, censored_hours: F64, fitted: Sequence[Fit]) -> Plot:
    gaps = np.sort(gaps_hours)
    left = observed_survival(gaps, censored_hours)
    until = float(np.quantile(gaps, 0.99))
    hours = np.geomspace(max(float(gaps[0]), until * 1e-3), until, 300)
    with drawing(panels=2) as (plot, (survival, hazard)):
        survival.plot(gaps, left, color=COLOURS[-1], linewidth=5, alpha=0.55, label="observed")
        for fit, colour in zip(fitted, COLOURS, strict=False):
            best = fit is fitted[0]
            style: dict[str, Any] = {"color": colour, "linestyle": "-" if best else "--",
                     "label": f"{fit.name}{' (best)' if best else ''}"}  # fmt: skip
            survival.plot(hours, fit.survival(hours), **style)
            hazard.plot(hours, fit.hazard(hours), **style)
        survival.set_xlim(0, until)
        survival.set_ylim(0, 1)
        survival.set_title("no failure for so long")
        survival.legend()
        hazard.set_xscale("log")
        hazard.set_yscale("log")
        hazard.set_title("failures per hour, after so long without one")
        for axes in (survival, hazard):
            axes.set_xlabel("hours since the last failure")
    return plot


def scaling_plot(plan: Plan, nodes: int) -> Plot:
    """Full recovery and CPR over the number of machines, with both models of the MTBF."""
    scalings: tuple[tuple[Scaling, str], ...] = (
        ("linear", "MTBF falls linearly"),
        ("independent", "independent failures, MTBF = 1 / (1 − (1 − p)ⁿ)"),
    )
    with drawing(panels=2, sharey=True) as (plot, panels):
        for axes, (scaling, title) in zip(panels, scalings, strict=True):
            axes.set_title(title)
            axes.set_xlabel("machines with shards")
            try:
                points = [(int(n), _scaled(plan, nodes, int(n), scaling)) for n in _SCALES * nodes]
            except ConfigError:
                axes.text(
                    0.5, 0.5, "needs an MTBF above 1 h", transform=axes.transAxes, ha="center"
                )
                continue
            drawn = (("full", COLOURS[4], "o"), ("cpr", COLOURS[0], "s"))
            for name, colour, marker in drawn:
                axes.plot(
                    [n for n, _ in points],
                    [100 * scaled[name].overhead.total for _, scaled in points],
                    color=colour, marker=marker, markersize=3.5, label=TITLES[name],
                )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set_ylim(bottom=0)
            axes.legend()
        panels[0].set_ylabel("overhead, % of the job")
    return plot


def _scaled(plan: Plan, nodes: int, to: int, scaling: Scaling) -> dict[str, Candidate]:
    """The same question for `to` machines; as many shards fail together as before."""
    job = plan.question.job
    mtbf: timedelta = scaled_mtbf(job.mtbf, nodes=nodes, to=to, scaling=scaling, unit=HOUR)
    shards = max(job.failing_together, round(job.shards * to / nodes))
    wish = replace(plan.question, job=replace(job, mtbf=mtbf, shards=shards)).wish()
    return {found.name: found for found in candidates(wish, ("full", "cpr"))}
