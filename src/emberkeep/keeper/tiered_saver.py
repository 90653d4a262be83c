"""Two levels: batches in the tiers of a run, often, and versions in its repository, seldom.

A save makes a batch durable where rows live; now and then, as the strategy says, it also cuts a
version of the same step. Whichever is newer is what a run goes on from. Rows are read over the
network only where files are gone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from emberkeep.blobs import BlobStore
from emberkeep.checkpoint.recovery import Home, load_shards, recover_partially, steps_of
from emberkeep.checkpoint.restore import Fits, Restored
from emberkeep.checkpoint.save import Counters, Saving
from emberkeep.checkpoint.target_view import view_of
from emberkeep.cluster.remote.remote_cluster import RemoteCluster
from emberkeep.cluster.remote.remote_tiers import RemoteTiers
from emberkeep.errors import (
    ConfigError,
    DamageError,
    NoVersionError,
    ShardLostError,
    StateError,
)
from emberkeep.keeper.adopted_rows import (
    STEPS_APPLIED_TWICE,
    choose_found,
    clear_found,
    drop_adopted,
    has_found,
    steps_ahead,
    take_adopted,
)
from emberkeep.keeper.model_parts import Parts
from emberkeep.keeper.repository_saver import RepositorySaver
from emberkeep.keeper.run_saver import DurableStep, Hear, Kept, Returned
from emberkeep.keeper.run_state import Captured
from emberkeep.keeper.tier_saver import TierSaver, local_saver
from emberkeep.repository import Manifest, VersionId
from emberkeep.repository.maintenance.version_copy import Origin
from emberkeep.runtime.clock import Clock
from emberkeep.strategies import Every, Strategy

Older = Callable[[Home, Sequence[int], int], object]


class TieredSaver(RepositorySaver):
    """The saver of a repository, and of the tiers that hold all rows of its run.

    `on_older` hears of shards that come back from a version although a later batch is durable:
    before they do, with the step of that version.
    """

    on_older: Older | None = None

    def __init__(
        self, store: BlobStore, parts: Parts, strategy: Strategy, *, on_event: Hear, clock: Clock,
        **options: Any,
    ) -> None:  # fmt: skip
        assert strategy.remote is not None
        self._remote: Every = strategy.remote
        clusters = _clusters(parts)
        super().__init__(store, parts.subject, strategy, on_event=on_event, clock=clock, **options)
        self._tier = _tier_saver(
            clusters, parts, store, self.repository.id, on_event, clock, self.settings.max_failures
        )
        self._tier.made_by = {"repository": self.repository.id, "epoch": self.writer.epoch}
        self._version_at, self._version_step = clock.monotonic(), 0
        self._homes = parts.subject.homes()
        self._stopping = self._batches_ended = self._rows_chosen = False
        self._cutting_version = False
        self._batch_failure: Exception | None = None
        if has_found(self.subject) and self._tier.resumable() is not None:
            choose_found(self.subject)

    # -- what is kept ----------------------------------------------------------------------------

    @property
    def whole(self) -> Kept | None:  # type: ignore[override]
        """The newest of what is durable in tiers and in the repository."""
        batch, manifest = self._tier.resumable(), self._whole
        if manifest is None or (batch is not None and batch >= manifest.step):
            return batch
        return manifest

    @property
    def exact(self) -> bool:
        """Whether the newest version, too, holds the step that is durable: the end of a run is a
        version."""
        return super().exact and super().committed_step == self.committed_step

    @property
    def busy(self) -> bool:  # type: ignore[override]
        """Batches are made one at a time; a version under way does not hold them up, unless they
        wait for it."""
        saving = self._saving
        awaited = self._left_newer and saving is not None and not saving.ended.is_set()
        return self._tier.busy or awaited

    @property
    def committed_step(self) -> int | None:
        steps = [s for s in (super().committed_step, self._tier.committed_step) if s is not None]
        return max(steps, default=None)

    def holds_run(self) -> bool:
        return super().holds_run() or self._tier.resumable() is not None

    # -- saving ----------------------------------------------------------------------------------

    def cut(
        self, step: int, state: Captured | None, counters: Counters, *, whole: bool = True
    ) -> Saving[Any]:
        """A batch; and a version where one is due. The beginning of a run is a version alone, and
        so is what follows a version that newer ones were left for: a batch whose step comes before
        theirs would not be gone on from."""
        if step == 0:
            self._start_over()
        if step == 0 or self._left_newer:
            return self._cut_version(step, state, counters)
        drop_adopted(self.subject)
        saving: Saving[Any] = self._tier.cut(step, state, counters)
        if self._version_due(step):
            self._cut_version(step, state, counters)
        return saving

    def _start_over(self) -> None:
        """Rows that nobody has chosen are those that opening brought from files: a run that starts
        over beside what it has kept begins without them."""
        found = not self._rows_chosen and self.holds_run()
        self._tier.forget()
        if found:
            view_of(self.subject).clear()
        self._rows_chosen = True

    def _cut_version(
        self, step: int, state: Captured | None, counters: Counters
    ) -> Saving[Manifest]:
        self._cutting_version = True
        try:
            saving = super().cut(step, state, counters)
        finally:
            self._cutting_version = False
        self._version_at, self._version_step = self._clock.monotonic(), step
        return saving

    def _version_due(self, step: int) -> bool:
        """Never while one is under way, or the process is being stopped: batches do not wait."""
        saving, every = self._saving, self._remote
        if self._stopping or (saving is not None and not saving.ended.is_set()):
            return False
        if saving is not None and saving.committed.exception() is not None:
            return True  # the last one came to nothing
        if every.steps is not None:
            return step // every.steps > self._version_step // every.steps
        assert every.time is not None
        return timedelta(seconds=self._clock.monotonic() - self._version_at) >= every.time

    def hurry(self) -> None:
        """The process is being stopped: a batch is enough, and a version under way is given up."""
        self._stopping = True
        super().hurry()
        super().cancel()

    def finish(self, step: int, state: Captured | None, counters: Counters) -> Manifest | None:
        """A last version; batches end here. What made the last one fail is raised once the version
        is durable."""
        try:
            self._tier.close()
        except Exception as error:
            self._batch_failure = error
        self._batches_ended = True
        try:
            manifest = super().finish(step, state, counters)
        finally:
            self._batches_ended = False  # a run that lost shards goes on
        failure, self._batch_failure = self._batch_failure, None
        if failure is not None:
            raise failure
        return manifest

    def make_room(self) -> None:
        """For a batch; also for the version that comes in its place. Neither waits for the other:
        a version that is due is cut while its batch is under way."""
        self.check_caller()
        self._tier.make_room()
        if self._left_newer:
            super().make_room()

    def check(self, least: int | None = None) -> None:
        self._tier.check(least)
        super().check(least)

    def heed(self, stopping: Callable[[], object], grace: timedelta) -> None:
        super().heed(stopping, grace)
        self._tier.heed(stopping, grace)

    def join(self, timeout: timedelta | None = None) -> bool:
        """Waits for batch and version. Once the process is being stopped, with a time for the batch
        alone, since a run that has no time left can go on from it, unless a version comes in its
        place."""
        self.check_caller()
        start = self._clock.monotonic()
        joined = self._tier.join(timeout)
        if timeout is not None:
            if self._stopping and not self._left_newer:
                return joined
            waited = timedelta(seconds=self._clock.monotonic() - start)
            timeout = max(timedelta(0), timeout - waited)
        return super().join(timeout) and joined

    def join_unless_stopping(self) -> bool:
        # A version that is being cut does not wait for the batch of its own step.
        batch_ended = self._cutting_version or self._tier.join_unless_stopping()
        return batch_ended and super().join_unless_stopping()

    def check_caller(self) -> None:
        self._tier.check_caller()
        super().check_caller()

    def wait(self) -> Kept | None:  # type: ignore[override]
        if self._tier.saves_here:
            return self._tier.wait()
        if self.saves_here or self._batches_ended:
            return super().wait()
        made = [super().wait(), self._tier.wait()]
        kept = [one for one in made if one is not None]
        return max(kept, key=lambda one: one.step, default=None)

    def cancel(self) -> None:
        super().cancel()
        self._tier.cancel()
        self._tier.join()  # else files might be closed while they are committed

    def _end(self) -> None:
        self._tier.close()
        super()._end()

    def went_back_to(self, version: VersionId) -> None:
        self._rows_chosen = True
        self._tier.forget()
        super().went_back_to(version)

    # -- going back ------------------------------------------------------------------------------

    def bring_back(
        self, version: int | str | None, *, fall_back: bool, fits: Callable[[Captured], object]
    ) -> Returned | None:
        """From the tiers where all files have the newest durable batch; else from the version,
        and that batch is given up for good. Versions that nobody can read hide no batch; one of a
        later step that is damaged does, unless `fall_back` allows it. That allows a version, too,
        where what belongs to the rows of the batch is damaged."""
        returned = self._bring_back(version, fall_back, fits)
        self._rows_chosen = True
        return returned

    def _bring_back(
        self, version: int | str | None, fall_back: bool, fits: Callable[[Captured], object]
    ) -> Returned | None:
        self._tier.settle()
        batch = self._tier.resumable() if version is None else None
        if batch is None:
            return self._from_version(version, fall_back, fits)
        newer, older, damaged = self._around(batch)
        if newer:
            try:
                return self._from_version(None, False, fits)
            except DamageError:
                if not fall_back:
                    raise
        for manifest in newer:
            number = manifest.version.number
            try:
                returned = self._from_version(number, False, fits)
            except DamageError:
                damaged.append(number)
                continue
            return returned and _past(returned, [n for n in damaged if n > number])
        try:
            if older is None or not self._went_on_without(older):
                returned = self._from_batch(fits, older)
                if returned is not None:
                    return _past(returned, damaged)
        except DamageError as error:
            if not fall_back or older is None:
                raise
            warnings.warn(
                f"the batch of step {batch} was passed over: {error}",
                stacklevel=8,
            )
        return self._from_version(None, fall_back, fits)

    def _went_on_without(self, version: Manifest) -> bool:
        """Whether a version, of no later step than the batch, was saved by a process that came
        after the one which has made the batch: a run that keeps versions alone has gone on from
        elsewhere, and the batch is of a past that it has left."""
        maker, saved = self._tier.maker(), Origin.of(version)
        known = maker.get("repository") == saved.repository == self.repository.id
        return known and saved.version.epoch > int(maker["epoch"])

    def _around(self, batch: DurableStep) -> tuple[list[Manifest], Manifest | None, list[int]]:
        """Whole versions of later steps than the batch, the newest first; the newest that is not;
        and the numbers of those before which nobody can read, whatever their step."""
        newer: list[Manifest] = []
        damaged: list[int] = []
        for version in reversed(self.repository.versions()):
            try:
                manifest = self.repository.manifest(version)
            except DamageError:
                damaged.append(version.number)
                continue
            except NoVersionError:  # it was removed meanwhile
                continue
            if manifest.aside or not manifest.whole:
                continue
            if batch >= manifest.step:
                return newer, manifest, damaged
            newer.append(manifest)
        return newer, None, damaged

    def _from_version(
        self, version: int | str | None, fall_back: bool, fits: Callable[[Captured], object]
    ) -> Returned | None:
        restored = super().bring_back(version, fall_back=fall_back, fits=fits)
        self._count_from(None if restored is None else self._whole)
        return restored

    def _from_batch(
        self, fits: Callable[[Captured], object], manifest: Manifest | None
    ) -> Returned | None:
        """The durable batch, beside its newest version; None where not all files have it."""
        if take_adopted(self.subject, self.repository.id):
            return self._beside_adopted_batch(fits, manifest)
        returned = self._from_tiers(fits)
        if returned is not None:
            self._goes_on_beside(manifest)
        return returned

    def _begin_new(self) -> None:
        """What was given up is nobody's. What some servers have may still come back to all."""
        if has_found(self.subject) and not self._tier.tiers.given_up():
            raise StateError(
                f"not all servers have the step that others have made durable, and {self.url} has "
                "no version; nothing was changed. Bring the files back (is every disk mounted?), "
                "or start over with start_over() (--fresh)"
            )
        clear_found(self.subject)
        self._tier.forget()

    def restore(
        self, version: int | None = None, *, fall_back: bool = False, fits: Fits | None = None
    ) -> Restored | None:
        """The batch is given up once the version is back, and not for one that is refused, is
        damaged or is not there: the run can still go on from it."""
        restored = super().restore(version, fall_back=fall_back, fits=fits)
        if restored is not None:
            self._tier.forget()
        return restored

    def _beside_adopted(
        self, fits: Callable[[Captured], object], fall_back: bool
    ) -> Returned | None:
        returned = super()._beside_adopted(fits, fall_back)
        self._tier.forget()
        return returned

    def _beside_adopted_batch(
        self, fits: Callable[[Captured], object], manifest: Manifest | None
    ) -> Returned | None:
        """All but rows as of the durable batch, and how far rows are ahead of it."""
        returned = self._tier.bring_back(None, fall_back=False, fits=fits)
        if returned is None:
            return None
        self._goes_on_beside(manifest)
        saved = {
            name: {"steps": self._tier.tiers.durable_steps(home.cluster).get(own, 0)}
            for home in self._homes
            for name, own in home.names.items()
        }
        ahead = steps_ahead(self.subject, saved)
        return replace(returned, counters={**returned.counters, STEPS_APPLIED_TWICE: ahead})

    def _goes_on_beside(self, manifest: Manifest | None) -> None:
        """From a batch, of which this is the newest version."""
        self.forget_chain()  # what was deleted since the version is not known any more
        self._whole = manifest
        if manifest is not None:
            self._take_widths(manifest)
        self._count_from(manifest)
        self._tell_run()

    def _count_from(self, manifest: Manifest | None) -> None:
        """The next version is due by the age of this one, whichever process wrote it: one that is
        started often would never write one otherwise."""
        self._version_at, self._version_step = self._clock.monotonic(), 0
        if manifest is not None:
            age = (self._clock.now() - manifest.created).total_seconds()
            self._version_at -= max(0.0, age)
            self._version_step = manifest.step

    def _from_tiers(self, fits: Callable[[Captured], object]) -> Returned | None:
        there = self._tier.tiers.at_batch()
        if there is False:  # trained on since
            self._tier.tiers.reopen()
            there = self._tier.tiers.at_batch()
        if not there:
            return None
        return self._tier.bring_back(None, fall_back=False, fits=fits)

    def recover_shards(  # type: ignore[override]
        self, lost: Iterable[tuple[Home, Sequence[int]]], still: Callable[[], bool] | None = None
    ) -> Kept | None:
        """Each from its own files, where they have the newest durable batch; others from the
        newest version, all of them at once: that is one restore."""
        kept: Kept | None = None
        with self._one_restore() as versions:
            for home, shards in lost:
                if isinstance(self.whole, DurableStep):
                    found = self._recover_from_files(home, shards)
                else:
                    found = recover_partially(self, home, shards, still)
                kept = found or kept
                versions.append(found if isinstance(found, Manifest) else None)
        return kept

    def _recover_from_files(self, home: Home, shards: Sequence[int]) -> Kept | None:
        """The batch; or the version, where some of the shards came from there."""
        steps = steps_of(home.cluster)
        back, empty = self._tier.tiers.renew(home.cluster, shards)
        if empty:
            if self._whole is None:
                raise ShardLostError(empty)
            if self.on_older is not None:
                self.on_older(home, empty, self._whole.step)
            load_shards(self, home, empty, steps)
        self._tier.serve_back(home, back, steps)
        home.cluster.serve(*empty)
        self.forget_chain()
        return self._whole if empty else self._tier.whole


