"""What became of shards that were killed: their rows right before, right after, and what both are
worth to the model.

A model is judged with the network as it was when the shards were killed, so that nothing but their
rows differs: as they were, as they came back, and empty, which is what a replacement without any
version would hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from emberkeep._types import I64, Array, Bools
from emberkeep.blobs import open_store
from emberkeep.checkpoint.contents import merged_rows
from emberkeep.cluster.base import Cluster
from emberkeep.data import Reader, Window
from emberkeep.repository import Repository
from emberkeep.train import build
from emberkeep.train.checkpoint_settings import CheckpointSettings
from emberkeep.train.hooks import Hook, Start, Step
from emberkeep.train.run_config import (
    ClusterSettings,
    FailureSettings,
    JobSettings,
    ParitySettings,
    TierSettings,
)

_MOST_SAMPLES = 40_000

Planes = Mapping[str, Array]
Rows = dict[str, tuple[I64, Planes]]
"""By table: ids and the planes of their rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The rows of one shard that came from one version."""

    version: int | None
    """None: no version held them, they have their initial values."""
    step: int
    """After which the version was taken; 0 for initial values."""
    whole: bool
    """False: a prioritised version."""
    rows: int
    older: int
    """Of these: rows that had been trained since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledShard:
    """One shard, before and after."""

    shard: int
    rows: int
    """That it held when it was killed."""
    nbytes: int
    origins: tuple[Origin, ...]
    """Where they came from, the newest first."""
    steps_old: float
    """Of the row that a lookup by a held-out sample finds, on average: so many steps before the
    kill it was saved; 0 where it had not been trained since."""
    auc_recovered: float
    """Of the model, were this shard the only one that was killed."""
    auc_empty: float
    """The same, had it come back without a row."""

    @property
    def older(self) -> int:
        return sum(origin.older for origin in self.origins)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One partial recovery."""

    step: int
    """The last one before the shards were killed."""
    version: int | None
    """The newest that rows came from."""
    pls: float
    seconds: float
    rows_trained: int
    """Of all shards together."""
    nbytes: int
    """Of these rows, with their optimizer state."""
    test_samples: int
    auc_before: float
    auc_recovered: float
    auc_empty: float
    shards: tuple[KilledShard, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class _Kill:
    """What is kept of one moment until it is judged."""

    step: int
    before: list[Rows]
    """By shard."""
    dense: dict[str, torch.Tensor]
    after: dict[int, Rows] = field(default_factory=dict)
    origins: dict[int, tuple[Origin, ...]] = field(default_factory=dict)
    steps_old: dict[int, dict[str, I64]] = field(default_factory=dict)
    """By shard and table: how old each row of `before` came back."""
    details: dict[str, Any] = field(default_factory=dict)


class ShardWatch(Hook):
    """Copies the rows of all shards before each failure of a run's schedule, and those of the
    killed ones when partial recovery has brought them back."""

    _start: Start

    def __init__(self) -> None:
        self._due: set[int] = set()
        self._kills: list[_Kill] = []

    def on_start(self, start: Start) -> None:
        self._start = start
        given, batch_size = start.settings, start.settings.run.batch_size
        steps = -(-(start.inputs.train.count() or 0) // batch_size)
        schedule = given.failures.schedule(shards=given.cluster.shards, steps=steps)
        self._due = {failure.step - 1 for failure in schedule}

    def on_step(self, step: Step) -> None:
        if step.phase == "embeddings" and step.number in self._due:
            bags, network = self._start.bags, self._start.network
            self._kills.append(
                _Kill(
                    step=step.number,
                    before=[_rows(bags.cluster, s) for s in range(bags.cluster.shard_count)],
                    dense={name: p.detach().clone() for name, p in _dense(network, bags)},
                )
            )

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        if event != "recovered" or details["scope"] != "partial":
            return
        kill = next((kill for kill in self._kills if kill.step == details["step"]), None)
        if kill is None or kill.details:
            return
        kill.details = details
        kill.after = {s: _rows(self._start.bags.cluster, s) for s in details["shards"]}
        kill.origins = self._origins(kill)

    def _origins(self, kill: _Kill) -> dict[int, tuple[Origin, ...]]:
        """From which versions the rows of each killed shard came. Read while the recovery is just
        over: nothing was removed since."""
        path, version = self._start.settings.checkpoint.path, kill.details["version"]
        found: dict[int, list[Origin]] = {shard: [] for shard in kill.after}
        # Until a version is found that held a row, it is as old as the run.
        kill.steps_old = {
            shard: {
                table: np.full(ids.size, kill.step)
                for table, (ids, _) in kill.before[shard].items()
            }
            for shard in kill.after
        }
        if path is not None and version is not None:
            repository = Repository.open(open_store(path))
            chain = repository.chain(version)
            rows: dict[tuple[int, int], Counter[str]] = {}
            pool = self._start.bags.cluster.pool
            for manifest, chunk in merged_rows(repository, chain, pool):
                if chunk.planes is None:
                    continue
                table = chunk.table
                for shard, after in kill.after.items():
                    if table not in after:
                        continue
                    own = chunk.ids[np.isin(chunk.ids, after[table][0])]
                    changed = ~_unchanged(own, kill.before[shard][table], after[table])
                    count = rows.setdefault((shard, manifest.version.number), Counter())
                    count["rows"] += own.size
                    count["older"] += int(changed.sum())
                    at = np.searchsorted(kill.before[shard][table][0], own)
                    kill.steps_old[shard][table][at] = changed * (kill.step - manifest.step)
            for manifest in reversed(chain):
                for shard, origins in found.items():
                    count = rows.get((shard, manifest.version.number), Counter())
                    if count["rows"]:
                        origins.append(
                            Origin(
                                version=manifest.version.number, step=manifest.step,
                                whole=manifest.whole, rows=count["rows"], older=count["older"],
                            )
                        )  # fmt: skip
        for shard, origins in found.items():
            missing = _count(kill.before[shard]) - sum(origin.rows for origin in origins)
            if missing > 0:
                origins.append(
                    Origin(version=None, step=0, whole=True, rows=missing, older=missing)
                )
        return {shard: tuple(origins) for shard, origins in found.items()}

    def judge(self) -> tuple[Loss, ...]:
        """What each partial recovery has done to the model; takes a few evaluations."""
        judged = [kill for kill in self._kills if kill.details]
        if not judged:
            return ()
        given = replace(
            self._start.settings,
            cluster=ClusterSettings(), failures=FailureSettings(), checkpoint=CheckpointSettings(),
            parity=ParitySettings(), tier=TierSettings(), job=JobSettings(),
        )  # fmt: skip
        judge = _Judge(replace(self._start, settings=given))
        return tuple(judge.loss(kill) for kill in judged)


class _Judge:
    """A copy of the model on one shard, which is given the rows of any moment."""

    def __init__(self, start: Start) -> None:
        given, inputs = start.settings, start.inputs
        self._bags = build.embeddings(given, inputs.rows)
        self._network = build.model(
            given, self._bags, features=len(inputs.rows), dense=inputs.dense
        ).eval()
        test = inputs.test
        stop = test.start + min(test.count() or 0, _MOST_SAMPLES)
        self._samples = replace(test, stop=stop)
        self._batch_size = given.run.batch_size

    def loss(self, kill: _Kill) -> Loss:
        cluster = self._bags.cluster
        cluster.clear()
        with torch.no_grad():
            for name, parameter in _dense(self._network, self._bags):
                parameter.copy_(kill.dense[name])
        for rows in kill.before:
            _put(cluster, rows)
        shards = sorted(kill.after)
        before = self._auc()
        killed = []
        for shard in shards:
            recovered = self._with({shard: kill.after[shard]}, kill.before)
            empty = self._with({shard: {}}, kill.before)
            killed.append(
                KilledShard(
                    shard=shard,
                    rows=_count(kill.before[shard]),
                    nbytes=_nbytes(kill.before[shard]),
                    origins=kill.origins[shard],
                    steps_old=self._steps_old(kill.before[shard], kill.steps_old[shard]),
                    auc_recovered=recovered,
                    auc_empty=empty,
                )
            )
        alone = len(shards) == 1
        return Loss(
            step=kill.step,
            version=kill.details["version"],
            pls=kill.details["pls"],
            seconds=kill.details["seconds"],
            rows_trained=sum(_count(rows) for rows in kill.before),
            nbytes=sum(_nbytes(rows) for rows in kill.before),
            test_samples=self._samples.count() or 0,
            auc_before=before,
            auc_recovered=(
                killed[0].auc_recovered if alone else self._with(kill.after, kill.before)
            ),
            auc_empty=(
                killed[0].auc_empty
                if alone
                else self._with(dict.fromkeys(shards, Rows()), kill.before)
            ),
            shards=tuple(killed),
        )

    def _with(self, other: Mapping[int, Rows], before: Sequence[Rows]) -> float:
        """The AUC with other rows on some shards; afterwards all is as before."""
        cluster = self._bags.cluster
        for shard, rows in other.items():
            _remove(cluster, before[shard])
            _put(cluster, rows)
        found = self._auc()
        for shard, rows in other.items():
            _remove(cluster, rows)
            _put(cluster, before[shard])
        return found

    def _auc(self) -> float:
        from emberkeep.train.loop import evaluate

        return evaluate(self._network, self._samples, self._batch_size)[0]

    def _steps_old(self, before: Rows, steps_old: Mapping[str, I64]) -> float:
        """Over all lookups of a shard's rows by held-out samples."""
        lookups = steps = 0
        for table, ids in _looked_up(self._samples, self._batch_size):
            if table in before:
                held = before[table][0]
                at = np.minimum(np.searchsorted(held, ids), held.size - 1)
                own = held[at] == ids
                lookups += int(own.sum())
                steps += int(steps_old[table][at[own]].sum())
        return steps / lookups if lookups else 0.0


