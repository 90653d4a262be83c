"""The Criteo reader, checked line by line against a plain Python reading of the same text."""

from __future__ import annotations

import gzip
import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.data import Batch, Criteo, Reader
from emberkeep.data import criteo as module
from emberkeep.errors import ConfigError, DataError, StateError

Row = tuple[int, list[int | None], list[int | None]]


def text_of(rows: list[Row], *, labelled: bool = True) -> bytes:
    lines = []
    for label, integers, categories in rows:
        values = [str(label)] if labelled else []
        values += ["" if value is None else str(value) for value in integers]
        values += ["" if value is None else f"{value:08x}" for value in categories]
        lines.append("\t".join(values) + "\n")
    return "".join(lines).encode()


def some_rows(count: int, seed: int = 0) -> list[Row]:
    random = np.random.default_rng(seed)

    def maybe(value: int) -> int | None:
        return None if random.random() < 0.2 else int(value)

    return [
        (
            int(random.integers(2)),
            [maybe(value) for value in random.integers(-3, 100_000, 13)],
            [maybe(value) for value in random.integers(0, 1 << 32, 26)],
        )
        for _ in range(count)
    ]


def expect(batch: Batch, rows: list[Row]) -> None:
    """A batch with dynamic ids holds exactly these rows."""
    assert len(batch) == len(rows)
    assert batch.labels.dtype == batch.dense.dtype == np.float32
    for i, (label, integers, categories) in enumerate(rows):
        assert batch.labels[i] == label
        wanted = [math.log1p(max(value or 0, 0)) for value in integers]
        np.testing.assert_array_equal(batch.dense[i], np.array(wanted, np.float32))
        for f, value in enumerate(categories):
            id_ = (f << 33) + ((1 << 32) if value is None else value)
            assert batch.ids[f"C{f + 1}"][i] == id_


@pytest.fixture
def rows() -> list[Row]:
    return some_rows(57)


@pytest.fixture
def file(tmp_path: Path, rows: list[Row]) -> Path:
    path = tmp_path / "day_0"
    path.write_bytes(text_of(rows))
    return path


def read_all(source: Criteo, count: int = 1 << 14) -> Batch:
    return source.open(0).read(count)


def test_plain_file(file: Path, rows: list[Row]) -> None:
    expect(read_all(Criteo(file)), rows)


@pytest.mark.parametrize("block", [300, 1000, 1 << 22])
def test_gzip_is_recognised_by_content(
    tmp_path: Path, rows: list[Row], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    path = tmp_path / "no_suffix"
    path.write_bytes(gzip.compress(text_of(rows)))
    expect(read_all(Criteo(path)), rows)


@given(
    cuts=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    block=st.integers(700, 3000),
    ends=st.sampled_from([b"\n", b"\r\n"]),
    last_newline=st.booleans(),
)
def test_files_blocks_and_reads_may_be_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory,
    cuts: list[int],
    block: int,
    ends: bytes,
    last_newline: bool,
) -> None:
    rows = some_rows(sum(cuts), seed=block)
    folder = tmp_path_factory.mktemp("criteo")
    paths, at = [], 0
    for i, count in enumerate(cuts):
        text = text_of(rows[at : at + count]).replace(b"\n", ends)
        paths.append(folder / f"day_{i}")
        paths[-1].write_bytes(text if last_newline else text.removesuffix(ends))
        at += count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        source = Criteo(paths)
        assert source.count() == len(rows)
        cursor, at = source.open(0), 0
        for count in reversed(cuts):
            reopened = source.open(at, cursor.mark())
            searched = source.open(at)
            wanted = rows[at : at + count]
            expect(cursor.read(count), wanted)
            expect(reopened.read(count), wanted)
            expect(searched.read(count), wanted)
            assert searched.mark() == reopened.mark() == cursor.mark()
            at += count
        assert len(cursor.read(5)) == 0


def test_hashed_ids_fit_their_tables_and_leave_row_0_to_missing_values(
    file: Path, rows: list[Row]
) -> None:
    sizes = [2 + 7 * f for f in range(26)]
    batch = read_all(Criteo(file, sizes=sizes))
    for f, size in enumerate(sizes):
        ids = batch.ids[f"C{f + 1}"]
        missing = np.array([categories[f] is None for _, _, categories in rows])
        assert (ids[missing] == 0).all()
        assert (ids[~missing] >= 1).all()
        assert (ids < size).all()


