"""What a measurement wrote down, and what somebody changed in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emberkeep.errors import DataError
from emberkeep.planning.measured_inputs import read_inputs

QUANTIZED = {"save_seconds": 1, "load_seconds": 1, "bits": 4}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"save_seconds": 1e20}, "save_seconds is longer than any time"),
        ({"save_seconds": 10**400}, "save_seconds must be a number of 0 or more"),
        ({"rows": 1.9}, "rows must be a whole number, not 1.9"),
        ({"save_minutes": 5}, "'save_minutes' is not known"),
        ({"quantized": {**QUANTIZED, "bits": 4.7}}, "bits must be a whole number, not 4.7"),
        ({"quantized": {**QUANTIZED, "slowdown_percent": 5}}, "slowdown_percent' is not known"),
    ],
)
def test_what_was_not_measured_like_this_is_refused(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"format": 1, "save_seconds": 1, **changes}))
    with pytest.raises(DataError, match=complaint):
        read_inputs(file)
