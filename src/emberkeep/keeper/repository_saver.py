"""Versions of a run in a repository."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

from emberkeep._types import Json
from emberkeep.blobs import BlobStore, Call
from emberkeep.checkpoint.held_version import has_newer
from emberkeep.checkpoint.recovery import Home, recover_partially
from emberkeep.checkpoint.restore import Restored, check_holders, load, read_beside
from emberkeep.checkpoint.save import Counters, Extras, Saving
from emberkeep.checkpoint.saver import Checkpointer
from emberkeep.checkpoint.spec import SaveSettings, VersionSpec
from emberkeep.checkpoint.target_view import view_of
from emberkeep.checkpoint.targets import Subject
from emberkeep.checkpoint.widths import Widths, is_lossy
from emberkeep.cluster.base import Cluster
from emberkeep.cluster.remote.remote_tiers import check_runs
from emberkeep.errors import (
    DamageError,
    EmberkeepError,
    NoRepositoryError,
    NoVersionError,
    StateError,
    StorageError,
)
from emberkeep.keeper.adopted_rows import (
    STEPS_APPLIED_TWICE,
    check_found,
    clear_adopted,
    drop_adopted,
    has_adopted,
    steps_ahead,
    take_adopted,
)
from emberkeep.keeper.mirror import Mirror, MirrorStatus
from emberkeep.keeper.mirror_repair import Candidate, bring_named, candidates, repaired
from emberkeep.keeper.plain_state import Packed, pack, unpack
from emberkeep.keeper.ranks import Ranks
from emberkeep.keeper.run_saver import Hear, Returned, RunSaver
from emberkeep.keeper.run_state import Captured, RunState
from emberkeep.repository import Manifest, Repository, VersionId, names
from emberkeep.repository.grid.catalog_ahead import catalog_ahead
from emberkeep.repository.history import look_at
from emberkeep.repository.maintenance.version_copy import (
    newest_counted,
    newest_readable,
    run_of,
)
from emberkeep.runtime.clock import Clock
from emberkeep.runtime.pool import Pool
from emberkeep.strategies import Strategy

Fits = Callable[[Captured], object]


class RepositorySaver(Checkpointer):
    """Makes this process the only writer of a repository, which is created if it is not there.

    With `must_exist` a repository that is not there or has no version is refused instead, before
    anything is created or taken over, unless the `mirror` has one. `about` goes into every
    manifest. What the mirror has that is newer is copied to the repository first.
    """

    busy = False
    _aside: VersionId | None = None
    """The version that was written last, if it is none that the run goes on from by itself."""

    def __init__(
        self, store: BlobStore, subject: Subject, strategy: Strategy, *, about: Json,
        settings: SaveSettings, exclusive: bool, must_exist: bool, on_event: Hear,
        clock: Clock, mirror: Callable[..., Mirror] | None = None, beside: bool = False,
    ) -> None:  # fmt: skip
        copies = None
        if mirror is not None:
            copies = mirror(must_exist=must_exist and not Repository.exists(store))
        must_exist = must_exist and (copies is None or copies.empty)
        clusters = [p.target for p in view_of(subject).parts if isinstance(p.target, Cluster)]
        look, ahead = look_at(store), catalog_ahead(store)
        try:
            repository = Repository.open(store, clock=clock)
        except NoRepositoryError:
            if must_exist:
                raise NoRepositoryError(
                    f"{store.url} holds no repository, and this run must exist: nothing was "
                    "created. Check the path, and that its disk is mounted; leave must_exist out "
                    "to start a new run"
                ) from None
            check_holders(subject, store.url, None)
            check_runs(clusters, store.url, None)
            schema = subject.schema()
            repository = Repository.create(store, schema=schema, exclusive=exclusive, clock=clock)
            look = None
        if ahead is not None:
            ahead.read(repository)
        history = repository.history(look=look) if must_exist or look is not None else None
        if must_exist and history is not None and history.newest is None:
            raise NoVersionError(
                f"{store.url} has no version, and this run must exist: nothing was started "
                "over. Bring its versions back; leave must_exist out to start a new run"
            )
        likely = None if history is None else history.newest
        self._likely = likely
        self._likely_newest = Call(store, partial(_readable, repository, likely))
        if copies is not None:  # first: a process that cannot have both places takes neither
            copies.follow(repository)
            history = None  # it takes as long as both places have versions: somebody may have come
        check_runs(clusters, store.url, repository.id)
        self.url, self._mirror = store.url, copies
        super().__init__(
            repository,
            subject,
            spec=strategy.spec,
            settings=replace(settings, retention=strategy.retention),
            on_event=on_event,
            history=history,
            ahead=ahead,
            # Servers with kept rows hear of the run: they stay or go by its history.
            beside=beside and copies is None and not has_adopted(subject),
        )
        self._run_said: str | None = None
        self._tell_run(repository.id)
        self._about = about
        self.patience: timedelta | None = None
        """How long the end of the run waits for the mirror at most; None: as long as it copies."""
        if copies is not None:
            brought = copies.bring_newer(self.writer)
            self._restores.update(repository.restore_counts())  # those that were made elsewhere
            if brought is not None:
                self._tell("brought_from_mirror", _brought(brought))
            self.run_marks = copies.marks()
            self._note_newest(self.writer.newest)

    def _started_from(self, newest: VersionId | None) -> None:
        if self._mirror is None:  # else it is known when what is newer there was brought
            self._note_newest(newest)

    def _note_newest(self, found: VersionId | None) -> None:
        repository, likely = self.repository, self._likely
        newest = self._likely_newest.result() if found == likely else _readable(repository, found)
        if newest is not None and newest.aside:
            self._aside = newest.version
        if newest is None or not newest.whole or newest.aside:
            newest = newest_readable(repository, repository.versions())
        run = repository.id if newest is None else run_of(newest)
        if run != repository.id:  # the run has moved here
            self.run_marks = {**self.run_marks, "run": run}

    @property
    def exact(self) -> bool:
        """Whether the newest version holds what was trained, to the bit: how it was stored counts,
        not what the strategy may come to."""
        saving = self._saving
        if saving is None or not saving.committed.done() or saving.committed.exception():
            return not self._loses()
        return not is_lossy([saving.committed.result()], self.repository.tables)

    def follow(self, spec: VersionSpec) -> None:
        self.spec = spec

    def holds_run(self) -> bool:
        if self._before is not None:  # one that was there cannot go
            return True
        return self.writer.newest is not None or self.repository.latest() is not None

    def cut(
        self, step: int, state: Captured | None, counters: Counters, *, whole: bool = True
    ) -> Saving[Manifest]:
        clear_adopted(self.subject)  # of a run that starts over beside them
        check_found(self.subject)
        return self.save(step, self._extras(state, counters), whole=whole)

    def finish(self, step: int, state: Captured | None, counters: Counters) -> Manifest | None:
        check_found(self.subject)
        return self.close(step, self._extras(state, counters))

    def _extras(self, state: Captured | None, counters: Counters) -> Extras:
        if state is None:
            return Extras(user=self._about, counters=counters)
        reader = pack(state.reader, what="reader")
        dense = Packed(state.dense.plain, {**state.dense.tensors, **reader.tensors})
        return Extras(dense=dense.encode, reader=reader.plain, user=self._about, counters=counters)

    def tag(self, name: str, version: int | str | None = None) -> Manifest:
        """Names a version, the newest unless another is given; the name moves."""
        if version is None:
            self.wait()
            chosen = self.repository.newest_whole()
            if chosen is None:
                raise NoVersionError(f"{self.url} has no version yet: save one first")
        else:
            chosen = self.repository.named(version)
        self.repository.tag(name, chosen, move=True)
        if self._mirror is not None:
            self._mirror.offer_records()
        return self.repository.manifest(chosen)

    def went_back_to(self, version: VersionId) -> None:
        """The run goes on from a version that not all of it came from."""
        drop_adopted(self.subject)
        newest = self.writer.resume(version)
        self.forget_chain()
        self._whole = None
        self._left_newer = not newest and has_newer(self.repository, version, self.spec.priority)
        self._look_past_aside(version)
        self._tell_run()

    def _tell_run(self, run: str | None = None) -> None:
        """Servers hear whose rows they hold, for a trainer that would adopt them. Those of a run
        that has left newer versions are nobody's until its next one: beside them, a restart would
        bring back the network of the newest."""
        run = ("" if self._left_newer else self.repository.id) if run is None else run
        if run != self._run_said:
            self._run_said = run
            for part in view_of(self.subject).parts:
                if isinstance(part.target, Cluster):
                    part.target.tell(repository=run)

    @property
    def continued(self) -> int | None:
        """The number of the version that the run goes on from, if whole ones are newer that it has
        left or passed over."""
        resumed = self.writer.resumed
        return resumed.number if self._left_newer and resumed is not None else None

    def bring_back(
        self, version: int | str | None, *, fall_back: bool, fits: Fits
    ) -> Returned | None:
        if version is None and take_adopted(self.subject, self.repository.id):
            return self._beside_adopted(fits, fall_back)
        drop_adopted(self.subject)
        self._tell_run("")  # before they are loaded, until it is known what they are
        if isinstance(version, str) and not version.isdigit():
            version = self._named(version).number
        number = None if version is None else int(version)
        ahead = self._counted_ahead() if number is None else None
        if number is None and ahead is None and self._last_is_aside:
            counted = newest_counted(self.repository)
            number = None if counted is None else counted.number

        def restore(number: int | None) -> Restored | None:
            known = nullcontext() if ahead is None else self.repository.pinned(ahead)
            with known:
                # What the mirror has intact is not passed over.
                return self.restore(
                    number, fall_back=fall_back and mirror is None,
                    fits=lambda found: _check_fit(found, fits),
                )  # fmt: skip

        mirror = None if version is not None else self._mirror
        try:
            restored = restore(number)
        except DamageError as error:
            if mirror is None:
                raise
            restored = self._restore_from_both(mirror.repository, error, restore, fall_back)
        if restored is not None:
            self._look_past_aside(restored.manifest.version)
            if self._mirror is not None:
                self._mirror.offer_records()
        self._tell_run()
        if restored is None:
            self._begin_new()
            return None
        self._take_widths(restored.manifest)
        return _returned(restored)

    def _take_widths(self, manifest: Manifest) -> None:
        """Those of the run so far, if they were measured for what is asked for now."""
        described, wanted = manifest.described, self.spec.measures
        if not wanted or "widths" not in described:
            return
        found, held = Widths.of(described.object("widths")), self.spec.widths
        if held is not None and held.measured_for == wanted:
            return  # measured since, in this process
        if found.measured_for == wanted:
            self.spec = replace(self.spec, widths=found)
        elif held is None:
            source = f"measured for {found.measured_for}" if found.measured_for else "given before"
            warnings.warn(
                f"the widths of this run were {source}, and the strategy says {wanted}: versions "
                "are exact until they are calibrated",
                stacklevel=4,
            )

    def _counted_ahead(self) -> Manifest | None:
        """The manifest of what was the newest version before a takeover that is under way, if the
        run goes on from it by itself; that it still is the newest is looked at after the takeover.
        """
        found = None if self._before is None else self._likely_newest.result()
        return None if found is None or found.aside else found

    @property
    def _last_is_aside(self) -> bool:
        return self._aside is not None and self._aside == self.writer.newest

    def _look_past_aside(self, version: VersionId) -> None:
        """Whether the run has left newer versions does not depend on what is aside."""
        if self._last_is_aside:
            self._left_newer = version != newest_counted(self.repository)

    def _begin_new(self) -> None:
        """There is no version: the run begins with the rows that are there, unless files had
        them."""
        check_found(self.subject)

    def _beside_adopted(self, fits: Fits, fall_back: bool) -> Returned | None:
        """All but rows from the newest version, or with `fall_back` from the newest undamaged one;
        and how far rows are ahead of it."""
        restored, passed_over = self._newest_beside(fall_back)
        if restored is None:
            view_of(self.subject).clear()
            return None
        _check_fit(restored, fits)
        self._whole = manifest = restored.manifest
        self._take_widths(manifest)
        newest = self.writer.resume(manifest.version)
        self.forget_chain()
        self._left_newer = bool(passed_over) and not newest
        self._tell_run()
        ahead = steps_ahead(self.subject, manifest.layout["tables"])
        counters = {**manifest.counters, STEPS_APPLIED_TWICE: ahead}
        return Returned(kept=manifest, counters=counters, passed_over=tuple(passed_over))

    def _newest_beside(self, fall_back: bool) -> tuple[Restored | None, list[int]]:
        """What a version has beside its rows, and the numbers of damaged ones that were newer."""
        passed_over, failure = list[int](), None
        for version in reversed(self.repository.versions()):
            try:
                manifest = self.repository.manifest(version)
                if manifest.whole and not manifest.aside:
                    return read_beside(self.repository, manifest), passed_over
            except NoVersionError:  # it was removed meanwhile
                continue
            except DamageError as error:
                if not fall_back:
                    raise
                failure = failure or error
                passed_over.append(version.number)
        if failure is not None:
            raise failure
        return None, passed_over

    # -- the mirror ------------------------------------------------------------------------------

    def _named(self, name: str) -> VersionId:
        """The version of a name; one that the mirror alone has is brought from there. It stands
        aside: the newest version of the repository stays what it was, until the run has gone on
        from the other one and saved."""
        try:
            return self.repository.named(name)
        except NoVersionError:
            if self._mirror is None:
                raise
            self.learn_outcome()  # no two versions are written at once
            brought = bring_named(name, self._mirror.repository, self.writer)
            if brought is None:
                raise
            if brought.aside and brought.version == self.writer.newest:
                self._aside = brought.version
            self.repository.tag(name, brought.version, move=True)
            self._tell("brought_from_mirror", _brought(brought))
            return brought.version

    def _restore_from_both(
        self, mirror: Repository, error: DamageError,
        restore: Callable[[int | None], Restored | None], fall_back: bool,
    ) -> Restored | None:  # fmt: skip
        """Brings the newest version back although it is damaged here, if the mirror has what is
        missing; with `fall_back` the newest that is intact in either place, or in both together. A
        repair that fails, for want of room or because a place cannot be reached, ends nothing then
        that an older version could go on from."""
        lost: list[VersionId] = []
        for number, candidate in enumerate(self._candidates(mirror, fall_back)):
            damage = error
            try:
                if number and candidate.here is not None:
                    restored = restore(candidate.here.number)
                    return restored and replace(restored, lost=tuple(lost))
            except DamageError as another:
                damage = another
            try:
                found = self._repaired(candidate, mirror, damage)
                if found is not None:
                    restored = restore(found.number)
                    return restored and replace(restored, lost=tuple(lost))
            except (DamageError, NoVersionError, StorageError) as another:
                if not fall_back:
                    raise
                warnings.warn(
                    f"{damage}; it could not be repaired: {another}; an older version is taken",
                    stacklevel=6,
                )
            if candidate.here is not None:
                lost.append(candidate.here)
            if not fall_back:
                break
        raise error

    def _candidates(self, mirror: Repository, fall_back: bool) -> list[Candidate]:
        try:
            return list(candidates(self.repository, mirror))
        except StorageError as error:
            if not fall_back:
                raise
            warnings.warn(
                f"what {mirror.store.url} has is not taken into account: {error}", stacklevel=7
            )
            return list(candidates(self.repository, None))

    def _repaired(
        self, candidate: Candidate, mirror: Repository, damage: DamageError
    ) -> VersionId | None:
        """The version, if all its files are what was written, by now or as ever."""
        found = repaired(candidate, mirror, self.writer)
        if found is None:
            if candidate.there is not None:
                warnings.warn(f"{damage}; so is the copy in the mirror", stacklevel=7)
            return None
        if found.nbytes:
            manifest = self.repository.manifest(found.version)
            warnings.warn(
                f"{damage}; version {found.version.number} (step {manifest.step}) was repaired "
                f"from the mirror {mirror.store.url}, and the run goes on from it",
                stacklevel=7,
            )
            self._tell("brought_from_mirror", _brought(manifest))
        return found.version

    def _tell_saved(
        self, saving: Saving[Manifest], *, version: int | None, kind: str, nbytes: int,
        held_seconds: float = 0.0, core_seconds: float | None = None,
    ) -> None:  # fmt: skip
        super()._tell_saved(
            saving, version=version, kind=kind, nbytes=nbytes, held_seconds=held_seconds,
            core_seconds=core_seconds,
        )  # fmt: skip
        if saving.whole:
            self._tell_run()
        if self._mirror is not None and saving.whole:
            self._mirror.offer()

    def check(self, least: int | None = None) -> None:
        if self._mirror is not None:
            self._mirror.check()
        super().check(least)

    def _end(self) -> None:
        super()._end()
        if self._mirror is not None:
            self._mirror.finish(self.patience)

    def heed(self, stopping: Callable[[], object], grace: timedelta) -> None:
        """Once `stopping` holds, calls that wait for a save lift its limits, and the end of a run
        waits for the mirror for `grace` at most."""
        self.stopping = stopping
        if self._mirror is not None:
            self._mirror.stopping, self._mirror.grace = stopping, grace

    def leave(self, left: timedelta) -> None:
        if self._mirror is not None:
            self._mirror.finish(left)

    def give_up(self) -> None:
        self.cancel()
        if self._mirror is not None:
            self._mirror.give_up()

    def _lift_limits(self) -> None:
        super()._lift_limits()
        if self._mirror is not None:
            self._mirror.lift_limit()

    def mirror_status(self) -> MirrorStatus | None:
        return None if self._mirror is None else self._mirror.status()

    def recover_shards(
        self, lost: Iterable[tuple[Home, Sequence[int]]], still: Callable[[], bool] | None = None
    ) -> Manifest | None:
        with self._one_restore() as found:
            for home, shards in lost:
                found.append(recover_partially(self, home, shards, still))
        return found[-1] if found else None

    @contextmanager
    def _one_restore(self) -> Iterator[list[Manifest | None]]:
        """Counts the versions that shards come back from in the body as one restore, also where it
        ends with an error: that counts for more than one of the count."""
        found: list[Manifest | None] = []
        try:
            yield found
        except BaseException:
            with suppress(EmberkeepError):
                self._count_recovery(found)
            raise
        self._count_recovery(found)

    def _count_recovery(self, found: Sequence[Manifest | None]) -> None:
        versions = [manifest.version for manifest in found if manifest is not None]
        if versions:
            self.count_restore(versions[-1])
            if self._mirror is not None:
                self._mirror.offer_records()

    def kept_nbytes(self) -> int:
        return kept_nbytes(self.repository.store)


def _readable(repository: Repository, version: VersionId | None) -> Manifest | None:
    """The manifest of a version, if it can be read."""
    with suppress(DamageError, NoVersionError):
        return None if version is None else repository.manifest(version)
    return None


def _brought(copied: Manifest) -> Json:
    return {"version": copied.version.number, "step": copied.step}


def kept_nbytes(store: BlobStore) -> int:
    return sum(info.size for info in store.list(names.DATA))


def continued(saver: RunSaver | None) -> int | None:
    """The number of the version that a run goes on from; None if that is the newest there is."""
    return saver.continued if isinstance(saver, RepositorySaver) else None


def bring_back_together(
    ranks: Ranks, saver: RunSaver | None, store: BlobStore | None, version: int | str | None,
    fall_back: bool, subject: Subject, settings: SaveSettings, state: RunState, clock: Clock,
) -> tuple[Returned | None, int]:  # fmt: skip
    """Has all ranks bring back the version that the writing one chooses, everything but rows
    included; with its number, 0 for a tier. None if there is nothing to bring back."""
    returned = None
    with ranks.agreeing("rank 0 could not bring a version back"):
        if saver is not None:
            returned = saver.bring_back(version, fall_back=fall_back, fits=state.fit)
    chosen = [0, 0]
    if returned is not None and isinstance(returned.kept, Manifest):
        chosen = [returned.kept.version.number, returned.kept.version.epoch]
    found, number, epoch = ranks.largest([returned is not None, *chosen])
    if not found:
        return None, 0
    with ranks.agreeing("another rank could not bring the version back"):
        if returned is None:
            assert store is not None
            returned = _bring_back_beside(
                store, VersionId(number, epoch), subject, settings, state.fit, clock
            )
        state.load()
    return returned, number


def _bring_back_beside(
    store: BlobStore, version: VersionId, subject: Subject, settings: SaveSettings, fits: Fits,
    clock: Clock,
) -> Returned:  # fmt: skip
    """The version that the writing rank has brought back, into another rank."""
    repository, pool = Repository.open(store, clock=clock), Pool(settings.threads)
    repository.reading = settings.reading(repository.store)
    return _returned(
        load(repository, version, subject, pool, lambda found: _check_fit(found, fits))
    )


def _check_fit(restored: Restored, fits: Fits) -> None:
    """Asks whether a version fits the run. A repository that begins with imported rows has nothing
    else yet: the run keeps what it has beside rows."""
    if restored.dense is not None or "imported" not in restored.manifest.layout:
        fits(captured_in(restored))


def captured_in(restored: Restored) -> Captured:
    if restored.dense is None:
        raise StateError("the version has no dense state: it was not written by a keeper")
    dense = Packed.decode(restored.dense)
    return Captured(dense=dense, reader=unpack(Packed(restored.manifest.reader, dense.tensors)))


def _returned(restored: Restored) -> Returned:
    return Returned(
        kept=restored.manifest,
        counters=restored.manifest.counters,
        passed_over=tuple(version.number for version in restored.lost),
    )
