"""How long a recovery is tried."""

from __future__ import annotations

from typing import Any

import pytest

from emberkeep.errors import RecoveryError, ShardLostError
from emberkeep.keeper.recoverer import Recoverer
from emberkeep.testing.virtual_clock import VirtualClock


def test_recoveries_that_lose_shards_again_and_again_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tried = VirtualClock(), []

    def lost(self: Recoverer) -> Any:
        clock.sleep(240)
        tried.append(clock.monotonic())
        raise ShardLostError([3])

    monkeypatch.setattr(Recoverer, "_lost", lambda self: [3])
    monkeypatch.setattr(Recoverer, "_plan_once", lost)
    nothing: Any = None
    recoverer = Recoverer(
        [], nothing, nothing, total_steps=None, steps=lambda: 0, go_back=None,
        tell=lambda *_: None, clock=clock,
    )  # fmt: skip
    with pytest.raises(RecoveryError, match="the last time 3: see why they end"):
        recoverer.recover()
    assert tried == [240, 480, 720, 960], "a quarter of an hour, and not much longer"
