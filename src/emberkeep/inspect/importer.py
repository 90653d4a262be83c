"""Rows of other systems as one version of a repository.

Files are read once, in order, into buckets on disk (`staged_rows`); then the rows become one
version, by the same commit as any other. Until that nobody sees any of them. An import that ended
half-way, however, goes on from where its files were read to when it is started again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from emberkeep._types import I64, Array, Json, Planes
from emberkeep.blobs import BlobStore
from emberkeep.checkpoint.contents import Hold, merged_rows
from emberkeep.checkpoint.restore import shortened
from emberkeep.checkpoint.targets import DENSE
from emberkeep.errors import ConfigError, DataError, EmberkeepError, StorageError
from emberkeep.inspect.array_files import is_dump, open_dump, open_safetensors
from emberkeep.inspect.arrow_files import open_columns
from emberkeep.inspect.intake import USED, Choice, Intake, intakes, schema_of
from emberkeep.inspect.joined_rows import Joiner, TableTotals
from emberkeep.inspect.plane_names import WEIGHT
from emberkeep.inspect.repository_rows import open_rows, row_counts
from emberkeep.inspect.row_sources import Source, as_plane, reading
from emberkeep.inspect.staged_rows import Family, Stage, bucket_count
from emberkeep.inspect.torch_files import is_checkpoint, open_checkpoint, open_state_dict
from emberkeep.repository import Manifest, Repository, Writer
from emberkeep.repository.grid.catalog import grid_of
from emberkeep.repository.pieces import KIND, PIECE_NBYTES, SUFFIX, pieces
from emberkeep.repository.policies import ENDLESS
from emberkeep.rows.snapshot import Chunk
from emberkeep.rows.tracker import SINCE_VERSION
from emberkeep.runtime.pool import Pool

JOURNAL_NBYTES = 256 * 2**20
"""So much is read between two entries of the journal."""

_ROOT = "repository.json"

Advance = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import has brought: the version, and how many rows of each table; of which `new`,
    where that was looked at: not of fixed tables whose rows came whole."""

    manifest: Manifest
    rows: Mapping[str, int]
    new: Mapping[str, int]
    filled: Mapping[str, Sequence[str]]
    """Planes that new rows came without, by table: they begin as `fill` says."""
    passed_over: Sequence[str]
    kinds: Sequence[str]
    created: bool
    resumed: bool
    whole: bool
    """Whether the version holds all rows, not the imported ones alone."""
    again: bool = False
    """Whether the newest version was this import already: nothing was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """An import that was looked at: nothing is read or written yet."""

    store: BlobStore
    repository: Repository | None
    schema: Json
    sources: Sequence[Source]
    intakes: Sequence[Intake]
    passed_over: Sequence[str]
    choice: Choice
    pool: Pool

    @property
    def tables(self) -> Mapping[str, Json]:
        tables: Mapping[str, Json] = self.schema["tables"]
        return tables

    @property
    def nbytes(self) -> int:
        """About how much will be read."""
        return sum(intake.part.rows * intake.part.row_nbytes for intake in self.intakes)

    def run(
        self, scratch: Path, *, advance: Advance = lambda nbytes: None,
        journal_nbytes: int = JOURNAL_NBYTES, may_write: Callable[[], object] = lambda: None,
    ) -> Imported:  # fmt: skip
        """Reads the files into `scratch`, and commits the version. Errors that are not the fault
        of the files leave `scratch` as it is, to go on from. `advance` hears of bytes that were
        read, and of those that were written. `may_write` is asked when all was read, and raises
        why not: somebody may have started to train meanwhile."""
        done = self._done()
        if done is not None:
            Stage.discard(scratch, self._plan())  # it was killed before it could
            return done
        with Stage.open(scratch) as stage:
            families = self._families()
            resumed = stage.begin(self._staged(families), families)
            with _removed_if_refused(stage):
                self._stage(stage, families, advance, journal_nbytes)
            may_write()
            with _removed_if_refused(stage):
                imported = self._commit(stage, advance, resumed=resumed)
            stage.remove()
            return imported

    def _plan(self) -> Json:
        """What makes an import the same as one that was started before."""
        choice = self.choice
        plan: Json = {
            "url": self.store.url,
            "schema": self.schema,
            "sources": [source.fingerprint for source in self.sources],
            "map": choice.tables.pairs,
            "choice": [choice.table, choice.dim_change, dict(choice.fill)],
            "parts": [[i.part.file, i.part.path, i.part.rows, i.table] for i in self.intakes],
        }
        loaded: Json = json.loads(json.dumps(plan))
        return loaded

    def _staged(self, families: Sequence[Family]) -> Json:
        """The plan, and what rows that are on disk already depend on beside it."""
        orders = [list(source.order) for source in self.sources]
        return {**self._plan(), "orders": orders, "buckets": [f.buckets for f in families]}

    def _families(self) -> list[Family]:
        nbytes = self._held_nbytes()
        for intake in self.intakes:
            nbytes[intake.table] += intake.part.rows * intake.part.row_nbytes
        found: list[Family] = []
        for intake in self.intakes:
            table = self.tables[intake.table]
            family = Family(
                table=intake.table,
                planes={p: tuple(table["planes"][p]) for p in sorted(intake.planes.values())},
                limit=table.get("rows"),
                buckets=bucket_count(nbytes[intake.table]),
            )
            if family not in found:
                found.append(family)
        return found

    def _held_nbytes(self) -> dict[str, int]:
        """About what the rows of the repository take beside those of the files, by table: they are
        joined by bucket, too."""
        nbytes = dict.fromkeys(self.tables, 0)
        newest = None if self.repository is None else self.repository.newest_whole()
        if self.repository is not None and newest is not None:
            counts = row_counts(self.repository, self.repository.chain(newest))
            for name, table in self.tables.items():
                widths = [
                    width * np.dtype(kind).itemsize for width, kind in table["planes"].values()
                ]
                nbytes[name] = counts[name] * (8 + sum(widths))
        return nbytes

    # -- reading -------------------------------------------------------------------------------

    def _stage(
        self, stage: Stage, families: Sequence[Family], advance: Advance, journal_nbytes: int
    ) -> None:
        first, start = stage.cursor
        done = sum(i.part.rows * i.part.row_nbytes for i in self.intakes[:first])
        if first < len(self.intakes):
            done += start * self.intakes[first].part.row_nbytes
        advance(done)
        unnoted = 0
        for at in range(first, len(self.intakes)):
            intake = self.intakes[at]
            planes = sorted(intake.planes.values())
            family = next(
                f
                for f, known in enumerate(families)
                if known.table == intake.table and list(known.planes) == planes
            )
            row = start if at == first else 0
            with reading(intake.part.file):
                for ids, values in intake.part.chunks(row):
                    own = self._as_stored(intake, ids, values)
                    unnoted += stage.append(family, ids, own)
                    row += ids.size
                    advance(ids.size * intake.part.row_nbytes)
                    if unnoted >= journal_nbytes:
                        stage.note(at, row)
                        unnoted = 0
            if row != intake.part.rows and intake.part.exact:
                raise DataError(
                    f"{intake.part.file}: {intake.part.path} has {row} rows, not "
                    f"{intake.part.rows}: did it change while it was read?"
                )
        stage.note(len(self.intakes), 0)

    def _as_stored(self, intake: Intake, ids: I64, values: Mapping[str, Array]) -> Planes:
        """Rows as the table has them; what it cannot hold is refused with the file's name."""
        part, table = intake.part, self.tables[intake.table]
        limit = table.get("rows")
        if limit is not None and ids.size and not 0 <= ids.min() <= ids.max() < limit:
            wrong = int(ids[(ids < 0) | (ids >= limit)][0])
            raise DataError(
                f"{part.file}: id {wrong} of {part.path} is outside table {intake.table!r}, which "
                f"has rows 0..{limit - 1}"
            )
        own: Planes = {}
        for word, plane in intake.planes.items():
            width, kind = table["planes"][plane]
            found = as_plane(part.file, f"{word} of {part.path}", values[word], np.dtype(kind))
            if found.shape[1] < width:
                wider = np.full((ids.size, width), self.choice.fill.get(plane, 0), found.dtype)
                wider[:, : found.shape[1]] = found
                found = wider
            own[plane] = found[:, :width]
        return own

    # -- writing -------------------------------------------------------------------------------

    def _identity(self) -> str:
        plan = json.dumps(self._plan(), sort_keys=True)
        return hashlib.blake2b(plan.encode(), digest_size=16).hexdigest()

    def _done(self) -> Imported | None:
        """The newest version, if it is this very import: one that was killed after its commit does
        not leave a second version when it is started again."""
        newest = None if self.repository is None else self.repository.newest_whole()
        if self.repository is None or newest is None:
            return None
        manifest = self.repository.manifest(newest)
        about = manifest.layout.get("imported")
        if not isinstance(about, dict) or about.get("id") != self._identity():
            return None
        return Imported(
            manifest=manifest, rows=about["rows"], new={}, filled={},
            passed_over=self.passed_over, kinds=[source.kind for source in self.sources],
            created=False, resumed=False, whole=manifest.layout.get("kind") == "full", again=True,
        )  # fmt: skip

    def _commit(self, stage: Stage, advance: Advance, *, resumed: bool) -> Imported:
        repository = self.repository
        if repository is None:
            # Rows are refused before there is anything to remove again: what lies below the root
            # may be somebody else's, and so may the repository by then.
            for _ in self._joiner(stage, (), union=False).chunks():
                pass
            repository = Repository.create(self.store, schema=self.schema)
        with ExitStack() as stack:
            writer = Writer.open(repository)
            newest = repository.newest_whole()
            chain: Sequence[Manifest] = ()
            if newest is not None:
                stack.enter_context(Hold(repository, newest))
                chain = repository.chain(newest)
            grid = bool(chain) and grid_of(chain[-1]) is not None
            joiner = self._joiner(stage, chain, union=grid)
            if not chain:
                for intake in self.intakes:  # bias corrections go on where they were
                    state = joiner.state[intake.table]
                    state["steps"] = max(state["steps"], intake.part.steps)
            if chain:
                self._stage_held(stage, joiner, repository, chain)
            rows: Iterator[Chunk] = joiner.chunks()
            if grid:
                rows = _chained(rows, self._others(repository, chain, joiner.imported))
            needs = [] if newest is None or grid else [newest]
            with writer.begin(needs=needs) as draft:
                for piece in pieces(
                    _counted(rows, advance), {}, self.pool, piece_nbytes=PIECE_NBYTES, metadata={}
                ):
                    draft.add(piece.stream(), kind=KIND, suffix=SUFFIX, metadata=piece.metadata)
                before = chain[-1] if chain else None
                for file in before.of_kind(DENSE) if before else ():
                    draft.add(repository.stream(file), kind=DENSE, suffix="safetensors")
                layout = _layout(before, whole=grid or before is None)
                layout["tables"] = joiner.state
                layout["imported"] = {"id": self._identity(), "rows": joiner.totals.rows}
                manifest = draft.commit(
                    step=before.step if before else 0,
                    baseline=None if grid or before is None else before.baseline or before.version,
                    layout=layout,
                    reader=before.reader if before else None,
                    user=before.user if before else None,
                    counters=before.counters if before else None,
                )
        totals: TableTotals = joiner.totals
        return Imported(
            manifest=manifest, rows=totals.rows, new=totals.new, filled=totals.filled,
            passed_over=self.passed_over, kinds=[source.kind for source in self.sources],
            created=self.repository is None, resumed=resumed, whole=grid or before is None,
        )  # fmt: skip

    def _joiner(self, stage: Stage, chain: Sequence[Manifest], *, union: bool) -> Joiner:
        return Joiner(
            stage, self.tables, fill=self.choice.fill, union=union, first=not chain,
            state=_state(self.tables, chain),
        )  # fmt: skip

    def _stage_held(
        self, stage: Stage, joiner: Joiner, repository: Repository, chain: Sequence[Manifest]
    ) -> None:
        """Rows that the repository has already, as far as they are needed: planes that the files do
        not bring, and which ids of dynamic tables are new."""
        families = {}
        for table, planes in joiner.needed().items():
            own = self.tables[table]
            families[table] = stage.add_family(
                Family(
                    table=table,
                    planes={plane: tuple(own["planes"][plane]) for plane in planes},
                    limit=own.get("rows"),
                    buckets=joiner.buckets(table),
                    held=True,
                )
            )
        if not families:
            return
        for _, chunk in merged_rows(repository, chain, self.pool, tables=set(families)):
            if chunk.planes is not None:
                stage.append(families[chunk.table], chunk.ids, chunk.planes)

    def _others(
        self, repository: Repository, chain: Sequence[Manifest], imported: Sequence[str]
    ) -> Iterator[Chunk]:
        rest = set(self.tables) - set(imported)
        for _, chunk in merged_rows(repository, chain, self.pool, tables=rest):
            if chunk.planes is not None:
                order = np.argsort(chunk.ids)  # rows of a grid come as its pieces stand
                planes = {name: values[order] for name, values in chunk.planes.items()}
                yield Chunk(chunk.table, chunk.ids[order], planes)


