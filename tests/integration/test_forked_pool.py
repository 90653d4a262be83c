"""Pools in a forked child."""

from __future__ import annotations

import os

from emberkeep.runtime.pool import Pool
from tests.unit.runtime.test_pool import nonfinite_rows


def test_jobs_run_in_a_forked_child() -> None:
    pool = Pool(3)
    nonfinite_rows(pool, seed=1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            nonfinite_rows(pool, seed=2)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
