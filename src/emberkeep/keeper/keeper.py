"""The keeper: three lines in a training loop, and the run survives its processes."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import xxhash
from torch import nn

from emberkeep._types import Json
from emberkeep.blobs import BlobStore, open_store
from emberkeep.checkpoint.recovery import Recovery
from emberkeep.checkpoint.restore import Restored, load
from emberkeep.checkpoint.saver import Checkpointer, Extras, Saving
from emberkeep.checkpoint.spec import SaveSettings
from emberkeep.errors import (
    ConfigError,
    EmberkeepError,
    NoRepositoryError,
    NoVersionError,
    ShardLostError,
    StateError,
)
from emberkeep.keeper.costs import Costs, Ledger
from emberkeep.keeper.dense import Stateful, check_stateful, generators, set_generators
from emberkeep.keeper.model_parts import Optimizers, take_apart
from emberkeep.keeper.plain_state import Packed, pack, unpack
from emberkeep.keeper.ranks import Ranks
from emberkeep.keeper.recoverer import Recovered, Recoverer, Recoveries
from emberkeep.keeper.signals import Termination, end
from emberkeep.keeper.torch_tables import Hook
from emberkeep.repository import Manifest, Repository, VersionId, names
from emberkeep.runtime.metrics import MetricsServer, exposition
from emberkeep.runtime.pool import Pool
from emberkeep.strategies import Strategy, incremental


class Keeper:
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

    Call `step` after the optimizer and before the next batch is taken. Under DDP every rank makes
    the same calls; rank 0 writes, every rank resumes.

    - `about` is plain data that every manifest carries, for whoever looks at the repository.
    - `strategy` says what versions hold, when they are taken and how many are kept; `settings`
      how they are written (its retention is the strategy's).
    - On SIGTERM the step ends, a version is saved within `grace`, and the process exits with 75;
      on Ctrl-C the same, and `KeyboardInterrupt` is raised. A second signal acts at once.
    - `on_event(name, details)` hears of "resumed", "saved", "save_failed", "save_cancelled",
      "recovered" and "stopped"; those of saves come from the thread that writes.
    - `strict` refuses tables that cannot be followed row by row, instead of saving them whole.
    - `must_exist` refuses a repository that is not there or has no version, instead of starting
      over: a mount that is missing looks like a first start.
    - `batches_per_step` is how many batches the loop takes for each `step`.
    - `metrics_port` serves Prometheus on the loopback interface (0: any free port).
    - `total_steps` is how long the job is, which a strategy that recovers partially must know.

    Shards that are lost come back as the strategy says: partially while a pull or push waits, and
    the loop does not notice; fully with `recover`, or in a loop over `batches` whose body is
    `surviving`.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | BlobStore,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        reader: Any = None,
        strategy: Strategy | None = None,
        state: Mapping[str, Stateful] | None = None,
        about: Json | None = None,
        settings: SaveSettings | None = None,
        on_event: Callable[[str, Json], object] | None = None,
        grace: timedelta = timedelta(seconds=25),
        strict: bool = False,
        exclusive: bool = False,
        must_exist: bool = False,
        batches_per_step: int = 1,
        metrics_port: int | None = None,
        total_steps: int | None = None,
    ) -> None:
        if batches_per_step < 1:
            raise ConfigError(f"batches_per_step must be 1 or more, not {batches_per_step}")
        if reader is not None:
            check_stateful(
                "reader=", reader,
                "a version holds the reader's place; use emberkeep.data.Reader or torchdata's "
                "StatefulDataLoader, or leave reader= out, and the data starts over after a resume",
            )  # fmt: skip
        self.steps = 0
        self.reader = reader
        self._store = open_store(where) if isinstance(where, str | os.PathLike) else where
        self._strategy = strategy or incremental()
        self._settings = replace(settings or SaveSettings(), retention=self._strategy.retention)
        self._about = about or {}
        self._grace = grace
        self._batches_per_step = batches_per_step
        self._on_event = on_event
        self._ledger = Ledger()
        self._ranks = Ranks()
        self._parts = take_apart(
            model, optimizer, state or {}, strict=strict, ranks=self._ranks.world
        )
        self._checkpointer = self._open(exclusive, must_exist) if self._ranks.leads else None
        self._recoverer = self._make_recoverer(total_steps)
        self._went_back = False
        self._told_of_data = False
        self._begun = False
        self._closed = False
        self._exact_step = 0
        self._fitting: Json = {}
        self._start_clock()
        self._handles: list[Any] = []
        if self._ranks.leads:
            self._parts.tables.follow(self._parts.optimizers, self._timed)
            for module in self._parts.modules:
                handle = module.register_load_state_dict_pre_hook(self._rows_replaced)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        self._termination = Termination()
        self._server = None
        if metrics_port is not None:
            self._server = MetricsServer(self.metrics, metrics_port)

    def _open(self, exclusive: bool, must_exist: bool) -> Checkpointer:
        schema = self._parts.subject.schema()
        if Repository.exists(self._store):
            repository = Repository.open(self._store)
        elif must_exist:
            raise NoRepositoryError(
                f"{self._store.url} holds no repository, and this run must exist: nothing was "
                "created. Check the path, and that its disk is mounted; leave must_exist out to "
                "start a new run"
            )
        else:
            repository = Repository.create(self._store, schema=schema, exclusive=exclusive)
        if must_exist and repository.latest() is None:
            raise NoVersionError(
                f"{self._store.url} has no version, and this run must exist: nothing was started "
                "over. Bring its versions back; leave must_exist out to start a new run"
            )
        return Checkpointer(
            repository,
            self._parts.subject,
            spec=self._strategy.spec,
            settings=self._settings,
            on_event=self._hear,
        )

    def _make_recoverer(self, total_steps: int | None) -> Recoverer | None:
        recovery, homes = self._strategy.recovery or Recovery(), self._parts.subject.homes()
        if recovery.scope == "partial":
            if total_steps is None or total_steps < 1:
                raise ConfigError(
                    "partial recovery counts what is lost as a share of the job: give the keeper "
                    "total_steps="
                )
            if not homes:
                raise ConfigError(
                    "partial recovery is for tables on shards, and the model has none: use "
                    "emberkeep's modules with cluster=, or ek.incremental()"
                )
        if self._strategy.parity is not None:
            if not homes:
                raise ConfigError(
                    "parity is for tables on shards, and the model has none: use emberkeep's "
                    "modules with cluster=, or ek.incremental()"
                )
            for home in homes:
                home.cluster.protect(self._strategy.parity)
        if self._checkpointer is None or not homes:
            return None
        return Recoverer(
            homes,
            self._checkpointer,
            recovery,
            total_steps=total_steps,
            steps=lambda: self.steps,
            go_back=self._go_back if self._ranks.world == 1 else None,
            tell=self._tell,
        )

    # -- the loop --------------------------------------------------------------------------------

    def step(self) -> None:
        """Ends a step: saves if a version is due, stops if that was asked for.

        Raises what went wrong in the background: `FencedError` at once, other failures after
        `max_failures` in a row.
        """
        with self._stalling():
            self._begin()
            self.steps += 1
            self._ledger.step = self.steps
            if self._checkpointer is not None:
                self._checkpointer.check()
            look = self.steps >= self._next_look
            due = look and self._strategy.schedule.due(self.steps, self._since_saved())
            asked, due_for_all = self._ranks.largest(
                [self._termination.asked, due and self._ranks.leads]
            )
            if asked:
                self._stop(asked)
            if due_for_all:
                self._save(whole=False)
            if look:
                self._look_ahead()

    def save(self) -> Saving | None:
        """Cuts a version now. Returns when training may go on; the rest happens beside it.

        Rank 0 gets the save under way: its `copied` and `committed` are futures.
        """
        with self._stalling():
            self._begin()
            return self._save()

    def wait(self) -> Manifest | None:
        """Waits until the save under way is durable; raises if it failed."""
        with self._stalling():
            return None if self._checkpointer is None else self._checkpointer.wait()

    def close(self, *, save: bool = True) -> Manifest | None:
        """Ends keeping. Unless the newest version holds the present state exactly, writes one that
        does, in float32, whatever the strategy; returns it when it is durable.

        If shards are lost that only a full recovery brings back, it raises `ShardLostError` and
        stays open: `recover`, train on, and close again. A signal that came after the last step
        ends the process once everything is saved.
        """
        if self._closed:
            return None
        asked = 0
        try:
            with self._stalling():
                manifest = self._last_version(save)
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
        return manifest

    def _last_version(self, save: bool) -> Manifest | None:
        if not save:
            return None if self._checkpointer is None else self._checkpointer.close()
        manifest = None
        if 1 in self._ranks.largest([self._ranks.leads and self._exact() != self.steps]):
            extras = self._extras()
            if self._checkpointer is not None:
                manifest = self._close_with(self._checkpointer, extras)
            self._ranks.barrier()
        elif self._checkpointer is not None:
            self._checkpointer.close()
        # A shard that was lost after its last rows were copied comes back as it was.
        self.recover()
        return manifest

    def _close_with(self, checkpointer: Checkpointer, extras: Extras) -> Manifest | None:
        while True:
            try:
                return checkpointer.close(self.steps, extras)
            except ShardLostError as lost:
                if self._recoverer is None or not self._recoverer.on_loss(lost):
                    raise

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is None:
            self.close()
            return
        if isinstance(error, KeyboardInterrupt) and self._checkpointer is not None:
            # At once: what is being written is given up, and nobody waits for it.
            self._checkpointer.cancel()
            self._release()
            return
        # The step that failed may have changed rows and not the rest: it is not saved.
        try:
            self.close(save=False)
        except EmberkeepError as second:
            warnings.warn(f"while {error!r} ended the run: {second}", stacklevel=2)

    # -- lost shards -----------------------------------------------------------------------------

    def recover(self, lost: ShardLostError | None = None) -> Recovered | None:
        """Brings lost shards back as the strategy says; None if all of them serve.

        After a full recovery everything is as it was in the newest whole version, the reader too:
        drop the batch at hand and take the next. Raises `lost` if this keeper has no shards.
        """
        if self._recoverer is None:
            if lost is not None:
                raise lost
            return None
        with self._stalling():
            return self._recoverer.recover()

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

    def recoveries(self) -> Recoveries | None:
        """What failures have cost this process so far; None for a model without shards."""
        return None if self._recoverer is None else self._recoverer.told()

    def _go_back(self) -> Manifest | None:
        manifest = self._resume(None, False, tell=False)
        self._went_back = True
        self._start_clock()
        self._look_ahead()
        return manifest

    def _first_version(self) -> None:
        """A version of the very beginning: whatever fails before the next, there is one."""
        start = time.perf_counter()
        extras = self._extras()  # of every rank, whoever writes
        if self._checkpointer is None:
            return
        clusters = [home.cluster for home in self._parts.subject.homes()]
        fresh = all(
            cluster.touched_ids(table.name).size == 0
            for cluster in clusters
            for table in cluster.tables
        )
        while True:
            try:
                self._cut(extras, start, whole=True)
                self._checkpointer.wait()
                return
            except ShardLostError:
                if not fresh:
                    raise
                for cluster in clusters:  # an empty shard is what there was
                    lost = cluster.lost()
                    cluster.renew(*lost)
                    cluster.serve(*lost)

    # -- resuming --------------------------------------------------------------------------------

    def resume(self, version: int | None = None, *, fall_back: bool = False) -> Manifest | None:
        """Brings back the newest version, or the one named; None if there is none yet.

        A version that does not fit the model is refused, every difference named, before anything
        has changed. A damaged one is `DamageError`, unless `fall_back` allows the newest intact
        one before it, which is warned of.
        """
        with self._stalling():
            manifest = self._resume(version, fall_back)
            self._begun = True
            if manifest is not None and self.reader is None and not self._told_of_data:
                self._told_of_data = True
                warnings.warn(
                    f"step {manifest.step} was resumed and the keeper has no reader: the data "
                    "starts over, unless you see to its place yourself; give the keeper reader= "
                    "from the start to go on where the version ends",
                    stacklevel=2,
                )
            if manifest is None and self._strategy.recovery is not None:
                self._first_version()
            self._start_clock()
            self._look_ahead()
            return manifest

    def start_over(self) -> Manifest | None:
        """Starts over in a repository that has versions: the present state becomes the newest."""
        self._begun = True
        (beside,) = self._ranks.largest([self._newest() is not None])
        if not beside:
            return self.resume()
        self.save()
        self._look_ahead()
        return self.wait()

    def _resume(
        self, version: int | None, fall_back: bool, *, tell: bool = True
    ) -> Manifest | None:
        with self._agreeing("rank 0 could not bring a version back"):
            restored = None
            if self._checkpointer is not None:
                restored = self._checkpointer.restore(version, fall_back=fall_back, fits=self._fit)
        chosen = restored.manifest.version if restored is not None else None
        number, epoch = self._ranks.largest([chosen.number, chosen.epoch] if chosen else [0, 0])
        if not number:
            return None
        with self._agreeing("another rank could not bring the version back"):
            if restored is None:
                repository = Repository.open(self._store)
                pool = Pool(self._settings.threads)
                restored = load(
                    repository, VersionId(number, epoch), self._parts.subject, pool, self._fit
                )
            self._load_rest(restored)
        manifest = restored.manifest
        self.steps = self._exact_step = self._ledger.step = manifest.step
        self._ledger.resumed += 1
        self._ledger.version = number
        if self._recoverer is not None:
            self._recoverer.load(manifest.counters)
        lost = [passed.number for passed in restored.lost]
        if lost:
            warnings.warn(f"versions {lost} are damaged and were passed over", stacklevel=3)
        if tell:
            self._tell("resumed", {"version": number, "step": manifest.step, "lost": lost})
        return manifest

    def _fit(self, restored: Restored) -> None:
        """Refuses what does not fit, before a row has changed."""
        saved, present = restored.manifest.reader, {}
        if self.reader is not None:
            present = self.reader.state_dict()
        if bool(saved) != bool(present):
            raise StateError(
                "the version holds the place of a reader: give the keeper reader="
                if saved
                else "the version holds no place of a reader: leave reader= out"
            )
        if restored.dense is None:
            raise StateError("the version has no dense state: it was not written by a keeper")
        packed = Packed.decode(restored.dense)
        self._fitting = self._parts.dense.check(packed)
        self._fitting["reader"] = unpack(Packed(saved, packed.tensors))

    def _load_rest(self, restored: Restored) -> None:
        saved, self._fitting = self._fitting, {}
        if self.reader is not None:
            self.reader.load_state_dict(saved["reader"])
        self._parts.dense.load(saved)
        if len(saved["generators"]) != self._ranks.world:
            warnings.warn(
                f"version {restored.manifest.version} was saved by {len(saved['generators'])} "
                f"ranks, there are {self._ranks.world}: the same bits need the same number",
                stacklevel=5,
            )
        if self._ranks.rank < len(saved["generators"]):
            set_generators(saved["generators"][self._ranks.rank])

    @contextmanager
    def _agreeing(self, otherwise: str) -> Iterator[None]:
        """All ranks succeed or all raise: none is left waiting for one that is gone."""
        try:
            yield
        except BaseException:
            self._ranks.largest([1])
            raise
        (failed,) = self._ranks.largest([0])
        if failed:
            raise StateError(f"{otherwise}: see its error")

    # -- what users may ask ----------------------------------------------------------------------

    @property
    def saved_whole(self) -> Mapping[str, str]:
        """The tables that cannot be followed row by row, and why."""
        return dict(self._parts.whole)

    def mark_all_changed(self) -> None:
        """Call this before you change rows of torch's embeddings yourself, past the optimizer."""
        self._parts.tables.change_all()

    def costs(self) -> Costs:
        """What this process has spent on versions so far."""
        kept = sum(info.size for info in self._store.list(names.DATA))
        return self._ledger.costs(kept)

    def metrics(self) -> str:
        """The same for Prometheus, and how well rows are protected where there is parity."""
        statuses = [home.cluster.parity for home in self._parts.subject.homes()]
        protected = [status for status in statuses if status is not None]
        alone = len(protected) == 1
        return self._ledger.exposition() + "".join(
            exposition(status.samples(), "" if alone else f'{{cluster="{i}"}}')
            for i, status in enumerate(protected)
        )

    @property
    def metrics_port(self) -> int | None:
        return None if self._server is None else self._server.port

    # -- saving ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._closed:
            raise StateError("the keeper is closed: make another")
        if self._begun:
            return
        if self._newest() is not None:
            raise StateError(
                f"{self._store.url} holds versions of this run: call resume() before the first "
                "step, or start_over() to leave them behind, or use another repository"
            )
        self._begun = True
        if self._strategy.recovery is not None and self.steps == 0:
            self._first_version()
        self._look_ahead()

    def _newest(self) -> VersionId | None:
        return None if self._checkpointer is None else self._checkpointer.repository.latest()

    def _save(self, *, whole: bool = True) -> Saving | None:
        """Cuts a version; unless it must be whole, whichever the strategy's turn is."""
        if self._checkpointer is not None:
            self._checkpointer.make_room()
            self._checkpointer.check()
            whole = whole or self._checkpointer.due_whole
        whole = bool(self._ranks.largest([whole and self._ranks.leads])[0])
        start = time.perf_counter()
        extras = self._extras() if whole else Extras(user=self._about, counters=self._counters())
        return self._cut(extras, start, whole=whole)

    def _cut(self, extras: Extras, start: float, *, whole: bool) -> Saving | None:
        """Rows as they are now, beside what was gathered since `start`; on the rank that writes."""
        self._saved_at = time.monotonic()
        if self._checkpointer is None:
            return None
        saving = self._checkpointer.save(self.steps, extras, whole=whole)
        self._ledger.paused((time.perf_counter() - start) * 1e3)
        return saving

    def _extras(self) -> Extras:
        """Everything but rows, as it is now on every rank."""
        reader = pack({} if self.reader is None else self.reader.state_dict(), what="reader")
        every = self._generators(reader)
        if not self._ranks.leads:
            return Extras()
        self._parts.tables.look_again()
        dense = self._parts.dense.capture(every)
        dense.tensors.update(reader.tensors)
        return Extras(
            dense=dense.encode,
            reader=reader.plain,
            user=self._about,
            counters=self._counters(),
        )

    def _counters(self) -> Json:
        told = {} if self._recoverer is None else self._recoverer.counters()
        return {**self._ledger.counters(), **told}

    def _generators(self, reader: Packed) -> list[Json]:
        if self._ranks.world == 1:
            return [generators()]
        mine = {"generators": generators(), "reader": xxhash.xxh3_128_digest(reader.encode())}
        every = [unpack(Packed.decode(it)) for it in self._ranks.gathered(pack(mine).encode())]
        if len({rank["reader"] for rank in every}) > 1:
            raise StateError(
                "the readers of the ranks are at different places, and one version holds one: use "
                "a reader whose state is the same on all ranks, as emberkeep's is"
            )
        return [rank["generators"] for rank in every]

    def _exact(self) -> int:
        """The step whose state the newest version holds exactly; waits for the one under way."""
        checkpointer = self._checkpointer
        if checkpointer is not None:
            checkpointer.join()
            newest = checkpointer.committed_step
            if newest is not None and not checkpointer.spec.lossy:
                self._exact_step = newest
        return self._exact_step

    def _stop(self, asked: int) -> NoReturn:
        """Saves within the grace period and ends the process; every rank, together."""
        deadline = time.monotonic() + self._grace.total_seconds()

        def left() -> timedelta:
            return timedelta(seconds=max(0.0, deadline - time.monotonic()))

        extras = self._extras()
        saved: int | None = None
        if self._checkpointer is not None:
            if not self._checkpointer.join(self._grace / 2):
                self._checkpointer.cancel()
            if self._checkpointer.join(left()):
                if self._checkpointer.committed_step != self.steps:
                    self._checkpointer.save(self.steps, extras)
                    self._checkpointer.join(left())
                saved = self._checkpointer.committed_step
        self._ranks.barrier()
        self._release()
        self._leave(asked, saved)

    def _leave(self, asked: int, saved: int | None) -> NoReturn:
        if self._checkpointer is not None:
            kept = f"version of step {saved}" if saved is not None else "no version of this run"
            name = signal.Signals(asked).name
            message = f"{name}: stopped after step {self.steps}; {kept} was saved"
            print(f"emberkeep: {message}", file=sys.stderr, flush=True)
        self._tell("stopped", {"step": self.steps, "saved_step": saved})
        end(asked)

    # -- when ------------------------------------------------------------------------------------

    def _start_clock(self) -> None:
        self._saved_at = self._looked_at = time.monotonic()
        self._looked_step = self._next_look = self.steps

    def _since_saved(self) -> timedelta:
        return timedelta(seconds=time.monotonic() - self._saved_at)

    def _look_ahead(self) -> None:
        """Decides when to decide next, and tells the reader: nothing is read past that point."""
        now, taken = time.monotonic(), self.steps - self._looked_step
        per_step = timedelta(seconds=(now - self._looked_at) / taken) if taken else None
        ahead = self._strategy.schedule.steps_ahead(self.steps, self._since_saved(), per_step)
        (ahead,) = self._ranks.largest([ahead if self._ranks.leads else 0])
        self._looked_at, self._looked_step = now, self.steps
        self._next_look = self.steps + ahead
        if hasattr(self.reader, "lend"):
            each = self._batches_per_step
            self.reader.lend(
                ahead * each,
                f"the loop has taken {ahead * each} batches since step {self.steps} and called "
                f"keeper.step() fewer than {ahead} times, so no further batch was handed out: call "
                "keeper.step() after every batch, also after one that you skip, or give the keeper "
                f"batches_per_step= (it is {each}) if your loop takes several for a step",
            )

    # -- details ---------------------------------------------------------------------------------

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._ledger.stall_seconds += time.perf_counter() - start

    def _timed(self, hook: Hook) -> Hook:
        def timed(*given: Any) -> None:
            with self._stalling():
                hook(*given)

        return timed

    def _rows_replaced(self, *_: Any) -> None:
        self.mark_all_changed()

    def _hear(self, event: str, details: Json) -> None:
        if event == "saved":
            self._ledger.saved(details)
        elif event == "save_failed":
            self._ledger.failed += 1
        elif event == "save_cancelled":
            self._ledger.cancelled += 1
        self._tell(event, details)

    def _tell(self, event: str, details: Json) -> None:
        if event in ("saved", "resumed", "recovered"):
            run = {} if self._recoverer is None else {"pls": self._recoverer.losses.pls}
            if event == "saved":
                run |= {"version": details["version"], "version_at": time.time()}
            for home in self._parts.subject.homes():
                home.cluster.tell(**run)
        if self._on_event is not None:
            self._on_event(event, details)

    def _release(self) -> None:
        self._closed = True
        self._termination.close()
        if self._recoverer is not None:
            self._recoverer.release()
        self._parts.tables.stop_following()
        for handle in self._handles:
            handle.remove()
        if hasattr(self.reader, "lend"):
            self.reader.lend(None)
        if self._server is not None:
            self._server.close()
