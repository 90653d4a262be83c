"""Histories as wide as the API: whatever is restored is what was saved, bit for bit."""

from __future__ import annotations

import os

import pytest

from tests.faults import histories
from tests.nightly import examples


def test_whatever_is_restored_is_what_was_saved() -> None:
    counts = histories.run(0, examples(24))
    print(dict(counts))
    for what in ("saves", "restores", "failed saves", "resumes", "deaths", "forks", "zombies"):
        assert counts[what], what


@pytest.mark.soak
def test_a_thousand_histories() -> None:
    """`EMBERKEEP_SEED` starts elsewhere."""
    print(dict(histories.run(int(os.environ.get("EMBERKEEP_SEED", 10_000)), 1000)))
