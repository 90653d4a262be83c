"""The one process that may add versions, and how it commits.

Data first, manifest last: a version exists from the moment its manifest does, and that moment is
one conditional put. Whatever happens around it, the outcome is read from the repository.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from itertools import count

from emberkeep._types import Json
from emberkeep.blobs import BlobStore, Buffer
from emberkeep.blobs.wrapper import keep_reserve
from emberkeep.errors import (
    DamageError,
    FencedError,
    MissingObjectError,
    NoVersionError,
    StateError,
    StorageError,
)
from emberkeep.repository import names
from emberkeep.repository.digests import BLOCK_NBYTES, Digester
from emberkeep.repository.history import (
    Claim,
    History,
    create_or_read,
    is_torn,
    look_at,
    read_claim,
    read_seal,
    writer_document,
)
from emberkeep.repository.manifest import FileRef, Manifest
from emberkeep.repository.names import VersionId
from emberkeep.repository.repository import Repository, void
from emberkeep.repository.takeover import honoured_marks, lost_the_race, seal

# Files that one writer of a part may add to a version before names could meet.
_PART_FILES = 10**6


class Writer:
    """The current epoch of a repository. Open it with `Writer.open`.

    Opening fences every earlier writer: none of them can commit afterwards. There is nothing to
    close; a writer ends when a later one is opened.
    """

    def __init__(
        self, repository: Repository, *, epoch: int, newest: VersionId | None, next_number: int
    ) -> None:
        self.repository = repository
        self.epoch = epoch
        self._newest = newest
        self._next_number = next_number
        self._draft: Draft | None = None
        self._pending: Manifest | None = None
        self._in_doubt = False  # whether it was tried before
        self._condemned: frozenset[VersionId] = frozenset()
        self._built_on: set[VersionId] = set()
        # Continued by the version that comes next, and protected until that is committed.
        self._resumed: VersionId | None = None
        # Versions known to stand, so that building on them needs no look at the store.
        self._standing: set[VersionId] = set()
        # What names of files of grids begin with that a catalog may come to name.
        self._unsettled: set[str] = set()
        self._lock = threading.RLock()
        self.started_with: tuple[VersionId, ...] = ()
        """The history when it was opened."""
        self._as_opened = True  # whether it is the history still

    @classmethod
    def open(cls, repository: Repository, history: History | None = None) -> Writer:
        """Seals the epoch before, claims the next one, and starts from the newest version.

        Of several that open at once one succeeds; the others get `FencedError`: those who opened
        since a `history` was looked at, which spares a look. What counts is seen after the seal."""
        history = history or repository.history(look=look_at(repository.store))
        nonce = secrets.token_hex(8)
        if history.listing.epoch:
            history = seal(repository, history, nonce)
        newest = history.newest
        lineage = history.lineage.extended(newest)
        epoch = max(history.listing.epoch + 1, repository.origin.next_epoch)
        honoured = honoured_marks(repository, history)
        started = repository.clock.now().isoformat()
        content = writer_document(
            repository=repository.id, epoch=epoch, nonce=nonce, lineage=lineage, honoured=honoured,
            details={"started": started, "host": socket.gethostname(), "pid": os.getpid()},
        )  # fmt: skip
        name = names.writer_name(epoch)
        found = create_or_read(repository.store, name, content)
        if is_torn(found, content):
            # Safe to complete: a successor that passed by has sealed this epoch; commits decide.
            repository.store.put(name, content)
        elif found != content:
            raise lost_the_race(repository)
        repository.claims[epoch] = Claim(lineage=lineage, honoured=honoured)
        keep_reserve(repository.store)
        start = lineage.newest.number if lineage.newest else 0
        opened = cls(repository, epoch=epoch, newest=newest, next_number=start + 1)
        opened.started_with = history.versions
        opened._as_opened = not history.marks  # which of them stay valid is decided by the claim
        return opened

    @property
    def newest(self) -> VersionId | None:
        """The newest version: this writer's own, or the one that it started from."""
        return self._newest

    def known_history(self) -> tuple[VersionId, ...] | None:
        """The versions that count, where that needs no look: this writer has committed nothing,
        and its gc has not run. Nobody else can change them without taking over, and who
        was taken over from commits nothing, whatever it went on from."""
        with self._lock:
            return self.started_with if self._as_opened else None

    def begin(self, *, needs: Iterable[VersionId] = (), block_nbytes: int = BLOCK_NBYTES) -> Draft:
        """Starts the next version, which will build on the versions that it `needs`.

        They are protected from this writer's gc from now on; `NoVersionError` if one is gone.
        A commit whose outcome is still unknown is settled first, which can move `newest`: a caller
        that chooses `needs` by it calls `settle` before.
        """
        with self._lock:
            self.settle()
            if self._draft is not None:
                raise StateError(
                    f"version {self._draft.version} is still being written: commit or abandon it"
                )
            needed = tuple(sorted(set(needs)))
            for version in needed:
                if version.epoch > self.epoch:
                    raise self._fenced()
                if version in self._condemned:
                    raise NoVersionError(f"version {version} is being removed: build on a newer")
                if version not in self._standing:
                    self.repository.ensure_kept(version)
                    self._standing.add(version)
            self._built_on.update(needed)
            version = VersionId(self._next_number, self.epoch)
            self._draft = Draft(self, version, needed, block_nbytes)
            return self._draft

    def settle(self) -> Manifest | None:
        """Finds out what became of a commit whose answer was lost, and completes it.

        Returns its manifest, or None if nothing was open. Until the store answers, each call
        raises `StorageError`: a commit that was started is never taken back, since the store may
        still perform it.
        """
        with self._lock:
            manifest = self._pending
            if manifest is None:
                return None
            store, content = self.repository.store, manifest.encode()
            try:
                if self._in_doubt:
                    self._check_before_repeating()
                self._in_doubt = True
                found = create_or_read(store, manifest.name, content, self._check_before_repeating)
            except StorageError as error:
                raise StorageError(
                    f"whether version {manifest.version} was committed is not known yet: {error}"
                ) from error
            if found == content:
                self._confirm(manifest.version)
                self._pending = None
                self._newest = manifest.version
                self._resumed = None
                self._standing.add(manifest.version)
                self._next_number = manifest.version.number + 1
                return manifest
            if read_seal(manifest.name, found) is not None:
                self._pending = None
                raise self._fenced()
            torn = is_torn(found, content)
            if torn:
                void(self.repository, manifest.version)
            # The name is spent, and never tried again: a successor may have passed it by.
            self._pending = None
            self._next_number = manifest.version.number + 1
            if torn:
                raise StorageError(
                    f"{manifest.name} was written in part only; the version is not committed: "
                    "save again"
                )
            raise DamageError(
                f"{manifest.name} holds something that this writer did not write; version "
                f"{manifest.version} is not committed",
                name=manifest.name,
            )

    def _check_before_repeating(self) -> None:
        """A successor may have gone on from the version, and its gc may have removed it since:
        created again, the manifest would stand there without its files."""
        try:
            self.check()
        except FencedError:
            self._pending = None
            raise

    def _confirm(self, version: VersionId) -> None:
        """Asks, after a commit, whether it counts: a later epoch says up to where it goes on.

        No successor passes a name by that this writer can still take, so this never refuses what
        the rules allow; it refuses what a store that forgot a seal would let pass.
        """
        try:
            claim = read_claim(self.repository.store, self.repository.id, self.epoch + 1)
        except MissingObjectError:
            return
        if version not in claim.lineage:
            self._pending = None
            raise self._fenced()

    def check(self) -> None:
        """Raises `FencedError` if a later writer has taken over."""
        try:
            self.repository.store.size(names.writer_name(self.epoch + 1))
        except MissingObjectError:
            return
        raise self._fenced()

    def check_unsealed(self) -> None:
        """Raises `FencedError` if a later writer has taken over or is about to: a successor that
        seals after this has returned sees whatever was put before it was called."""
        self.check()
        with self._lock:
            number = self._next_number
        while True:
            name = VersionId(number, self.epoch).manifest_name
            try:
                found = self.repository.store.get(name)
            except MissingObjectError:
                return
            if read_seal(name, found) is not None:
                raise self._fenced()
            number += 1  # a version that is being committed meanwhile

    def resume(self, version: VersionId) -> bool:
        """Called when the run goes on from a version; whether its grid may be continued.

        Only the newest version's grid may be: to go on from an older one starts another,
        since the versions that came after it, standing or not, have left their deaths in the
        catalog. Until the next version is committed, gc spares this one.
        """
        with self._lock:
            self.settle()
            self._resumed = version
            return version == self._newest

    @property
    def resumed(self) -> VersionId | None:
        """The version that the run went on from, until the next one is committed."""
        return self._resumed

    def start_collecting(self) -> None:
        """Called by gc before it looks at the history: versions committed from now on are not
        in its view, so what they build on is remembered for it."""
        with self._lock:
            self._as_opened = False
            self._built_on = set(self._draft.needs if self._draft else ())
            self._built_on.update(self._pending.needs if self._pending else ())

    def protected(self) -> frozenset[VersionId]:
        """What gc must not remove for this writer's sake: the newest version, the one that the run
        went on from, and whatever a version builds on that is being written or was committed since
        gc started."""
        with self._lock:
            held = (v for v in (self._newest, self._resumed) if v is not None)
            return frozenset((*held, *self._built_on))

    def condemn(self, versions: frozenset[VersionId]) -> frozenset[VersionId]:
        """Tells `begin` what gc is removing; returns what this writer does not protect."""
        with self._lock:
            self._condemned = versions - self.protected()
            self._standing -= self._condemned
            return self._condemned

    def hold_files(self, prefixes: Iterable[str]) -> None:
        """Called before files of a grid are put whose names begin so: gc leaves them alone until
        they are let go."""
        with self._lock:
            self._unsettled.update(prefixes)

    def let_go_files(self, prefixes: Iterable[str]) -> None:
        """Called when a catalog names the files, or none ever will."""
        with self._lock:
            self._unsettled.difference_update(prefixes)

    def held_files(self) -> tuple[str, ...]:
        """What the names of files begin with that a catalog may come to name."""
        with self._lock:
            return tuple(self._unsettled)

    def _commit(self, manifest: Manifest) -> Manifest:
        with self._lock:
            self._draft = None
            self._as_opened = False
            self._pending, self._in_doubt = manifest, False
            settled = self.settle()
            assert settled is not None
            return settled

    def _release(self) -> None:
        with self._lock:
            self._draft = None

    def _fenced(self) -> FencedError:
        return FencedError(
            f"a newer process has taken over {self.repository.store.url} from epoch {self.epoch}: "
            "this one must stop; what it committed before is kept"
        )


