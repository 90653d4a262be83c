"""Shard servers beside shards in process and beside plain Ray actor calls.

One run, taking turns: pulls of 1k, 10k and 50k rows from each of 4 shards (dim 16) in process, over
Flight, and from Ray actors that hold the same shards and are called with `ray.get`; how much of a
pull is transport; one server under 1-4 client processes; what training costs on 4 servers against
in process, with and without prefetch; how long a killed server is missed; how soon a trainer that
is started again trains on servers that hold its rows (4 servers × 1 GB), and on empty ones.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import emberkeep as ek
from _common import interleaved_ms, options, report
from _restarts import FULL, QUICK, process_start_seconds, restarts
from emberkeep._types import RowIds
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.processes import Connect, ProcessLauncher
from emberkeep.cluster.shard import Shard
from emberkeep.runtime.pool import shared
from emberkeep.wire.security import Security

SHARDS, DIM, ROWS = 4, 16, 2_000_000
TURN = 8  # calls of one contender before the next has its turn
SIZES = {"1k": 1_000, "10k": 10_000, "50k": 50_000}
TABLE = ek.Table("t", rows=ROWS, dim=DIM)
OPTIMIZER = ek.RowWiseAdagrad(lr=0.01)
STARTED = time.perf_counter()


def medians_ms(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of a call; the contenders take turns of `TURN` calls each.

    The first two calls of a turn are not counted.
    """
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in list(contenders) if turn % 2 == 0 else reversed(contenders):
            for count in range(-2, TURN):
                start = time.perf_counter()
                contenders[name]()
                if count >= 0:
                    taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def say(what: str) -> None:
    """What is measured next, and when since the start."""
    print(f"{time.perf_counter() - STARTED:4.0f} s  {what}", file=sys.stderr, flush=True)


