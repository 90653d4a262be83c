"""What a repository holds and whether it is whole, as plain data for people and programs."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from emberkeep._types import Json
from emberkeep.blobs.wrapper import OverlayStore
from emberkeep.checkpoint.contents import checked_rows, dense_tensors
from emberkeep.checkpoint.restore import table_state
from emberkeep.checkpoint.targets import DENSE
from emberkeep.codecs import Codec, NonNegative8, Quantized, Raw, codec_from_dict
from emberkeep.codecs.table_codecs import codec_of
from emberkeep.errors import DamageError, EmberkeepError, NoVersionError, StorageError
from emberkeep.repository import (
    Collected,
    Collector,
    Damage,
    FileRef,
    Manifest,
    Report,
    Repository,
    RetentionPolicy,
    VersionId,
    Writer,
    verify,
)
from emberkeep.repository import names as places
from emberkeep.repository.grid.bundles import Bundle
from emberkeep.repository.grid.catalog import Catalog, files_read, grid_of, newest_catalog, plan
from emberkeep.repository.manifest import needed_by
from emberkeep.repository.pieces import KIND, counts_of
from emberkeep.runtime.crew import Crew
from emberkeep.runtime.pool import Pool

_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSummary:
    """One line of a history. Of a damaged manifest `problem` alone is known.

    `rows` and `nbytes` are what the version wrote itself; `needs` what a restore reads beside it.
    """

    number: int
    epoch: int
    tags: tuple[str, ...]
    created: datetime | None = None
    step: int | None = None
    kind: str | None = None
    layout: str | None = None
    codec: str | None = None
    rows: int | None = None
    tombstones: int | None = None
    nbytes: int | None = None
    needs: tuple[int, ...] = ()
    problem: str | None = None


def list_versions(repository: Repository) -> list[VersionSummary]:
    """The history, oldest first."""
    tags = repository.tags()

    def summary(version: VersionId) -> VersionSummary | None:
        named = tuple(sorted(tag for tag, tagged in tags.items() if tagged == version))
        try:
            manifest = repository.manifest(version)
        except NoVersionError:
            return None  # removed by gc since it was listed
        except DamageError as error:
            return VersionSummary(
                number=version.number, epoch=version.epoch, tags=named, problem=str(error)
            )
        return VersionSummary(
            number=version.number,
            epoch=version.epoch,
            tags=named,
            created=manifest.created,
            step=manifest.step,
            kind=_text(manifest, "kind"),
            layout=_text(manifest, "layout"),
            codec=codec_text(repository, manifest),
            rows=sum(_counts(manifest, "rows").values()),
            tombstones=sum(_counts(manifest, "tombstones").values()),
            nbytes=manifest.nbytes,
            needs=tuple(needed.number for needed in manifest.needs),
        )

    with Crew(_THREADS, "emberkeep-inspect", clock=repository.clock) as pool:
        found = list(pool.map(summary, repository.versions()))
    return [line for line in found if line is not None]


def codec_text(repository: Repository, manifest: Manifest) -> str:
    """How planes are stored, in a few words: "exact", "weight 4 bits", "weight 2 to 8 bits"."""
    codecs = _codecs(manifest)
    found: dict[str, set[int | str]] = defaultdict(set)
    for name, table in repository.tables.items():
        for plane, (width, _) in table["planes"].items():
            codec = codec_of(codecs, name, plane)
            found[plane].add(_stored(codec, width))
    words = []
    for plane, widths in found.items():
        bits_found = sorted(bits for bits in widths if isinstance(bits, int))
        others = sorted(
            "exact" if other == Raw.name else str(other)
            for other in widths
            if isinstance(other, str)
        )
        if bits_found:
            spread = " to ".join(dict.fromkeys([str(bits_found[0]), str(bits_found[-1])]))
            some = f" ({', '.join(others)} in some tables)" if others else ""
            words.append(f"{plane} {spread} bits{some}")
        elif others != ["exact"]:
            words.append(f"{plane} {', '.join(others)}")
    return ", ".join(words) or "exact"


def _stored(codec: Codec, width: int) -> int | str:
    """How many bits each value of a plane of that width takes, or the name of what stores it: rows
    that would not become smaller are stored as they are, and single values in 16 bits."""
    if not isinstance(codec, Quantized | NonNegative8):
        return codec.name
    columns = codec.columns(width)
    if "codes" not in columns:
        return Raw.name
    return codec.bits if isinstance(codec, Quantized) else 8 * columns["codes"] // width


def _codecs(manifest: Manifest) -> dict[str, Codec]:
    if "codecs" not in manifest.described:
        return {}
    specs = manifest.described.object("codecs")
    return {plane: codec_from_dict(specs.plain(plane)) for plane in specs}


def _text(manifest: Manifest, field: str) -> str | None:
    return manifest.described.text(field) if field in manifest.described else None


def describe(repository: Repository, version: VersionId) -> Json:
    """One version, and what the repository's storage is used for, seen from there."""
    chain = repository.chain(version)
    manifest = chain[-1]
    return {
        "repository": {
            "url": repository.store.url,
            "id": repository.id,
            "created": repository.created.isoformat(),
            "forked_from": repository.forked_from,
            "exclusive": repository.exclusive,
            "versions": len(repository.versions()),
            "restores": repository.restores(),
            "exact_restores": repository.restores(exact=True),
        },
        "version": {
            "number": version.number,
            "epoch": version.epoch,
            "created": manifest.created.isoformat(),
            "step": manifest.step,
            "kind": _text(manifest, "kind"),
            "layout": _text(manifest, "layout"),
            "codec": codec_text(repository, manifest),
            "why": _text(manifest, "why"),
            "widths": manifest.layout.get("widths"),
            "shards": manifest.layout.get("shards"),
            "parent": manifest.parent and manifest.parent.number,
            "baseline": manifest.baseline and manifest.baseline.number,
            "chain": [earlier.version.number for earlier in chain],
            "tags": sorted(tag for tag, v in repository.tags().items() if v == version),
            "reader": manifest.reader,
            "user": manifest.user,
            "counters": manifest.counters,
        },
        "tables": [_table(name, spec, manifest, chain) for name, spec in repository.tables.items()],
        "files": [
            {
                "name": file.name,
                "kind": file.kind,
                "nbytes": file.size,
                "shard": file.metadata.get("shard"),
                "rows": sum(counts_of(file, "rows").values()),
            }
            for file in manifest.files
        ],
        "storage": _storage(repository, chain),
    }


