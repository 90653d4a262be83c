"""Files that somebody forged: every digest matches, and nothing in them can be trusted.

`python -m tests.faults.hostile` runs the cases that can end a process, each in a process of its own
with little memory, and prints how each ended.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from emberkeep.blobs import MemoryStore
from emberkeep.errors import DamageError, FencedError, FormatError, NoVersionError, StateError
from emberkeep.inference import Follower
from emberkeep.inspect.summary import describe, list_versions, newest_writer
from emberkeep.repository import (
    Collector,
    KeepAll,
    Repository,
    Writer,
    names,
    newest_undamaged,
    verify,
)
from emberkeep.repository.digests import Digester
from emberkeep.repository.grid.catalog import newest_catalog
from emberkeep.repository.grid.piece_table import Gone, GridFile, PieceTable
from emberkeep.repository.grid.segments import Segment, encoded_segment
from emberkeep.repository.pieces import read_chunks
from emberkeep.repository.pins import read_pins
from tests.faults.damage import (
    POOL,
    healthy,
    make_tier,
    open_tier,
    read_version,
    restore_version,
    small_tiers,
)

REFUSALS = (DamageError, FormatError, NoVersionError, StateError, FencedError)
"""What reading forged files may end in; anything else is a defect."""
MEMORY_NBYTES = 192 * 2**20
"""What a process may take, beside what it had, to read any of the forged files below."""

BOUNDARIES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30,
    0.5, -0.0, 1e308, "", "x", "1-1", "9999999999-999999", "0-0", "..", "../../outside", "/outside",
    "a\0b", "data/../../outside", "versions/0000000001-000001.json", "\u0661-1", [], {}, [[]],
    [None], {"": None}, [1, 2, 3], [[1, 2]], [["a"]], {"a": {"b": []}}, "2020-01-01",
    "9999-12-31T23:59:59",
]  # fmt: skip
"""What takes the place of a part of a document."""


def enveloped(body: bytes) -> bytes:
    """A document whose digest matches, whatever its body is."""
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    return b'{"xxh3_128":"' + digest + b'","body":' + body + b"}\n"


def body_of(content: bytes) -> Any:
    return json.loads(content)["body"]


def paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the parts of a JSON value stand."""
    found = [above] if above else []
    if isinstance(value, dict):
        for key, entry in value.items():
            found += paths(entry, (*above, key))
    elif isinstance(value, list):
        for at, entry in enumerate(value):
            found += paths(entry, (*above, at))
    return found


def mutated(body: Any, choose: Callable[[int], int]) -> bytes:
    """A document's body with one part replaced, removed, doubled or nested; `choose` draws."""
    body = json.loads(json.dumps(body))
    places = paths(body)
    path = places[choose(len(places))]
    inner = body
    for step in path[:-1]:
        inner = inner[step]
    way = choose(len(BOUNDARIES) + 3)
    text = None
    if way < len(BOUNDARIES):
        inner[path[-1]] = BOUNDARIES[way]
    elif way == len(BOUNDARIES):
        inner.pop(path[-1])
    elif way == len(BOUNDARIES) + 1:
        inner[path[-1]] = "@"
        deep = 100 if choose(2) else 50_000
        raw = [
            '{"a":' * deep + "1" + "}" * deep,
            "[" * deep + "]" * deep,
            "NaN",
            "1e999",
            '"\\ud800"',
        ]
        text = json.dumps(body).replace('"@"', raw[choose(len(raw))], 1)
    elif isinstance(inner, dict):
        doubled = json.dumps(path[-1])
        text = json.dumps(body).replace(f"{doubled}:", f"{doubled}: 0, {doubled}:", 1)
    return (text or json.dumps(body)).encode()


def attempt(call: Callable[[], object]) -> bool:
    """Whether a call went well; any error that is no refusal comes through."""
    try:
        call()
    except REFUSALS:
        return False
    return True


