"""Makes the golden repositories: `python -m tests.golden.make`.

A golden repository is made once, by the release whose format it shows, and never again: every later
release must restore it bit for bit. Beside each repository stands what it must restore to, as
plain arrays. Clock, names and random numbers are fixed, so that the same release makes the same
bytes, and no trace of the machine is in them.
"""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import safetensors.numpy

from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import Checkpointer, Extras, SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.repository import KeepAll, Repository
from emberkeep.runtime.clock import SystemClock
from emberkeep.tables import Adagrad, Adam, Normal, Optimizer, RowWiseAdagrad, Table, Uniform
from tests.contracts.engine import grads_of, wanted_of

HERE = Path(__file__).parent
SEED = 11
UNTRAINED = np.array([25, 26, 29])
TABLES = (
    Table("fixed", rows=30, dim=8, init=Uniform(-0.25, 0.5)),
    Table("dynamic", rows=None, capacity=40, dim=8, init=Normal(0.5, 0.125)),
    Table("evicting", rows=None, capacity=6, dim=8, on_full="evict_oldest"),
)


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One repository: how it was saved, and by how many writers one after the other."""

    name: str
    spec: VersionSpec
    optimizer: Optimizer
    shards: int = 1
    writers: int = 1


REPOSITORIES = (
    Golden(
        name="full-exact",
        spec=VersionSpec(layout="full"),
        optimizer=Adam(lr=0.1, step="row"),
        writers=2,
    ),
    Golden(
        name="one-shot-exact-two-shards",
        spec=VersionSpec(layout="one_shot"),
        optimizer=RowWiseAdagrad(lr=0.1),
        shards=2,
    ),
    Golden(
        name="intermittent-8-bits",
        spec=VersionSpec(layout="intermittent", bits=8),
        optimizer=RowWiseAdagrad(lr=0.1),
    ),
    Golden(
        name="consecutive-4-bits-two-shards",
        spec=VersionSpec(layout="consecutive", bits=4),
        optimizer=RowWiseAdagrad(lr=0.1),
        shards=2,
        writers=2,
    ),
    Golden(
        name="one-shot-3-bits",
        spec=VersionSpec(layout="one_shot", bits=3),
        optimizer=RowWiseAdagrad(lr=0.1),
    ),
    Golden(
        name="consecutive-2-bits-accumulators-8",
        spec=VersionSpec(layout="consecutive", bits=2, quantize_optimizer=True),
        optimizer=Adagrad(lr=0.1, initial_accumulator_value=0.125),
    ),
    Golden(
        name="intermittent-2-bits-row-wise-accumulators-16",
        spec=VersionSpec(layout="intermittent", bits=2, quantize_optimizer=True),
        optimizer=RowWiseAdagrad(lr=0.1),
    ),
    Golden(
        name="grid-4-bits-row-wise-accumulators-16",
        spec=VersionSpec(layout="grid", bits=4, quantize_optimizer=True),
        optimizer=RowWiseAdagrad(lr=0.1),
    ),
)


def opened(golden: Golden, *, shards: int | None = None) -> LocalCluster:
    return local(shards=shards or golden.shards, threads=1).open(
        TABLES, golden.optimizer, seed=SEED
    )


def train(cluster: LocalCluster, random: np.random.Generator) -> None:
    """One push to all tables, a few values of which no codec can hold as they are, and deletions.

    Ids from 25 on are never trained.
    """
    batch = {table.name: np.unique(random.integers(0, 25, 6)).tolist() for table in TABLES}
    grads = {name: random.standard_normal((len(ids), 8)) for name, ids in batch.items()}
    cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)
    odd = np.array([int(random.integers(0, 25))])
    planes = cluster.read("fixed", odd)
    planes["weight"][0, :4] = [np.nan, np.inf, -0.0, np.float32(1e-42)]
    cluster.install("fixed", odd, planes)
    for name in ("fixed", "dynamic"):
        cluster.delete(name, random.integers(0, 25, 2))


def contents(cluster: LocalCluster) -> dict[str, Any]:
    """Every trained row, every plane."""
    found: dict[str, Any] = {}
    for table in TABLES:
        ids, planes = cluster.read_all(table.name)
        found[f"{table.name}/id"] = ids
        found |= {f"{table.name}/{plane}": values for plane, values in planes.items()}
    return found


class EveryMinute(SystemClock):
    """A minute passes from one look at the date to the next."""

    def __init__(self) -> None:
        self._moments = itertools.count()

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(minutes=next(self._moments))


def make(golden: Golden, where: Path) -> None:
    """Writes a repository of three versions, and what each must restore to."""
    clock = EveryMinute()
    random = np.random.default_rng(SEED)
    store = LocalStore(where / golden.name)
    settings = SaveSettings(retention=KeepAll(), grace=timedelta(0), threads=1)
    cluster = opened(golden)
    Repository.create(store, schema=cluster.schema(), clock=clock)

    def keeper() -> Checkpointer:
        return Checkpointer(
            Repository.open(store, clock=clock), cluster,
            spec=golden.spec, settings=settings,
        )  # fmt: skip

    saving = keeper()
    saved: dict[int, dict[str, Any]] = {}
    for step in (10, 20, 30):
        for _ in range(2):
            train(cluster, random)
        dense = safetensors.numpy.save({"bias": random.standard_normal(3).astype(np.float32)})
        extras = Extras(
            dense=dense,
            reader={"samples": 64 * step},
            user={"note": f"step {step}, ünïcode"},
            counters={"pls": step / 1000},
        )
        saved[len(saved) + 1] = contents(cluster)
        saving.save(step, extras)
        saving.wait()
        if step == 20 and golden.writers == 2:
            cluster = opened(golden)
            saving = keeper()
            saving.restore()
    saving.repository.tag("best", 2)
    _write_expected(golden, saving.repository, where, saved)


def _write_expected(
    golden: Golden, repository: Repository, where: Path, saved: dict[int, dict[str, Any]]
) -> None:
    expected: dict[str, Any] = {}
    for table in TABLES:
        rows = opened(golden).read(table.name, UNTRAINED)
        expected[f"untrained/{table.name}"] = rows["weight"]
    for version in repository.versions():
        fresh = opened(golden)
        store = LocalStore(where / f"{golden.name}-scratch")
        shutil.copytree(where / golden.name, where / f"{golden.name}-scratch")
        copy = Repository.open(store)
        restored = Checkpointer(copy, fresh, spec=golden.spec).restore(version.number)
        shutil.rmtree(where / f"{golden.name}-scratch")
        assert restored is not None
        assert restored.dense is not None
        if not golden.spec.lossy:
            for name, values in saved[version.number].items():
                assert contents(fresh)[name].tobytes() == values.tobytes()
        manifest = restored.manifest
        rows_and_dense = {
            **contents(fresh),
            **{f"dense/{k}": v for k, v in safetensors.numpy.load(restored.dense).items()},
        }
        expected |= {f"{version.number}/{name}": v for name, v in rows_and_dense.items()}
        state = {
            "step": manifest.step,
            "reader": manifest.reader,
            "user": manifest.user,
            "counters": manifest.counters,
            "tables": manifest.layout["tables"],
        }
        text = json.dumps(state, sort_keys=True).encode()
        expected[f"{version.number}/state"] = np.frombuffer(text, np.uint8)
    arrays = {name: np.ascontiguousarray(values) for name, values in expected.items()}
    content = gzip.compress(safetensors.numpy.save(arrays), mtime=0)
    (where / f"{golden.name}.safetensors.gz").write_bytes(content)


def read_expected(path: Path) -> dict[str, Any]:
    """Arrays by `<version>/<name>` or `untrained/<table>`; `<version>/state` is JSON in bytes."""
    return safetensors.numpy.load(gzip.decompress(path.read_bytes()))


@contextmanager
def no_trace() -> Iterator[None]:
    """Names that are random or tell of the machine become a plain count."""
    count = itertools.count(1)

    def token_hex(nbytes: int = 32) -> str:
        return f"{next(count):0{2 * nbytes}x}"

    with (
        mock.patch("secrets.token_hex", token_hex),
        mock.patch("socket.gethostname", return_value="golden"),
        mock.patch("os.getpid", return_value=1),
    ):
        yield


def main() -> None:
    where = HERE / "format-1"
    for golden in REPOSITORIES:
        if not (where / golden.name).exists():
            with no_trace():
                make(golden, where)


if __name__ == "__main__":
    main()
