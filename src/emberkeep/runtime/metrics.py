"""What Prometheus reads: one registry for each process, and a small server for its page.

`prometheus_client` writes the text, so that a page which cannot be parsed cannot be written. It is
loaded when the first page is made.
"""

from __future__ import annotations

import ssl
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from emberkeep.errors import ConfigError
from emberkeep.runtime.background import Retry, Worker, end_all

if TYPE_CHECKING:
    from prometheus_client import Metric

_PATIENCE_SECONDS = 10.0

Sample = tuple[str, str, str, float]
"""Name, kind ("counter" or "gauge"), help and value. The name of a counter ends in `_total`."""
Labels = Mapping[str, str]
Source = Callable[[], Iterable["Metric"]]

_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def families(*groups: tuple[Labels, Iterable[Sample]]) -> list[Metric]:
    """Samples as metrics, those of one name under one heading, whatever labels they have."""
    from prometheus_client import Metric

    found: dict[str, Metric] = {}
    for labels, samples in groups:
        for name, kind, text, value in samples:
            if (kind == "counter") != name.endswith("_total"):
                raise ValueError(f"{name} is a {kind}: counters, and they alone, end in _total")
            full = f"emberkeep_{name}"
            if full not in found:
                found[full] = Metric(full.removesuffix("_total"), text, kind)
            found[full].add_sample(full, dict(labels), float(value))
    return list(found.values())


class Registry:
    """The metrics of one process: `sources` are asked for theirs whenever the page is read.

    The page ends with what the system knows of the process (`process_resident_memory_bytes` and
    others).
    """

    def __init__(self, *sources: Source) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector

        self._registry = CollectorRegistry()
        for source in sources:
            self._registry.register(_Collector(source))
        ProcessCollector(registry=self._registry)

    def text(self) -> str:
        from prometheus_client import generate_latest

        return generate_latest(self._registry).decode()


class _Collector:
    """A source, as `prometheus_client` wants it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        return ()  # not known before it is asked

    def collect(self) -> Iterator[Metric]:
        yield from self._source()


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

    def family(self, labels: Labels) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        with self._lock:
            counts, total = list(self._counts), self._sum
        buckets, below = [], 0
        for bound, count in zip((*map(str, self.BOUNDS), "+Inf"), counts, strict=True):
            below += count
            buckets.append((bound, below))
        family = HistogramMetricFamily(f"emberkeep_{self._name}", self._text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, total)
        return family


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off, or whose TLS is wrong, is nobody's news."""


class MetricsServer:
    """Answers GET on the loopback interface unless configured otherwise.

    - `/metrics`: the page that `read` returns.
    - `/healthz`: the process is alive.
    - `/readyz`: 200, or 503 with the reason that `not_ready` returns.

    With `tls` it speaks https. With `admits` a request brings a token, as `Authorization: Bearer`,
    or is refused.
    """

    @classmethod
    def open(
        cls, read: Callable[[], str], port: int, *, not_ready: Callable[[], str | None]
    ) -> MetricsServer:
        """On the loopback interface; `ConfigError` if the port cannot be had."""
        try:
            return cls(read, port, not_ready=not_ready)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be served on port {port}: {error.strerror}; choose another "
                "metrics_port, or 0 for any free one"
            ) from None

    def __init__(
        self,
        read: Callable[[], str],
        port: int,
        host: str = "127.0.0.1",
        *,
        not_ready: Callable[[], str | None] = lambda: None,
        tls: ssl.SSLContext | None = None,
        admits: Callable[[str], bool] | None = None,
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _PATIENCE_SECONDS  # who connects and says nothing keeps no thread

            def do_GET(self) -> None:
                kind, _, token = self.headers.get("Authorization", "").partition(" ")
                if admits is not None and not (kind == "Bearer" and admits(token.strip())):
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", "Bearer")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                status, content = self._answer(self.path.partition("?")[0])
                body = content.encode()
                self.send_response(status)
                self.send_header("Content-Type", _TEXT)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _answer(self, path: str) -> tuple[int, str]:
                if path == "/healthz":
                    return 200, "alive\n"
                try:
                    if path == "/metrics":
                        return 200, read()
                    if path == "/readyz":
                        reason = not_ready()
                        return (200, "ready\n") if reason is None else (503, f"{reason}\n")
                except Exception as error:  # a page that fails is an answer, not a silence
                    return 500, f"{type(error).__name__}: {error}\n"
                return 404, "there are /metrics, /healthz and /readyz\n"

            def log_message(self, format: str, *args: Any) -> None:
                """Requests are nobody's news."""

        self._server = _Server((host, port), Handler)
        if tls is not None:
            # The handshake is the thread's that answers: one who drags it out keeps nobody waiting.
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
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
