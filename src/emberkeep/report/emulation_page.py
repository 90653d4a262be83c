"""The pages of `emberkeep emulate`: overhead against accuracy, and the sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from emberkeep.planning.advisor import TITLES, time_text
from emberkeep.planning.emulator import Emulated, Outcome
from emberkeep.planning.sweeps import Line, Point
from emberkeep.report.page import Page
from emberkeep.report.plots import COLOURS, Plot, drawing, legend_of, stacked_bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Table = tuple[list[str], list[list[str]]]
"""Columns and rows for people, of a page or of a terminal."""

_OUTCOME = ["", "overhead", "saving", "loading", "lost", "rescheduling", "interval", "PLS", "AUC",
            "AUC loss", "versions", "written", "note"]  # fmt: skip
# Of the height of a plot of AUCs: what a label over a dot takes.
_LABEL_SHARE = 0.25
_MARKERS = {
    "full": "P",
    "cpr": "o",
    "cpr_mfu": "s",
    "cpr_ssu": "^",
    "cpr_scar": "D",
    "partial": "v",
}


def emulation_page(found: Emulated) -> Page:
    """The paper's Figure 7 for this model and these failures."""
    job, failures = found.spec.job, found.spec.failures()
    page = Page(
        title="Strategies under the same failures",
        summary=f"{len(failures)} failures, each of {job.failing_together} of {job.shards} "
        f"shards, in a job of {time_text(job.duration)} projected onto {found.alone.steps:,} "
        "steps of training. Models are trained for real and shards are killed for real; hours are "
        "those of the job, not of this machine.",
    )
    page.plot(
        strategies_plot(found),
        "Left: overhead in percent of the job. Right: AUC on held-out samples; the line is the run "
        "without failures.",
    )
    page.table(*outcome_table(found), texts=("note",))
    for failure in failures:
        page.text(f"After {time_text(failure.at)}: {_lost_text(failure.shards)} lost.")
    return page


def _lost_text(shards: Sequence[int]) -> str:
    if len(shards) == 1:
        return f"shard {shards[0]} is"
    return f"shards {', '.join(map(str, shards[:-1]))} and {shards[-1]} are"


def outcome_table(found: Emulated) -> Table:
    """Strategies line by line; the run without failures first."""
    alone = found.alone
    first = ["no failures", *[""] * 7, f"{alone.auc:.5f}", *[""] * 4]
    return _OUTCOME, [first, *(_row(name, o, alone) for name, o in found.outcomes.items())]


def _row(name: str, outcome: Outcome, alone: Outcome) -> list[str]:
    o = outcome.overhead
    return [
        TITLES[name],
        *(f"{100 * part:.2f}%" for part in (o.total, o.save, o.load, o.lost, o.reschedule)),
        time_text(outcome.interval),
        f"{outcome.pls:.4f}",
        f"{outcome.auc:.5f}",
        f"{alone.auc - outcome.auc:.5f}",
        str(outcome.versions),
        f"{outcome.written_nbytes / 1e6:.1f} MB",
        outcome.note,
    ]


def strategies_plot(found: Emulated) -> Plot:
    names = [TITLES[name] for name in found.outcomes]
    parts = [_percents(o) for o in found.outcomes.values()]
    with drawing(width=9.5, panels=2, width_ratios=[1.15, 1]) as (plot, (bars, dots)):
        stacked_bars(bars, names, parts)
        bars.set_ylabel("overhead, % of the job")
        legend_of(bars)
        _auc_dots(dots, names, list(found.outcomes.values()), found.alone)
        for axes in (bars, dots):
            axes.tick_params("x", labelsize=8)
    return plot


def targets_page(points: Sequence[Point], alone: Outcome) -> Page:
    """Figure 9: what the target PLS trades."""
    page = Page(
        title="Overhead against accuracy, by the PLS that is allowed",
        summary="The more updates may be lost, the more rarely versions are taken. Prioritised "
        "saving loses less accuracy for the same overhead.",
    )
    page.plot(targets_plot(points, alone), "Overhead and AUC for each target and strategy.")
    page.table(*targets_table(points))
    return page


def targets_table(points: Sequence[Point]) -> Table:
    columns = ["", "target PLS", "PLS", "overhead", "AUC", "AUC loss", "interval", "note"]
    rows = [
        [
            TITLES[p.outcome.strategy], f"{p.target_pls:g}", f"{p.outcome.pls:.4f}",
            f"{100 * p.outcome.overhead.total:.2f}%", f"{p.outcome.auc:.5f}",
            f"{p.auc_loss:.5f}", time_text(p.outcome.interval), p.outcome.note,
        ]
        for p in points
    ]  # fmt: skip
    return columns, rows


def targets_plot(points: Sequence[Point], alone: Outcome) -> Plot:
    names = [f"{TITLES[p.outcome.strategy]}\nPLS {p.target_pls:g}" for p in points]
    with drawing(width=9.5, panels=2, width_ratios=[1.15, 1]) as (plot, (bars, dots)):
        stacked_bars(bars, names, [_percents(p.outcome) for p in points])
        bars.set_ylabel("overhead, % of the job")
        legend_of(bars)
        _auc_dots(dots, names, [p.outcome for p in points], alone)
        for axes in (bars, dots):
            axes.tick_params("x", labelsize=7.5)
    return plot


def failures_page(points: Sequence[Point]) -> Page:
    """Figure 10: more failures, and more shards each time."""
    page = Page(
        title="When partial recovery stops to pay",
        summary="Overhead of partial recovery against full recovery under the same failures. "
        "Hatched: refused beforehand, because the equations say that it brings nothing; what it "
        "would have cost is shown all the same.",
    )
    page.plot(failures_plot(points), "Overhead as a share of full recovery's.")
    page.table(*failures_table(points))
    return page


