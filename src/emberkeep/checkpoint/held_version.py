"""A version that is held against gc while it is brought back, and which one that is.

Where each call waits for a network, as much as can be is under way at once: a version is pinned,
its manifest is read and the history is looked at beside each other, and the pin is waited for
before the first row changes. In which order gc and readers see each other stays as it is: marks are
looked for when the pin stands, and the manifest once more after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial

from emberkeep.blobs import Call, caller_of, together
from emberkeep.checkpoint.restore import Restored
from emberkeep.errors import DamageError, NoVersionError, StateError
from emberkeep.repository import Manifest, Pin, Repository, VersionId, Writer
from emberkeep.repository.grid.catalog import Catalog, before_in_grid
from emberkeep.repository.history import look_at
from emberkeep.rows.priority import Priority

_MOST_AHEAD = 64


class HeldVersion:
    """Pins a version until the block ends. Its `manifest` may be there before the pin is: nothing
    that cannot be undone may be done before `confirm`."""

    def __init__(self, repository: Repository, version: VersionId) -> None:
        self.version = version
        self._repository = repository
        self._caller = caller_of(repository.store)
        self._pin = Call(repository.store, partial(Pin, repository, version))
        self._early: Call[Manifest] | None = None
        if self._caller is not None:
            self._early = Call(repository.store, partial(repository.manifest, version))
        self._record: Call[str] | None = None
        self._known = ExitStack()

    @property
    def manifest(self) -> Manifest:
        return self._pin.result().manifest if self._early is None else self._early.result()

    def read_ahead(self, versions: Sequence[VersionId], catalog: Catalog | None) -> None:
        """Reads the manifests at once that it may need, where they would be read one by one, each
        naming the next; `versions` are those before it."""
        if self._early is None:
            return
        manifest, before = self.manifest, before_in_grid(self.manifest)
        first = None
        if manifest.needs and manifest.baseline is not None:
            first = manifest.baseline.number
        elif before is not None and catalog is not None and before.number > catalog.covered:
            first = catalog.covered + 1
        wanted = [v for v in versions if first is not None and v.number >= first][-_MOST_AHEAD:]
        found = together(self._repository.store, [partial(self._readable, v) for v in wanted])
        others = [each for each in found if each is not None]
        self._known.enter_context(self._repository.pinned(manifest, *others))

    def _readable(self, version: VersionId) -> Manifest | None:
        with suppress(DamageError, NoVersionError):  # met again if it is needed
            return self._repository.manifest(version)
        return None

    def confirm(self) -> None:
        """Returns when the version is pinned; `NoVersionError` if it cannot be held."""
        self._pin.result()

    def count_restore(self, *, exact: bool) -> None:
        """Counts a restore, unless the block ends with an error."""
        self._record = Call(
            self._repository.store,
            partial(self._repository.record_restore, self.version, exact=exact),
        )

    def __enter__(self) -> HeldVersion:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        try:
            if error is None and self._record is not None:
                self._record.result()
        finally:
            self.let_go(counted=error is None)

    def let_go(self, *, counted: bool = True) -> None:
        """Ends holding it; beside whatever comes next where that takes a round trip."""
        self._known.close()
        if self._caller is None:
            self._release(counted)
        else:
            self._caller.submit(self._release, counted)

    def _release(self, counted: bool) -> None:
        if not self._pin.made:
            return
        self._pin.wait()
        if self._pin.error is None:
            self._pin.result().release()
        if not counted and self._record is not None and self._caller is not None:
            self._record.wait()
            if self._record.error is None:
                self._repository.store.delete([self._record.result()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a history before it is looked at: `versions` that counted some time, the
    newest of all, and whether they are the history still."""

    versions: tuple[VersionId, ...]
    newest: VersionId | None
    current: bool = True

    @classmethod
    def of(cls, writer: Writer) -> Known:
        """The versions that a writer started with, and its newest."""
        current = writer.known_history() is not None
        return cls(versions=writer.started_with, newest=writer.newest, current=current)

    def likely(self, number: int | None) -> VersionId | None:
        """The version that is most likely meant."""
        if number is None:
            return self.newest
        return next((v for v in self.versions if v.number == number), None)


def has_newer(repository: Repository, version: VersionId, priority: Priority | None) -> bool:
    """Whether one that came after this version is whole, as all are where none is prioritised; a
    damaged one counts, whatever it was."""
    if priority is None:
        return True
    try:
        return repository.newest_whole() != version
    except DamageError:
        return True


def newest_intact(
    repository: Repository, known: Known, number: int | None, *, fall_back: bool,
    bring_back: Callable[[HeldVersion, Sequence[VersionId]], Restored | None],
) -> Restored | None:  # fmt: skip
    """What `bring_back` makes of the newest version, or of that of a number; it is given the
    versions before it, too, and returns None for one that holds no instant. With `fall_back`, of
    the newest undamaged one before it: `lost` then names those that were passed over."""
    look = None if known.current else look_at(repository.store)
    likely = None if caller_of(repository.store) is None else known.likely(number)
    # Held before the history is looked at, where that takes round trips.
    held = None if likely is None else HeldVersion(repository, likely)
    try:
        history = known if known.current else repository.history(look=look)
        versions = list(history.versions)
        chosen = None if number is None else repository.version(number, versions)
        if chosen is not None:
            versions = [v for v in versions if v <= chosen]
        lost: list[VersionId] = []
        while versions:
            target = versions.pop()
            if held is not None and held.version != target:
                held.let_go()
                held = None
            holding, held = held or HeldVersion(repository, target), None
            try:
                restored = bring_back(holding, versions)
                if restored is None and target == chosen:
                    raise StateError(
                        f"version {chosen} is a prioritised one: it holds no instant and serves to "
                        "bring single shards back; restore a whole version"
                    )
                if restored is None:
                    continue
            except DamageError as error:
                if not fall_back and versions:
                    raise DamageError(
                        f"{error}; fall_back=True takes the newest intact version before it",
                        name=error.name,
                    ) from error
                if not versions:
                    raise
                lost.append(target)
                continue
            return replace(restored, lost=tuple(lost))
        return None
    finally:
        if held is not None:
            held.let_go()
