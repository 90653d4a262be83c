"""`emberkeep cluster`: shard servers on Ray, up, looked at, and down."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Annotated, Any

import typer

from emberkeep.cli._options import Authority, TlsCertificate, TlsKey, TokenFile
from emberkeep.cli._repository import JsonOption, emit, print_json, print_table
from emberkeep.cli._shell import command, say
from emberkeep.errors import ConfigError

cluster = typer.Typer(help="Shard servers that Ray places and supervises.", no_args_is_help=True)

_Name = Annotated[str, typer.Option(help="Which cluster.")]
_Address = Annotated[
    str | None, typer.Option(help="A Ray cluster that exists; the one of this machine by default.")
]
_COLUMNS = ("shard", "state", "epoch", "address", "pulls", "pushes", "rows/s", "waiting", "dirty",
            "parity", "version", "PLS")  # fmt: skip


@cluster.command()
@command
def up(
    shards: Annotated[int, typer.Option(min=1, help="How many servers.")],
    name: _Name = "emberkeep",
    address: _Address = None,
    cpus: Annotated[float, typer.Option(min=0, help="What each server reserves.")] = 0.1,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each server.")] = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    authority: Authority = None,
    token_file: TokenFile = None,
    as_json: JsonOption = False,
) -> None:
    """Start servers that stay up. Without --address a local Ray is started for them."""
    from emberkeep.server.ray import ray_cluster
    from emberkeep.server.ray.local_ray import start_local, stop_local
    from emberkeep.wire.security import Security, read_token

    security = Security(
        token=read_token(token_file), certificate=tls_certificate, key=tls_key, authority=authority
    ).carried()
    local = address is None and start_local()
    try:
        ray_cluster.ensure_ray(address or "auto")
        actors = ray_cluster.start(
            shards, name=name, cpus=cpus, threads=threads, security=security, detached=True
        )
        addresses = [ray_cluster.RayLauncher(actors).address(shard) for shard in range(shards)]
    except BaseException:
        if local:
            ray_cluster.disconnect()
            stop_local()
        raise
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
    name: _Name = "emberkeep",
    address: _Address = None,
    watch: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Look again and again.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show every server: its state, epoch and what it does."""
    from emberkeep.server.ray import ray_cluster

    ray_cluster.ensure_ray(address or "auto")
    hosts = ray_cluster.RayLauncher(_found(name))
    before, taken = _look(hosts), time.monotonic()
    if as_json:
        print_json({"name": name, "shards": before})
        return
    if watch is None:
        print_table(_COLUMNS, _rows(before, before, 1.0), right=_COLUMNS[2:])
        return
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        while True:
            time.sleep(watch)
            now = _look(hosts)
            elapsed, taken = time.monotonic() - taken, time.monotonic()
            live.update(_table(_rows(now, before, elapsed)), refresh=True)
            before = now


@cluster.command()
@command
def down(name: _Name = "emberkeep", address: _Address = None) -> None:
    """End the servers; a local Ray that `up` has started ends when no servers are left on it."""
    from emberkeep.server.ray import ray_cluster
    from emberkeep.server.ray.local_ray import stop_local

    ray_cluster.ensure_ray(address or "auto")
    ray_cluster.stop(_found(name))
    if address is None and not ray_cluster.clusters():
        ray_cluster.disconnect()
        stop_local()
    say(f"cluster {name!r} is down")


def _found(name: str) -> list[Any]:
    from emberkeep.server.ray import ray_cluster

    actors = ray_cluster.find(name)
    if not actors:
        there = ", ".join(ray_cluster.clusters()) or "none"
        raise ConfigError(f"there is no cluster {name!r}; up are: {there}")
    return actors


def _look(hosts: Any) -> list[dict[str, Any]]:
    """What each server says of itself; one that does not answer is lost."""
    from emberkeep.errors import EmberkeepError
    from emberkeep.wire.connection import Connection

    statuses = []
    for shard in range(hosts.count):
        try:
            address = hosts.where(shard, 3.0)[0]
            connection = Connection(address, hosts.security())
            answer, _ = connection.act("status", deadline=timedelta(seconds=3))
            connection.close()
            answer.pop("tables", None)
            statuses.append({"shard": shard, "address": address, **answer})
        except EmberkeepError as error:
            statuses.append({"shard": shard, "address": "", "state": "lost", "error": str(error)})
    return statuses


def _rows(
    now: list[dict[str, Any]], before: list[dict[str, Any]], elapsed: float
) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for status, earlier in zip(now, before, strict=True):
        metrics, old = status.get("metrics", {}), earlier.get("metrics", {})
        moved = sum(metrics.get(k, 0) - old.get(k, 0) for k in ("rows_pulled", "rows_pushed"))
        rows.append(
            (
                status["shard"],
                status["state"],
                status.get("epoch", ""),
                status["address"],
                f"{metrics.get('pulls', 0):,}",
                f"{metrics.get('pushes', 0):,}",
                f"{moved / elapsed:,.0f}",
                metrics.get("waiting", ""),
                f"{status.get('dirty_rows', 0):,}",
                _parity(status.get("parity")),
                f"{metrics['version']:.0f}" if "version" in metrics else "",
                f"{metrics['pls']:.4g}" if "pls" in metrics else "",
            )
        )
    return rows


def _parity(parity: dict[str, Any] | None) -> str:
    """What stands between a server and full redundancy; empty without parity."""
    if parity is None:
        return ""
    if parity["missing_rows"]:
        return f"{parity['missing_rows']:,} rows missing"
    if parity.get("unprotected_since"):
        since = time.strftime("%H:%M:%SZ", time.gmtime(parity["unprotected_since"]))
        return f"unprotected since {since}"
    if parity["unprotected_stripes"]:
        return f"{parity['unprotected_stripes']:,} stripes open"
    return f"lag {parity['lag']:,}" if parity["lag"] else "whole"


def _table(rows: list[tuple[object, ...]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(*_COLUMNS, box=box.SIMPLE)
    for row in rows:
        table.add_row(*map(str, row))
    return table
