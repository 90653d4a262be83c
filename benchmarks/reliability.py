"""How often state was tried to be lost: histories, interleavings, failing calls, damage, mutations.

Runs the harnesses of `tests/faults` for a while, each from a seed, and counts cases and what they
find; `docs/reliability.md` says what each of them does. Mutations break one rule after the other
in a copy of the sources: the share that the harnesses notice says what their silence is worth.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("EMBERKEEP_QUIET", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from _common import options, report
from tests.faults import damage, failing_calls, histories, interleavings
from tests.faults.findings import Counts, HangError, LostVersionError, WrongRowsError
from tests.mutations.rules import MUTATIONS
from tests.mutations.run import SECONDS, caught_percent, verdict

SEED = 20260726
# Of processor time: a machine that is busy takes longer, and tries as much.
EACH_SECONDS, QUICK_EACH_SECONDS = 300.0, 6.0
PATIENCE = 20  # What hangs uses no processor time: so many times as long by the clock is enough.
MINIMUM = {
    "histories": 3, "interleavings": 40, "failing_calls": 40, "damage_cases": 100,
    "mutations_tried": 4,
}  # fmt: skip
QUICK_LAYOUT = "grid"
QUICK_RULES = ("R3", "R5", "R11", "T3")  # one test notices each of these within seconds
FINDINGS = {LostVersionError: "lost_versions", WrongRowsError: "wrong_rows", HangError: "hangs"}
COLUMNS = ["harness", "cases", "seconds", "lost versions", "wrong rows", "hangs"]

Result = tuple[Counts, float]


def tried(name: str, run: Callable[[int, int], Counts], seconds: float, cases: int) -> Result:
    """A harness, so many cases at a time, for so long and until it has tried its minimum.

    What it finds is a case too; it is counted, and the harness goes on behind it.
    """
    counts: Counts = Counts()
    start, used, seed = time.monotonic(), time.process_time(), SEED
    while time.monotonic() - start < PATIENCE * seconds and (
        time.process_time() - used < seconds or counts[name] < MINIMUM[name]
    ):
        try:
            counts += run(seed, cases)
        except tuple(FINDINGS) as error:
            counts.update([name, FINDINGS[type(error)]])
            print(f"{name}, seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
        seed += 1
    return counts, time.monotonic() - start


def damaged(quick: bool) -> Result:
    """Every kind of file, damaged in every way; a quick run takes one layout, and tiers."""
    start = time.monotonic()
    if quick:
        total = damage.totals(damage.repository_cases(QUICK_LAYOUT, every=False))
        total += damage.totals(damage.tier_cases())
    else:
        total = damage.totals(damage.damage_cases(every=True))
    for failure in total.failures:
        print(f"damage: {failure}", file=sys.stderr)
    counts: Counts = Counts(
        damage_cases=total.cases,
        damage_undetected=total.undetected,
        damage_undetectable=total.undetectable,
        damage_failures=len(total.failures),
    )
    return counts, time.monotonic() - start


def mutated(quick: bool) -> tuple[Result, float]:
    """How many mutations were tried, the seconds that took; and the percentage caught.

    A quick run takes a few, and of the tests only the one that is known to notice each.
    """
    start = time.monotonic()
    chosen = [m for m in MUTATIONS if not quick or m.rule in QUICK_RULES]
    verdicts = [verdict(m, SECONDS, (m.noticed_by,) if quick else None) for m in chosen]
    counts: Counts = Counts(mutations_tried=len(verdicts))
    return (counts, time.monotonic() - start), caught_percent(verdicts)


def main() -> None:
    given = options(__file__, __doc__.splitlines()[0])
    seconds = QUICK_EACH_SECONDS if given.quick else EACH_SECONDS
    histories.run(SEED, 1)  # compiles the kernels that the other process and mutations take over
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as beside:
        damages = beside.submit(damaged, given.quick)
        mutations = beside.submit(mutated, given.quick)
        if not given.quick:  # a full run has the machine for one thing at a time
            mutations.result()
        results = {
            "histories": tried("histories", histories.run, seconds, 1),
            "interleavings": tried("interleavings", interleavings.run, seconds, 10),
        }
        with failing_calls.prepared() as operations:
            run = partial(failing_calls.drawn, operations)
            results["failing_calls"] = tried("failing_calls", run, seconds, 10)
        results["damage_cases"] = damages.result()
        results["mutations_tried"], percent = mutations.result()
    few = [
        f"{name} {counts[name]} (at least {MINIMUM[name]})"
        for name, (counts, _) in results.items()
        if counts[name] < MINIMUM[name]
    ]
    if few:
        sys.exit(f"reliability: too few cases for a result: {', '.join(few)}; see the lines above")
    found = sum((counts for counts, _ in results.values()), Counts())
    report(
        given,
        config={
            "seed": SEED,
            "lives_of_a_history": 6,
            "processes_of_an_interleaving": "2 or 3",
            "error_codes": len(failing_calls.CODES),
            "processor_seconds_of_each": seconds,
            "minimum_cases": MINIMUM,
            "damage": f"{QUICK_LAYOUT}, one file of each kind; tiers"
            if given.quick
            else "all layouts, every file; tiers",
            "mutations_in_all": len(MUTATIONS),
            "mutations": ", ".join(QUICK_RULES) if given.quick else "all",
            "processor_seconds_of_a_mutation": SECONDS,
        },
        figures={
            **{name: float(counts[name]) for name, (counts, _) in results.items()},
            "damage_undetected": float(found["damage_undetected"]),
            "damage_undetectable": float(found["damage_undetectable"]),
            "damage_failures": float(found["damage_failures"]),
            "mutations_caught_pct": percent,
            **{finding: float(found[finding]) for finding in FINDINGS.values()},
        },
        columns=COLUMNS,
        rows=[
            [name, str(counts[name]), f"{taken:.1f}"]
            + [str(counts[finding]) for finding in FINDINGS.values()]
            for name, (counts, taken) in results.items()
        ],
        notes=[f"Histories made {found['saves']} saves and {found['restores']} restores."],
    )


if __name__ == "__main__":
    main()
