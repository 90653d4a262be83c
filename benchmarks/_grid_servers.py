"""Thousands of versions of a grid on servers: what catalogs, rounds and restores come to.

Rows are changed at random, 1% in each version, which is hard for a grid: nothing is changed
often, so rows of one version end in hundreds of others. Servers are processes of this machine.
Versions are saved and brought back by `ek.Keeper`. A *round* is one round of extraction, as the
event `extracted` tells of it. Restores are compared in pairs: a version of the grid, and the same
rows saved whole, both cold, in turns.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import emberkeep as ek
from _common import Options, report
from emberkeep._types import RowIds
from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import SaveSettings, VersionSpec
from emberkeep.nn import EmbeddingBags
from emberkeep.repository import KeepAll, Repository
from emberkeep.repository.grid.catalog import grid_of, newest_catalog
from emberkeep.repository.policies import Grid
from emberkeep.strategies import Every, Strategy
from emberkeep.tables import Adagrad, Table

DIM = 64
LR = 0.01
STAGES = ("servers-build", "servers-restores")
_CHOSEN = 20  # versions that are restored


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

    def train(self, number: int) -> None:
        """What changes until a version: all rows before the first."""
        rows = self.shape.rows
        ids = np.arange(rows)
        if number > 1:
            ids = np.unique(self._random.integers(0, rows, int(rows * self.shape.changed * 1.005)))
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


def build(run: Run, where: Path) -> dict[str, Any]:
    """Saves all versions; what catalogs and rounds came to."""
    shape = run.shape
    rounds: list[dict[str, Any]] = []

    def hear(name: str, details: dict[str, Any]) -> None:
        if name == "extracted":
            rounds.append(details)

    # Without resets, which depend on how long things took: all versions are of one grid. There is
    # no training between saves for extraction to work beside, so saves wait for it.
    spec = VersionSpec(layout="grid", grid=Grid(resets=False, behind="wait"))
    keeper = run.keeper(where, spec, on_event=hear)
    keeper.resume()
    found: dict[str, Any] = {}
    save_seconds: list[float] = []
    began = time.perf_counter()
    for number in range(1, shape.versions + 1):
        run.train(number)
        keeper.step()
        start = time.perf_counter()
        keeper.save()
        keeper.wait()
        save_seconds.append(time.perf_counter() - start)
        if number in (shape.early, shape.versions):
            keeper._saver.settle()  # type: ignore[union-attr]
            found["early" if number == shape.early else "late"] = catalog_nbytes(where)
            took = time.perf_counter() - began
            print(f"{number} versions, {took:.0f} s: {catalog_nbytes(where)}", flush=True)
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
    keys = ("grid", "whole", "grid_mb", "whole_mb", "whole_again")
    found: dict[str, list[float]] = {key: [] for key in keys}
    chosen = {"grid": number, "whole": at + 1}
    for side in sides:  # what a process does once, the first would pay for
        sides[side].restore(chosen[side])
    for repeat in range(repeats):
        for side in sides if repeat % 2 else reversed(sides):
            seconds, nbytes = sides[side].restore(chosen[side])
            found[side].append(seconds)
            found[f"{side}_mb"].append(nbytes / 1e6)
        found["whole_again"].append(sides["whole"].restore(chosen["whole"])[0])
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


def _p95(ascending: list[float]) -> float:
    return ascending[int(np.ceil(0.95 * len(ascending))) - 1]


def compared(found: dict[int, dict[str, list[float]]]) -> dict[str, float]:
    """The ratios of all pairs, and of whole versions with themselves: how far two measurements of
    one thing differ."""
    ratios = sorted(
        g / w for at in found.values() for g, w in zip(at["grid"], at["whole"], strict=True)
    )
    null = sorted(
        again / w
        for at in found.values()
        for again, w in zip(at["whole_again"], at["whole"], strict=True)
    )
    of_versions = {
        of: sorted(
            statistics.median(g / w for g, w in zip(at[of], at["whole"], strict=True))
            for at in found.values()
        )
        for of in ("grid", "whole_again")
    }
    read = [
        g / w
        for at in found.values()
        for g, w in zip(at["grid_mb"], at["whole_mb"], strict=True)
        if w
    ]
    return {
        "grid_seconds": statistics.median(s for at in found.values() for s in at["grid"]),
        "whole_seconds": statistics.median(s for at in found.values() for s in at["whole"]),
        "p50": statistics.median(ratios),
        "p95": _p95(ratios),
        "worst": ratios[-1],
        "null_p50": statistics.median(null),
        "null_p95": _p95(null),
        "p95_of_versions": _p95(of_versions["grid"]),
        "null_p95_of_versions": _p95(of_versions["whole_again"]),
        "bytes_read": statistics.mean(read) if read else float("nan"),
        "pairs": len(ratios),
    }


def many_versions(root: Path, *, quick: bool) -> dict[str, Any]:
    """Thousands of versions on servers, with a tenth of them for comparison. If it shall be quick,
    there are a tenth of each, of which each changes ten times as much, so that as many rows of a
    version end within the run; they are in this process, and nothing is restored."""
    quick_shape = Shape(rows=8000, versions=200, early=20, servers=0, changed=0.1)
    shape = quick_shape if quick else Shape()
    run = Run(shape)
    try:
        built = build(run, root / "grid")
        return summary(shape, built, None if quick else pairs_of(run, root / "grid"))
    finally:
        run.close()


def pairs_of(run: Run, where: Path) -> dict[str, float]:
    """Restores of versions from all of the run, five times each."""
    chosen = [run.shape.versions * (at + 1) // _CHOSEN for at in range(_CHOSEN)]
    return compared(restores(run, where, chosen, repeats=5))


def summary(shape: Shape, built: dict[str, Any], pairs: dict[str, float] | None) -> dict[str, Any]:
    """Figures, config and a note of what was built and restored."""
    late, rounds = built["late"], built["round_seconds"]
    figures = {"catalog_growth": growth(built, shape)}
    note = (
        f"{shape.versions} versions of {shape.nbytes / 1e6:.0f} MB, {shape.changed:.0%} changed in "
        f"each, on {shape.servers or 'no'} servers: a catalog of {late['nbytes'] / 1e6:.2f} MB, "
        f"{late['pieces']} pieces; a round takes {rounds['late'] * 1e3:.0f} ms per version in the "
        f"last tenth, {rounds['early'] * 1e3:.0f} ms in the second; "
        f"{built['rounds_that_moved']} of {built['rounds']} rounds moved rows, "
        f"{built['written_nbytes'] / 1e9:.1f} GB; {built['stored_nbytes'] / 1e9:.2f} GB are stored."
    )
    if pairs is not None:
        figures |= {
            "server_restore_vs_whole_median": pairs["p50"],
            "server_restore_vs_whole_p95": pairs["p95"],
            "server_restore_vs_whole_worst": pairs["worst"],
            "server_null_pair_median": pairs["null_p50"],
            "server_null_pair_p95": pairs["null_p95"],
            "server_restore_vs_whole_of_versions": pairs["p95_of_versions"],
            "server_null_pair_of_versions": pairs["null_p95_of_versions"],
            "server_bytes_read_vs_whole": pairs["bytes_read"],
        }
        note += (
            f" {pairs['pairs']:.0f} pairs of cold restores through a keeper: "
            f"{pairs['grid_seconds']:.3f} s from the grid and {pairs['whole_seconds']:.3f} s of "
            "whole versions, medians."
        )
    return {"figures": figures, "config": asdict(shape), "note": note}


def report_stage(given: Options) -> None:
    """One of the two stages of `many_versions`, each of which takes minutes. What was built stays
    until it has been restored from."""
    kept, shape = Path(tempfile.gettempdir()) / "emberkeep-grid-servers", Shape()
    run = Run(shape)
    try:
        if given.chosen["only"] == STAGES[0]:
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir()
            (kept / "built.json").write_text(json.dumps(build(run, kept / "grid")))
            return
        built = json.loads((kept / "built.json").read_text())
        found = summary(shape, built, pairs_of(run, kept / "grid"))
    finally:
        run.close()
    catalogs = [
        [f"{number} versions", f"{at['nbytes'] / 1e6:.2f}", str(at["pieces"]), str(at["segments"])]
        for number, at in ((shape.early, built["early"]), (built["versions"], built["late"]))
    ]
    report(
        replace(given, name="versions-servers"), config=found["config"], figures=found["figures"],
        columns=["catalog", "MB", "pieces", "segments"], rows=catalogs, notes=[found["note"]],
        by=f"versions.py --only {STAGES[0]}, then --only {STAGES[1]}",
    )  # fmt: skip
    shutil.rmtree(kept)
