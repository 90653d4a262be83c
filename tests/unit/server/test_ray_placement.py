"""Where servers go on Ray, and what is left if they do not start. Ray itself is played."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from emberkeep.cluster.remote.timing import Timing
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError, ServerError
from emberkeep.server.ray import ray_cluster
from emberkeep.server.ray.server_resources import ServerResources
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.wire.security import Security

SAFE = Security(token="a token of enough characters", certificate=b"c", key=b"k", authority=b"a")


class PlayedError(Exception):
    pass


class PlayedRay:
    """As much of Ray as starting servers takes. Names in `taken` belong to another process."""

    def __init__(self, nodes: int, taken: tuple[str, ...] = ()) -> None:
        self.taken = taken
        self.names: list[str] = []
        self.killed: list[str] = []
        self.strategies: list[Any] = []
        self.groups: dict[str, list[dict[str, float]]] = {}
        self.removed: list[Any] = []
        self._nodes = nodes
        self.exceptions = SimpleNamespace(RayError=PlayedError, GetTimeoutError=TimeoutError)
        self.util = SimpleNamespace(
            list_named_actors=lambda all_namespaces: [],
            placement_group=self._group,
            get_placement_group=self._get_group,
            remove_placement_group=self.removed.append,
            scheduling_strategies=SimpleNamespace(
                PlacementGroupSchedulingStrategy=lambda group, index: (group, index)
            ),
        )

    def nodes(self) -> list[dict[str, Any]]:
        room = {"memory": 10.0 * 10**9}
        return [
            {"NodeID": f"{n}", "Alive": n < self._nodes, "Resources": room}
            for n in range(self._nodes + 1)
        ]

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(self, *, name: str, scheduling_strategy: Any, **_: Any) -> Any:
        def make(*_: Any) -> Any:
            if name in self.taken:
                raise ValueError(f"The name {name} is already taken.")
            self.names.append(name)
            self.strategies.append(scheduling_strategy)
            return SimpleNamespace(name=name, where=SimpleNamespace(remote=lambda: name))

        return SimpleNamespace(remote=make)

    def get(self, asked: Any, timeout: float) -> Any:
        return asked

    def kill(self, actor: Any, no_restart: bool) -> None:
        self.killed.append(actor.name)

    def _group(self, bundles: list[Any], *, strategy: str, name: str, lifetime: Any) -> str:
        assert strategy == "STRICT_SPREAD"
        self.groups[name] = bundles
        return name

    def _get_group(self, name: str) -> str:
        if name not in self.groups:
            raise ValueError(name)
        return name


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    def begin(nodes: int, taken: tuple[str, ...] = ()) -> PlayedRay:
        ray = PlayedRay(nodes, taken)
        monkeypatch.setattr(ray_cluster, "connected_ray", lambda: ray)
        monkeypatch.setattr(ray_cluster, "is_connected", lambda: True)
        return ray

    return begin


def started(shards: int, parity: Parity | None, **more: Any) -> list[Any]:
    return ray_cluster.start(
        shards, name="c", resources=ServerResources(cpus=0.5, memory=10**9), threads=None,
        security=SAFE, parity=parity, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("nodes", "shards", "r"), [(8, 4, 1), (3, 4, 2), (4, 8, 2), (4, 7, 3)])
def test_a_node_gets_at_most_r_servers_also_where_nodes_are_fewer(
    play: Any, nodes: int, shards: int, r: int
) -> None:
    ray = play(nodes)
    started(shards, Parity(k=1, r=r))
    (bundles,) = ray.groups.values()
    used = Counter(index for _, index in ray.strategies)
    assert len(bundles) == len(used) <= nodes
    assert max(used.values()) <= r
    for index, bundle in enumerate(bundles):
        assert bundle == {"CPU": 0.5 * used[index], "memory": 10**9 * used[index]}


@pytest.mark.parametrize(
    ("nodes", "parity"), [(3, None), (1, Parity(k=1, r=4)), (1, Parity(k=2, r=1))]
)
def test_servers_are_spread_as_ray_likes_where_nothing_can_be_enforced(
    play: Any, nodes: int, parity: Parity | None
) -> None:
    ray = play(nodes)
    started(4, parity)
    assert ray.strategies == ["SPREAD"] * 4
    assert not ray.groups


def test_of_two_that_start_the_same_cluster_one_is_refused_and_leaves_nothing(play: Any) -> None:
    ray = play(4, taken=("c/1",))
    with pytest.raises(ConfigError, match="'c' is up already, or is being started"):
        started(3, Parity(k=1, r=1))
    assert ray.killed == ["c/0"]  # its own alone
    assert len(ray.removed) == 1


def test_a_server_has_the_patience_of_its_launcher_to_return(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, clock = play(1), VirtualClock()
    actors = started(1, None)
    timing = Timing(patience=timedelta(minutes=5))
    launcher = ray_cluster.RayLauncher(actors, timing=timing, clock=clock)
    monkeypatch.setattr(launcher, "where", lambda *_: ("address", "the old life", 1))
    with pytest.raises(ServerError, match="within 300 s"):
        launcher.replace(0, "the old life")
    assert 300 <= clock.monotonic() < 301
    assert ray.killed == ["c/0"]


@pytest.mark.parametrize("node", ["one", "another"])
def test_a_server_that_ray_has_made_elsewhere_does_not_prove_that_the_other_is_dead(
    play: Any, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    """Ray cannot reach its node, and workers beside it may: until its lease is over it answers."""
    ray, clock = play(2), VirtualClock()
    timing = Timing(deadline=timedelta(seconds=5), lease=timedelta(seconds=20))
    launcher = ray_cluster.RayLauncher(started(1, None), timing=timing, clock=clock)
    found = {"where": ("there", "old", 1), "node": "one"}
    monkeypatch.setattr(launcher, "_ask", lambda what, *_: found[what])
    assert launcher.address(0) == "there"
    assert not launcher.gone(0, "old")
    found |= {"where": ("elsewhere", "new", 2), "node": node}
    assert launcher.gone(0, "old") == (node == "one")
    assert launcher.replace(0, "old") == "elsewhere"
    assert clock.monotonic() >= (0 if node == "one" else 20)
    assert (clock.monotonic() > 0) == (node == "another")
    assert ray.killed == []
    assert launcher.replace(0, "") == "elsewhere"  # nobody was there before
