"""How long ranks wait for each other."""

from __future__ import annotations

from datetime import timedelta

import pytest

from emberkeep.cluster.base import PATIENCE
from emberkeep.keeper.ranks import collective_timeout


@pytest.mark.parametrize("patience", [timedelta(seconds=1), PATIENCE, timedelta(hours=3)])
def test_ranks_wait_for_each_other_for_longer_than_one_waits_for_a_server(
    patience: timedelta,
) -> None:
    assert collective_timeout(patience) > patience
    assert collective_timeout(patience) >= timedelta(minutes=30)