def exercise(store: MemoryStore) -> bool:
    """Looks at a repository with everything that reads; whether nothing was refused."""
    try:
        repository = Repository.open(store)
    except REFUSALS:
        return False
    well = [
        attempt(lambda: _must(verify(repository).ok)),
        attempt(repository.tags),
        attempt(lambda: read_pins(repository)),
        attempt(lambda: list_versions(repository)),
        attempt(lambda: newest_writer(repository)),
    ]
    try:
        versions = repository.versions()
    except REFUSALS:
        return False
    for version in versions:
        number = version.number
        well.append(attempt(lambda number=number: read_version(repository, number)))  # type: ignore[misc]
        well.append(attempt(lambda version=version: describe(repository, version)))  # type: ignore[misc]
    if versions:
        well.append(attempt(lambda: restore_version(repository, versions[-1].number)))
        well.append(attempt(lambda: Follower(store).refresh()))
    well.append(attempt(lambda: newest_undamaged(repository)))
    well.append(attempt(lambda: _collect(repository)))
    return all(well)


def _must(true: bool) -> None:
    if not true:
        raise DamageError("verify has found damage")


def _collect(repository: Repository) -> None:
    Collector(Writer.open(repository), policy=KeepAll(), grace=timedelta(0)).collect()


def with_file(objects: Mapping[str, bytes], name: str, content: bytes) -> dict[str, bytes]:
    """A repository with another content of a data file, which its manifest vouches for."""
    changed = dict(objects)
    changed[name] = content
    for manifest_name in [n for n in objects if n.startswith("versions/")]:
        body = body_of(objects[manifest_name]) if objects[manifest_name] else {}
        for file in body.get("files", []):
            if file["name"] == name:
                digester = Digester(file["block_nbytes"])
                digester.update(memoryview(content))
                file["size"], file["digest"] = digester.size, digester.whole
                file["blocks"] = list(digester.blocks)
                changed[manifest_name] = enveloped(json.dumps(body).encode())
    return changed


# -- cases that can end a process ----------------------------------------------------------------


def _piece() -> bytes:
    objects = healthy("consecutive, 4 bits").objects
    return next(objects[name] for name in sorted(objects) if name.endswith(".arrow"))


def _records(**given: Any) -> Any:
    """A batch with one record of a piece."""
    import pyarrow as pa

    from emberkeep.repository import pieces

    record = {
        "table": "fixed", "group": 0, "part": "tombstones", "rows": 1, "plane": "", "width": 0,
        "dtype": "", "buffer": "", "data": b"",
    } | given  # fmt: skip
    schema = pieces._schema({})
    return schema, pa.RecordBatch.from_arrays(
        [pa.array([record[field.name]], field.type) for field in schema], schema=schema
    )


def _stream(schema: Any, *batches: Any, **options: Any) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _read(content: bytes) -> None:
    for _ in read_chunks("data/forged.arrow", iter([content]), POOL):
        pass


def forged_offsets(column: str) -> Callable[[], None]:
    """A text, or bytes, that reach far beyond their buffer."""

    def run() -> None:
        form, length = ("<qq", 12345) if column == "data" else ("<ii", 77)
        value = bytes(length) if column == "data" else "q" * length
        content = _stream(*_records(**{column: value}))
        before, after = struct.pack(form, 0, length), struct.pack(form, 0, 2**26)
        start, _, end = content.rpartition(before)  # the lengths of buffers come before them
        assert start
        _read(start + after + end)

    return run


def bomb(compression: str) -> Callable[[], None]:
    """A few thousand bytes that unpack to gigabytes."""

    def run() -> None:
        with open(os.environ["HOSTILE_BOMB"] + compression, "rb") as file:
            _read(file.read())

    return run


def make_bombs(path: str) -> None:
    import pyarrow as pa

    schema, batch = _records()
    zeros = np.zeros(2**28, np.uint8)
    offsets = np.array([0, zeros.size], np.int64)
    data = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(zeros)]
    )
    big = pa.RecordBatch.from_arrays([*batch.columns[:-1], data], schema=schema)
    for compression in ("zstd", "lz4"):
        with open(path + compression, "wb") as file:
            file.write(_stream(schema, *[big] * 4, compression=compression))


