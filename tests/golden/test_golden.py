"""Repositories that earlier releases wrote: every version comes back bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import LOSSLESS, Checkpointer, load
from emberkeep.inference import Follower
from emberkeep.inspect.summary import check
from emberkeep.repository import Repository
from emberkeep.runtime import pool
from tests.golden.make import (
    HERE,
    REPOSITORIES,
    TABLES,
    UNTRAINED,
    Golden,
    contents,
    opened,
    read_expected,
)

FORMATS = ["format-1"]
POOL = pool.Pool(1)


@pytest.fixture(params=REPOSITORIES, ids=lambda golden: golden.name)
def golden(request: pytest.FixtureRequest) -> Golden:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=FORMATS)
def root(golden: Golden, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, since readers leave pins behind."""
    shutil.copytree(HERE / request.param / golden.name, tmp_path / "golden")
    shutil.copy(HERE / request.param / f"{golden.name}.safetensors.gz", tmp_path / "expected")
    return tmp_path / "golden"


def expected_of(root: Path, version: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a version must restore to: arrays by name, and the state beside them."""
    arrays = read_expected(root.parent / "expected")
    prefix = f"{version}/"
    own = {name[len(prefix) :]: v for name, v in arrays.items() if name.startswith(prefix)}
    return own, json.loads(own.pop("state").tobytes())


def same_bits(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return {name: (v.shape, v.dtype, v.tobytes()) for name, v in found.items()} == {
        name: (v.shape, v.dtype, v.tobytes()) for name, v in expected.items()
    }


@pytest.mark.parametrize("more_shards", [0, 1])
def test_every_version_restores_to_the_bit(golden: Golden, root: Path, more_shards: int) -> None:
    repository = Repository.open(LocalStore(root))
    versions = repository.versions()
    assert [version.number for version in versions] == [1, 2, 3]
    assert repository.tags() == {"best": versions[1]}
    for version in versions:
        arrays, state = expected_of(root, version.number)
        cluster = opened(golden, shards=golden.shards + more_shards)
        restored = load(repository, version, cluster, POOL)
        assert restored.dense is not None
        dense = safetensors.numpy.load(restored.dense)
        found = contents(cluster) | {f"dense/{name}": values for name, values in dense.items()}
        assert same_bits(found, arrays)
        manifest = restored.manifest
        assert state == {
            "step": manifest.step,
            "reader": manifest.reader,
            "user": manifest.user,
            "counters": manifest.counters,
            "tables": manifest.layout["tables"],
        }
        for name, steps in state["tables"].items():
            assert cluster.steps(name) == steps["steps"]


def test_it_is_whole_and_can_be_followed(root: Path) -> None:
    assert check(Repository.open(LocalStore(root)), pool=POOL).ok
    follower = Follower(root)
    assert follower.refresh() == 3
    arrays, _ = expected_of(root, 3)
    assert follower.dense()["bias"].tobytes() == arrays["dense/bias"].tobytes()
    everything = read_expected(root.parent / "expected")
    for table in TABLES:
        weight = follower.lookup(table.name, arrays[f"{table.name}/id"])
        assert weight.tobytes() == arrays[f"{table.name}/weight"].tobytes()
        untrained = follower.lookup(table.name, UNTRAINED)
        assert untrained.tobytes() == everything[f"untrained/{table.name}"].tobytes()


def test_a_run_goes_on_from_it(golden: Golden, root: Path) -> None:
    cluster = opened(golden)
    keeper = Checkpointer(Repository.open(LocalStore(root)), cluster, spec=LOSSLESS)
    keeper.restore()
    keeper.close(40)
    fresh = opened(golden)
    restored = load(keeper.repository, keeper.repository.version(4), fresh, POOL)
    assert restored.manifest.step == 40
    assert same_bits(contents(fresh), contents(cluster))
