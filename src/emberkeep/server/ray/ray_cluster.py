"""Shard servers placed, supervised and restarted by Ray; rows travel over Flight.

Each server is an actor with a name: spread over the nodes, restarted wherever there is room when
its process dies, found by its name. Workers of a job find the servers the same way.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from emberkeep.cluster.base import check_size
from emberkeep.cluster.remote.adoptable_rows import OnRestart, check_on_restart
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.timing import Timing
from emberkeep.cluster.spread import check_tier, places, warn_of_sharing
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError, EmberkeepError, SecurityError, ServerError
from emberkeep.runtime import pool as pools
from emberkeep.runtime.background import end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.stopping import Stop
from emberkeep.runtime.waiting import Waiting
from emberkeep.server.ray.local_ray import local_address
from emberkeep.server.ray.ray_session import (
    NAMESPACE,
    connected_ray,
    environment,
    is_connected,
    run_name,
)
from emberkeep.server.ray.ray_session import ensure_ray as ensure_ray
from emberkeep.server.ray.server_resources import (
    ServerResources,
    check_tier_of,
    nbytes_of,
    needed_memory,
)
from emberkeep.tables import SGD, Optimizer, Table, Tier
from emberkeep.wire.connection import Connection
from emberkeep.wire.private_socket import own_socket
from emberkeep.wire.security import Security

_ASK_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_START_SECONDS = 120.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """Where rows live: servers that Ray places.

    - `address` is a Ray cluster that exists ("auto": the one of this machine); without it a local
      one is started, which ends with this process.
    - `name` names servers that `emberkeep cluster up` has started, or will name those of this run;
      servers that this object starts end with the cluster.
    - `cpus`, `memory` and `disk` are what each server reserves. Memory is what it takes once all
      rows were trained, by the tables, unless it is given; disk, for a tier, is counted where it
      is given and nodes say how much of `emberkeep_disk` they have.
    - With a certificate and a token in `security` servers listen on the address of their node;
      without, where only their user reaches them, which several nodes are refused. Those that
      are up already let processes of the Ray cluster know how to reach them.
    - `rank` of `world` makes this process one of several that train together, synchronously.
    - With `parity`, servers that die come back from the others, with every row as it was. A node
      gets at most `r` servers where there are enough nodes; a warning says where there are not.
    - With a `tier` servers that this object starts keep rows in files of their node, below its
      path; each has its `memory`. One that is restarted comes to the same node if that is there.
      Servers that are up already have the tier that they were started with: another path, or none,
      is refused, and other memory is a warning.
    - `on_restart` is as that of `ek.connect`, for servers that are up already.
    """

    shards: int | None = None
    address: str | None = None
    name: str | None = None
    cpus: float = 0.1
    memory: int | str | None = None
    disk: int | str | None = None
    threads: int | None = None
    security: Security = field(default_factory=Security)
    timing: Timing = field(default_factory=Timing)
    rank: int = 0
    world: int = 1
    parity: Parity | None = None
    tier: Tier | None = None
    on_restart: OnRestart = "rewind"

    def __post_init__(self) -> None:
        check_on_restart(self.on_restart, self.parity)
        check_tier(self.tier, self.parity)
        if self.shards is not None:
            check_size(self.shards, parity=self.parity)
        elif self.name is None:
            raise ConfigError("ray_cluster() needs shards=, or the name= of a cluster that is up")
        if self.cpus < 0:
            raise ConfigError(f"cpus must be 0 or more, not {self.cpus:g}")
        self.resources((), SGD(lr=1.0))  # refuses what is no size
        if self.disk is not None and self.tier is None:
            raise ConfigError("disk= is for servers with a tier: give tier=, or leave it out")
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank is from 0 to below world, not {self.rank} of {self.world}")

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        ensure_ray(self.address or (local_address() if self.name else None))
        launcher = self._launcher(self.resources(tables, optimizer))
        try:
            if self.parity is not None and self.rank == 0:
                launcher.warn_of_sharing(self.parity)
            cluster = FlightCluster(
                tables, optimizer, launcher, seed=seed, pool=pools.shared(),
                security=launcher.security(), timing=self.timing, rank=self.rank,
                world=self.world, coordinate=self.rank == 0, parity=self.parity,
                on_restart=self.on_restart,
            )  # fmt: skip
        except BaseException:
            launcher.close()
            raise
        if self.rank == 0:
            launcher.attach()
        return cluster

    def resources(self, tables: Sequence[Table], optimizer: Optimizer) -> ServerResources:
        """What each server takes of its node."""
        if self.memory is not None:
            memory = nbytes_of("memory", self.memory)
        else:
            memory = needed_memory(tables, optimizer, self.shards or 1, self.tier)
        disk = 0 if self.disk is None else nbytes_of("disk", self.disk)
        return ServerResources(cpus=self.cpus, memory=memory, disk=disk)

    def _launcher(self, resources: ServerResources) -> RayLauncher:
        if self.name is not None:
            found = find(self.name)
            if found:
                if self.shards not in (None, len(found)):
                    raise ConfigError(
                        f"cluster {self.name!r} has {len(found)} shards, not {self.shards}"
                    )
                launcher = RayLauncher(found, timing=self.timing)
                if self.tier is not None and self.rank == 0:
                    launcher.check_tier(self.name, self.tier)
                return launcher
            if self.shards is None:
                raise ConfigError(
                    f"there is no cluster {self.name!r}: start it with emberkeep cluster up, or "
                    "give shards="
                )
        assert self.shards is not None
        name = self.name or f"run-{uuid.uuid4().hex[:8]}"
        actors = start(
            self.shards, name=name, resources=resources, threads=self.threads,
            security=self.security, parity=self.parity, tier=self.tier,
        )  # fmt: skip
        return RayLauncher(actors, owned=name, timing=self.timing)


def ray_cluster(
    *,
    shards: int | None = None,
    address: str | None = None,
    name: str | None = None,
    cpus: float = 0.1,
    memory: int | str | None = None,
    disk: int | str | None = None,
    threads: int | None = None,
    security: Security | None = None,
    timing: Timing | None = None,
    parity: Parity | None = None,
    tier: Tier | None = None,
    on_restart: OnRestart = "rewind",
) -> RayCluster:
    """Servers placed by Ray: `ek.EmbeddingBags(..., cluster=ek.ray_cluster(shards=8))`.

    With `parity` a node gets at most `r` of them, if there are enough nodes. With
    `tier=ek.Tier("/nvme/run", memory="48GB")` rows live in files of their nodes. Each server has
    memory of its node set aside, for all rows of its tables unless `memory="60GB"` says how much.
    """
    return RayCluster(
        shards=shards, address=address, name=name, cpus=cpus, memory=memory, disk=disk,
        threads=threads, security=security or Security(), timing=timing or Timing(), parity=parity,
        tier=tier, on_restart=on_restart,
    )  # fmt: skip


# -- servers as actors ---------------------------------------------------------------------------


class _Host:
    """The actor: its process is the server. Ray makes it again when the process dies."""

    def __init__(
        self, threads: int | None, host: str, security: Security, tier: Tier | None = None,
        keep_rows_for: timedelta | None = None,
    ) -> None:  # fmt: skip
        from emberkeep.runtime.event_log import EventLog, new_log_directory
        from emberkeep.runtime.metrics import MetricsServer
        from emberkeep.server.flight_server import ShardServer
        from emberkeep.server.server_warmup import warm_up
        from emberkeep.server.server_watch import ServerWatch
        from emberkeep.server.shard_service import ShardService

        warm_up()
        # Where this user can keep nothing, events go where Ray keeps what its actors print.
        try:
            log = EventLog(new_log_directory() / "server.log")
        except OSError:
            log = EventLog()
        served = ShardService(threads=threads, tier=tier, on_event=log)
        served.page.log = log.path
        self._metrics = MetricsServer(served.page.text, 0, not_ready=served.page.not_ready)
        served.page.metrics_url = f"http://127.0.0.1:{self._metrics.port}/metrics"
        self._watch = ServerWatch(served, keep_rows_for=keep_rows_for)
        self._watch.start()
        own = None if security.tls else own_socket()
        self._server = ShardServer(served, host=host, socket=own, security=security)
        served.events("listening", {"address": self._server.address, "pid": os.getpid()})
        self._security, self._tier = security.of_client(), tier
        self._run: str | None = None

    def security(self) -> Security:
        """What clients bring. A process that may ask can run code on every node anyway."""
        return self._security

    def where(self) -> tuple[str, str, int]:
        """Address, life and process."""
        return self._server.address, self._server.served.life, os.getpid()

    def node(self) -> str:
        return str(connected_ray().get_runtime_context().get_node_id())

    def tier(self) -> Tier | None:
        """That it was started with."""
        return self._tier

    def attach(self, run: str) -> None:
        """Notes which run it serves, for people."""
        self._run = run

    def attached(self) -> str | None:
        return self._run


def start(
    shards: int,
    *,
    name: str,
    resources: ServerResources,
    threads: int | None,
    security: Security,
    detached: bool = False,
    parity: Parity | None = None,
    tier: Tier | None = None,
    keep_rows_for: timedelta | None = None,
) -> list[Any]:
    """Starts servers, spread over the nodes that have what each takes; with `parity`, at most `r`
    of them on each if there are enough nodes. With a `tier` each has a node, to which it returns
    while that is there. `detached` ones outlive this process; rows that a run has left there, they
    let go after `keep_rows_for`."""
    ray = connected_ray()
    if find(name):
        raise _taken(name)
    known = ray.nodes()
    nodes = sum(bool(node["Alive"]) for node in known)
    if nodes > 1 and not (security.tls and security.authority and security.token):
        raise SecurityError(
            f"Ray has {nodes} nodes, so that rows would cross the network: start servers with "
            "emberkeep cluster up --tls-certificate … --tls-key … --authority … --token-file …, or "
            "give security="
        )
    homes = resources.homes(shards, known)
    kind = ray.remote(_NodeHost if security.tls and security.token else _Host)
    security = security.with_token()
    options = {
        **resources.options(),
        "max_restarts": -1,
        "max_task_retries": -1,
        "namespace": NAMESPACE,
        "lifetime": "detached" if detached else None,
        "runtime_env": {"env_vars": environment(threads)},
    }
    carried = security.carried()
    strategies: list[Any] = ["SPREAD"] * shards if tier is None else _returning(homes)
    numbers = None if parity is None else places(shards, nodes, parity)
    actors: list[Any] = []
    group: str | None = None
    try:
        if numbers is not None and nodes > 1:
            group = name
            strategies = _strategies(name, numbers, resources, detached)
        for shard in range(shards):
            actors.append(
                kind.options(
                    name=f"{name}/{shard}", scheduling_strategy=strategies[shard], **options
                ).remote(threads, "127.0.0.1", carried, tier, keep_rows_for)
            )
        waiting = Waiting()
        waiting.say(f"waiting for Ray to start {shards} servers")
        ray.get([actor.where.remote() for actor in actors], timeout=_START_SECONDS)
        waiting.over(f"{shards} servers ready")
    except ray.exceptions.GetTimeoutError:
        _end(actors, group)
        raise ServerError(
            f"{shards} servers that take {resources} each did not start within "
            f"{_START_SECONDS:g} s: has something else taken the room of Ray's nodes? ray status "
            "shows it"
        ) from None
    except ray.exceptions.RayError as error:
        _end(actors, group)
        raise ServerError(f"the servers did not start: {_reason(error)}") from None
    except ValueError as error:
        _end(actors, group)
        if "already taken" in str(error):  # by another process that looked at the same time
            raise _taken(name) from None
        raise
    except BaseException:
        _end(actors, group)
        raise
    return actors


def _taken(name: str) -> ConfigError:
    return ConfigError(
        f"cluster {name!r} is up already, or is being started: take another --name, or end it with "
        "emberkeep cluster down"
    )


def _strategies(
    name: str, numbers: Sequence[int], resources: ServerResources, detached: bool
) -> list[Any]:
    """For each server its place, those of one number on one node and no others; also for one that
    is started again."""
    ray = connected_ray()
    bundles = [resources.bundle(numbers.count(node)) for node in range(max(numbers) + 1)]
    group = ray.util.placement_group(
        bundles,
        strategy="STRICT_SPREAD",
        name=_group_name(name),
        lifetime="detached" if detached else None,
    )
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    return [strategy(group, number) for number in numbers]


def _returning(homes: Sequence[str]) -> list[Any]:
    """Each server is placed on its node, also when it is started again, because its files are
    there; elsewhere only if that node is gone."""
    affinity = connected_ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return [affinity(node_id=node, soft=True) for node in homes]


def _group_name(name: str) -> str:
    return f"{NAMESPACE}/{name}"


class _NodeHost(_Host):
    """Listens where other nodes can reach it."""

    def __init__(
        self, threads: int | None, host: str, security: Security, tier: Tier | None = None,
        keep_rows_for: timedelta | None = None,
    ) -> None:  # fmt: skip
        node = connected_ray().util.get_node_ip_address()
        super().__init__(threads, node, security, tier, keep_rows_for)


def find(name: str) -> list[Any]:
    """The servers of a cluster by name, in shard order; none if there is no such cluster."""
    shards = sorted(int(shard) for at, shard in _named_actors() if at == name and shard.isdigit())
    return [connected_ray().get_actor(f"{name}/{shard}", namespace=NAMESPACE) for shard in shards]


def clusters() -> list[str]:
    """The names of all clusters that are up on this Ray."""
    return sorted({name for name, _ in _named_actors()})


def _named_actors() -> list[tuple[str, str]]:
    """Name of the cluster and shard of all servers on this Ray."""
    actors = connected_ray().util.list_named_actors(all_namespaces=True)
    names = [actor["name"].rpartition("/") for actor in actors if actor["namespace"] == NAMESPACE]
    return [(name, shard) for name, slash, shard in names if slash]


def stop(name: str) -> None:
    """Ends the servers of a cluster for good, and what was reserved for them."""
    _end(find(name), name)


def _end(actors: Sequence[Any], group: str | None) -> None:
    if not is_connected():
        return
    ray = connected_ray()
    endings = [partial(ray.kill, actor, no_restart=True) for actor in actors]
    with suppress(ValueError):  # there is none
        if group is not None:
            found = ray.util.get_placement_group(_group_name(group))
            endings.append(partial(ray.util.remove_placement_group, found))
    end_all(*endings)


class RayLauncher:
    """Servers that are actors. Those of a cluster whose name is `owned` end with it; a dead one
    has the `patience` to be made again.

    That Ray has made another proves the death of the one before on the same node alone: a node that
    Ray cannot reach counts as dead there, and its server answers whom it can reach until its lease
    is over.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        owned: str | None = None,
        timing: Timing | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self.stop = Stop(clock)
        self._actors = list(actors)
        self._owned = owned
        self._timing = timing or Timing()
        self._nodes: dict[str, str] = {}
        """By life, of servers whose address was asked for."""

    @property
    def count(self) -> int:
        return len(self._actors)

    def address(self, shard: int) -> str:
        address, life, _ = self.where(shard)
        if life not in self._nodes:
            self._nodes[life] = self._ask("node", shard)
        return address

    def _on_same_node(self, shard: int, life: str) -> bool:
        """Whether the server is where that of an earlier life was."""
        return bool(self._nodes.get(life) == self._ask("node", shard, _ASK_SECONDS))

    def pid(self, shard: int) -> int:
        return self.where(shard)[2]

    def security(self) -> Security:
        """What servers demand of their clients."""
        return self._ask("security", 0)  # type: ignore[no-any-return]

    def where(self, shard: int, seconds: float | None = None) -> tuple[str, str, int]:
        """Address, life and process of a server; waits while Ray makes it again, for `patience`
        unless `seconds` are given."""
        return self._ask("where", shard, seconds)  # type: ignore[no-any-return]

    def check_tier(self, name: str, tier: Tier) -> None:
        """Refuses a tier that the servers of this cluster, all of which were started alike, do not
        have; other memory is a warning."""
        check_tier_of(name, self._ask("tier", 0, _START_SECONDS), tier)

    def warn_of_sharing(self, parity: Parity) -> None:
        """Says what a node that dies takes with it, where that is more than parity bears."""
        nodes = [self._ask("node", shard) for shard in range(self.count)]
        remedy = (
            f"add nodes to Ray, and start servers with emberkeep cluster up --parity "
            f"{parity.k},{parity.r}"
        )
        warn_of_sharing(parity, nodes, remedy)

    def attach(self) -> None:
        """Notes at every server that this run trains on it."""
        now = self._clock.now().isoformat(timespec="seconds")
        for actor in self._actors:
            actor.attach.remote(f"{run_name()}, since {now}")

    def attached(self) -> str | None:
        """The run that the servers serve, if its coordinator is alive; None if there is none."""
        security = self.security()
        for shard in range(self.count):
            with suppress(EmberkeepError):  # a server that is gone serves nobody
                connection = Connection(self.where(shard, _ASK_SECONDS)[0], security)
                try:
                    status, _ = connection.act("status", deadline=timedelta(seconds=_ASK_SECONDS))
                finally:
                    connection.close()
                if status["epoch"] and not status["lapsed"]:
                    return self._ask("attached", shard, _ASK_SECONDS) or "a run that is starting"
        return None

    def _ask(self, what: str, shard: int, seconds: float | None = None) -> Any:
        ray = connected_ray()
        if seconds is None:
            seconds = self._timing.patience.total_seconds()
        try:
            return ray.get(getattr(self._actors[shard], what).remote(), timeout=seconds)
        except ray.exceptions.RayError as error:
            raise ServerError(f"Ray does not bring shard {shard} back: {_reason(error)}") from None

    @property
    def replaceable(self) -> bool:
        return True

    def gone(self, shard: int, life: str) -> bool:
        """Whether Ray has put another in its place, on its node; while it does, nobody answers."""
        try:
            return self.where(shard, _LOOK_SECONDS)[1] != life and self._on_same_node(shard, life)
        except ServerError:
            return False

    def replace(self, shard: int, life: str) -> str:
        """Waits until Ray has made the server again; ends it first if it lives and is silent. One
        on another node is waited for as long as a lease, which the one before may have."""
        ray = connected_ray()
        patience = self._timing.patience.total_seconds()
        start, asked_to_end, made = self._clock.monotonic(), False, False
        while self._clock.monotonic() < start + patience:
            try:
                address, now, _ = self.where(shard, min(_ASK_SECONDS, patience))
                made = now != life
                lapsed = self._clock.monotonic() - start > self._timing.lease.total_seconds()
                if made and (not life or lapsed or self._on_same_node(shard, life)):
                    return address
            except ServerError:
                pass
            if not asked_to_end and not made:
                ray.kill(self._actors[shard], no_restart=False)
                asked_to_end = True
            self.stop.pause(_POLL_SECONDS, f"Ray to bring shard {shard} back")
        raise ServerError(
            f"Ray did not bring shard {shard} back within {patience:g} s: does it have room for "
            "the server? ray status shows"
        )

    def close(self) -> None:
        if self._owned is not None:
            _end(self._actors, self._owned)


# -- details -------------------------------------------------------------------------------------


def _reason(error: BaseException) -> str:
    """The line of a long story that says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)