def many_ids() -> None:
    """40 bytes that name 2^36 ids."""
    from emberkeep.codecs import ids

    header = np.zeros(1, ids._ID_HEADER)
    header["version"], header["count"], header["stride"] = 1, 2**36, 1
    header["last"] = 2**36 - 1
    _read(_stream(*_records(rows=2**36, data=header.tobytes())))


def other_columns() -> None:
    """References to objects where numbers belong."""
    schema, first = _records(part="ids", rows=1, data=bytes(40))
    _, plane = _records(
        part="plane", plane="weight", width=1, dtype="object", buffer="values", data=bytes(8)
    )
    _read(_stream(schema, first, plane))


def fuzzed_pieces() -> None:
    """Bytes of real pieces changed at random; the seed comes from outside."""
    random = np.random.default_rng(int(os.environ.get("HOSTILE_SEED", "0")))
    content = _piece()
    for _ in range(int(os.environ.get("HOSTILE_ROUNDS", "100"))):
        forged = bytearray(content)
        # Metadata of Arrow, mostly: there offsets and lengths are.
        for at in random.integers(0, len(forged) if random.random() < 0.3 else 3000, 4).tolist():
            forged[at % len(forged)] = int(
                random.choice([0, 1, 127, 128, 255, forged[at % len(forged)] ^ 8])
            )
        attempt(lambda forged=forged: _read(bytes(forged)))  # type: ignore[misc]


def _grid() -> tuple[dict[str, bytes], str, Any]:
    """A repository whose newest catalog has its pieces in it, as format 1 had."""
    kept = healthy("grid")
    objects = dict(kept.objects)
    name = max(n for n in objects if n.startswith("grid/") and n.endswith(".json"))
    parsed = names.parse_generation(name)
    assert parsed is not None
    catalog = newest_catalog(Repository.open(kept.store()), parsed[0])
    body = body_of(objects[name])
    del body["parts"]
    body["format"], body["files"] = 1, [bundle.to_json() for bundle in catalog.bundles]
    objects[name] = enveloped(json.dumps(body).encode())
    return objects, name, body


def _segment() -> tuple[dict[str, bytes], str, Any, PieceTable]:
    """A repository, its newest catalog, and all pieces of the first part of that."""
    kept = healthy("grid")
    objects = dict(kept.objects)
    name = max(n for n in objects if n.startswith("grid/") and n.endswith(".json"))
    parsed = names.parse_generation(name)
    assert parsed is not None
    repository = Repository.open(kept.store())
    part = newest_catalog(repository, parsed[0]).parts[0]
    return objects, name, body_of(objects[name]), part.everything(repository)


def _with_segment(
    objects: dict[str, bytes], name: str, body: Any, content: bytes, ref: Any
) -> None:
    """Puts another segment in the place of those of the first part."""
    body["parts"][0]["segments"] = [ref.to_json()]
    objects[ref.name] = content
    objects[name] = enveloped(json.dumps(body).encode())


def far_segment() -> None:
    """A segment whose files have an exabyte, and pieces that fill them."""
    objects, name, body, table = _segment()
    files = {
        number: GridFile.of(replace(f.file, size=2**60, block_nbytes=2**61, blocks=()), f.families)
        for number, f in table.files.items()
    }
    columns = dict(table.columns)
    columns["nbytes"] = columns["nbytes"] // np.maximum(1, columns["rows"]) * 2**40
    columns["rows"] = np.full(len(table), 2**40)
    columns["head_nbytes"] = np.full(len(table), 2**41)
    columns["head"] = 2**55 + np.arange(len(table)) * 2**42
    columns["offset"] = np.cumsum(columns["nbytes"]) - columns["nbytes"]
    segment = body["parts"][0]["segments"][0][0]
    content, ref = encoded_segment(segment, PieceTable(files, columns), Gone())
    _with_segment(objects, name, body, content, ref)
    _exercise(objects)


