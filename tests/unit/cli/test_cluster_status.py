"""What `emberkeep cluster status` makes of what servers say."""

from __future__ import annotations

from typing import Any

from emberkeep.cli import _cluster_status
from emberkeep.cli._cluster_status import add_rates, cells, notes, text

NOW = 1_800_000_000.0


def status(shard: int = 0, **given: Any) -> dict[str, Any]:
    metrics = {"rows_pulled": 600, "rows_pushed": 400, "version": 7.0, "version_at": NOW - 61,
               "pls": 0.25}  # fmt: skip
    return {
        "shard": shard, "address": "grpc+tls://10.0.0.1:43867", "life": "a", "state": "serving",
        "lapsed": False, "node": "worker-7.example.org", "pid": 4_000_000,
        "memory_nbytes": 12_345_678_901, "rows": 123_456_789, "metrics": metrics,
        "run": {"id": "0123456789abcdef", "name": "nightly", "trainer": "head/9", "step": 140_000},
        "lease_age_seconds": 3.2, "lease_seconds": 15.0, "log": f"/state/logs/r/server-{shard}.log",
        "last_event": {"event": "serving", "at": NOW - 42}, **given,
    }  # fmt: skip


def rates(now: dict[str, Any], before: dict[str, Any], seconds: float = 2.0) -> Any:
    add_rates([now], [before], seconds)
    return now["rows_per_second"]


def moved(pulled: int, pushed: int = 0) -> dict[str, Any]:
    return {"metrics": {"rows_pulled": pulled, "rows_pushed": pushed}}


def test_rates_come_from_two_looks_and_are_never_negative() -> None:
    assert rates(status(**moved(900, 700)), status(**moved(600, 400))) == 300
    assert rates(status(**moved(600)), status(**moved(600))) == 0
    # Another process is in the server's place: nothing is known of the time between.
    assert rates(status(life="b", **moved(900)), status(**moved(600))) is None
    assert rates(status(**moved(0)), status(**moved(353_335))) is None
    lost = {"shard": 0, "address": "", "state": "lost", "error": "gone"}
    assert rates(status(), lost) is None
    assert rates(dict(lost), status()) is None
    assert cells({**lost, "rows_per_second": None}, NOW)[6] == ""


def test_a_line_has_node_process_memory_run_step_protection_and_last_event() -> None:
    whole = {"missing_rows": 0, "unprotected_since": 0.0, "unprotected_stripes": 0, "lag": 0}
    shown = cells(status(rows_per_second=1234.5, parity=whole), NOW)
    assert shown == (
        "0", "serving", "worker-7:43867", "4000000", "12.3GB", "123M", "1.23k", "01234567",
        "140000", "whole", "serving 42s",
    )  # fmt: skip
    assert cells(status(lapsed=True), NOW)[1] == "expired"
    assert cells(status(address="grpc+unix:///run/7070"), NOW)[2] == "worker-7"
    assert cells(status(parity={**whole, "missing_rows": 1_200_000}), NOW)[9] == "1.2M missing"
    assert cells(status(parity={**whole, "unprotected_since": NOW}), NOW)[9] == "unprotected"
    assert cells(status(parity={**whole, "lag": 3}), NOW)[9] == "lag 3"


def test_runs_logs_and_what_is_wrong_stand_below() -> None:
    parity = {"missing_rows": 0, "unprotected_since": NOW, "unprotected_stripes": 0, "lag": 0}
    unprotected = status(1, parity=parity, protection="unprotected since 08:00:00Z")
    gone = {"shard": 2, "address": "", "state": "lost", "error": "127.0.0.1:1 did not answer"}
    run = (
        "run 01234567 (nightly); trained by head/9; version 7, 61 s old; PLS 0.25; "
        "lease renewed 3 s ago of 15 s"
    )
    assert notes([status(), unprotected, gone], NOW) == [
        run,
        "shard 2: 127.0.0.1:1 did not answer",
        "shard 1 is unprotected since 08:00:00Z",
        "logs on worker-7.example.org: /state/logs/r/ server-0.log, server-1.log",
    ]


def test_a_server_with_a_tier_has_its_hit_rate_its_place_and_its_batch() -> None:
    files = [{"batch": 40, "damaged": 0}, {"batch": 40, "damaged": 0}]
    use = {"hit_rate": 0.9321, "pulled": 12_345_678, "wait_seconds": 1.25}
    tier = {"path": "/nvme/run", "memory_nbytes": 48 * 10**9, "files": files, "use": use}
    begins = "shard 0 keeps its rows in /nvme/run, 48GB of them in memory"
    used = f"{begins}; 93.2% of 12.3M pulled rows were there; 1.2 s of waiting"

    def shown(**given: Any) -> tuple[str, str]:
        found = status(tier={**tier, **given})
        (line,) = (line for line in notes([found, status(1)], NOW) if "keeps its rows" in line)
        return cells(found, NOW)[9], line

    assert shown() == ("tier 93.2%", f"{used}; batch 40 is durable")
    assert shown(files=[], use=None) == ("tier", begins)  # nobody trains there yet
    # Between two batches, and before the first, nothing is said of them.
    for batches in ((40, 41), (None, None)):
        found = [{"batch": batch, "damaged": 0} for batch in batches]
        assert shown(files=found) == ("tier 93.2%", used)
    damaged = [files[0], {"batch": 40, "damaged": 2}]
    assert shown(files=damaged)[1] == f"{used}; batch 40 is durable; 2 segments are damaged"
    assert cells(status(), NOW)[9] == ""


def test_lines_fit_120_characters_whatever_servers_say() -> None:
    long = status(
        65_535, node="a-very-long-name-of-a-node-in-a-large-data-center", rows_per_second=9.99e11,
        state="recovering", parity={"missing_rows": 999_999, "lag": 0, "unprotected_stripes": 0},
        last_event={"event": "background_failed", "at": NOW - 86400 * 365},
        rows=999_499_999, memory_nbytes=999_499_999_999,
    )  # fmt: skip
    long["run"]["step"] = 99_999_999
    table = text([long, status()]).splitlines()[:3]
    assert max(map(len, table)) <= 120, table
    assert min(len(line.split()) for line in table) >= 10
    assert sum(_cluster_status._MOST.values()) + 2 * (len(_cluster_status._MOST) - 1) == 120
