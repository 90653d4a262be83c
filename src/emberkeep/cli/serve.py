"""`emberkeep serve`: one shard server."""

from __future__ import annotations

import gc
import json
import os
import signal
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emberkeep.cli._options import Authority, TlsCertificate, TlsKey, TokenFile, option, read_time
from emberkeep.cli._shell import command
from emberkeep.errors import ConfigError, SecurityError

if TYPE_CHECKING:
    from emberkeep.runtime.metrics import MetricsServer
    from emberkeep.server.shard_service import ShardService
    from emberkeep.wire.security import Security

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
        str,
        typer.Option(help="Where to listen; all but loopback needs TLS, --authority and a token."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 7070,
    socket: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="On loopback: listen there instead of where --port stands for."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads for rows; the number of cores by default.")
    ] = None,
    tier: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Rows live in files below this directory, the hot ones in memory."
        ),
    ] = None,
    tier_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="For the hot rows of --tier, such as 48GB; 2GB if not given."
        ),
    ] = None,
    tier_exclusive: Annotated[
        bool,
        typer.Option(
            "--tier-exclusive",
            help="No other process will ever use --tier: admits a file system without locks.",
        ),
    ] = False,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    authority: Authority = None,
    token_file: TokenFile = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Also serve Prometheus metrics there; off loopback with TLS and the token.",
        ),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where events go; stderr by default.")
    ] = None,
    grace: Annotated[
        str, option("--grace", "How long to serve on for its run after SIGTERM or SIGINT.")
    ] = "2min",
    keep_rows_for: Annotated[
        str,
        option(
            "--keep-rows-for",
            "How long to keep rows for the next trainer when one is gone; then the server ends.",
        ),
    ] = "30min",
    until_stdin_closes: Annotated[
        bool,
        typer.Option(
            "--until-stdin-closes", help="End when standard input closes, or says anything."
        ),
    ] = False,
    parent: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="PID", help="The process that starts the server: end when it is gone."
        ),
    ] = None,
) -> None:
    """Run one shard server. It starts empty; the trainer gives it tables and rows.

    On loopback only processes of the same user reach it, without any configuration. Prints its
    address when it is ready, then logs JSON lines, on stderr or in --log. SIGTERM or SIGINT ends it
    once its run has ended, the second one as soon as the requests under way are answered. So does a
    trainer that is gone for --keep-rows-for; a server whose run has ended waits for the next.
    """
    place = _place(shard)
    patience = read_time("--grace", grace)
    kept_for = read_time("--keep-rows-for", keep_rows_for)
    from emberkeep.blobs.system_disk import Disk
    from emberkeep.runtime.background import Worker
    from emberkeep.runtime.event_log import EventLog
    from emberkeep.server.flight_server import ShardServer
    from emberkeep.server.server_end import ServerEnd
    from emberkeep.server.server_warmup import warm_up
    from emberkeep.server.server_watch import Parent, ServerWatch
    from emberkeep.server.shard_service import ShardService
    from emberkeep.tables import Tier
    from emberkeep.tiers.directory import check_usable
    from emberkeep.wire import private_socket
    from emberkeep.wire.security import Security, is_loopback, read_token

    started_by = None if parent is None else Parent(parent)
    if tier is None and tier_exclusive:
        raise ConfigError("--tier-exclusive is for --tier: give that too")
    if tier is None and tier_memory is not None:
        raise ConfigError("--tier-memory is for --tier: give that too, or leave it out")
    own_tier = None
    if tier is not None:
        own_tier = Tier(tier, memory=tier_memory or "2GB", exclusive=tier_exclusive)
        check_usable(own_tier.path, exclusive=tier_exclusive, disk=Disk())
    token = read_token(token_file)
    status: dict[str, Any] = {}
    if token is None and is_loopback(host):
        token = private_socket.make_token()
        status["token_file"] = str(private_socket.token_file())
    security = Security(token=token, certificate=tls_certificate, key=tls_key, authority=authority)
    security.check_listening(host)
    metrics_at = _metrics_at(metrics)
    if metrics_at is not None:
        security.check_metrics(metrics_at[0])
    own = None
    if is_loopback(host) and not security.tls:
        path = socket or (private_socket.socket_of(port) if port else None)
        own = private_socket.own_socket() if path is None else private_socket.PrivateSocket(path)
    elif socket is not None:
        raise ConfigError("--socket is for servers of one machine: leave out --host and --tls-…")
    events = EventLog(log)
    events.show_warnings()
    warm_up()
    gc.freeze()  # what was imported stays: to look through it for garbage takes 100 ms each time
    served = ShardService(threads=threads, place=place, tier=own_tier, on_event=events)
    served.page.log = events.path
    # What started the server closes its standard input when it needs it no more, however it ends;
    # only a child that it has forked can keep that open.
    end = ServerEnd(lambda: until_stdin_closes or _has_run(served), patience)

    def upkeep() -> None:
        events.bound_stderr()
        if started_by is not None and started_by.gone:
            end.now()

    watch = ServerWatch(
        served, upkeep=upkeep, on_dropped=end.now,
        # Nobody else will come for them, and what started it may only have been stopped.
        keep_rows_for=None if until_stdin_closes else kept_for,
    )  # fmt: skip
    server = ShardServer(served, host=host, port=port, socket=own, security=security)
    status = {"address": server.address, "pid": os.getpid(), "life": served.life, **status}
    status["log"] = events.path
    if metrics_at is not None:
        exporter = _exporter(served, metrics_at, security)
        scheme = "http" if is_loopback(metrics_at[0]) else "https"
        status["metrics"] = f"{scheme}://{metrics_at[0]}:{exporter.port}"
        served.page.metrics_url = f"{status['metrics']}/metrics"

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end.hear)
    if until_stdin_closes:
        # However reading ends: a server must not outlive what started it.
        stdin = Worker("emberkeep-stdin")
        stdin.do(lambda: sys.stdin.buffer.read(1), lambda _: end.now())
    served.events("listening", status)
    watch.start()
    print(json.dumps(status), flush=True)
    end.wait(served.events)
    drained = served.drain(_DRAIN_SECONDS)
    if own is not None:
        own.remove()
    served.events("stopped", {"drained": drained})
    # Streams that clients hold open would keep Flight's own shutdown waiting.
    os._exit(0)


