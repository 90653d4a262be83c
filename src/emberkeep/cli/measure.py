"""`emberkeep measure`: what saves, loads, stalls and lost servers take here, on this store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli._options import option
from emberkeep.cli._repository import emit, print_json, print_table
from emberkeep.cli._shell import command, say

if TYPE_CHECKING:
    from datetime import timedelta

    from emberkeep.planning.measured_inputs import Inputs


@command
def measure(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml", help="The training that is planned for.")
    ],
    overrides: Annotated[
        list[str] | None,
        option("--set", "Replace one setting; repeatable.", "SECTION.KEY=VALUE"),
    ] = None,
    store: Annotated[
        str | None,
        option("--store", "Where versions go; beside checkpoint.path by default.", "URL"),
    ] = None,
    steps: Annotated[int, option("--steps", "Of each short training.", "N")] = 120,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for emberkeep plan --measured.")
    ] = False,
) -> None:
    """Train a few times for a moment; say what a plan needs to know of this machine and store."""
    # Read when torch is loaded: see `emberkeep train`.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from emberkeep.planning.measure_run import measure as run
    from emberkeep.train.run_config import load

    found = run(load(config, overrides or ()), store=store, steps=steps, tell=say)
    if as_json:
        print_json(found.to_dict())
        return
    _print(found)


def _print(found: Inputs) -> None:
    def text(time: timedelta | None) -> str:
        return "" if time is None else f"{time.total_seconds():.4g} s"

    rows = [
        ("a step", text(found.step), "median, without versions"),
        ("save", text(found.save), "training stands still for a version"),
        ("write", text(found.write), "until a version is durable, scaled to all rows"),
        ("load", text(found.load), "reading and decoding a version, scaled to all rows"),
        ("reschedule", text(found.reschedule), "until another server serves for a killed one"),
    ]
    if found.parity_slowdown is not None:
        rows.append(("parity", f"{found.parity_slowdown:.1%}", "slower steps"))
    if found.quantized is not None:
        what = f"save in {found.quantized.bits} bits"
        rows.append((what, text(found.quantized.save), f"load {text(found.quantized.load)}"))
    if found.tier is not None:
        what = f"load {text(found.tier.load)}, steps {found.tier.slowdown:.1%} slower"
        rows.append(("rows in files: save", text(found.tier.save), what))
    if found.table_nbytes is not None:
        rows.append(("tables", f"{found.table_nbytes / 1e9:.3g} GB", f"{found.rows:,} rows"))
    print_table(["", "", ""], [row for row in rows if row[1]], right=())
    emit("--json writes what emberkeep plan --measured reads")
