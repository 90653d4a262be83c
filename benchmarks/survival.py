"""What clusters survive: simulated runs, broken rules that they notice, partitions, lost answers.

Simulated clusters run from seeds, on virtual time; each run that loses, doubles or changes a push
fails. Mutations break one rule of servers after the other: the share that the simulator notices
says what its silence is worth. Beside it real server processes behind a proxy are cut off while a
small model trains, and answers to pushes are lost on the way.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("EMBERKEEP_QUIET", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from _common import options, report
from emberkeep.cluster.remote.timing import Timing
from tests.faults.partitions import SCALED, STRATEGIES, Outcome, outcome, pushes, undisturbed
from tests.mutations.server_rules import SERVER_MUTATIONS, SIMULATED
from tests.mutations.simulated import Noticed, noticed
from tests.servers import Farm

FIRST_SEED = 20_260_726
SIMULATED_SECONDS, QUICK_SIMULATED_SECONDS = 300.0, 12.0
# Of each mutation; those of a quick run are noticed within a few seeds.
SEEDS, QUICK_SEEDS = 300, 12
MUTATION_SECONDS, QUICK_MUTATION_SECONDS = 60.0, 8.0
QUICK_RULES = ("S2-ledger", "S8")
CUTS, QUICK_CUTS = (5.0, 15.0, 30.0, 120.0), (3.0,)
PUSHES, QUICK_PUSHES = 2000, 150
QUICK_NOTE = (
    f"A quick run simulates for {QUICK_SIMULATED_SECONDS:g} s, tries {' and '.join(QUICK_RULES)} "
    f"with {QUICK_SEEDS} seeds, and cuts servers off for {QUICK_CUTS[0]:g} s, with leases and "
    "deadlines of a second."
)


def simulated(seconds: float) -> tuple[int, float, float, list[str]]:
    """Seeds, virtual seconds, seconds, and the failures."""
    from emberkeep.testing.simulation import simulate

    simulate(FIRST_SEED - 1)  # loads kernels
    seeds, virtual, failures = 0, 0.0, []
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        run = simulate(FIRST_SEED + seeds)
        seeds += 1
        virtual += run.virtual_seconds
        if run.failure:
            failures.append(f"seed {run.options.seed}: {run.failure.splitlines()[0]}")
    return seeds, virtual, time.monotonic() - start, failures


def mutated(quick: bool) -> list[Noticed]:
    chosen = [m for m in SIMULATED if not quick or m.rule in QUICK_RULES]
    seeds, seconds = (QUICK_SEEDS, QUICK_MUTATION_SECONDS) if quick else (SEEDS, MUTATION_SECONDS)
    return [noticed(mutation, 0, seeds, seconds) for mutation in chosen]


def partitioned(farm: Farm, quick: bool) -> list[Outcome]:
    """Every strategy, cut off for each time; a quick run has leases of a second."""
    digest = undisturbed().digest
    return [
        outcome(farm, strategy, seconds, digest, timing=SCALED if quick else None)
        for seconds in (QUICK_CUTS if quick else CUTS)
        for strategy in STRATEGIES
    ]


def median(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return statistics.median(known) if known else 0.0


def main() -> None:
    given = options(__file__, __doc__.splitlines()[0])
    spawn = multiprocessing.get_context("spawn")
    seconds = QUICK_SIMULATED_SECONDS if given.quick else SIMULATED_SECONDS
    # Mutations are tried in forks of a process in which nothing was simulated before.
    with (
        ProcessPoolExecutor(1, mp_context=spawn) as simulating,
        ProcessPoolExecutor(1, mp_context=spawn) as mutating,
    ):
        simulation = simulating.submit(simulated, seconds)
        if not given.quick:  # a full run has the machine for one thing at a time
            simulation.result()
        mutations = mutating.submit(mutated, given.quick)
        if not given.quick:
            mutations.result()
        farm = Farm()
        try:
            cuts = partitioned(farm, given.quick)
            sent = QUICK_PUSHES if given.quick else PUSHES
            lost, doubled, troubles = pushes(farm, sent)
        finally:
            farm.close()
        seeds, virtual, taken, failures = simulation.result()
        found = mutations.result()
    for failure in failures:
        print(f"survival: {failure}", file=sys.stderr)
    survived = [each for each in cuts if each.survived and each.rows_kept]
    caught = [each for each in found if each.how]
    report(
        given,
        config={  # a quick run does less of it, as its notes say
            "first_seed": FIRST_SEED,
            "simulated_for_seconds": SIMULATED_SECONDS,
            "mutations_in_all": len(SERVER_MUTATIONS),
            "mutations_simulated": len(SIMULATED),
            "seeds_of_a_mutation": SEEDS,
            "cut_off_for_seconds": CUTS,
            "strategies": ", ".join(STRATEGIES),
            "lease_seconds": Timing().lease.total_seconds(),
            "deadline_seconds": Timing().deadline.total_seconds(),
            "pushes": PUSHES,
        },
        figures={
            "simulated_seeds": float(seeds),
            "simulated_failures": float(len(failures)),
            "simulated_hours_per_minute": virtual / 3600 / (taken / 60),
            "mutations_caught_pct": 100 * len(caught) / len(found),
            "lost_pushes": float(lost),
            "double_pushes": float(doubled),
            "partitions_survived_pct": 100 * len(survived) / len(cuts),
            "seconds_to_notice": median([each.seconds_to_notice for each in cuts]),
            "seconds_to_serve": median(
                [max(0.0, each.seconds_to_serve - each.seconds) for each in cuts]
            ),
        },
        columns=["cut off for", "strategy", "rows", "bits", "PLS", "noticed", "served"],
        rows=[
            [
                f"{each.seconds:g} s", each.strategy, "kept" if each.rows_kept else "recovered",
                "equal" if each.bits else "other", f"{each.pls:g}", each.noticed,
                f"{each.seconds_to_serve:.1f} s",
            ]
            for each in cuts
        ],
        notes=[
            f"{seeds} simulated runs of {virtual / 3600:.1f} hours in {taken:.0f} s, "
            f"{len(failures)} of them failed. Mutations: "
            + "; ".join(
                f"{each.mutation.rule} "
                + (f"noticed by run {each.runs}" if each.how else f"missed by {each.runs} runs")
                for each in found
            )
            + ".",
            f"{sent} pushes met {troubles} troubles.",
            *([QUICK_NOTE] if given.quick else []),
            "Served: the first step after the cut began; `seconds_to_serve` is from its end.",
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
