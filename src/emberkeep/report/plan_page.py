"""The page of `emberkeep plan`: strategies side by side, failures as they were fitted, scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import numpy as np

from emberkeep._types import F64
from emberkeep.errors import ConfigError
from emberkeep.planning.advisor import Option, Plan, advise, time_text
from emberkeep.planning.failure_log import FailureLog
from emberkeep.planning.failures import HOUR, Fit, Scaling, scaled_mtbf
from emberkeep.report.page import Page
from emberkeep.report.plots import COLOURS, Plot, drawing, stacked_bars

TITLES = {
    "full": "full",
    "partial": "partial",
    "cpr": "CPR",
    "cpr_mfu": "CPR-MFU",
    "cpr_ssu": "CPR-SSU",
    "cpr_scar": "CPR-SCAR",
    "parity": "parity",
}
"""Strategies as people call them."""

_SCALES = np.unique(np.round(np.geomspace(1, 64, 25)).astype(int))


def plan_page(
    plan: Plan, *, log: FailureLog | None = None, fitted: Sequence[Fit] = (), nodes: int
) -> Page:
    """`nodes` is how many machines the MTBF of the plan belongs to."""
    job = plan.question.job
    page = Page(
        title="What failures will cost, and what to do about it",
        summary=f"Recommended: {TITLES[plan.recommended]}. {plan.reason[0].upper()}"
        f"{plan.reason[1:]}.",
    )
    page.text(
        f"A job of {time_text(job.duration)} on {job.shards} shards, of which "
        f"{job.failing_together} fail together every {time_text(job.mtbf)} on average. A version "
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
            survival_plot(log.gaps_hours, fitted),
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
    """Columns and rows for people, of a page or of a terminal."""
    columns = ["", "overhead", "hours", "interval", "PLS", "what it means"]
    priced = plan.question.price is not None
    sloped = plan.question.slope is not None
    if sloped:
        columns.insert(5, "AUC loss")
    if priced:
        columns.insert(3, "cost")
    rows = []
    for name, option in plan.strategies.items():
        row = [TITLES[name], *_cells(option), option.note]
        if sloped:
            row.insert(5, f"{option.accuracy_loss:.5f}")
        if priced:
            row.insert(3, "" if option.interval is None else f"{option.cost:,.0f}")
        rows.append(row)
    return columns, rows


def _cells(option: Option) -> list[str]:
    if option.interval is None:
        return ["", "", "none", ""]
    return [
        f"{100 * option.overhead.total:.2f}%",
        f"{option.lost_hours:.2f}",
        time_text(option.interval),
        f"{option.pls:.3g}",
    ]


def overhead_plot(plan: Plan) -> Plot:
    shown = {name: o for name, o in plan.strategies.items() if o.interval is not None}
    parts = [{part: 100 * v for part, v in asdict(o.overhead).items()} for o in shown.values()]
    with drawing(height=3.2) as (plot, (axes,)):
        stacked_bars(axes, [TITLES[name] for name in shown], parts)
        axes.set_ylabel("overhead, % of the job")
        axes.legend(ncols=1)
    return plot


def survival_plot(gaps_hours: F64, fitted: Sequence[Fit]) -> Plot:
    gaps = np.sort(gaps_hours)
    left = 1.0 - (np.arange(len(gaps)) + 0.5) / len(gaps)
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
                    [100 * scaled.strategies[name].overhead.total for _, scaled in points],
                    color=colour, marker=marker, markersize=3.5, label=TITLES[name],
                )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set_ylim(bottom=0)
            axes.legend()
        panels[0].set_ylabel("overhead, % of the job")
    return plot


def _scaled(plan: Plan, nodes: int, to: int, scaling: Scaling) -> Plan:
    """The same question for `to` machines; as many shards fail together as before."""
    job = plan.question.job
    mtbf: timedelta = scaled_mtbf(job.mtbf, nodes=nodes, to=to, scaling=scaling, unit=HOUR)
    shards = max(job.failing_together, round(job.shards * to / nodes))
    return advise(replace(plan.question, job=replace(job, mtbf=mtbf, shards=shards)))
