"""A second place for versions: whole ones are copied there beside training."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from emberkeep._types import Json
from emberkeep.blobs import BlobStore, Buffer
from emberkeep.checkpoint.restore import check_schema
from emberkeep.checkpoint.spec import SaveSettings
from emberkeep.errors import (
    CancelledError,
    ConfigError,
    DamageError,
    DeadlineError,
    EmberkeepError,
    FencedError,
    FullError,
    NoRepositoryError,
    NoVersionError,
    StorageError,
    UnsupportedStoreError,
)
from emberkeep.keeper.mirror_repair import check_chain, is_ahead
from emberkeep.keeper.run_saver import Hear
from emberkeep.repository import (
    Collector,
    Manifest,
    Repository,
    RetentionPolicy,
    VersionId,
    Writer,
)
from emberkeep.repository.maintenance.run_records import (
    copy_restores,
    copy_tags,
    origin_of,
    readable_tags,
    take_tags,
)
from emberkeep.repository.maintenance.version_copy import (
    copy_version,
    newest_origin,
    origins,
    same_run,
)
from emberkeep.runtime.background import Retry, Worker
from emberkeep.runtime.bandwidth import Bandwidth
from emberkeep.runtime.clock import Clock
from emberkeep.runtime.metrics import Sample
from emberkeep.strategies import Every

_T = TypeVar("_T")

# No snapshot waits for a copy: it yields.
_NICE = 10
_RETRY = Retry(limit=None, first=timedelta(seconds=1), most=timedelta(minutes=1))
# A version may be terabytes; a copy that takes longer hangs.
_PATIENCE = timedelta(hours=6)
# So often in a row a copy may fail before the end of a run stops waiting for it.
_LAST_ATTEMPTS = 3
_LAST_PATIENCE = timedelta(seconds=5)
# So often the end of a run looks whether the process was asked to stop.
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """What the second place has, as far as this process knows."""

    url: str
    step: int | None
    """Of the newest version there; None while there is none."""
    copied: int
    """Versions that this process has copied."""
    copied_nbytes: int
    failed: int
    """Attempts that failed."""
    failing_since: float | None
    """The time (Unix) since when no copy has succeeded; None while all is well."""
    error: str | None
    """The last error, while it lasts."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def samples(self) -> list[Sample]:
        """The same for Prometheus."""
        return [
            ("mirror_copies_total", "counter", "versions copied to the mirror", self.copied),
            ("mirror_copied_bytes_total", "counter", "bytes of these", self.copied_nbytes),
            ("mirror_failures_total", "counter", "copies that failed", self.failed),
            ("mirror_step", "gauge", "the step of the newest version there", self.step or 0),
            ("mirror_failing_since_seconds", "gauge",
             "since when (Unix) no copy has succeeded; 0 while all is well",
             self.failing_since or 0.0),
        ]  # fmt: skip


