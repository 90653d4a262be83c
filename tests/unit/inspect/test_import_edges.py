"""Imports at their edges: other repositories of every layout, large tables, files that are odd."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch
import torch.distributed.checkpoint as dcp

from emberkeep._types import Array
from emberkeep.blobs import LocalStore
from emberkeep.errors import DataError, EmberkeepError
from emberkeep.inspect import row_sources, staged_rows
from emberkeep.inspect.importer import Import, Imported, look
from emberkeep.inspect.intake import Choice
from emberkeep.inspect.repository_rows import open_rows
from emberkeep.repository import Repository
from emberkeep.runtime import pool
from tests.contracts.engine import grads_of, wanted_of
from tests.unit.inspect.test_importer import stored
from tests.unit.repositories import TABLES, Run

POOL = pool.Pool(2)
BUCKET_NBYTES = 40_000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sources, "CHUNK_NBYTES", 20_000)
    monkeypatch.setattr(staged_rows, "_BUCKET_NBYTES", BUCKET_NBYTES)


def looked(at: Path, *files: object, **options: Any) -> Import:
    choice = Choice(**{key: options.pop(key) for key in ("table", "dim_change") if key in options})
    return look(LocalStore(at), [str(file) for file in files], choice, POOL, **options)


def imported(at: Path, *files: object, **options: Any) -> Imported:
    return looked(at, *files, **options).run(at.parent / "scratch")


def train_one_table(run: Run) -> None:
    batch: dict[str, list[int]] = {table.name: [] for table in TABLES} | {"fixed": [1, 2]}
    grads = {table.name: np.ones((len(batch[table.name]), table.dim)) for table in TABLES}
    run.cluster.push(wanted_of(run.cluster, batch), grads_of(run.cluster, grads), lr=0.05)


@pytest.mark.parametrize("layout", ["full", "one_shot", "consecutive", "grid"])
def test_a_repository_brings_tables_that_its_newest_version_did_not_write(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(store=LocalStore(tmp_path / "run"), layout=layout)
    for _ in range(3):
        run.save(2)
    monkeypatch.setattr(run, "train", lambda: train_one_table(run))
    state = run.states[run.save(1)]
    source = open_rows(str(tmp_path / "run"), None)
    assert all(part.rows >= len(state[part.path][0]) for part in source.parts)
    found = imported(tmp_path / "copy", tmp_path / "run", init=True)
    assert found.rows == {table.name: len(state[table.name][0]) for table in TABLES}
    copied = stored(LocalStore(tmp_path / "copy"))
    for name, (ids, planes) in state.items():
        order, own = np.argsort(copied[name][0]), np.argsort(ids)
        assert np.array_equal(copied[name][0][order], ids[own])
        assert np.array_equal(copied[name][1]["weight"][order], planes["weight"][own])


def save(at: Path, **tensors: Array) -> Path:
    safetensors.numpy.save_file({f"items/{name}": t for name, t in tensors.items()}, at)
    return at


def items(first: int, count: int, value: float) -> dict[str, Array]:
    return {
        "id": np.arange(first, first + count, dtype=np.int64),
        "weight": np.full((count, 6), value, np.float32),
    }


def test_a_few_rows_into_a_large_table_are_joined_by_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = np.full((9000, 6), 0.5, np.float32)
    imported(
        tmp_path / "run", save(tmp_path / "a.safetensors", **items(0, 9000, 1.0), sum=sums),
        init=True,
    )  # fmt: skip
    read, largest = staged_rows.Stage.read, [0]

    def reading(stage: staged_rows.Stage, family: int, bucket: int) -> Array:
        found = read(stage, family, bucket)
        largest[0] = max(largest[0], found.nbytes)
        return found

    monkeypatch.setattr(staged_rows.Stage, "read", reading)
    found = imported(tmp_path / "run", save(tmp_path / "b.safetensors", **items(8990, 20, 2.0)))
    assert (found.rows, found.new) == ({"items": 20}, {"items": 10})
    assert largest[0] < 2 * BUCKET_NBYTES
    ids, planes = stored(LocalStore(tmp_path / "run"))["items"]
    assert ids.size == 9010
    accumulator = dict(zip(ids.tolist(), planes["accumulator"][:, 0].tolist(), strict=True))
    assert (accumulator[8999], accumulator[9000]) == (0.5, 0.0)


class Ended(Exception):
    pass


def test_an_import_goes_on_right_after_the_repository_has_grown(tmp_path: Path) -> None:
    run, b = tmp_path / "run", save(tmp_path / "b.safetensors", **items(0, 3000, 2.0))
    imported(run, save(tmp_path / "a.safetensors", **items(0, 50, 1.0)), init=True)

    def end() -> None:
        raise Ended

    with pytest.raises(Ended):
        looked(run, b).run(tmp_path / "scratch", may_write=end)
    c = save(tmp_path / "c.safetensors", **items(3000, 9000, 3.0))
    looked(run, c).run(tmp_path / "elsewhere")
    found = imported(run, b)
    assert (found.rows, found.new) == ({"items": 3000}, {"items": 2950})
    ids, planes = stored(LocalStore(run))["items"]
    assert sorted(ids.tolist()) == list(range(12000))
    assert set(planes["weight"][np.argsort(ids), 0][:3000].tolist()) == {2.0}


@pytest.mark.parametrize("removed", range(4))
def test_what_an_import_leaves_that_is_killed_after_its_commit_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    """However far it came with tidying up: two buckets, the journal, then the lock."""
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    b = save(tmp_path / "b.safetensors", **items(0, 3000, 2.0))
    unlink, left = Path.unlink, [removed]

    def killed(file: Path) -> None:
        if file.parent == scratch:
            if not left[0]:
                raise Ended
            left[0] -= 1
        unlink(file)

    with monkeypatch.context() as kill:
        kill.setattr(Path, "unlink", killed)
        with pytest.raises(Ended):
            imported(run, b, init=True)
    assert scratch.exists()
    assert imported(run, b).again
    assert not scratch.exists()


def test_what_another_import_has_left_to_go_on_from_stays(tmp_path: Path) -> None:
    run, b = tmp_path / "run", save(tmp_path / "b.safetensors", **items(0, 3000, 2.0))
    a = save(tmp_path / "a.safetensors", **items(0, 50, 1.0))
    imported(run, a, init=True)

    def end() -> None:
        raise Ended

    with pytest.raises(Ended):
        looked(run, b).run(tmp_path / "scratch", may_write=end)
    assert imported(run, a).again
    assert imported(run, b).resumed


def test_rows_that_come_in_another_order_are_read_from_the_start(tmp_path: Path) -> None:
    source = Run(store=LocalStore(tmp_path / "from"), layout="grid")
    source.save(4)
    before = looked(tmp_path / "run", tmp_path / "from", init=True)
    assert before.sources[0].order
    plan = before._staged(before._families())
    with staged_rows.Stage.open(tmp_path / "scratch") as stage:
        stage.begin(plan, before._families())
        stage.note(1, 0)
        assert stage.begin(plan, before._families())
        assert not stage.begin({**plan, "orders": [[7]]}, before._families())


def test_an_unreadable_file_is_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = save(tmp_path / "good.safetensors", **items(0, 5, 1.0))
    bad = tmp_path / "bad.parquet"
    pq.write_table(pa.table({"id": [1], "weight": [[1.0]]}), bad)

    def refuse(*_args: object) -> bool:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr("emberkeep.inspect.arrow_files._is_parquet", refuse)
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read: Permission denied"):
        looked(tmp_path / "run", good, bad, init=True)


ODD: dict[str, tuple[dict[str, Array], str]] = {
    "one tensor under two names": (
        {**items(0, 3, 1.0), "": np.empty(0)}, "two tensors are the weight of items"
    ),
    "two kinds of ids": ({**items(0, 3, 1.0), "keys": np.arange(3)}, "id and keys are both ids"),
    "no columns": (
        {"id": np.arange(3), "weight": np.empty((3, 0), np.float32)}, "has no columns"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_tensors_of_which_one_would_be_left_out_unsaid_are_refused(
    what: str, tmp_path: Path
) -> None:
    tensors, message = ODD[what]
    imported(tmp_path / "run", save(tmp_path / "a.safetensors", **items(0, 3, 1.0)), init=True)
    named = {f"items/{name}": tensor for name, tensor in tensors.items() if name}
    if "" in tensors:
        named["items.weight"] = np.full((3, 6), 9.0, np.float32)
    safetensors.numpy.save_file(named, tmp_path / "odd.safetensors")
    with pytest.raises(DataError, match=message):
        imported(tmp_path / "run", tmp_path / "odd.safetensors", dim_change="pad")


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([[1, 2], [[1.0], [2.0]], [3, 4]], names=["id", "weight", "id"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="several columns id"):
        looked(tmp_path / "run", tmp_path / "a.parquet", init=True, ids="id")


def by_old_torch(at: Path) -> Path:
    tensors = {f"items.{name}": torch.from_numpy(t) for name, t in items(0, 3, 1.0).items()}
    torch.save(tensors, at / "old.pt", _use_new_zipfile_serialization=False)
    return at / "old.pt"


def by_dcp(at: Path) -> Path:
    tensors = {f"items.{name}": torch.from_numpy(t) for name, t in items(0, 3, 1.0).items()}
    dcp.save(tensors, checkpoint_id=at / "dcp", no_dist=True)
    return at / "dcp"


def by_arrow(at: Path) -> Path:
    table = pa.table({"id": np.arange(3), "weight": [[1.0, 2.0]] * 3})
    with pa.ipc.new_stream(at / "items.arrow", table.schema) as writer:
        writer.write_table(table)
    return at / "items.arrow"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("write", "part"),
    [(by_old_torch, ""), (by_dcp, ".metadata"), (by_dcp, "__0_0.distcp"), (by_arrow, "")],
)
def test_a_damaged_file_is_refused_in_one_line_wherever_the_damage_is(
    write: Callable[[Path], Path], part: str, tmp_path: Path
) -> None:
    source = write(tmp_path)
    file = source / part if part else source
    whole = file.read_bytes()
    refused = 0
    step = max(1, len(whole) // 60)
    for flip, position in enumerate(range(0, len(whole), step)):
        damaged = bytearray(whole)
        damaged[position] ^= (0x01, 0x80, 0xFF)[flip % 3]
        file.write_bytes(damaged)
        try:
            for intake in looked(tmp_path / "run", source, init=True, table="items").intakes:
                with row_sources.reading(source):
                    for _ in intake.part.chunks(0):
                        pass
        except EmberkeepError:
            refused += 1
    assert refused
    assert not Repository.exists(LocalStore(tmp_path / "run"))
