"""How long a recovery is tried."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from emberkeep.errors import RecoveryError, ShardLostError
from emberkeep.keeper.recoverer import Recoverer


def test_recoveries_that_lose_shards_again_and_again_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Recoverer) -> Any:
        raise ShardLostError([3])

    monkeypatch.setattr(Recoverer, "_lost", lambda self: [3])
    monkeypatch.setattr(Recoverer, "_plan_once", lost)
    nothing: Any = None
    recoverer = Recoverer(
        [], nothing, nothing, total_steps=None, steps=lambda: 0, go_back=None,
        tell=lambda *_: None, patience=timedelta(0),
    )  # fmt: skip
    with pytest.raises(RecoveryError, match="the last time 3: see why they end"):
        recoverer.recover()
