"""How long a recovery is tried."""

from __future__ import annotations

from typing import Any

import pytest

from emberkeep.errors import RecoveryError, ShardLostError
from emberkeep.keeper.recoverer import Recoverer
from emberkeep.testing.virtual_clock import VirtualClock


def losing(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[float]:
    """When a recovery was tried whose every attempt loses a shard again, after so long."""
    clock, tried = VirtualClock(), []

    def lost(self: Recoverer) -> Any:
        clock.sleep(seconds)
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
    return tried


def test_recoveries_that_lose_shards_again_and_again_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = losing(monkeypatch, 240)
    assert [round(at) for at in tried] == [240, 480, 720, 960], "a quarter of an hour, not longer"


def test_a_server_that_refuses_at_once_is_not_asked_without_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A simulated trainer had asked, and a real one would have started, 10,000 in half a minute."""
    tried = losing(monkeypatch, 0.001)
    assert tried[1] - tried[0] < 0.1, "the first attempt may have met what is over by now"
    assert len(tried) < 1000
    assert tried[-1] > 15 * 60
