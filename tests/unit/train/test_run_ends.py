"""How runs end: hooks are closed however they do, and results come back whole."""

from __future__ import annotations

import math

import pytest

from emberkeep.errors import ConfigError
from emberkeep.train.distributed import _result
from emberkeep.train.hooks import Hook
from emberkeep.train.loop import run
from emberkeep.train.result import Result
from emberkeep.train.run_config import DEMO


class Closed(Hook):
    closed = False

    def close(self) -> None:
        self.closed = True


def test_hooks_are_closed_where_a_fresh_start_is_refused() -> None:
    hook = Closed()
    with pytest.raises(ConfigError, match="a fresh start is for runs that are saved"):
        run(DEMO, hooks=[hook], fresh=True)
    assert hook.closed


def test_a_result_of_workers_has_numbers_where_one_of_this_process_has() -> None:
    own = Result(
        settings=DEMO, samples=10, steps=1, seconds=1.0, samples_per_second=10.0, loss=0.5,
        test_samples=1, auc=math.nan, log_loss=0.1, baseline_auc=None, baseline_log_loss=None,
        best_auc=None, rows=5, rows_trained=3, peak_memory_nbytes=1, digest="d",
    )  # fmt: skip
    found = _result(DEMO, own.to_dict())
    assert math.isnan(found.auc)
    assert found.to_dict() == own.to_dict()
