"""A server looks into a store while somebody waits for the answer: one look at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from emberkeep.blobs import BlobStore
from emberkeep.errors import StorageError
from emberkeep.repository import Repository
from emberkeep.runtime.clock import Clock

# For a look that is under way. A store that hangs, as a mount without its server does, must not
# take one thread after another of those that answer.
_PATIENCE_SECONDS = 10.0


class StoreLooks:
    """Looks into stores, in the thread of who asks; a store that hangs keeps one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free = threading.Condition()
        self._at: str | None = None

    def repository_at(self, store: BlobStore) -> str | None:
        """The id of the repository that a store holds; None if there is none. `StorageError` if an
        earlier look has not ended in time."""
        with self._alone(store.url):
            if not Repository.exists(store):
                return None
            return Repository.open(store, clock=self._clock).id

    @contextmanager
    def _alone(self, url: str) -> Iterator[None]:
        with self._free:
            if not self._clock.wait_for(self._free, lambda: self._at is None, _PATIENCE_SECONDS):
                raise StorageError(
                    f"{self._at} does not answer this server, which still looks for a repository "
                    "there; nothing was written: see that the store or its mount answers, then try "
                    "again"
                )
            self._at = url
        try:
            yield
        finally:
            with self._free:
                self._at = None
                self._free.notify_all()
