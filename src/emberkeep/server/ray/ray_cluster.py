"""Shard servers placed, supervised and restarted by Ray; rows travel over Flight.

Each server is an actor with a name: spread over the nodes, restarted wherever there is room when
its process dies, found by its name. Workers of a job find the servers the same way.
"""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from emberkeep.cluster.base import check_size
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.remote_shard import Timing
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError, SecurityError, ServerError
from emberkeep.runtime import pool as pools
from emberkeep.runtime.background import end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.server.ray.local_ray import bring_token, local_address, reachable
from emberkeep.tables import Optimizer, Table
from emberkeep.wire.security import Security

NAMESPACE = "emberkeep"
_ASK_SECONDS = 5.0
_START_SECONDS = 120.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """Where rows live: servers that Ray places.

    - `address` is a Ray cluster that exists ("auto": the one of this machine); without it a local
      one is started, which ends with this process.
    - `name` names servers that `emberkeep cluster up` has started, or will name those of this run;
      servers that this object starts end with the cluster.
    - `cpus` is what each server reserves.
    - With a certificate and a token in `security` servers listen on the address of their node;
      without, on the loopback interface, which several nodes are refused. Servers that are up
      already let processes of the Ray cluster know how to reach them.
    - `rank` of `world` makes this process one of several that train together, synchronously.
    - With `parity`, servers that die come back from the others, with every row as it was. Each
      server gets a node of its own where there are enough; a warning says where there are not.
    """

    shards: int | None = None
    address: str | None = None
    name: str | None = None
    cpus: float = 0.1
    threads: int | None = None
    security: Security = field(default_factory=Security)
    timing: Timing = field(default_factory=Timing)
    rank: int = 0
    world: int = 1
    parity: Parity | None = None

    def __post_init__(self) -> None:
        if self.shards is not None:
            check_size(self.shards, parity=self.parity)
        elif self.name is None:
            raise ConfigError("ray_cluster() needs shards=, or the name= of a cluster that is up")
        if self.cpus < 0:
            raise ConfigError(f"cpus must be 0 or more, not {self.cpus:g}")
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank is from 0 to below world, not {self.rank} of {self.world}")

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        ensure_ray(self.address or (local_address() if self.name else None))
        launcher = self._launcher()
        try:
            return FlightCluster(
                tables, optimizer, launcher, seed=seed, pool=pools.shared(),
                security=launcher.security(), timing=self.timing, rank=self.rank,
                world=self.world, coordinate=self.rank == 0, parity=self.parity,
            )  # fmt: skip
        except BaseException:
            launcher.close()
            raise

    def _launcher(self) -> RayLauncher:
        if self.name is not None:
            found = find(self.name)
            if found:
                if self.shards not in (None, len(found)):
                    raise ConfigError(
                        f"cluster {self.name!r} has {len(found)} shards, not {self.shards}"
                    )
                if self.parity is not None:
                    _check_nodes(self.parity, len(found))
                return RayLauncher(found)
            if self.shards is None:
                raise ConfigError(
                    f"there is no cluster {self.name!r}: start it with emberkeep cluster up, or "
                    "give shards="
                )
        assert self.shards is not None
        name = self.name or f"run-{uuid.uuid4().hex[:8]}"
        own_nodes = self.parity is not None and _check_nodes(self.parity, self.shards)
        actors = start(
            self.shards, name=name, cpus=self.cpus, threads=self.threads, security=self.security,
            own_nodes=own_nodes,
        )  # fmt: skip
        return RayLauncher(actors, owned=True)


