"""A catalog that is read before anybody asks, from stores whose every call waits for a network."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from emberkeep.blobs import BlobStore, Call, caller_of
from emberkeep.errors import DamageError, StorageError
from emberkeep.repository import names
from emberkeep.repository.grid.catalog import Catalog, generations, read_catalog
from emberkeep.repository.names import VersionId
from emberkeep.repository.repository import Repository


class CatalogAhead:
    """The newest catalog of the newest grid, which most likely is the grid of the version that is
    asked for next, read beside whatever else opening a repository takes.

    It may be older than the newest one by the time that it is used. Rows of a version are the same
    in each catalog that knows it; who misses a file because rows were moved plans with a newer one.
    """

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._listed = Call(store, partial(generations, store, names.GRID))
        self._reading: Call[None] | None = None

    def read(self, repository: Repository) -> None:
        """Has it read, and does not wait for that."""
        self._reading = Call(self._store, partial(self._read, repository))

    def _read(self, repository: Repository) -> None:
        with suppress(DamageError, StorageError):  # met again by who needs it
            listed = self._listed.result()
            if listed:
                grid = max(listed)
                newest = listed[grid][0]
                catalog = read_catalog(repository, grid, newest, newest)
                if catalog is not None:
                    for part in catalog.parts:
                        part.opened(repository)
                    repository.catalogs.setdefault(grid, catalog)

    def of(self, repository: Repository, grid: VersionId) -> Catalog | None:
        """The catalog of a grid, if it was read; waits for what is on its way."""
        if self._reading is not None:
            self._reading.wait()
        found: Catalog | None = repository.catalogs.get(grid)
        return found


def catalog_ahead(store: BlobStore) -> CatalogAhead | None:
    """Begins to look for catalogs, where that is done beside other calls."""
    return None if caller_of(store) is None else CatalogAhead(store)