def test_hashing_spreads_and_is_stable(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(text_of([(0, [1] * 13, [value] * 26) for value in range(2000)]))
    ids = read_all(Criteo(path, sizes=1001)).ids["C1"]
    counts = np.bincount(ids, minlength=1001)
    assert counts[0] == 0
    assert counts.max() < 12
    assert ids[:4].tolist() == [536, 466, 111, 54]


def test_rows_without_labels(tmp_path: Path, rows: list[Row]) -> None:
    path = tmp_path / "test.txt"
    path.write_bytes(text_of(rows, labelled=False))
    batch = read_all(Criteo(path, labelled=False))
    assert np.isnan(batch.labels).all()
    assert batch.ids["C26"].tolist() == [
        (25 << 33) + (1 << 32 if row[2][25] is None else row[2][25]) for row in rows
    ]
    with pytest.raises(DataError, match=r"test.txt, line 1: 39 columns.*labelled=False"):
        read_all(Criteo(path))


GOOD = text_of(some_rows(1)).rstrip(b"\n")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"", "1 columns instead of 40"),
        (GOOD + b"\t", "41 columns instead of 40"),
        (GOOD.rsplit(b"\t", 3)[0], "37 columns instead of 40"),
        (b"2" + GOOD[1:], r"column 1 is '2', not a label"),
        (b"\t" + GOOD.split(b"\t", 1)[1], r"column 1 is '', not a label"),
        (b"0\tx" + b"\t" * 38, r"column 2 is 'x', not an integer"),
        (b"0\t-" + b"\t" * 38, r"column 2 is '-', not an integer"),
        (b"0\t1.5" + b"\t" * 38, r"column 2 is '1.5', not an integer"),
        (b"0\t" + b"9" * 19 + b"\t" * 38, r"column 2 is '9+', not an integer"),
        (b"0" + b"\t" * 14 + b"xyz" + b"\t" * 25, r"column 15 is 'xyz', not a hexadecimal"),
        (b"0" + b"\t" * 39 + b"123456789", r"column 40 is '123456789', not a hexadecimal"),
        (b"0" + b"\t" * 39 + b"\xff\x00", r"column 40 is .*, not a hexadecimal"),
    ],
)
def test_a_malformed_line_is_named_or_skipped(tmp_path: Path, line: bytes, complaint: str) -> None:
    rows = some_rows(9)
    good = text_of(rows).splitlines(keepends=True)
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"".join(good[:4]))
    second.write_bytes(b"".join([*good[4:6], line + b"\n", *good[6:]]))
    with pytest.raises(DataError, match=f"second, line 3: {complaint}"):
        read_all(Criteo([first, second]))

    source = Criteo([first, second], on_malformed="skip")
    cursor = source.open(0)
    expect(cursor.read(100), rows)
    assert cursor.mark()["malformed"] == 1
    assert source.count() == 9


@given(
    bad=st.sets(st.integers(0, 59)),
    batch_size=st.integers(1, 9),
    world=st.integers(1, 3),
    stop=st.integers(0, 20),
)
def test_skipped_lines_are_counted_once_however_a_run_is_resumed(
    tmp_path_factory: pytest.TempPathFactory,
    bad: set[int],
    batch_size: int,
    world: int,
    stop: int,
) -> None:
    rows = some_rows(60)
    lines = text_of(rows).splitlines(keepends=True)
    path = tmp_path_factory.mktemp("criteo") / "f"
    path.write_bytes(b"".join(b"bad\n" if i in bad else line for i, line in enumerate(lines)))
    kept = [row for i, row in enumerate(rows) if i not in bad]
    source = Criteo(path, on_malformed="skip")

    states = []
    for rank in range(world):
        reader = Reader(source, batch_size=batch_size, rank=rank, world=world, prefetch=0)
        for _ in reader.hand_out(stop):
            pass
        states.append(reader.state_dict())
    assert all(state == states[0] for state in states)

    resumed = Reader(source, batch_size=7, prefetch=0)
    resumed.load_state_dict(states[0])
    at = resumed.samples
    assert at == min(stop * world * batch_size, len(kept))
    if 0 < at < len(kept):
        last = rows.index(kept[at - 1])
        assert resumed.malformed == sum(i < last for i in bad)
    for batch in resumed:
        expect(batch, kept[at : at + 7])
        at += len(batch)
    assert at == len(kept)
    if len(kept) % 7:  # the last batch looked for more samples, past all lines
        assert resumed.malformed == len(bad)


