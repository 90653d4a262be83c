"""Checkpoints that tiers make by themselves: rows stay in their files, all else goes beside.

A request returns at once. While training goes on, upkeep brings the rows of that batch to the
files and each file *prepares* the batch; then dense state, optimizers and the reader's place are
stored below the first tier, and only then every file *commits*. Whatever ends the process in
between, all files of all tiers come back at the same batch.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol

from emberkeep._types import Json
from emberkeep.blobs import BlobStore
from emberkeep.blobs.local_store import LocalStore
from emberkeep.checkpoint.recovery import Home, steps_of
from emberkeep.checkpoint.save import BackgroundSaver, Counters, Saving
from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.cluster.local.local_tiers import LocalTiers
from emberkeep.errors import (
    CancelledError,
    ConfigError,
    DamageError,
    EmberkeepError,
    MissingObjectError,
    NoVersionError,
    SaveError,
    ShardLostError,
    StorageError,
)
from emberkeep.keeper import tier_state
from emberkeep.keeper.adopted_rows import choose_found
from emberkeep.keeper.model_parts import Parts
from emberkeep.keeper.plain_state import Packed, pack
from emberkeep.keeper.run_saver import DurableStep, Hear, Returned
from emberkeep.keeper.run_state import Captured
from emberkeep.runtime.clock import Clock
from emberkeep.strategies import Strategy, incremental

# A checkpoint is gigabytes; one that takes longer hangs.
_PATIENCE = timedelta(hours=1)


class Tiers(Protocol):
    """Where rows live, in this process or on servers: batches that all of them come back to.

    There is one batch under way at a time: `prepare`, then `commit`, or `abandon`.
    """

    def batch(self) -> int | None: ...

    def lost(self) -> bool: ...

    def durable_state(self) -> str: ...

    def at_batch(self) -> bool | None: ...

    def durable_steps(self, cluster: Any) -> Mapping[str, int]: ...

    def reopen(self) -> None: ...

    def given_up(self) -> bool: ...

    def renew(self, cluster: Any, shards: Sequence[int]) -> tuple[list[int], list[int]]: ...

    def serve(self, cluster: Any, shards: Sequence[int]) -> None: ...

    def forget(self) -> None: ...

    def prepare(self, batch: int) -> Callable[[], None]: ...

    def pending_state(self) -> str: ...

    def commit(self) -> None: ...

    def tidy(self) -> None: ...

    def abandon(self) -> None: ...


class TierSaver(BackgroundSaver[DurableStep]):
    """Keeps a run in the tiers that hold its rows. One step is durable, the newest one.

    `state` is the store of what belongs to their rows, under names that `tiers` give. What makes a
    checkpoint fail is raised by the next call: a file that could not be written has ended its
    shard. Where `state` is another machine's, `max_failures` in a row of that store are.
    """

    exact = due_whole = True
    restores = lossy_restores = 0  # which nothing is chosen by

    def __init__(
        self, tiers: Tiers, state: BlobStore, url: str, *, on_event: Hear, clock: Clock,
        paths: Sequence[str] = (), max_failures: int = 1,
    ) -> None:  # fmt: skip
        self.tiers = tiers
        self.made_by: Json = {}
        """Goes beside the rows of every batch: who has made it durable."""
        self._max_failures = max_failures
        self._state = state
        self._paths = paths
        self.url = url
        super().__init__(
            "emberkeep-tier-commit", "checkpoint", f"in {self.url}", _PATIENCE, clock=clock,
            on_event=on_event,
        )  # fmt: skip
        # Who holds it decides the batch under way: it is committed, or given up.
        self._deciding = threading.Lock()

    @property
    def whole(self) -> DurableStep | None:
        batch = self.tiers.batch()
        return None if batch is None else DurableStep(batch)

    def follow(self, spec: VersionSpec) -> None:
        raise ConfigError("a tier holds rows as they are: there is nothing to choose")

    def holds_run(self) -> bool:
        return self.whole is not None

    def kept_nbytes(self) -> int:
        stores = [LocalStore(path, clock=self._clock) for path in self._paths]
        return sum(info.size for store in stores for info in store.list())

    # -- saving ----------------------------------------------------------------------------------

    def cut(
        self, step: int, state: Captured | None, counters: Counters, *, whole: bool = True
    ) -> Saving[DurableStep]:
        """Declares this step one to come back to. Returns at once."""
        self.join()
        self.check()
        assert state is not None
        start = self._clock.monotonic()
        counted = counters() if callable(counters) else counters
        # By a name from when it was losses alone.
        beside = pack(
            {"reader": state.reader, "losses": counted, "made_by": self.made_by},
            what=tier_state.BESIDE,
        )
        try:
            await_prepared = self.tiers.prepare(step)
        except StorageError as error:
            if self._max_failures == 1:
                raise
            await_prepared = partial(_fail, error)  # counted as that of any other
        try:
            pause = timedelta(seconds=self._clock.monotonic() - start)
            saving = Saving[DurableStep](step, pause, self._clock)
            self._start(saving, partial(self._write, saving, await_prepared, state.dense, beside))
        except Exception:  # the system has no thread to give: nobody would ever commit
            self._abandon()
            raise
        return saving

    def finish(self, step: int, state: Captured | None, counters: Counters) -> DurableStep | None:
        self.cut(step, state, counters)
        return self.wait()

    def _write(
        self, saving: Saving[DurableStep], await_prepared: Callable[[], None], dense: Packed,
        beside: Packed,
    ) -> None:  # fmt: skip
        try:
            await_prepared()  # `join` has a deadline
        except EmberkeepError as error:
            if saving.cancelled.is_set():
                raise _given_up(saving.step) from error
            raise
        saving.copied.set_result(None)
        with self._deciding:
            _check_wanted(saving)
            name = self.tiers.pending_state()
        content = tier_state.encode(name, dense, beside)
        nbytes = sum(len(piece) for piece in content)
        with self._deciding:
            _check_wanted(saving)
            self._state.put(name, content)
            self.tiers.commit()
            saving.committed.set_result(DurableStep(saving.step))
        self._failures = []
        self._tell_saved(saving, version=None, kind="tier", nbytes=nbytes)
        self.tiers.tidy()

    def _is_fault(self, error: BaseException) -> bool:
        # With a shard, its part of a checkpoint is lost too: that is no fault of the files.
        return not isinstance(error, ShardLostError) and not self.tiers.lost()

    def _clean_up(self, saving: Saving[DurableStep], error: BaseException) -> None:
        with self._deciding:
            self._abandon()
        if self._max_failures > 1 and isinstance(error, StorageError):
            warnings.warn(f"saving step {saving.step} failed: {error}", stacklevel=1)

    def _abandon(self) -> None:
        with suppress(EmberkeepError):  # the next checkpoint tries again
            self.tiers.abandon()

    def heed(self, stopping: Callable[[], object], grace: timedelta) -> None:
        self.stopping = stopping

    def make_room(self) -> None:
        self.join_unless_stopping()

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

    def give_up(self) -> None:
        self.cancel()
        self.join()  # else files might be closed while they are committed

    def check(self, least: int | None = None) -> None:
        failures = self._failures = [*self._failures, *self._unseen()]
        grave = [error for error in failures if not isinstance(error, StorageError)]
        most = min(least or self._max_failures, self._max_failures)
        if not grave and len(failures) < most:
            return
        self._failures = []
        if grave or most == 1 == self._max_failures:
            raise (grave or failures)[0]
        raise SaveError(
            f"{len(failures)} checkpoints in a row have failed, the last with: {failures[-1]}; the "
            "rows are still where they live, and part of the next one"
        ) from failures[-1]

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
        dense, beside = self._beside(durable)
        fits(Captured(dense=dense, reader=beside["reader"]))
        self._saving = None
        return Returned(kept=durable, counters=beside["losses"])

    def _beside(self, durable: DurableStep) -> tuple[Packed, Json]:
        """Dense state and what else belongs to the rows of the durable step."""
        name = self.tiers.durable_state()
        try:
            content = self._state.get(name)
        except MissingObjectError:
            raise DamageError(
                f"the tier holds the rows of step {durable}, and {self._state.url} not what "
                "belongs to them; bring that directory back, or restore a version of a repository",
                name=name,
            ) from None
        return tier_state.decode(name, content)

    def maker(self) -> Json:
        """Who has made the durable step so; empty where that is not said."""
        durable = self.whole
        maker: Json = {} if durable is None else self._beside(durable)[1].get("made_by", {})
        return maker

    def tag(self, name: str, version: int | str | None = None) -> NoReturn:
        raise ConfigError(
            f"{self.url} is a tier, which has one durable step and no versions that could be named"
        )

    def recover_shards(
        self, lost: Iterable[tuple[Home, Sequence[int]]], still: Callable[[], bool] | None = None
    ) -> None:
        """Brings lost shards back from their own files, at the durable step."""
        for home, shards in lost:
            self._recover_shards(home, shards)

    def _recover_shards(self, home: Home, shards: Sequence[int]) -> None:
        steps = steps_of(home.cluster)
        back, _ = self.tiers.renew(home.cluster, shards)
        self.serve_back(home, back, steps)

    def serve_back(self, home: Home, shards: Sequence[int], steps: Mapping[str, int]) -> None:
        """Has shards answer that came back from their files. The steps of tables go on with the
        survivors', since those count the job's pushes."""
        self.tiers.serve(home.cluster, shards)
        for shard in (home.cluster.handles[index] for index in shards):
            state = shard.table_state()
            shard.load_table_state(
                {
                    name: {**table, "steps": steps.get(name, table["steps"])}
                    for name, table in state.items()
                }
            )

    # -- beside a repository ---------------------------------------------------------------------

    def resumable(self) -> DurableStep | None:
        """The step that rows and all else can come back to; None where the run has gone back
        behind it since."""
        if self.whole is None:
            return None
        try:
            self._state.size(self.tiers.durable_state())
        except MissingObjectError:
            return None
        return self.whole

    def forget(self) -> None:
        """The run goes on from elsewhere: what is durable here must never come back."""
        self.settle()
        self.tiers.forget()

    def settle(self) -> None:
        """What became of the last checkpoint is known, and recorded where files are; raises why it
        cannot be."""
        self.join()
        self.tiers.abandon()


def _fail(error: Exception) -> NoReturn:
    raise error


def _check_wanted(saving: Saving[DurableStep]) -> None:
    if saving.cancelled.is_set():
        raise _given_up(saving.step)


def _given_up(step: int) -> CancelledError:
    return CancelledError(f"the checkpoint of step {step} was given up")


def tier_saver(
    parts: Parts, strategy: Strategy, *, must_exist: bool, on_event: Hear, clock: Clock
) -> TierSaver:
    """The saver of a run that is kept in its tiers alone; anything else is refused."""
    _check_strategy(strategy)
    saver = local_saver(parts, on_event=on_event, clock=clock)
    choose_found(parts.subject)
    if must_exist and not saver.holds_run():
        raise NoVersionError(
            f"the tier {saver.url} holds no durable step, and this run must exist: nothing was "
            "trained. Check the path, and that its disk is mounted; leave must_exist out to "
            "start a new run"
        )
    return saver


def local_saver(parts: Parts, *, on_event: Hear, clock: Clock) -> TierSaver:
    clusters, paths = _tiered(parts)
    # That of the tier which decides for all: the place of what belongs to their rows.
    state = LocalStore(os.path.join(paths[0], "state"), clock=clock)
    return TierSaver(
        LocalTiers(clusters, state), state, " and ".join(paths), on_event=on_event, clock=clock,
        paths=paths,
    )  # fmt: skip


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
    local = [cluster for cluster in clusters if isinstance(cluster, LocalCluster)]
    tables = [table for cluster in clusters for table in cluster.tables]
    without = [
        *parts.tables.tables,
        *(table.name for cluster in local for table in cluster.tables if table.tier is None),
    ]
    if without or not tables:
        what = f"table {without[0]!r} has no tier" if without else "the model has no tables"
        raise ConfigError(
            f"{what}: a run is kept without a repository where a tier holds every table; give all "
            "tables tier=, or give the keeper a repository"
        )
    if len(local) < len(clusters):
        raise ConfigError(
            "whether a batch of servers took place is decided beside the versions of their run: "
            "give the keeper a repository, and strategy=ek.tiered(...)"
        )
    return local, sorted({table.tier.path for table in tables if table.tier is not None})