def look(
    store: BlobStore, files: Sequence[str], choice: Choice, pool: Pool, *, init: bool = False,
    ids: str | None = None, vector: str | None = None, version: str | None = None,
) -> Import:  # fmt: skip
    """Looks at the files and the repository; refuses what cannot be imported."""
    if not files:
        raise ConfigError("name at least one file or directory by --from")
    for plane, value in choice.fill.items():
        if not np.isfinite(value):
            raise ConfigError(f"--fill {plane}={value}: rows must be finite")
    repository = None
    if init and not Repository.exists(store):
        pass
    else:
        repository = Repository.open(store)
    sources = []
    for file in files:
        with reading(file):
            sources.append(_open(file, ids=ids, vector=vector, version=version))
    if version is not None and all(source.kind != "repository" for source in sources):
        raise ConfigError(
            f"--version names a version of another repository; {', '.join(files)} is none"
        )
    if not any(part.rows for source in sources for part in source.parts):
        others = [name for source in sources for name in source.passed_over]
        raise DataError(
            f"nothing to import: {', '.join(files)} holds no rows"
            + (f"; there are {shortened(others, most=4)}" if others else "")
        )
    schema = schema_of(sources, choice) if repository is None else repository.schema
    tables: Mapping[str, Json] = schema["tables"] if repository is None else repository.tables
    found, passed_over = intakes(sources, choice, tables)
    planes = {plane for table in tables.values() for plane in table["planes"]} - {WEIGHT, USED}
    for plane in choice.fill:
        if plane not in planes:
            raise ConfigError(
                f"--fill: there is no plane {plane!r}; there are {', '.join(sorted(planes))}"
            )
    return Import(
        store=store, repository=repository, schema=schema, sources=sources, intakes=found,
        passed_over=passed_over, choice=choice, pool=pool,
    )  # fmt: skip