def _table(name: str, spec: Json, manifest: Manifest, chain: Sequence[Manifest]) -> Json:
    rows = _counts(manifest, "rows").get(name, 0)
    codecs = _codecs(manifest)
    state = table_state(manifest) if "tables" in manifest.described else {}
    return {
        "name": name,
        "fixed_rows": spec.get("rows"),
        "rows": rows,
        "tombstones": _counts(manifest, "tombstones").get(name, 0),
        "rows_in_chain": sum(_counts(earlier, "rows").get(name, 0) for earlier in chain),
        "state": state.get(name),
        "planes": {
            plane: {
                "width": width,
                "dtype": kind,
                "codec": codec_of(codecs, name, plane).to_dict(),
                # By the codec's own account; rows that it stores raw are larger.
                "nbytes_about": rows * codec_of(codecs, name, plane).nbytes_per_row(width, kind),
            }
            for plane, (width, kind) in spec["planes"].items()
        },
    }


def _storage(repository: Repository, chain: Sequence[Manifest]) -> Json:
    """Objects and bytes of everything below the root, and what data files are there for."""
    own = {file.name for file in chain[-1].files}
    needed = {
        file.name
        for each in chain
        for file in files_read(each, plan(repository, each))
        if each is not chain[-1] or file.name not in own
    }
    objects: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    standing = set(repository.versions())
    grid = grid_of(chain[-1])
    kept = frozenset[str]() if grid is None else newest_catalog(repository, grid).files()
    for info in repository.store.list():
        place = info.name.split("/")[0]
        if place in (places.GRID, places.MOVED) and info.name in needed:
            place = "data of versions that it needs"
        elif place == places.DATA:
            parsed = places.parse_data(info.name)
            if info.name in own:
                place = "data of this version"
            elif info.name in needed:
                place = "data of versions that it needs"
            elif info.name in kept or (parsed is not None and parsed[0] in standing):
                place = "data of other versions"
            else:
                place = "data of no version"
        objects[place] += 1
        nbytes[place] += info.size
    return {
        "objects": sum(objects.values()),
        "nbytes": sum(nbytes.values()),
        "split": {
            place: {"objects": objects[place], "nbytes": nbytes[place]} for place in sorted(objects)
        },
    }


def _counts(manifest: Manifest, what: str) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for file in manifest.of_kind(KIND):
        counts.update(counts_of(file, what))
    return counts


# -- checking ------------------------------------------------------------------------------------


def check(
    repository: Repository,
    versions: Iterable[VersionId] | None = None,
    *,
    deep: bool = True,
    pool: Pool,
) -> Report:
    """`verify`, and when deep also whether every file can be used: rows decode and fit the schema.

    Each file is read once, unless damage is found; then everything is read again to name all of it.
    What a trainer lets go of or moves meanwhile is no damage.
    """
    given = None if versions is None else tuple(versions)
    report = verify(repository, given, deep=False)
    if not deep:
        return report
    chosen = report.versions
    files, users = _files(repository, chosen)
    known = {damage.name for damage in report.damages}
    unusable = _unusable(repository, [f for f in files.values() if f.name not in known], pool)
    if not unusable:
        return report
    if given is None:
        standing = repository.versions()
        chosen = tuple(version for version in chosen if version in standing)
    exact = {damage.name: damage for damage in verify(repository, chosen, deep=True).damages}
    found = {damage.name: damage for damage in report.damages}
    still = _files(repository, chosen)[0]
    for name, problem in unusable.items():
        if name not in still:
            continue
        users_of = tuple(sorted(users[name]))
        found[name] = Damage(name=name, problem=problem, versions=users_of)
    return Report(
        versions=chosen,
        files=report.files,
        nbytes=report.nbytes,
        damages=tuple({**found, **exact}.values()),
        unreferenced=report.unreferenced,
    )