def test_text_without_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 1000)
    path = tmp_path / "zeros"
    path.write_bytes(bytes(5000))
    with pytest.raises(DataError, match="zeros, line 1: longer than 1000 bytes"):
        read_all(Criteo(path, on_malformed="skip"))


def test_damaged_gzip_is_named(tmp_path: Path, rows: list[Row]) -> None:
    packed = gzip.compress(text_of(rows))
    for damaged in (packed[:-20], packed[:-8] + bytes(8)):
        path = tmp_path / "day_1.gz"
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"day_1.gz: damaged gzip data after line \d+"):
            read_all(Criteo(path))


def test_missing_files_and_impossible_sizes_are_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such file"):
        Criteo([file, tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="at least one file"):
        Criteo([])
    with pytest.raises(ConfigError, match="26 numbers"):
        Criteo(file, sizes=[5, 5])
    with pytest.raises(ConfigError, match="26 numbers"):
        Criteo(file, sizes=1)
    with pytest.raises(ConfigError, match="on_malformed"):
        Criteo(file, on_malformed="ignore")  # type: ignore[arg-type]


def test_the_fingerprint_names_content_and_transforms_not_places(
    tmp_path: Path, file: Path
) -> None:
    moved = tmp_path / "elsewhere"
    moved.write_bytes(file.read_bytes())
    known = Criteo(file).fingerprint()
    assert Criteo(moved).fingerprint() == known
    assert Criteo(str(file)).fingerprint() == known
    assert Criteo(file, sizes=10).fingerprint() != known
    assert Criteo(file, on_malformed="skip").fingerprint() != known
    assert Criteo([file, moved]).fingerprint() != known
    moved.write_bytes(file.read_bytes() + GOOD + b"\n")
    assert Criteo(moved).fingerprint() != known


def test_a_source_can_be_sent_to_another_process(file: Path, rows: list[Row]) -> None:
    source = pickle.loads(pickle.dumps(Criteo(file)))
    assert source == Criteo(file)
    expect(read_all(source), rows)


@pytest.mark.parametrize(
    "mark", [{}, {"file": 0}, {"file": 0, "offset": -1, "line": 0, "malformed": 0}]
)
def test_a_damaged_mark_is_refused(file: Path, mark: dict[str, int]) -> None:
    with pytest.raises(StateError, match="the state is damaged"):
        Criteo(file).open(3, mark)


def test_an_empty_file_has_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.write_bytes(b"")
    assert Criteo(path).count() == 0
    assert len(read_all(Criteo(path))) == 0


def real_rows() -> Path | None:
    given_path = os.environ.get("EMBERKEEP_CRITEO_SAMPLE")
    beside = Path(__file__).parents[3].parent / "shared/data/criteo_day_0_head10k.tsv"
    path = Path(given_path) if given_path else beside
    return path if path.is_file() else None


@pytest.mark.long
@pytest.mark.skipif(real_rows() is None, reason="no rows of Criteo's logs on this machine")
def test_real_rows_are_read_whole() -> None:
    path = real_rows()
    assert path is not None
    lines = path.read_bytes().splitlines()
    rows: list[Row] = []
    for line in lines:
        values = line.split(b"\t")
        rows.append(
            (
                int(values[0]),
                [int(value) if value else None for value in values[1:14]],
                [int(value, 16) if value else None for value in values[14:]],
            )
        )
    at = 0
    with Reader(Criteo(path), batch_size=999) as reader:
        for batch in reader:
            expect(batch, rows[at : at + len(batch)])
            at += len(batch)
    assert at == len(lines)


def test_sizes_of_numpy_are_the_same_source(file: Path) -> None:
    known = Criteo(file, sizes=10)
    assert Criteo(file, sizes=np.int64(10)) == known
    assert Criteo(file, sizes=np.full(26, 10)).fingerprint() == known.fingerprint()
    with pytest.raises(ConfigError, match="whole number"):
        Criteo(file, sizes=[10.5] * 26)
