"""Training in several processes: workers of Ray Train over the same shard servers."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from emberkeep import config
from emberkeep.keeper import Costs, Recoveries
from emberkeep.server.ray import ray_cluster
from emberkeep.server.ray.local_ray import local_address
from emberkeep.train.loop import run
from emberkeep.train.result import Result
from emberkeep.train.run_config import RunConfig
from emberkeep.wire.security import Security

ATTEMPTS = 4
_WORKER_CPUS = 0.5
_SERVER_CPUS = 0.1


def run_on_ray(settings: RunConfig, *, fresh: bool = False) -> Result:
    """Trains with `cluster.workers` workers, the dense network under DDP, rows on servers.

    The death of a worker ends all of them; they are started again and resume from the newest
    version, if versions are saved.
    """
    given = settings.cluster
    with ray_cluster.connected(given.address or (local_address() if given.name else None)):
        started: list[Any] = []
        name = given.name or f"run-{uuid.uuid4().hex[:8]}"
        if not ray_cluster.find(name):
            started = ray_cluster.start(
                given.shards, name=name, cpus=_SERVER_CPUS, threads=None, security=Security()
            )
        try:
            named = replace(settings, cluster=replace(given, name=name))
            reply = ray_cluster.run_workers(
                work,
                {"settings": config.to_toml(named), "fresh": fresh},
                workers=given.workers,
                cpus=_WORKER_CPUS,
                attempts=1 if settings.checkpoint.path is None else ATTEMPTS,
            )
        finally:
            ray_cluster.stop(started)
    return _result(settings, reply["result"])


def work(given: dict[str, Any]) -> None:
    """What one worker does."""
    settings = config.parse(RunConfig, given["settings"], source="the settings of the run")
    rank, _ = ray_cluster.place()
    result = run(settings, fresh=given["fresh"], rank=rank)
    if rank == 0:
        ray_cluster.report(given, {"result": result.to_dict()})
    dist.barrier()  # nobody leaves while rank 0 still looks at rows


def _result(settings: RunConfig, reply: dict[str, Any]) -> Result:
    kinds = {"checkpoints": Costs, "recoveries": Recoveries}
    parts = {
        key: None if reply.get(key) is None else kind(**reply[key]) for key, kind in kinds.items()
    }
    return Result(**{**reply, **parts, "settings": settings})
