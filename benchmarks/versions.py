"""Every version kept: what saving, storing and restoring them costs in each layout.

A run from its beginning, with the ids of Criteo's Kaggle data (26 tables, batch 1024 as in the
IncrCP paper), saved every 10 iterations; at its end 1 GB of rows are trained. *differential* is the
intermittent layout with its own resets, *naive* the consecutive one, *full* one version saved
whole. Cold means that no byte of the repository is in the page cache. Every version of the grid is
restored; the other layouts, of which each restore reads up to the whole history, at some versions.

Versions are saved and brought back by `ek.Keeper`, as in a training loop. The time of a restore is
that from making a keeper to the end of `resume`.

`--only pairs` and `--only s3` make a part of it and keep that in a result of its own: pairs are 25
of 150 versions, five of each. `--only
servers-build` saves 2,000 versions on servers, which takes a quarter of an hour, and keeps them;
`--only servers-restores` restores some and keeps what both found.

The pushes of an interval are joined to one: which rows change, and so every figure, is the same.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The network that trains beside the tables is given as time on one core: BLAS must use no more.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

import _grid_servers as grid_servers
import _s3
from _common import RESULTS, Options, options, report
from _grid_servers import forget
from emberkeep._types import RowIds
from emberkeep.blobs import BlobStore, Buffer, open_store, read_into
from emberkeep.blobs.wrapper import WrapperStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.data import skewed_ids
from emberkeep.data.synthetic import field_rows
from emberkeep.keeper import Keeper
from emberkeep.nn import EmbeddingBags
from emberkeep.repository import KeepAll
from emberkeep.repository.policies import Grid
from emberkeep.strategies import Every, Strategy
from emberkeep.tables import Adagrad, Table

if TYPE_CHECKING:
    from emberkeep.blobs import Part

ROWS_TOTAL = 33_762_577
BATCH = 1024
ITERATIONS = 10  # between two versions
LR = 0.01
ABLATION_VERSIONS = 30
# What the network of a recommendation model takes for an iteration, on one core. DLRM with Criteo's
# shape takes longer: the shorter an interval, the less time has extraction.
DENSE_MS = 20.0
RATIO = Grid().ratio
QUICK = (60, 24)  # versions, and how wide rows are
S3_NOTE = (
    f"s3: {QUICK[0]} versions of dim {QUICK[1]}, served by rclone, each request held back "
    f"{_s3.DELAY_SECONDS * 1e3:.0f} ms; s3_plain_gets_seconds are the same ranges read by obstore "
    f"alone, {_s3.AT_ONCE} at once; before: the commit of the config, in turns with this one."
)


@functools.cache
def changed(number: int) -> RowIds:
    """The rows that an interval changes."""
    samples = BATCH * ITERATIONS
    parts = [
        np.unique(skewed_ids(rows, samples, skew="criteo", seed=f, start=number * samples))
        for f, rows in enumerate(field_rows(ROWS_TOTAL))
    ]
    return RowIds(np.concatenate(parts), np.cumsum([0, *(part.size for part in parts)]))


class Run:
    """Tables that are trained with the ids of Criteo's data; every run sees the same batches."""

    def __init__(self, dim: int, dense_ms: float) -> None:
        self.dim, self.dense_ms = dim, dense_ms
        self.bags = EmbeddingBags(
            [
                Table(f"C{f + 1}", rows=rows, dim=dim)
                for f, rows in enumerate(field_rows(ROWS_TOTAL))
            ],
            optimizer=Adagrad(lr=LR),
        )
        self.cluster = self.bags.cluster
        self.grads = np.random.default_rng(0).standard_normal((100_000, dim), np.float32)
        self._matrix = np.random.default_rng(1).standard_normal((256, 256))
        self._touched = 0

    def keeper(self, where: Path | BlobStore, spec: VersionSpec, **given: Any) -> Keeper:
        """One that saves when it is asked to, and keeps everything."""
        strategy = Strategy(spec=spec, schedule=Every(steps=10**9), retention=KeepAll())
        settings = SaveSettings(grace=timedelta(0))
        return Keeper(
            where, self.bags, self.bags.optimizer, strategy=strategy, settings=settings, **given
        )

    def begin(self, versions: int) -> None:
        """Tables before any training, in memory that was touched by it: to touch it for the first
        time takes long, and the first contender would pay for it."""
        self.cluster.clear()
        if self._touched < versions:
            for number in range(self._touched, versions):
                self._push(number)
            self.cluster.clear()
            self._touched = versions

    def interval(self, number: int) -> None:
        self._push(number)
        end = time.thread_time() + ITERATIONS * self.dense_ms / 1e3
        while time.thread_time() < end:
            self._matrix @ self._matrix

    def _push(self, number: int) -> None:
        wanted = changed(number)
        self.cluster.push([wanted], [self.grads[: wanted.ids.size]], lr=LR)


