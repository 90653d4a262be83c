"""Real processes that are killed, stopped and run out of disk: see `stress`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults import stress


@pytest.mark.soak
def test_a_thousand_kills(tmp_path: Path) -> None:
    """`EMBERKEEP_SEED` starts elsewhere."""
    print(dict(stress.run(tmp_path, int(os.environ.get("EMBERKEEP_SEED", 1)), 1000)))
