"""Checkpoints that tiers make by themselves: rows stay in their files, all else goes beside.

A request returns at once. While training goes on, upkeep brings the rows of that batch to the
files and each file *prepares* the batch; then dense state, optimizers and the reader's place are
stored below the first tier, and only then every file *commits*. Whatever ends the process in
between, all files of all tiers come back at the same batch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

from emberkeep.blobs.local_store import LocalStore
from emberkeep.checkpoint.recovery import Home, Losses, steps_of
from emberkeep.checkpoint.save import BackgroundSaver, Counters, Saving
from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.errors import (
    CancelledError,
    ConfigError,
    DamageError,
    EmberkeepError,
    MissingObjectError,
    NoVersionError,
)
from emberkeep.keeper import tier_state
from emberkeep.keeper.model_parts import Parts
from emberkeep.keeper.plain_state import Packed, pack
from emberkeep.keeper.run_saver import DurableStep, Hear, Returned
from emberkeep.keeper.run_state import Captured
from emberkeep.runtime.clock import Clock
from emberkeep.strategies import Strategy, incremental

_STATES = "step-"
# A checkpoint is gigabytes; one that takes longer hangs.
_PATIENCE = timedelta(hours=1)


class TierSaver(BackgroundSaver[DurableStep]):
    """Keeps a run in the tiers that hold its rows. One step is durable, the newest one.

    What makes a checkpoint fail is raised by the next call: a file that could not be written has
    ended its shard.
    """

    exact = due_whole = True
    restores = lossy_restores = 0  # which nothing is chosen by

    def __init__(
        self, parts: Parts, strategy: Strategy, *, must_exist: bool, on_event: Hear, clock: Clock
    ) -> None:
        _check_strategy(strategy)
        (self._cluster, *self._beside), self._paths = _tiered(parts)
        # That of the tier which decides for all: the place of what belongs to their rows.
        self._state = LocalStore(os.path.join(self._paths[0], "state"), clock=clock)
        self.url = " and ".join(self._paths)
        self._check_one_step()
        super().__init__(
            "emberkeep-tier-commit", "checkpoint", f"in {self.url}", _PATIENCE, clock=clock,
            on_event=on_event,
        )  # fmt: skip
        # Who holds it decides the batch under way: it is committed, or given up.
        self._deciding = threading.Lock()
        if must_exist and not self.holds_run():
            raise NoVersionError(
                f"the tier {self.url} holds no durable step, and this run must exist: nothing was "
                "trained. Check the path, and that its disk is mounted; leave must_exist out to "
                "start a new run"
            )

    @property
    def whole(self) -> DurableStep | None:
        batches = [cluster.tier_batch() for cluster in (self._cluster, *self._beside)]
        return DurableStep(min(b or 0 for b in batches)) if all(batches) else None

    def follow(self, spec: VersionSpec) -> None:
        raise ConfigError("a tier holds rows as they are: there is nothing to choose")

    def holds_run(self) -> bool:
        return self.whole is not None

    def kept_nbytes(self) -> int:
        stores = [LocalStore(path, clock=self._clock) for path in self._paths]
        return sum(info.size for store in stores for info in store.list())

    def _check_one_step(self) -> None:
        """Every decision is about all tiers of a run: those at different steps are of two."""
        batches = {
            os.path.dirname(status.path): status.batch
            for cluster in (self._cluster, *self._beside)
            for status in cluster.tier_status()
        }
        if len({*batches.values()}) > 1:
            found = ", ".join(
                f"{path} at {'no step yet' if batch is None else f'step {batch}'}"
                for path, batch in sorted(batches.items())
            )
            raise DamageError(
                f"the tiers of one run come back at one step, and these are not of one run: "
                f"{found}; nothing was trained. Check that every disk is mounted; to start over, "
                "remove them all before the model is made",
                name=self.url,
            )

    # -- saving ----------------------------------------------------------------------------------

    def cut(
        self, step: int, state: Captured | None, counters: Counters, *, whole: bool = True
    ) -> Saving[DurableStep]:
        """Declares this step one to come back to. Returns at once."""
        self.make_room()
        self.check()
        assert state is not None
        start = self._clock.monotonic()
        losses = Losses.from_dict(counters() if callable(counters) else counters).to_dict()
        beside = pack({"reader": state.reader, "losses": losses}, what=tier_state.BESIDE)
        # A fault while the last one was cleaned up after may have left it under way.
        self._cluster.abandon_tiers(beside=self._beside)
        prepared = self._cluster.prepare_tiers(step, beside=self._beside)
        try:
            pause = timedelta(seconds=self._clock.monotonic() - start)
            saving = Saving[DurableStep](step, pause, self._clock)
            self._start(saving, partial(self._write, saving, prepared, state.dense, beside))
        except Exception:  # the system has no thread to give: nobody would ever commit
            self._abandon()
            raise
        return saving

    def finish(self, step: int, state: Captured | None, counters: Counters) -> DurableStep | None:
        self.cut(step, state, counters)
        return self.wait()

    def _write(
        self, saving: Saving[DurableStep], prepared: list[Future[Any]], dense: Packed,
        beside: Packed,
    ) -> None:  # fmt: skip
        name = _name(saving.step)
        try:
            for future in prepared:
                future.result()  # upkeep ends it, also when it fails; `join` has a deadline
        except EmberkeepError as error:
            if saving.cancelled.is_set():
                raise _given_up(saving.step) from error
            raise
        saving.copied.set_result(None)
        content = tier_state.encode(name, dense, beside)
        nbytes = sum(len(piece) for piece in content)
        with self._deciding:
            if saving.cancelled.is_set():
                raise _given_up(saving.step)
            self._state.put(name, content)
            self._cluster.commit_tiers(beside=self._beside)
            saving.committed.set_result(DurableStep(saving.step))
        self._tell_saved(saving, version=None, kind="tier", nbytes=nbytes)
        states = [b.name for b in self._state.list() if b.name.startswith(_STATES)]
        self._state.delete([other for other in states if other != name])

    def _is_fault(self, error: BaseException) -> bool:
        # With a shard, its part of a checkpoint is lost too: that is no fault of the files.
        return not any(cluster.lost() for cluster in (self._cluster, *self._beside))

    def _clean_up(self, saving: Saving[DurableStep], error: BaseException) -> None:
        with self._deciding:
            self._abandon()

    def _abandon(self) -> None:
        with suppress(EmberkeepError):  # the next checkpoint tries again
            self._cluster.abandon_tiers(beside=self._beside)

    def make_room(self) -> None:
        self.join()

    def cancel(self) -> None:
        """Gives up the checkpoint under way, unless it is being committed."""
        saving = self._saving
        if saving is None or not self._deciding.acquire(blocking=False):
            return
        try:
            if not saving.committed.done():
                saving.cancelled.set()
                self._abandon()
        finally:
            self._deciding.release()

    def check(self, least: int | None = None) -> None:
        failures, self._failures = [*self._failures, *self._unseen()], []
        if failures:
            raise failures[0]

    def close(self) -> DurableStep | None:
        try:
            self.join()
            self.check()
            return self.whole
        finally:
            self._worker.close()

    # -- going back ------------------------------------------------------------------------------

    def bring_back(
        self, version: int | str | None, *, fall_back: bool, fits: Callable[[Captured], object]
    ) -> Returned | None:
        """The durable step, to which opening the tier has brought the rows already."""
        if version is not None:
            raise ConfigError(
                f"version {version} cannot be named: {self.url} is a tier, which has one durable "
                "step and no versions; keep the run in a repository to go back further"
            )
        durable = self.whole
        if durable is None:
            return None
        name = _name(durable)
        try:
            content = self._state.get(name)
        except MissingObjectError:
            raise DamageError(
                f"the tier holds the rows of step {durable}, and {self._state.url} not what "
                "belongs to them; bring that directory back, or restore a version of a repository",
                name=name,
            ) from None
        dense, beside = tier_state.decode(name, content)
        fits(Captured(dense=dense, reader=beside["reader"]))
        self._saving = None
        return Returned(kept=durable, counters=beside["losses"])

    def tag(self, name: str, version: int | str | None = None) -> NoReturn:
        raise ConfigError(
            f"{self.url} is a tier, which has one durable step and no versions that could be named"
        )

    def recover_shards(self, lost: Iterable[tuple[Home, Sequence[int]]]) -> None:
        """Brings lost shards back from their own files, at the durable step."""
        for home, shards in lost:
            self._recover_shards(home, shards)

    def _recover_shards(self, home: Home, shards: Sequence[int]) -> None:
        cluster = home.cluster
        assert isinstance(cluster, LocalCluster)
        steps = steps_of(cluster)
        cluster.renew(*shards)
        cluster.serve(*shards)
        for shard in (cluster.shards[index] for index in shards):
            # The steps of tables go on with the survivors', since those count the job's pushes.
            state = shard.table_state()
            shard.load_table_state(
                {name: {**table, "steps": steps[name]} for name, table in state.items()}
            )


def _name(step: int) -> str:
    return f"{_STATES}{step}.safetensors"


def _given_up(step: int) -> CancelledError:
    return CancelledError(f"the checkpoint of step {step} was given up")


def _check_strategy(strategy: Strategy) -> None:
    plain = incremental()
    taken = replace(strategy, schedule=plain.schedule, recovery=None, least=None)
    if taken != plain:
        raise ConfigError(
            "a tier keeps the newest durable step, exactly, in the files of its rows: of a "
            "strategy it takes every= and recovery alone; leave out the rest (use ek.incremental "
            "or ek.partial with priority=None), or give the keeper a repository, which ek.auto "
            "needs"
        )


def _tiered(parts: Parts) -> tuple[list[LocalCluster], list[str]]:
    """The clusters whose tables have a tier, and where those are; anything else is refused."""
    clusters = [home.cluster for home in parts.subject.homes()]
    tables = [table for cluster in clusters for table in cluster.tables]
    without = [*parts.tables.tables, *(table.name for table in tables if table.tier is None)]
    if without or not tables:
        what = f"table {without[0]!r} has no tier" if without else "the model has no tables"
        raise ConfigError(
            f"{what}: a run is kept without a repository where a tier holds every table; give all "
            "tables tier=, or give the keeper a repository"
        )
    local = [cluster for cluster in clusters if isinstance(cluster, LocalCluster)]
    if len(local) < len(clusters):
        raise ConfigError("tiers are for shards of this process: use cluster=ek.local()")
    return local, sorted({table.tier.path for table in tables if table.tier is not None})
