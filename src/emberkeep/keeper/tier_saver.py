"""Checkpoints that a tier makes by itself: rows stay in its files, everything else goes beside.

A request returns at once. While training goes on, upkeep brings the rows of that batch to the
files and each file *prepares* the batch; then dense state, optimizers and the reader's place are
stored below the tier, and only then every file *commits*. Whatever ends the process in between,
all of them come back at the same batch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

from torch import nn

from emberkeep._types import Json
from emberkeep.blobs.local_store import LocalStore
from emberkeep.checkpoint.recovery import Losses, steps_of
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.errors import (
    ConfigError,
    DamageError,
    EmberkeepError,
    MissingObjectError,
    ShardLostError,
)
from emberkeep.keeper import tier_state
from emberkeep.keeper.dense import Stateful, generators, set_generators
from emberkeep.keeper.model_parts import Optimizers, take_apart
from emberkeep.keeper.plain_state import Packed
from emberkeep.keeper.recoverer import Recovered, Recoveries
from emberkeep.nn.embeddings import EmbeddingBags, Embeddings
from emberkeep.runtime.background import Worker
from emberkeep.strategies import Interval, schedule

_STATES = "step-"
# A checkpoint is gigabytes; one that takes longer hangs.
_PATIENCE = timedelta(hours=1)


class TierKeeper:
    """Keeps a model whose tables all have a tier.

        keeper = ek.TierKeeper(model, optimizers, reader=reader, every="20min")
        keeper.resume()
        for batch in reader:
            ...
            optimizer.step()
            keeper.step()
        keeper.close()

    `durable` is the step that a crash, or a power cut, comes back to. With all state on one machine
    a checkpoint dies with its disk: use `ek.Keeper` as well, less often, where that matters.

    With `total_steps`, how long the job is, shards that are lost come back from their own files at
    the durable step, alone, while a pull or push waits; the others go on. What they had learned
    since is lost: `recoveries().pls` counts it, as a share of all updates of the job. Where every
    shard is lost, or nothing is durable yet, `ShardLostError` ends the loop: start again, resume.

    `on_event(name, details)` hears of "recovered", and from the thread that saves of "saved" and
    "save_failed".
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        reader: Any = None,
        every: Interval = "20min",
        state: Mapping[str, Stateful] | None = None,
        on_event: Callable[[str, Json], object] | None = None,
        total_steps: int | None = None,
    ) -> None:
        if total_steps is not None and total_steps < 1:
            raise ConfigError(f"total_steps must be 1 or more, not {total_steps}")
        self.steps = 0
        self.reader = reader
        self._schedule = schedule(every)
        parts = take_apart(model, optimizer, state or {}, strict=True, ranks=1)
        self._dense = parts.dense
        self._cluster, path = _tiered(model)
        self._store = LocalStore(os.path.join(path, "state"))
        self._tell = on_event or (lambda _name, _details: None)
        self._saving: Future[int] | None = None
        self._error: BaseException | None = None
        self._worker = Worker("emberkeep-tier-commit")
        self._committing = False
        self._saved_at = time.monotonic()
        self._total_steps = total_steps
        self._losses = Losses()
        self._failures = self._made = 0
        self._seconds = 0.0
        if total_steps is not None:
            self._cluster.on_loss = self._on_loss

    @property
    def durable(self) -> int | None:
        """The step that is safe; None before the first checkpoint."""
        return self._cluster.tier_batch()

    # -- the loop --------------------------------------------------------------------------------

    def resume(self) -> int | None:
        """Goes on from the last durable step, to which the rows are back already; None if new.

        A state that is damaged, is another step's or does not fit the model is refused before
        anything of the model is changed.
        """
        batch = self.durable
        if batch is None:
            return None
        try:
            content = self._store.get(_name(batch))
        except MissingObjectError:
            raise DamageError(
                f"the tier holds the rows of step {batch}, and {self._store.url} not what belongs "
                "to them; bring that directory back, or restore a version of a repository",
                name=_name(batch),
            ) from None
        dense, beside = tier_state.decode(_name(batch), content)
        saved = self._dense.check(dense)
        if self.reader is not None:
            self.reader.load_state_dict(beside["reader"])
        self._dense.load(saved)
        self._losses = Losses.from_dict(beside["losses"])
        set_generators(saved["generators"][0])
        self.steps = batch
        return batch

    def step(self) -> None:
        """Ends a step; requests a checkpoint if one is due and none is under way.

        Raises what made the last one fail.
        """
        self.steps += 1
        self._raise()
        passed = timedelta(seconds=time.monotonic() - self._saved_at)
        if self._schedule.due(self.steps, passed) and not self._busy():
            self.checkpoint()

    def checkpoint(self) -> Future[int]:
        """Declares this step one to come back to. Returns at once; done when it is durable."""
        self._join()
        self._raise()
        started = time.monotonic()
        dense = self._dense.capture([generators()])
        beside = {
            "reader": {} if self.reader is None else self.reader.state_dict(),
            "losses": self._losses.to_dict(),
        }
        prepared = self._cluster.prepare_tiers(self.steps)
        pause_ms = (time.monotonic() - started) * 1e3
        saving: Future[int] = Future()
        self._committing = True
        try:
            self._worker.do(
                partial(self._finish, self.steps, prepared, dense, beside),
                partial(self._ended, self.steps, saving, pause_ms, time.monotonic()),
            )
        except BaseException:  # the system has no thread to give: nobody would ever commit
            self._committing = False
            with suppress(EmberkeepError):
                self._cluster.abandon_tiers()
            raise
        self._saving, self._saved_at = saving, started
        return saving

    def wait(self) -> int | None:
        """Waits for the checkpoint under way; raises if it failed. Returns the durable step."""
        self._join()
        self._raise()
        return self.durable

    def close(self, *, save: bool = True) -> int | None:
        """Ends keeping, with a last checkpoint unless the present step is durable already."""
        self._join()
        if save and self.durable != self.steps:
            self.checkpoint()
        try:
            return self.wait()
        finally:
            self._release()

    def recoveries(self) -> Recoveries:
        """What lost shards have cost so far."""
        return Recoveries(
            failures=self._failures,
            full=0,
            partial=self._made,
            pls=self._losses.pls,
            repeated_steps=0,
            seconds=self._seconds,
        )

    def __enter__(self) -> TierKeeper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._join()
            self._release()

    # -- shards that are lost --------------------------------------------------------------------

    def _on_loss(self, lost: ShardLostError) -> bool:
        """Brings lost shards back from their files; whether they serve again."""
        started = time.monotonic()
        self._join()  # a checkpoint under way may still be committed, and less is lost
        cluster, shards = self._cluster, self._cluster.lost()
        if self.durable is None or len(shards) == cluster.shard_count:
            return False
        assert self._total_steps is not None
        steps = steps_of(cluster)
        cluster.renew(*shards)
        cluster.serve(*shards)
        for shard in shards:
            # The steps of tables go on with the survivors', since those count the job's pushes.
            state = cluster.shards[shard].table_state()
            state = {name: {**its, "steps": steps[name]} for name, its in state.items()}
            cluster.shards[shard].load_table_state(state)
        durable = self.durable
        self._losses = self._losses.after(
            shards, step=self.steps, saved=durable, total=self._total_steps,
            shards=cluster.shard_count,
        )  # fmt: skip
        seconds = time.monotonic() - started
        self._failures += len(shards)
        self._made += 1
        self._seconds += seconds
        made = Recovered(
            scope="partial", shards=tuple(shards), version=None, step=self.steps,
            repeated_steps=0, pls=self._losses.pls, seconds=seconds,
            reason=f"their files have step {durable}",
        )  # fmt: skip
        self._tell("recovered", made.to_dict())
        return True

    def _release(self) -> None:
        if self._total_steps is not None:
            self._cluster.on_loss = None

    # -- details ---------------------------------------------------------------------------------

    def _finish(self, step: int, prepared: list[Future[Any]], dense: Packed, beside: Json) -> None:
        for future in prepared:
            future.result()
        self._store.put(_name(step), tier_state.encode(_name(step), dense, beside))
        self._cluster.commit_tiers()
        states = [b.name for b in self._store.list() if b.name.startswith(_STATES)]
        self._store.delete([name for name in states if name != _name(step)])

    def _ended(
        self, step: int, saving: Future[int], pause_ms: float, started: float,
        error: BaseException | None,
    ) -> None:  # fmt: skip
        try:
            if error is None:
                saving.set_result(step)
                durable_ms = (time.monotonic() - started) * 1e3
                self._tell("saved", {"step": step, "pause_ms": pause_ms, "durable_ms": durable_ms})
                return
            with suppress(EmberkeepError):  # the next checkpoint tries again, before it begins
                self._cluster.abandon_tiers()
            if not self._cluster.lost():  # with a shard, its part of a checkpoint is lost too
                self._error = error
            saving.set_exception(error)
            self._tell("save_failed", {"step": step, "error": str(error)})
        finally:
            with self._worker.changed:
                self._committing = False
                self._worker.changed.notify_all()

    def _busy(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def _join(self) -> None:
        self._worker.wait(lambda: not self._committing, "a checkpoint of the tier", _PATIENCE)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _name(step: int) -> str:
    return f"{_STATES}{step}.safetensors"


def _tiered(model: nn.Module) -> tuple[LocalCluster, str]:
    """The cluster of the one module with tiers, and where they are; anything else is refused."""
    modules = [m for m in model.modules() if isinstance(m, EmbeddingBags | Embeddings)]
    tiers = {table.tier for module in modules for table in module.tables}
    if len(modules) != 1 or len(tiers) != 1 or None in tiers:
        raise ConfigError(
            "TierKeeper keeps a model with one module of tables that all name the same tier; use "
            "ek.Keeper for others"
        )
    cluster = modules[0].cluster
    if not isinstance(cluster, LocalCluster):
        raise ConfigError("TierKeeper needs shards of this process: use cluster=ek.local()")
    tier = tiers.pop()
    assert tier is not None
    return cluster, tier.path
