"""Rows of other systems become one version: each format by its own writer, whole or not at all."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from emberkeep._types import RowIds
from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.checkpoint.contents import merged_rows
from emberkeep.cluster.local.local_cluster import local
from emberkeep.errors import ConfigError, DataError, EmberkeepError, FencedError
from emberkeep.inspect import export_tensors, row_sources, staged_rows
from emberkeep.inspect.export_columns import to_columns
from emberkeep.inspect.importer import Imported, look
from emberkeep.inspect.intake import Choice
from emberkeep.inspect.plane_names import TableMap, split_name, tensor_name
from emberkeep.repository import Repository, Writer
from emberkeep.runtime import pool
from emberkeep.tables import Adagrad, Adam, Table
from tests.contracts.engine import state
from tests.unit.repositories import TABLES, Run, State

POOL = pool.Pool(2)
ROWS, DIM = 5000, 6


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, and buckets, of which there are many."""
    monkeypatch.setattr(row_sources, "CHUNK_NBYTES", 20_000)
    monkeypatch.setattr(staged_rows, "_BUCKET_NBYTES", 40_000)


def rows_of(seed: int = 0, rows: int = ROWS, most: int = 10**12) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "id": random.choice(most, rows, replace=False).astype(np.int64) - most // 3,
        "weight": random.standard_normal((rows, DIM)).astype(np.float32),
        "sum": random.random((rows, DIM)).astype(np.float32),
    }


def by_safetensors(rows: Any, at: Path) -> Path:
    tensors = {f"items/{name}": torch.from_numpy(values) for name, values in rows.items()}
    safetensors.torch.save_file(tensors, at / "rows.safetensors")
    return at / "rows.safetensors"


def by_torch(rows: Any, at: Path) -> Path:
    saved = {
        "model": {
            "ebc.embedding_bags.items.weight": torch.from_numpy(rows["weight"]),
            "ebc.embedding_bags.items.ids": torch.from_numpy(rows["id"]),
            "over.0.weight": torch.ones(3, 3),
            "over.0.bias": torch.ones(3),
        },
        "optimizer": {
            "state": {
                "ebc.embedding_bags.items.weight": {
                    "items.momentum1": torch.from_numpy(rows["sum"])
                }
            },
            "param_groups": [{"lr": 0.1}],
        },
        "epoch": 7,
    }
    torch.save(saved, at / "model.pt")
    return at / "model.pt"


def by_parquet(rows: Any, at: Path) -> Path:
    columns = {
        "id": rows["id"],
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(rows["weight"].reshape(-1)), DIM),
        "sum": pa.array(list(rows["sum"])),
        "title": pa.array(["x"] * rows["id"].size),
    }
    pq.write_table(pa.table(columns), at / "items.parquet", row_group_size=1300)
    return at / "items.parquet"