def _check_nodes(parity: Parity, shards: int) -> bool:
    """Whether every server gets a node of its own; where nodes are too few for that, says so."""
    nodes = sum(bool(node["Alive"]) for node in _ray().nodes())
    together = -(-shards // nodes)
    if together > parity.r:
        warnings.warn(
            f"{shards} servers share {nodes} node{'s' if nodes > 1 else ''}: a node that dies "
            f"takes {together} with it, and parity brings {parity.r} back; the rest comes from "
            "versions",
            stacklevel=2,
        )
    return nodes >= shards


def ray_cluster(
    *,
    shards: int | None = None,
    address: str | None = None,
    name: str | None = None,
    cpus: float = 0.1,
    threads: int | None = None,
    security: Security | None = None,
    timing: Timing | None = None,
    parity: Parity | None = None,
) -> RayCluster:
    """Servers placed by Ray: `ek.EmbeddingBags(..., cluster=ek.ray_cluster(shards=8))`.

    With `parity` each gets a node of its own, if there are enough of them.
    """
    return RayCluster(
        shards=shards, address=address, name=name, cpus=cpus, threads=threads,
        security=security or Security(), timing=timing or Timing(), parity=parity,
    )  # fmt: skip


# -- servers as actors ---------------------------------------------------------------------------


class _Host:
    """The actor: its process is the server. Ray makes it again when the process dies."""

    def __init__(self, threads: int | None, host: str, security: Security) -> None:
        from emberkeep.server.flight_server import ShardServer
        from emberkeep.server.server_warmup import warm_up
        from emberkeep.server.shard_service import ShardService

        warm_up()
        self._server = ShardServer(ShardService(threads=threads), host=host, security=security)
        self._security = security.of_client()

    def security(self) -> Security:
        """What clients bring. A process that may ask can run code on every node anyway."""
        return self._security

    def where(self) -> tuple[str, str, int]:
        """Address, life and process."""
        return self._server.address, self._server.served.life, os.getpid()


def ensure_ray(address: str | None) -> None:
    """Connects to Ray: to the cluster at `address`, or to a local one that is started for this
    process; one that is connected already stays so."""
    if "ray" in sys.modules and _ray().is_initialized():
        return
    if address is not None:
        address = reachable(address)
        bring_token(address)
    ray = _ray()
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "runtime_env": {"env_vars": _environment(None)},
    }
    if address is None:
        options |= {"include_dashboard": False, "address": "local"}
    else:
        options["address"] = address
    try:
        ray.init(logging_level="error", **options)
    except Exception as error:  # Ray raises plain Exception where its own processes do not start
        ray.shutdown()
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ServerError(
            f"Ray at {address or 'this machine'} cannot be used: {reason} (if it demands a token, "
            "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file that holds it)"
        ) from None


def start(
    shards: int,
    *,
    name: str,
    cpus: float,
    threads: int | None,
    security: Security,
    detached: bool = False,
    own_nodes: bool = False,
) -> list[Any]:
    """Starts servers, spread over the nodes; with `own_nodes`, each on a node of its own.
    `detached` ones outlive this process."""
    ray = _ray()
    if find(name):
        raise ConfigError(
            f"cluster {name!r} is up already: take another --name, or end it with emberkeep "
            "cluster down"
        )
    nodes = sum(node["Alive"] for node in ray.nodes())
    if nodes > 1 and not (security.tls and security.token):
        raise SecurityError(
            f"Ray has {nodes} nodes, so that rows would cross the network: start servers with "
            "emberkeep cluster up --tls-certificate … --tls-key … --token-file …, or give security="
        )
    kind = ray.remote(_NodeHost if security.tls and security.token else _Host)
    options = {
        "num_cpus": cpus,
        "max_restarts": -1,
        "max_task_retries": -1,
        "namespace": NAMESPACE,
        "lifetime": "detached" if detached else None,
        "runtime_env": {"env_vars": _environment(threads)},
    }
    carried = security.carried()
    actors: list[Any] = []
    try:
        places = _places(shards, cpus, detached) if own_nodes else ["SPREAD"] * shards
        actors += [
            kind.options(
                name=f"{name}/{shard}", scheduling_strategy=places[shard], **options
            ).remote(threads, "127.0.0.1", carried)
            for shard in range(shards)
        ]
        ray.get([actor.where.remote() for actor in actors], timeout=_START_SECONDS)
    except ray.exceptions.GetTimeoutError:
        stop(actors)
        raise ServerError(
            f"{shards} servers of {cpus:g} cpus each did not start within {_START_SECONDS:g} s: "
            "does the Ray cluster have room for them?"
        ) from None
    except ray.exceptions.RayError as error:
        stop(actors)
        raise ServerError(f"the servers did not start: {_reason(error)}") from None
    except BaseException:
        stop(actors)
        raise
    return actors


def _places(shards: int, cpus: float, detached: bool) -> list[Any]:
    """A place on a different node for each server; also for one that is started again."""
    ray = _ray()
    group = ray.util.placement_group(
        [{"CPU": cpus or 0.001}] * shards,
        strategy="STRICT_SPREAD",
        lifetime="detached" if detached else None,
    )
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    return [strategy(group, shard) for shard in range(shards)]


class _NodeHost(_Host):
    """Listens where other nodes can reach it."""

    def __init__(self, threads: int | None, host: str, security: Security) -> None:
        super().__init__(threads, _ray().util.get_node_ip_address(), security)


def find(name: str) -> list[Any]:
    """The servers of a cluster by name, in shard order; none if there is no such cluster."""
    shards = sorted(int(shard) for at, shard in _named_actors() if at == name and shard.isdigit())
    return [_ray().get_actor(f"{name}/{shard}", namespace=NAMESPACE) for shard in shards]


def clusters() -> list[str]:
    """The names of all clusters that are up on this Ray."""
    return sorted({name for name, _ in _named_actors()})


def _named_actors() -> list[tuple[str, str]]:
    """Name of the cluster and shard of all servers on this Ray."""
    actors = _ray().util.list_named_actors(all_namespaces=True)
    names = [actor["name"].rpartition("/") for actor in actors if actor["namespace"] == NAMESPACE]
    return [(name, shard) for name, slash, shard in names if slash]


def disconnect() -> None:
    _ray().shutdown()


