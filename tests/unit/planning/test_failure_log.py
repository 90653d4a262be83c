"""Records of failures in the shapes in which people have them."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest

from emberkeep.errors import ConfigError, DataError
from emberkeep.planning.failure_log import read_failures

GAPS = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("text", "gaps", "reading"),
    [
        (
            (
                "started,node\n2001-01-01T00:00:00,1\n2001-01-01T01:00:00,2\n2001-01-01T03:00:00,1\n"
                "2001-01-01T06:00:00,1\n2001-01-01T10:00:00,3\n2001-01-01T15:00:00,3\n"
                "2001-01-01T21:00:00,3\n"
            ),
            GAPS,
            "column 'started' holds the times when failures began",
        ),
        (
            (
                "01/01/2001 00:00;x\n01/01/2001 01:00;x\n01/01/2001 03:00;x\n01/01/2001 06:00;x\n"
                "01/01/2001 10:00;x\n01/01/2001 15:00;x\n01/01/2001 21:00;x\n"
            ),
            GAPS,
            "column 1 holds the times when failures began",
        ),
        (
            (
                "when\n1000000000\n1000003600\n1000010800\n1000021600\n1000036000\n1000054000\n"
                "1000075600\n"
            ),
            GAPS,
            "column 'when' holds the times when failures began",
        ),
        ("ttf_min\n60\n120\n180\n240\n300\n360\n", GAPS, "holds minutes until a failure"),
        ("job\tlifetime (days)\na\t2\nb\t1\nc\t4\nd\t3\ne\t5\n", [48, 24, 96, 72, 120], "days"),
        ("6\n5\n4\n3\n2\n1\n", GAPS[::-1], "column 1 holds hours until a failure"),
        ("0\n1\n3\n6\n10\n15\n21\n", GAPS, "hours from a start to each failure"),
    ],
)
def test_shapes(tmp_path: Path, text: str, gaps: list[float], reading: str) -> None:
    path = tmp_path / "failures.csv"
    path.write_text(text)
    log = read_failures(path)
    np.testing.assert_allclose(log.gaps_hours, gaps)
    assert reading in log.taken[0]
    assert log.mtbf.total_seconds() == pytest.approx(3600 * np.mean(gaps))


def test_what_begins_together_is_one_failure(tmp_path: Path) -> None:
    path = tmp_path / "failures.csv"
    hours = [0, 0, 1, 3, 6, 6, 6, 10, 15]
    lines = [f"2001-01-01T{hour:02}:00:00Z,n{i % 4}" for i, hour in enumerate(hours)]
    path.write_text("# exported\nfailed_at,host\n" + "\n".join(reversed(lines)) + "\nunknown,n9\n")
    log = read_failures(path)
    np.testing.assert_allclose(log.gaps_hours, [1, 2, 3, 4, 5])
    assert log.together == pytest.approx(9 / 6)
    assert log.nodes == 5
    assert "1 of 10 lines have no value there" in log.taken
    assert "9 lines are 6 failures: some began together" in log.taken[2]


def test_a_column_by_name(tmp_path: Path) -> None:
    path = tmp_path / "failures.csv"
    path.write_text(
        "started,repair_min\n" + "".join(f"2001-01-0{d},{60 * d}\n" for d in range(9, 0, -1))
    )
    assert read_failures(path).mtbf.total_seconds() == pytest.approx(24 * 3600)
    assert read_failures(path, column="repair_min").mtbf.total_seconds() == pytest.approx(5 * 3600)
    with pytest.raises(ConfigError, match="no column 'ended': it has started, repair_min"):
        read_failures(path, column="ended")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no lines"),
        ("started\n", "a header and no lines"),
        ("a,b\nx,y\n", "no column holds times or numbers"),
        ("h\n3\n2\n1\n", "3 gaps between failures are too few to fit, there must be 5: give"),
        ("gap_h\n" + "-3\n" * 9, "9 of 9 values are not above 0, and left out: give --mtbf"),
    ],
)
def test_what_is_no_record(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "failures.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        read_failures(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_failures(tmp_path / "none.csv")
    with pytest.raises(DataError, match="is a directory"):
        read_failures(tmp_path)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        read_failures(tmp_path / "binary.csv")


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("seconds", 3600), ("elapsed_seconds", 3600), ("time_seconds", 3600), ("secs", 3600),
        ("minutes", 60), ("uptime_mins", 60), ("ttf (ms)", 3_600_000), ("hours", 1), ("hrs", 1),
        ("days", 1 / 24), ("gap", 1),
    ],
)  # fmt: skip
def test_units_are_those_that_a_column_names(tmp_path: Path, name: str, factor: float) -> None:
    path = tmp_path / "failures.csv"
    path.write_text(f"{name}\n" + "".join(f"{gap * factor}\n" for gap in [3.0, 1.0, *GAPS]))
    np.testing.assert_allclose(read_failures(path).gaps_hours, [3.0, 1.0, *GAPS])


def test_machines_that_fail_together_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "failures.csv"
    lines = [f"2001-01-01T{hour:02}:00:00,n{node}" for hour in range(8) for node in range(10)]
    # The same machine twice at one moment is one machine.
    path.write_text("started,node\n" + "\n".join([*lines, lines[0]]) + "\n")
    log = read_failures(path)
    assert log.failures == 8
    assert log.counts == (10,) * 8
    assert log.together == 10
    assert "81 lines are 8 failures" in log.taken[1]


def test_machines_that_fail_seconds_later_are_the_same_failure(tmp_path: Path) -> None:
    """Monitoring sees the machines of one failure one after another: they were planned as failures
    of one machine each, ten times as many."""
    path = tmp_path / "failures.csv"
    lines = [f"2001-01-01T{hour:02}:0{n // 6}:{n % 6}7,n{n}" for hour in range(8) for n in range(9)]
    path.write_text("started,node\n" + "\n".join(lines) + "\n")
    log = read_failures(path)
    assert log.counts == (9,) * 8
    np.testing.assert_allclose(log.gaps_hours, [1.0] * 7)
    # A log to the minute: the next minute is another failure.
    path.write_text("started\n" + "".join(f"2001-01-01T00:0{m}:00\n" for m in range(7)))
    assert read_failures(path).failures == 7


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("failed", "1110100"), ("censored", "0001011"),
        ("status", ["failed", "crashed", "error", "finished", "failed", "completed", "running"]),
    ],
)  # fmt: skip
def test_runs_that_did_not_fail_are_time_without_a_failure(
    tmp_path: Path, column: str, values: list[str]
) -> None:
    path = tmp_path / "runs.csv"
    hours = [5.0, 2.0, 4.0, 30.0, 3.0, 20.0, 10.0]
    extra = "6,{0}\n1,{0}\n".format({"1": "1", "0": "0", "f": "failed"}[values[0][0]])
    lines = "".join(f"{hour},{value}\n" for hour, value in zip(hours, values, strict=True))
    path.write_text(f"uptime,{column}\n{lines}{extra}")
    log = read_failures(path)
    assert log.gaps_hours.tolist() == [5.0, 2.0, 4.0, 3.0, 6.0, 1.0]
    assert log.censored_hours.tolist() == [30.0, 20.0, 10.0]
    # 81 h were watched for 6 failures; of the failed runs alone it would be 3.5 h.
    assert log.mtbf.total_seconds() / 3600 == pytest.approx(81 / 6)
    assert "3 runs did not fail" in " ".join(log.taken)


def test_the_end_of_a_log_is_time_without_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "failures.csv"
    path.write_text("started\n" + "".join(f"2001-01-01T0{hour}:00:00\n" for hour in range(7)))
    end = datetime(2001, 1, 2, tzinfo=timezone.utc)
    log = read_failures(path, until=end)
    assert log.censored_hours.tolist() == [18.0]
    assert log.mtbf.total_seconds() / 3600 == pytest.approx(24 / 6)
    with pytest.raises(ConfigError, match="before its last failure"):
        read_failures(path, until=datetime(2000, 1, 1, tzinfo=timezone.utc))


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([{"hours": h, "node": "a"} for h in (0, 1, 3, 6, 10, 15, 21)]),
        json.dumps({"failures": [{"hours": h} for h in (0, 1, 3, 6, 10, 15, 21)], "job": {}}),
        "\n".join(json.dumps({"started": 1e9 + 3600 * h}) for h in (0, 1, 3, 6, 10, 15, 21)),
        json.dumps([0, 1, 3, 6, 10, 15, 21]),
        json.dumps([{"hours": h, "shards": [1, 2]} for h in (0, 1, 3, 6, 10, 15, 21)]),
    ],
)
def test_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "failures.json"
    path.write_text(text)
    log = read_failures(path)
    np.testing.assert_allclose(log.gaps_hours, GAPS)
    assert log.together == (2 if "shards" in text else 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{oops", "is no JSON"), ("{}", "a JSON log is a list of failures"), ("[[1], [2]]", "lists")],
)
def test_json_that_is_no_log(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "failures.json"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        read_failures(path)


@pytest.mark.parametrize(
    ("name", "per_second"),
    [("timestamp", 1), ("timestamp", 1e3), ("time_ms", 1e3), ("at", 1e6), ("ts_ns", 1e9)],
)
def test_time_since_1970_in_any_unit(tmp_path: Path, name: str, per_second: float) -> None:
    path = tmp_path / "failures.csv"
    seconds = [1_700_000_000 + 3600 * hours for hours in (0, 1, 3, 6, 10, 15)]
    path.write_text(name + "\n" + "".join(f"{second * per_second:.0f}\n" for second in seconds))
    np.testing.assert_allclose(read_failures(path).gaps_hours, [1, 2, 3, 4, 5])


def test_long_times_until_failures_are_no_dates(tmp_path: Path) -> None:
    path = tmp_path / "failures.csv"
    hours = [30, 50, 80, 29, 60]  # more than 10^8 milliseconds
    path.write_text("uptime_ms\n" + "".join(f"{3_600_000 * hour}\n" for hour in hours))
    np.testing.assert_allclose(read_failures(path).gaps_hours, hours)


def test_times_beyond_all_clocks(tmp_path: Path) -> None:
    path = tmp_path / "failures.csv"
    path.write_text("ttf_h\n1e300\n2\n3\n5\n8\n")
    with pytest.raises(DataError, match=r"'ttf_h' holds 1e\+300 hours, which is no time"):
        read_failures(path)


def test_what_an_entry_lists_is_one_failure_after_one_gap(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    log.write_text(json.dumps([{"uptime_hours": h, "nodes": ["a", "b"]} for h in (5, 1, 9, 3, 8)]))
    found = read_failures(log)
    assert found.gaps_hours.tolist() == [5, 1, 9, 3, 8]
    assert found.failures == 5


def test_an_entry_that_lists_nothing_is_a_failure_all_the_same(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    entries = [
        {"time": f"2024-01-{day:02d}T00:00", "nodes": [] if day == 3 else ["a"]}
        for day in (1, 2, 3, 4, 6, 9)
    ]
    log.write_text(json.dumps(entries))
    assert read_failures(log).gaps_hours.tolist() == pytest.approx([24, 24, 24, 48, 72])


def test_every_exit_code_but_0_is_a_failure(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    runs = [(5, 137), (1, 0), (9, -9), (3, 1), (8, 0), (2, 139), (7, 137)]
    log.write_text("uptime_hours,exit_code\n" + "".join(f"{h},{code}\n" for h, code in runs))
    found = read_failures(log)
    assert found.gaps_hours.tolist() == [5, 9, 3, 2, 7]
    assert found.censored_hours.tolist() == [1, 8]


@pytest.mark.parametrize(
    ("name", "text"),
    [("log.csv", 'start,text\n2024-01-01,"' + 140_000 * "x"), ("log.json", 100_000 * "[")],
)
def test_files_that_no_reader_gets_through_are_refused(
    name: str, text: str, tmp_path: Path
) -> None:
    log = tmp_path / name
    log.write_text(text)
    with pytest.raises(DataError, match=r"cannot be read as CSV|is no JSON"):
        read_failures(log)