def by_arrow(rows: Any, at: Path) -> Path:
    table = pa.table({"id": rows["id"], "weight": list(rows["weight"]), "sum": list(rows["sum"])})
    with pa.ipc.new_stream(str(at / "items.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    return at / "items.arrow"


def by_dcp(rows: Any, at: Path) -> Path:
    saved = {"model": {"items": {n: torch.from_numpy(v) for n, v in rows.items()}}, "step": 3}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(saved, checkpoint_id=at / "dcp", no_dist=True)
    return at / "dcp"


def by_dynamicemb(rows: Any, at: Path) -> Path:
    """As dynamicemb's dump writes: raw arrays, one file of each kind for each rank."""
    folder = at / "dump" / "model" / "ebc"
    folder.mkdir(parents=True)
    for rank in range(3):
        own = rows["id"] % 3 == rank
        for item, values in (
            ("emb_keys", rows["id"]), ("emb_values", rows["weight"]),
            ("emb_opt_values", rows["sum"]), ("emb_scores", rows["id"]),
        ):  # fmt: skip
            values[own].tofile(folder / f"items_{item}.rank_{rank}.world_size_3")
    (folder / "items_opt_args.json").write_text(json.dumps({"opt_type": "exact_adagrad"}))
    return at / "dump"


def by_repository(rows: Any, at: Path) -> Path:
    run(LocalStore(at / "other"), [by_safetensors(rows, at)], at / "s", init=True)
    return at / "other"


FORMATS: dict[str, Callable[[Any, Path], Path]] = {
    "safetensors": by_safetensors, "torch": by_torch, "parquet": by_parquet, "arrow": by_arrow,
    "dcp": by_dcp, "dynamicemb": by_dynamicemb, "repository": by_repository,
}  # fmt: skip


def run(
    store: Any, files: Any, scratch: Path, *, choice: Choice | None = None, init: bool = False,
    advance: Any = lambda nbytes: None, journal_nbytes: int = 30_000, **options: Any,
) -> Imported:  # fmt: skip
    found = look(store, [str(f) for f in files], choice or Choice(), POOL, init=init, **options)
    return found.run(scratch, advance=advance, journal_nbytes=journal_nbytes)


def stored(store: Any) -> State:
    repository = Repository.open(store)
    newest = repository.newest_whole()
    assert newest is not None
    found: dict[str, list[Any]] = {}
    for _, chunk in merged_rows(repository, repository.chain(newest), POOL):
        if chunk.planes is not None:
            found.setdefault(chunk.table, []).append(chunk)
    return {
        table: (
            np.concatenate([chunk.ids for chunk in chunks]),
            {n: np.concatenate([c.planes[n] for c in chunks]) for n in chunks[0].planes},
        )
        for table, chunks in found.items()
    }


def assert_holds(store: Any, rows: Any, table: str = "items") -> None:
    ids, planes = stored(store)[table]
    order, expected = np.argsort(ids), np.argsort(rows["id"])
    assert np.array_equal(ids[order], rows["id"][expected])
    assert np.array_equal(planes["weight"][order], rows["weight"][expected])
    assert np.array_equal(planes["accumulator"][order], rows["sum"][expected])


# -- formats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_comes_in_whole_and_is_trained_on(name: str, tmp_path: Path) -> None:
    rows = rows_of()
    file = FORMATS[name](rows, tmp_path)
    store = LocalStore(tmp_path / "run")
    imported = run(store, [file], tmp_path / "scratch", init=True)
    assert imported.rows == {"items": ROWS} == imported.new
    assert imported.kinds == [name]
    assert not (tmp_path / "scratch").exists()
    assert_holds(store, rows)
    table = Table("items", rows=None, capacity=ROWS, dim=DIM)
    cluster = local(shards=3, threads=1).open([table], Adagrad(lr=0.1), seed=0)
    Checkpointer(Repository.open(store), cluster).restore()
    found = cluster.read("items", rows["id"])
    assert np.array_equal(found["weight"], rows["weight"])
    assert np.array_equal(found["accumulator"], rows["sum"])


@pytest.mark.parametrize("names", ["emberkeep", "torch", "torchrec", "fbgemm"])
@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp", "parquet", "arrow", "dynamicemb"])
def test_what_was_exported_comes_back(kind: Any, names: Any, tmp_path: Path) -> None:
    if kind == "dynamicemb" and names != "emberkeep":
        pytest.skip("its files have no names for planes")
    rows = rows_of(rows=600)
    store = LocalStore(tmp_path / "run")
    run(store, [by_safetensors(rows, tmp_path)], tmp_path / "s", init=True)
    repository = Repository.open(store)
    version, path = repository.newest_whole(), tmp_path / f"out.{kind}"
    assert version is not None
    options: Any = {} if kind == "dynamicemb" else {"names": names}
    if kind in ("parquet", "arrow"):
        to_columns(repository, version, path, POOL, kind=kind, **options)
    else:
        write = {
            "safetensors": export_tensors.to_safetensors, "torch": export_tensors.to_torch,
            "dcp": export_tensors.to_checkpoint, "dynamicemb": export_tensors.to_dump,
        }[kind]  # fmt: skip
        write(repository, version, path, POOL, **options)
    again = LocalStore(tmp_path / "again")
    run(again, [path], tmp_path / "s", init=True)
    assert_holds(again, rows)


def test_names_are_those_of_other_systems() -> None:
    assert tensor_name("t", "accumulator", "torch") == "t.sum"
    assert tensor_name("t", "first_moment", "torchrec") == "embedding_bags.t.weight.t.exp_avg"
    assert tensor_name("t", "second_moment", "fbgemm") == "embedding_bags.t.weight.t.momentum2"
    assert split_name("state.m.embedding_bags.t.weight.t.momentum1") == (
        "state.m.embedding_bags.t", "momentum1",
    )  # fmt: skip
    assert split_name("state.emb.t.weight.sum") == ("state.emb.t", "sum")
    assert split_name("over.0.bias") is None


def test_weights_and_states_may_come_from_two_files(tmp_path: Path) -> None:
    rows = rows_of()
    order = np.random.default_rng(5).permutation(ROWS)
    weights = {"items/id": rows["id"], "items/weight": rows["weight"]}
    sums = {"items/id": rows["id"][order], "items/sum": rows["sum"][order]}
    for name, tensors in (("a", weights), ("b", sums)):
        tensors = {n: torch.from_numpy(v).contiguous() for n, v in tensors.items()}
        safetensors.torch.save_file(tensors, tmp_path / f"{name}.safetensors")
    store = LocalStore(tmp_path / "run")
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    run(store, files, tmp_path / "s", init=True)
    assert_holds(store, rows)


def test_numbers_of_other_types_and_numbered_rows(tmp_path: Path) -> None:
    weight = torch.randn(300, DIM)
    saved = {"emb.weight": weight.bfloat16(), "emb.exp_avg": weight.half(),
             "emb.exp_avg_sq": weight.double()}  # fmt: skip
    torch.save(saved, tmp_path / "m.pt")
    store = LocalStore(tmp_path / "run")
    with pytest.raises(ConfigError, match="what is a table is not known; if one of emb is"):
        run(store, [tmp_path / "m.pt"], tmp_path / "s", init=True)
    choice = Choice(tables=TableMap({"emb": "items"}))
    run(store, [tmp_path / "m.pt"], tmp_path / "s", choice=choice, init=True)
    repository = Repository.open(store)
    assert repository.tables["items"]["rows"] == 300
    ids, planes = stored(store)["items"]
    assert ids.tolist() == list(range(300))
    assert np.array_equal(planes["weight"], weight.bfloat16().float().numpy())
    assert np.array_equal(planes["first_moment"], weight.half().float().numpy())
    assert np.array_equal(planes["second_moment"], weight.numpy())


# -- into a run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["full", "one_shot", "intermittent", "consecutive", "grid"])
def test_an_import_into_a_run_is_an_upsert_of_its_newest_version(
    layout: Any, tmp_path: Path
) -> None:
    """Weights alone: known rows keep what the optimizer remembers, new ones begin."""
    before = Run(layout=layout, store=LocalStore(tmp_path / "run"))
    for _ in range(3):
        before.save()
    before.keeper.settle()
    random = np.random.default_rng(9)
    given = {
        "fixed": np.arange(10, 70),
        "dynamic": np.arange(100, 180),
        "evicting": np.arange(40, 60),
    }
    tensors = {}
    for table, ids in given.items():
        weight = random.standard_normal((ids.size, 6)).astype(np.float32)
        tensors |= {f"{table}/id": torch.from_numpy(ids), f"{table}/weight": torch.tensor(weight)}
        before.cluster.upsert(table, ids, {"weight": weight})
    safetensors.torch.save_file(tensors, tmp_path / "w.safetensors")
    expected = state(before.cluster)
    newest = before.repository.manifest(before.repository.versions()[-1])
    imported = run(before.store, [tmp_path / "w.safetensors"], tmp_path / "s")
    assert imported.whole == (layout == "grid")
    manifest = imported.manifest
    assert (manifest.step, manifest.reader, manifest.user) == (
        newest.step, newest.reader, newest.user,
    )  # fmt: skip
    assert imported.filled["dynamic"] == ["first_moment", "second_moment", "step"]
    for shards in (1, 2, 3):
        cluster = local(shards=shards, threads=1).open(TABLES, Adam(lr=0.05, step="row"), seed=3)
        checkpointer = Checkpointer(Repository.open(before.store), cluster)
        if shards == 2:
            checkpointer.restore()
            found = state(cluster)
            assert _without_ages(found) == _without_ages(expected)
            assert [s for _, s in sorted(_rows_held(cluster).items())] == [
                s for _, s in sorted(_rows_held(before.cluster).items())
            ]
        else:
            checkpointer.restore()
            assert state(cluster)["fixed"] == expected["fixed"]
    checkpointer.save(999)  # the run goes on from it
    assert checkpointer.wait() is not None


def _without_ages(found: dict[str, Any]) -> dict[str, Any]:
    return {t: {n: v for n, v in planes.items() if n != "used"} for t, planes in found.items()}


def _rows_held(cluster: Any) -> dict[str, Any]:
    return {n: table["rows"] for n, table in cluster.table_state().items() if "rows" in table}


@pytest.mark.parametrize(("dim", "change"), [(4, "pad"), (9, "truncate")])
def test_rows_of_another_width_are_changed_only_if_that_is_said(
    dim: int, change: Any, tmp_path: Path
) -> None:
    weight = np.random.default_rng(0).standard_normal((50, dim)).astype(np.float32)
    tensors = {"fixed/id": torch.arange(50), "fixed/weight": torch.from_numpy(weight)}
    safetensors.torch.save_file(tensors, tmp_path / "w.safetensors")
    before = Run(store=LocalStore(tmp_path / "run"))
    before.save()
    files = [tmp_path / "w.safetensors"]
    for refused in {"error", "pad", "truncate"} - {change}:
        with pytest.raises(DataError, match=f"is {dim} wide.*--dim-change {change}"):
            run(before.store, files, tmp_path / "s", choice=Choice(dim_change=refused))
    run(before.store, files, tmp_path / "s", choice=Choice(dim_change=change))
    ids, planes = stored(before.store)["fixed"]
    found = planes["weight"][np.argsort(ids)][np.isin(np.sort(ids), np.arange(50))]
    same = min(dim, 6)
    assert np.array_equal(found[:, :same], weight[:, :same])
    assert not found[:, same:].any()


# -- ended half-way ------------------------------------------------------------------------------


class Ended(Exception):
    pass


def test_an_import_that_ends_anywhere_shows_nothing_and_goes_on(tmp_path: Path) -> None:
    rows = rows_of(rows=2500)
    file = by_dynamicemb(rows, tmp_path)
    steps: list[int] = []
    run(LocalStore(tmp_path / "count"), [file], tmp_path / "s", init=True, advance=steps.append)
    went_on = 0
    for position in range(1, len(steps), 3):
        store = LocalStore(tmp_path / f"run-{position}")
        seen: list[int] = []

        def end(nbytes: int, seen: list[int] = seen, position: int = position) -> None:
            seen.append(nbytes)
            if len(seen) == position:
                raise Ended

        with pytest.raises(Ended):
            run(store, [file], tmp_path / "s", init=True, advance=end)
        if Repository.exists(store):
            assert Repository.open(store).versions() == ()
        again: list[int] = []
        imported = run(store, [file], tmp_path / "s", init=True, advance=again.append)
        went_on += imported.resumed
        assert imported.resumed == (len(again) < len(steps) or again[0] > 0)
        assert_holds(store, rows)
        assert len(Repository.open(store).versions()) == 1
    assert went_on > len(steps) // 6


@pytest.mark.processes
def test_a_killed_import_goes_on_where_its_files_were_read_to(tmp_path: Path) -> None:
    rows = rows_of()
    file = by_parquet(rows, tmp_path)
    script = f"""
import os, signal, sys
from tests.unit.inspect import test_importer as t
from emberkeep.blobs import LocalStore
t.row_sources.CHUNK_NBYTES = 20_000
t.staged_rows._BUCKET_NBYTES = 40_000
left = [{ROWS * 56 // 2}]
def advance(nbytes):
    left[0] -= nbytes
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
t.run(LocalStore({str(tmp_path / "run")!r}), [{str(file)!r}], t.Path({str(tmp_path / "s")!r}),
      init=True, advance=advance)
"""
    killed = subprocess.run(
        [sys.executable, "-c", script], check=False, cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    store = LocalStore(tmp_path / "run")
    assert not Repository.exists(store)
    seen: list[int] = []
    imported = run(store, [file], tmp_path / "s", init=True, advance=seen.append)
    assert imported.resumed
    assert seen[0] > ROWS * 56 // 3  # so much was not read again
    assert_holds(store, rows)


def test_files_that_changed_meanwhile_are_read_from_the_start(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")

    def end(nbytes: int, seen: list[int] = []) -> None:  # noqa: B006 - it counts over all calls
        seen.append(nbytes)
        if len(seen) == 8:
            raise Ended

    with pytest.raises(Ended):
        run(store, [by_safetensors(rows_of(0), tmp_path)], tmp_path / "s", init=True, advance=end)
    rows = rows_of(1)
    file = by_safetensors(rows, tmp_path)
    os.utime(file, ns=(1, 1))
    assert not run(store, [file], tmp_path / "s", init=True).resumed
    assert_holds(store, rows)


def test_an_import_that_is_there_already_is_not_made_twice(tmp_path: Path) -> None:
    store, file = LocalStore(tmp_path / "run"), by_safetensors(rows_of(), tmp_path)
    first = run(store, [file], tmp_path / "s", init=True)
    again = run(store, [file], tmp_path / "s", init=True)
    assert again.again
    assert again.manifest == first.manifest
    assert again.rows == first.rows


def test_who_started_to_train_while_files_were_read_is_not_fenced(tmp_path: Path) -> None:
    store, file = LocalStore(tmp_path / "run"), by_safetensors(rows_of(), tmp_path)
    run(store, [file], tmp_path / "s", init=True)
    os.utime(file)  # another file, as far as anybody knows
    writer = Writer.open(Repository.open(store))

    def refuses() -> None:
        raise ConfigError("somebody trains")

    found = look(store, [str(file)], Choice(), POOL)
    with pytest.raises(ConfigError, match="somebody trains"):
        found.run(tmp_path / "s", may_write=refuses)
    writer.check()
    assert (tmp_path / "s").exists()
    again = run(store, [file], tmp_path / "s")
    assert again.resumed
    with pytest.raises(FencedError):
        writer.check()


def test_a_second_import_at_once_is_refused(tmp_path: Path) -> None:
    store, file = LocalStore(tmp_path / "run"), by_safetensors(rows_of(), tmp_path)
    refused: list[str] = []

    def second(nbytes: int) -> None:
        if not refused:
            with pytest.raises(ConfigError, match="another import") as error:
                run(store, [file], tmp_path / "s", init=True)
            refused.append(str(error.value))

    run(store, [file], tmp_path / "s", init=True, advance=second)
    assert refused


# -- refused -------------------------------------------------------------------------------------


def _spoiled(what: str, at: Path) -> list[Path]:
    rows = rows_of(rows=400)
    if what == "twice":
        rows["id"][7] = rows["id"][300]
    elif what == "nan":
        rows["weight"][33, 2] = np.nan
    elif what == "two files":
        other = at / "other"
        other.mkdir()
        return [by_safetensors(rows, at), by_safetensors(rows, other)]
    elif what == "cut short":
        file = by_safetensors(rows, at)
        os.truncate(file, file.stat().st_size - 100)
        return [file]
    elif what == "a rank is missing":
        folder = by_dynamicemb(rows, at)
        next(folder.rglob("*keys.rank_1*")).unlink()
        return [folder]
    elif what == "values cut short":
        folder = by_dynamicemb(rows, at)
        os.truncate(next(folder.rglob("*values.rank_1*")), 100)
        return [folder]
    elif what == "text":
        (at / "t").write_text("hello, world")
        return [at / "t"]
    elif what == "missing":
        return [at / "nowhere"]
    elif what == "empty directory":
        (at / "d").mkdir()
        return [at / "d"]
    elif what == "code":
        torch.save({"items.weight": print}, at / "m.pt")
        return [at / "m.pt"]
    elif what == "metadata with code":
        folder = by_dcp(rows, at)
        import pickle

        (folder / ".metadata").write_bytes(pickle.dumps(os.system))
        return [folder]
    elif what == "ragged":
        lists = pa.array([[1.0, 2.0], [1.0]])
        pq.write_table(pa.table({"id": [1, 2], "weight": lists}), at / "items.parquet")
        return [at / "items.parquet"]
    elif what == "no ids":
        pq.write_table(pa.table({"weight": [[1.0]], "x": [1]}), at / "items.parquet")
        return [at / "items.parquet"]
    elif what == "ids of text":
        pq.write_table(pa.table({"id": ["a"], "weight": [[1.0]]}), at / "items.parquet")
        return [at / "items.parquet"]
    elif what == "states alone":
        del rows["weight"]
    return [by_safetensors(rows, at)]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("twice", "comes twice"),
        ("nan", "holds nan"),
        ("two files", "comes twice"),
        ("cut short", "cut short"),
        ("a rank is missing", r"ranks \[0, 2\] of 3"),
        ("values cut short", "cut short"),
        ("text", "none of safetensors"),
        ("missing", "does not exist"),
        ("empty directory", "is no repository"),
        ("code", "weights_only"),
        ("metadata with code", "describes no tensor"),
        ("ragged", "rows of 2 and of 1"),
        ("no ids", "which column holds the ids"),
        ("ids of text", "holds string"),
        ("states alone", "weights of table 'items'"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_its_name_and_nothing_is_left(
    what: str, words: str, tmp_path: Path
) -> None:
    files = _spoiled(what, tmp_path)
    store = LocalStore(tmp_path / "run")
    with pytest.raises(EmberkeepError, match=words) as refused:
        run(store, files, tmp_path / "s", init=True)
    assert isinstance(refused.value, DataError | ConfigError)
    assert not Repository.exists(store) or Repository.open(store).versions() == ()
    assert not (tmp_path / "s").exists()


def test_ids_outside_a_table_and_names_that_nothing_has(tmp_path: Path) -> None:
    before = Run(store=LocalStore(tmp_path / "run"))
    before.save()
    tensors = {"fixed/id": torch.tensor([5, 120]), "fixed/weight": torch.ones(2, 6)}
    safetensors.torch.save_file(tensors, tmp_path / "w.safetensors")
    files = [tmp_path / "w.safetensors"]
    with pytest.raises(DataError, match=r"id 120 .*0\.\.119"):
        run(before.store, files, tmp_path / "s")
    for choice, words in (
        (Choice(tables=TableMap({"user": "fixed"})), "nothing is called user"),
        (Choice(tables=TableMap({"fixed": "user"})), "no table 'user'; it has fixed"),
        (Choice(table="nobody"), "no table 'nobody'"),
        (Choice(fill={"sum": 1.0}), "no plane 'sum'"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(before.store, files, tmp_path / "s", choice=choice)
    assert len(before.repository.versions()) == 1


# -- what strangers bring --------------------------------------------------------------------------


def test_a_header_may_be_as_long_as_a_pickle_begins(tmp_path: Path) -> None:
    """Of safetensors files one in 32 has a header whose length begins with 0x80."""
    rows = rows_of(rows=100)
    tensors = {f"items/{name}": torch.from_numpy(values) for name, values in rows.items()}
    for note in range(32):
        file = tmp_path / "rows.safetensors"
        safetensors.torch.save_file(tensors, file, metadata={"note": "x" * 8 * note})
        if file.read_bytes()[:1] == b"\x80":
            break
    assert file.read_bytes()[:1] == b"\x80"
    found = look(LocalStore(tmp_path / "r"), [str(file)], Choice(), POOL, init=True)
    assert [source.kind for source in found.sources] == ["safetensors"]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("chosen", ["a", "b"])
def test_a_state_goes_with_its_own_weights(chosen: str, nested: bool, tmp_path: Path) -> None:
    """Two towers with a table of one name, of which only the second has something remembered."""
    rows = rows_of(rows=50)
    weight, summed = torch.from_numpy(rows["weight"]), torch.from_numpy(rows["sum"])
    model = {"towers.a.items.weight": weight, "towers.b.items.weight": weight + 1}
    state = {"towers.b.items.weight": {"sum": summed}}
    saved = {"model": model, "optimizer": {"state": state}} if nested else {**model, "state": state}
    torch.save(saved, tmp_path / "model.pt")
    store = LocalStore(tmp_path / "r")
    with pytest.raises(DataError, match=r"a\.items and .*b\.items both bring the weight.*--map"):
        run(store, [tmp_path / "model.pt"], tmp_path / "s", choice=Choice(table="items"), init=True)
    choice = Choice(tables=TableMap({f"{chosen}.items": "items"}), optimizer="adagrad")
    run(store, [tmp_path / "model.pt"], tmp_path / "s", choice=choice, init=True)
    assert list(stored(store)) == ["items"]
    planes = stored(store)["items"][1]
    assert np.array_equal(planes["weight"], weight + (chosen == "b"))
    assert np.array_equal(planes["accumulator"], summed * (chosen == "b"))


def test_a_table_within_the_name_of_another_is_another(tmp_path: Path) -> None:
    weight = torch.from_numpy(rows_of(rows=20)["weight"])
    torch.save({"items.weight": weight, "old.items.weight": weight + 1}, tmp_path / "model.pt")
    store = LocalStore(tmp_path / "r")
    choice = Choice(tables=TableMap({"old.items": "items"}))
    run(store, [tmp_path / "model.pt"], tmp_path / "s", choice=choice, init=True)
    assert np.array_equal(stored(store)["items"][1]["weight"], weight + 1)


@pytest.mark.parametrize("kind", ["safetensors", "parquet", "arrow", "torch", "dcp", "dynamicemb"])
def test_tables_with_dots_in_their_names_come_back(kind: str, tmp_path: Path) -> None:
    """As a keeper names tables of torch's own: by the path of their module."""
    rows, old = rows_of(rows=30), LocalStore(tmp_path / "old")
    file = by_safetensors(rows, tmp_path)
    run(old, [file], tmp_path / "s", choice=Choice(table="towers.items"), init=True)
    repository = Repository.open(old)
    newest = repository.newest_whole()
    assert newest is not None
    write: Any = {
        "safetensors": export_tensors.to_safetensors, "torch": export_tensors.to_torch,
        "dcp": export_tensors.to_checkpoint, "dynamicemb": export_tensors.to_dump,
    }.get(kind, functools.partial(to_columns, kind=kind))  # fmt: skip
    write(repository, newest, tmp_path / "out", POOL)
    new = LocalStore(tmp_path / "new")
    run(new, [tmp_path / "out"], tmp_path / "s", init=True)
    assert_holds(new, rows, "towers.items")
    run(old, [tmp_path / "out"], tmp_path / "s")
    assert_holds(old, rows, "towers.items")


def test_updates_of_each_row_are_not_left_out_of_a_dump(tmp_path: Path) -> None:
    cluster = local().open([Table("items", rows=8, dim=2)], Adam(lr=0.1, step="row"), seed=0)
    repository = Repository.create(LocalStore(tmp_path / "r"), schema=cluster.schema())
    saver = Checkpointer(repository, cluster)
    saver.save(step=1)
    saver.wait()
    saver.close()
    newest = repository.newest_whole()
    assert newest is not None
    with pytest.raises(ConfigError, match="does not count the updates of each row"):
        export_tensors.to_dump(repository, newest, tmp_path / "out", POOL)


def test_a_name_of_another_system_ends_with_that_of_a_table(tmp_path: Path) -> None:
    rows, store = rows_of(rows=30), LocalStore(tmp_path / "r")
    file = by_safetensors(rows, tmp_path)
    run(store, [file], tmp_path / "s", choice=Choice(table="towers.items"), init=True)
    rows["weight"] += 1
    ids = torch.from_numpy(rows["id"])
    saved = {
        "ebc.towers.items.weight": torch.from_numpy(rows["weight"]),
        "ebc.towers.items.id": ids,
    }
    torch.save(saved, tmp_path / "model.pt")
    run(store, [tmp_path / "model.pt"], tmp_path / "s")
    assert_holds(store, rows, "towers.items")


def test_a_refused_import_leaves_no_repository(tmp_path: Path) -> None:
    rows = rows_of(rows=20)
    rows["id"][3] = rows["id"][4]
    file = by_safetensors(rows, tmp_path)
    store = LocalStore(tmp_path / "r")
    with pytest.raises(DataError, match="comes twice"):
        run(store, [file], tmp_path / "s", init=True)
    assert not Repository.exists(store)
    rows = rows_of(rows=20)
    run(store, [by_safetensors(rows, tmp_path)], tmp_path / "s", init=True)
    assert_holds(store, rows)


def test_a_refused_import_touches_nothing_below_its_root(tmp_path: Path) -> None:
    """The root may be a directory, or a bucket, in which others have their files."""
    root = tmp_path / "r"
    (root / "notes").mkdir(parents=True)
    (root / "notes" / "thesis.txt").write_text("years of work")
    rows = rows_of(rows=20)
    rows["id"][3] = rows["id"][4]
    file = by_safetensors(rows, root)
    with pytest.raises(DataError, match="comes twice"):
        run(LocalStore(root), [file], tmp_path / "s", init=True)
    assert file.exists()
    assert (root / "notes" / "thesis.txt").read_text() == "years of work"
    assert not Repository.exists(LocalStore(root))


def test_an_import_that_is_replaced_leaves_its_successor_alone(tmp_path: Path) -> None:
    store, rows = LocalStore(tmp_path / "r"), rows_of(rows=2000)
    committed = []

    def take_over(nbytes: int) -> None:
        if not committed and Repository.exists(store):  # a trainer takes the new repository
            writer = Writer.open(Repository.open(store))
            with writer.begin() as draft:
                committed.append(draft.commit(step=1, baseline=None, layout={}).version)

    with pytest.raises(FencedError):
        run(store, [by_safetensors(rows, tmp_path)], tmp_path / "s", init=True, advance=take_over)
    assert list(Repository.open(store).versions()) == committed


def test_steps_of_a_table_go_with_its_moments(tmp_path: Path) -> None:
    """Adam corrects its bias by the steps of the table."""
    cluster = local().open([Table("items", rows=8, dim=2)], Adam(lr=0.1), seed=0)
    for _ in range(5):
        cluster.push(
            [RowIds(np.arange(8), np.array([0, 8]))], [np.ones((8, 2), np.float32)], lr=0.1
        )
    source, target = LocalStore(tmp_path / "old"), LocalStore(tmp_path / "new")
    saver = Checkpointer(Repository.create(source, schema=cluster.schema()), cluster)
    saver.save(step=5)
    saver.wait()
    saver.close()
    run(target, [tmp_path / "old"], tmp_path / "s", init=True)
    newest = Repository.open(target).newest_whole()
    assert newest is not None
    manifest = Repository.open(target).manifest(newest)
    assert manifest.described.plain("tables")["items"]["steps"] == 5


def test_float8_is_read_as_the_numbers_that_it_is(tmp_path: Path) -> None:
    weight = torch.from_numpy(rows_of(rows=20)["weight"]).to(torch.float8_e4m3fn)
    torch.save({"items.weight": weight}, tmp_path / "model.pt")
    store = LocalStore(tmp_path / "r")
    choice = Choice(table="items")
    run(store, [tmp_path / "model.pt"], tmp_path / "s", choice=choice, init=True)
    assert np.array_equal(stored(store)["items"][1]["weight"], weight.float())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no rows", "nothing to import: .* holds no rows"),
        ("a module", r"it holds torch\.nn\.\S+Embedding; save a state_dict\(\)"),
        ("words", "column 'weight' holds string, not numbers"),
        ("a version", "--version names a version of another repository"),
    ],
)
def test_strangers_hear_what_is_wrong(what: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "items.parquet"
    pq.write_table(pa.table({"id": [1], "weight": ["x"]}), file)
    if what == "no rows":
        file = by_safetensors(rows_of(rows=0), tmp_path)
    elif what == "a module":
        torch.save(torch.nn.Embedding(3, 2), file)
    elif what == "a version":
        file = by_safetensors(rows_of(rows=3), tmp_path)
    version = "3" if what == "a version" else None
    with pytest.raises(EmberkeepError, match=message):
        run(LocalStore(tmp_path / "r"), [file], tmp_path / "s", init=True, version=version)
    assert not Repository.exists(LocalStore(tmp_path / "r"))
