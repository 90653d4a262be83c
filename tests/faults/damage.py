"""Every kind of stored file, damaged in every way, and who notices.

`damage_cases` makes small healthy repositories of every layout, and tiers, damages one object after
the other and counts. A case is *detected* if `verify` names damage, or if reading raises a clear
error where it would have needed the object. It is a failure if a version comes back with other
rows than it was saved with, if an error is not one of ours, or if a version that does not need the
object cannot be read. What nobody can notice is stated in `UNDETECTABLE`, with the reason.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint.contents import dense_bytes, merged_rows
from emberkeep.checkpoint.restore import load
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import DamageError, EmberkeepError, NoVersionError, StateError
from emberkeep.repository import Pin, Repository, names, verify
from emberkeep.repository.grid.catalog import files_read, plan
from emberkeep.repository.marks import put_mark
from emberkeep.runtime.pool import Pool
from emberkeep.tables import Adam
from emberkeep.tiers import durable_open
from emberkeep.tiers.decisions import Decisions
from emberkeep.tiers.superblock import SLOT_NBYTES, START
from tests.contracts.engine import state
from tests.nightly import some
from tests.unit.keeper.test_tier_keeper import Model as TierModel
from tests.unit.keeper.test_tier_keeper import Run as TierRun
from tests.unit.repositories import TABLES, Run
from tests.unit.tiers.test_tiered_slab import Unsynced

LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {"layout": "full"},
    "one-shot": {"layout": "one_shot"},
    "intermittent": {"layout": "intermittent", "shards": 3},
    "consecutive": {"layout": "consecutive"},
    "consecutive, 4 bits": {"layout": "consecutive", "bits": 4},
    "grid": {"layout": "grid"},
    "grid, 8 bits": {"layout": "grid", "bits": 8, "shards": 1},
}
POOL = Pool(1)

# (kind, way) -> why nobody can notice. Every other case must be.
_OWNED = "its owner may delete it at any time: what it held is not held any more"
_UNLISTED = "no document names it: `verify` lists it as unreferenced, gc removes it"
UNDETECTABLE: dict[tuple[str, str], str] = {
    ("tag", "delete"): _OWNED,
    ("pin", "delete"): _OWNED,
    ("mark", "delete"): _OWNED,
    ("restore", "delete"): _OWNED,
    ("piece", "duplicate"): _UNLISTED,
    ("bundle", "duplicate"): _UNLISTED,
    ("segment", "duplicate"): _UNLISTED,
    ("dense", "duplicate"): _UNLISTED,
    ("newest manifest", "delete"): (
        "nothing else speaks of the newest version; its files are listed as unreferenced"
    ),
    ("seal", "delete"): (
        "a second copy of a claim, read only if that is damaged; nobody can commit under its name, "
        "because the epoch is not the newest"
    ),
    ("older catalog", "delete"): "gc removes it as soon as a newer one is whole",
}


@dataclass
class Outcome:
    """What damage of one kind and way came to."""

    cases: int = 0
    by_verify: int = 0
    by_reading: int = 0
    undetected: int = 0
    undetectable: int = 0
    failures: list[str] = field(default_factory=list)

    def __iadd__(self, other: Outcome) -> Outcome:
        for name in ("cases", "by_verify", "by_reading", "undetected", "undetectable", "failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


# -- healthy repositories ------------------------------------------------------------------------


@dataclass(frozen=True)
class Healthy:
    """A repository as bytes, and what its versions hold."""

    objects: Mapping[str, bytes]
    truth: Mapping[int, str]

    def store(self, changes: Mapping[str, bytes | None] | None = None) -> MemoryStore:
        store = MemoryStore()
        for name, content in {**self.objects, **(changes or {})}.items():
            if content is not None:
                store.put(name, content)
        return store


def read_version(repository: Repository, number: int) -> str:
    """A digest of every row of a version and of its dense state, read as an export reads it."""
    chain = repository.chain(number)
    tables: dict[str, list[Any]] = {}
    for _, chunk in merged_rows(repository, chain, POOL):
        if chunk.planes is not None:
            tables.setdefault(chunk.table, []).append((chunk.ids, chunk.planes))
    digest = xxhash.xxh3_128(dense_bytes(repository, chain[-1]) or b"")
    for table in sorted(tables):
        ids = np.concatenate([part for part, _ in tables[table]])
        order = np.argsort(ids)
        digest.update(table.encode() + ids[order].tobytes())
        for plane in sorted(tables[table][0][1]):
            values = np.concatenate([planes[plane] for _, planes in tables[table]])
            digest.update(plane.encode() + values[order].tobytes())
    return str(digest.hexdigest())


def restore_version(repository: Repository, number: int, shards: int = 2) -> LocalCluster:
    """A version, brought back as a resume does."""
    cluster = local(shards=shards, threads=1).open(TABLES, Adam(lr=0.05, step="row"), seed=3)
    load(repository, repository.version(number), cluster, POOL)
    return cluster


@cache
def healthy(label: str) -> Healthy:
    """Five versions of three epochs, two of them tagged and pinned; marks, records of restores; a
    grid whose rows were moved, but for those of its last version."""
    run = Run(**LAYOUTS[label])
    run.save()
    run.save()
    for _ in range(2):
        run.keeper.close()
        run.reopen()
        run.save()
        run.keeper.settle()
    run.keeper.close()
    repository = run.repository
    versions = repository.versions()
    for at, version in enumerate(versions[-2:]):
        repository.tag(f"tag{at}", version)
        Pin(repository, version, lifetime=timedelta(days=100))
        repository.record_restore(version)
        key = f"{at + 1:06d}-0123456789abcdef"
        put_mark(repository.store, repository.id, key, frozenset(), decision=False)
    objects = {info.name: run.store.get(info.name) for info in run.store.list()}
    truth = {version.number: read_version(repository, version.number) for version in versions}
    return Healthy(objects, truth)


def kind_of(healthy: Healthy, name: str) -> str:
    """The kind of an object; the newest manifest and catalogs that no version needs are kinds."""
    place = name.split("/")[0]
    if place == "versions":
        version = names.parse_version(name)
        if version is None or version[1] != "json":
            return "note"
        if b'"kind":"seal"' in healthy.objects[name]:
            return "seal"
        return "newest manifest" if version[0].number == max(healthy.truth) else "manifest"
    if place == "grid" and name.endswith(".json"):
        return "catalog" if name == max(_catalogs(healthy, name)) else "older catalog"
    if name.endswith(".catalog"):
        newest = max(_catalogs(healthy, name.replace("moved/", "grid/", 1)))
        listed = name.encode() in healthy.objects[newest]
        return "segment" if listed else "older segment"
    if place in ("data", "grid", "moved"):
        return {"arrow": "piece", "grid": "bundle"}.get(name.rsplit(".")[-1], "dense")
    if place == "writers":
        return "newest claim" if name == max(_of(healthy, "writers")) else "claim"
    return {"tags": "tag", "pins": "pin", "condemned": "mark", "restores": "restore"}.get(
        place, place
    )


def _of(healthy: Healthy, place: str) -> list[str]:
    return sorted(name for name in healthy.objects if name.startswith(f"{place}/"))


def _catalogs(healthy: Healthy, name: str) -> list[str]:
    beside = name.rpartition("/")[0]
    return [each for each in _of(healthy, beside) if each.endswith(".json")]


# -- damage --------------------------------------------------------------------------------------


def ways(healthy: Healthy, name: str) -> Iterator[tuple[str, dict[str, bytes | None]]]:
    """Everything that is done to one object: how it is called, and what changes."""
    content = healthy.objects[name]
    size = len(content)
    places = {"start": 0, "digest": 14, "head": 60, "middle": size // 2, "end": size - 1}
    for place, at in places.items():
        if at < size:
            flipped = bytearray(content)
            flipped[at] ^= 1
            yield f"flip {place}", {name: bytes(flipped)}
    if size > 1:
        yield "truncate", {name: content[: size // 2]}
        yield "truncate one byte", {name: content[:-1]}
    yield "empty", {name: b""} if size else {name: b"\0"}
    zeroed = bytearray(content)
    at = min(size // 3, max(0, size - 4096))
    zeroed[at : at + 4096] = bytes(min(4096, size - at))
    if zeroed != content:
        yield "zero 4 KiB", {name: bytes(zeroed)}
    kind = kind_of(healthy, name)
    alike = [
        other
        for other in sorted(healthy.objects)
        if other != name
        and healthy.objects[other] != content
        and kind_of(healthy, other).split()[-1] == kind.split()[-1]
    ]
    if alike:
        yield "swap", {name: healthy.objects[alike[0]], alike[0]: content}
    yield "delete", {name: None}
    copy = _another_name(name)
    if copy is not None and copy not in healthy.objects:
        yield "duplicate", {copy: content}


def _another_name(name: str) -> str | None:
    """A name that an object of the same kind could have, and has not."""
    if name == names.REPOSITORY:
        return None
    place, _, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    if place == "versions":
        number, _, epoch = stem.partition("-")
        return f"{place}/{int(number) + 40:010d}-{epoch}.{suffix}"
    if place == "writers":
        return f"{place}/{int(stem) + 40:06d}.{suffix}"
    if place.startswith("grid/") and suffix == "json":
        return f"{place}/{int(stem) + 40:08d}.{suffix}"
    if place == "tags":
        return f"{place}/{stem}-copy.{suffix}"
    if place == "condemned":
        return f"{place}/{stem[:-1]}0.{suffix}"
    if place in ("pins", "restores"):
        return f"{place}/{stem[::-1]}.{suffix}"
    start, _, count = stem.rpartition("-")
    return f"{start and place + '/' + start}-{int(count) + 40}.{suffix}"


def _needing(healthy: Healthy) -> dict[str, set[int]]:
    """Of each object the versions that are read from it; of others, nobody knows."""
    repository = Repository.open(healthy.store())
    found: dict[str, set[int]] = {}
    for number in healthy.truth:
        for manifest in repository.chain(number):
            planned = plan(repository, manifest)
            read = [file.name for file in files_read(manifest, planned)]
            # A grid also reads the manifests that no catalog covers, and the catalog.
            if planned is not None:
                read += [
                    n for n in healthy.objects if n.startswith(("versions/", "grid/", "moved/"))
                ]
            for name in (manifest.name, *read):
                found.setdefault(name, set()).add(number)
    return found


# Everything hangs on these.
_FOR_ALL = ("repository.json", "newest claim", "newest manifest", "manifest", "seal", "note")


def judge(
    healthy: Healthy, name: str, way: str, changes: Mapping[str, bytes | None],
    needing: Mapping[str, set[int]],
) -> Outcome:  # fmt: skip
    """Looks at a damaged repository with everything that looks at repositories."""
    outcome = Outcome(cases=1)
    kind = kind_of(healthy, name)
    store = healthy.store(changes)
    by_verify = by_reading = False
    read: dict[int, bool] = {}
    try:
        repository = Repository.open(store)
        try:
            by_verify = not verify(repository).ok
        except EmberkeepError:
            by_verify = True
        for number, expected in healthy.truth.items():
            try:
                if read_version(repository, number) != expected:
                    outcome.failures.append(f"{kind} {name}, {way}: wrong rows of {number}")
                read[number] = True
            except (DamageError, NoVersionError):
                by_reading = True
                read[number] = False
        if kind == "tag":
            try:
                repository.tags()
            except DamageError:
                by_reading = True
    except DamageError:
        by_verify = by_reading = True
    except Exception as error:
        outcome.failures.append(f"{kind} {name}, {way}: {type(error).__name__}: {error}")
    touched = set().union(*(needing.get(each, set()) for each in changes))
    for number, whole in read.items():
        for_all = kind in _FOR_ALL or (kind, way) == ("claim", "duplicate")
        if not whole and not for_all and number not in touched:
            outcome.failures.append(f"{kind} {name}, {way}: version {number} is lost for it")
    if not by_verify and (kind, way) in UNDETECTABLE:
        # Asked for by its number a version is missed; who asks for the newest does not know.
        outcome.undetectable = 1
        return outcome
    outcome.by_verify, outcome.by_reading = int(by_verify), int(by_reading)
    if not by_verify and not by_reading:
        outcome.undetected = 1
        outcome.failures.append(f"{kind} {name}, {way}: nobody noticed")
    return outcome


def repository_cases(label: str, *, every: bool) -> dict[tuple[str, str], Outcome]:
    """Damages the objects of one repository, `every` one or one of each kind; by kind and way."""
    kept = healthy(label)
    needing = _needing(kept)
    found: dict[tuple[str, str], Outcome] = {}
    # What no catalog names any more nobody reads; gc removes it.
    chosen = sorted(name for name in kept.objects if kind_of(kept, name) != "older segment")
    if not every:
        kinds = {kind_of(kept, name): name for name in chosen}
        if label != "grid":  # other layouts differ in these alone
            kinds = {
                k: n
                for k, n in kinds.items()
                if k.split()[-1] in ("manifest", "piece", "bundle", "catalog", "segment")
            }
        chosen = list(kinds.values())
    for name in chosen:
        kind = kind_of(kept, name)
        # Of one of each kind by day one way of three: the other layouts have the others.
        done = list(ways(kept, name))
        turn = list(LAYOUTS).index(label) + chosen.index(name)
        for way, changes in done if every else some(done, turn):
            found.setdefault((kind, way), Outcome())
            found[kind, way] += judge(kept, name, way, changes, needing)
    return found


# -- tiers ---------------------------------------------------------------------------------------

Files = dict[str, bytes]
_STALE = "no head in use speaks of it: it is written before it is read"
UNDETECTABLE |= {
    ("older tier head", way): "the newer head counts; this one is overwritten next"
    for way in ("flip start", "flip text", "flip end", "zero 4 KiB")
}
UNDETECTABLE |= {
    ("tier head", way): (
        "the head before it has the batch as prepared, and the other file proves that it took place"
    )
    for way in ("flip start", "flip text", "flip end", "zero 4 KiB")
}
UNDETECTABLE |= {
    ("unused tier bytes", "flip"): _STALE,
    ("unused tier bytes", "zero 4 KiB"): _STALE,
    ("tier segment", "duplicate"): "no shard has that number: the file is never opened",
    ("tier state", "duplicate"): "no durable step has that number: the file is never opened",
    ("tier decision", "duplicate"): "no file waits for a batch of that number",
    ("tier decision", "delete"): (
        "a batch that was prepared, and of which nothing says that it took place, did not: every "
        "file goes back to the batch before"
    ),
}


@contextmanager
def small_tiers() -> Iterator[None]:
    """Tiers whose segments are small, on a disk that need not be waited for."""
    before = durable_open.SEGMENT_NBYTES, durable_open.DISK
    durable_open.SEGMENT_NBYTES, durable_open.DISK = 16384, Unsynced
    try:
        yield
    finally:
        durable_open.SEGMENT_NBYTES, durable_open.DISK = before


def make_tier(top: Path, *, undecided: bool = False) -> list[Any]:
    """A run on two shards, durable at step 6; what it comes back with.

    With `undecided` batch 9 was decided, and no file has recorded that.
    """
    run = TierRun(top, shards=2)
    for _ in range(2):
        run.train(3)
        run.save()
    bits = run.bits()
    if undecided:
        cluster = run.model.bags.cluster
        run.train(3)
        bits = [run.bits()[0], None]
        for future in cluster.prepare_tiers(9):
            future.result(60)
        slabs = [slab for shard in cluster.shards for slab in shard.tiers()]
        point = slabs[0].log.prepared
        lives = {os.path.basename(slab.log.path): slab.log.head.life for slab in slabs}
        assert Decisions(str(top), Unsynced()).commit(point, lives)
    run.end()
    return bits


def open_tier(top: Path, *, undecided: bool = False) -> list[Any]:
    """Opens a tier and brings its run back, as a process that starts does."""
    if undecided:  # the state of step 9 was not written: the rows alone are looked at
        model = TierModel(top, shards=2)
        try:
            return [state(model.bags.cluster), None]
        finally:
            model.bags.cluster.close()
    run = TierRun(top, shards=2)
    try:
        run.keeper.resume()
        return run.bits()
    finally:
        run.end()


def _tier_ways(files: Files, name: str) -> Iterator[tuple[str, str, Files, str | None]]:
    """Kind and way, what changes, and what is deleted."""
    content = files[name]

    def flipped(at: int) -> Files:
        return {name: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]}

    def zeroed(at: int) -> Files:
        return {name: content[:at] + bytes(4096) + content[at + 4096 :]}

    if name.endswith(".tier"):
        sequences = [int.from_bytes(content[at + 8 : at + 16], "little") for at in (0, SLOT_NBYTES)]
        for slot, sequence in enumerate(sequences):
            kind = "tier head" if sequence == max(sequences) else "older tier head"
            at = slot * SLOT_NBYTES
            length = int.from_bytes(content[at + 16 : at + 24], "little")
            places = {"start": 0, "text": 40, "end": 31 + length}
            for place, offset in places.items():
                yield kind, f"flip {place}", flipped(at + offset), None
            yield kind, "zero 4 KiB", zeroed(at), None
            if kind == "tier head":
                other = bytearray(files["rows-1-0.tier"])
                other[at : at + 4096] = bytes(4096)
                both = zeroed(at) | {"rows-1-0.tier": bytes(other)}
                yield kind, "zero 4 KiB of all files", both, None
            yield "unused tier bytes", "flip", flipped(at + SLOT_NBYTES - 1), None
        # The first segment is the oldest, and rows of it are live: 2 blocks, and room for 2 more.
        blocks = [at for at in range(START, len(content), 4096) if any(content[at : at + 4096])]
        for at in blocks:
            yield "tier segment", "flip start of a block", flipped(at), None
            yield "tier segment", "flip a record", flipped(at + 40), None
            yield "tier segment", "flip end of a block", flipped(at + 4095), None
            yield "tier segment", "zero 4 KiB", zeroed(at), None
        yield "tier segment", "truncate", {name: content[: blocks[-1] + 100]}, None
        yield "tier segment", "truncate to the heads", {name: content[:START]}, None
        other = (
            name.replace("rows-0", "rows-@").replace("rows-1", "rows-0").replace("rows-@", "rows-1")
        )
        yield "tier segment", "swap", {name: files[other], other: content}, None
        yield "tier segment", "delete", {}, name
        yield "tier segment", "duplicate", {"rows-7-0.tier": content}, None
        return
    kind = "tier state" if "step-" in name else "tier decision"
    size = len(content)
    for place, at in {"start": 0, "header": 20, "middle": size // 2, "end": size - 1}.items():
        yield kind, f"flip {place}", flipped(at), None
    yield kind, "truncate", {name: content[: size // 2]}, None
    yield kind, "truncate one byte", {name: content[:-1]}, None
    yield kind, "zero 4 KiB", {name: bytes(min(size, 4096)) + content[4096:]}, None
    yield kind, "swap", {name: _other_step(content)}, None
    yield kind, "delete", {}, name
    copy = name.replace("step-6", "step-600").replace("decision-9", "decision-900")
    yield kind, "duplicate", {copy: content}, None


def _other_step(content: bytes) -> bytes:
    """A file of the same kind that is whole, but of another step."""
    with tempfile.TemporaryDirectory() as top:
        run = TierRun(Path(top) / "other", shards=2)
        run.train(5)
        run.save()
        run.end()
        (file,) = (Path(top) / "other" / "state").glob("step-5-*.safetensors")
        return file.read_bytes()


def tier_cases() -> dict[tuple[str, str], Outcome]:
    """Damages the files of tiers; opening and resuming is all that looks at them."""
    found: dict[tuple[str, str], Outcome] = {}
    with small_tiers(), tempfile.TemporaryDirectory() as parent:
        for undecided in (False, True):
            top = Path(parent) / f"tier-{undecided}"
            truth = make_tier(top, undecided=undecided)
            files = {
                str(file.relative_to(top)): file.read_bytes()
                for file in sorted(top.rglob("*"))
                if file.is_file() and file.name != "lock"
            }
            names = [n for n in files if ("decision" in n) if undecided] or [
                n for n in files if not n.startswith("rows-1")
            ]
            for name in names:
                for kind, way, changes, deleted in _tier_ways(files, name):
                    damaged = {n: c for n, c in {**files, **changes}.items() if n != deleted}
                    found.setdefault((kind, way), Outcome())
                    found[kind, way] += _judge_tier(parent, damaged, truth, kind, way, undecided)
    return found


def _judge_tier(
    parent: str, files: Files, truth: list[Any], kind: str, way: str, undecided: bool
) -> Outcome:
    outcome = Outcome(cases=1)
    with tempfile.TemporaryDirectory(dir=parent) as top:
        for name, content in files.items():
            (Path(top) / name).parent.mkdir(exist_ok=True)
            (Path(top) / name).write_bytes(content)
        try:
            same = open_tier(Path(top), undecided=undecided) == truth
        except (DamageError, StateError):
            outcome.by_reading = 1
            return outcome
        except Exception as error:
            outcome.failures.append(f"{kind}, {way}: {type(error).__name__}: {error}")
            return outcome
    if (kind, way) in UNDETECTABLE and (same or kind == "tier decision"):
        outcome.undetectable = 1
    elif same and way.startswith(("flip", "zero")) and kind == "tier segment":
        outcome.undetectable = 1  # rows of a block that newer ones have replaced
    else:
        outcome.undetected = 1
        outcome.failures.append(f"{kind}, {way}: nobody noticed")
    return outcome


# -- all of it -----------------------------------------------------------------------------------


def damage_cases(*, every: bool = False) -> dict[tuple[str, str], Outcome]:
    """Every kind of file, damaged in every way, over all layouts and a tier; with `every`, every
    object, else one of each kind, and documents that are alike in all layouts in one of them."""
    found: dict[tuple[str, str], Outcome] = {}
    parts = [repository_cases(label, every=every) for label in LAYOUTS]
    for part in (*parts, tier_cases()):
        for key, outcome in part.items():
            found.setdefault(key, Outcome())
            found[key] += outcome
    return found


def totals(found: Mapping[tuple[str, str], Outcome]) -> Outcome:
    total = Outcome()
    for outcome in found.values():
        total += outcome
    return total


def table(found: Mapping[tuple[str, str], Outcome]) -> str:
    """The counts by kind of file, as Markdown."""
    kinds: dict[str, Outcome] = {}
    for (kind, _), outcome in found.items():
        kinds.setdefault(kind, Outcome())
        kinds[kind] += outcome
    lines = [
        "| file | cases | `verify` | reading | stated as undetectable | undetected |",
        "|---|---|---|---|---|---|",
    ]
    for kind, o in sorted(kinds.items()):
        verified = "-" if "tier" in kind else o.by_verify
        counts = (o.cases, verified, o.by_reading, o.undetectable, o.undetected)
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    counted = damage_cases(every="--every" in sys.argv)
    print(table(counted))
    whole = totals(counted)
    print(f"{whole.cases} cases, {whole.undetected} undetected, {len(whole.failures)} failures")
    print("\n".join(whole.failures))
