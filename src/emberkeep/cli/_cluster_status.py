"""What `emberkeep cluster status` shows: every server in a line of at most 120 characters."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from emberkeep.errors import EmberkeepError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from emberkeep.wire.security import Security

Status = dict[str, Any]

_ASK_SECONDS = 3.0
_RIGHT = ("shard", "pid", "memory", "rows", "rows/s", "step")
_COLUMNS = ("shard", "state", "node", "pid", "memory", "rows", "rows/s", "run", "step",
            "protection", "last event")  # fmt: skip
# What a column may take; more is cut. Two spaces between columns make 120 of it.
_MOST = {"shard": 5, "state": 10, "node": 16, "pid": 7, "memory": 6, "rows": 5, "rows/s": 6,
         "run": 8, "step": 8, "protection": 12, "last event": 17}  # fmt: skip


class Servers(Protocol):
    """Where the servers are."""

    @property
    def count(self) -> int: ...

    def find(self, shard: int) -> str:
        """Its address; `EmberkeepError` where there is none."""
        ...

    def security(self) -> Security: ...


class Addresses:
    """Servers that were named by their addresses."""

    def __init__(self, addresses: Sequence[str], security: Security) -> None:
        for address in addresses:
            security.check_address(address)
        self._addresses = list(addresses)
        self._security = security

    @property
    def count(self) -> int:
        return len(self._addresses)

    def find(self, shard: int) -> str:
        return self._addresses[shard]

    def security(self) -> Security:
        return self._security


class RayServers:
    """Servers of a Ray cluster."""

    def __init__(self, launcher: Any) -> None:
        self._launcher = launcher

    @property
    def count(self) -> int:
        return int(self._launcher.count)

    def find(self, shard: int) -> str:
        return str(self._launcher.where(shard, _ASK_SECONDS)[0])

    def security(self) -> Security:
        return self._launcher.security()  # type: ignore[no-any-return]


def look(servers: Servers) -> list[Status]:
    """What each server says of itself, all asked at once; one that does not answer is lost."""
    from emberkeep.runtime.crew import Crew

    crew = Crew(min(32, servers.count), "emberkeep-status")
    try:
        asked: list[Future[Status]] = [
            crew.submit(_ask, servers, shard) for shard in range(servers.count)
        ]
        return [answer.result() for answer in asked]
    finally:
        crew.shutdown(wait=False)


def looks(servers: Servers, seconds: float) -> Iterator[list[Status]]:
    """Looks every so many seconds, each with the rates since the one before; the first is not
    shown."""
    before, taken = look(servers), time.monotonic()
    while True:
        time.sleep(seconds)
        now = look(servers)
        elapsed, taken = time.monotonic() - taken, time.monotonic()
        add_rates(now, before, elapsed)
        yield now
        before = now


def _ask(servers: Servers, shard: int) -> Status:
    from emberkeep.wire.connection import Connection

    address = ""
    try:
        address = servers.find(shard)
        connection = Connection(address, servers.security())
        try:
            answer, _ = connection.act("status", deadline=timedelta(seconds=_ASK_SECONDS))
        finally:
            connection.close()
    except EmberkeepError as error:
        why = " ".join(str(error).split())
        return {"shard": shard, "address": address, "state": "lost", "error": why}
    answer.pop("tables", None)
    return {
        **answer,
        "shard": shard,
        "address": address,
        "protection": protection(answer.get("parity")),
    }


def add_rates(now: list[Status], before: list[Status], seconds: float) -> None:
    """Gives every server its `rows_per_second` since an earlier look; None where a figure cannot
    be known: another process answers, or none does."""
    for status, earlier in zip(now, before, strict=True):
        status["rows_per_second"] = None
        counted, old = status.get("metrics"), earlier.get("metrics")
        if counted is None or old is None or status.get("life") != earlier.get("life"):
            continue
        moved = sum(counted[key] - old[key] for key in ("rows_pulled", "rows_pushed"))
        if moved >= 0 and seconds > 0:
            status["rows_per_second"] = moved / seconds


def protection(parity: Status | None) -> str:
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


# -- for people ----------------------------------------------------------------------------------


def _state(status: Status) -> str:
    """Rows that stay for the next trainer are *kept*: the one before has ended, and said so."""
    if status.get("left"):
        return "kept"
    return "expired" if status.get("lapsed") else str(status["state"])


def cells(status: Status, now: float) -> tuple[str, ...]:
    """One server as the cells of a line; `now` is the time (Unix)."""
    run, memory = status.get("run"), status.get("memory_nbytes")
    return (
        str(status["shard"]),
        _state(status),
        _place(status),
        str(status.get("pid", "")),
        "" if memory is None else _short(memory) + "B",
        _short(status.get("rows")),
        _short(status.get("rows_per_second")),
        "" if run is None else str(run["id"])[: _MOST["run"]],
        "" if run is None else str(run["step"]),
        _protected(status.get("parity")) or _tier(status.get("tier")),
        _last_event(status.get("last_event"), now),
    )


def notes(statuses: Sequence[Status], now: float) -> list[str]:
    """What belongs to no single line: runs, servers that do not answer, and where logs are."""
    lines: list[str] = []
    runs: dict[str, list[Status]] = {}
    for status in statuses:
        if "run" in status:
            runs.setdefault(status["run"]["id"], []).append(status)
    for identity, members in runs.items():
        lines.append(_run_line(identity, members, now))
    lines += [
        f"shard {status['shard']}: {status['error']}" for status in statuses if "error" in status
    ]
    lines += [
        f"shard {status['shard']} is {status['protection']}"
        for status in statuses
        if status.get("parity", {}).get("unprotected_since")
    ]
    lines += _tier_lines(statuses)
    logs: dict[tuple[str, str], list[str]] = {}
    for status in statuses:
        if status.get("log"):
            directory, _, name = str(status["log"]).rpartition("/")
            logs.setdefault((str(status.get("node")), directory), []).append(name)
    lines += [f"logs on {node}: {at}/ {', '.join(names)}" for (node, at), names in logs.items()]
    return lines


def table(statuses: Sequence[Status], *, now: float | None = None) -> RenderableType:
    """All of it, to be printed on a console that is as wide as its lines."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    moment = time.time() if now is None else now
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in _COLUMNS:
        made.add_column(column, justify="right" if column in _RIGHT else "left", no_wrap=True)
    for status in statuses:
        row = zip(_COLUMNS, cells(status, moment), strict=True)
        # As text, not markup: a name may hold brackets.
        made.add_row(*(Text(_cut(cell, _MOST[column])) for column, cell in row))
    return Group(made, *(Text(line) for line in notes(statuses, moment)))


