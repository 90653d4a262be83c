"""Breaks one rule of servers after the other: within how many seeds does the simulator notice it?

    python -m tests.mutations.simulated [--seeds N] [--first N] [--seconds S] [rule ...]

Each mutation is tried in a forked child, whose functions get the code of the broken source. A run
that fails or hangs has noticed it. First come some runs of the scenarios that lead to its rule, if
there are any, then seeds as they come, until the time is over.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from emberkeep.testing.simulation.scenarios import scenario_of
from emberkeep.testing.simulation.sim_options import Options, options_of
from emberkeep.testing.simulation.simulated_run import run_options
from tests.mutations.rules import SOURCES, Mutation
from tests.mutations.server_rules import SIMULATED

SEEDS = 300
# Of processor time: how fast the machine is otherwise says nothing about a mutation.
SECONDS = 120.0
# What is not over by then hangs; a simulation that stands still ends itself before.
HANGS_SECONDS = 1200.0


# Scenarios that lead to a mutation, or to all of a rule.
SCENARIOS_OF: dict[str, tuple[str, ...]] = {
    "S1-lease": ("outlived",),
    "S1-renewal": ("outlived",),
    "S1-seal": ("sealed",),
    "S1": ("late",),
    "S2-ledger": ("unheard",),
    "S2-parity": ("unheard",),
    "S2-round": ("goes on",),
    "S3-settle": ("acknowledged",),
    "S3-gap": ("wave", "parted", "decoding"),
    "S3": ("behind", "wave"),
    "S4-flight": ("in flight",),
    "S4": ("decoding",),
    "S5": ("wave", "together"),
    "S6": ("unchanged", "unheard"),
    "S7": ("together", "wave"),
    "S8": ("unheard",),
    "S10-life": ("usurped",),
    "S10-rollback": ("unlaunched",),
    "S10-sealed": ("watched",),
    "S10-resend": ("goes on",),
    "S11": ("goes on", "tight"),
    "S12": ("parted",),
    "S15": ("resumed",),
    "W1": ("ranks",),
    "W2": ("ahead",),
}
# So many runs of each of them.
SCENARIO_SEEDS = 12


@dataclass(frozen=True, slots=True)
class Noticed:
    """Whether a mutation was noticed, how, and by which run."""

    mutation: Mutation
    how: str
    runs: int


def functions_of(code: CodeType, path: tuple[str, ...] = ()) -> Iterator[tuple[str, CodeType]]:
    """Functions of a module and methods of its classes, by their qualified names."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and not inner.co_name.startswith("<"):
            name = (*path, inner.co_name)
            if inner.co_flags & inspect.CO_NEWLOCALS:
                yield ".".join(name), inner
            else:
                yield from functions_of(inner, name)


def break_rule(mutation: Mutation) -> int:
    """Gives the functions of this process the code of the broken source; how many of them."""
    path = SOURCES / "emberkeep" / mutation.file
    name = "emberkeep." + mutation.file.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(name)
    text = path.read_text()
    before = dict(functions_of(compile(text, str(path), "exec")))
    after = dict(functions_of(compile(mutation.applied(text), str(path), "exec")))
    changed = [name for name in after if after[name] != before[name]]
    for qualified in changed:
        found: Any = module
        for part in qualified.split("."):
            found = inspect.getattr_static(found, part)
        found = getattr(found, "fget", None) or inspect.unwrap(getattr(found, "__func__", found))
        found.__code__ = after[qualified]
    return len(changed)


def noticed(mutation: Mutation, first: int, seeds: int, seconds: float) -> Noticed:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            _try_seeds(mutation, range(first, first + seeds), seconds, writing)
        finally:
            os._exit(0)
    os.close(writing)
    lines = _read_lines(reading, seconds + HANGS_SECONDS)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not lines:
        raise RuntimeError(f"{mutation.rule}: it could not be tried")
    last = lines[-1].split(" ", 2)
    how = last[2] if last[0] == "failure" else "" if last[0] == "done" else "it hangs"
    return Noticed(mutation, how, int(last[1]))


def scenarios_of(mutation: Mutation) -> tuple[str, ...]:
    """The scenarios that lead to it. "S1" is a rule of its own, not the beginning of "S10"."""
    rule = mutation.rule
    return SCENARIOS_OF.get(rule, SCENARIOS_OF.get(rule.split("-")[0], ()))


def runs_of(mutation: Mutation, seeds: range) -> Iterator[Options]:
    """What a mutation is tried on."""
    for seed in range(SCENARIO_SEEDS):
        for name in scenarios_of(mutation):
            yield scenario_of(name, seed)
    for seed in seeds:
        yield options_of(seed)


def _try_seeds(mutation: Mutation, seeds: range, seconds: float, out: int) -> None:
    assert break_rule(mutation)
    start, count = time.process_time(), 0
    for options in runs_of(mutation, seeds):
        count += 1
        os.write(out, f"run {count}\n".encode())
        try:
            failure = run_options(options).failure
        except Exception as error:  # an error of no class that servers may answer with
            failure = f"crashed with {error!r}"
        if failure:
            named = options.scenario or "seed"
            text = f"failure {count} {named} {options.seed}: {failure.splitlines()[0]}\n"
            os.write(out, text.encode())
            return
        if time.process_time() - start > seconds:
            break
    os.write(out, f"done {count}\n".encode())


def _read_lines(source: int, seconds: float) -> list[str]:
    """What a child says until it ends, or the time is over."""
    said, until = b"", time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not select.select([source], [], [], left)[0]:
            break
        part = os.read(source, 1 << 16)
        if not part:
            break
        said += part
    os.close(source)
    return said.decode().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("rules", nargs="*")
    given = parser.parse_args()
    chosen = [m for m in SIMULATED if not given.rules or m.rule in given.rules]
    caught, start = 0, time.monotonic()
    for mutation in chosen:
        found = noticed(mutation, given.first, given.seeds, given.seconds)
        caught += bool(found.how)
        print(
            f"{mutation.rule:12} {'caught' if found.how else 'MISSED'} {found.runs:4} runs  "
            f"{mutation.broken}  [{found.how[:120] or 'nothing failed'}]",
            flush=True,
        )
    print(f"{caught} of {len(chosen)} caught in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