def wanted(rows_per_shard: int, seed: int = 0) -> list[RowIds]:
    """Ids that spread evenly over the shards."""
    local = np.random.default_rng(seed).choice(ROWS // SHARDS, rows_per_shard, replace=False)
    ids = (local[:, None] * SHARDS + np.arange(SHARDS)).reshape(-1).astype(np.int64)
    return [RowIds(ids, np.array([0, ids.size]))]


RESTARTS = {
    "adopt": "started again, rows adopted",
    "rewind": "started again, rows go back to the version",
    "reload": "started again, servers too",
}
NOTE = (
    f"Contenders take turns of {TURN} calls, two more uncounted before each; the rows marked "
    "alternating are the same calls one by one. Four servers and their client share the cores: "
    "short runs of the same code have differed by a factor of two at 1k rows."
)


class Actor:
    """A shard in a Ray actor, called directly: what one would write first."""

    def __init__(self, index: int) -> None:
        from emberkeep.runtime.pool import Pool

        self.shard = Shard([TABLE], OPTIMIZER, index=index, count=SHARDS, pool=Pool(1))

    def pull(self, ids: Any) -> Any:
        out = np.empty((ids.size, DIM), np.float32)
        self.shard.pull([RowIds(np.array(ids), np.array([0, ids.size]))], [out])
        return out


def ray_pull(actors: list[Any], request: list[RowIds]) -> Callable[[], Any]:
    import ray

    def pull() -> Any:
        ids = request[0].ids
        parts = [np.flatnonzero(ids % SHARDS == shard) for shard in range(SHARDS)]
        calls = [actor.pull.remote(ids[part]) for actor, part in zip(actors, parts, strict=True)]
        out = np.empty((ids.size, DIM), np.float32)
        for part, rows in zip(parts, ray.get(calls), strict=True):
            out[part] = rows
        return out

    return pull


def client(address: str, security: Security, orders: Any, counts: Any) -> None:
    """One of several processes that pull from one server as fast as they can, once asked."""
    where = Connect(addresses=(address,), coordinate=False, security=security)
    cluster = where.open([TABLE], OPTIMIZER, seed=0)
    ids = np.random.default_rng(os.getpid()).choice(ROWS, 10_000, replace=False)
    request = [RowIds(ids.astype(np.int64), np.array([0, ids.size]))]
    cluster.pull(request)
    counts.put(0.0)
    while (seconds := orders.get()) > 0:
        pulled, until = 0, time.perf_counter() + seconds
        while time.perf_counter() < until:
            cluster.pull(request)
            pulled += ids.size
        counts.put(pulled / seconds)


class On:
    """A cluster on servers that run already: starting them takes longer than most measurements."""

    def __init__(self, hosts: ProcessLauncher, shards: int = SHARDS, first: int = 0) -> None:
        self.addresses = tuple(hosts.address(first + shard) for shard in range(shards))
        self.security = hosts.security

    def open(self, tables: Any, optimizer: Any, *, seed: int) -> Any:
        where = Connect(addresses=self.addresses, security=self.security)
        return where.open(tables, optimizer, seed=seed)


def scaling(hosts: ProcessLauncher, most: int, seconds: float) -> dict[int, float]:
    """Rows per second of one server with 1 to `most` client processes."""
    cluster = On(hosts, 1).open([TABLE], OPTIMIZER, seed=0)
    context = multiprocessing.get_context("spawn")
    counts = context.Queue()
    orders = [context.Queue() for _ in range(most)]
    address = cluster.launcher.address(0)
    processes = [
        context.Process(target=client, args=(address, hosts.security, own, counts))
        for own in orders
    ]
    for process in processes:
        process.start()
    for _ in processes:
        counts.get()  # all are connected
    found = {}
    for clients in range(1, len(processes) + 1):
        for own in orders[:clients]:
            own.put(seconds)
        found[clients] = sum(counts.get() for _ in range(clients))
    for own in orders:
        own.put(0.0)
    for process in processes:
        process.join()
    cluster.close()
    return found


def step_of(cluster: Any, prefetch: bool, opened: list[Any]) -> Callable[[], object]:
    """One training step of a small DLRM: 26 tables, batch 2048. `opened` gets its cluster."""
    import torch

    from emberkeep.models import DLRM, DLRMShape

    tables = [ek.Table(f"C{t}", rows=50_000, dim=DIM) for t in range(26)]
    bags = ek.EmbeddingBags(tables, optimizer=OPTIMIZER, cluster=cluster, seed=0)
    opened.append(bags.cluster)
    shape = DLRMShape(bottom=(512, 256, DIM), top=(512, 256, 1))
    network = DLRM(bags, shape, features=26, dense=13, seed=0)
    dense_optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(2048, 13, generator=random),
            {f"C{t}": torch.randint(0, 50_000, (2048,), generator=random) for t in range(26)},
            torch.randint(0, 2, (2048,), generator=random).float(),
        )
        for _ in range(8)
    ]
    criterion, turn = torch.nn.BCEWithLogitsLoss(), iter(range(10**9))

    def step() -> None:
        number = next(turn)
        dense, ids, labels = batches[number % 8]
        logits = network(dense, ids)
        if prefetch:
            bags.prefetch(batches[(number + 1) % 8][1])
        criterion(logits, labels).backward()
        for optimizer in (bags.optimizer, dense_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    return step


def seconds_to_serve(hosts: ProcessLauncher, kills: int) -> float:
    """From SIGKILL until the shard answers again, restored empty: what servers themselves take.
    The servers end with it."""
    cluster = FlightCluster([TABLE], OPTIMIZER, hosts, pool=shared(), security=hosts.security)
    first = cluster.handles[0].epoch
    request, taken = wanted(1000), []

    def on_loss(_lost: object) -> bool:
        gone = cluster.lost()
        cluster.renew(*gone)
        cluster.serve(*gone)
        return True

    cluster.on_loss = on_loss
    for kill in range(kills):
        cluster.pull(request)
        start = time.perf_counter()
        os.kill(cluster.launcher.pid(kill % SHARDS), signal.SIGKILL)
        while cluster.handles[kill % SHARDS].epoch <= first + kill // SHARDS:
            cluster.pull(request)
        taken.append(time.perf_counter() - start)
        if kill + 1 < kills:
            time.sleep(3)  # the next spare gets ready
    cluster.close()
    return statistics.median(taken)


def main() -> None:
    import ray

    given = options(__file__, __doc__ or "")
    rounds = 2 if given.quick else 12
    say("Ray and servers start")
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
        logging_level="error",
    )  # fmt: skip
    actors = [ray.remote(Actor).options(num_cpus=0.1).remote(i) for i in range(SHARDS)]
    in_process = ek.local(shards=SHARDS).open([TABLE], OPTIMIZER, seed=0)
    hosts = ProcessLauncher(SHARDS, spares=1, threads=1)
    flight = On(hosts).open([TABLE], OPTIMIZER, seed=0)
    assert isinstance(in_process, LocalCluster)
    rows, figures = [], {}
    for name, size in SIZES.items():
        if given.quick and name == "50k":
            continue
        say(f"pulls of {name} rows from each of {SHARDS} shards")
        request = wanted(size)
        contenders: dict[str, Callable[[], object]] = {
            "in process": lambda r=request: in_process.pull(r),
            "flight": lambda r=request: flight.pull(r),
            "ray actors": ray_pull(actors, request),
        }
        taken = medians_ms(contenders, rounds)
        for who, value in taken.items():
            per_second = SHARDS * size / value * 1e3
            share = f"{1 - taken['in process'] / value:.0%}" if who != "in process" else ""
            rows.append(
                [f"pull {name} × {SHARDS}", who, f"{value:.2f}", f"{per_second:,.0f}", share]
            )
        if name != "50k":
            figures[f"flight_vs_ray_{name}"] = taken["ray actors"] / taken["flight"]
            mixed = interleaved_ms(contenders, repeats=rounds * TURN)
            figures[f"flight_vs_ray_{name}_alternating"] = mixed["ray actors"] / mixed["flight"]
            for who in ("flight", "ray actors"):
                rows.append(
                    [f"pull {name} × {SHARDS}, alternating", who, f"{mixed[who]:.2f}", "", ""]
                )
    flight.close()
    for actor in actors:
        ray.kill(actor)
    ray.shutdown()

    say("training")
    # A quick run has no time to start more: both contenders have half of those there are.
    half, more = SHARDS // 2, None
    where = On(hosts, half), On(hosts, half, half)
    if not given.quick:
        half, more = SHARDS, ProcessLauncher(SHARDS, spares=0, threads=1)
        where = On(hosts), On(more)
    opened: list[Any] = []
    steps = {
        "in process": step_of(ek.local(shards=half), False, opened),
        "flight": step_of(where[0], False, opened),
        "flight, prefetch": step_of(where[1], True, opened),
    }
    taken = medians_ms(steps, 1 if given.quick else 4)
    for who, value in taken.items():
        share = value / taken["in process"]
        rows.append(
            ["training step", who, f"{value:.1f}", f"{2048 / value * 1e3:,.0f}", f"{share:.2f}×"]
        )
    figures["train_time_vs_local"] = taken["flight, prefetch"] / taken["in process"]
    figures["prefetch_gain"] = taken["flight"] / taken["flight, prefetch"]
    for cluster in opened[1:]:
        cluster.close()
    if more is not None:
        more.close()

    most, seconds = (2, 0.5) if given.quick else (4, 4.0)
    say(f"one server, 1-{most} clients")
    for clients, per_second in scaling(hosts, most, seconds).items():
        rows.append([f"one server, {clients} clients", "flight", "", f"{per_second:,.0f}", ""])
    say("a trainer that is started again")
    plan = QUICK if given.quick else FULL
    again = restarts(hosts, plan, say)
    say("killed servers")
    figures["seconds_to_serve_after_kill"] = seconds_to_serve(hosts, 1 if given.quick else 4)
    for how, seconds in again.items():
        share = f"{again['reload'] / seconds:.1f}× sooner" if how != "reload" else ""
        rows.append([RESTARTS[how], "flight", f"{seconds * 1e3:,.0f}", "", share])
    if not given.quick:
        started = process_start_seconds()
        rows.append(["start of its process, beside", "", f"{started * 1e3:,.0f}", "", ""])
    figures["adopt_vs_reload"] = again["reload"] / again["adopt"]
    figures["rewind_vs_reload"] = again["reload"] / again["rewind"]
    say("done")
    report(
        given,
        config={
            "gigabytes_per_server": plan.gigabytes,
            "shards": SHARDS,
            "dim": DIM,
            "rows": ROWS,
            "repeats": rounds * TURN,
            "batch": 2048,
        },
        figures=figures,
        columns=["what", "who", "ms", "rows or samples/s", "transport, or to in process"],
        rows=rows,
        notes=[NOTE],
        packages=["pyarrow", "ray"],
    )


if __name__ == "__main__":
    main()
