"""`emberkeep plan`: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import json
import re
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest

from emberkeep.cli import main
from emberkeep.planning.candidates import Measurement
from emberkeep.planning.measured_inputs import Inputs, read_inputs

PAPER = [
    *("--duration", "56h"), *("--mtbf", "28h"), *("--shards", "8"), *("--save-time", "5.7min"),
    *("--load-time", "2.5min"), *("--reschedule-time", "2.5min"), *("--pls", "0.1"),
]  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["emberkeep", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return code or 0


def test_the_papers_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *PAPER) == 0
    out = capsys.readouterr().out
    for text in ("8.99%", "4.56%", "1.20%", "recommended: CPR", "44.8 h", "next best is full",
                 "9 of 10 below"):  # fmt: skip
        assert text in out


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *PAPER, "--price", "2", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"full", "partial", "cpr"} <= set(printed["strategies"])
    assert round(printed["strategies"]["full"]["overhead"], 4) == 0.0899
    assert printed["strategies"]["full"]["simulated"]["p90"] > 0.1
    assert printed["strategies"]["cpr"]["interval_hours"] == pytest.approx(44.8)
    assert printed["recommended"] == "cpr"
    assert printed["strategies"]["full"]["cost"] > 0


@pytest.mark.long
def test_a_record_of_failures_and_a_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    start, random = datetime(2020, 1, 1, tzinfo=timezone.utc), np.random.default_rng(0)
    times = start + np.cumsum(random.weibull(0.6, 400)) * timedelta(hours=20)
    record = tmp_path / "failures.csv"
    record.write_text(
        "started,node\n" + "".join(f"{t.isoformat()},{i % 9}\n" for i, t in enumerate(times))
    )
    arguments = [
        *("--duration", "56h"), *("--shards", "8"), *("--save-time", "5min"),
        *("--load-time", "2min"),
        *("--failures", str(record)), *("--jobs", "100"),
        *("--report", str(tmp_path / "out" / "plan.html")),
    ]  # fmt: skip
    assert run(monkeypatch, *arguments, "--json") == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["failures"]["best"] == "weibull"
    assert "holds the times when failures began" in printed.err
    assert "9 machines are named" in printed.err

    page = (tmp_path / "out" / "plan.html").read_text()
    assert page.count("<svg") == 3
    assert "currentColor" in page
    # Nothing is fetched: every address is the name of an XML namespace.
    assert set(re.findall(r"https?://[^\"'< )]+", page)) <= {
        "http://www.w3.org/1999/xlink",
        "http://www.w3.org/2000/svg",
    }
    assert not re.search(r"<(script|link|img)", page)
    assert json.loads((tmp_path / "out" / "plan.json").read_text()) == document
    with (tmp_path / "out" / "plan.csv").open() as file:
        assert [row["strategy"] for row in csv.DictReader(file)] == list(document["strategies"])

    scaled = [*arguments[:-2], "--failures-nodes", "16", "--json"]
    assert run(monkeypatch, *scaled) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["job"]["mtbf_hours"] == pytest.approx(2 * document["job"]["mtbf_hours"])

    assert run(monkeypatch, *arguments) == 0
    assert "best fit: weibull" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "cpr_ssu="])
def test_the_error_of_a_slope_counts_whichever_strategy_it_is_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """It was passed over where only that of one strategy was given."""

    def error(*more: str) -> float:
        given = (*PAPER, "--slope", f"{name}0.02", *more, "--jobs", "0", "--json")
        assert run(monkeypatch, *given) == 0
        found = json.loads(capsys.readouterr().out)["strategies"]["cpr_ssu"]
        return float(found["accuracy_error"]) / found["pls"]

    assert error() == 0
    assert error("--slope-error", "0.004") == pytest.approx(0.004, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (PAPER[:2] + PAPER[4:], 2, "give --mtbf, or --failures"),
        ([*PAPER, "--failures", "x.csv"], 2, "give --mtbf, or --failures"),
        ([*PAPER[:6], "--pls", "0.1"], 2, "give --save-time and --load-time, or --repository or"),
        ([*PAPER, "--mtbf", "often"], 2, "--mtbf 'often' is no duration: write 56h"),
        ([*PAPER, "--fail-together", "9"], 2, "1 to 8 can fail together"),
        ([*PAPER, "--pls", "2"], 2, "a PLS lies between 0 and 1"),
        ([*PAPER[:6], "--repository", "/none/such"], 23, "repository"),
        ([*PAPER, "--page", "/dev/null/x.html"], 20, "cannot be written"),
        ([*PAPER, "--slope", "steep"], 2, "--slope 'steep' is no slope"),
        ([*PAPER, "--slope", "magic=1"], 2, "not of 'magic'"),
        ([*PAPER, "--failures-nodes", "9"], 2, "are for --failures"),
        ([*PAPER, "--measured", "/none/such"], 3, "/none/such"),
        ([*PAPER, "--jobs", "-1"], 2, "0 jobs or more"),
        ([*PAPER, "--fail-together", "0"], 2, "1 to 8 can fail together, not 0"),
        ([*PAPER, "--slope-error", "0.1"], 2, "--slope-error is that of --slope"),
        (
            [*PAPER, *("--slope", "cpr_ssu=1"), *("--slope", "cpr_mfu=1"), *("--slope-error", "1")],
            2, "--slope-error is that of one slope, and 2 are given",
        ),
        ([*PAPER, *("--slope", "cpr_ssu=0"), *("--slope-error", "1")], 2, "slope must be above 0"),
        ([*PAPER, "--memory-price", "0.1"], 2, "give --table-gb too"),
        ([*PAPER, "--machines", "9"], 2, "--machines is for --price"),
    ],
)  # fmt: skip
def test_what_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    assert run(monkeypatch, *arguments) == code
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_costs_are_measured_from_a_repository(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import torch

    import emberkeep as ek

    bags = ek.EmbeddingBags([ek.Table("item", rows=64, dim=4)], optimizer=ek.SGD(lr=0.1))
    arguments = [*PAPER[:6], "--repository", str(tmp_path / "run"), "--json"]
    with ek.Keeper(
        tmp_path / "run", bags, bags.optimizer, strategy=ek.incremental(every=1)
    ) as kept:
        for step in range(3):
            bags({"item": torch.arange(8) + step}).sum().backward()
            bags.optimizer.step()
            bags.optimizer.zero_grad()
            kept.step()
            kept.wait()
            if step == 0:
                assert run(monkeypatch, *arguments) == 2
                assert "no version in" in capsys.readouterr().err
    assert run(monkeypatch, *arguments) == 0
    printed = capsys.readouterr()
    job = json.loads(printed.out)["job"]
    assert 0 < job["save_hours"] < 1
    assert 0 < job["load_hours"] < 1
    assert "by its counters" in printed.err
    assert "read and decoded" in printed.err


@pytest.mark.long
def test_nodes_that_fail_together_are_planned_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """145 failures of about 10 nodes each in 1,450 lines: ten times the PLS of one at a time."""
    random, start = np.random.default_rng(0), datetime(2020, 1, 1, tzinfo=timezone.utc)
    times = start + np.cumsum(random.exponential(10.0, 145)) * timedelta(hours=1)
    record = tmp_path / "failures.csv"
    record.write_text(
        "started,node\n"
        + "".join(f"{t.isoformat()},n{n}\n" for t in times for n in random.permutation(40)[:10])
    )
    arguments = [
        *("--duration", "100h"), *("--shards", "40"), *("--save-time", "1min"), "--json",
        *("--load-time", "1min"), *("--failures", str(record)), *("--most-pls", "1"),
    ]  # fmt: skip
    assert run(monkeypatch, *arguments) == 0
    together = json.loads(capsys.readouterr().out)
    assert together["job"]["failing_together"] == 10
    assert run(monkeypatch, *arguments, "--fail-together", "1") == 0
    alone = json.loads(capsys.readouterr().out)
    share = together["strategies"]["partial"]["pls"] / alone["strategies"]["partial"]["pls"]
    assert share == pytest.approx(10, rel=0.1)
    assert "r=10" in together["strategies"]["parity"]["note"]


def test_seconds_are_not_hours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = tmp_path / "failures.csv"
    gaps = np.random.default_rng(0).exponential(56 * 3600, 200)
    record.write_text("elapsed_seconds\n" + "".join(f"{gap:.0f}\n" for gap in gaps))
    arguments = [*PAPER[:2], *PAPER[4:10], "--failures", str(record), "--json", "--jobs", "0"]
    assert run(monkeypatch, *arguments) == 0
    mtbf = json.loads(capsys.readouterr().out)["job"]["mtbf_hours"]
    assert mtbf == pytest.approx(56, rel=0.2)


def test_what_was_measured_is_planned_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured = tmp_path / "measured.json"
    inputs = Inputs(
        save=timedelta(minutes=5.7), load=timedelta(minutes=2.5), parity_slowdown=0.001,
        reschedule=timedelta(minutes=2.5), table_nbytes=4 * 10**9, rows=10**7,
        quantized=Measurement(save=timedelta(minutes=1), load=timedelta(minutes=1), bits=4),
    )  # fmt: skip
    measured.write_text(json.dumps(inputs.to_dict()))
    assert read_inputs(measured) == inputs
    assert run(monkeypatch, *PAPER[:6], "--measured", str(measured), "--json", "--pls", "0") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["job"]["save_hours"] == pytest.approx(5.7 / 60)
    assert printed["recommended"] == "parity"
    assert printed["strategies"]["parity"]["memory_nbytes"] == 10**9
    assert printed["strategies"]["quantized"]["accuracy_loss"] > 0
    for text in ("[]", '{"format": 1, "save_minutes": 5}', '{"format": 1, "save_seconds": "5"}'):
        measured.write_text(text)
        assert run(monkeypatch, *PAPER[:6], "--measured", str(measured)) == 3
        assert str(measured) in capsys.readouterr().err
