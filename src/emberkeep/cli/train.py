"""`emberkeep train`: trains a model and says how good it became."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli._repository import count_text, emit, print_json, print_table
from emberkeep.cli._shell import command, say
from emberkeep.errors import ConfigError

if TYPE_CHECKING:
    from emberkeep.keeper import Costs, Recoveries
    from emberkeep.train.result import Result
    from emberkeep.train.run_config import RunConfig


@command
def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.toml", help="The settings of the run.")
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Synthetic data, all in this process, about a minute.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Replace one setting; repeatable."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Where rows live: local, servers, ray (cluster.kind)."),
    ] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, help="How many shards (cluster.shards).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that train together (cluster.workers).")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster that exists (cluster.address).")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--fresh",
            help="Go on from the newest version in checkpoint.path, or start over there.",
        ),
    ] = True,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write TensorBoard events.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one line of JSON.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings, commented, and exit.")
    ] = False,
) -> None:
    """Train a model in one pass over the data, then judge it on held-out samples."""
    short = {"kind": cluster, "shards": shards, "workers": workers, "address": address}
    given = [f"cluster.{key}={value}" for key, value in short.items() if value is not None]
    overrides = [*given, *(overrides or [])]
    settings = _settings(config, demo or (print_config and config is None), overrides)
    if print_config:
        from emberkeep.config import to_toml

        emit(to_toml(settings).removesuffix("\n"))
        return

    # Torch's threads spin while they wait for each other. On a machine that others use too, a
    # spinning thread keeps the one that it waits for from running: measured, up to seven times
    # slower. Sleeping costs little where the machine is idle. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from emberkeep.cli._progress import progress
    from emberkeep.train.hooks import TensorBoard
    from emberkeep.train.loop import run

    hooks = [*([] if tensorboard is None else [TensorBoard(tensorboard)]), progress()]
    # The result alone goes to stdout: Ray prints there what it has to say of processes that die.
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"warning: {message}")
        if settings.cluster.workers > 1:
            from emberkeep.train.distributed import run_on_ray

            result = run_on_ray(settings, hooks=hooks, fresh=not resume)
        else:
            result = run(settings, hooks=hooks, fresh=not resume)
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result)


def _settings(config: Path | None, demo: bool, overrides: list[str]) -> RunConfig:
    from emberkeep.train import run_config

    if config is not None and demo:
        raise ConfigError(f"--demo has settings of its own: leave out {config}, or --demo")
    if config is not None:
        return run_config.load(config, overrides)
    if demo:
        return run_config.demo(overrides)
    raise ConfigError("name a CONFIG.toml (--print-config writes one to start from), or use --demo")


def _print(result: Result) -> None:
    """The result for people."""
    settings, memory_mib = result.settings, result.peak_memory_nbytes / 2**20
    took = f" in {result.seconds:.1f} s ({result.samples_per_second:,.0f} samples/s)"
    if result.resumed_step is not None:
        rest = result.steps - result.resumed_step
        took = f", the last {rest} of {result.steps} steps here{took}" if rest else " before"
    emit(
        f"{settings.model.kind} trained on {result.samples:,} samples{took}, "
        f"final loss {result.loss:.4f}\n"
        f"{result.rows_trained:,} of {result.rows:,} rows were trained; "
        f"the process took at most {memory_mib:,.0f} MiB\n"
    )
    rows = [("with embeddings", f"{result.auc:.4f}", f"{result.log_loss:.4f}")]
    if result.baseline_auc is not None and result.baseline_log_loss is not None:
        rows.append(
            ("without embeddings", f"{result.baseline_auc:.4f}", f"{result.baseline_log_loss:.4f}")
        )
    if result.best_auc is not None:
        rows.append(("the best possible", f"{result.best_auc:.4f}", ""))
    print_table([f"on {result.test_samples:,} held-out samples", "AUC", "log-loss"], rows)
    emit("")
    if result.baseline_auc is not None:
        gain = result.auc - result.baseline_auc
        verb = f"add {gain:.4f}" if gain > 0 else f"cost {-gain:.4f}"
        emit(f"The embeddings {verb} AUC over the same network without them.")
    if result.checkpoints is not None and result.checkpoints.versions:
        _print_costs(result.checkpoints, result)
    if result.recoveries is not None and result.recoveries.failures:
        _print_recoveries(result.recoveries, result)
    if result.recoveries is not None and result.recoveries.samples_applied_twice:
        twice = result.recoveries.samples_applied_twice
        emit(f"Rows of live servers were adopted: {twice:,} samples are in them twice.")


def _print_recoveries(made: Recoveries, result: Result) -> None:
    """What failing shards cost, for people."""
    made_of = [f"{count} {scope}" for scope, count in
               (("full", made.full), ("partial", made.partial), ("parity", made.parity))
               if count]  # fmt: skip
    what = "recovery" if made.full + made.partial + made.parity == 1 else "recoveries"
    took = (
        f"{' and '.join(made_of)} {what} took "
        f"{made.seconds:.2f} s ({made.seconds / result.seconds:.1%} of the time), "
        f"{made.repeated_steps:,} of {result.steps:,} steps were taken again"
        if made_of
        else "none since the run was resumed"
    )
    emit(
        f"{made.failures} {'shard was' if made.failures == 1 else 'shards were'} lost; {took}, and "
        f"the updates of {made.pls:.2%} of the samples are lost (PLS {made.pls:.4g})"
    )


def _print_costs(costs: Costs, result: Result) -> None:
    """What checkpoints cost, for people."""
    where = result.settings.checkpoint.path or result.settings.tier.path
    saved = f"{count_text(costs.versions, 'version')} {'was' if costs.versions == 1 else 'were'}"
    emit(
        f"{saved} saved beside training: it paused for "
        f"{costs.pause_ms_median:.1f} ms each (median; {costs.pause_ms_max:.1f} ms at most) and "
        f"stood still for {costs.stall_seconds:.2f} s in all "
        f"({costs.stall_seconds / result.seconds:.1%} of the time), of which pushes were held up "
        f"for {costs.held_seconds:.2f} s by copies of their rows"
    )
    emit(f"{_size(costs.written_nbytes)} were written; {where} keeps {_size(costs.kept_nbytes)}")
    for line in _more_costs(costs):
        emit(line)


def _more_costs(costs: Costs) -> list[str]:
    """Processor time, how much steps were slowed down, and the mirror, as far as they are known."""
    words = []
    if costs.core_seconds is not None:
        words.append(
            f"{costs.core_seconds:.2f} core-seconds were spent on them, "
            f"{costs.core_seconds / max(1, costs.versions):.3f} for each"
        )
    known = [cost for cost in costs.each if cost.slowdown_ms is not None]
    if costs.slowdown_seconds is not None:
        words.append(
            f"steps beside {len(known)} of them took {costs.slowdown_seconds:.2f} s longer in all "
            "than steps without a save"
        )
    lines = ["; ".join(words)] if words else []
    mirror = costs.mirror
    if mirror is not None:
        has = "no version" if mirror.step is None else f"step {mirror.step}"
        wrong = "" if mirror.error is None else f"; it fails: {mirror.error}"
        lines.append(
            f"{mirror.url} has {has}: {mirror.copied} versions, {_size(mirror.copied_nbytes)} were "
            f"copied there{wrong}"
        )
    return lines


def _size(nbytes: int) -> str:
    value, units = float(nbytes), iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while value >= 1000 and unit != "GB":
        value, unit = value / 1000, next(units)
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
