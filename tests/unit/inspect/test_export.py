"""Versions as plain files: the rows that were saved, each once, complete or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from safetensors import safe_open

from emberkeep.checkpoint import Extras
from emberkeep.checkpoint.contents import IdSet, dense_arrays, merged_rows
from emberkeep.errors import ConfigError, DamageError, StorageError
from emberkeep.inspect.export import file_name, to_directory
from emberkeep.inspect.export_columns import to_columns as to_parquet
from emberkeep.inspect.export_tensors import to_safetensors
from emberkeep.inspect.summary import check
from emberkeep.repository import Repository
from emberkeep.repository.policies import LAYOUTS
from emberkeep.runtime import pool
from tests.unit.repositories import TABLES, Run, State, flipped

POOL = pool.Pool(2)


def by_id(ids: Any, planes: dict[str, Any]) -> tuple[bytes, dict[str, bytes]]:
    order = np.argsort(ids)
    assert np.unique(ids).size == ids.size
    return ids[order].tobytes(), {name: v[order].tobytes() for name, v in planes.items()}


def same(found: State, expected: State) -> bool:
    return {t: by_id(*rows) for t, rows in found.items()} == {
        t: by_id(*rows) for t, rows in expected.items()
    }


def read_safetensors(path: Path) -> State:
    tensors = safetensors.numpy.load_file(path)
    found: dict[str, dict[str, Any]] = {}
    for name, values in tensors.items():
        table, _, plane = name.rpartition("/")
        found.setdefault(table, {})[plane] = values
    return {table: (planes.pop("id"), planes) for table, planes in found.items()}


def read_parquet(path: Path) -> State:
    found: State = {}
    for table in TABLES:
        file = path / f"{file_name(table.name)}.parquet"
        if file.exists():
            columns = pq.read_table(file)
            planes = {
                name: np.stack([np.atleast_1d(v) for v in columns[name].to_numpy()])
                for name in columns.schema.names[1:]
            }
            found[table.name] = (columns["id"].to_numpy(), planes)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_version_is_written_as_it_was_saved(layout: Any, tmp_path: Path) -> None:
    run = Run(layout=layout)
    for _ in range(5):
        run.save()
    for version in run.repository.versions():
        expected = run.states[version.number]
        exported = to_safetensors(run.repository, version, tmp_path / f"{version}.st", POOL)
        assert same(read_safetensors(exported.files[0]), expected)
        assert exported.rows == {name: ids.size for name, (ids, _) in expected.items()}
        assert exported.nbytes == exported.files[0].stat().st_size
        to_parquet(run.repository, version, tmp_path / f"{version}.parquet", POOL)
        assert same(read_parquet(tmp_path / f"{version}.parquet"), expected)
    assert not list(tmp_path.glob(".*"))
    assert not list(run.store.list("pins"))


def test_a_restore_holds_everything(tmp_path: Path) -> None:
    run = Run(layout="one_shot")
    for _ in range(3):
        run.save()
    version = run.repository.version(2)
    exported = to_directory(run.repository, version, tmp_path / "out", POOL)
    found: State = {}
    for table in TABLES:
        file = tmp_path / "out" / "tables" / f"{file_name(table.name)}.safetensors"
        tensors = safetensors.numpy.load_file(file)
        found[table.name] = (tensors.pop("id"), tensors)
        with safe_open(file, "np") as opened:
            assert opened.metadata()["version"] == "2"
    assert same(found, run.states[2])
    dense = safetensors.numpy.load_file(tmp_path / "out" / "dense.safetensors")
    assert dense["bias"].tolist() == [200] * 3
    state = json.loads((tmp_path / "out" / "version.json").read_text())
    assert (state["step"], state["reader"], state["user"]) == (
        200,
        {"samples": 1400},
        {"step": 200},
    )
    assert state["schema"] == run.repository.schema
    assert {file.name for file in exported.files} >= {"version.json", "dense.safetensors"}


def test_one_table_and_tables_without_rows(tmp_path: Path) -> None:
    run = Run()
    run.keeper.save(1)
    run.keeper.wait()
    version = run.repository.version(1)
    to_safetensors(run.repository, version, tmp_path / "none", POOL)
    shapes = {k: v.shape for k, v in safetensors.numpy.load_file(tmp_path / "none").items()}
    assert shapes["wide/odd name/weight"] == (0, 9)
    assert shapes["fixed/id"] == (0,)
    to_parquet(run.repository, version, tmp_path / "one", POOL, tables=["fixed"])
    assert [file.name for file in (tmp_path / "one").iterdir()] == ["fixed.parquet"]
    with pytest.raises(ConfigError, match="no table 'fixd'; it has fixed, dynamic"):
        to_parquet(run.repository, version, tmp_path / "two", POOL, tables=["fixd"])


@pytest.mark.parametrize("write", [to_safetensors, to_parquet, to_directory])
def test_nothing_is_replaced_unasked_and_nothing_half_written(write: Any, tmp_path: Path) -> None:
    run = Run()
    run.save()
    run.save()
    one, two = run.repository.versions()
    target = tmp_path / "out"
    write(run.repository, one, target, POOL)
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="exists: choose another place, or --force"):
        write(run.repository, two, target, POOL)
    flipped(run.store, run.repository.manifest(two).files[0].name)
    with pytest.raises(DamageError):
        write(run.repository, two, target, POOL, force=True)
    with pytest.raises(DamageError):
        write(run.repository, two, tmp_path / "new", POOL)
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before
    write(run.repository, one, target, POOL, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(StorageError, match="create the directory first"):
        write(run.repository, one, tmp_path / "no" / "where", POOL)
    with pytest.raises(ConfigError, match="not a local path"):
        write(run.repository, one, Path("s3://bucket/out"), POOL)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"holds thesis\.tex, so it is not replaced"):
        write(run.repository, one, precious, POOL, force=True)


@pytest.mark.parametrize("write", [to_safetensors, to_parquet, to_directory])
def test_an_error_neither_replaces_nor_removes(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.save()
    version = run.repository.version(1)
    with pytest.raises(StorageError, match="File name too long"):
        write(run.repository, version, tmp_path / ("x" * 300), POOL)
    target = tmp_path / "out"
    write(run.repository, version, target, POOL)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    rename = os.rename

    def failing(source: Path, to: Path) -> None:
        if to == target and source.parent != tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, to)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(StorageError, match="was not written"):
        write(run.repository, version, target, POOL, force=True)
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    run = Run()
    run.save()
    to_directory(run.repository, run.repository.version(1), tmp_path, POOL)
    assert (tmp_path / "version.json").exists()


def test_rows_that_do_not_belong_are_refused() -> None:
    """A file whose digest is right, but which was written wrong."""
    run = Run()
    run.save()
    schema = json.loads(json.dumps(run.repository.schema))
    schema["tables"]["fixed"]["rows"] = 10
    schema["tables"]["dynamic"]["planes"]["weight"] = [7, "float32"]
    for table, problem in (("fixed", "outside its 10 rows"), ("dynamic", r"planes .* instead of")):
        wrong = Repository.open(run.store)
        wrong.schema = {"tables": {**run.repository.schema["tables"]}}
        wrong.schema["tables"][table] = schema["tables"][table]
        with pytest.raises(DamageError, match=problem):
            list(merged_rows(wrong, wrong.chain(1), POOL))


def tensor(kind: str, data: bytes, count: int) -> bytes:
    """A safetensors file with one tensor `x`, of any type."""
    header = {"x": {"dtype": kind, "shape": [count], "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def test_dense_types_that_numpy_lacks(tmp_path: Path) -> None:
    halves = np.array([1.5, -3.0], np.float32).view(np.uint32) >> 16
    content = tensor("BF16", halves.astype(np.uint16).tobytes(), 2)
    assert dense_arrays("dense", content)["x"].tolist() == [1.5, -3.0]
    run = Run()
    content = tensor("F8_E4M3", b"ab", 2)
    run.keeper.save(1, Extras(dense=content))
    run.keeper.wait()
    with pytest.raises(ConfigError, match="no type for the F8_E4M3 of tensor 'x'"):
        dense_arrays("dense", content)
    # It is as whole as any other for those who know the type.
    assert check(run.repository, pool=POOL).ok
    to_directory(run.repository, run.repository.version(1), tmp_path / "out", POOL)
    assert (tmp_path / "out" / "dense.safetensors").read_bytes() == content
    with pytest.raises(DamageError, match="not a safetensors file"):
        dense_arrays("dense", content[:-1])


def test_ids_in_sets() -> None:
    random = np.random.default_rng(0)
    ids, plain = IdSet(), set()
    assert ids.all().size == 0
    for _ in range(60):
        new = random.integers(-500, 500, random.integers(0, 40))
        asked = random.integers(-600, 600, 50)
        assert ids.has(asked).tolist() == [int(i) in plain for i in asked]
        ids.add(new)
        plain.update(new.tolist())
    assert ids.all().tolist() == sorted(plain)
    assert len(ids._runs) <= 11


def test_a_file_is_there_at_every_moment_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.save()
    target = tmp_path / "out.safetensors"
    to_safetensors(run.repository, run.repository.version(1), target, POOL)
    rename = os.rename

    def watched(source: Path, to: Path) -> None:
        rename(source, to)
        assert target.exists()

    monkeypatch.setattr(os, "rename", watched)
    to_safetensors(run.repository, run.repository.version(1), target, POOL, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]
