"""The rows of a module on their way into a copy of it: what `copy.deepcopy` and pickle take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from emberkeep._types import I64, Json, Planes
from emberkeep.cluster.base import Cluster
from emberkeep.cluster.local.local_cluster import Local
from emberkeep.errors import ConfigError
from emberkeep.tables import Optimizer, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedRows:
    """Every trained row of one cluster, and what is needed to make another like it."""

    tables: tuple[Table, ...]
    optimizer: Optimizer
    spec: Local
    seed: int
    rows: dict[str, tuple[I64, Planes]]
    state: Json
    rates: Sequence[float]
    """The learning rates of now, by group of the optimizer."""
    trains: bool

    @classmethod
    def of(
        cls, cluster: Cluster, spec: Any, kind: str, rates: Sequence[float], trains: bool
    ) -> CopiedRows:
        """Raises `ConfigError` where rows are not of this process, or live in files."""
        recipe = (
            "; build a second module with tables of its own (tier=None, no cluster=) and load "
            "module.state_dict() there"
        )
        if not isinstance(spec, Local):
            raise ConfigError(
                f"{kind} cannot be copied or pickled: its rows are on servers, and a copy would "
                f"train the same ones{recipe}"
            )
        tiers = [table for table in cluster.tables if table.tier is not None]
        if tiers:
            assert tiers[0].tier is not None
            raise ConfigError(
                f"{kind} cannot be copied or pickled: rows of table {tiers[0].name!r} live in "
                f"files below {tiers[0].tier.path}, which one module uses at a time{recipe}"
            )
        return cls(
            tables=cluster.tables,
            optimizer=cluster.optimizer,
            spec=replace(spec, failures=()),
            seed=cluster.seed,
            rows={table.name: cluster.read_all(table.name) for table in cluster.tables},
            state=cluster.table_state(),
            rates=rates,
            trains=trains,
        )

    def __deepcopy__(self, memo: object) -> CopiedRows:
        return self  # a copy of the rows already

    def open(self) -> Cluster:
        cluster = self.spec.open(self.tables, self.optimizer, seed=self.seed)
        for name, (ids, planes) in self.rows.items():
            cluster.install(name, ids, planes)
        cluster.load_table_state(self.state)
        return cluster
