"""The keeper: three lines in a training loop, and the run survives its processes."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

from torch import nn

from emberkeep._types import Json
from emberkeep.blobs import BlobStore, open_store
from emberkeep.checkpoint.save import Saving
from emberkeep.checkpoint.spec import SaveSettings
from emberkeep.cluster.base import PATIENCE
from emberkeep.config import as_time
from emberkeep.errors import ConfigError, EmberkeepError, ShardLostError, StateError
from emberkeep.keeper.adopted_rows import clear_found
from emberkeep.keeper.costs import Ledger, metrics_server
from emberkeep.keeper.dense import Stateful
from emberkeep.keeper.interval import Limit
from emberkeep.keeper.model_parts import Optimizers, find_parts
from emberkeep.keeper.open_saver import open_saver, refuse_for_tier, run_name
from emberkeep.keeper.pace import Pace
from emberkeep.keeper.ranks import Ranks
from emberkeep.keeper.recoverer import Recovered, Recoverer, make_recoverer
from emberkeep.keeper.repository_saver import RepositorySaver, bring_back_together, continued
from emberkeep.keeper.run_planner import RunPlanner
from emberkeep.keeper.run_report import RunReport
from emberkeep.keeper.run_saver import Kept, RunSaver, save_first, save_until, version_number
from emberkeep.keeper.run_state import Captured, RunState, check_reader, warn_of_data
from emberkeep.keeper.signals import SignalledWaits, Termination, announce, announce_waiting, end
from emberkeep.keeper.warm_start import Resumed, WarmStart, check_partial, warm_start
from emberkeep.repository import Manifest
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.strategies import Interval, Strategy, incremental


class Keeper(RunReport):
    """Saves a model beside its training and brings it back, to the bit.

        keeper = ek.Keeper("runs/42", model, optimizer, reader=loader)
        keeper.resume()
        for batch in loader:
            ...
            optimizer.step()
            keeper.step()
        keeper.close()

    A version holds all of one instant: the rows of every table with their optimizer state, all
    other parameters and buffers, optimizers, `state` (schedulers, a GradScaler, anything with
    `state_dict` and `load_state_dict`), the random generators of torch, numpy and Python, and the
    place of the reader. With float32 rows a run that was killed anywhere and resumed goes on with
    the bits of the uninterrupted one. Making a keeper makes this process the only writer of the
    repository: an older one is stopped by `FencedError`.

    Where tiers hold every table, None in place of the repository keeps the run in the tier itself:
    rows stay in its files, and the newest durable step, a `DurableStep`, stands for a version.

    Call `step` after the optimizer and before the next batch is taken. Under DDP every rank makes
    the same calls; rank 0 writes, every rank resumes.

    - `about` is plain data that every manifest carries, for those who look at the repository.
    - `strategy` says what versions hold, when they are taken and how many are kept; `settings`
      how they are written (its retention is the strategy's).
    - On SIGTERM the step ends, a version is saved within `grace`, and the process exits with 75;
      on Ctrl-C the same, and `KeyboardInterrupt` is raised. A second signal acts at once.
    - `on_event(name, details)` hears of "resumed", "saved", "save_failed", "save_cancelled",
      "recovered", "planned" and "stopped", and of shards that are "silent", "returned" or "lost";
      those of saves come from the thread that writes.
    - `strict` refuses tables that cannot be followed row by row, instead of saving them whole.
    - `must_exist` refuses a repository that is not there or has no version, instead of starting
      over: a mount that is missing looks like a first start.
    - `batches_per_step` is how many batches the loop takes for each `step`.
    - `metrics_port` serves Prometheus, health and readiness on the loopback interface (0: any free
      port); of several ranks the first does.
    - `total_steps` is how long the job is, which a strategy that recovers partially must know.
    - `mirror` is a second place, a path or URL: whole versions are copied there beside training,
      at most one for each `mirror_every`, and a run is resumed from the newest of either place.
    - `clock` is where time comes from; tests hand in another.

    Shards that are lost come back as the strategy says: partially while a pull or push waits, and
    the loop does not notice; fully with `recover`, or in a loop over `batches` whose body is
    `surviving`.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | BlobStore | None,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        reader: Any = None,
        strategy: Strategy | None = None,
        state: Mapping[str, Stateful] | None = None,
        about: Json | None = None,
        settings: SaveSettings | None = None,
        on_event: Callable[[str, Json], object] | None = None,
        grace: timedelta | str = timedelta(seconds=25),
        strict: bool = False,
        exclusive: bool = False,
        must_exist: bool = False,
        batches_per_step: int = 1,
        metrics_port: int | None = None,
        total_steps: int | None = None,
        mirror: str | os.PathLike[str] | BlobStore | None = None,
        mirror_every: Interval | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        check_reader(reader)
        grace = as_time("grace", grace)
        self._clock = clock
        self.steps = self._exact_step = 0
        self.cut_step = -1  # after which the newest version was cut, durable or not
        self.reader = reader
        self._strategy = strategy or incremental()
        self._settings = settings or SaveSettings()
        self._grace = grace
        self._on_event = on_event
        self._ledger = Ledger(clock)
        self._ranks = Ranks()
        self._pace = Pace(
            self._strategy.schedule, self._ranks, reader, batches_per_step=batches_per_step,
            clock=clock, least=self._strategy.least, risk=self._risk,
        )  # fmt: skip
        self._parts = find_parts(
            model, optimizer, state or {}, strict=strict or where is None, ranks=self._ranks.world
        )
        homes = self._parts.subject.homes()
        self._ranks.meet(max((home.cluster.patience for home in homes), default=PATIENCE))
        self._state = RunState(self._parts.dense, reader, self._ranks)
        self._store = (
            open_store(where, clock=clock) if isinstance(where, str | os.PathLike) else where
        )
        if self._store is None:
            refuse_for_tier(about, settings, exclusive, mirror, mirror_every)
        # Events of a mirror or a limit come before these two are made, and are not for them.
        self._recoverer: Recoverer | None = None
        self._planner: RunPlanner | None = None
        self._saver = open_saver(
            self._store, self._parts, self._strategy, self._settings, ranks=self._ranks,
            about=about or {}, exclusive=exclusive, must_exist=must_exist, mirror=mirror,
            mirror_every=mirror_every, on_event=self._hear, clock=clock,
        )  # fmt: skip
        self._limit = Limit(
            self._parts.subject, self._parts.dense, self._strategy, self._settings,
            self._hear if self._ranks.leads else None, self._saver,
        )  # fmt: skip
        self._recoverer = make_recoverer(
            self._strategy, homes, self._saver, total_steps=total_steps,
            steps=lambda: self.steps, go_back=self._go_back if self._ranks.world == 1 else None,
            tell=self._tell, clock=clock, reader=reader,
        )  # fmt: skip
        if self._strategy.auto is not None and self._saver is not None:
            self._planner = RunPlanner(
                self._strategy, self._saver, self._pace, self._recoverer, self._ledger,
                total_steps=total_steps, tell=self._tell, clock=clock,
            )  # fmt: skip
        self._went_back = self._warned_of_data = self._started = self._closed = False
        self._server = None
        if metrics_port is not None and self._ranks.leads:
            self._server = metrics_server(self.metrics, metrics_port, self._not_ready)
        self._unfollow = (
            self._parts.follow(self._ledger.timed) if self._ranks.leads else lambda: None
        )
        self._termination = Termination()
        self._waits = SignalledWaits(self._termination, self._leave_waiting, grace, clock)
        if self._saver is not None:
            termination = self._termination
            self._saver.heed(lambda: termination.asked, grace)
        self._homes = homes
        for home in homes:
            home.cluster.stop.heed(self._waits.look)
            home.cluster.tell(name=run_name(self._saver))

    # -- the loop --------------------------------------------------------------------------------

    def step(self) -> None:
        """Ends a step: saves if a version is due, stops if that was asked for.

        Raises what went wrong in the background: `FencedError` at once, other failures after
        `max_failures` in a row.
        """
        with self._ledger.stalling():
            self._begin()
            self.steps += 1
            self._ledger.step = self.steps
            for home in self._homes:
                home.cluster.tell(step=self.steps)
            due = self._pace.due(self.steps)
            if self._saver is not None:
                self._saver.check()
                due = due and not self._saver.busy
            news = self._planner is not None and self._planner.news
            asked, due_for_all, news_for_all = self._ranks.largest(
                [self._termination.asked, due and self._ranks.leads, news]
            )
            if asked:
                self._stop(asked)
            if due_for_all:
                self._save(in_step=True)
            if due_for_all or news_for_all or self._pace.looks(self.steps):
                if self._planner is not None:
                    self._planner.review(self.steps)
                self._pace.look_ahead(self.steps)

    def stop_after_step(self, number: int = signal.SIGTERM) -> None:
        """Asks the run to stop at the end of a step, as the signal of that number does. From any
        thread: signals themselves reach the main thread alone."""
        self._termination.asked = number

    def save(self) -> Saving[Any] | None:
        """Cuts a version now. Returns when training may go on; the rest happens beside it.

        Rank 0 gets the save under way: its `copied` and `committed` are futures.
        """
        with self._ledger.stalling():
            self._begin()
            return self._save()

    def wait(self) -> Kept | None:
        """Waits until the save under way is durable; raises if it failed."""
        with self._ledger.stalling():
            return None if self._saver is None else self._saver.wait()

    def close(self, *, save: bool = True) -> Kept | None:
        """Ends keeping. Unless the newest version holds the present state exactly, writes one that
        does, in float32, whatever the strategy; returns it when it is durable.

        If shards are lost that only a full recovery brings back, it raises `ShardLostError` and
        stays open: `recover`, train on, and close again. A signal that came after the last step
        ends the process once everything is saved.
        """
        if self._closed:
            return None
        if self._saver is not None:
            self._saver.check_caller()  # it stays open
        asked = 0
        try:
            with self._ledger.stalling():
                kept = self._last_version(save)
                if save:
                    (asked,) = self._ranks.largest([self._termination.asked])
        except ShardLostError:
            raise  # it stays open: recover, train on, close
        except BaseException:
            self._release()
            raise
        self._release()
        if asked:
            self._leave(asked, self.steps)
        return kept

    def _last_version(self, save: bool) -> Kept | None:
        if not save:
            if isinstance(self._saver, RepositorySaver):
                self._saver.patience = self._grace  # a run that failed is started again
            return None if self._saver is None else self._saver.close()
        kept = None
        # With a plan also where nothing was trained since: a version must say that the run ended.
        due = self._ranks.leads and (self._exact() != self.steps or self._planner is not None)
        if 1 in self._ranks.largest([due]):
            state = self._capture()
            if self._saver is not None:
                kept = self._finish(self._saver, state)
            self._ranks.barrier()
        elif self._saver is not None:
            self._saver.close()
        # A shard that was lost after its last rows were copied comes back as it was.
        self.recover()
        return kept

    def _finish(self, saver: RunSaver, state: Captured | None) -> Kept | None:
        if self._planner is not None:
            self._planner.end()
        while True:
            try:
                return saver.finish(self.steps, state, self._counters)
            except ShardLostError as lost:
                if self._recoverer is None or not self._recoverer.on_loss(lost):
                    if self._planner is not None:
                        self._planner.go_on()
                    raise

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is None:
            self.close()
            return
        at_once = isinstance(error, KeyboardInterrupt) and not self._waits.left
        if at_once and self._saver is not None:
            self._saver.give_up()
            self._release()
            return
        # The step that failed may have changed rows and not the rest: it is not saved.
        try:
            if self._waits.left and self._saver is not None and not self._saver.join(self._grace):
                self._saver.cancel()
            self.close(save=False)
        except EmberkeepError as second:
            if repr(second) != repr(error):
                warnings.warn(f"while {error!r} ended the run: {second}", stacklevel=2)

    # -- lost shards -----------------------------------------------------------------------------

    def recover(self, lost: ShardLostError | None = None) -> Recovered | None:
        """Brings lost shards back as the strategy says; None if all of them serve.

        After a full recovery everything is as it was in the newest whole version, none that was
        left, the reader too: take the next batch. Raises `lost` if this keeper has no shards.
        """
        if self._recoverer is None:
            if lost is not None:
                raise lost
            return None
        with self._ledger.restoring():
            return self._recoverer.recover(lost)

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """A body that is given up when shards are lost in it and only a full recovery helps.

        That recovery is made, and the loop goes on with the batch that comes after its version.
        """
        try:
            yield
        except ShardLostError as lost:
            self.recover(lost)

    def batches(self) -> Iterator[Any]:
        """The batches of the reader. After a full recovery they go on where its version ends.

        It ends when the reader does and every shard serves.
        """
        if self.reader is None:
            raise ConfigError("the keeper has no reader whose batches it could hand out")
        while True:
            self._went_back = False
            for batch in self.reader:
                yield batch
                if self._went_back:
                    break
            else:
                self.recover()
                if not self._went_back:
                    return

    def _go_back(self) -> Kept | None:
        kept = self._resume(continued(self._saver), False, tell=False)
        self._went_back = True
        self._pace.restart(self.steps)
        self._pace.look_ahead(self.steps)
        return kept

    def _first_version(self) -> None:
        """A version of the very beginning, where shards are recovered from one: whatever fails
        before the next, there is one."""
        if self._strategy.recovery is None or self._store is None:
            return
        start = self._clock.monotonic()
        state = self._capture()  # of every rank, whichever writes
        if self._saver is not None:
            clusters = [home.cluster for home in self._parts.subject.homes()]
            save_first(
                self._saver, clusters, lambda: self._cut(state, start, whole=True), self._clock
            )

    # -- resuming --------------------------------------------------------------------------------

    def resume(
        self,
        version: int | str | None = None,
        *,
        fall_back: bool = False,
        partial: bool = False,
        map: Mapping[str, str] | None = None,
        source: str | os.PathLike[str] | BlobStore | None = None,
    ) -> Resumed | None:
        """Brings back the newest version, or the one of a number or tag; None if there is none yet.

        A version that does not fit the model is refused, every difference named, before anything
        has changed. A damaged one is `DamageError`, unless `fall_back` allows the newest intact
        one before it, which is warned of. A tier has one durable step, and nothing before it.

        With `partial` what fits is loaded, and the `WarmStart` that is returned names everything
        else in `skipped`. `map` gives names of the version those of the model: tables, modules,
        tensors. `source` is another repository to start from: tables of one repository never
        change, so that a run with others needs its own. It is used while this run has no version
        yet, and ignored from then on, so that a job may start with the same call every time.
        """
        with self._ledger.restoring():
            check_partial(partial, map, source, self._store)
            (goes_on,) = self._ranks.largest([self._holds_run()])
            if (partial or source is not None) and goes_on == (source is None):
                kept: Resumed | None = self._start_from(version, partial, map or {}, source)
            else:
                kept = self._resume(version if source is None else None, fall_back)
        with self._ledger.stalling():
            self._started = True
            if kept is not None and self.reader is None and not self._warned_of_data:
                self._warned_of_data = True
                warn_of_data(kept.step)
            if kept is None or isinstance(kept, WarmStart):
                self._first_version()
            self._pace.restart(self.steps)
            self._pace.look_ahead(self.steps)
            return kept

    def _start_from(
        self, version: int | str | None, partial: bool, renamed: Mapping[str, str], source: Any
    ) -> WarmStart:
        with self._ranks.agreeing("another rank could not start from the version"):
            if isinstance(self._saver, RepositorySaver):
                self._saver.finish_takeover()  # before rows change
            started = warm_start(
                self._store if source is None else source, version, self._parts.subject,
                self._state, renamed=renamed, partial=partial, settings=self._settings,
                clock=self._clock,
            )  # fmt: skip
        if source is None and isinstance(self._saver, RepositorySaver):
            self._saver.went_back_to(started.version)
        if source is None and self._recoverer is not None:
            self._recoverer.load(started.manifest.counters)
        if source is not None and self._planner is not None:
            self._planner.starts_at(started.step)
        self.steps = self._ledger.step = started.step
        self._exact_step = -1  # no version of this run holds it
        self._ledger.resumed += 1
        self._tell("resumed", started.to_dict())
        return started

    def tag(self, name: str, version: int | str | None = None) -> Manifest | None:
        """Names a version, the newest, a save under way included, unless another is given: it is
        kept, and `resume(name)` brings it back. The name moves. None on ranks that do not write."""
        with self._ledger.stalling():
            return None if self._saver is None else self._saver.tag(name, version)

    def start_over(self) -> Kept | None:
        """Makes the present state the newest version; rows that files or servers had kept go."""
        if self._store is None and self._holds_run():
            raise ConfigError(
                f"the rows are those of the durable step already: remove {self._url()} before the "
                "model is made to start over"
            )
        self._started = True
        clear_found(self._parts.subject)
        (beside,) = self._ranks.largest([self._holds_run()])
        if not beside:
            self.resume()  # there is none, so it begins
            return None
        self.save()
        self._pace.look_ahead(self.steps)
        return self.wait()

    def _resume(
        self, version: int | str | None, fall_back: bool, *, tell: bool = True
    ) -> Kept | None:
        began = self._clock.monotonic()
        returned, number = bring_back_together(
            self._ranks, self._saver, self._store, version, fall_back, self._parts.subject,
            self._settings, self._state, self._clock,
        )  # fmt: skip
        if returned is None:
            return None
        kept, passed_over = returned.kept, list(returned.passed_over)
        self.steps = self._exact_step = self._ledger.step = kept.step
        self._ledger.resumed += 1
        self._ledger.version = number
        twice = {} if self._recoverer is None else self._recoverer.load(returned.counters)
        if self._planner is not None:
            seconds = self._clock.monotonic() - began
            self._planner.resumed(returned.counters, seconds, another=tell and not self._started)
        if passed_over:
            warnings.warn(f"versions {passed_over} are damaged and were passed over", stacklevel=3)
        if tell:
            details = {"version": version_number(kept), "step": kept.step, "lost": passed_over}
            self._tell("resumed", details | twice)
        return kept

    # -- saving ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._closed:
            raise StateError("the keeper is closed: make another")
        if self._started:
            return
        if self._holds_run():
            raise StateError(
                f"{self._url()} holds versions of this run: call resume() before the first "
                "step, or start_over() to leave them behind, or use another repository"
            )
        self._started = True
        if self.steps == 0:
            self._first_version()
        self._pace.look_ahead(self.steps)

    def _save(self, *, in_step: bool = False) -> Saving[Any] | None:
        """Cuts a whole version; one `in_step` is whichever the strategy's turn is, unless the run
        was asked to stop while it waited for the one before."""
        whole = not in_step
        waiting = self._clock.monotonic()
        self._limit.due(waiting)
        if self._saver is not None:
            self._saver.make_room()
            self._saver.check()
            whole = whole or self._saver.due_whole or self._pace.due_whole(self.steps)
        given = [whole and self._ranks.leads, self._termination.asked if in_step else 0]
        whole_for_all, asked = self._ranks.largest(given)
        if asked:
            self._stop(asked)
        whole = bool(whole_for_all)
        start = self._clock.monotonic()
        return self._cut(self._capture() if whole else None, start, start - waiting, whole=whole)

    def _cut(
        self, state: Captured | None, start: float, waited: float = 0.0, *, whole: bool
    ) -> Saving[Any] | None:
        """Rows as they are now, beside what was gathered since `start`; on the rank that writes."""
        self._pace.saved(self.steps, whole=whole)
        self.cut_step = self.steps
        if self._saver is None:
            return None
        self._ledger.cutting()
        cut = self._saver.cut(self.steps, state, self._counters, whole=whole)
        self._limit.cut(self._clock.monotonic())
        pause_ms = (self._clock.monotonic() - start) * 1e3
        self._ledger.paused(pause_ms, whole=whole, waited_ms=waited * 1e3)
        return cut

    def _capture(self) -> Captured | None:
        """Everything but rows, as it is now on every rank."""
        if self._ranks.leads:
            self._parts.tables.look_again()
        return self._state.capture()

    def _exact(self) -> int:
        """The step whose state the newest version holds exactly; waits for the one under way."""
        saver = self._saver
        if saver is not None:
            if not saver.join_unless_stopping() and not saver.join(self._grace / 2):
                saver.cancel()  # what it was to hold is in the last one
            saver.join()
            if (newest := saver.committed_step) is not None and saver.exact:
                self._exact_step = newest
        return self._exact_step

    def _stop(self, asked: int) -> NoReturn:
        """Saves within the grace period and ends the process; every rank, together."""
        deadline = self._clock.monotonic() + self._grace.total_seconds()
        self._waits.deadline = deadline
        if self._planner is not None:
            self._planner.end()
        state = self._capture()
        saved: int | None = None
        if self._saver is not None:
            self._saver.hurry()
            saved = save_until(
                deadline, self._saver, self.steps, state, self._counters, self._clock
            )
            self._saver.leave(timedelta(seconds=max(0.0, deadline - self._clock.monotonic())))
        self._ranks.barrier()
        self._release()
        self._leave(asked, saved)

    def _leave(self, asked: int, saved: int | None) -> NoReturn:
        if self._saver is not None:
            announce(asked, self.steps, saved)
        self._tell("stopped", {"step": self.steps, "saved_step": saved})
        end(asked)

    def _leave_waiting(self, asked: int, what: str) -> None:
        if self._saver is not None:
            announce_waiting(asked, what, self.steps, self._saver.whole)
        self._tell("stopped", {"step": self.steps, "saved_step": self.durable})

    # -- details ---------------------------------------------------------------------------------

    def _hear(self, event: str, details: Json) -> None:
        self._ledger.hear(event, details)
        if event == "save_failed" and details["due"]:
            self._pace.save_again()
        self._tell(event, details)

    def _release(self) -> None:
        self._closed = True
        self._termination.close()
        for home in self._parts.subject.homes():
            home.cluster.stop.heed(None)
        if self._recoverer is not None:
            self._recoverer.release()
        self._unfollow()
        self._pace.release()
        if self._server is not None:
            self._server.close()
