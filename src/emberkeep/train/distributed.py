"""Training in several processes: workers that Ray places, over the same shard servers."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from emberkeep import config
from emberkeep._types import Json
from emberkeep.keeper import Costs, Recoveries
from emberkeep.keeper.ranks import collective_timeout
from emberkeep.keeper.signals import EXIT_CODE
from emberkeep.server.ray import ray_cluster
from emberkeep.server.ray.local_ray import local_address
from emberkeep.server.ray.ray_session import connected
from emberkeep.server.ray.ray_workers import Mailbox, Place, WorkerGroup
from emberkeep.server.ray.server_resources import ServerResources, nbytes_of, needed_memory
from emberkeep.tiers.tier_use import TierUse
from emberkeep.train import build
from emberkeep.train.hooks import Hook
from emberkeep.train.loop import check_start, run
from emberkeep.train.result import Result
from emberkeep.train.run_config import RunConfig
from emberkeep.train.supervisor import Relay, Supervisor
from emberkeep.wire.security import Security

_WORKER_CPUS = 0.5
_SERVER_CPUS = 0.1
# The interface over which processes of one machine meet.
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}
_TERMINATED = 128 + signal.SIGTERM  # as shells report it


def run_on_ray(settings: RunConfig, *, hooks: Sequence[Hook] = (), fresh: bool = False) -> Result:
    """Trains with `cluster.workers` workers, the dense network under DDP, rows on servers.

    The death of a worker ends all of them; they are started again and resume from the newest
    version, if versions are saved. `hooks` are called in this process, with what happens in rank
    0. Signals act as they do on a run in one process.
    """
    given = settings.cluster
    kept = settings.checkpoint.path is not None
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.close)
        check_start(settings, fresh)
        stack.enter_context(_ended_by_sigterm(EXIT_CODE if kept else _TERMINATED))
        address = given.address or (local_address() if given.name else None)
        stack.enter_context(connected(address))
        name = given.name or f"run-{uuid.uuid4().hex[:8]}"
        found = ray_cluster.find(name)
        up, tier = bool(found), settings.tier.spec()
        if up and tier is not None:
            ray_cluster.RayLauncher(found).check_tier(name, tier)
        for hook in hooks:
            hook.on_event(
                "starting", {"workers": given.workers, "servers": 0 if up else given.shards}
            )
        if not up:
            servers = ray_cluster.start(
                given.shards, name=name, resources=_resources(settings), threads=None,
                security=Security(), parity=settings.parity.spec(), tier=tier,
            )  # fmt: skip
            # Held here: Ray ends servers that no process holds, also while workers start again.
            stack.callback(ray_cluster.RayLauncher(servers, owned=name).close)
        # Workers are where Ray was started, not where this command was.
        sent = config.to_toml(config.absolute(replace(settings, cluster=replace(given, name=name))))

        def start(fresh: bool) -> WorkerGroup:
            document = {"settings": sent, "fresh": fresh}
            return WorkerGroup(work, document, workers=given.workers, cpus=_WORKER_CPUS)

        reply = Supervisor(start, hooks, kept=kept, fresh=fresh).run()
        result = _result(settings, reply)
        for hook in hooks:
            hook.on_end(result)
        return result


def _resources(settings: RunConfig) -> ServerResources:
    """What each server takes of its node: as with one worker, what all rows take."""
    given = settings.cluster
    if given.memory is not None:
        memory = nbytes_of("memory", given.memory)
    else:
        tables = build.tables(settings, build.feature_rows(settings))
        memory = needed_memory(
            tables, settings.optimizer.spec(), given.shards, settings.tier.spec()
        )
    return ServerResources(
        cpus=_SERVER_CPUS, memory=memory,
        disk=0 if given.disk is None else nbytes_of("disk", given.disk),
    )  # fmt: skip


def work(document: Json, place: Place, mailbox: Mailbox) -> Json:
    """What one worker does; rank 0 returns the result."""
    settings = config.parse(RunConfig, document["settings"], source="the settings of the run")
    hooks = []
    if place.rank == 0:
        relay = Relay(mailbox)
        warnings.showwarning = lambda message, *_: relay.warn(str(message))
        hooks.append(relay)
    if place.together and sys.platform in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK[sys.platform])
    dist.init_process_group(
        "gloo", init_method=f"tcp://{place.meeting}", rank=place.rank, world_size=place.world,
        timeout=collective_timeout(settings.cluster.timing().patience),
    )  # fmt: skip
    try:
        result = run(settings, hooks=hooks, fresh=document["fresh"], rank=place.rank)
        dist.barrier()  # nobody leaves while rank 0 still looks at rows
    except (KeyboardInterrupt, SystemExit):
        return {}  # asked to stop, and saved: the keeper has said so
    return result.to_dict()


@contextmanager
def _ended_by_sigterm(code: int) -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does, so that nothing is left behind, and exits with
    `code`; in the main thread, which alone hears signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    asked = False

    def end(number: int, _frame: Any) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt  # which Ray's calls let through; they take SystemExit for their own

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        if not asked:
            raise
        print("emberkeep: SIGTERM: ended at once; versions are as they were", file=sys.stderr)
        raise SystemExit(code) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _result(settings: RunConfig, reply: Json) -> Result:
    checkpoints, recoveries = reply.get("checkpoints"), reply.get("recoveries")
    tier = reply.get("tier")
    parts = {
        "checkpoints": None if checkpoints is None else Costs.from_dict(checkpoints),
        "recoveries": None if recoveries is None else Recoveries(**recoveries),
        "tier": None if tier is None else TierUse(**tier),
    }
    # JSON has no NaN: what does not exist, such as the AUC of one class, has come as None.
    numbers = {
        key: math.nan if reply[key] is None else reply[key]
        for key in ("loss", "auc", "log_loss", "samples_per_second")
    }
    return Result(**{**reply, **numbers, **parts, "settings": settings})