class Draft:
    """A version that is being written. Without `commit` it never existed.

    As a context manager it abandons itself unless it was committed. `add` may be called from
    several threads.
    """

    def __init__(
        self,
        writer: Writer,
        version: VersionId,
        needs: tuple[VersionId, ...],
        block_nbytes: int,
    ) -> None:
        self.version = version
        self.needs = needs
        self.nonce = secrets.token_hex(8)
        self.parent = writer.newest
        self._writer = writer
        self.block_nbytes = block_nbytes
        self._names: list[str] = []
        self._files: list[FileRef] = []
        self.next_part = count().__next__  # for each `FileWriter` elsewhere, one of its own
        self._open = True
        self._lock = threading.Lock()

    def add(
        self,
        data: Buffer | Iterable[Buffer],
        *,
        kind: str,
        suffix: str,
        metadata: Json | None = None,
    ) -> FileRef:
        """Streams one data file to the store; digests are made on the way.

        A call that raises leaves the version as it was: add the data again, under a new name.
        """
        with self._lock:
            self._ensure_open()
            name = names.data_name(self.version, self.nonce, len(self._names), suffix)
            self._names.append(name)
        file = _put(
            self._writer.repository.store, name, data, kind=kind, metadata=metadata,
            block_nbytes=self.block_nbytes,
        )  # fmt: skip
        with self._lock:
            self._ensure_open()
            self._files.append(file)
        return file

    @property
    def url(self) -> str:
        """Where the files go."""
        return self._writer.repository.store.url

    def adopt(self, files: Iterable[FileRef]) -> None:
        """Takes files into the version that a `FileWriter` elsewhere has written for it."""
        with self._lock:
            self._ensure_open()
            for file in files:
                if file.name in self._names:
                    raise StateError(f"{file.name} was written twice for version {self.version}")
                self._names.append(file.name)
                self._files.append(file)

    def commit(
        self,
        *,
        step: int,
        baseline: VersionId | None = None,
        layout: Json | None = None,
        reader: Json | None = None,
        user: Json | None = None,
        counters: Json | None = None,
    ) -> Manifest:
        """Makes the version exist; returns its manifest.

        - `FencedError`: a newer writer has taken over; the version does not exist.
        - `StorageError`: the store failed. The version may come to exist: the writer's next
          `begin` or `settle` finds out.
        - `ConfigError`: the manifest cannot be stored; the draft stays open.
        """
        with self._lock:
            self._ensure_open()
            manifest = Manifest(
                repository=self._writer.repository.id,
                version=self.version,
                nonce=self.nonce,
                step=step,
                created=self._writer.repository.clock.now(),
                parent=self.parent,
                baseline=baseline,
                needs=self.needs,
                layout=layout or {},
                reader=reader or {},
                user=user or {},
                counters=counters or {},
                # Threads finish in any order; the manifest should not depend on it.
                files=tuple(sorted(self._files, key=lambda file: self._names.index(file.name))),
            )
            self._open = False
        return self._writer._commit(manifest)

    def abandon(self) -> None:
        """Gives the version up and removes its files; what cannot be removed now is gc's."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._writer._release()
        try:
            self._writer.repository.store.delete(self._names)
        except StorageError:
            return

    def _ensure_open(self) -> None:
        if not self._open:
            raise StateError(f"version {self.version} is committed or abandoned: begin another")

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()


class FileWriter:
    """Writes files of a version that another process commits: a shard server writes its own.

    `part` numbers the writers of one version: their names differ by it. As a context manager it
    removes what it wrote when an error ends the work; whatever is left is gc's.
    """

    def __init__(
        self, store: BlobStore, version: VersionId, nonce: str, *, part: int, block_nbytes: int
    ) -> None:
        self.written: list[FileRef] = []
        self._store = store
        self._version = version
        self._nonce = nonce
        self._first = (part + 1) * _PART_FILES
        self._block_nbytes = block_nbytes

    def add(
        self,
        data: Buffer | Iterable[Buffer],
        *,
        kind: str,
        suffix: str,
        metadata: Json | None = None,
    ) -> FileRef:
        """Streams one data file to the store, as `Draft.add` does."""
        index = self._first + len(self.written)
        name = names.data_name(self._version, self._nonce, index, suffix)
        file = _put(
            self._store, name, data, kind=kind, metadata=metadata, block_nbytes=self._block_nbytes
        )
        self.written.append(file)
        return file

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is not None:
            with suppress(StorageError):
                self._store.delete([file.name for file in self.written])


def _put(
    store: BlobStore, name: str, data: Buffer | Iterable[Buffer], *, kind: str,
    metadata: Json | None, block_nbytes: int,
) -> FileRef:  # fmt: skip
    """Streams a file to the store; digests are made on the way."""
    digester = Digester(block_nbytes)
    if isinstance(data, bytes | bytearray | memoryview):
        digester.update(memoryview(data).cast("B"))
        store.put(name, data)
    else:
        store.put(name, digester.passing(data))
    return FileRef(
        name=name,
        size=digester.size,
        digest=digester.whole,
        kind=kind,
        metadata=metadata or {},
        block_nbytes=block_nbytes,
        blocks=digester.blocks,
    )
