"""Breaks one rule after the other in a copy of the sources: which of them do the short runs notice?

    python -m tests.mutations.run [--sample N] [--seed N] [rule ...]

Each mutation has a minute of processor time. A run that fails, or hangs, has noticed it.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.rules import MUTATIONS, SOURCES, Mutation
from tests.mutations.server_rules import SERVER_MUTATIONS, SIMULATED

ROOT = SOURCES.parent
SECONDS = 60.0
MOST_SECONDS = 600.0
# What may notice a rule of which protocol. All of it is in the default run.
TESTS = "tests/"
FAULTS = "tests/faults/"
REPOSITORY = (
    "test_histories.py", "test_repository_schedules.py", "test_failing_calls.py",
    "test_repository_power.py", "test_grid_lineage.py", "test_repository_interleavings.py",
    "test_repository_operations.py", "test_repository_damage.py", "test_grid_operations.py",
    "test_repository_model.py", "test_grid_history.py",
)  # fmt: skip
TIER = (
    "test_histories.py", "test_tier_power.py", "test_tier_decisions.py", "test_tier_cleaning.py",
    "test_tier_head.py", "test_tier_absence.py", "test_tier_faults.py", "test_failing_calls.py",
)  # fmt: skip
SERVERS = (
    "unit/cluster/test_spread.py", "unit/server/test_ray_placement.py",
    "unit/server/test_server_end.py", "faults/test_servers_signalled.py",
    "unit/wire/test_private_socket.py", "integration/test_strangers.py",
    "integration/test_adoption.py", "faults/test_rewind.py", "unit/data/test_reader.py",
    "integration/test_workers.py",
)  # fmt: skip
# Those of servers that simulated clusters can meet are tried by `simulated.py`.
ALL = (*MUTATIONS, *(each for each in SERVER_MUTATIONS if each not in SIMULATED))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a mutation was noticed, by what, and after how long."""

    mutation: Mutation
    by: str | None
    seconds: float


def tests_for(mutation: Mutation) -> Sequence[str]:
    """All of them; the one that is known to notice it comes first."""
    every = {"T": TIER, "S": SERVERS, "W": SERVERS}.get(mutation.rule[0], REPOSITORY)
    return [mutation.noticed_by, *(name for name in every if name != mutation.noticed_by)]


def verdict(
    mutation: Mutation, seconds: float = SECONDS, tests: Sequence[str] | None = None
) -> Verdict:
    """Runs the tests over the mutated sources until one of them fails.

    They have so many seconds of processor time: a machine that is busy notices as much.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="emberkeep-") as copy:
        # With the compiled kernels, which go by the text of their sources.
        sources = Path(shutil.copytree(SOURCES, Path(copy) / "src", symlinks=True))
        mutation.apply(sources)
        environment = {
            **os.environ, "PYTHONPATH": f"{sources}{os.pathsep}{ROOT}", "EMBERKEEP_QUIET": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-m", "not soak", "-p", "no:cacheprovider",
            "--tb=no", *map(path_of, tests or tests_for(mutation)),
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=_limited(seconds),
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Verdict(mutation, "it hangs", time.monotonic() - start)
    by = None
    if process.returncode > 1:  # pytest's own trouble: nothing was tried
        raise RuntimeError(f"{mutation.rule}: pytest ended with {process.returncode}:\n{out}")
    if process.returncode not in (0, -signal.SIGXCPU, -signal.SIGKILL):
        failed = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))]
        by = failed[0].split(" - ")[0].rpartition("/")[2] if failed else "the run ended"
    return Verdict(mutation, by, time.monotonic() - start)


def path_of(test: str) -> str:
    return TESTS + test if "/" in test else FAULTS + test


def _limited(seconds: float) -> Callable[[], None]:
    def limit() -> None:
        most = math.ceil(seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 5))

    return limit


def caught_percent(verdicts: Sequence[Verdict]) -> float:
    return 100.0 * sum(v.by is not None for v in verdicts) / max(1, len(verdicts))


def sample(seed: int, count: int) -> list[Mutation]:
    return random.Random(seed).sample(MUTATIONS, min(count, len(MUTATIONS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=len(MUTATIONS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("rules", nargs="*")
    given = parser.parse_args()
    chosen = [m for m in ALL if m.rule in given.rules] or sample(given.seed, given.sample)
    verdicts = []
    for mutation in chosen:
        found = verdict(mutation, given.seconds)
        verdicts.append(found)
        print(
            f"{mutation.rule:12} {'MISSED' if found.by is None else 'caught':6} "
            f"{found.seconds:5.1f} s  {mutation.broken}  [{found.by or 'nothing failed'}]",
            flush=True,
        )
    print(f"{caught_percent(verdicts):.1f}% of {len(verdicts)} caught")


if __name__ == "__main__":
    main()