def segment_over_each_other() -> None:
    """A segment in which every piece of a file stands at one place."""
    objects, name, body, table = _segment()
    columns = {**table.columns, "head": np.zeros(len(table), np.int64)}
    segment = body["parts"][0]["segments"][0][0]
    content, ref = encoded_segment(segment, PieceTable(table.files, columns), Gone())
    _with_segment(objects, name, body, content, ref)
    _exercise(objects)


def long_segment() -> None:
    """A catalog that says of a segment that it has an exabyte, and an index as long."""
    objects, name, body, _ = _segment()
    for segment in body["parts"][0]["segments"]:
        segment[1] = segment[3] = 2**60
    objects[name] = enveloped(json.dumps(body).encode())
    _exercise(objects)


def fuzzed_segments() -> None:
    """Bytes of a real segment changed at random, of which the digests are made to match."""
    random = np.random.default_rng(int(os.environ.get("HOSTILE_SEED", "0")))
    _, _, body, table = _segment()
    segment = body["parts"][0]["segments"][0][0]
    content, ref = encoded_segment(segment, table, Gone())
    for _ in range(int(os.environ.get("HOSTILE_ROUNDS", "100"))):
        index = bytearray(content[: ref.index_nbytes])
        for at in random.integers(0, len(index), 3).tolist():
            index[at] = int(random.choice([0, 1, 127, 128, 255, index[at] ^ 8]))
        forged = bytes(index) + content[ref.index_nbytes :]
        other = replace(
            ref, digest=xxhash.xxh3_128_hexdigest(forged),
            index_digest=xxhash.xxh3_64_hexdigest(bytes(index)),
        )  # fmt: skip
        store = MemoryStore()
        store.put(segment, forged)

        def read(store: MemoryStore = store, other: Any = other) -> None:
            found = Segment.open(store, other)
            found.everything.bundles()

        attempt(read)


def _exercise(objects: Mapping[str, bytes]) -> None:
    store = MemoryStore()
    for name, content in objects.items():
        store.put(name, content)
    if exercise(store):
        raise AssertionError("nothing was refused")
    raise DamageError("refused")