def stop(actors: Sequence[Any]) -> None:
    """Ends servers for good."""
    ray = _ray()
    if ray.is_initialized():
        end_all(*(partial(ray.kill, actor, no_restart=True) for actor in actors))


class RayLauncher:
    """Servers that are actors. `owned` ones end with the cluster."""

    def __init__(
        self, actors: Sequence[Any], *, owned: bool = False, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._clock = clock
        self._actors = list(actors)
        self._owned = owned

    @property
    def count(self) -> int:
        return len(self._actors)

    def address(self, shard: int) -> str:
        return self.where(shard)[0]

    def pid(self, shard: int) -> int:
        return self.where(shard)[2]

    def security(self) -> Security:
        """What servers demand of their clients."""
        return self._ask("security", 0, _START_SECONDS)  # type: ignore[no-any-return]

    def where(self, shard: int, seconds: float = _START_SECONDS) -> tuple[str, str, int]:
        """Address, life and process of a server; waits while Ray makes it again."""
        return self._ask("where", shard, seconds)  # type: ignore[no-any-return]

    def _ask(self, what: str, shard: int, seconds: float) -> Any:
        ray = _ray()
        try:
            return ray.get(getattr(self._actors[shard], what).remote(), timeout=seconds)
        except ray.exceptions.RayError as error:
            raise ServerError(f"Ray does not bring shard {shard} back: {_reason(error)}") from None

    def replace(self, shard: int, life: str) -> str:
        """Waits until Ray has made the server again; ends it first if it lives and is silent."""
        ray = _ray()
        until = self._clock.monotonic() + _START_SECONDS
        asked_to_end = False
        while self._clock.monotonic() < until:
            try:
                address, now, _ = self.where(shard, _ASK_SECONDS)
                if now != life:
                    return address
            except ServerError:
                pass
            if not asked_to_end:
                ray.kill(self._actors[shard], no_restart=False)
                asked_to_end = True
            self._clock.sleep(_POLL_SECONDS)
        raise ServerError(f"Ray did not bring shard {shard} back within {_START_SECONDS:g} s")

    def close(self) -> None:
        if self._owned:
            stop(self._actors)


# -- workers -------------------------------------------------------------------------------------


class _Box:
    """Where a worker leaves its result: Ray Train hands none over by itself."""

    def __init__(self) -> None:
        self._result: dict[str, Any] = {}

    def put(self, result: dict[str, Any]) -> None:
        self._result = result

    def get(self) -> dict[str, Any]:
        return self._result


def run_workers(
    work: Callable[[dict[str, Any]], None],
    config: dict[str, Any],
    *,
    workers: int,
    cpus: float,
    attempts: int,
) -> dict[str, Any]:
    """Runs `work(config)` in `workers` processes of Ray Train with torch.distributed set up.

    When a worker dies all of them are started again, at most `attempts` times in all. Returns what
    one of them has reported.
    """
    ray = _ray()
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    box = ray.remote(_Box).options(num_cpus=0).remote()
    with tempfile.TemporaryDirectory(prefix="emberkeep-") as where:
        trainer = TorchTrainer(
            work,
            train_loop_config={**config, "box": box},
            scaling_config=ScalingConfig(
                num_workers=workers, use_gpu=False, resources_per_worker={"CPU": cpus}
            ),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(
                storage_path=where, failure_config=FailureConfig(max_failures=attempts - 1)
            ),
        )
        try:
            trainer.fit()
        except Exception as error:
            raise ServerError(f"the workers failed: {_reason(error)}") from error
    result: dict[str, Any] = ray.get(box.get.remote())
    return result


def report(config: dict[str, Any], result: dict[str, Any]) -> None:
    """Hands over the result of a worker: plain values."""
    _ray().get(config["box"].put.remote(result))


def place() -> tuple[int, int]:
    """Rank and world size of this worker."""
    import ray.train

    context = ray.train.get_context()
    return context.get_world_rank(), context.get_world_size()


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Ray for as long as the body lasts; a Ray that was there before stays."""
    ray = _ray()
    before = ray.is_initialized()
    ensure_ray(address)
    try:
        yield
    finally:
        if not before:
            ray.shutdown()


# -- details -------------------------------------------------------------------------------------


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed: run pip install 'emberkeep[ray]'") from None
    return ray


def _environment(threads: int | None) -> dict[str, str]:
    """What servers need to know of this process: where its own sources are."""
    variables = {"EMBERKEEP_QUIET": "1", "OMP_NUM_THREADS": "1"}
    source = str(Path(str(files("emberkeep"))).parent)
    variables["PYTHONPATH"] = os.pathsep.join(
        part for part in (source, os.environ.get("PYTHONPATH", "")) if part
    )
    if threads is not None:
        variables["EMBERKEEP_THREADS"] = str(threads)
    return variables


def _reason(error: BaseException) -> str:
    """The line of a long story that says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)
