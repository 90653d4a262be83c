"""What to do when shards are lost: a pure plan, then its execution.

*Full* recovery takes everybody back to the newest whole version: no update is lost, only time, and
where versions are quantized what rounding takes.
*Partial* recovery brings the lost shards alone back, each with the newest saved value of every row,
while the others go on: no time is lost, but the updates of those shards since they were saved are.
PLS, the portion of lost samples, counts these as a share of all updates of the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

from emberkeep._types import Json
from emberkeep.checkpoint.overheads import pls_of_loss
from emberkeep.checkpoint.restore import saved_by, table_state
from emberkeep.checkpoint.saver import Checkpointer
from emberkeep.checkpoint.target_view import shard_view
from emberkeep.cluster.base import Cluster
from emberkeep.cluster.table_states import edits_of, of_shard
from emberkeep.errors import ConfigError, DamageError, ShardLostError
from emberkeep.repository import Manifest

Scope = Literal["full", "partial"]
NOTHING_TRAINED = "no row was trained since the version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How a run goes on when shards are lost.

    `scope` is what is wanted; *partial* turns into *full* where it does not pay. `most_pls` is how
    much of all updates the job may lose; `together`, how many shards are expected to fail at once,
    decides when a version is due for its sake. `reason` says why this was chosen.
    """

    scope: Scope = "full"
    most_pls: float = 1.0
    together: int = 1
    reason: str = ""

    def __post_init__(self) -> None:
        if self.scope not in get_args(Scope):
            raise ConfigError(f"recovery is full or partial, not {self.scope!r}")
        if not 0 <= self.most_pls <= 1:
            raise ConfigError(f"a PLS lies between 0 and 1, not {self.most_pls:g}")
        if self.together < 1:
            raise ConfigError(f"1 shard or more fails at a time, not {self.together}")

    def steps_at_risk(self, losses: Losses, *, total: int, shards: int) -> int:
        """So many steps after a version a failure may lose what is left of `most_pls`."""
        left = max(0.0, self.most_pls - losses.pls)
        return math.floor(left * total * shards / min(self.together, shards) + 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What the model has lost so far: part of its state, saved and restored with it.

    `recovered_at` has the step at which each shard was last brought back: what it had lost until
    then is counted already. `total` is of how many steps `pls` is a share, once something was lost.
    """

    pls: float = 0.0
    recovered_at: Mapping[int, int] = field(default_factory=dict)
    total: int | None = None

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
        return Losses(
            pls=pls, recovered_at={**self.recovered_at, **dict.fromkeys(lost, step)}, total=total
        )

    def of_job(self, total: int) -> Losses:
        """The same losses as a share of a job that is to end sooner or later than was meant."""
        if self.total is None or self.total == total:
            return self
        return replace(self, pls=self.pls * self.total / total, total=total)

    def to_dict(self) -> Json:
        found: Json = {
            "pls": self.pls,
            "recovered_at": {str(shard): step for shard, step in self.recovered_at.items()},
        }
        return found if self.total is None else {**found, "total_steps": self.total}

    @classmethod
    def from_dict(cls, document: Json) -> Losses:
        try:
            recovered_at = document.get("recovered_at", {})
            total = document.get("total_steps")
            return cls(
                pls=float(document.get("pls", 0.0)),
                recovered_at={int(shard): int(step) for shard, step in recovered_at.items()},
                total=None if total is None else int(total),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise DamageError(f"the counters of a version are damaged: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is done about lost shards, and why."""

    scope: Scope
    shards: tuple[int, ...]
    losses: Losses
    """As they are afterwards, if it is a partial recovery."""
    reason: str
    exact: bool = False
    """Whether it claims that nothing is lost but what rounding takes."""


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
    lossy: bool = False,
    going_back: bool = False,
) -> Plan:
    """Decides for one loss.

    `saved` is the step of the newest whole version, `total` the steps of the whole job;
    `unchanged` says that no row was trained since that version, `lossy` that it holds rounded
    values, `going_back` that a full recovery was started and not ended.
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
            reason=f"{NOTHING_TRAINED}: "
            + ("rows come back as it has them, rounded" if lossy else "nothing is lost"),
            exact=True,
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
        return saved_by(manifest, self.names, self.cluster.shard_count)


def recover_partially(
    checkpointer: Checkpointer, home: Home, lost: Sequence[int],
    still: Callable[[], bool] | None = None,
) -> Manifest | None:  # fmt: skip
    """Brings lost shards of one cluster back; the others are not touched. Returns the newest
    version that was read, None if there is none and the shards start over.

    `still` says whether this is still right, once no server that was only out of reach can answer
    another worker any more; else it is `ShardLostError`, before anything was loaded.

    The steps of tables go on with the survivors', since those count the pushes of the job; without
    any survivor they are the version's. Raises `ShardLostError` if a shard dies meanwhile: then
    start over. A caller that counts what is lost learns the outcome of failed saves before.
    """
    cluster = home.cluster
    checkpointer.learn_outcome()
    # First, so that what the caller has counted as lost is: none of them returns from here on.
    cluster.renew(*lost)
    if still is not None and not still():
        raise ShardLostError(lost)
    if cluster.tiered:  # what a file has come back with is of another moment than the version
        for shard in lost:
            cluster.handles[shard].clear()
    manifest = load_shards(checkpointer, home, lost, steps_of(cluster))
    cluster.serve(*lost, exact=still is not None)
    return manifest


def load_shards(
    checkpointer: Checkpointer, home: Home, shards: Sequence[int], steps: Mapping[str, int]
) -> Manifest | None:
    """Loads shards that are empty, servers all at once; `steps` are the survivors'. Edits are over
    for them too, as they are for those: rows of a version may be without some."""
    count = home.cluster.shard_count

    def load(shard: int) -> Manifest | None:
        view = shard_view(home.cluster, shard, home.names)
        manifest = checkpointer.restore_shard(view, shard, home.saved_by_same_shards)
        if steps:
            saved = {} if manifest is None else table_state(manifest)
            view.load_table_state(
                {
                    name: {
                        "tick": 0,
                        **saved.get(name, {}),
                        "steps": steps[own],
                        **({"edits": [edits[own]] * count} if own in edits else {}),
                    }
                    for name, own in home.names.items()
                }
            )
        return manifest

    edits = _agreed_edits(home.cluster)
    loaded = home.cluster._each([partial(load, shard) for shard in shards])
    return loaded[-1] if loaded else None


def _serving_states(cluster: Cluster) -> list[Json]:
    return [shard.table_state() for shard in cluster.handles if shard.state == "serving"]


def _agreed_edits(cluster: Cluster) -> dict[str, int]:
    """Of each table which edits shards have that serve, if it is the same ones."""
    states = _serving_states(cluster)
    found = {name: set(edits_of(states, name)) for name in (states[0] if states else ())}
    return {name: edits.pop() for name, edits in found.items() if len(edits) == 1}


def edited(home: Home, lost: Sequence[int], saved: Mapping[str, Json]) -> bool:
    """Whether rows came from outside, by an upsert or a deletion, which a version with these tables
    is without in one of the lost shards: each is made known to every shard."""
    cluster = home.cluster
    states = _serving_states(cluster)
    for shard in lost:
        held = of_shard(dict(saved), shard, cluster.shard_count)
        for name, own in home.names.items():
            if any(edits != held[name]["edits"] for edits in edits_of(states, own)):
                return True
    return False


def steps_of(cluster: Cluster) -> dict[str, int]:
    """How many pushes each table has taken part in, as the shards that still serve know it: the
    most, because one that has just come back from parity may have yet to get the last ones again.
    Not counted is what lost shards will be sent once they are back."""
    steps: dict[str, int] = {}
    for shard in cluster.handles:
        if shard.state == "serving":
            before, state = -1, {}
            while (unfinished := cluster.unfinished(shard.index)) != before:
                # Again, if the push of another rank came in between.
                before, state = unfinished, shard.table_state()
            for name, table in state.items():
                steps[name] = max(steps.get(name, 0), table["steps"] - unfinished)
    return steps
