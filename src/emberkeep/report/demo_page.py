"""The page of `emberkeep demo`: what became of the killed shards, and what it did to the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emberkeep._types import Json
from emberkeep.keeper.costs import Costs, VersionCost
from emberkeep.report.page import Page
from emberkeep.report.plots import COLOURS, Plot, drawing
from emberkeep.train.demo import Demonstration
from emberkeep.train.killed_shards import KilledShard, Loss, Origin

_KINDS = {
    "as they were": COLOURS[2],
    "older, from a prioritised version": COLOURS[0],
    "older, from a whole version": COLOURS[1],
    "initial value: in no version": COLOURS[4],
}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
_MOST_LINES = 40
_WIDTH = 5.4  # inches: its text is as large as the page's on a phone


def demo_page(found: Demonstration) -> Page:
    """What happened to the shards first; then what it did to the model; then what it cost."""
    given = found.failing.result.settings
    killed = sum(len(made["shards"]) for made in found.failing.recoveries)
    all_shards = _number(given.cluster.shards)
    page = Page(
        title=f"{_number(killed).capitalize()} of {all_shards} shards were killed",
        summary=f"A {given.model.kind.upper()} was trained on {found.failing.result.samples:,} "
        f"samples. Its {found.failing.result.rows:,} rows lie in {all_shards} shards. Versions "
        "were saved beside training. Then shards lost their memory, and training went on.",
    )
    for made in found.failing.recoveries:
        _recovery(page, made)
    for loss in found.losses:
        _what_came_back(page, loss)
        _worth(page, loss)
    _in_the_end(page, found)
    _versions(page, found)
    return page


def _recovery(page: Page, made: Json) -> None:
    shards = ", ".join(str(shard) for shard in made["shards"])
    again = f", {made['repeated_steps']} steps again" if made.get("repeated_steps") else ""
    reason = f": {made['reason']}" if "reason" in made else ""
    lost = f". PLS {made['pls']:.4f}" if "pls" in made else ""
    after = f" after step {made['step']}" if "step" in made else ""
    page.text(
        f"Shards {shards} were lost{after} and recovered in {made['seconds']:.2f} s "
        f"({made['scope']}{again}){reason}{lost}."
    )


def _what_came_back(page: Page, loss: Loss) -> None:
    rows = sum(shard.rows for shard in loss.shards)
    older = sum(shard.older for shard in loss.shards)
    nbytes = sum(shard.nbytes for shard in loss.shards)
    page.heading("What came back")
    page.text(
        f"The killed shards held {rows:,} of {loss.rows_trained:,} trained rows: "
        f"{_megabytes(nbytes)} of {_megabytes(loss.nbytes)}, with what the optimizer remembers. "
        f"{rows - older:,} came back bit for bit. {older:,} came back with the value of an "
        f"earlier step: their updates since are lost. That is PLS {loss.pls:.4f}, or "
        f"{loss.pls:.1%} of all updates of the run."
    )
    page.plot(
        rows_plot(loss),
        "Rows of each killed shard, by where they came from. How old is the row that a lookup "
        "finds, on average over held-out samples? "
        + "; ".join(f"shard {shard.shard}: {shard.steps_old:.1f} steps" for shard in loss.shards)
        + f". The newest whole version was {loss.step - _newest_whole(loss)} steps old.",
    )
    page.table(
        ["from", "after step", *(f"shard {s.shard}: rows" for s in loss.shards), "older"],
        [
            (
                _origin_text(origin), origin.step or "",
                *(f"{_rows_from(shard, origin):,}" for shard in loss.shards),
                f"{sum(o.older for s in loss.shards for o in s.origins if _same(o, origin)):,}",
            )
            for origin in _all_origins(loss)
        ],
    )  # fmt: skip


def _worth(page: Page, loss: Loss) -> None:
    page.heading("What it did to the model")
    page.text(
        f"The model right after the recovery, on {loss.test_samples:,} held-out samples: its "
        f"AUC went from {loss.auc_before:.4f} to {loss.auc_recovered:.4f}. Had the shards come "
        f"back empty, it would have gone to {loss.auc_empty:.4f}. So versions saved "
        f"{_share(loss)} of what the shards had learned."
    )
    page.plot(
        worth_plot(loss),
        "AUC with the rows of the killed shards as they were, as they came back, and without them; "
        "for each shard by itself, and for all that were killed.",
    )
    page.table(
        ["killed", "before", "recovered", "change", "empty"],
        [
            (
                name, f"{loss.auc_before:.5f}", f"{recovered:.5f}",
                f"{round(recovered - loss.auc_before, 5) + 0.0:+.5f}", f"{empty:.5f}",
            )
            for name, recovered, empty in _cases(loss)
        ],
    )  # fmt: skip


def _in_the_end(page: Page, found: Demonstration) -> None:
    alone, failing = found.alone.result, found.failing.result
    page.heading("In the end")
    page.text(
        f"Training went on to its last step. Judged on {alone.test_samples:,} held-out samples, "
        "beside the same run without failures and versions:"
    )
    rows = [
        [
            run.name, f"{run.result.auc:.4f}", f"{run.result.log_loss:.4f}",
            "" if run is found.alone else f"{run.result.auc - alone.auc:+.5f}",
            f"{run.result.seconds:.1f} s",
        ]
        for run in (found.alone, found.failing)
    ]  # fmt: skip
    if alone.baseline_auc is not None:
        change = f"{alone.baseline_auc - alone.auc:+.5f}"
        rows.append(
            ["without embeddings", f"{alone.baseline_auc:.4f}", f"{alone.baseline_log_loss:.4f}",
             change, ""]
        )  # fmt: skip
    if alone.best_auc is not None:
        rows.append(["the best possible", f"{alone.best_auc:.4f}", "", "", ""])
    page.table(["", "AUC", "log-loss", "AUC against the first", "time"], rows)
    if failing.recoveries is not None and failing.checkpoints is not None:
        page.text(
            f"Recovery took {failing.recoveries.seconds:.2f} s, and versions "
            f"{failing.checkpoints.stall_seconds:.2f} s of training in all."
        )


def _versions(page: Page, found: Demonstration) -> None:
    saves, costs = found.failing.saves, found.failing.result.checkpoints
    if not saves:
        return
    page.heading("What was saved on the way")
    page.plot(
        versions_plot(found),
        "Every version at its step, as high as its bytes. Dashed: shards are killed.",
    )
    kinds: dict[str, list[dict[str, float]]] = {}
    for save in saves:
        kinds.setdefault(_kind_text(save["kind"]), []).append(save)
    page.table(
        ["versions", "count", "bytes each", "pause each"],
        [
            (
                kind, len(made), _megabytes(float(np.median([s["nbytes"] for s in made]))),
                f"{np.median([s['pause_ms'] for s in made]):.2f} ms",
            )
            for kind, made in kinds.items()
        ],
    )  # fmt: skip
    if costs is not None and costs.versions:
        _cost_of_each(page, costs)


def _cost_of_each(page: Page, costs: Costs) -> None:
    """What every version has cost, and all of them."""
    unknown = "not known"

    def row(name: str, cost: VersionCost) -> Sequence[object]:
        return (
            name, cost.step, _kind_text(cost.kind), _megabytes(cost.nbytes),
            f"{cost.pause_ms:.2f} ms", f"{cost.held_ms:.2f} ms",
            unknown if cost.slowdown_ms is None else f"{cost.slowdown_ms:+.0f} ms",
            unknown if cost.core_seconds is None else f"{1e3 * cost.core_seconds:.0f} ms",
        )  # fmt: skip

    slowdown, cores = costs.slowdown_seconds, costs.core_seconds
    page.heading("What versions cost")
    page.text(
        "Pause: training stood still for the cut. Held: pushes copied rows before they changed "
        "them. Stall: how much longer the steps from cut to commit took than as many without a "
        "save, by their median, pause and held included. Cores: processor time of the writing "
        "threads."
    )
    page.table(
        ["version", "step", "holds", "bytes", "pause", "held", "stall", "cores"],
        [
            *(row(str(cost.version or ""), cost) for cost in costs.each[-_MOST_LINES:]),
            (
                f"all {costs.versions}", "", "", _megabytes(costs.written_nbytes),
                f"{1e3 * costs.pause_seconds:.2f} ms", f"{1e3 * costs.held_seconds:.2f} ms",
                unknown if slowdown is None else f"{1e3 * slowdown:+.0f} ms",
                unknown if cores is None else f"{1e3 * cores:.0f} ms",
            ),
        ],
    )  # fmt: skip


def rows_plot(loss: Loss) -> Plot:
    """One bar for each killed shard: how many rows came back, and how old."""
    shards = loss.shards[::-1]
    with drawing(width=_WIDTH, height=1.5 + 0.45 * len(shards)) as (plot, (axes,)):
        left = np.zeros(len(shards))
        for kind, colour in _KINDS.items():
            counts = np.array([_by_kind(shard)[kind] for shard in shards], float)
            if counts.any():
                axes.barh(
                    range(len(shards)), counts, left=left, height=0.6, color=colour, label=kind
                )
                left += counts
        axes.set_yticks(range(len(shards)), [f"shard {shard.shard}" for shard in shards])
        axes.set_xlabel("rows")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(visible=False, axis="y")
        axes.figure.legend(loc="outside upper left", ncols=2)
    return plot


def worth_plot(loss: Loss) -> Plot:
    """A line of three dots for each killed shard, and one for all of them."""
    cases = _cases(loss)[::-1]
    with drawing(width=_WIDTH, height=1.5 + 0.4 * len(cases)) as (plot, (axes,)):
        dots = (
            ("as they were", COLOURS[2], "o", 90),
            ("as they came back", COLOURS[0], "D", 32),
            ("empty", COLOURS[4], "X", 60),
        )
        for place, (_, recovered, empty) in enumerate(cases):
            axes.plot([empty, loss.auc_before], [place, place], color=COLOURS[-1], linewidth=1.2)
            for (name, colour, marker, size), value in zip(
                dots, (loss.auc_before, recovered, empty), strict=True
            ):
                axes.scatter(
                    value, place, color=colour, marker=marker, s=size, zorder=3,
                    label=None if place else name,
                )  # fmt: skip
        axes.set_yticks(range(len(cases)), [name for name, _, _ in cases])
        axes.set_ylim(-0.6, len(cases) - 0.4)
        axes.set_xlabel(f"AUC on {loss.test_samples:,} held-out samples")
        axes.locator_params(axis="x", nbins=6)
        axes.figure.legend(loc="outside upper left", ncols=3)
    return plot


def versions_plot(found: Demonstration) -> Plot:
    """A stem for each version."""
    kinds = list(dict.fromkeys(save["kind"] for save in found.failing.saves))
    with drawing(width=_WIDTH, height=2.5) as (plot, (axes,)):
        for kind, colour in zip(kinds, COLOURS, strict=False):
            saves = [save for save in found.failing.saves if save["kind"] == kind]
            axes.vlines(
                [save["step"] for save in saves], 0, [save["nbytes"] / 1e6 for save in saves],
                color=colour, linewidth=3, label=_kind_text(kind),
            )  # fmt: skip
        for made in found.failing.recoveries:
            if "step" in made:
                axes.axvline(made["step"], color=COLOURS[4], linestyle="--", linewidth=1.2)
        axes.set_xlabel("step")
        axes.set_ylabel("MB")
        axes.set_ylim(bottom=0)
        axes.figure.legend(loc="outside upper left", ncols=3)
    return plot


def _by_kind(shard: KilledShard) -> dict[str, int]:
    """Rows of one shard by the words of the plot."""
    as_they_were, prioritised, whole, initial = _KINDS
    counts = dict.fromkeys(_KINDS, 0)
    for origin in shard.origins:
        counts[as_they_were] += origin.rows - origin.older
        if origin.version is None:
            counts[initial] += origin.older
        else:
            counts[whole if origin.whole else prioritised] += origin.older
    return counts


def _all_origins(loss: Loss) -> Sequence[Origin]:
    """One of each, the newest first."""
    by_version = {origin.version: origin for shard in loss.shards for origin in shard.origins}
    return sorted(by_version.values(), key=lambda origin: -(origin.version or 0))


def _same(origin: Origin, other: Origin) -> bool:
    return origin.version == other.version


def _rows_from(shard: KilledShard, origin: Origin) -> int:
    return sum(own.rows for own in shard.origins if _same(own, origin))


def _origin_text(origin: Origin) -> str:
    if origin.version is None:
        return "no version"
    return f"version {origin.version}, {'whole' if origin.whole else 'prioritised'}"


def _newest_whole(loss: Loss) -> int:
    """The step of the newest whole version that rows came from; 0 if there is none."""
    return max((o.step for s in loss.shards for o in s.origins if o.whole), default=0)


def _kind_text(kind: str) -> str:
    return {"baseline": "since baseline", "version": "since version before"}.get(kind, kind)


def _cases(loss: Loss) -> list[tuple[str, float, float]]:
    """What was killed, the AUC after its recovery, and the AUC without it."""
    cases = [(f"shard {s.shard}", s.auc_recovered, s.auc_empty) for s in loss.shards]
    if len(loss.shards) > 1:
        together = "both" if len(loss.shards) == 2 else "all of them"
        cases.append((together, loss.auc_recovered, loss.auc_empty))
    return cases


def _share(loss: Loss) -> str:
    """How much of the shards' worth came back."""
    worth = loss.auc_before - loss.auc_empty
    return f"{(loss.auc_recovered - loss.auc_empty) / worth:.1%}" if worth > 0 else "100%"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def _number(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)
