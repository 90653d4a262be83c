"""The demonstration on a tiny task: what it says is what happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from emberkeep.cli import main

TINY = [
    "data.samples=6000", "data.rows_total=1000", "run.batch_size=100", "tables.dim=4",
    "model.bottom=[8]", "model.top=[8]", "checkpoint.every=24 steps", 'failures.at=["2, 5 at 30"]',
]  # fmt: skip


@pytest.mark.parametrize("as_json", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_two_shards_are_killed(
    as_json: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sets = [part for setting in TINY for part in ("--set", setting)]
    arguments = ["--directory", str(tmp_path), *sets, *(["--json"] if as_json else [])]
    monkeypatch.setattr(sys, "argv", ["emberkeep", "demo", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    out = capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page
    assert "Shards 2, 5 were lost after step 29" in page
    for text in ("Two of eight shards were killed", "What came back", "What it did to the model"):
        assert text in page
    if not as_json:
        for text in (
            "shards 2 and 5 were killed",
            "as they were",
            "if empty",
            "without embeddings",
            "written",
            "report.html",
        ):
            assert text in out
        return
    result = json.loads(out)
    (made,) = result["recoveries"]
    assert (made["scope"], made["shards"], made["step"]) == ("partial", [2, 5], 29)
    assert made["pls"] == pytest.approx(2 * 5 / (54 * 8))
    (loss,) = result["losses"]
    assert (loss["step"], loss["version"], loss["pls"]) == (29, made["version"], made["pls"])
    assert [shard["shard"] for shard in loss["shards"]] == [2, 5]
    for shard in loss["shards"]:
        origins = shard["origins"]
        assert sum(origin["rows"] for origin in origins) == shard["rows"] > 0
        assert 0 < sum(origin["older"] for origin in origins) < shard["rows"]
        # The whole version of step 24 holds what was trained by then; later ones are prioritised.
        assert {origin["whole"] for origin in origins if origin["step"] > 24} <= {False}
        assert 0 < shard["steps_old"] <= 29
    auc_lost = result["without_failures"]["auc"] - result["with_failures"]["auc"]
    assert result["auc_lost"] == pytest.approx(auc_lost)
    assert result["without_failures"]["baseline_auc"] is not None
    assert {save["kind"] for save in result["versions"]} >= {"full", "prioritised"}
