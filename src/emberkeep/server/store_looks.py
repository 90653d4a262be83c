"""A server looks into a store while somebody waits for the answer: one look at a time into each."""

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
# Looks into so many stores are under way at once.
_MOST_STORES = 8


class StoreLooks:
    """Looks into stores, in the thread of who asks. A store that hangs keeps one thread, and nobody
    from another store; those that hang together keep 8 threads at most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free = threading.Condition()
        self._at: set[str] = set()

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
            if not self._clock.wait_for(self._free, lambda: self._free_for(url), _PATIENCE_SECONDS):
                hang = [url] if url in self._at else sorted(self._at)
                raise StorageError(
                    f"{', '.join(hang)} do{'es' if len(hang) == 1 else ''} not answer this server, "
                    "which still looks for a repository there; nothing was written: see that the "
                    "store or its mount answers, then try again"
                )
            self._at.add(url)
        try:
            yield
        finally:
            with self._free:
                self._at.discard(url)
                self._free.notify_all()

    def _free_for(self, url: str) -> bool:
        return url not in self._at and len(self._at) < _MOST_STORES
