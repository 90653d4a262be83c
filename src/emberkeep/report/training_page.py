"""The page of training runs: how the loss went, when versions were saved, what failures cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emberkeep.report.page import Page
from emberkeep.report.plots import COLOURS, Plot, drawing
from emberkeep.train.run_trace import Recording

_WINDOW = 1 / 40  # of the steps: over so many the loss is averaged


def training_page(title: str, runs: Sequence[Recording]) -> Page:
    """One or several runs side by side; the first is the one that the others are compared with."""
    page = Page(title=title)
    first = runs[0].result
    page.text(
        f"{first.settings.model.kind} on {first.samples:,} samples over "
        f"{first.settings.cluster.shards} shards, judged on {first.test_samples:,} held-out ones."
    )
    page.heading("How good the model became")
    rows = [
        [
            run.name, f"{run.result.auc:.4f}", f"{run.result.log_loss:.4f}",
            "" if run is runs[0] else f"{run.result.auc - first.auc:+.5f}",
            f"{run.result.seconds:.1f} s",
        ]
        for run in runs
    ]  # fmt: skip
    if first.baseline_auc is not None:
        rows.append(["without embeddings", f"{first.baseline_auc:.4f}",
                     f"{first.baseline_log_loss:.4f}", f"{first.baseline_auc - first.auc:+.5f}",
                     ""])  # fmt: skip
    if first.best_auc is not None:
        rows.append(["the best possible", f"{first.best_auc:.4f}", "", "", ""])
    page.table(["", "AUC", "log-loss", "AUC against the first", "time"], rows)
    page.plot(
        loss_plot(runs),
        "Training loss, averaged over a fortieth of the run. Ticks below: versions, long ones "
        "whole, short ones prioritised. Dashed: shards are killed.",
    )
    for run in runs:
        if run.saves or run.recoveries:
            _kept(page, run)
    return page


def _kept(page: Page, run: Recording) -> None:
    page.heading(f"Versions and failures: {run.name}")
    for made in run.recoveries:
        shards = ", ".join(str(shard) for shard in made["shards"])
        again = f", {made['repeated_steps']} steps again" if made["repeated_steps"] else ""
        page.text(
            f"Shards {shards} were lost after step {made['step']} and recovered in "
            f"{made['seconds']:.2f} s ({made['scope']}{again}): {made['reason']}. "
            f"PLS {made['pls']:.4f}."
        )
    kinds: dict[str, list[dict[str, float]]] = {}
    for save in run.saves:
        kinds.setdefault(save["kind"], []).append(save)
    page.table(
        ["versions", "count", "bytes each", "pause each"],
        [
            (
                kind, len(saves), f"{np.median([s['nbytes'] for s in saves]) / 1e6:.2f} MB",
                f"{np.median([s['pause_ms'] for s in saves]):.2f} ms",
            )
            for kind, saves in kinds.items()
        ],
    )  # fmt: skip


def loss_plot(runs: Sequence[Recording]) -> Plot:
    with drawing(height=3.8) as (plot, (axes,)):
        for run, colour in zip(runs, COLOURS, strict=False):
            steps = np.array(sorted(run.losses))
            losses = np.array([run.losses[step] for step in steps])
            width = max(1, round(_WINDOW * len(steps)))
            smooth = np.convolve(losses, np.full(width, 1 / width), mode="valid")
            axes.plot(steps[width - 1 :], smooth, color=colour, label=run.name, linewidth=1.4)
            for made in run.recoveries:
                axes.axvline(made["step"], color=colour, linestyle="--", linewidth=1.2)
            for save in run.saves:
                length = 0.03 if save["kind"] == "prioritised" else 0.06
                axes.axvline(save["step"], ymax=length, color=colour, linewidth=1.4)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        axes.legend()
    return plot
