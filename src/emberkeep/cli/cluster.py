"""`emberkeep cluster`: shard servers on Ray, up, looked at, and down."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emberkeep.cli._options import Authority, TlsCertificate, TlsKey, TokenFile, option, read_time
from emberkeep.cli._repository import JsonOption, emit, print_json, to_terminal
from emberkeep.cli._shell import command, say
from emberkeep.errors import ConfigError, ServerError

if TYPE_CHECKING:
    from emberkeep.erasure.codes import Parity

cluster = typer.Typer(help="Shard servers that Ray places and supervises.", no_args_is_help=True)

_Name = Annotated[str, typer.Option(help="Which cluster.")]
_Address = Annotated[
    str | None, typer.Option(help="A Ray cluster that exists; the one of this machine by default.")
]
# Rates are known from two looks.
_LOOK_SECONDS = 0.5
_LONGEST_WATCH_SECONDS = 86400.0
_NAME = "emberkeep"


@cluster.command()
@command
def up(
    shards: Annotated[int, typer.Option(min=1, help="How many servers.")],
    name: _Name = _NAME,
    address: _Address = None,
    cpus: Annotated[float, typer.Option(min=0, help="What each server reserves.")] = 0.1,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Of its node, for each server; nothing if not given, with --tier its memory and "
            "that of the process.",
        ),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="For --tier, of what nodes of Ray name as emberkeep_disk (GB)."
        ),
    ] = None,
    keep_rows_for: Annotated[
        str,
        option("--keep-rows-for", "How long to keep rows for the next trainer when one is gone."),
    ] = "30min",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each server.")] = None,
    parity: Annotated[
        str | None,
        typer.Option(
            metavar="K,R",
            help="The parity that runs will use, such as 4,1: at most R servers on a node.",
        ),
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Rows live in files below this directory of each node."),
    ] = None,
    tier_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="For the hot rows of each server, such as 48GB; 2GB if not given."
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
    as_json: JsonOption = False,
) -> None:
    """Start servers that stay up. Without --address a local Ray is started for them."""
    from emberkeep.cluster.spread import check_tier
    from emberkeep.server.ray import ray_cluster
    from emberkeep.server.ray.local_ray import start_local, stop_local
    from emberkeep.server.ray.ray_session import disconnect
    from emberkeep.server.ray.server_resources import (
        ServerResources,
        nbytes_of,
        needed_memory,
    )
    from emberkeep.tables import SGD, Tier
    from emberkeep.wire.security import Security, read_token

    code = _code(parity, shards)
    own_tier = None
    if tier is not None:
        own_tier = Tier(tier, memory=tier_memory or "2GB", exclusive=tier_exclusive)
    elif tier_exclusive:
        raise ConfigError("--tier-exclusive is for --tier: give that too")
    check_tier(own_tier, code)
    if disk is not None and own_tier is None:
        raise ConfigError("--disk is for servers with a tier: give --tier, or leave it out")
    if tier_memory is not None and own_tier is None:
        raise ConfigError("--tier-memory is for servers with a tier: give --tier, or leave it out")
    if memory is not None:
        nbytes = nbytes_of("--memory", memory)
    else:  # of which tables, nobody knows yet
        nbytes = 0 if own_tier is None else needed_memory((), SGD(lr=1.0), shards, own_tier)
    resources = ServerResources(
        cpus=cpus, memory=nbytes, disk=0 if disk is None else nbytes_of("--disk", disk)
    )
    security = Security(
        token=read_token(token_file), certificate=tls_certificate, key=tls_key, authority=authority
    ).carried()
    with _alone(address):
        local = address is None and start_local()
        try:
            ray_cluster.ensure_ray(address or "auto")
            actors = ray_cluster.start(
                shards, name=name, resources=resources, threads=threads, security=security,
                detached=True, parity=code, tier=own_tier,
                keep_rows_for=read_time("--keep-rows-for", keep_rows_for),
            )  # fmt: skip
            launcher = ray_cluster.RayLauncher(actors)
            addresses = [launcher.address(shard) for shard in range(shards)]
            if code is not None:
                with warnings.catch_warnings():
                    warnings.showwarning = lambda message, *_: say(f"warning: {message}")
                    launcher.warn_of_sharing(code)
        except BaseException:
            if local:
                disconnect()
                stop_local()
            raise
    if not nbytes:
        say(
            "no memory is set aside for the servers, since their tables are not known yet: Ray may "
            "put more of them on a node than it holds; --memory SIZE says what each takes"
        )
    if as_json:
        print_json({"name": name, "shards": shards, "addresses": addresses, "started_ray": local})
        return
    for shard, at in enumerate(addresses):
        emit(f"shard {shard}: {at}")
    say(
        f"train on them with: emberkeep train … --cluster ray --shards {shards} "
        f"--set cluster.name={name}" + ("" if address is None else f" --address {address}")
    )


@cluster.command()
@command
def status(
    name: _Name = _NAME,
    address: _Address = None,
    connect: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,…", help="Servers without Ray: their addresses, in shard order."
        ),
    ] = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    authority: Authority = None,
    token_file: TokenFile = None,
    watch: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Look again and again.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show every server: where it is, what it holds and does, and how well it is protected."""
    from emberkeep.cli import _cluster_status

    _check_status(name, address, connect, (tls_certificate, tls_key, authority, token_file))
    if watch is not None and not 0 < watch <= _LONGEST_WATCH_SECONDS:
        raise ConfigError(f"--watch takes seconds above 0, a day at most, not {watch:g}")
    if watch is not None and as_json:
        raise ConfigError("--json prints one document: leave --watch out, and ask again")
    servers: _cluster_status.Servers
    if connect is not None:
        from emberkeep.wire.private_socket import own_address
        from emberkeep.wire.security import Security, read_token

        security = Security(
            token=read_token(token_file), certificate=tls_certificate, key=tls_key,
            authority=authority,
        )  # fmt: skip
        addresses = [own_address(part.strip()) for part in connect.split(",") if part.strip()]
        if not addresses:
            raise ConfigError("--connect needs the address of a server, such as 127.0.0.1:7070")
        servers = _cluster_status.Addresses(addresses, security)
    else:
        from emberkeep.server.ray import ray_cluster

        ray_cluster.ensure_ray(address or "auto")
        servers = _cluster_status.RayServers(ray_cluster.RayLauncher(_found(name)))
    looks = _cluster_status.looks(servers, watch or _LOOK_SECONDS)
    if watch is None:
        found = next(looks)
        if as_json:
            print_json({"name": None if connect else name, "shards": found})
        else:
            emit(_cluster_status.text(found))
        if any(shard["state"] == "lost" for shard in found):  # also for who reads no tables
            raise typer.Exit(ServerError.exit_code)
        return
    if not to_terminal():  # a log or a pipe: every look is whole, and comes at once
        for statuses in looks:
            emit(_cluster_status.text(statuses))
        return
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for statuses in looks:
            live.update(_cluster_status.table(statuses), refresh=True)


