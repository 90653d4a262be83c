"""`emberkeep demo`: what the project is for, in about two minutes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emberkeep.cli._options import option
from emberkeep.cli._repository import emit, print_json, print_table, size_text
from emberkeep.cli._shell import command, say

if TYPE_CHECKING:
    from emberkeep.train.demo import Demonstration
    from emberkeep.train.killed_shards import Loss


@command
def demo(
    directory: Annotated[
        Path, option("--directory", "Where versions and the report go.", "DIR")
    ] = Path("emberkeep-demo"),
    overrides: Annotated[
        list[str] | None,
        option("--set", "Replace one setting; repeatable.", "SECTION.KEY=VALUE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train over 8 shards, kill two of them on the way, recover, and compare with a run without."""
    from emberkeep.train.demo import settings

    given = settings(directory, overrides or ())
    # See `emberkeep train`.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from emberkeep.cli._progress import progress
    from emberkeep.report.demo_page import demo_page
    from emberkeep.report.page import prepare, write
    from emberkeep.report.plots import check_available
    from emberkeep.train.demo import demonstrate

    check_available()
    prepare(directory / "report.html")
    found = demonstrate(given, hooks=lambda: [progress()], tell=say)
    document = _document(found)
    path = write(directory / "report.html", demo_page(found), document)
    if as_json:
        print_json({**document, "report": str(path)})
    else:
        _print(found, path, directory)


def _document(found: Demonstration) -> dict[str, Any]:
    return {
        "without_failures": found.alone.result.to_dict(),
        "with_failures": found.failing.result.to_dict(),
        "auc_lost": found.auc_lost,
        "recoveries": found.failing.recoveries,
        "losses": [loss.to_dict() for loss in found.losses],
        "versions": found.failing.saves,
    }


def _print(found: Demonstration, path: Path, directory: Path) -> None:
    alone, failing = found.alone.result, found.failing.result
    shards = failing.settings.cluster.shards
    emit(
        f"{failing.settings.model.kind} trained on {failing.samples:,} samples over {shards} shards"
    )
    for made in found.failing.recoveries:
        killed = " and ".join(str(shard) for shard in made["shards"])
        emit(f"shards {killed} were killed; {_recovery_text(made, failing.steps)}")
    for loss in found.losses:
        _print_loss(loss)
    rows = [
        ("without failures", f"{alone.auc:.4f}", f"{alone.log_loss:.4f}"),
        ("with failures", f"{failing.auc:.4f}", f"{failing.log_loss:.4f}"),
    ]
    if alone.baseline_auc is not None:
        rows.append(
            ("without embeddings", f"{alone.baseline_auc:.4f}", f"{alone.baseline_log_loss:.4f}")
        )
    if alone.best_auc is not None:
        rows.append(("the best possible", f"{alone.best_auc:.4f}", ""))
    held_out = f"on {alone.test_samples:,} held-out samples"
    print_table([held_out, "AUC", "log-loss"], rows, right=("AUC", "log-loss"))
    costs, recovery = failing.checkpoints, failing.recoveries
    assert costs is not None
    assert recovery is not None
    emit(
        f"\nFailures changed AUC by {-found.auc_lost:+.4f} and took {recovery.seconds:.2f} s; "
        f"versions cost {costs.stall_seconds:.2f} s in all"
    )
    if alone.baseline_auc is not None:
        emit(f"The embeddings add {failing.auc - alone.baseline_auc:.4f} AUC all the same")
    emit(
        f"{costs.versions} versions were saved beside training, pausing it for "
        f"{costs.pause_ms_median:.1f} ms each; {size_text(costs.written_nbytes)} were written"
    )
    emit(f"versions: emberkeep versions {directory / 'run'}")
    emit(f"report: {path}")


def _recovery_text(made: dict[str, Any], steps: int) -> str:
    """One recovery; one from parity has neither a step nor losses."""
    text = f"{made['scope']} recovery took {made['seconds']:.2f} s"
    if made["scope"] == "parity":
        return f"{text}, and nothing is lost"
    again = f", {made['repeated_steps']} steps were taken again" if made["repeated_steps"] else ""
    return f"{text} after step {made['step']} of {steps}{again}; PLS {made['pls']:.4f}"


def _print_loss(loss: Loss) -> None:
    """The killed shards: which rows came back, how old, and what that did to the model."""
    rows = [
        (
            f"shard {shard.shard}", f"{shard.rows:,}", f"{shard.rows - shard.older:,}",
            f"{shard.older:,}", f"{loss.auc_before:.4f}", f"{shard.auc_recovered:.4f}",
            f"{shard.auc_empty:.4f}",
        )
        for shard in loss.shards
    ]  # fmt: skip
    if len(loss.shards) > 1:
        all_rows, older = (
            sum(shard.rows for shard in loss.shards),
            sum(shard.older for shard in loss.shards),
        )
        rows.append(
            (
                "both" if len(rows) == 2 else "all of them", f"{all_rows:,}",
                f"{all_rows - older:,}", f"{older:,}", f"{loss.auc_before:.4f}",
                f"{loss.auc_recovered:.4f}", f"{loss.auc_empty:.4f}",
            )
        )  # fmt: skip
    columns = ["killed", "rows", "as they were", "older", "AUC before", "recovered", "if empty"]
    emit("")
    print_table(columns, rows, right=columns[1:])
    emit("")
