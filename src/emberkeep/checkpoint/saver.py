"""Saving beside training and restoring: what is protected meets where it is kept.

A `Checkpointer` freezes the rows of its subject at the end of a batch, writes them in the
background as one version of a repository, and brings them back. What the subject is made of, it
does not know: in-process shards and plain torch modules are saved by the same code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial

from emberkeep._types import Json
from emberkeep.blobs import Call
from emberkeep.checkpoint.codec_choice import Choice, choose
from emberkeep.checkpoint.held_version import HeldVersion, Known, has_newer, newest_intact
from emberkeep.checkpoint.increment_chain import Chain
from emberkeep.checkpoint.restore import (
    Fits,
    Restored,
    Whose,
    check_holders,
    check_schema,
    load,
    load_shard,
    saved_by_same_shards,
)
from emberkeep.checkpoint.save import BackgroundSaver, Extras, Save, Saving
from emberkeep.checkpoint.spec import LOSSLESS, SaveSettings, VersionSpec
from emberkeep.checkpoint.takes_over import TakesOver
from emberkeep.checkpoint.target_view import TargetView, extractor_of, view_of
from emberkeep.checkpoint.targets import (
    DENSE,
    NoticesEdits,
    Subject,
    WritesItself,
)
from emberkeep.checkpoint.version_files import write_bundles, write_pieces
from emberkeep.checkpoint.widths import Widths, check_tables, is_lossy, loses
from emberkeep.errors import CancelledError, FencedError, FullError, SaveError, ShardLostError
from emberkeep.repository import Draft, Manifest, Pin, Repository, VersionId
from emberkeep.repository.grid.catalog import Catalog, grid_of, newest_catalog
from emberkeep.repository.grid.catalog_ahead import CatalogAhead
from emberkeep.repository.grid.extraction_worker import ExtractionWorker
from emberkeep.repository.history import History
from emberkeep.repository.pieces import KIND
from emberkeep.repository.policies import ENDLESS, Grid, needs_baseline, resets
from emberkeep.rows.snapshot import FrozenRows, closed_if_raised
from emberkeep.rows.tracker import PRIORITISED, SINCE_BASELINE, SINCE_VERSION
from emberkeep.runtime.bandwidth import Bandwidth
from emberkeep.runtime.core_time import Budget, CoreTime, CountedPool
from emberkeep.runtime.crew import Crew

_NICEST = 19
# A version may be terabytes; one that takes longer hangs.
_PATIENCE = timedelta(hours=6)


class Checkpointer(TakesOver, BackgroundSaver[Manifest]):
    """Saves the versions of one run. Opening it makes this process the only writer.

    Two saves never overlap. A version is complete or does not exist; after any failure the rows
    of the failed save are part of the next one.
    """

    def __init__(
        self,
        repository: Repository,
        subject: Subject,
        *,
        spec: VersionSpec | None = None,
        settings: SaveSettings | None = None,
        on_event: Callable[[str, Json], object] | None = None,
        history: History | None = None,
        ahead: CatalogAhead | None = None,
        beside: bool = False,
    ) -> None:
        """With `beside` it may return while it takes over (`TakesOver`)."""
        self.repository = repository
        self._ahead = ahead
        self.subject = subject
        self.spec = spec or VersionSpec()
        self.settings = settings or SaveSettings()
        repository.reading = self.settings.reading(repository.store)
        check_schema(repository.tables, subject.schema())
        check_tables(self.spec.widths, repository.tables)
        subject.track(self.spec.priority)
        check_holders(subject, repository.store.url, repository.id)
        super().__init__(
            "emberkeep-save", "save", "to its repository", _PATIENCE, clock=repository.clock,
            nice=self.settings.nice, on_event=on_event,
        )  # fmt: skip
        # What the layouts of all versions say of the run, beside what is in them.
        self.run_marks: Json = {}
        self._codecs: Json = {}
        self._chain = Chain()
        self._whole: Manifest | None = None
        self._committing: Save | None = None
        self._left_newer = False  # and no whole version was committed since the run went back
        self._cancelled_since_version = False
        self._cores = CoreTime()
        self._pool = CountedPool(self.settings.threads, self._cores, nice=self.settings.nice)
        self._bandwidth = Bandwidth(self.settings.most_mb_per_second, clock=self._clock)
        self._budget = Budget(self.settings.background_share, self._cores, clock=self._clock)
        # Of the last save: what the next one will take is judged by it.
        self._write_seconds_per_byte = 0.0
        self._increment_nbytes = 0
        # Behind saving in everything: training may have to wait for a save, never for a round.
        extraction = partial(
            ExtractionWorker, rules=self.spec.grid or Grid(), tell=self._tell,
            collect=self._collect, nice=_NICEST, bandwidth=self._bandwidth,
            holders=partial(extractor_of, subject, repository.store.url, self._bandwidth),
            stopping=self._look,
        )  # fmt: skip
        self._take_over(repository, history, self.settings, extraction, beside=beside)

    # -- saving ----------------------------------------------------------------------------------

    @property
    def whole(self) -> Manifest | None:
        """The newest whole version that was written or brought back here."""
        return self._whole

    @property
    def due_whole(self) -> bool:
        """Whether the next regular version is a whole one, whatever its step."""
        priority, chain = self.spec.priority, self._chain
        return (
            priority is None
            or chain.newest is None
            or self._left_newer
            or len(chain.prioritised) >= priority.rounds - 1
        )

    def save(
        self,
        step: int,
        extras: Extras | None = None,
        *,
        spec: VersionSpec | None = None,
        whole: bool = True,
    ) -> Saving[Manifest]:
        """Freezes the rows as they are now and returns; the version is written beside training.

        Unless it has to be `whole`, it is a prioritised one where the strategy has such and the
        turn of a whole one has not come: its rows are frozen a moment later, each for itself.
        Raises what made earlier background saves fail, once there were `max_failures` of them or
        another process has taken over.
        """
        spec = spec or self.spec
        Checkpointer.make_room(self)
        super().join()  # also where there is no time to make room
        self.check()
        choice = self._chosen(spec)
        if self.subject.forgot_changes():
            self._chain = Chain()
        since = self._since(spec) if whole or self.due_whole else PRIORITISED
        start = self._clock.monotonic()
        # Until the write has them, which ends them.
        with closed_if_raised() as taken:
            frozen = self.subject.freeze(since, self.settings.buffer_nbytes)
            taken.extend(rows for shard in frozen for rows in shard)
            pause = timedelta(seconds=self._clock.monotonic() - start)
            saving = Saving[Manifest](step, pause, self._clock, whole=since != PRIORITISED)
            saving.spared = self._cancelled_since_version
            extras = extras or Extras()
            counters = extras.counters() if callable(extras.counters) else extras.counters
            save = Save(
                saving=saving, frozen=frozen, extras=extras, counters=counters, since=since,
                choice=choice, spec=spec,
            )  # fmt: skip
            write = partial(self._write, save)
        try:
            self._start(saving, write)
        except Exception:  # no interrupt: the rows are those of a write that may be under way
            save.close(())
            raise
        return saving

    def _loses(self) -> bool:
        """Whether the next version, or what it would build on, holds rows that were rounded."""
        codecs = choose(self.spec, self.lossy_restores).codecs
        return self._chain.lossy or loses(codecs, self.repository.tables)

    def _chosen(self, spec: VersionSpec) -> Choice:
        """How the next version is stored; said when that is not as the one before was."""
        choice = choose(spec, self.lossy_restores)
        codecs = {key: codec.to_dict() for key, codec in choice.codecs.items()}
        if codecs != self._codecs:
            self._codecs = codecs
            self._tell("widths", {"why": choice.why, "codecs": codecs})
        return choice

    def _since(self, spec: VersionSpec) -> str | None:
        """Which rows the next version holds: what changed since when; None for all of them."""
        chain, in_grid = self._chain, spec.layout == "grid"
        # Versions of a grid may be moved and merged: nothing but their grid builds on them.
        if chain.baseline is None or chain.grid != in_grid:
            return None
        if in_grid:
            costs = self._extraction.costs(
                chain.baseline, self._write_seconds_per_byte, self._increment_nbytes
            )
            reason = None if costs is None else resets(self._extraction.rules, costs)
            if reason is not None:
                self._tell("baseline_reset", {"reason": reason, "grid": chain.baseline.number})
            return SINCE_VERSION if reason is None else None
        if needs_baseline(spec.layout, chain.sizes, spec.predictor):
            return None
        return SINCE_VERSION if spec.layout == "consecutive" else SINCE_BASELINE

    def use_widths(self, widths: Widths) -> None:
        """Stores tables so from now on; the next version is a baseline, since rows were replaced
        to find that out."""
        self.join()
        check_tables(widths, self.repository.tables)
        self.spec = replace(self.spec, widths=widths)
        self._chain = Chain()

    def make_room(self) -> None:
        """Ends the save under way as `overlap` says: waits for it, or gives it up. A process that
        is being stopped has other things to do, and waits no longer."""
        if self.settings.overlap == "cancel" and self._saving and not self._saving.spared:
            self._saving.cancelled.set()
        if self.join_unless_stopping():
            self._extraction.make_room()

    def _awaited(self) -> AbstractContextManager[None]:
        return self._budget.awaited()

    def _lift_limits(self) -> None:
        self._bandwidth.lift()
        self._budget.lift()

    def cancel(self) -> None:
        """Gives up the save under way, unless it is about to commit; its rows go with the next."""
        if self._saving is not None:
            self._saving.cancelled.set()

    def check(self, least: int | None = None) -> None:
        """Raises what made saves fail: at once if this process was replaced, else after
        `max_failures` of them, or `least`."""
        self._failures += self._unseen()
        failures = self._failures
        if self._extraction.failure is not None:
            raise self._extraction.failure
        if not failures:
            return
        if isinstance(failures[-1], FencedError):
            raise failures[-1]
        if len(failures) >= (least or self.settings.max_failures):
            self._failures = []
            raise SaveError(
                f"{len(failures)} saves in a row have failed, the last with: {failures[-1]}; the "
                "rows are still in memory and part of the next save"
            ) from failures[-1]

    def _is_fault(self, error: BaseException) -> bool:
        return not isinstance(error, ShardLostError)  # the recovery saves again

    def _clean_up(self, saving: Saving[Manifest], error: BaseException) -> None:
        if isinstance(error, CancelledError):
            self._cancelled_since_version = True
            return
        if isinstance(error, FullError):
            self._collect()  # what has come of age since the last version makes room
        if self._is_fault(error):
            warnings.warn(f"saving step {saving.step} failed: {error}", stacklevel=1)

    def _write(self, save: Save) -> None:
        before = self._cores.seconds
        self._budget.start()
        try:
            with self._cores.counting():
                manifest = self._write_version(save)
        except BaseException as error:
            if save.saving.committed.done():  # and not followed: nothing may build on the chain
                self._chain = Chain()
            try:
                save.close(())
            except BaseException as second:  # must not stand for the first, which may be a fence
                warnings.warn(
                    f"after {error!r}, rows could not be let go: {second!r}", stacklevel=1
                )
            raise
        save.close(save.advanced)
        self._failures = []
        self._cancelled_since_version = False
        self._tell_saved(
            save.saving, version=manifest.version.number, kind=manifest.layout["kind"],
            nbytes=manifest.nbytes, held_seconds=save.held_seconds,
            core_seconds=self._cores.seconds - before + save.core_seconds_elsewhere,
        )  # fmt: skip
        if grid_of(manifest) is None:
            self._collect()
        else:
            self._extraction.arrived(manifest)

    def _write_version(self, save: Save) -> Manifest:
        saving, extras, since = save.saving, save.extras, save.since
        self._learn_outcome()
        chain = self._chain
        needs: list[VersionId] = []
        if since is not None and not save.in_grid:
            needs = [v for v in (chain.baseline,) if v is not None]
            if since != SINCE_BASELINE and chain.newest is not None:
                needs = [chain.newest]
            if since == PRIORITISED:
                needs = [*needs, *chain.prioritised][-1:]
        with self.writer.begin(needs=needs) as draft:
            self._write_shards(draft, save)
            saving.copied.set_result(None)
            if extras.dense is not None:
                dense = extras.dense() if callable(extras.dense) else extras.dense
                paced = self._bandwidth.passing([dense], saving.cancelled)
                draft.add(paced, kind=DENSE, suffix="safetensors")
            if saving.cancelled.is_set():
                raise CancelledError(f"the save of step {saving.step} was given up for a newer one")
            for part in view_of(self.subject).parts:
                if isinstance(part.target, NoticesEdits):
                    part.target.check_edits()
            layout = save.layout(chain, draft.version, self.repository.tables) | self.run_marks
            if self.spec.widths is not None:  # also in an exact version: a resumed run takes them
                layout["widths"] = self.spec.widths.to_dict()
            self._committing = save
            manifest = draft.commit(
                step=saving.step,
                baseline=chain.baseline if since else None,
                layout=layout,
                reader=extras.reader,
                user=extras.user,
                counters=save.counters,
            )
            saving.committed.set_result(manifest)
        self._follow(manifest)
        seconds = self._clock.monotonic() - saving.started
        self._write_seconds_per_byte = seconds / max(1, manifest.nbytes)
        self._increment_nbytes = manifest.nbytes
        return manifest

    def learn_outcome(self) -> None:
        """Returns when it is known what became of every save. One that was reported as failed may
        have taken place, and the next builds on it: no shard may go back behind it alone."""
        super().learn_outcome()
        self._learn_outcome()

    def _learn_outcome(self) -> None:
        settled = self.writer.settle()
        if settled is not None:
            # Its rows have stayed changed, so they are part of the next version, too.
            if self._committing is not None:  # no other is committed before it is settled
                self._committing.took_place()
            self._follow(settled)
            self._tell("settled", {"version": settled.version.number, "step": settled.step})

    def _follow(self, manifest: Manifest) -> None:
        """The chain after a version."""
        if not manifest.whole:
            self._chain.prioritised.append(manifest.version)
            return
        self._whole, self._left_newer = manifest, False
        nbytes = sum(file.size for file in manifest.of_kind(KIND))
        grid = grid_of(manifest)
        if grid is not None:
            self._chain = Chain(grid, manifest.version, grid=True, nbytes=max(1, nbytes))
        elif manifest.described.text("kind") == "full":
            self._chain = Chain(manifest.version, manifest.version, sizes=[], nbytes=max(1, nbytes))
        else:
            base = manifest.described.number("baseline_nbytes", least=1)
            endless = manifest.described.text("layout") in ENDLESS
            earlier = [] if endless else manifest.described.list_of("sizes", float)
            sizes = [] if endless else [*earlier, nbytes / base]
            self._chain = Chain(manifest.baseline, manifest.version, sizes=sizes, nbytes=base)
        self._chain.lossy = is_lossy([manifest], self.repository.tables)

    def _write_shards(self, draft: Draft, save: Save) -> None:
        """Each shard's rows as pieces of its own; what servers hold they write themselves, all at
        once, while this process writes what it holds. When one fails, the others are given up; all
        have ended when this returns or raises."""
        settings, cancelled = self.settings, save.saving.cancelled
        on_servers = [
            rows
            for slabs in save.frozen
            for rows in slabs
            if isinstance(rows, WritesItself) and rows.reaches(draft.url)
        ]
        if on_servers:
            # Before anybody writes: a server that was replaced may be where the path is another's.
            check_holders(self.subject, draft.url, self.repository.id)
        # Servers extract a grid at any time: what this process writes has a part of its own then.
        in_grid = "grid" in (self.spec.layout, save.spec.layout)
        is_local = sum(map(len, save.frozen)) > len(on_servers)
        self._bandwidth.divide(max(1, len(on_servers) + (in_grid or is_local)))
        with Crew(max(1, len(on_servers)), "emberkeep-write", clock=self._clock) as threads:
            writing: list[Future[None]] = []
            errors: list[BaseException | None] = []
            try:
                for rows in on_servers:
                    written = threads.submit(
                        rows.write, draft, save.codecs, threads=settings.threads,
                        nice=settings.nice, piece_nbytes=settings.piece_nbytes, cancelled=cancelled,
                        most_mb_per_second=self._bandwidth.share(),
                        background_share=self._budget.share,
                        grid=list(self.repository.tables) if save.in_grid else None,
                    )  # fmt: skip
                    written.add_done_callback(
                        lambda done: cancelled.set() if done.exception() else None
                    )
                    writing.append(written)
                self._write_local(draft, save, on_servers)
            except BaseException as raised:
                cancelled.set()
                errors.append(raised)
            errors += [written.exception() for written in writing]
        if not in_grid:
            self._bandwidth.divide(1)
        # What was given up because of another error says nothing.
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, CancelledError))[:1]:
            raise error

    def _write_local(self, draft: Draft, save: Save, on_servers: Sequence[FrozenRows]) -> None:
        settings, cancelled = self.settings, save.saving.cancelled
        for shard, slabs in enumerate(save.frozen):
            local_rows = [rows for rows in slabs if rows not in on_servers]
            if save.in_grid:
                write_bundles(
                    draft, local_rows, save.codecs, self._pool, birth=draft.version.number,
                    tables=list(self.repository.tables),
                    file_nbytes=settings.piece_nbytes, nice=settings.nice, shard=shard,
                    cancelled=cancelled, bandwidth=self._bandwidth, budget=self._budget,
                )  # fmt: skip
                continue
            write_pieces(
                draft, local_rows, save.codecs, self._pool, piece_nbytes=settings.piece_nbytes,
                nice=settings.nice, shard=shard, cancelled=cancelled, bandwidth=self._bandwidth,
                budget=self._budget,
            )  # fmt: skip

    def _collect(self) -> None:
        try:
            self._collector.collect()
        except FencedError as error:
            self._failures.append(error)
        except Exception as error:
            # Old versions stay a little longer; the one just committed is not in doubt.
            warnings.warn(f"old versions could not be removed: {error}", stacklevel=1)

    def close(self, step: int | None = None, extras: Extras | None = None) -> Manifest | None:
        """Waits for what is under way; with a step, writes a last version in which nothing is
        lost, whatever the strategy."""
        self.join()
        if step is None:
            self._end()
            self.check()
            return None
        # Also where an increment would build on rounded rows.
        spec = LOSSLESS if self._loses() else self.spec
        self._failures = [error for error in self._failures if isinstance(error, FencedError)]
        self.save(step, extras, spec=spec)
        manifest = self.wait()
        self._end()
        return manifest

    def _end(self) -> None:
        """Waits for everything under way and ends the threads; a later save starts them again."""
        self.join()
        self._worker.close()
        self._end_extraction()

    def settle(self) -> None:
        """Waits until the rows of every version stand where they are to stay: without a grid, they
        do as soon as it is committed."""
        self.join()
        self._extraction.join()

    # -- restoring -------------------------------------------------------------------------------

    def restore(
        self,
        version: int | None = None,
        *,
        fall_back: bool = False,
        fits: Fits | None = None,
    ) -> Restored | None:
        """Brings a version back, the newest whole one unless another is named; None from an empty
        repository.

        What is damaged is `DamageError`, unless `fall_back` allows the newest undamaged version
        before it; `lost` then names those that were passed over. `fits` may refuse a version
        before any row has changed. When anything else raises, the rows are in no defined state:
        restore another version, or stop.
        """
        self.join()
        self._saving = None

        def restore(known: Known, fits: Fits | None) -> Restored | None:
            def bring_back(held: HeldVersion, before: Sequence[VersionId]) -> Restored | None:
                return self._restore(held, before, fits, asked=held.version.number == version)

            return newest_intact(
                self.repository, known, version, fall_back=fall_back, bring_back=bring_back
            )

        return self._restored(restore, fits)

    def forget_chain(self) -> None:
        """Rows have changed in ways that nobody followed: the next version is a baseline."""
        self.join()
        self._chain = Chain()

    def _restore(
        self, held: HeldVersion, before: Sequence[VersionId], fits: Fits | None, *, asked: bool
    ) -> Restored | None:
        """None if the version is a prioritised one, or stands aside and was not asked for."""
        start = self._clock.monotonic()
        target = held.version

        def admit(found: Restored) -> None:
            if fits is not None:
                fits(found)
            held.confirm()
            held.count_restore(exact=not self._is_lossy(target))
            if grid is not None:  # beside rows
                newest_of_grid = partial(newest_catalog, self.repository, grid)
                looks.append(Call(self.repository.store, newest_of_grid))

        looks: list[Call[Catalog]] = []
        with held:
            manifest = held.manifest
            if not manifest.whole or (manifest.aside and not asked):
                return None
            grid = grid_of(manifest)
            catalog = None
            if grid is not None and self._ahead is not None:
                catalog = self._ahead.of(self.repository, grid)
            held.read_ahead(before, catalog)
            restored = load(self.repository, target, self.subject, self._pool, admit, catalog)
            chain = self.repository.chain(target)
            self._restores[not self._is_lossy(target)] += 1
            newest = self.writer.resume(target)
            shards = manifest.described.number("shards", least=1)
            # Format 1 has rows of several shards in one piece: nobody could move those of one.
            catalog = looks[0].result() if looks else None
            mixed = shards > 1 and catalog is not None and catalog.is_mixed
            # A later version has left its deaths there, standing or not: another of its number
            # would be taken for it.
            passed = catalog is not None and catalog.covered > target.number
        self._chain = Chain()
        # Increments count from a baseline of the same shards: another number starts over.
        if saved_by_same_shards(manifest, self.subject):
            for earlier in chain:
                self._follow(earlier)
        self._whole = manifest
        self._left_newer = not newest and has_newer(self.repository, target, self.spec.priority)
        if restored.planned is not None:  # servers' plans are theirs
            nbytes = restored.planned.nbytes
            self._extraction.restored(self._clock.monotonic() - start, nbytes)
        if grid is not None and (not newest or mixed or passed):
            self._chain = Chain()
        return restored

    def restore_shard(self, target: TargetView, shard: int, whose: Whose) -> Manifest | None:
        """Brings the newest saved rows of one shard back into its replacement.

        Of the versions that this process wrote or restored: its trackers follow from them. None
        where there is none, and the shard begins where it began.
        """
        if self._whole is None:
            return None
        newest = (self._chain.prioritised or [self._whole.version])[-1]
        with Pin(self.repository, newest):
            return load_shard(self.repository, newest, target, shard, whose, self._pool)

    def count_restore(self, version: VersionId) -> None:
        """One failure, however many shards came back: rows of an exact version are what they were,
        so that one does not count against the restores that a width was chosen for."""
        lossy = self._is_lossy(version)
        self.repository.record_restore(version, exact=not lossy)
        self._restores[not lossy] += 1

    def _is_lossy(self, version: VersionId) -> bool:
        return is_lossy(self.repository.chain(version), self.repository.tables)

    @property
    def restores(self) -> int:
        """How often this run was restored, whole or in part, by this process and others."""
        return sum(self._restores.values())

    @property
    def lossy_restores(self) -> int:
        """Those of versions that were not exact."""
        return self._restores[False]
