"""`emberkeep warm`: compiles all kernels ahead of time, for an image or before a measurement."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from emberkeep.cli._repository import emit, print_json
from emberkeep.cli._shell import command


@command
def warm(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one line of JSON.")
    ] = False,
) -> None:
    """Compile all kernels now, so that no later run has to."""
    from emberkeep.kernels._jit import announcer
    from emberkeep.train.train_warmup import warm_up

    start = time.perf_counter()
    warm_up()
    seconds = time.perf_counter() - start
    if as_json:
        print_json({"compiled": announcer.compiled, "seconds": round(seconds, 3)})
    elif announcer.compiled:
        emit(f"compiled {announcer.compiled} kernels in {seconds:.1f} s")
    else:
        emit("all kernels are compiled already")
