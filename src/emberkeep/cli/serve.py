"""`emberkeep serve`: one shard server."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from datetime import datetime, timezone
from typing import Annotated, Any

import typer

from emberkeep.cli._options import Authority, TlsCertificate, TlsKey, TokenFile
from emberkeep.cli._shell import command
from emberkeep.errors import ConfigError

_DRAIN_SECONDS = 30.0


@command
def serve(
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Serve shard I of N alone; any place if not given.", show_default=""
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; anything but loopback needs TLS and a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 7070,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads for rows; the number of cores by default.")
    ] = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    authority: Authority = None,
    token_file: TokenFile = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Also serve Prometheus metrics there."),
    ] = None,
    until_stdin_closes: Annotated[
        bool, typer.Option("--until-stdin-closes", help="End when standard input does.")
    ] = False,
) -> None:
    """Run one shard server. It starts empty; the trainer gives it tables and rows.

    Prints its address when it is ready, then logs JSON lines on stderr. SIGTERM ends it when the
    requests under way are answered.
    """
    place = _place(shard)
    from emberkeep.runtime.background import Worker
    from emberkeep.runtime.metrics import MetricsServer
    from emberkeep.server.flight_server import ShardServer
    from emberkeep.server.server_warmup import warm_up
    from emberkeep.server.shard_service import ShardService
    from emberkeep.wire.security import Security, read_token

    security = Security(
        token=read_token(token_file), certificate=tls_certificate, key=tls_key, authority=authority
    )
    security.check_listening(host)
    metrics_at = _metrics_at(metrics)
    warm_up()
    served = ShardService(threads=threads, place=place, on_event=_log)
    server = ShardServer(served, host=host, port=port, security=security)
    status: dict[str, Any] = {"address": server.address, "pid": os.getpid(), "life": served.life}
    if metrics_at is not None:
        try:
            exporter = MetricsServer(served.exposition, metrics_at[1], metrics_at[0])
        except OSError as error:
            raise ConfigError(f"--metrics {metrics}: {error.strerror}") from None
        status["metrics"] = f"http://{metrics_at[0]}:{exporter.port}"

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if until_stdin_closes:
        # However reading ends: a server must not outlive what started it.
        stdin = Worker("emberkeep-stdin")
        stdin.do(sys.stdin.buffer.read, lambda _: stop.set())
    _log("listening", status)
    print(json.dumps(status), flush=True)
    stop.wait()
    drained = served.drain(_DRAIN_SECONDS)
    _log("stopped", {"drained": drained})
    # Streams that clients hold open would keep Flight's own shutdown waiting.
    os._exit(0)


def _place(shard: str | None) -> tuple[int, int] | None:
    if shard is None:
        return None
    index, slash, count = shard.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ConfigError(f"--shard is I/N with I from 0 to below N, such as 0/4, not {shard!r}")
    return int(index), int(count)


def _metrics_at(given: str | None) -> tuple[str, int] | None:
    if given is None:
        return None
    host, _, port = given.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--metrics is a port or HOST:PORT, not {given!r}")
    return host or "127.0.0.1", int(port)


def _log(event: str, details: dict[str, Any]) -> None:
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    print(json.dumps({"time": now, "event": event, **details}), file=sys.stderr, flush=True)
