"""How often state was tried to be lost: histories, interleavings, failing calls, damage, mutations.

Runs the harnesses of `tests/faults` for a while, each from a seed, and counts cases and what they
find; `docs/reliability.md` says what each of them does. Mutations break one rule after the other
in a copy of the sources: the share that the harnesses notice says what their silence is worth.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("EMBERKEEP_QUIET", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from _common import options, report
from tests.faults import failing_calls, histories, interleavings
from tests.faults.findings import Counts, HangError, LostVersionError, WrongRowsError
from tests.mutations.rules import MUTATIONS
from tests.mutations.run import SECONDS, caught_percent, sample, verdict

SEED = 20260726
EACH_SECONDS, QUICK_EACH_SECONDS = 300.0, 7.0
QUICK_MUTATIONS = 2
FINDINGS = {LostVersionError: "lost_versions", WrongRowsError: "wrong_rows", HangError: "hangs"}
COLUMNS = ["harness", "cases", "seconds", "lost versions", "wrong rows", "hangs"]


def tried(run: Callable[[int, float], Counts], seconds: float) -> tuple[Counts, float]:
    """A harness for so long; what it finds is counted, and it goes on behind it."""
    counts: Counts = Counts()
    start = time.monotonic()
    seed = SEED
    while (left := start + seconds - time.monotonic()) > 0:
        try:
            counts += run(seed, left)
        except tuple(FINDINGS) as error:
            counts[FINDINGS[type(error)]] += 1
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        seed += 10**6
    return counts, time.monotonic() - start


def damaged(quick: bool) -> tuple[Counts, float]:
    """Every kind of file, damaged in every way."""
    try:
        from tests.faults import damage
    except ImportError:
        return Counts(), 0.0
    start = time.monotonic()
    total = damage.totals(damage.damage_cases(every=not quick))
    counts: Counts = Counts(damage_cases=total.cases, damage_undetected=total.undetected)
    counts["damage_undetectable"] = total.undetectable
    return counts, time.monotonic() - start


def mutated(quick: bool) -> tuple[int, float, float]:
    """How many mutations were tried, the percentage caught, and the seconds that took.

    A quick run takes a sample, and of the tests only the one that is known to notice each.
    """
    start = time.monotonic()
    chosen = sample(SEED, QUICK_MUTATIONS) if quick else list(MUTATIONS)
    verdicts = [verdict(m, SECONDS, (m.noticed_by,) if quick else None) for m in chosen]
    return len(verdicts), caught_percent(verdicts), time.monotonic() - start


def main() -> None:
    given = options(__file__, __doc__.splitlines()[0])
    seconds = QUICK_EACH_SECONDS if given.quick else EACH_SECONDS
    everything = sys.maxsize
    with ThreadPoolExecutor(1) as beside:
        # They run in processes of their own; a full run has the machine for one thing at a time.
        mutations = beside.submit(mutated, given.quick)
        if not given.quick:
            mutations.result()
        results = {
            "histories": tried(lambda s, left: histories.run(s, everything, left), seconds),
            "interleavings": tried(lambda s, left: interleavings.run(s, everything, left), seconds),
            "failing_calls": tried(lambda s, left: failing_calls.run(s, everything, left), seconds),
            "damage_cases": damaged(given.quick),
        }
        mutation_count, percent, mutation_seconds = mutations.result()
    found: Counts = Counts()
    rows = []
    for name, (counts, taken) in results.items():
        found += counts
        rows.append(
            [name, str(counts[name]), f"{taken:.1f}"]
            + [str(counts[finding]) for finding in FINDINGS.values()]
        )
    rows.append(["mutations", str(mutation_count), f"{mutation_seconds:.1f}", "-", "-", "-"])
    report(
        given,
        config={
            "seed": SEED,
            "lives_of_a_history": 6,
            "processes_of_an_interleaving": "2 or 3",
            "error_codes": len(failing_calls.CODES),
            "seconds_of_each": seconds,
            "mutations": mutation_count,
            "mutations_in_all": len(MUTATIONS),
            "seconds_of_a_mutation": SECONDS,
        },
        figures={
            **{name: float(counts[name]) for name, (counts, _) in results.items()},
            "damage_undetected": float(found["damage_undetected"]),
            "damage_undetectable": float(found["damage_undetectable"]),
            "mutations_caught_pct": percent,
            **{finding: float(found[finding]) for finding in FINDINGS.values()},
        },
        columns=COLUMNS,
        rows=rows,
        notes=[f"Histories made {found['saves']} saves and {found['restores']} restores."],
    )


if __name__ == "__main__":
    main()