def files_of(repository: Repository, versions: Iterable[VersionId]) -> list[FileRef]:
    """Every file that the versions need, each once, as far as manifests can be read."""
    return list(_files(repository, tuple(versions))[0].values())


def _files(
    repository: Repository, versions: Sequence[VersionId]
) -> tuple[dict[str, FileRef], dict[str, set[VersionId]]]:
    """The files of some versions by name, and for each the versions that need it."""
    manifests: dict[VersionId, Manifest | None] = {}

    def manifest_of(version: VersionId) -> Manifest | None:
        if version not in manifests:
            try:
                manifests[version] = repository.manifest(version)
            except (DamageError, NoVersionError):
                manifests[version] = None
        return manifests[version]

    catalogs: dict[VersionId, Catalog] = {}

    def files_needed(manifest: Manifest | None) -> tuple[FileRef, ...]:
        if manifest is None:
            return ()
        grid = grid_of(manifest)
        try:
            if grid is not None and grid not in catalogs:
                catalogs[grid] = newest_catalog(repository, grid)
            known = None if grid is None else catalogs[grid]
            return files_read(manifest, plan(repository, manifest, known))
        except (DamageError, NoVersionError):
            return ()

    def needs(version: VersionId) -> tuple[VersionId, ...]:
        manifest = manifest_of(version)
        return () if manifest is None else manifest.needs

    files: dict[str, FileRef] = {}
    users: dict[str, set[VersionId]] = defaultdict(set)
    for version in versions:
        for needed in needed_by([version], needs):
            for file in files_needed(manifest_of(needed)):
                files[file.name] = _joined(files.get(file.name), file)
                users[file.name].add(version)
    return files, users


def _joined(known: FileRef | None, file: FileRef) -> FileRef:
    """A file with the pieces that either of two versions reads in it."""
    pieces, others = Bundle.of(file), None if known is None else Bundle.of(known)
    if pieces is None or others is None:
        return file
    found = {piece.head: piece for piece in (*others.pieces, *pieces.pieces)}
    return pieces.with_pieces(found[head] for head in sorted(found)).reference()


def _unusable(repository: Repository, files: Sequence[FileRef], pool: Pool) -> dict[str, str]:
    """What is wrong with each file that cannot be used."""
    stop = threading.Event()

    def problem(file: FileRef) -> str | None:
        try:
            for _ in _content(repository, file, pool):
                if stop.is_set():
                    return None
        except StorageError:
            raise  # the store did not answer, which says nothing about the file
        except EmberkeepError as error:
            return str(error)
        return None

    executor = Crew(_THREADS, "emberkeep-inspect", clock=repository.clock)
    try:
        problems = list(executor.map(problem, files))
    finally:
        # After an interrupt the files under way end at their next chunk, the others never begin.
        stop.set()
        executor.shutdown(cancel_futures=True)
    return {
        file.name: found for file, found in zip(files, problems, strict=True) if found is not None
    }


def _content(repository: Repository, file: FileRef, pool: Pool) -> Iterable[Any]:
    """Goes through a file as a restore would; digests are checked on the way."""
    if file.kind == KIND:
        yield from checked_rows(repository, file, pool)
    elif file.kind == DENSE:
        yield dense_tensors(file.name, repository.read(file))
    else:
        yield from repository.stream(file)


# -- what gc would do ----------------------------------------------------------------------------


def plan_collection(
    repository: Repository, policy: RetentionPolicy, *, grace: timedelta
) -> Collected:
    """What a gc of the next writer would do: it is run, and nothing that it writes is kept."""
    tried = Repository.open(OverlayStore(repository.store), clock=repository.clock)
    return Collector(Writer.open(tried), policy=policy, grace=grace).collect()


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterActivity:
    """The newest writer, and when it last showed life: opened, or committed."""

    epoch: int
    host: str
    pid: int
    last_seen: datetime


def newest_writer(repository: Repository) -> WriterActivity | None:
    """Who wrote last; None if nobody has opened the repository for writing."""
    listing = repository.history(dated=True).listing
    if not listing.epoch:
        return None
    name = places.writer_name(listing.epoch)
    seen = [listing.modified(v) for v in listing.manifests if v.epoch == listing.epoch]
    seen += [info.modified for info in repository.store.list(places.WRITERS) if info.name == name]
    host, pid = "unknown", 0
    with suppress(DamageError):
        body = repository.document(name, "writer")
        if body is not None:
            host, pid = body.text("host"), body.number("pid")
    return WriterActivity(
        epoch=listing.epoch,
        host=host,
        pid=pid,
        last_seen=max(seen),
    )
