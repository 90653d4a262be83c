"""`emberkeep simulate`: clusters that fail on virtual time, each by its seed."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emberkeep.cli._options import option
from emberkeep.cli._repository import JsonOption, emit, print_json
from emberkeep.cli._shell import command, say
from emberkeep.errors import ConfigError
from emberkeep.runtime.waiting import unsaid

if TYPE_CHECKING:
    from emberkeep.testing.simulation import Outcome

FAILED = 1
PROGRESS_SEEDS = 200


@command
def simulate(
    seed: Annotated[int, option("--seed", "The run to replay, or the first of many.", "N")],
    seeds: Annotated[int, option("--seeds", "How many runs, one after the other.", "K")] = 1,
    seconds: Annotated[
        float | None, option("--seconds", "Start no run after so many seconds.", "S")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train on a simulated cluster: servers, network, store and clock fail as the seed says.

    One seed prints its story; several print what they have met, and after every 200 seeds how far
    they are. The same seed is the same run, message by message.
    """
    from emberkeep.testing.simulation import freeze_heap
    from emberkeep.testing.simulation import simulate as run

    if seed < 0:
        raise ConfigError(f"--seed must be 0 or more, not {seed}")
    if seeds < 1:
        raise ConfigError(f"--seeds must be 1 or more, not {seeds}")
    if seeds > 1:
        freeze_heap()
    start = time.monotonic()
    outcomes: list[Outcome] = []
    for one in range(seed, seed + seeds):
        if outcomes and seconds is not None and time.monotonic() - start > seconds:
            break
        with unsaid():
            outcome = run(one)
        if outcome.failure and seeds > 1 and not as_json:
            say(f"seed {one} failed: {_first_line(outcome)}; replay it: simulate --seed {one}")
        outcomes.append(outcome)
        if len(outcomes) % PROGRESS_SEEDS == 0:
            say(_progress(_figures(outcomes, time.monotonic() - start)))
    taken = time.monotonic() - start
    failed = [outcome for outcome in outcomes if outcome.failure]
    if as_json:
        print_json(_figures(outcomes, taken, stories=seeds == 1))
    elif seeds == 1:
        _tell(outcomes[0])
    else:
        _count(_figures(outcomes, taken))
    if failed:
        raise typer.Exit(FAILED)


def _tell(outcome: Outcome) -> None:
    emit(f"seed {outcome.options.seed}: {outcome.options}")
    for line in outcome.story:
        emit(line)
    if outcome.failure:
        emit(f"{outcome.virtual_seconds:9.3f}  FAILED: {outcome.failure}")
        say(f"replay it: emberkeep simulate --seed {outcome.options.seed}")
    else:
        emit(f"{outcome.virtual_seconds:9.3f}  every row and version is as it must be")


def _figures(outcomes: list[Outcome], taken: float, *, stories: bool = False) -> dict[str, Any]:
    faults: Counter[str] = Counter()
    messages: Counter[str] = Counter()
    for outcome in outcomes:
        faults += outcome.faults
        messages += outcome.messages
    hours = sum(outcome.virtual_seconds for outcome in outcomes) / 3600
    figures: dict[str, Any] = {
        "seeds": len(outcomes),
        "first_seed": outcomes[0].options.seed,
        "seconds": round(taken, 3),
        "seeds_per_minute": round(60 * len(outcomes) / taken, 1),
        "virtual_hours": round(hours, 3),
        "virtual_hours_per_minute": round(60 * hours / taken, 3),
        "faults": dict(sorted(faults.items())),
        "messages": dict(sorted(messages.items())),
        "recoveries": sum(outcome.recoveries for outcome in outcomes),
        "resumes": sum(outcome.resumes for outcome in outcomes),
        "processors": os.cpu_count(),
        "failures": [
            {"seed": outcome.options.seed, "failure": outcome.failure}
            for outcome in outcomes
            if outcome.failure
        ],
    }
    if stories:
        figures["options"] = str(outcomes[0].options)
        figures["story"] = outcomes[0].story
    return figures


def _count(figures: dict[str, Any]) -> None:
    emit(
        f"{figures['seeds']} seeds in {figures['seconds']:.1f} s "
        f"({figures['seeds_per_minute']:.0f} per minute), {figures['virtual_hours']:.2f} virtual "
        f"hours ({figures['virtual_hours_per_minute']:.2f} per minute)"
    )
    named = ", ".join(f"{count} {kind}" for kind, count in figures["faults"].items())
    emit(f"faults: {named or 'none'}")
    emit(f"{figures['recoveries']} recoveries, {figures['resumes']} resumes")
    failed = [str(failure["seed"]) for failure in figures["failures"]]
    emit(f"{len(failed)} failed" + (f": seeds {', '.join(failed)}" if failed else ""))


def _progress(figures: dict[str, Any]) -> str:
    last = figures["first_seed"] + figures["seeds"] - 1
    return (
        f"{figures['seeds']} seeds up to {last}, {len(figures['failures'])} failed, "
        f"{figures['seeds_per_minute']:.0f} seeds and {figures['virtual_hours_per_minute']:.2f} "
        "virtual hours per minute"
    )


def _first_line(outcome: Outcome) -> str:
    return outcome.failure.splitlines()[0]