class CountingStore(WrapperStore):
    """Counts what is read."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self.nbytes = 0
        self.ranges: list[tuple[str, int, int]] = []

    @property
    def files(self) -> set[str]:
        return {name for name, _, _ in self.ranges}

    def get(self, name: str) -> bytes:
        return self._count(name, 0, super().get(name))

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        return self._count(name, start, super().get_range(name, start, length))

    def read_into(self, name: str, start: int, into: memoryview) -> int:
        count = read_into(self.inner, name, start, into)
        self._count(name, start, into[:count])
        return count

    @property
    def reads_together(self) -> bool:
        return getattr(self.inner, "reads_together", False)

    def read_parts(self, parts: Sequence[Part]) -> list[int]:
        from emberkeep.blobs import read_parts  # earlier code, which S3 is compared with, has none

        found = read_parts(self.inner, parts)
        for part, count in zip(parts, found, strict=True):
            self._count(part.name, part.start, part.into[:count])
        return found

    def _count(self, name: str, start: int, data: Any) -> Any:
        with self._lock:
            self.nbytes += len(data)
            self.ranges.append((name, start, len(data)))
        return data


@contextmanager
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="versions-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def row_nbytes(path: Path) -> int:
    found = 0
    for file in path.rglob("*"):
        if file.suffix in (".arrow", ".grid"):
            with suppress(FileNotFoundError):  # split since, beside training
                found += file.stat().st_size
    return found


def history(
    run: Run, path: Path, spec: VersionSpec, versions: int, *, settled: bool = False
) -> dict[str, Any]:
    """Trains and saves; how long saves held up training, and what was written.

    With `settled`, extraction takes in every version alone: what it does then depends on its rules
    and on nothing else.
    """
    events: list[tuple[str, dict[str, Any]]] = []
    keeper = run.keeper(path, spec, on_event=lambda *event: events.append(event))
    run.begin(versions)
    blocked, stored = [], []
    began, cpu, own = time.perf_counter(), cpu_seconds(), time.thread_time()
    for version in range(versions):
        run.interval(version)
        keeper.step()
        start = time.perf_counter()
        keeper.save()
        blocked.append(time.perf_counter() - start)
        if settled:
            settle(keeper)
        stored.append(row_nbytes(path))
    seconds = time.perf_counter() - began
    settle(keeper)
    cpu, own = cpu_seconds() - cpu, time.thread_time() - own
    saved = sum(details["nbytes"] for name, details in events if name == "saved")
    rounds = [details for name, details in events if name == "extracted"]
    extracted = sum(details["written_nbytes"] for details in rounds)
    settle_s = time.perf_counter() - began - seconds
    keeper.close(save=False)
    return {
        "blocked_s": sum(blocked), "blocked": blocked, "seconds": seconds,
        "background_cpu_s": cpu - own,
        "settle_s": settle_s,
        "saved_nbytes": saved, "extracted_nbytes": extracted,
        "stored": [*stored[1:], row_nbytes(path)], "storage": row_nbytes(path),
        "round_s": sum(details["seconds"] for details in rounds),
        "waits": sum(name == "extraction_behind" for name, _ in events),
        "resets": sum(d["kind"] == "full" for name, d in events if name == "saved") - 1,
    }  # fmt: skip


def settle(keeper: Keeper) -> None:
    """Waits until rows stand where they are to stay, which a training loop never has to."""
    keeper.wait()
    assert isinstance(keeper._saver, Checkpointer)
    keeper._saver.settle()


def restore(run: Run, path: Path, number: int | None, *, cold: bool) -> tuple[float, CountingStore]:
    """Brings a version back, the newest unless one is named, as a run does that starts again."""
    store = CountingStore(open_store(str(path)))
    if cold:
        forget(path)
    start = time.perf_counter()
    keeper = run.keeper(store, VersionSpec(), must_exist=True)
    keeper.resume(number)
    seconds = time.perf_counter() - start
    keeper.close(save=False)
    return seconds, store


def save_full(run: Run, path: Path) -> None:
    """What is in memory as one whole version."""
    keeper = run.keeper(path, VersionSpec(layout="full"))
    keeper.save()
    keeper.wait()
    keeper.close(save=False)


def measure(
    run: Run, paths: dict[str, Path], numbers: list[int], compared: list[int], *, repeats: int,
    warm_others: bool,
) -> tuple[dict[str, dict[int, dict[str, float]]], dict[str, list[float]]]:  # fmt: skip
    """Restores versions from every layout, in turns; and the same version saved whole.

    The layouts that are compared closely, grid and full, take `repeats` turns each way, the first
    of them changing, of which the median counts; with them, the ratios of all cold pairs ("pairs"),
    and of the whole version with itself, restored once more in each turn ("null"): how far two
    measurements of one thing differ; and the medians of both, version by version. The others, of
    which a restore reads up to the whole history, take one turn at the versions that are
    `compared`, with files in the page cache if asked for.
    """
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in [*paths, "full"]}
    ratios: dict[str, list[float]] = {
        each: [] for each in ("pairs", "null", "pair_medians", "null_medians")
    }
    for number in numbers:
        # To touch memory for the first time takes long, and the first contender would pay for it.
        restore(run, paths["grid"], number, cold=False)
        with directory() as whole:
            save_full(run, whole)
            where: dict[str, tuple[Path, int | None]] = {"grid": (paths["grid"], number)}
            where["full"] = whole, None
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in where}
            for repeat in range(repeats):
                for name in where if repeat % 2 else reversed(where):
                    cold, store = restore(run, *where[name], cold=True)
                    warm = math.nan
                    if number in compared:
                        warm, _ = restore(run, *where[name], cold=False)
                    times[name].append((cold, warm))
                    found[name][number] = {"nbytes": store.nbytes, "files": len(store.files)}
                again, _ = restore(run, *where["full"], cold=True)
                ratios["null"].append(again / times["full"][-1][0])
            for name, taken in times.items():
                cold, warm = (statistics.median(each) for each in zip(*taken, strict=True))
                found[name][number] |= {"cold_s": cold, "warm_s": warm}
            pairs = zip(times["grid"], times["full"], strict=True)
            ratios["pairs"] += [ours / whole_s for (ours, _), (whole_s, _) in pairs]
            for each in ("pair", "null"):
                of_version = ratios["pairs" if each == "pair" else "null"][-repeats:]
                ratios[f"{each}_medians"].append(statistics.median(of_version))
            grid, full = found["grid"][number], found["full"][number]
            print(
                f"version {number}: cold {grid['cold_s']:.3f} s, full {full['cold_s']:.3f} s, "
                f"{grid['cold_s'] / full['cold_s']:.2f} with {grid['nbytes'] / full['nbytes']:.2f} "
                f"of the bytes; warm {grid['warm_s']:.3f} s, full {full['warm_s']:.3f} s",
                flush=True,
            )
        if number in compared:
            for name in set(paths) - {"grid"}:
                cold, store = restore(run, paths[name], number, cold=True)
                warm = restore(run, paths[name], number, cold=False)[0] if warm_others else math.nan
                found[name][number] = {
                    "cold_s": cold, "warm_s": warm, "nbytes": store.nbytes,
                    "files": len(store.files),
                }  # fmt: skip
    return found, ratios


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that so many of all do not exceed."""
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def pair_figures(
    found: dict[str, dict[int, dict[str, float]]], ratios: dict[str, list[float]]
) -> dict[str, float]:
    """Of restores from the grid against the same version saved whole, both cold."""
    more = [each["nbytes"] / found["full"][n]["nbytes"] for n, each in found["grid"].items()]
    return {
        "restore_vs_full_file": percentile(ratios["pairs"], 95),
        "restore_vs_full_file_median": statistics.median(ratios["pairs"]),
        "restore_vs_full_file_worst": max(ratios["pairs"]),
        "restore_null_pair": percentile(ratios["null"], 95),
        "restore_null_pair_median": statistics.median(ratios["null"]),
        "restore_vs_full_file_of_versions": percentile(ratios["pair_medians"], 95),
        "restore_null_pair_of_versions": percentile(ratios["null_medians"], 95),
        "bytes_read_vs_full_file_p95": percentile(more, 95),
        "bytes_read_vs_full_file_worst": max(more),
    }