def _open(name: str, *, ids: str | None, vector: str | None, version: str | None) -> Source:
    """A source by what it is, whatever its name says."""
    if "://" in name:
        return open_rows(name, version)
    path = Path(name)
    if path.is_dir():
        return _open_directory(path, ids, vector, version)
    with open(path, "rb") as opened:
        start = opened.read(9)
    if start.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        return open_columns([path], ids=ids, vector=vector)
    if ids or vector:
        raise ConfigError(f"--ids and --vector name columns; {path} is no Parquet or Arrow file")
    if start[8:] == b"{":  # before pickles: the length of a header may begin as one does
        return open_safetensors([path])
    if start.startswith((b"PK\x03\x04", b"\x80")):
        return open_state_dict(path)
    raise DataError(
        f"{path} is none of safetensors, a torch state dict, Parquet or Arrow: check --from"
    )


def _open_directory(path: Path, ids: str | None, vector: str | None, version: str | None) -> Source:
    if (path / _ROOT).exists():
        return open_rows(str(path), version)
    if is_checkpoint(path):
        return open_checkpoint(path)
    if is_dump(path):
        return open_dump(path)
    if (path / "version.json").exists():
        path = path / "tables"
    for pattern, opener in (
        ("*.parquet", lambda files: open_columns(files, ids=ids, vector=vector)),
        ("*.arrow", lambda files: open_columns(files, ids=ids, vector=vector)),
        ("*.safetensors", open_safetensors),
    ):
        found = sorted(file for file in path.glob(pattern) if file.is_file())
        if found:
            return opener(found)
    raise DataError(
        f"{path} is no repository, DCP checkpoint, dynamicemb dump, nor does it hold .parquet, "
        ".arrow or .safetensors files"
    )


