"""Thousands of versions of a grid on servers: what catalogs, rounds and restores come to.

Rows are changed at random, 1% in each version, which is hard for a grid: nothing is changed
often, so rows of one version end in hundreds of others. Servers are processes of this machine.
Versions are saved and brought back by `ek.Keeper`. A *round* is one round of extraction, as the
event `extracted` tells of it. Restores are compared in pairs: a version of the grid, and the same
rows saved whole, both cold, in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import emberkeep as ek
from emberkeep._types import RowIds
from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import SaveSettings, VersionSpec
from emberkeep.nn import EmbeddingBags
from emberkeep.repository import KeepAll, Manifest, Repository
from emberkeep.repository.grid.catalog import grid_of, newest_catalog
from emberkeep.repository.policies import Grid
from emberkeep.strategies import Every, Strategy
from emberkeep.tables import Adagrad, Table

DIM = 64
LR = 0.01


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How much is saved: rows of 64 numbers and their Adagrad state, 512 bytes each."""

    rows: int = 400_000
    versions: int = 2000
    early: int = 200
    servers: int = 4
    changed: float = 0.01

    @property
    def nbytes(self) -> int:
        return self.rows * DIM * 8


class Run:
    """Tables on servers (in this process if there shall be none), trained with random ids."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        cluster = ek.servers(shards=shape.servers, threads=1) if shape.servers else None
        self.bags = EmbeddingBags(
            [Table("rows", rows=shape.rows, dim=DIM)], optimizer=Adagrad(lr=LR),
            **({} if cluster is None else {"cluster": cluster}),
        )  # fmt: skip
        self.cluster = self.bags.cluster
        self._random = np.random.default_rng(0)
        self._grads = self._random.standard_normal((50_000, DIM)).astype(np.float32)

    def keeper(self, where: Path, spec: VersionSpec, **given: Any) -> ek.Keeper:
        """One that saves when it is asked to, and keeps everything."""
        strategy = Strategy(spec=spec, schedule=Every(steps=10**9), retention=KeepAll())
        return ek.Keeper(
            where, self.bags, self.bags.optimizer, strategy=strategy,
            settings=SaveSettings(grace=timedelta(0)), **given,
        )  # fmt: skip

    def train(self, number: int, *, skip: bool = False) -> None:
        """What changes until a version: all rows before the first. The ids are drawn also where it
        is skipped."""
        rows = self.shape.rows
        ids = np.arange(rows)
        if number > 1:
            ids = np.unique(self._random.integers(0, rows, int(rows * self.shape.changed * 1.005)))
        if skip:
            return
        for part in np.array_split(ids, max(1, ids.size // 50_000)):
            wanted = RowIds(part, np.array([0, part.size]))
            self.cluster.push([wanted], [self._grads[: part.size]], lr=LR)

    def close(self) -> None:
        self.cluster.close()


def catalog_nbytes(where: Path) -> dict[str, int]:
    """Bytes and pieces of the newest catalog of the newest version's grid."""
    repository = Repository.open(LocalStore(where))
    grid = grid_of(repository.manifest(repository.versions()[-1]))
    assert grid is not None
    catalog = newest_catalog(repository, grid)
    segments = [ref for part in catalog.parts for ref in part.segments]
    return {
        "nbytes": sum(ref.size for ref in segments) + len(catalog.encode(repository.id)),
        "pieces": sum(ref.pieces - ref.gone for ref in segments),
        "segments": len(segments),
    }