def failures_table(points: Sequence[Point]) -> Table:
    columns = ["failures", "of the shards", "full", "partial", "share of full", "PLS", "AUC loss",
               "used"]  # fmt: skip
    rows = [
        [
            str(p.failures), f"{p.fraction:.1%}", f"{p.full_overhead:.2%}",
            f"{p.outcome.overhead.total:.2%}",
            _share_text(p), f"{p.outcome.pls:.4f}",
            f"{p.auc_loss:.5f}", "full" if p.refused else "partial",
        ]
        for p in points
    ]  # fmt: skip
    return columns, rows


def _share_text(point: Point) -> str:
    """Nothing where full recovery cost nothing: no failure struck, and no version was due."""
    if not point.full_overhead:
        return ""
    return f"{point.outcome.overhead.total / point.full_overhead:.2f}"


def failures_plot(points: Sequence[Point]) -> Plot:
    names = [f"{p.failures} ×\n{p.fraction:.1%}" for p in points]
    shares = [
        {
            part: v / p.full_overhead if p.full_overhead else 0.0
            for part, v in asdict(p.outcome.overhead).items()
        }
        for p in points
    ]
    texts = [_share_text(p) for p in points]
    with drawing(width=9.5) as (plot, (axes,)):
        stacked_bars(axes, names, shares, hatched=[p.refused for p in points], texts=texts)
        axes.axhline(1.0, color=COLOURS[-1], linewidth=1.2, linestyle="--", label="full recovery")
        axes.set_ylabel("overhead / that of full recovery")
        axes.legend()
    return plot


def losses_page(points: Sequence[Point], lines: Mapping[str, Line]) -> Page:
    """Figures 11 and 12: PLS against accuracy."""
    page = Page(
        title="How much accuracy a lost sample costs",
        summary="Runs with random failures and random intervals. Each point is one run, compared "
        "with the run of the same seed that lost nothing.",
    )
    page.plot(
        losses_plot(points, lines),
        "AUC lost over PLS. Hollow: a shard failed in the second half of the job before any "
        "version was taken, and started over.",
    )
    page.table(*lines_table(lines))
    return page


def lines_table(lines: Mapping[str, Line]) -> Table:
    columns = ["", "runs", "slope", "correlation", "slope, saved before",
               "correlation, saved before", "rank correlation"]  # fmt: skip
    rows = [
        [
            TITLES[name], str(line.runs), f"{line.slope:.4f} ± {line.slope_error:.4f}",
            f"{line.correlation:.3f}",
            f"{line.slope_saved:.4f}", f"{line.correlation_saved:.3f}",
            f"{line.rank_correlation:.3f}",
        ]
        for name, line in lines.items()
    ]  # fmt: skip
    return columns, rows


def losses_plot(points: Sequence[Point], lines: Mapping[str, Line]) -> Plot:
    with drawing(width=8.5, height=4.2) as (plot, (axes,)):
        farthest = max((p.outcome.pls for p in points), default=1.0)
        for (name, line), colour in zip(lines.items(), COLOURS, strict=False):
            for started_over in (False, True):
                chosen = [
                    p
                    for p in points
                    if p.outcome.strategy == name and p.outcome.started_over == started_over
                ]
                axes.scatter(
                    [p.outcome.pls for p in chosen],
                    [p.auc_loss for p in chosen],
                    s=22, marker=_MARKERS[name], linewidths=1.1, edgecolors=colour,
                    facecolors="none" if started_over else colour, alpha=0.8,
                    label=None if started_over
                    else f"{TITLES[name]}: {line.slope:.4f} per PLS of 1",
                )  # fmt: skip
            axes.plot([0, farthest], [0, line.slope * farthest], color=colour)
        axes.set_xlabel("PLS")
        axes.set_ylabel("AUC lost against the run without failures")
        axes.set_xlim(left=0)
        axes.legend()
    return plot


def _percents(outcome: Outcome) -> dict[str, float]:
    return {part: 100 * v for part, v in asdict(outcome.overhead).items()}


def _auc_dots(
    axes: Axes, names: Sequence[str], outcomes: Sequence[Outcome], alone: Outcome
) -> None:
    places = range(len(names))
    axes.axhline(alone.auc, color=COLOURS[-1], linewidth=1.2, linestyle="--", label="no failures")
    axes.plot(places, [o.auc for o in outcomes], "o", color=COLOURS[0], markersize=6)
    aucs = [outcome.auc for outcome in outcomes]
    low, high = min([alone.auc, *aucs]), max([alone.auc, *aucs])
    margin = max(high - low, 1e-4)
    for place, auc in zip(places, aucs, strict=True):
        # Away from the line: where a label would lie on it, it goes to the other side of the dot.
        above = auc >= alone.auc or alone.auc - auc > _LABEL_SHARE * margin
        axes.annotate(
            f"{auc:.4f}", (place, auc), xytext=(0, 7 if above else -7),
            textcoords="offset points", ha="center", va="bottom" if above else "top", fontsize=8,
        )  # fmt: skip
    axes.set_ylim(low - 0.35 * margin, high + 0.35 * margin)
    axes.set_xticks(places, list(names))
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylabel("AUC")
    axes.legend(loc="lower left")


def flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """Nested data as one line of a table."""
    line: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            line.update({f"{key}_{inner}": v for inner, v in value.items()})
        else:
            line[key] = value
    return line
