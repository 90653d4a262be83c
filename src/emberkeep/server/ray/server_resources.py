"""What a server takes of its node, and which nodes have room for it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emberkeep.config import size
from emberkeep.errors import ConfigError
from emberkeep.rows.slab import slab_rows
from emberkeep.tables import Optimizer, Table, Tier

DISK = "emberkeep_disk"
"""What nodes call their room for tiers, in GB: ray start --resources '{"emberkeep_disk": 900}'."""
# Of a process that holds no rows yet, and of rows that are on their way to a version.
_PROCESS_NBYTES = 256 * 10**6
# Beside the planes of a row: bits of trackers; of a dynamic one its id and its place in an index;
# of one in a file where it stands there.
_MARKS_NBYTES, _DYNAMIC_NBYTES, _TIER_NBYTES = 1, 40, 8


def nbytes_of(name: str, given: int | str) -> int:
    """A size that a user has given, in bytes."""
    try:
        nbytes = size(given) if isinstance(given, str) else int(given)
    except ValueError:
        nbytes = 0
    if nbytes <= 0:
        raise ConfigError(f"{name} takes bytes or a text such as '48GB', not {given!r}")
    return nbytes


def needed_memory(
    tables: Sequence[Table], optimizer: Optimizer, shards: int, tier: Tier | None
) -> int:
    """What the largest of so many servers takes once every row of its tables was trained."""
    nbytes = _PROCESS_NBYTES + (0 if tier is None else tier.memory)
    for table in tables:
        rows = slab_rows([table], 0, shards)
        planes = table.trained_by(optimizer).planes(table.dim)
        row_nbytes = _MARKS_NBYTES + (_DYNAMIC_NBYTES if table.dynamic else 0)
        if tier is None:
            row_nbytes += 4 * (table.dim + sum(planes.values()))
        else:
            row_nbytes += _TIER_NBYTES
        nbytes += rows * row_nbytes
    return nbytes


def check_tier_of(name: str, has: Tier | None, wanted: Tier) -> None:
    """Refuses a tier that servers which are up already do not have: rows would live elsewhere than
    their user says. They keep the memory that they have; that another was given is a warning."""
    leave = f"leave out the tier here, and the run has that of cluster {name!r}"
    restart = f"emberkeep cluster up --tier {wanted.path}"
    if has is None:
        raise ConfigError(
            f"cluster {name!r} is up without a tier, and this run wants one in {wanted.path}; "
            f"nothing was changed: end it (emberkeep cluster down --name {name}) and start it with "
            f"{restart}, or leave out the tier here"
        )
    if has.path != wanted.path:
        raise ConfigError(
            f"cluster {name!r} has its tier in {has.path}, and this run wants one in "
            f"{wanted.path}; nothing was changed: {leave}, or start servers with {restart}"
        )
    if has.memory != wanted.memory:
        warnings.warn(
            f"each server of cluster {name!r} has {has.memory / 1e9:.3g} GB for the hot rows of "
            f"its tier, not {wanted.memory / 1e9:.3g} GB: that is said when servers are started "
            "(--tier-memory)",
            stacklevel=4,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerResources:
    """What Ray sets aside for one server; 0 for what it does not count."""

    cpus: float
    memory: int = 0
    disk: int = 0

    def options(self) -> dict[str, Any]:
        """For an actor."""
        options: dict[str, Any] = {"num_cpus": self.cpus}
        if self.memory:
            options["memory"] = self.memory
        if self.disk:
            options["resources"] = {DISK: self._disk_gb}
        return options

    def bundle(self, servers: int) -> dict[str, float]:
        """For a place that so many of them share."""
        bundle: dict[str, float] = {"CPU": self.cpus * servers or 0.001}
        if self.memory:
            bundle["memory"] = self.memory * servers
        return bundle

    @property
    def _disk_gb(self) -> float:
        return round(self.disk / 1e9, 4)

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} cpus"]
        parts += [f"{self.memory / 1e9:.3g} GB of memory"] if self.memory else []
        parts += [f"{self.disk / 1e9:.3g} GB of disk"] if self.disk else []
        return ", ".join(parts)

    def homes(self, shards: int, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
        """A node for each server, by its id, the one with the most room left each time; refused
        where there is not enough for all of them. `nodes` are as `ray.nodes()` has them."""
        free = {
            str(node["NodeID"]): dict(node.get("Resources", {}))
            for node in sorted(nodes, key=lambda node: str(node["NodeID"]))
            if node["Alive"]
        }
        wants = {"memory": float(self.memory), DISK: self._disk_gb}
        wants = {name: wanted for name, wanted in wants.items() if wanted}
        counts, homes = dict.fromkeys(free, 0), list[str]()
        for _ in range(shards):
            fitting = [
                node
                for node, has in free.items()
                if all(has.get(name, 0.0) >= wanted for name, wanted in wants.items())
            ]
            if not fitting:
                raise self._no_room(shards, len(homes), nodes)
            chosen = min(fitting, key=lambda node: (counts[node], -free[node].get("memory", 0.0)))
            for name, wanted in wants.items():
                free[chosen][name] -= wanted
            counts[chosen] += 1
            homes.append(chosen)
        return homes

    def _no_room(self, shards: int, placed: int, nodes: Sequence[Mapping[str, Any]]) -> ConfigError:
        alive = [node.get("Resources", {}) for node in nodes if node["Alive"]]
        has = "; ".join(
            f"{node.get('memory', 0) / 1e9:.3g} GB"
            + (f", {node.get(DISK, 0):.3g} GB of disk" if self.disk else "")
            for node in alive
        )
        remedy = "add nodes, use a tier, or give memory= if fewer rows will ever be trained"
        if self.disk and not any(node.get(DISK) for node in alive):
            declared = f"'{{\"{DISK}\": <GB>}}'"
            remedy = f"start nodes with ray start --resources {declared}, or leave out disk="
        return ConfigError(
            f"Ray has room for {placed} of {shards} servers that take {self} each; its nodes have "
            f"{has}; nothing was started: {remedy}"
        )