def build(run: Run, where: Path, most_seconds: float = math.inf) -> dict[str, Any]:
    """Saves all versions, or as many as there is time for, and goes on where there are some; what
    catalogs and rounds came to."""
    shape = run.shape
    rounds: list[dict[str, Any]] = []

    def hear(name: str, details: dict[str, Any]) -> None:
        if name == "extracted":
            rounds.append(details)

    # Without resets, which depend on how long things took: all versions are of one grid.
    spec = VersionSpec(layout="grid", grid=Grid(resets=False))
    keeper = run.keeper(where, spec, on_event=hear)
    resumed = keeper.resume()
    done = resumed.version.number if isinstance(resumed, Manifest) else 0
    found: dict[str, Any] = {}
    save_seconds: list[float] = []
    began = time.perf_counter()
    for number in range(1, shape.versions + 1):
        run.train(number, skip=number <= done)
        if number <= done:
            continue
        keeper.step()
        start = time.perf_counter()
        keeper.save()
        keeper.wait()
        save_seconds.append(time.perf_counter() - start)
        took = time.perf_counter() - began
        last = number == shape.versions or took > most_seconds
        if number == shape.early or last:
            keeper._saver.settle()  # type: ignore[union-attr]
            found["late" if last else "early"] = catalog_nbytes(where)
            print(f"{number} versions, {took:.0f} s: {catalog_nbytes(where)}", flush=True)
        if last:
            break
    keeper.close(save=False)
    found["versions"] = number
    by_version = {max(r["versions"], default=r["covered"]): r for r in rounds}
    tenth = max(1, number // 10)

    def mean(first: int, last: int, key: str) -> float:
        some = [r for n, r in by_version.items() if first < n <= last]
        return sum(r[key] for r in some) / max(1, sum(len(r["versions"]) for r in some))

    found["round_seconds"] = {
        "early": mean(tenth, 2 * tenth, "seconds"),
        "late": mean(number - tenth, number, "seconds"),
    }
    found["longest_round_seconds"] = max(r["seconds"] for r in rounds)
    found["save_seconds"] = {
        "early": statistics.mean(save_seconds[tenth : 2 * tenth]),
        "late": statistics.mean(save_seconds[-tenth:]),
    }
    found["written_nbytes"] = sum(r["written_nbytes"] for r in rounds)
    found["rounds"], found["rounds_that_moved"] = (
        len(rounds), sum(r["written_nbytes"] > 0 for r in rounds)
    )  # fmt: skip
    found["stored_nbytes"] = sum(f.stat().st_size for f in where.rglob("*.grid"))
    return found


def growth(built: dict[str, Any], shape: Shape) -> float:
    """Bytes of catalog per version at the end against those early on."""
    if "early" not in built:  # it went on from there
        return float("nan")
    early = built["early"]["nbytes"] / shape.early
    return float(built["late"]["nbytes"] / built["versions"] / early)


def _read_nbytes(pids: Sequence[Any]) -> int:
    """What processes have read from disks so far."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
    return total


def restores(
    run: Run, where: Path, numbers: Sequence[int], repeats: int
) -> dict[int, dict[str, list[float]]]:
    """Times and bytes of restores of versions, from the grid and of the same rows saved whole.

    Servers have one repository as long as they live, so the whole versions have servers of their
    own, which are trained alike.
    """
    other = Run(run.shape)
    try:
        with tempfile.TemporaryDirectory(dir=where.parent) as directory:
            _save_whole(other, Path(directory), numbers)
            sides = {"grid": _Side(run, where), "whole": _Side(other, Path(directory))}
            return {
                number: _compare(number, at, sides, repeats) for at, number in enumerate(numbers)
            }
    finally:
        other.close()


def _save_whole(run: Run, where: Path, numbers: Sequence[int]) -> None:
    """Trains as for the grid, and saves some of the versions, whole."""
    keeper = run.keeper(where, VersionSpec(layout="full"))
    for number in range(1, max(numbers) + 1):
        run.train(number)
        if number in numbers:
            keeper.step()
            keeper.save()
            keeper.wait()
    keeper.close(save=False)


class _Side:
    """A repository, and those who restore from it."""

    def __init__(self, run: Run, where: Path) -> None:
        self.run, self.where = run, where
        handles = getattr(run.cluster, "handles", [])
        self.pids = ["self", *(h.status()["pid"] for h in handles if hasattr(h, "status"))]

    def restore(self, number: int) -> tuple[float, int]:
        forget(self.where)
        before = _read_nbytes(self.pids)
        start = time.perf_counter()
        keeper = self.run.keeper(self.where, VersionSpec(), must_exist=True)
        keeper.resume(number)
        seconds = time.perf_counter() - start
        keeper.close(save=False)
        return seconds, _read_nbytes(self.pids) - before


def _compare(number: int, at: int, sides: dict[str, _Side], repeats: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {key: [] for key in ("grid", "whole", "grid_mb", "whole_mb")}
    chosen = {"grid": number, "whole": at + 1}
    for side in sides:  # what a process does once, the first would pay for
        sides[side].restore(chosen[side])
    for repeat in range(repeats):
        for side in sides if repeat % 2 else reversed(sides):
            seconds, nbytes = sides[side].restore(chosen[side])
            found[side].append(seconds)
            found[f"{side}_mb"].append(nbytes / 1e6)
    ratios = [g / w for g, w in zip(found["grid"], found["whole"], strict=True)]
    print(
        f"version {number}: {statistics.median(found['grid']):.3f} s against "
        f"{statistics.median(found['whole']):.3f} s whole, ratios "
        f"{' '.join(f'{ratio:.2f}' for ratio in ratios)}; {found['grid_mb'][-1]:.0f} MB against "
        f"{found['whole_mb'][-1]:.0f} MB",
        flush=True,
    )
    return found


def forget(path: Path) -> None:
    """Takes the files below a directory out of the page cache."""
    for file in path.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def compared(found: dict[int, dict[str, list[float]]]) -> dict[str, float]:
    """The ratios of all pairs."""
    ratios = sorted(
        g / w for at in found.values() for g, w in zip(at["grid"], at["whole"], strict=True)
    )
    read = [
        g / w
        for at in found.values()
        for g, w in zip(at["grid_mb"], at["whole_mb"], strict=True)
        if w
    ]
    return {
        "p50": statistics.median(ratios),
        "p95": ratios[min(len(ratios) - 1, int(np.ceil(0.95 * len(ratios))) - 1)],
        "worst": ratios[-1],
        "bytes_read": statistics.mean(read) if read else float("nan"),
        "pairs": len(ratios),
    }


def main() -> None:
    """The stages one by one: what is built stays in the directory that is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=["build", "restores"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--versions", type=int, default=2000)
    parser.add_argument("--early", type=int, default=200)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--chosen", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf)
    given = parser.parse_args()
    shape = Shape(
        rows=given.rows, versions=given.versions, early=given.early, servers=given.servers
    )
    run = Run(shape)
    try:
        if given.stage == "build":
            built = build(run, given.path, given.seconds)
            print(json.dumps({**built, "catalog_growth": growth(built, shape)}))
        else:
            last = Repository.open(LocalStore(given.path)).versions()[-1].number
            numbers = [max(1, round(last * (at + 1) / given.chosen)) for at in range(given.chosen)]
            print(json.dumps(compared(restores(run, given.path, numbers, given.repeats))))
    finally:
        run.close()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    main()
