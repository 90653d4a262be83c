"""A run without a network that is saved as a grid, beside a perfect copy of every version."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np

from emberkeep.blobs import BlobStore, MemoryStore
from emberkeep.codecs import Quantized
from emberkeep.repository import Collector, KeepAll, Manifest, Repository, RetentionPolicy, Writer
from emberkeep.repository.grid.bundles import BundleStream, streams
from emberkeep.repository.grid.catalog import grid_of, newest_catalog, plan
from emberkeep.repository.grid.extraction import Extractor
from emberkeep.repository.grid.version_rows import rows_of_plan
from emberkeep.repository.pieces import KIND
from emberkeep.repository.policies import Grid
from emberkeep.rows.snapshot import Chunk
from emberkeep.runtime.pool import Pool

POOL = Pool(1)
IDS = {"fixed": 240, "dynamic": 90, "small": 5}
DIM = {"fixed": 6, "dynamic": 8, "small": 6}
SCHEMA = {
    "tables": {
        name: {
            "rows": None if name == "dynamic" else IDS[name],
            "planes": {"weight": [DIM[name], "float32"], "accumulator": [1, "float32"]},
            "origin": None,
        }
        for name in IDS
    }
}
Rows = dict[tuple[str, int], bytes]


class World:
    """Tables as a dictionary from (table, id) to the bytes of the row, and their repository.

    Every version is written as a checkpointer would; `shadows` holds it as it was. With `bits` the
    copy is of what the codec makes of a row: the same bits whenever the row is restored.
    """

    def __init__(
        self, seed: int, rules: Grid, store: BlobStore | None = None, bits: int | None = None
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.rules = rules
        self.store = store or MemoryStore()
        self.pool = Pool(1)
        self.codecs: dict[str, Any] = {} if bits is None else {"weight": Quantized(bits=bits)}
        self.rows: Rows = {}
        self.shadows: dict[int, Rows] = {}
        self.changed: set[tuple[str, int]] = set()
        self.newest: Manifest | None = None
        self.repository = Repository.create(self.store, schema=SCHEMA)
        self.open()

    def open(self) -> None:
        """A process takes over; the one before, if any, knows nothing of it."""
        self.writer = Writer.open(self.repository)
        self.extractor: Extractor | None = None

    # -- training ----------------------------------------------------------------------------

    def train(self, how: str = "skewed") -> None:
        names = list(IDS)
        for name in names:
            most = IDS[name]
            if how == "all":
                ids = np.arange(most)
            elif how == "one":
                ids = np.array([0]) if name == "fixed" else np.empty(0, np.int64)
            elif how == "sweep":
                first = 30 * len(self.shadows) % most
                ids = np.arange(first, min(most, first + 30))
            else:
                ids = np.unique((most * self.random.random(25) ** 4).astype(np.int64))
            for identity in ids.tolist():
                self._write(name, identity)
        if self.random.random() < 0.4:
            name = names[self.random.integers(len(names))]
            for identity in self.random.integers(0, IDS[name], 8).tolist():
                if self.rows.pop((name, identity), None) is not None:
                    self.changed.add((name, identity))

    def _write(self, table: str, identity: int) -> None:
        values = self.random.standard_normal(DIM[table] + 1).astype(np.float32)
        if self.random.random() < 0.03:
            values[0] = np.nan  # a row that no lossy codec takes
        coded = self.codecs.get("weight")
        if coded is not None:
            weight = values[:-1].reshape(1, -1)
            values[:-1] = coded.decode(coded.encode(weight, POOL), rows=1, width=DIM[table])
        self.rows[table, identity] = values.tobytes()
        self.changed.add((table, identity))

    # -- saving ------------------------------------------------------------------------------

    def save(self, *, baseline: bool = False) -> Manifest:
        self.writer.settle()
        before = None if baseline else self.newest
        chosen = set(self.rows) if before is None else self.changed
        with self.writer.begin() as draft:
            for bundle in self._bundles(chosen, draft.version.number):
                draft.add(bundle.stream(), kind=KIND, suffix="grid", metadata=bundle.metadata)
            grid = draft.version if before is None else grid_of(before)
            manifest = draft.commit(
                step=1,
                layout={
                    "kind": "full" if before is None else "version",
                    "grid": str(grid),
                    "before": None if before is None else str(before.version),
                },
            )
        self.committed(manifest)
        return manifest

    def committed(self, manifest: Manifest) -> None:
        self.newest = manifest
        self.changed = set()
        self.shadows[manifest.version.number] = dict(self.rows)

    def _bundles(self, chosen: set[tuple[str, int]], birth: int) -> Iterator[BundleStream]:
        return streams(
            self._chunks(chosen), self.codecs, self.pool, birth=birth, tables=list(IDS),
            file_nbytes=1500, metadata={"shard": 0},
        )  # fmt: skip

    def _chunks(self, chosen: set[tuple[str, int]]) -> Any:
        for table, dim in DIM.items():
            ids = np.array(sorted(i for t, i in chosen if t == table), np.int64)
            present = np.array([(table, i) in self.rows for i in ids.tolist()], bool)
            if (~present).any():
                yield Chunk(table, ids[~present], None)
            # Small chunks, as copy on write leaves them: tables come several times.
            for part in np.array_split(ids[present], 2):
                if part.size:
                    flat = [np.frombuffer(self.rows[table, i], np.float32) for i in part.tolist()]
                    values = np.stack(flat)
                    planes = {"weight": values[:, :dim].copy(), "accumulator": values[:, dim:]}
                    yield Chunk(table, part, planes)

    def extract(self, *, split: bool = True) -> None:
        assert self.newest is not None
        grid = grid_of(self.newest)
        assert grid is not None
        if self.extractor is None or self.extractor.grid != grid:
            self.extractor = Extractor(self.writer, grid, self.rules)
        self.extractor.settle(self.newest, split=split)

    def collect(self, policy: RetentionPolicy | None = None) -> None:
        """gc; shadows of versions that it removed are forgotten."""
        Collector(self.writer, policy=policy or KeepAll(), grace=timedelta(0)).collect()

    # -- checking ----------------------------------------------------------------------------

    def restored(self, number: int, repository: Repository | None = None) -> Rows:
        repository = repository or self.repository
        manifest = repository.manifest(number)
        planned = plan(repository, manifest)
        assert planned is not None
        found: Rows = {}
        for chunk in rows_of_plan(repository, planned, self.pool):
            if chunk.planes is None:
                continue
            joined = np.concatenate([chunk.planes["weight"], chunk.planes["accumulator"]], axis=1)
            for identity, row in zip(chunk.ids.tolist(), joined, strict=True):
                assert (chunk.table, identity) not in found, "a row came twice"
                found[chunk.table, identity] = row.tobytes()
        return found

    def check(self, repository: Repository | None = None) -> None:
        """Every version that stands is what it was, bit for bit."""
        repository = repository or Repository.open(self.store)
        versions = repository.versions()
        for version in versions:
            if version.number in self.shadows:
                assert self.restored(version.number, repository) == self.shadows[version.number]
        if self.newest is not None:
            assert self.newest.version in versions

    def stored_nbytes(self) -> int:
        files = (info for place in ("data", "grid", "moved") for info in self.store.list(place))
        return sum(info.size for info in files if info.name.endswith(".grid"))

    def unused_files(self) -> set[str]:
        """Row files that no standing version reads, and segments that no catalog names."""
        used: set[str] = set()
        for version in self.repository.versions():
            planned = plan(self.repository, self.repository.manifest(version))
            assert planned is not None
            used |= {bundle.name for bundle in planned.bundles}
            used |= newest_catalog(self.repository, planned.catalog.grid).files()
        files = {info.name for place in ("data", "moved") for info in self.store.list(place)}
        return {name for name in files if name.endswith((".grid", ".catalog"))} - used