def _has_run(served: ShardService) -> bool:
    """Whether a run has this server, and its coordinator was heard of within the lease."""
    status, _ = next(served.act("status", {}, {}))
    return status["state"] != "empty" and not status["lapsed"]


def _exporter(served: ShardService, at: tuple[str, int], security: Security) -> MetricsServer:
    from emberkeep.runtime.metrics import MetricsServer
    from emberkeep.wire.security import is_loopback

    host, port = at
    try:
        if is_loopback(host):
            return MetricsServer(served.page.text, port, host, not_ready=served.page.not_ready)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(str(security.certificate), str(security.key))
        return MetricsServer(
            served.page.text, port, host, tls=tls, admits=security.admits,
            not_ready=served.page.not_ready,
        )  # fmt: skip
    except ssl.SSLError as error:
        raise SecurityError(
            f"--metrics cannot begin with this certificate and key ({error.reason}): give PEM files"
        ) from None
    except OSError as error:
        raise ConfigError(f"--metrics {host}:{port}: {error.strerror}") from None


def _place(shard: str | None) -> tuple[int, int] | None:
    if shard is None:
        return None
    index, slash, count = shard.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ConfigError(f"--shard is I/N with I from 0 to below N, such as 0/4, not {shard!r}")
    return int(index), int(count)


def _metrics_at(given: str | None) -> tuple[str, int] | None:
    if given is None:
        return None
    host, _, port = given.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--metrics is a port or HOST:PORT, not {given!r}")
    return host or "127.0.0.1", int(port)