def text(statuses: Sequence[Status]) -> str:
    """The same as plain lines, which no terminal folds."""
    from rich.console import Console

    written = io.StringIO()
    Console(file=written, width=1000, highlight=False).print(table(statuses))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _protected(parity: Status | None) -> str:
    """`protection` in few characters."""
    if parity is None:
        return ""
    if parity["missing_rows"]:
        return f"{_short(parity['missing_rows'])} missing"
    if parity.get("unprotected_since"):
        return "unprotected"
    if parity["unprotected_stripes"]:
        return f"{_short(parity['unprotected_stripes'])} open"
    return f"lag {_short(parity['lag'])}" if parity["lag"] else "whole"


def _tier(tier: Status | None) -> str:
    """A server with a tier has no parity, so it has this in its place: how often rows were in
    memory."""
    use = None if tier is None else tier.get("use")
    if tier is None:
        return ""
    return "tier" if use is None else f"tier {use['hit_rate']:.1%}"


def _tier_lines(statuses: Sequence[Status]) -> list[str]:
    """Where rows live on each server, and what it costs to bring them from there."""
    lines = []
    for status in statuses:
        if (tier := status.get("tier")) is None:
            continue
        parts = [f"shard {status['shard']} keeps its rows in {tier['path']}"]
        parts[0] += f", {_short(tier['memory_nbytes'])}B of them in memory"
        if (use := tier.get("use")) is not None:
            batches = {file["batch"] for file in tier["files"]}
            parts.append(
                f"{use['hit_rate']:.1%} of {_short(use['pulled'])} pulled rows were there; "
                f"{use['wait_seconds']:.1f} s of waiting"
            )
            if len(batches) == 1 and None not in batches:
                parts.append(f"batch {batches.pop()} is durable")
        damaged = sum(file["damaged"] for file in tier["files"])
        if damaged:
            parts.append(f"{damaged} segments are damaged")
        lines.append("; ".join(parts))
    return lines


def _run_line(identity: str, members: Sequence[Status], now: float) -> str:
    first = members[0]
    run, metrics = first["run"], first["metrics"]
    parts = [f"run {identity[:8]}"]
    if run["name"]:
        parts[0] += f" ({run['name']})"
    if run["trainer"]:
        parts.append(f"trained by {run['trainer']}")
    if "version" in metrics:
        age = f", {_age(now - metrics['version_at'])} old" if "version_at" in metrics else ""
        parts.append(f"version {metrics['version']:.0f}{age}")
    if "pls" in metrics:
        parts.append(f"PLS {metrics['pls']:.4g}")
    oldest = max(float(status["lease_age_seconds"]) for status in members)
    parts.append(f"lease renewed {_age(oldest)} ago of {first['lease_seconds']:g} s")
    return "; ".join(parts)


def _place(status: Status) -> str:
    """Host and port; the name of the node where it is known, alone where there is no port."""
    address = str(status["address"]).rpartition("://")[2]
    host, colon, port = address.rpartition(":")
    node = str(status.get("node", host)).partition(".")[0]
    if not colon:
        return node
    return f"{_cut(node, _MOST['node'] - 1 - len(port))}:{port}"


def _last_event(last: Status | None, now: float) -> str:
    if last is None:
        return ""
    age = " " + _age(now - last["at"]).replace(" ", "")
    return _cut(str(last["event"]), _MOST["last event"] - len(age)) + age


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _short(number: float | None) -> str:
    """Three digits and a unit."""
    if number is None:
        return ""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
