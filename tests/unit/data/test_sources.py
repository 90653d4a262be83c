"""Windows, splits, and what importing costs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep import data
from emberkeep.data import Synthetic, Window, sources, split
from emberkeep.data.sources import existing_files
from emberkeep.errors import ConfigError


def test_window_renumbers_samples_from_zero() -> None:
    source = Synthetic(samples=100, rows_total=1000)
    window = Window(source=source, start=30, stop=50)
    cursor = window.open(5)
    batch = cursor.read(100)
    assert len(batch) == 15
    np.testing.assert_array_equal(batch.ids["C3"], source.batch(35, 15).ids["C3"])
    assert window.count() == 20
    assert cursor.skip(1) == 0


def test_window_is_cut_by_the_end_of_its_source() -> None:
    window = Window(source=Synthetic(samples=100, rows_total=1000), start=90, stop=500)
    assert window.count() == 10
    assert len(window.open(0).read(50)) == 10


def test_only_the_start_of_a_window_changes_its_fingerprint() -> None:
    source = Synthetic(samples=100, rows_total=1000)
    whole = source.fingerprint()
    assert Window(source=source, stop=10).fingerprint() == whole
    assert Window(source=source, start=10).fingerprint() != whole


def test_window_refuses_a_stop_before_its_start() -> None:
    with pytest.raises(ConfigError, match="start=5, stop=4"):
        Window(source=Synthetic(), start=5, stop=4)


@pytest.mark.parametrize("test", [20, 0.2])
def test_split_holds_out_the_last_samples(test: int | float) -> None:
    source = Synthetic(samples=100, rows_total=1000)
    train, held_out = split(source, test=test)
    assert (train.count(), held_out.count()) == (80, 20)
    np.testing.assert_array_equal(held_out.open(0).read(99).dense, source.open(80).read(99).dense)
    assert len(train.open(0).read(99)) == 80


@pytest.mark.parametrize("test", [0, 100, 0.0, 1.0])
def test_split_leaves_samples_on_both_sides(test: int | float) -> None:
    with pytest.raises(ConfigError, match="leave some on both sides"):
        split(Synthetic(samples=100, rows_total=1000), test=test)


def test_split_needs_an_end() -> None:
    with pytest.raises(ConfigError, match="without an end"):
        split(Synthetic(), test=0.1)


def test_every_public_name_resolves() -> None:
    for name in data.__all__:
        assert getattr(data, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = data.Nothing


def laid_out(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.mark.parametrize("pattern", ["**", "**/*", "**/*.log", "*"])
def test_a_pattern_takes_every_file_once(pattern: str, tmp_path: Path) -> None:
    laid_out(tmp_path, "a/b/1.log", "a/2.log", "c/3.log")
    if pattern == "*":
        assert len(existing_files(tmp_path / "*")) == 3
    found = existing_files(tmp_path / pattern, (".log",))
    assert sorted(file.name for file in found) == ["1.log", "2.log", "3.log"]


def test_a_pattern_passes_over_what_a_directory_does_unless_it_is_spelled_out(
    tmp_path: Path,
) -> None:
    laid_out(tmp_path, "part-0", "_SUCCESS", ".part-0.crc", "_temporary/part-1", "_more/part-2")
    for pattern in ("*", "**/*", "part*"):
        assert [file.name for file in existing_files(tmp_path / pattern)] == ["part-0"]
    found = existing_files(tmp_path / "_m*" / "*")
    assert [file.name for file in found] == ["part-2"]


def test_files_whose_numbers_are_equal_have_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["part-01", "part-1", "part-2", "part-2\N{SUPERSCRIPT TWO}"]
    laid_out(tmp_path, *names)
    for order in (sorted(names), sorted(names, reverse=True)):
        listed = [str(tmp_path / name) for name in order]
        monkeypatch.setattr(sources.glob, "glob", lambda *_, found=listed, **__: found)
        assert [file.name for file in existing_files(tmp_path / "part-*")] == names


@pytest.mark.parametrize("test", [np.float32(0.2), np.int64(20)])
def test_split_takes_numbers_of_numpy(test: Any) -> None:
    _, held_out = split(Synthetic(samples=100, rows_total=1000), test=test)
    assert (held_out.start, held_out.count()) == (80, 20)


@pytest.mark.parametrize("test", [math.nan, True, "0.1"])
def test_split_refuses_what_is_no_number(test: Any) -> None:
    with pytest.raises(ConfigError, match="test= takes a number"):
        split(Synthetic(samples=100, rows_total=1000), test=test)


def test_counts_of_samples_are_whole_numbers() -> None:
    for wrong in ({"samples": 1e6}, {"rows_total": 1e6}, {"seed": 0.5}):
        with pytest.raises(ConfigError, match="must be a whole number"):
            Synthetic(**wrong)
    for wrong in ({"start": 2.0}, {"stop": 1e6}):
        with pytest.raises(ConfigError, match="must be a whole number"):
            Window(source=Synthetic(rows_total=1000), **wrong)
    plain = Synthetic(rows_total=1000, samples=10)
    assert Synthetic(rows_total=np.int64(1000), samples=np.int64(10)) == plain
    assert Synthetic(rows_total=np.int64(1000)).fingerprint() == plain.fingerprint()