def from_s3(root: Path, versions: int, dim: int, repeats: int) -> dict[str, float]:
    """Restores of a grid from an S3 server whose answers come late, in figures; none without one.

    The history is as long and as wide as that of `--quick`, whose bytes take the server less time
    than requests do."""
    if _s3.rclone() is None:
        print("no rclone: restores from S3 are not measured", flush=True)
        return {}
    numbers = list(range(versions // 3, versions + 1, versions // 3))
    found = _s3.measured(root / "s3", dim, versions, numbers, repeats)
    figures = {
        "s3_restore_seconds": found.seconds, "s3_requests": found.requests,
        "s3_plain_gets_seconds": found.ceiling_seconds, "s3_mb": found.mb,
    }  # fmt: skip
    if found.before_seconds is not None and found.before_requests is not None:
        figures |= {
            "s3_restore_seconds_before": found.before_seconds,
            "s3_requests_before": found.before_requests,
            "s3_speedup_vs_before": found.before_seconds / found.seconds,
        }
    return figures


def every_version(run: Run, path: Path, versions: int) -> dict[int, dict[str, float]]:
    """Restores every version of a layout, cold and then warm."""
    found = {}
    for number in range(1, versions + 1):
        cold, store = restore(run, path, number, cold=True)
        warm, _ = restore(run, path, number, cold=False)
        found[number] = {"cold_s": cold, "warm_s": warm, "nbytes": store.nbytes}
    return found


def ablation(versions: int, dim: int) -> dict[str, dict[str, float]]:
    """Figure 14 and what stands for 13: the ratio, and concatenation. Filters there are none."""
    cases = {f"R={ratio}": Grid(ratio=ratio) for ratio in (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)}
    cases["R=0.0, each piece a file"] = Grid(ratio=0.0, concatenate=False)
    found = {}
    for name, rules in cases.items():
        run = Run(dim, 0.0)
        with directory() as path:
            spec = VersionSpec(layout="grid", grid=rules)
            built = history(run, path, spec, versions, settled=True)
            numbers = range(versions // 4, versions + 1, versions // 4)
            taken = [restore(run, path, number, cold=True) for number in numbers]
        found[name] = {
            "saved_mb": built["saved_nbytes"] / 1e6,
            "construct_s": built["seconds"] + built["settle_s"],
            "round_s": built["round_s"],
            "restore_s": statistics.mean(seconds for seconds, _ in taken),
            "mb_read": statistics.mean(store.nbytes for _, store in taken) / 1e6,
            "files": statistics.mean(len(store.files) for _, store in taken),
            "amplification": 1 + built["extracted_nbytes"] / built["saved_nbytes"],
        }
        print(f"{name}: {found[name]}", flush=True)
        del run
        gc.collect()
    return found


def balanced(cases: dict[str, dict[str, float]]) -> str:
    """The ratio with the fewest bytes in all, when every version is saved and restored once."""
    by_ratio = {name: case for name, case in cases.items() if name[2:].replace(".", "").isdigit()}
    return min(
        by_ratio,
        key=lambda name: by_ratio[name]["saved_mb"] * by_ratio[name]["amplification"]
        / ABLATION_VERSIONS
        + by_ratio[name]["mb_read"],
    )  # fmt: skip


def plot(
    histories: dict[str, dict[str, Any]], found: dict[str, Any], every: dict[int, dict[str, float]],
    cases: dict[str, dict[str, float]],
) -> None:  # fmt: skip
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(19, 8.5), layout="constrained")
    colors = {"grid": "C1", "naive": "C0", "differential": "C2", "full": "C3"}
    for name, versions in found.items():
        shown = every if name == "grid" else versions
        style = "-" if name == "grid" else "o-"
        for axis, key, scale in ((axes[0, 0], "cold_s", 1), (axes[0, 1], "nbytes", 1e9)):
            values = [version[key] / scale for version in shown.values()]
            axis.plot(list(shown), values, style, ms=4, color=colors[name], label=name)
    for name, run in histories.items():
        numbers = range(1, len(run["stored"]) + 1)
        axes[0, 2].plot(numbers, np.array(run["stored"]) / 1e9, color=colors[name], label=name)
        axes[0, 3].plot(numbers, np.cumsum(run["blocked"]), color=colors[name], label=name)
    titles = [
        "cold restore, s",
        "read by a restore, GB",
        "stored, GB",
        "training held up, s in all",
    ]
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set(title=title, xlabel="version", ylim=(0, None))
        axis.legend()
    ratios = {
        float(name[2:]): case for name, case in cases.items() if name[2:].replace(".", "").isdigit()
    }
    for key, label in (("round_s", "extraction, all rounds"), ("restore_s", "restore, mean")):
        axes[1, 0].plot(list(ratios), [case[key] for case in ratios.values()], "o-", label=label)
    axes[1, 0].set(title="seconds by R", xlabel="R", yscale="log")
    axes[1, 0].legend()
    axes[1, 1].plot(
        list(ratios), [c["amplification"] for c in ratios.values()], "o-", label="written / saved"
    )
    least = min(case["mb_read"] for case in ratios.values())
    axes[1, 1].plot(
        list(ratios), [c["mb_read"] / least for c in ratios.values()], "o-", label="read / least"
    )
    axes[1, 1].set(title="bytes by R", xlabel="R", ylim=(0, None))
    axes[1, 1].legend()
    files = {
        "two files a round": cases["R=0.0"],
        "each piece a file": cases["R=0.0, each piece a file"],
    }
    axes[1, 2].barh(list(files), [case["restore_s"] for case in files.values()])
    for row, case in enumerate(files.values()):
        axes[1, 2].text(0, row, f"  {case['files']:.0f} files read", va="center", color="white")
    axes[1, 2].set(title="restore with R=0, s")
    axes[1, 3].axis("off")
    figure.savefig(RESULTS / "versions.png", dpi=110)


def only(given: Options) -> None:
    """Some of the figures, in a result of their own: pairs of the grid and full files, or restores
    from S3."""
    what = given.chosen["only"]
    versions, dim = QUICK if given.quick or what == "s3" else (150, 128)
    config: dict[str, Any] = {"versions": versions, "dim": dim, "iterations": ITERATIONS}
    columns, rows, notes = ["what", "value"], [], []
    with directory() as root:
        if what == "s3":
            figures = from_s3(root, versions, dim, repeats=1 if given.quick else 3)
            if not figures:
                return
            config |= {"delay_ms": _s3.DELAY_SECONDS * 1e3, "at_once": _s3.AT_ONCE,
                       "before": _s3.commit_before()}  # fmt: skip
            rows = [[name, f"{value:.3f}"] for name, value in figures.items()]
            notes = [S3_NOTE]
        else:
            run = Run(dim, 0.0)
            built = history(run, root / "grid", VersionSpec(layout="grid"), versions)
            numbers = list(range(6, versions + 1, 6))
            paths = {"grid": root / "grid"}
            found, ratios = measure(run, paths, numbers, [], repeats=5, warm_others=False)
            figures = pair_figures(found, ratios)
            columns = ["version", "grid s", "whole s", "ratio", "MB", "MB whole", "files"]
            for number, grid in found["grid"].items():
                whole = found["full"][number]
                seconds = grid["cold_s"], whole["cold_s"], grid["cold_s"] / whole["cold_s"]
                sizes = grid["nbytes"] / 1e6, whole["nbytes"] / 1e6, grid["files"]
                rows.append([str(number), *(f"{each:.3f}" for each in seconds),
                             *(f"{each:.0f}" for each in sizes)])  # fmt: skip
            pairs = len(ratios["pairs"])
            some = f"five pairs of each version, in turns, and their medians; {pairs} in all"
            gigabytes = [
                f"{built[each] / 1e9:.2f} GB" for each in ("saved_nbytes", "extracted_nbytes")
            ]
            notes = [
                f"Cold restores through a keeper: {some}.",
                "A null pair is the whole version restored twice in the same turns.",
                "Figures of versions are 95th percentiles of the median ratio of each.",
                f"{gigabytes[0]} were saved, and extraction wrote {gigabytes[1]}.",
            ]
            figures["write_amplification"] = 1 + built["extracted_nbytes"] / built["saved_nbytes"]
    report(
        replace(given, name=f"versions-{what}"), config=config, figures=figures, columns=columns,
        rows=rows, notes=notes, by=f"versions.py --only {what}",
    )  # fmt: skip


def main() -> None:
    choices = {"only": ("all", "pairs", "s3", *grid_servers.STAGES)}
    given: Options = options(__file__, __doc__ or "", choices=choices)
    if given.chosen["only"] in grid_servers.STAGES:
        grid_servers.report_stage(given)
        return
    if given.chosen["only"] != "all":
        only(given)
        return
    versions, dim = QUICK if given.quick else (150, 128)
    dense_ms = 3.0 if given.quick else DENSE_MS
    layouts = {
        "naive": VersionSpec(layout="consecutive"),
        "grid": VersionSpec(layout="grid"),
        "differential": VersionSpec(layout="intermittent"),
    }
    histories: dict[str, dict[str, Any]] = {}
    paths: dict[str, Path] = {}
    run = Run(dim, dense_ms)
    with directory() as root:
        # What a process does once at its first save, the first layout would pay for.
        history(run, root / "first", layouts["naive"], 2)
        for name, spec in layouts.items():
            paths[name] = root / name
            histories[name] = history(run, paths[name], spec, versions)
            shown = {k: v for k, v in histories[name].items() if k not in ("stored", "blocked")}
            print(f"{name}: {shown}", flush=True)
        step = versions // 3 if given.quick else 3
        numbers = list(range(step, versions + 1, step))
        repeats = 3 if given.quick else 2
        compared = numbers[::2] if given.quick else list(range(30, versions + 1, 30))
        found, ratios = measure(
            run, paths, numbers, compared, repeats=repeats, warm_others=not given.quick
        )
        every = {} if given.quick else every_version(run, paths["grid"], versions)
        rows_mb = found["full"][versions]["nbytes"] / 1e6
        s3 = from_s3(root, *QUICK, repeats=1 if given.quick else 5)
    del run
    cases = {} if given.quick else ablation(ABLATION_VERSIONS, 24)
    means = {
        name: {
            key: statistics.mean(found[name][number][key] for number in compared)
            for key in ("cold_s", "warm_s", "nbytes", "files")
        }
        for name in found
    }
    grid, naive, differential = histories["grid"], histories["naive"], histories["differential"]
    with directory() as root:
        many = grid_servers.many_versions(root, quick=given.quick)
    figures = {
        **many["figures"],
        **pair_figures(found, ratios),
        "restore_speedup_vs_naive": statistics.mean(
            found["naive"][n]["cold_s"] / found["grid"][n]["cold_s"] for n in compared
        ),
        "bytes_read_vs_differential": means["grid"]["nbytes"] / means["differential"]["nbytes"],
        "storage_vs_differential": grid["storage"] / differential["storage"],
        "blocked_vs_naive": grid["blocked_s"] / naive["blocked_s"],
        "write_amplification": 1 + grid["extracted_nbytes"] / grid["saved_nbytes"],
        **s3,
    }
    if not given.quick:
        plot(histories, found, every, cases)
    report(
        given,
        config={
            "versions": versions, "iterations": ITERATIONS, "batch": BATCH, "dim": dim,
            "optimizer": "Adagrad", "ids": "criteo", "rows_total": ROWS_TOTAL,
            "rows_mb_at_the_end": round(rows_mb), "dense_ms": dense_ms, "ratio": RATIO,
            "many_versions": many["config"], "s3_before": _s3.commit_before(),
        },
        figures=figures,
        columns=["layout", "cold restore s", "warm s", "MB read", "files read", "GB stored",
                 "blocked s", "background CPU s", "resets"],
        rows=[
            [name, f"{means[name]['cold_s']:.3f}",
             "" if math.isnan(means[name]["warm_s"]) else f"{means[name]['warm_s']:.3f}",
             f"{means[name]['nbytes'] / 1e6:.0f}", f"{means[name]['files']:.0f}",
             f"{histories[name]['storage'] / 1e9:.2f}" if name in histories else "",
             f"{histories[name]['blocked_s']:.2f}" if name in histories else "",
             f"{histories[name]['background_cpu_s']:.1f}" if name in histories else "",
             str(histories[name]["resets"]) if name in histories else ""]
            for name in found
        ],
        notes=[
            (f"Restores are means over versions {compared}; restore_vs_full_file is the 95th "
            f"percentile of {len(ratios['pairs'])} cold pairs, {repeats} of {len(numbers)} "
            "versions each. CPU is that of all threads but the one that trains."),
            many["note"],
            S3_NOTE,
            *(
                [
                    (f"Over all {versions} versions of the grid: cold "
                    f"{statistics.mean(v['cold_s'] for v in every.values()):.3f} s on average, "
                    f"{max(v['cold_s'] for v in every.values()):.3f} s at worst; warm "
                    f"{statistics.mean(v['warm_s'] for v in every.values()):.3f} s and "
                    f"{max(v['warm_s'] for v in every.values()):.3f} s."),
                    (f"Of the ratios below, {balanced(cases)} has the fewest bytes in all when "
                    f"every version is written and read once; the default is {RATIO}."),
                ]
                if every
                else []
            ),
            *(
                f"{name}: restore {case['restore_s']:.3f} s, {case['mb_read']:.0f} MB in "
                f"{case['files']:.0f} files; extraction {case['round_s']:.1f} s, "
                f"{case['amplification']:.2f} times what was saved is written"
                for name, case in cases.items()
            ),
        ],
        packages=["matplotlib"],
    )  # fmt: skip


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    main()
