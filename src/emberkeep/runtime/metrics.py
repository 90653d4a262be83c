"""What Prometheus reads: its text format, and a small server for it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from emberkeep.runtime.background import Retry, Worker, end_all

Sample = tuple[str, str, str, float]
"""Name, kind, help and value."""


def exposition(samples: Iterable[Sample], labels: str = "") -> str:
    """Counters and gauges in the text format; `labels` as `{shard="3"}`."""
    lines = []
    for name, kind, text, value in samples:
        lines += [
            f"# HELP emberkeep_{name} {text}",
            f"# TYPE emberkeep_{name} {kind}",
            f"emberkeep_{name}{labels} {value}",
        ]
    return "\n".join(lines) + "\n"


class Histogram:
    """Durations in seconds, counted by bucket. Safe from several threads."""

    BOUNDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 5.0)

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._counts = [0] * (len(self.BOUNDS) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect_left(self.BOUNDS, seconds)] += 1
            self._sum += seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    def exposition(self, labels: str = "") -> str:
        with self._lock:
            counts, total = list(self._counts), self._sum
        inner = labels.strip("{}")
        name = f"emberkeep_{self._name}"
        lines = [f"# HELP {name} {self._text}", f"# TYPE {name} histogram"]
        below = 0
        for bound, count in zip((*self.BOUNDS, float("inf")), counts, strict=True):
            below += count
            end = "+Inf" if bound == float("inf") else f"{bound:g}"
            inside = ",".join(part for part in (inner, f'le="{end}"') if part)
            lines.append(f"{name}_bucket{{{inside}}} {below}")
        return (
            "\n".join([*lines, f"{name}_sum{labels} {total}", f"{name}_count{labels} {below}"])
            + "\n"
        )


class MetricsServer:
    """Answers GET with an exposition, on the loopback interface unless configured otherwise."""

    def __init__(self, read: Callable[[], str], port: int, host: str = "127.0.0.1") -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = read().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Requests are nobody's news."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        # What ends it is not its state: it listens on, and serves again.
        self._worker = Worker("emberkeep-metrics", self._server.serve_forever, retry=Retry())
        self._worker.wake()

    def close(self) -> None:
        end_all(
            *([] if self._worker.stopped else [self._server.shutdown]),
            self._server.server_close,
            self._worker.close,
        )
