"""Metrics over HTTP."""

from __future__ import annotations

import urllib.request

from emberkeep.blobs import MemoryStore
from tests.unit.keeper.test_keeper import Run


def test_metrics_over_http() -> None:
    run = Run()
    with run.keeper(MemoryStore(), metrics_port=0) as keeper:
        run.step(keeper)
        keeper.wait()
        url = f"http://127.0.0.1:{keeper.metrics_port}/metrics"
        with urllib.request.urlopen(url) as answer:
            text = answer.read().decode()
    assert text == keeper.metrics() or "emberkeep_versions_total 1.0\n" in text
    assert "# TYPE emberkeep_stall_seconds_total counter" in text
    assert "emberkeep_step 1.0\n" in text
