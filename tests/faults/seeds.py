"""Seeds of the simulator that must not fail.

The default run tries 150, the same on every machine: about 40 s of one core. They are in files of
their own, which cores can share.
"""

from __future__ import annotations

from collections.abc import Iterable

from emberkeep.testing.simulation import simulate

HALF = 75


def check_seeds(seeds: Iterable[int]) -> None:
    for seed in seeds:
        outcome = simulate(seed)
        assert not outcome.failure, f"emberkeep simulate --seed {seed}: {outcome.failure}"
