"""The page of metrics: whatever it shows, Prometheus can read it."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from emberkeep.erasure.status import ParityStatus
from emberkeep.keeper.costs import Ledger
from emberkeep.runtime.metrics import Histogram, MetricsServer, Registry, families

STATUS = ParityStatus(
    k=2, r=1, lag=0, unprotected_stripes=0, missing_rows=0, rebuilt_rows=0, rebuilt_nbytes=0,
    degraded_reads=0, recoveries=0, messages=7, sent_nbytes=0, updates=(1, 2),
)  # fmt: skip


def values_of(text: str) -> dict[tuple[str, str], float]:
    """Every sample by name and labels; a heading that occurs twice is refused."""
    found: dict[tuple[str, str], float] = {}
    headings = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(headings) == len(set(headings))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            assert (sample.name, labels) not in found
            found[sample.name, labels] = sample.value
    return found


def test_a_protected_cluster_does_not_make_the_page_unreadable() -> None:
    """`emberkeep_parity_protected True` did."""
    found = values_of(Ledger().exposition([STATUS]))
    assert found["emberkeep_parity_protected", ""] == 1
    assert found["emberkeep_parity_messages_total", ""] == 7
    assert found["emberkeep_versions_total", ""] == 0
    assert found["process_resident_memory_bytes", ""] > 10e6


def test_several_clusters_share_one_heading() -> None:
    found = values_of(Ledger().exposition([STATUS, STATUS]))
    assert [key for key in found if key[0] == "emberkeep_parity_protected"] == [
        ("emberkeep_parity_protected", "cluster=0"), ("emberkeep_parity_protected", "cluster=1"),
    ]  # fmt: skip


def test_labels_may_hold_anything() -> None:
    named = {"run": 'a "b"\\\n{c}'}
    text = Registry(lambda: families((named, [("x", "gauge", "help\nme", True)]))).text()
    (family,) = (f for f in text_string_to_metric_families(text) if f.name == "emberkeep_x")
    assert family.samples[0].labels == named
    assert family.samples[0].value == 1


def test_counters_and_they_alone_end_in_total() -> None:
    with pytest.raises(ValueError, match="end in _total"):
        families(({}, [("pauses_sum", "counter", "", 1.0)]))


def test_a_histogram_counts_what_is_below_each_bound() -> None:
    histogram = Histogram("pull_seconds", "how long")
    for seconds in (5e-5, 0.003, 0.003, 99):
        histogram.add(seconds)
    found = values_of(Registry(lambda: [histogram.family({"shard": "1"})]).text())
    name = "emberkeep_pull_seconds"
    below = {key[1]: value for key, value in found.items() if key[0] == f"{name}_bucket"}
    assert below["le=0.0001,shard=1"] == 1
    assert below["le=0.005,shard=1"] == 3
    assert below["le=+Inf,shard=1"] == found[f"{name}_count", "shard=1"] == 4
    assert found[f"{name}_sum", "shard=1"] == pytest.approx(99.00605)


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_readiness_and_metrics_answer_for_themselves() -> None:
    reasons: list[str | None] = [None, "it is empty"]
    pages: list[Callable[[], str]] = [lambda: "page\n", lambda: str(1 / 0)]
    server = MetricsServer(lambda: pages[0](), 0, not_ready=lambda: reasons[0])
    try:
        assert ask(server.port, "/healthz") == (200, "alive\n")
        assert ask(server.port, "/readyz") == (200, "ready\n")
        assert ask(server.port, "/metrics?x=1") == (200, "page\n")
        assert ask(server.port, "/")[0] == ask(server.port, "/metrics/x")[0] == 404
        reasons.pop(0)
        pages.pop(0)
        assert ask(server.port, "/readyz") == (503, "it is empty\n")
        assert ask(server.port, "/metrics") == (500, "ZeroDivisionError: division by zero\n")
        assert ask(server.port, "/healthz") == (200, "alive\n")
    finally:
        server.close()
