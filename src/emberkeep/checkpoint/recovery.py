"""What to do when shards are lost: a pure plan, then its execution.

*Full* recovery takes everybody back to the newest whole version: nothing is lost but time.
*Partial* recovery brings the lost shards alone back, each with the newest saved value of every row,
while the others go on: no time is lost, but the updates of those shards since they were saved are.
PLS, the portion of lost samples, counts these as a share of all updates of the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy.typing as npt

from emberkeep._types import I64, Json
from emberkeep.checkpoint.overheads import pls_of_loss
from emberkeep.checkpoint.saver import Checkpointer
from emberkeep.checkpoint.targets import LoadsItself
from emberkeep.cluster.base import Cluster, ShardTarget
from emberkeep.errors import ConfigError
from emberkeep.repository import Manifest, Repository
from emberkeep.runtime.pool import Pool

Scope = Literal["full", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How a run goes on when shards are lost.

    `scope` is what is wanted; *partial* turns into *full* where it does not pay. `most_pls` is how
    much of all updates the job may lose. `reason` says why this was chosen.
    """

    scope: Scope = "full"
    most_pls: float = 1.0
    reason: str = ""

    def __post_init__(self) -> None:
        if self.scope not in get_args(Scope):
            raise ConfigError(f"recovery is full or partial, not {self.scope!r}")
        if not 0 <= self.most_pls <= 1:
            raise ConfigError(f"a PLS lies between 0 and 1, not {self.most_pls:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What the model has lost so far: part of its state, saved and restored with it.

    `recovered_at` has the step at which each shard was last brought back: what it had lost until
    then is counted already.
    """

    pls: float = 0.0
    recovered_at: Mapping[int, int] = field(default_factory=dict)

    def after(
        self, lost: Sequence[int], *, step: int, saved: int, total: int, shards: int
    ) -> Losses:
        """After these shards came back at `step` with what was saved at step `saved`.

        Samples are counted in steps, which all have equally many.
        """
        pls = self.pls
        for shard in lost:
            since = max(saved, self.recovered_at.get(shard, 0))
            pls += pls_of_loss(
                lost_samples=max(0, step - since), total_samples=total, shards=shards
            )
        return Losses(pls=pls, recovered_at={**self.recovered_at, **dict.fromkeys(lost, step)})

    def to_dict(self) -> Json:
        return {
            "pls": self.pls,
            "recovered_at": {str(shard): step for shard, step in self.recovered_at.items()},
        }

    @classmethod
    def from_dict(cls, told: Json) -> Losses:
        return cls(
            pls=told.get("pls", 0.0),
            recovered_at={int(s): step for s, step in told.get("recovered_at", {}).items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is done about lost shards, and why."""

    scope: Scope
    shards: tuple[int, ...]
    losses: Losses
    """As they are afterwards, if it is a partial recovery."""
    reason: str


def plan(
    recovery: Recovery,
    losses: Losses,
    lost: Sequence[int],
    *,
    shards: int,
    step: int,
    saved: int | None,
    total: int | None,
    unchanged: bool = False,
    going_back: bool = False,
) -> Plan:
    """Decides for one loss.

    `saved` is the step of the newest whole version, `total` the steps of the whole job;
    `unchanged` says that no row was trained since that version, `going_back` that a full recovery
    was begun and not ended.
    """
    after = losses
    if saved is not None and total is not None:
        after = losses.after(lost, step=step, saved=saved, total=total, shards=shards)

    def decided(scope: Scope, reason: str) -> Plan:
        return Plan(scope=scope, shards=tuple(lost), losses=after, reason=reason)

    if going_back:
        return decided("full", "a full recovery was under way")
    if unchanged and saved is not None and len(lost) < shards:
        return Plan(
            scope="partial",
            shards=tuple(lost),
            losses=losses,
            reason="no row was trained since the version: nothing is lost",
        )
    if recovery.scope == "full":
        return decided("full", recovery.reason or "the strategy recovers fully")
    if saved is None or total is None:
        return decided("full", "there is no version that a shard could come back from")
    if len(lost) == shards:
        return decided("full", "every shard was lost: no row would go on")
    if after.pls > recovery.most_pls:
        return decided(
            "full",
            f"PLS would grow from {losses.pls:.4g} to {after.pls:.4g}, and the job may lose "
            f"{recovery.most_pls:g}",
        )
    return decided("partial", recovery.reason or "the strategy recovers partially")


@dataclass(frozen=True, slots=True)
class Home:
    """A cluster, and the names that its tables have in versions."""

    cluster: Cluster
    names: Mapping[str, str]
    """The name in versions → the cluster's own."""

    def saved_by_same_shards(self, manifest: Manifest) -> bool:
        """Whether a version's files hold this cluster's rows shard by shard as they are now."""
        tables = manifest.layout["tables"]
        return all(
            len(tables.get(told, {}).get("ticks", ())) == self.cluster.shard_count
            for told in self.names
        )


class _Named:
    """A part of a cluster under the names of versions; other tables are passed over."""

    def __init__(self, part: ShardTarget, names: Mapping[str, str]) -> None:
        self._part = part
        self._names = names

    def reaches(self, url: str) -> bool:
        return isinstance(self._part, LoadsItself) and self._part.reaches(url)

    def load_version(
        self,
        repository: Repository,
        chain: Sequence[Manifest],
        pool: Pool,
        names: Mapping[str, str] | None = None,
    ) -> None:
        assert isinstance(self._part, LoadsItself)
        told = {name: told for told, name in self._names.items()}
        self._part.load_version(repository, chain, pool, told)

    def clear(self) -> None:
        self._part.clear()

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        if table in self._names:
            self._part.install(self._names[table], ids, planes)

    def delete(self, table: str, ids: I64) -> int:
        return self._part.delete(self._names[table], ids) if table in self._names else 0

    def load_table_state(self, state: Json) -> None:
        mine = {self._names[told]: its for told, its in state.items() if told in self._names}
        self._part.load_table_state(mine)

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        self._part.forget_changes(keep_since_baseline=keep_since_baseline)


def recover_partially(
    checkpointer: Checkpointer, home: Home, lost: Sequence[int]
) -> Manifest | None:
    """Brings lost shards of one cluster back; the others are not touched. Returns the newest
    version that was read, None if there is none and the shards begin anew.

    The steps of tables go on with the survivors', since those count the pushes of the job; without
    any survivor they are the version's. Raises `ShardLostError` if a shard dies meanwhile: then
    begin anew.
    """
    cluster = home.cluster
    steps = steps_of(cluster)
    manifest = None
    cluster.renew(*lost)
    for shard in lost:
        part = cluster.part(shard)
        manifest = checkpointer.restore_shard(
            _Named(part, home.names), shard, home.saved_by_same_shards
        )
        if steps:
            saved = {} if manifest is None else manifest.layout["tables"]
            part.load_table_state(
                {
                    own: {"tick": 0, **saved.get(told, {}), "steps": steps[own]}
                    for told, own in home.names.items()
                }
            )
    cluster.serve(*lost)
    return manifest


def steps_of(cluster: Cluster) -> dict[str, int]:
    """How many pushes each table has taken part in, as the shards that still serve know it."""
    for shard in cluster.handles:
        if shard.state == "serving":
            return {name: its["steps"] for name, its in shard.table_state().items()}
    return {}