def far_pieces() -> None:
    """A catalog that names files of an exabyte, and pieces that fill them."""
    objects, name, body = _grid()
    for file in body["files"]:
        file["size"] = 2**60
        file["blocks"], file["block_nbytes"] = [], 2**61
        for piece in file["metadata"]["grid"]["pieces"]:
            piece[3], piece[5] = 2**50, 2**50 * (piece[5] // max(1, piece[3]))
            piece[8] = 2**51
    objects[name] = enveloped(json.dumps(body).encode())
    _exercise(objects)


def long_heads() -> None:
    """A catalog in which one head, in a file that is not so long, names 2^34 rows."""
    objects, name, body = _grid()
    for file in body["files"]:
        *_, last = file["metadata"]["grid"]["pieces"]
        last[3], last[8], last[5] = 2**34, 2**35, last[5] // last[3] * 2**34
        last[4], last[7] = 2**40, 2**50
        file["size"], file["block_nbytes"], file["blocks"] = 2**60, 2**61, []
    objects[name] = enveloped(json.dumps(body).encode())
    _exercise(objects)


def over_each_other() -> None:
    """A catalog with 20,000 pieces that all have one head."""
    objects, name, body = _grid()
    pieces = body["files"][0]["metadata"]["grid"]["pieces"]
    pieces[:] = [pieces[0]] * 20_000
    objects[name] = enveloped(json.dumps(body).encode())
    _exercise(objects)


def wide_schema() -> None:
    """Tables of 2^48 rows each."""
    objects, _, _ = _grid()
    body = body_of(objects["repository.json"])
    for table in body["schema"]["tables"].values():
        table["rows"] = 2**48
    objects["repository.json"] = enveloped(json.dumps(body).encode())
    store = MemoryStore()
    for name, content in objects.items():
        store.put(name, content)
    repository = Repository.open(store)
    for version in repository.versions():
        read_version(repository, version.number)
    raise DamageError("read, within bounds")


def long_lineage() -> None:
    """A claim of which the predecessors had ten thousand million versions."""
    objects = dict(healthy("full").objects)
    name = max(n for n in objects if n.startswith("writers/"))
    body = body_of(objects[name])
    body["lineage"] = [[1, 9_999_999_998]]
    objects[name] = enveloped(json.dumps(body).encode())
    _exercise(objects)


def many_rows_stated() -> None:
    """A manifest that states 10^15 rows, for which a follower makes room."""
    objects = dict(healthy("full").objects)
    name = max(n for n in objects if n.startswith("versions/") and b'"files"' in objects[n])
    body = body_of(objects[name])
    for file in body["files"]:
        if "rows" in file["metadata"]:
            file["metadata"]["rows"] = dict.fromkeys(file["metadata"]["rows"], 10**15)
    objects[name] = enveloped(json.dumps(body).encode())
    _exercise(objects)


def deep_document() -> None:
    objects = dict(healthy("full").objects)
    objects["repository.json"] = enveloped(b'{"a":' * 200_000 + b"1" + b"}" * 200_000)
    _exercise(objects)


def _tier(change: Callable[[Any], Any]) -> Callable[[], None]:
    """A tier whose newest head is another one."""

    def run() -> None:
        from emberkeep.tiers import superblock

        with tempfile.TemporaryDirectory() as top, small_tiers():
            make_tier(Path(top))
            path = os.path.join(top, "rows-0-0.tier")
            head, sequence = superblock.read_head(path)
            content = superblock.slot(superblock.encode(change(head)), sequence)
            with open(path, "r+b") as file:
                file.seek((sequence - 1) % 2 * superblock.SLOT_NBYTES)
                file.write(content)
            open_tier(Path(top))

    return run


def _free_bomb(head: Any) -> Any:
    import base64
    import zlib

    packed = base64.b64encode(zlib.compress(bytes(2**25), 9)).decode()
    return replace(head, free=packed)


CASES: dict[str, Callable[[], None]] = {
    **{
        f"forged offsets of {column}": forged_offsets(column)
        for column in ("table", "dtype", "data")
    },
    "zstd that unpacks to a gigabyte": bomb("zstd"),
    "lz4 that unpacks to a gigabyte": bomb("lz4"),
    "40 bytes that name 2^36 ids": many_ids,
    "objects where numbers belong": other_columns,
    "fuzzed pieces": fuzzed_pieces,
    "pieces of an exabyte": far_pieces,
    "heads of 2^34 rows": long_heads,
    "20,000 pieces with one head": over_each_other,
    "fuzzed segments": fuzzed_segments,
    "a segment whose pieces have an exabyte": far_segment,
    "a segment whose pieces stand at one place": segment_over_each_other,
    "a segment of an exabyte": long_segment,
    "tables of 2^48 rows": wide_schema,
    "a lineage of 10^10 versions": long_lineage,
    "10^15 rows stated": many_rows_stated,
    "a document nested 200,000 deep": deep_document,
    "a tier of 2^32 segments": _tier(lambda head: replace(head, segments=2**32)),
    "a tier whose free list is a bomb": _tier(_free_bomb),
    "a tier with areas outside": _tier(lambda head: replace(head, areas=((2**40,), (-1,)))),
}


def _bounded(case: Callable[[], None]) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    case()


def main() -> None:
    """Each case in a child that was forked when everything was loaded."""
    attempt(lambda: _read(_piece()))
    for label in ("grid", "full"):
        exercise(healthy(label).store())
    ended: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as top:
        os.environ["HOSTILE_BOMB"] = os.path.join(top, "bomb-")
        make_bombs(os.environ["HOSTILE_BOMB"])
        for name, case in CASES.items():
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                text = "no error"
                try:
                    _bounded(case)
                except BaseException as error:
                    text = type(error).__name__
                    if not isinstance(error, REFUSALS):
                        traceback.print_exc()
                os.write(writing, text.encode())
                os._exit(0)
            os.close(writing)
            with os.fdopen(reading) as answers:
                answer = answers.read()
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            ended[name] = answer if code == 0 else f"signal {-code}"
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