def _state(tables: Mapping[str, Json], chain: Sequence[Manifest]) -> Json:
    """What tables know beside their rows, before the import."""
    if chain:
        return chain[-1].described.plain("tables")
    return {
        name: {
            "steps": 0, "tick": 0, "ticks": [0], **({"rows": [0]} if table["rows"] is None else {})
        }
        for name, table in tables.items()
    }  # fmt: skip


def _layout(before: Manifest | None, *, whole: bool) -> Json:
    """How the version is laid out: rows on top of the version before, or all of them."""
    layout: Json = {
        "kind": "full" if whole else SINCE_VERSION,
        "layout": "full" if before is None or whole else before.described.text("layout"),
        "shards": before.described.number("shards", least=1) if before else 1,
        "codecs": {},
        "sizes": [],
        "baseline_nbytes": None,
    }
    if not whole and before is not None:
        nbytes = sum(file.size for file in before.of_kind(KIND))
        if before.described.text("kind") == "full":
            layout["baseline_nbytes"] = max(1, nbytes)
        else:
            base = before.described.number("baseline_nbytes", least=1)
            layout["baseline_nbytes"] = base
            if layout["layout"] not in ENDLESS:
                layout["sizes"] = [*before.described.list_of("sizes", float), nbytes / base]
    return layout


def _counted(chunks: Iterator[Chunk], advance: Advance) -> Iterator[Chunk]:
    for chunk in chunks:
        yield chunk
        advance(8 * chunk.ids.size + sum(v.nbytes for v in (chunk.planes or {}).values()))


def _chained(*many: Iterator[Chunk]) -> Iterator[Chunk]:
    for chunks in many:
        yield from chunks


@contextmanager
def _removed_if_refused(stage: Stage) -> Iterator[None]:
    """Files that are refused are refused again; after a failed store an import can go on."""
    try:
        yield
    except StorageError:
        raise
    except EmberkeepError:
        stage.remove()
        raise