@cluster.command()
@command
def down(
    name: _Name = _NAME,
    address: _Address = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also under a run, which then ends or waits for them.")
    ] = False,
) -> None:
    """End the servers; a local Ray that `up` has started ends when no servers are left on it."""
    from emberkeep.server.ray import ray_cluster
    from emberkeep.server.ray.local_ray import stop_local
    from emberkeep.server.ray.ray_session import disconnect

    with _alone(address):
        ray_cluster.ensure_ray(address or "auto")
        run = ray_cluster.RayLauncher(_found(name)).attached()
        if run is not None and not force:
            raise ConfigError(
                f"cluster {name!r} serves a run ({run}), and was left as it is: stop that run "
                "first (SIGTERM saves it), or take its servers away with --force"
            )
        ray_cluster.stop(name)
        if address is None and not ray_cluster.clusters():
            disconnect()
            stop_local()
    say(f"cluster {name!r} is down" + ("" if run is None else f"; a run has lost it ({run})"))


def _check_status(
    name: str, address: str | None, connect: str | None, secrets: Sequence[Path | None]
) -> None:
    """Refuses what nobody would look at."""
    if connect is not None and (address is not None or name != _NAME):
        raise ConfigError("--connect names the servers: leave --name and --address out")
    if connect is None and any(given is not None for given in secrets):
        raise ConfigError(
            "--tls-certificate, --tls-key, --authority and --token-file are for --connect: servers "
            "on Ray bring their own"
        )


@contextmanager
def _alone(address: str | None) -> Iterator[None]:
    """No other command starts or ends the Ray of this machine meanwhile. On a Ray elsewhere the
    names of servers see to it that two commands do not start the same."""
    from emberkeep.server.ray.local_ray import exclusive

    if address is not None:
        yield
        return
    with exclusive(lambda: say("another emberkeep cluster command is at work: waiting for it")):
        yield


def _code(parity: str | None, shards: int) -> Parity | None:
    from emberkeep.erasure.codes import Parity

    if parity is None:
        return None
    k, comma, r = parity.partition(",")
    if not (comma and k.strip().isdecimal() and r.strip().isdecimal()):
        raise ConfigError(f"--parity is K,R, such as 4,1, not {parity!r}")
    code = Parity(k=int(k), r=int(r))
    code.check_shards(shards)
    return code


def _found(name: str) -> list[Any]:
    from emberkeep.server.ray import ray_cluster

    actors = ray_cluster.find(name)
    if not actors:
        there = ", ".join(ray_cluster.clusters()) or "none"
        raise ConfigError(f"there is no cluster {name!r}; up are: {there}")
    return actors