def _looked_up(samples: Window, batch_size: int) -> Iterator[tuple[str, I64]]:
    with Reader(samples, batch_size=batch_size) as reader:
        for batch in reader:
            for feature, given in batch.ids.items():
                yield feature, np.ravel(given[0] if isinstance(given, tuple) else given)


def _dense(network: nn.Module, bags: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the network itself."""
    rows = {id(parameter) for parameter in bags.parameters()}
    for name, parameter in network.named_parameters():
        if id(parameter) not in rows:
            yield name, parameter


def _rows(cluster: Cluster, shard: int) -> Rows:
    """Every trained row of one shard, by ascending id."""
    found: Rows = {}
    for table in cluster.tables:
        ids, planes = cluster.handles[shard].read_all(table.name)
        order = np.argsort(ids)
        if ids.size:
            found[table.name] = ids[order], {name: v[order] for name, v in planes.items()}
    return found


def _put(cluster: Cluster, rows: Rows) -> None:
    for table, (ids, planes) in rows.items():
        cluster.install(table, ids, planes)


def _remove(cluster: Cluster, rows: Rows) -> None:
    for table, (ids, _) in rows.items():
        cluster.delete(table, ids)


def _count(rows: Rows) -> int:
    return sum(ids.size for ids, _ in rows.values())


def _nbytes(rows: Rows) -> int:
    return sum(plane.nbytes for _, planes in rows.values() for plane in planes.values())


def _unchanged(ids: I64, before: tuple[I64, Planes], after: tuple[I64, Planes]) -> Bools:
    """Which of these rows have the same bits at both moments; all were there before."""
    at_before = np.searchsorted(before[0], ids)
    at_after = np.minimum(np.searchsorted(after[0], ids), after[0].size - 1)
    same: Bools = after[0][at_after] == ids
    for name, plane in before[1].items():
        differs = plane[at_before].view(np.uint8) != after[1][name][at_after].view(np.uint8)
        same &= ~differs.reshape(ids.size, differs.size // max(ids.size, 1)).any(axis=1)
    return same