class Mirror:
    """Copies whole versions from one repository to another, one after the other, in the background.

    The mirror is a repository of its own: what reads, verifies or collects a repository does so
    there. Opening it makes this process its only writer, whatever other place an earlier one wrote
    to: that one is stopped by `FencedError`. Where it cannot be reached when a run starts, the run
    does not: a newer version may be there. While a run goes on, copies that fail are warned of,
    counted and repeated; training does not wait for them.
    """

    def __init__(
        self, store: BlobStore, *, every: Every | None, schema: Json, retention: RetentionPolicy,
        settings: SaveSettings, exclusive: bool, on_event: Hear, clock: Clock,
        must_exist: bool = False,
    ) -> None:  # fmt: skip
        """Looks at what is there, and changes nothing before `follow`. With `must_exist` a mirror
        that is not there is refused: a run that must exist is nowhere else."""
        self._store, self._exclusive, self._schema = store, exclusive, schema
        with self._reached():
            exists = Repository.exists(store)
            if must_exist and not exists:
                raise NoRepositoryError(
                    f"neither the repository nor its mirror {store.url} is there, and this run "
                    "must exist: nothing was created. Check the paths, and that disks are mounted; "
                    "leave must_exist out to start a new run"
                )
            newest = None
            if exists:
                self.repository = Repository.open(store, clock=clock)
                check_schema(self.repository.tables, schema)
                newest = newest_origin(self.repository)
            self._exists = exists
            self._step = None if newest is None else self.repository.manifest(newest[1]).step
        self._every = every
        self._settings = settings
        self._retention = retention
        self._bandwidth = Bandwidth(settings.mirror_mb_per_second, clock=clock)
        self._listener = on_event
        self._clock = clock
        self.stopping: Callable[[], object] = lambda: False
        """Whether the process was asked to stop; the end of the run then has `grace`."""
        self.grace = _PATIENCE
        self._source: Repository | None = None
        self._has: VersionId | None = None  # of the source, the newest that is in the mirror
        # How often a copy was asked for whether it is due or not, and up to which it was made. One
        # that is asked for beside a copy of an older version is not answered by that.
        self._asked = self._answered = 0
        # The same for records of restores and for names of versions.
        self._records_asked = self._records_answered = 0
        self._named: dict[str, VersionId] = {}  # as they are in the mirror, too
        self._left_out: set[VersionId] = set()
        self._start()
        self._fenced: FencedError | None = None
        self._copied_at: float | None = None
        self._copied = self._copied_nbytes = self._failures = self._in_a_row = 0

    def _start(self) -> None:
        self._ended = False
        self._given_up = threading.Event()  # another each time: an earlier thread may still hang
        self._worker = Worker(
            "emberkeep-mirror", self._copy_newest, nice=max(_NICE, self._settings.nice),
            retry=_RETRY,
            on_error=self._failed, clock=self._clock,
        )  # fmt: skip

    def _wake(self, *, forced: bool = False) -> None:
        if self._ended:  # a run that was closed goes on: a shard was lost at its very end
            self._start()
        self._asked += forced
        self._worker.wake()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to go on from."""
        return self._step is None

    # -- before a run ----------------------------------------------------------------------------

    def follow(self, source: Repository) -> None:
        """Names the repository whose versions are copied, and makes this process the only writer
        of the mirror, which is created if it is not there; a mirror of another run is refused
        before that, since its own process would be stopped."""
        with self._reached():
            if self._exists:
                self._check_run(source)
            else:
                self.repository = Repository.create(
                    self._store, schema=self._schema, exclusive=self._exclusive, clock=self._clock
                )
            self._writer = Writer.open(self.repository)
            there = origins(self.repository)
        self._collector = Collector(
            self._writer, policy=self._retention, grace=self._settings.grace
        )
        self._source = source
        self._has = max(
            (version for origin, version in origins(source).items() if origin in there),
            default=None,
        )

    def _check_run(self, source: Repository) -> None:
        if source.id == self.repository.id:
            raise ConfigError(
                f"the mirror {self._store.url} and {source.store.url} are the same place: choose "
                "another mirror"
            )
        if not same_run(source, self.repository):
            raise ConfigError(
                f"{self._store.url} holds versions of another run than {source.store.url}: choose "
                "another mirror"
            )

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Says of a store that fails what that means for the run."""
        try:
            yield
        except (NoRepositoryError, UnsupportedStoreError):
            raise
        except StorageError as error:
            raise StorageError(
                f"the mirror {self._store.url} cannot be reached, and it may hold a newer version "
                f"than the repository, so the run was not started: {error}; wait until it can, or "
                "leave mirror= out to go on without it"
            ) from error

    def _newest(self) -> VersionId | None:
        """The newest version of the source that is to be in the mirror."""
        found = None if self._source is None else newest_origin(self._source)
        return None if found is None else found[1]

    def bring_newer(self, writer: Writer) -> Manifest | None:
        """Copies the newest whole version back if the repository has none as new; None if it
        does. Names that were moved elsewhere move here."""
        copy_restores(self.repository, writer.repository)
        brought = self._bring_newer(writer)
        take_tags(self.repository, writer.repository)
        # In the thread, with names that are settled: a mirror that is full ends no run.
        self.offer_records()
        return brought

    def _bring_newer(self, writer: Writer) -> Manifest | None:
        newest, known = newest_origin(self.repository), newest_origin(writer.repository)
        if newest is None or (
            known is not None and not is_ahead(self.repository, newest, writer.repository, known)
        ):
            if known is not None and known[0] not in origins(self.repository):
                self._asked += 1  # the run before was ended before it was copied
            return None
        # One that is there and not the newest: the run went back to another, and left that again.
        again = newest[0] in origins(writer.repository)
        try:
            if known is not None:
                check_chain(self.repository, newest[1], writer.repository, again=again)
            brought = copy_version(self.repository, newest[1], writer, again=again)
        except DamageError as error:
            if known is None:
                raise DamageError(
                    f"the newest version of the mirror {self._store.url} is damaged, and "
                    f"{writer.repository.store.url} has none: {error}; copy an earlier one there "
                    "with `emberkeep mirror`, and start again",
                    name=error.name,
                ) from error
            warnings.warn(
                f"the mirror {self._store.url} has a newer version than "
                f"{writer.repository.store.url}, and it is damaged: {error}; the run goes on from "
                "what the repository has",
                stacklevel=2,
            )
            return None
        self._has = brought.version
        return brought

    def marks(self) -> Json:
        """What versions say that are written while this process has the mirror."""
        return {"mirror": {"repository": self.repository.id, "epoch": self._writer.epoch}}

    # -- beside a run ----------------------------------------------------------------------------

    def offer(self) -> None:
        """A whole version is committed: it is copied if one is due. In any case the thread looks
        whether another process has the mirror: the sooner this one stops the better."""
        self._wake()

    def offer_records(self) -> None:
        """The run was restored, or a version was named: that goes to the mirror whether a copy is
        due or not."""
        self._records_asked += 1
        self._wake()

    def _due(self, step: int) -> bool:
        every = self._every
        if every is None or self._step is None:
            return True
        if every.steps is not None:
            return step < self._step or step - self._step >= every.steps
        assert every.time is not None
        if self._copied_at is None:
            return True
        return self._clock.monotonic() - self._copied_at >= every.time.total_seconds()

    def _copy_newest(self) -> float | None:
        assert self._source is not None
        asked, given_up = self._asked, self._given_up  # before the newest version is looked up
        records_asked = self._records_asked
        named = readable_tags(self._source)  # before that, too: no version of a name is newer
        newest = self._newest()
        if newest is None or self._fenced is not None or given_up.is_set():
            return None
        try:
            self._writer.check()
            # Before any version that was saved after them.
            if records_asked != self._records_answered:
                self._with_room(partial(copy_restores, self._source, self.repository))
            wanted = self._named_and_missing(named)
            due = asked != self._answered or self._due(self._source.manifest(newest).step)
            for version, name in wanted.items():
                if version != newest:
                    self._copy_named(version, name, given_up)
                    self._copy_tags(named)
            if due or newest in wanted:
                self._copy(newest, given_up)
            self._copy_tags(named)
            self._named = named
            self._answer(asked if due else self._answered, records_asked)
            if due or wanted:
                self._collect()
        except CancelledError:
            pass
        except NoVersionError:
            if self._newest() == newest:
                raise
            return 0  # retention let it go before it was pinned, since a newer one is there
        except FencedError as error:
            with self._worker.changed:
                self._fenced = error
                self._worker.changed.notify_all()
        return None

    def _copy_named(self, version: VersionId, name: str, given_up: threading.Event) -> None:
        """Copies a version that has a name, if it can be: it must not keep the newest from the
        mirror. Nor must the time that it takes, once the process was asked to stop."""
        assert self._source is not None
        try:
            check_chain(self._source, version, self.repository)
            self._copy(version, given_up, self._unless_stopping)
        except (DamageError, NoVersionError, ConfigError) as error:
            self._leave_out(version, name, f"cannot be copied to {self._store.url}: {error}")
        except CancelledError:
            if given_up.is_set():
                raise
            self._leave_out(
                version, name,
                f"was not copied to {self._store.url}: the process was asked to stop, and the "
                "newest version comes first",
            )  # fmt: skip

    def _leave_out(self, version: VersionId, name: str, why: str) -> None:
        self._left_out.add(version)
        warnings.warn(
            f"version {version.number}, which {name!r} names, {why}; newer ones are copied, and to "
            "have it in a second place, `emberkeep fork` it",
            stacklevel=1,
        )

    def _unless_stopping(self, blocks: Iterator[Buffer]) -> Iterator[Buffer]:
        for block in blocks:
            if self.stopping():
                raise CancelledError("the process was asked to stop")
            yield block

    def _copy(
        self, version: VersionId, given_up: threading.Event,
        watched: Callable[[Iterator[Buffer]], Iterator[Buffer]] = iter,
    ) -> None:  # fmt: skip
        assert self._source is not None
        started, before = self._clock.monotonic(), self._writer.newest
        copy = partial(
            copy_version, self._source, version, self._writer, cancelled=given_up,
            passing=lambda blocks: self._bandwidth.passing(watched(blocks), given_up),
        )  # fmt: skip
        self._note(version, self._with_room(copy), before, started)

    def _with_room(self, copy: Callable[[], _T]) -> _T:
        try:
            return copy()
        except FullError:
            if not self._made_room():
                raise
            return copy()

    def _answer(self, asked: int, records_asked: int) -> None:
        with self._worker.changed:
            self._answered, self._records_answered, self._in_a_row = asked, records_asked, 0
            self._worker.changed.notify_all()

    def _named_and_missing(self, named: dict[str, VersionId]) -> dict[VersionId, str]:
        """Versions with a name that the mirror lacks and can still take, oldest first, and their
        names. Each copy is the newest there, so that none is made of what came before the
        newest."""
        assert self._source is not None
        if named == self._named:
            return {}
        there, standing = origins(self.repository), frozenset(self._source.versions())
        found: dict[VersionId, str] = {}
        for name, version in sorted(named.items(), key=lambda tag: tag[1]):
            origin = origin_of(self._source, version) if version in standing else None
            if origin is None or origin in there or version in {*found, *self._left_out}:
                continue
            if self._has is not None and version < self._has:
                self._leave_out(
                    version, name,
                    f"is not in {self._store.url} and older than what is there: it was not copied, "
                    "and its name neither",
                )  # fmt: skip
            elif self._source.manifest(version).whole:
                found[version] = name
        return found

    def _copy_tags(self, named: dict[str, VersionId]) -> None:
        """Names that have changed since they were copied: others may have moved in the mirror."""
        assert self._source is not None
        changed = {name for name in named if named[name] != self._named.get(name)}
        if changed:
            copy = partial(copy_tags, self._source, self.repository, epoch=self._writer.epoch)
            self._with_room(partial(copy, move=True, only=changed))

    def _made_room(self) -> bool:
        """Whether what has come of age since the last copy could be removed."""
        try:
            return self._collector.collect().nbytes > 0
        except FencedError:
            raise
        except EmberkeepError:  # that the place is full says enough
            return False

    def _collect(self) -> None:
        try:
            self._collector.collect()
        except FencedError:
            raise
        except Exception as error:
            # They stay a little longer; the copy is not in doubt.
            warnings.warn(
                f"old versions of {self._store.url} could not be removed: {error}", stacklevel=1
            )

    def _note(
        self, version: VersionId, copied: Manifest, before: VersionId | None, started: float
    ) -> None:
        nbytes = sum(
            manifest.nbytes
            for manifest in self.repository.chain(copied.version)
            if before is None or manifest.version > before
        )
        with self._worker.changed:
            self._copied += copied.version == self._writer.newest != before
            self._copied_nbytes += nbytes
            self._step, self._copied_at, self._in_a_row = copied.step, started, 0
            self._has = version
            self._worker.changed.notify_all()
        if copied.version != self._writer.newest or copied.version == before:
            return
        self._on_event(
            "mirrored",
            {
                "version": version.number, "mirror_version": copied.version.number,
                "step": copied.step, "nbytes": nbytes,
                "seconds": self._clock.monotonic() - started,
            },
        )  # fmt: skip

    def _failed(self, error: BaseException) -> None:
        self._failures += 1
        self._in_a_row += 1
        if self._in_a_row == 1:
            warnings.warn(
                f"a version could not be copied to {self.repository.store.url}: {error}; training "
                "goes on, and the copy is tried again",
                stacklevel=1,
            )
        self._on_event("mirror_failed", {"error": str(error), "failures": self._in_a_row})

    def _on_event(self, event: str, details: Json) -> None:
        try:
            self._listener(event, details)
        except Exception as error:  # a listener must not be able to fail a copy
            warnings.warn(f"on_event({event!r}) raised {error!r}", stacklevel=1)

    def check(self) -> None:
        """Raises `FencedError` if another process writes to the mirror: it has this run."""
        if self._fenced is not None:
            raise self._fenced

    def status(self) -> MirrorStatus:
        error, since = self._worker.error, self._worker.failed_since
        return MirrorStatus(
            url=self.repository.store.url,
            step=self._step,
            copied=self._copied,
            copied_nbytes=self._copied_nbytes,
            failed=self._failures,
            failing_since=since,
            error=None if error is None else str(error),
        )

    # -- after a run -----------------------------------------------------------------------------

    def finish(self, patience: timedelta | None = None) -> None:
        """Waits until the newest whole version is in the mirror too, due or not, or a copy has
        failed several times in a row, or `patience` is over; then ends the thread. What is missing
        is warned of, and copied when the run is resumed."""
        patience = _PATIENCE if patience is None else patience
        ends = self._clock.monotonic() + patience.total_seconds()
        wanted = self._newest()
        if wanted is not None and self._fenced is None and not self._up_to_date(wanted):
            self._in_a_row = 0
            self._wake(forced=True)
            self._wait_for(wanted, ends)
            # Else another process has the run.
            if not self._up_to_date(wanted) and self._fenced is None:
                self._warn_behind(wanted)
        self._ended = True
        self._worker.stop()
        if self._given_up.is_set():  # it may hang, and ends with the process
            return
        left = timedelta(seconds=max(0.0, ends - self._clock.monotonic()))
        with suppress(DeadlineError):
            self._worker.join(min(_LAST_PATIENCE, left))

    def _up_to_date(self, wanted: VersionId) -> bool:
        return self._has == wanted and self._records_asked == self._records_answered

    def _wait_for(self, wanted: VersionId, ends: float) -> None:
        """Until the version is in the mirror; gives its copy up at `ends`, or `grace` after the
        process was asked to stop."""
        asked = False
        while True:
            now = self._clock.monotonic()
            if not asked and self.stopping():
                asked = True
                self.lift_limit()
                ends = min(ends, now + self.grace.total_seconds())
            look = timedelta(seconds=max(0.0, min(_LOOK_SECONDS, ends - now)))
            try:
                self._worker.wait(
                    lambda: self._up_to_date(wanted) or self._hopeless,
                    f"the copy of version {wanted.number} to {self._store.url}",
                    look,
                )
                return
            except DeadlineError:
                if self._clock.monotonic() >= ends:
                    self.give_up()
                    return
                if self._in_a_row:  # the pauses of a long failure are not for the end of a run
                    self._worker.wake()

    def _warn_behind(self, wanted: VersionId) -> None:
        assert self._source is not None
        has = "no version" if self._step is None else f"step {self._step}"
        step = self._source.manifest(wanted).step
        if self._has == wanted:
            warnings.warn(
                f"{self.repository.store.url} has every version, but not all that was recorded of "
                "restores and names of versions: start the run again to have it copied",
                stacklevel=3,
            )
            return
        warnings.warn(
            f"{self.repository.store.url} has {has}, and the repository step {step}, version "
            f"{wanted.number}: the copy was not made; start the run again to have it made, or "
            "`emberkeep mirror`",
            stacklevel=3,
        )

    @property
    def _hopeless(self) -> bool:
        return self._in_a_row >= _LAST_ATTEMPTS or self._fenced is not None

    def give_up(self) -> None:
        """Ends the copy under way; nobody waits for it."""
        self._given_up.set()
        self._worker.stop()

    def lift_limit(self) -> None:
        self._bandwidth.lift()
