"""The Parquet reader: any mapping of columns, entered at any row."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.data import Batch, Category, Parquet, Reader
from emberkeep.data import parquet as module
from emberkeep.errors import ConfigError, DataError


def write(path: Path, columns: dict[str, Any], *, group: int = 1000) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def read_all(source: Parquet) -> Batch:
    return source.open(0).read(1 << 20)


def numbered(folder: Path, counts: list[int], group: int) -> Parquet:
    """Files whose rows carry their number in every kind of column."""
    paths, at = [], 0
    for i, count in enumerate(counts):
        numbers = list(range(at, at + count))
        columns = {
            "click": pa.array([n % 2 for n in numbers], pa.int8()),
            "price": pa.array(numbers, pa.float32()),
            "item": pa.array(numbers, pa.int64()),
            "viewed": pa.array([list(range(n, n + n % 4)) for n in numbers], pa.list_(pa.int32())),
        }
        paths.append(write(folder / f"{i}.parquet", columns, group=group))
        at += count
    return Parquet(
        paths,
        label="click",
        dense=["price"],
        categories=[Category(column="item"), Category(column="viewed", feature="bag")],
    )


def expect_numbers(batch: Batch, numbers: range) -> None:
    assert batch.ids["item"].tolist() == list(numbers)
    assert batch.dense[:, 0].tolist() == list(numbers)
    assert batch.labels.tolist() == [n % 2 for n in numbers]
    values, offsets = batch.ids["bag"]
    assert values.dtype == offsets.dtype == np.int64
    ends = [*offsets[1:].tolist(), len(values)][: len(offsets)]
    bags = [values[a:b].tolist() for a, b in zip(offsets.tolist(), ends, strict=True)]
    assert bags == [list(range(n, n + n % 4)) for n in numbers]


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    group=st.integers(1, 20),
    at_once=st.integers(1, 25),
    position=st.integers(0, 170),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=6),
)
def test_rows_are_read_in_order_from_any_position(
    tmp_path_factory: pytest.TempPathFactory,
    counts: list[int],
    group: int,
    at_once: int,
    position: int,
    steps: list[tuple[bool, int]],
) -> None:
    source = numbered(tmp_path_factory.mktemp("parquet"), counts, group)
    total = sum(counts)
    assert source.count() == total
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROWS_AT_ONCE", at_once)
        cursor, at = source.open(position), min(position, total)
        for skips, count in steps:
            count = min(count, total - at)
            if skips:
                assert cursor.skip(count) == count
            else:
                expect_numbers(cursor.read(count), range(at, at + count))
            at += count
        expect_numbers(cursor.read(total + 1), range(at, total))
        assert cursor.skip(1) == 0
        cursor.close()


def test_row_groups_before_the_position_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = numbered(tmp_path, [100, 100], group=10)
    asked: list[list[int]] = []
    iter_batches = pq.ParquetFile.iter_batches

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(options["row_groups"])
        return iter_batches(self, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    expect_numbers(source.open(175).read(3), range(175, 178))
    assert asked == [[7, 8, 9]]


def test_workers_share_files_and_resume(tmp_path: Path) -> None:
    source = numbered(tmp_path, [50, 53], group=7)
    first = [Reader(source, batch_size=5, rank=rank, world=2) for rank in (0, 1)]
    for rank, reader in enumerate(first):
        for step, batch in enumerate(reader.hand_out(4)):
            start = step * 10 + rank * 5
            expect_numbers(batch, range(start, start + 5))
        reader.close()
    assert first[0].state_dict() == first[1].state_dict()
    with Reader(source, batch_size=30) as resumed:
        resumed.load_state_dict(first[0].state_dict())
        at = 40
        for batch in resumed:
            expect_numbers(batch, range(at, at + len(batch)))
            at += len(batch)
    assert at == 103


def test_a_source_can_be_sent_to_another_process(tmp_path: Path) -> None:
    source = numbered(tmp_path, [20], group=7)
    sent = pickle.loads(pickle.dumps(source))
    assert sent == source
    expect_numbers(read_all(sent), range(20))


def test_an_empty_batch_has_the_shape_of_the_others(tmp_path: Path) -> None:
    batch = numbered(tmp_path, [3], group=7).open(3).read(5)
    assert batch.dense.shape == (0, 1)
    assert batch.ids["item"].shape == (0,)
    values, offsets = batch.ids["bag"]
    assert len(values) == len(offsets) == 0


def ids_of(tmp_path: Path, column: pa.Array, **options: Any) -> Any:
    path = write(tmp_path / "c.parquet", {"c": column})
    source = Parquet(path, label=None, categories=[Category(column="c", **options)])
    return read_all(source).ids["c"]


def test_dynamic_ids_keep_integers_and_hash_strings(tmp_path: Path) -> None:
    integers = pa.array([5, None, -1, 2**62 - 1], pa.int64())
    assert ids_of(tmp_path, integers).tolist() == [5, 1 << 62, -1, 2**62 - 1]
    large = pa.array([2**64 - 1, 0], pa.uint64())
    assert ids_of(tmp_path, large).tolist() == [-1, 0]
    strings = ids_of(tmp_path, pa.array(["a", None, "b", "", "a"]))
    assert strings[1] == 1 << 62
    assert strings[0] == strings[4]
    assert len(set(strings.tolist())) == 4
    assert (strings >= 0).all()
    assert np.delete(strings, 1).max() < 1 << 62


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_strings_hash_alike_however_they_are_stored(tmp_path: Path, kind: Any) -> None:
    words = [f"word {i % 50}" for i in range(200)] + [None]
    ids = ids_of(tmp_path, pa.array(words, pa.string()).cast(kind), size=1000)
    plain = ids_of(tmp_path, pa.array(words, pa.string()), size=1000)
    np.testing.assert_array_equal(ids, plain)
    assert ids[-1] == 0
    assert ids[:-1].min() >= 1
    assert ids.max() < 1000
    assert len(np.unique(ids)) > 45


def test_hashes_stay_what_they_were(tmp_path: Path) -> None:
    """Pinned: another hash would make every saved table meaningless."""
    assert ids_of(tmp_path, pa.array(["emberkeep", ""]), size=10**6).tolist() == [614281, 951634]
    assert ids_of(tmp_path, pa.array([0, 1, -1]), size=10**6).tolist() == [318419, 652893, 201258]


def test_integers_hashed_or_by_remainder(tmp_path: Path) -> None:
    column = pa.array([0, 7, 12, None], pa.int32())
    hashed = ids_of(tmp_path, column, size=5)
    assert hashed[3] == 0
    assert set(hashed[:3].tolist()) <= {1, 2, 3, 4}
    assert ids_of(tmp_path, column.drop_null(), size=5, how="mod").tolist() == [0, 2, 2]
    assert ids_of(tmp_path, pa.array([2**64 - 1], pa.uint64()), size=10, how="mod")[0] == 5
    with pytest.raises(DataError, match=r"c.parquet, row 3: .* missing value; how='hash'"):
        ids_of(tmp_path, column, size=5, how="mod")


def test_lists_of_strings_with_missing_lists_and_values(tmp_path: Path) -> None:
    column = pa.array([["a", "b"], None, [], [None, "a"]], pa.list_(pa.string()))
    values, offsets = ids_of(tmp_path, column)
    assert offsets.tolist() == [0, 2, 2, 2]
    assert len(values) == 4
    assert values[0] == values[3]
    assert values[2] == 1 << 62


def test_dense_columns_and_labels(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.parquet",
        {
            "a": pa.array([1.5, None, float("nan")]),
            "b": pa.array([-3, 0, 9], pa.int16()),
            "flag": pa.array([True, False, None]),
            "click": pa.array([True, False, True]),
        },
    )
    source = Parquet(path, label="click", dense=["a", "b", "flag"], log=["b"])
    batch = read_all(source)
    assert batch.labels.tolist() == [1, 0, 1]
    wanted = np.array([[1.5, 0, 1], [0, 0, 0], [0, np.log(10), 0]], np.float32)
    np.testing.assert_array_equal(batch.dense, wanted)


def test_a_missing_label_is_named_by_file_and_row(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", {"y": pa.array([1.0] * 5)})
    second = write(tmp_path / "b.parquet", {"y": pa.array([1.0] * 7 + [None])}, group=3)
    with pytest.raises(DataError, match=r"b.parquet, row 7: column 'y' has no label"):
        read_all(Parquet([first, second], label="y"))


def test_wrong_files_and_columns_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"y": pa.array([1.0]), "s": pa.array(["x"])})
    with pytest.raises(
        DataError, match=r"a.parquet: no columns \['z'\]; the file has \['y', 's'\]"
    ):
        read_all(Parquet(path, label="z"))
    with pytest.raises(DataError, match="row 0: column 's' holds 'x', which is no number"):
        read_all(Parquet(path, label="y", dense=["s"]))
    with pytest.raises(DataError, match="column 'y' is double; a category"):
        read_all(Parquet(path, label=None, categories=[Category(column="y")]))
    broken = tmp_path / "b.parquet"
    broken.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"b.parquet: not a readable Parquet file"):
        read_all(Parquet(broken, label="y"))


def test_impossible_mappings_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"y": pa.array([1.0])})
    with pytest.raises(ConfigError, match="different names"):
        Parquet(path, label="y", categories=[Category(column="a"), Category(column="a")])
    with pytest.raises(ConfigError, match="not among the dense"):
        Parquet(path, label="y", log=["y"])
    with pytest.raises(ConfigError, match="needs a size"):
        Category(column="a", how="mod")
    with pytest.raises(ConfigError, match="too small"):
        Category(column="a", size=1)
    with pytest.raises(ConfigError, match="how must be"):
        Category(column="a", how="keep")  # type: ignore[arg-type]


def test_the_mapping_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"y": pa.array([1.0]), "c": pa.array([1])})
    known = Parquet(path, label="y", categories=[Category(column="c")]).fingerprint()
    assert Parquet([path], label="y", categories=[Category(column="c")]).fingerprint() == known
    assert Parquet(path, label="y").fingerprint() != known
    sized = Parquet(path, label="y", categories=[Category(column="c", size=9)])
    assert sized.fingerprint() != known


def test_directories_and_patterns_stand_for_their_files_in_order(tmp_path: Path) -> None:
    for day in ("day=1", "day=2"):
        (tmp_path / day).mkdir()
        for part in (10, 2, 1):
            number = 100 * int(day[-1]) + part
            write(tmp_path / day / f"part-{part}.parquet", {"x": [float(number)]})
        (tmp_path / day / "_SUCCESS").touch()
        (tmp_path / day / ".part-1.parquet.crc").touch()
        (tmp_path / day / "notes.txt").touch()
    (tmp_path / "_temporary").mkdir()
    write(tmp_path / "_temporary" / "part-9.parquet", {"x": [0.0]})

    def numbers(*paths: Path) -> list[float]:
        return list(read_all(Parquet(paths, label=None, dense=["x"])).dense[:, 0])

    assert numbers(tmp_path) == [101, 102, 110, 201, 202, 210]
    assert numbers(tmp_path / "day=*" / "part-1*") == [101, 110, 201, 210]
    assert numbers(tmp_path / "day=*") == [101, 102, 110, 201, 202, 210]
    assert numbers(tmp_path / "day=2", tmp_path / "day=1" / "part-2.parquet") == [
        201,
        202,
        210,
        102,
    ]
    with pytest.raises(DataError, match="nothing matches"):
        numbers(tmp_path / "*.orc")
    with pytest.raises(DataError, match="no such file"):
        numbers(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"a directory with no file that ends in \.parquet"):
        numbers(tmp_path / "empty")


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_numbers_may_be_strings_and_empty(kind: Any, tmp_path: Path) -> None:
    texts = pa.array(["1.5", "", None, " -2 ", "1e3"]).cast(kind)
    ids = pa.array(["7", "8", "9", "17", "3"])
    path = write(tmp_path / "t.parquet", {"x": texts, "y": ["0", "1", "1", "0", "1"], "c": ids})
    source = Parquet(
        path, label="y", dense=["x"], categories=[Category(column="c", size=10, how="mod")]
    )
    batch = read_all(source)
    assert batch.dense[:, 0].tolist() == [1.5, 0.0, 0.0, -2.0, 1000.0]
    assert batch.labels.tolist() == [0, 1, 1, 0, 1]
    assert batch.ids["c"].tolist() == [7, 8, 9, 7, 3]


def test_text_that_is_no_number_is_named_by_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", {"x": ["1", "", "two", "3"], "y": ["1", "", "0", "1"]})
    with pytest.raises(DataError, match=r"t\.parquet, row 2: column 'x' holds 'two', which is no"):
        read_all(Parquet(path, label=None, dense=["x"]))
    with pytest.raises(DataError, match="row 1: column 'y' has no label"):
        read_all(Parquet(path, label="y"))
    with pytest.raises(DataError, match=r"row 2: column 'x' holds 'two', which is no whole number"):
        read_all(Parquet(path, label=None, categories=[Category(column="x", size=9, how="mod")]))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "nan", "-inf"])
def test_a_label_that_is_no_number_is_named_by_its_row(wrong: float | str, tmp_path: Path) -> None:
    right = str(1.0) if isinstance(wrong, str) else 1.0
    path = write(tmp_path / "c.parquet", {"y": pa.array([right, right, wrong]), "x": [1, 2, 3]})
    with pytest.raises(DataError, match=r"row 2: column 'y' has (no|the) label"):
        read_all(Parquet(path, label="y", dense=["x"]))


def test_a_value_of_a_list_is_named_by_the_row_of_the_list(tmp_path: Path) -> None:
    items = Category(column="c", size=5, how="mod")
    columns = {"c": pa.array([["1", "2", "3"], [], None, ["4"], ["x"]]), "y": [1.0] * 5}
    source = Parquet(write(tmp_path / "text.parquet", columns), label="y", categories=[items])
    with pytest.raises(DataError, match="row 4: column 'c' holds 'x'"):
        read_all(source)
    columns = {"c": pa.array([[1, 2, 3], [], [4, None]]), "y": [1.0] * 3}
    source = Parquet(write(tmp_path / "null.parquet", columns), label="y", categories=[items])
    with pytest.raises(DataError, match="row 2: column 'c' has a missing value"):
        read_all(source)


def test_bytes_that_are_no_text_are_refused_as_numbers(tmp_path: Path) -> None:
    columns = {"c": pa.array([b"\xff\xfe", b"1"], pa.binary()), "y": [1.0, 0.0]}
    path = write(tmp_path / "c.parquet", columns)
    for options in (
        {"label": "y", "dense": ["c"]},
        {"label": "c"},
        {"label": "y", "categories": [Category(column="c", size=5, how="mod")]},
    ):
        with pytest.raises(DataError, match=r"c.parquet: column 'c' holds bytes that are no text"):
            read_all(Parquet(path, **options))


def test_a_feature_is_a_list_in_all_files_or_in_none(tmp_path: Path) -> None:
    one = write(tmp_path / "1.parquet", {"y": [1.0, 0.0], "c": [1, 2]})
    other = write(tmp_path / "2.parquet", {"y": [1.0, 0.0], "c": [[1, 2], [3]]})
    with pytest.raises(DataError, match="'c' is a list in some of the files"):
        read_all(Parquet([one, other], label="y", categories=[Category(column="c")]))


def test_strings_that_are_given_as_lists_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "c.parquet", {"y": [1.0]})
    with pytest.raises(ConfigError, match="dense must be a list, not the string 'price'"):
        Parquet(path, label="y", dense="price")
    with pytest.raises(ConfigError, match="Category"):
        Parquet(path, label="y", categories=["user"])