def _past(returned: Returned, damaged: Sequence[int]) -> Returned:
    """What came back in the place of damaged versions."""
    passed_over = tuple(sorted({*returned.passed_over, *damaged}, reverse=True))
    return replace(returned, passed_over=passed_over)


def _clusters(parts: Parts) -> Sequence[Any]:
    """All clusters of the model; refused where rows are elsewhere than in tiers."""
    clusters = [home.cluster for home in parts.subject.homes()]
    without = [
        *parts.tables.tables,
        *(table.name for cluster in clusters if not cluster.tiered for table in cluster.tables),
    ]
    if without or not clusters:
        what = f"table {without[0]!r} has none" if without else "the model has no tables"
        raise ConfigError(
            f"ek.tiered keeps batches in the tiers of all tables, and {what}: give tier= to the "
            "tables, or to the servers that hold them, or use ek.incremental"
        )
    return clusters


def _tier_saver(
    clusters: Sequence[Any], parts: Parts, store: BlobStore, run: str, on_event: Hear, clock: Clock,
    max_failures: int,
) -> TierSaver:  # fmt: skip
    on_servers = [cluster for cluster in clusters if isinstance(cluster, RemoteCluster)]
    if not on_servers:
        return local_saver(parts, on_event=on_event, clock=clock)
    if len(on_servers) < len(clusters):
        raise ConfigError(
            "some tables are on servers and some in this process, and one batch of both cannot be "
            "decided: put all of them on servers, or use ek.incremental"
        )
    if not all(cluster.reaches(store.url) for cluster in on_servers):
        raise ConfigError(
            f"servers ask {store.url} whether a batch took place, and cannot reach it: use a store "
            "that all nodes reach"
        )
    tiers = RemoteTiers(on_servers, store, run, clock)
    return TierSaver(
        tiers, store, store.url, on_event=on_event, clock=clock, max_failures=max_failures
    )


def check_ranks(strategy: Strategy, world: int) -> None:
    """Refuses what is for one process that trains."""
    if strategy.remote is not None and world > 1:
        raise ConfigError(
            f"ek.tiered is for one process that trains, and there are {world}: use ek.incremental "
            "or ek.partial, and tiers serve as memory"
        )
    if strategy.spec.accuracy_budget is not None and world > 1:
        raise ConfigError(
            f"accuracy_budget= is measured in a run of one process, and there are {world}: leave "
            "it out, calibrate in a run of one process, and give the strategy bits={table: width}"
        )
