"""What a checkpoint costs: pause, stall, bytes, memory, restore; beside torch.save and DCP.

2 GB of rows (8 tables, dim 64, row-wise Adagrad), every row trained before measuring, about a
quarter of the rows changed per interval. One live model serves all contenders of a run.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _common import Options, options, report
from _stalls import (
    UNDISTURBED,
    Contender,
    Embedding,
    Emulated,
    Ours,
    ProcessorTime,
    Recommender,
    Split,
    Stalls,
    beside_best,
    copy_and_write,
    peers,
    process_group,
    processor_time,
    stalls,
)
from emberkeep._types import RowIds
from emberkeep.blobs import open_store
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.data import skewed_ids
from emberkeep.nn import EmbeddingBags
from emberkeep.repository import KeepLast, Repository
from emberkeep.tables import Adagrad, Optimizer, RowWiseAdagrad, Table

TABLES, ROWS, DIM = 8, 1_000_000, 64
STEPS = 12  # training steps of one interval
INTERVALS = 3  # before batches repeat
LOOKUPS = 30_000  # per table and step: about a quarter of the rows change in an interval
ROUNDS = {"embedding": 9, "emulated": 5, "dlrm": 5}  # of stalls
SKEW = 0.6  # Zipf exponent
BLOCK = 250_000
LR = 0.01
FULL = VersionSpec(layout="full")
COPY = "a copy written past the page cache"
SHARE = 0.1  # of a core, for saves with a budget


class Run:
    """A live model of embedding tables, trained without a dense network."""

    def __init__(self, rows: int = ROWS, optimizer: Optimizer | None = None) -> None:
        self.rows = rows
        self.bags = EmbeddingBags(
            [Table(f"t{t}", rows=rows, dim=DIM) for t in range(TABLES)],
            optimizer=optimizer or RowWiseAdagrad(lr=LR),
        )
        assert isinstance(self.bags.cluster, LocalCluster)
        self.cluster = self.bags.cluster
        self.slab = self.cluster.shards[0].slabs[0]
        self._number = 0
        random = np.random.default_rng(0)
        block = random.standard_normal((min(BLOCK, rows), DIM), np.float32) * 0.05
        for table in self.cluster.tables:
            for start in range(0, rows, block.shape[0]):
                ids = np.arange(start, min(start + block.shape[0], rows))
                planes = {"weight": block[: ids.size]}
                for name, plane in self.slab.planes.items():
                    if name != "weight":
                        shape = (ids.size, plane.shape[1])
                        planes[name] = random.random(shape, np.float32) + 0.1
                self.cluster.install(table.name, ids, planes)
        self.batches = [self._batch(number) for number in range(INTERVALS * STEPS)]
        most = max(wanted.ids.size for wanted in self.batches)
        # What gradients are does not matter here: all batches share them.
        self.grads = random.standard_normal((most, DIM), np.float32) * np.float32(1e-3)

    def lookups(self, number: int) -> list[Any]:
        """The ids of a batch by table, repeated ones included."""
        count = LOOKUPS * self.rows // ROWS
        return [
            skewed_ids(self.rows, count, skew=SKEW, seed=t, start=number * count)
            for t in range(TABLES)
        ]

    def _batch(self, number: int) -> RowIds:
        ids = [np.unique(each) for each in self.lookups(number)]
        return RowIds(np.concatenate(ids), np.cumsum([0, *(part.size for part in ids)]))

    def next(self) -> int:
        """The number of the batch whose turn it is."""
        self._number += 1
        return (self._number - 1) % len(self.batches)

    def step(self, *, pull: bool = True) -> None:
        wanted = self.batches[self.next()]
        if pull:
            self.cluster.pull([wanted])
        self.cluster.push([wanted], [self.grads[: wanted.ids.size]], lr=LR)

    def change(self) -> None:
        """The rows change as in one interval, and nothing is timed."""
        for _ in range(STEPS):
            self.step(pull=False)

    def interval(self) -> float:
        """Seconds of the training of one interval."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        return time.perf_counter() - start

    def changed(self) -> float:
        """The share of the rows that an interval changes."""
        seen = np.zeros(TABLES * self.rows, bool)
        for wanted in self.batches[:STEPS]:
            table = np.repeat(np.arange(TABLES), np.diff(wanted.offsets))
            seen[table * self.rows + wanted.ids] = True
        return float(seen.mean())

    @property
    def planes(self) -> dict[str, Any]:
        return dict(self.slab.planes)

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.slab.planes.values())


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Peak:
    """The most resident memory above the start, while it is entered."""

    def __enter__(self) -> Peak:
        self.extra_mb, self._ended, self._start = 0.0, threading.Event(), resident_mb()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.extra_mb = max(self.extra_mb, resident_mb() - self._start)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


# Where versions go. A quick run keeps off the disk, whose speed is most of what a full one shows.
place: str | None = None


@contextmanager
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=place))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def in_memory() -> Iterator[None]:
    global place
    before = place
    place = "/dev/shm" if os.path.isdir("/dev/shm") else before
    try:
        yield
    finally:
        place = before


def started(run: Run, path: Path, spec: VersionSpec) -> Checkpointer:
    store = open_store(str(path))
    repository = Repository.create(store, schema=run.cluster.schema())
    settings = SaveSettings(retention=KeepLast(n=1), grace=timedelta(0))
    return Checkpointer(repository, run.cluster, spec=spec, settings=settings)


@contextmanager
def baseline(run: Run, spec: VersionSpec = FULL) -> Iterator[Checkpointer]:
    """A repository of its own that holds one version with all rows."""
    with directory() as path:
        keeper = started(run, path, spec)
        keeper.save(0)
        keeper.wait()
        yield keeper


def stored(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def sizes(run: Run, spec: VersionSpec, intervals: int) -> tuple[float, float, list[str]]:
    """Mean bytes written per version, the most that was stored, and what the versions were."""
    with directory() as path:
        keeper = started(run, path, spec)
        written, capacity, kinds = [], 0, []
        for step in range(intervals):
            if step:
                run.change()
            keeper.save(step)
            manifest = keeper.wait()
            assert manifest is not None
            written.append(manifest.nbytes)
            kinds.append(manifest.layout["kind"])
            capacity = max(capacity, stored(path))
        return float(np.mean(written)), capacity, kinds


def pauses(pairs: list[tuple[Run, Checkpointer]], saves: int) -> list[list[float]]:
    """The pauses of saves, a step before each; of all pairs in turn, then of doing nothing."""
    taken: list[list[float]] = [[] for _ in range(len(pairs) + 1)]
    for step in range(saves):
        for times, (run, keeper) in zip(taken, pairs, strict=False):
            run.step()
            start = time.perf_counter()
            keeper.save(step, spec=VersionSpec(layout="consecutive"))
            times.append((time.perf_counter() - start) * 1e3)
            keeper.wait()
        start = time.perf_counter()
        threading.Thread(target=lambda: None).start()
        taken[-1].append((time.perf_counter() - start) * 1e3)
    return taken


def tracking_pct(run: Run, rounds: int) -> float:
    """What setting dirty bits adds to an embedding-only step, in percent."""
    slab, times = run.slab, {"tracked": [], "not": []}  # type: ignore[var-annotated]
    for number in range(rounds):
        for mode in ("tracked", "not") if number % 2 else ("not", "tracked"):
            # Without tracking every bit that push looks at is set already.
            slab.dirty = np.zeros_like(slab.touched) if mode == "tracked" else slab.touched
            slab.dirty[:] = slab.dirty  # its pages exist, as they do in the middle of a run
            for _ in range(6):
                start = time.perf_counter()
                run.step()
                times[mode].append(time.perf_counter() - start)
    slab.dirty = slab.touched.copy()
    return (statistics.median(times["tracked"]) / statistics.median(times["not"]) - 1) * 100


def restore_times(
    run: Run, keeper: Checkpointer, saved: Path, repeats: int
) -> tuple[float, float, float]:
    """Seconds to restore the newest version, seconds of torch.load and copy, and our peak memory.

    `saved` is what torch.save wrote, of tensors of the same shapes.
    """
    ours, by_torch, peaks = [], [], []
    tensors = {name: torch.from_numpy(plane) for name, plane in run.slab.planes.items()}
    for _ in range(repeats):
        with Peak() as peak:
            start = time.perf_counter()
            keeper.restore()
            ours.append(time.perf_counter() - start)
        peaks.append(peak.extra_mb)
        start = time.perf_counter()
        loaded = torch.load(saved, weights_only=True)
        for name, tensor in tensors.items():
            tensor.copy_(loaded[name])
        by_torch.append(time.perf_counter() - start)
        del loaded
    return statistics.median(ours), statistics.median(by_torch), max(peaks)


def torch_save(run: Run, path: Path) -> None:
    torch.save({n: torch.from_numpy(p) for n, p in run.slab.planes.items()}, path / "model.pt")


Figures = dict[str, float]
Rows = list[list[str]]
WIDTHS: list[int | None] = [None, 8, 4, 3, 2]


def width(bits: int | None) -> str:
    return "float32" if bits is None else f"{bits} bits"


def measure_sizes(run: Run, quick: bool, figures: Figures, rows: Rows) -> None:
    """Bytes of every layout in every width; nothing here is timed."""
    figures["changed_per_interval"] = run.changed()
    layouts: list[Any] = ["full", "one_shot", "intermittent", "consecutive"]
    strategies = [
        VersionSpec(layout=layout, bits=bits, quantize_optimizer=bits is not None)
        for bits in ([8, 2] if quick else WIDTHS)
        for layout in (["intermittent"] if quick else layouts)
    ]
    if not quick:
        strategies += [VersionSpec(layout="intermittent", bits=bits) for bits in (8, 2)]
    for spec in strategies:
        with in_memory():  # sizes are the same wherever the files are
            mean, capacity, kinds = sizes(run, spec, saved(quick))
        name = f"{spec.layout}, {width(spec.bits)}"
        if spec.bits is not None:
            name += f", accumulator {'16 bits' if spec.quantize_optimizer else 'float32'}"
        rows.append(
            [name, "", "", "", f"{mean / 1e6:.0f}", f"{capacity / 1e6:.0f}",
             f"{run.nbytes / mean:.1f}×", f"{run.nbytes / capacity:.1f}×"]
        )  # fmt: skip
        if spec.layout == "intermittent" and spec.quantize_optimizer:
            if spec.bits in (2, 8):
                figures[f"write_ratio_{spec.bits}bit"] = run.nbytes / mean
                figures[f"capacity_ratio_{spec.bits}bit"] = run.nbytes / capacity
            print(f"{name}: {' '.join(kinds)}", flush=True)


def saved(quick: bool) -> int:
    """Versions of each layout, the first being a baseline."""
    return 2 if quick else 5


TRAININGS = {"embedding": Embedding, "emulated": Emulated, "dlrm": Recommender}


def measure_stalls(
    run: Run, where: Path, kind: str, quick: bool, figures: Figures, rows: Rows
) -> None:
    """Stalls of every contender; ours as a full version against theirs, and as an increment."""
    training = TRAININGS[kind](run)
    ours = [Ours(run, where, bits=None, increment=more) for more in (False, True)]
    theirs = peers(run, where)
    coded = [Ours(run, where, bits=bits, increment=True) for bits in (8, 4)]
    sharing = Ours(run, where, bits=None, increment=False, share=SHARE)
    chosen = [*ours, theirs[1]] if quick else [*ours, *theirs, *coded, sharing]
    if quick and kind != "embedding":
        chosen = [ours[1]]
    rounds, undisturbed = (1, 4) if quick else (ROUNDS[kind], UNDISTURBED)
    found = stalls(chosen, training, rounds, undisturbed)
    for name, taken in found.items():
        commit = statistics.median(taken.commit_seconds)
        rows.append([f"{training.name}: {name}", str(taken), f"{commit:.2f}", *[""] * 5])
    increment = found[ours[1].name]
    best = [found[peer.name] for peer in chosen if peer in theirs]
    if kind == "emulated":
        figures["stall_emulated_compute_ms"] = increment.median * 1e3
    if kind == "embedding":
        full = found[ours[0].name]
        figures["stall_seconds_per_checkpoint"] = increment.median
        figures["stall_seconds_per_full_checkpoint"] = full.median
        figures["commit_seconds"] = statistics.median(increment.commit_seconds)
        figures["held_ms_full"] = statistics.median(full.held_ms)
        figures["held_ms_increment"] = statistics.median(increment.held_ms)
        for name, contender in zip(("full", "increment"), ours, strict=True):
            compare(figures, f"stall_{name}_vs_best_peer", found[contender.name], best)
        figures["stall_vs_best_peer"] = max(
            figures[f"stall_{name}_vs_best_peer"] for name in ("full", "increment")
        )
        for minutes in (5, 30):
            for name, taken in (("", increment), ("_full", full)):
                share = taken.median / (minutes * 60) * 100
                figures[f"slowdown_pct{name}_every_{minutes}min"] = share
    elif best:
        compare(figures, f"stall_vs_best_peer_{kind}", found[ours[0].name], best)
        compare(figures, f"stall_increment_vs_best_peer_{kind}", increment, best)


def compare(figures: Figures, name: str, taken: Stalls, best: list[Stalls]) -> None:
    figures[name], figures[f"{name}_low"], figures[f"{name}_high"] = beside_best(taken, best)


def measure_processor_time(
    run: Run, where: Path, quick: bool, figures: Figures, rows: Rows
) -> None:
    """Core-seconds per gigabyte of selected float32 planes before encoding."""
    gigabytes = run.nbytes / 1e9
    widths = [None] if quick else WIDTHS
    ours = {bits: Ours(run, where, bits=bits, increment=False) for bits in widths}
    contenders: list[Contender] = [*ours.values()]
    contenders += [] if quick else peers(run, where)
    taken: dict[str, list[ProcessorTime]] = {}
    splits: dict[str, list[dict[str, float]]] = {}
    for _ in range(1 if quick else 3):
        for contender in contenders:
            with Split() as split:
                spent = processor_time(contender)
            contender.close()
            taken.setdefault(contender.name, []).append(spent)
            if contender in ours.values():
                rest = spent.own - sum(split.seconds.values())
                splits.setdefault(contender.name, []).append({**split.seconds, "Python": rest})
        taken.setdefault(COPY, []).append(copy_and_write(run, where))
    own = {name: statistics.median(t.own for t in times) for name, times in taken.items()}
    machine = {name: statistics.median(t.machine for t in times) for name, times in taken.items()}
    for name in taken:
        per_gb = f"{own[name] / gigabytes:.2f} ({machine[name] / gigabytes:.2f})"
        rows.append([f"alone: {name}", "", "", per_gb, *[""] * 4])
    exact = ours[None].name
    counted = [t.instructions for t in taken[exact] if t.instructions is not None]
    rows.append(
        ["alone: instructions of a full version, per GB", "", "",
         f"{statistics.median(counted) / gigabytes:.3g}" if counted
         else "not offered by this machine", *[""] * 4]
    )  # fmt: skip
    figures["core_seconds_per_gb"] = own[exact] / gigabytes
    figures["core_seconds_vs_copy"] = own[exact] / own[COPY]
    for bits, contender in ours.items():
        parts = splits[contender.name]
        suffix = "" if bits is None else f"_{bits}bit"
        if bits is not None:
            figures[f"core_seconds_per_gb{suffix}"] = own[contender.name] / gigabytes
        for part in parts[0]:
            middle = statistics.median(each[part] for each in parts) / gigabytes
            if bits in (None, 4):
                figures[f"core_seconds_per_gb{suffix}_{part.lower()}"] = middle


def measure_speed(run: Run, torch_path: Path, quick: bool, figures: Figures) -> None:
    """Pauses, tracking, memory, and a restore."""
    torch_save(run, torch_path)
    saves = 4 if quick else 100
    with baseline(run) as keeper:
        run.change()
        with Peak() as peak:
            keeper.save(1, spec=VersionSpec(layout="intermittent"))
            keeper.wait()
        figures["save_peak_extra_mb"] = peak.extra_mb
        ours, by_torch, extra_mb = restore_times(
            run, keeper, torch_path / "model.pt", 1 if quick else 2
        )
        small = Run(ROWS // 10)
        with baseline(small) as small_keeper:
            taken, small_taken, nothing = pauses([(run, keeper), (small, small_keeper)], saves)
        del small
    figures["restore_speed_vs_torch_load"] = by_torch / ours
    figures["restore_seconds"] = ours
    figures["restore_peak_extra_mb"] = extra_mb
    figures["tracking_embedding_overhead_pct"] = tracking_pct(run, 1 if quick else 12)
    figures["pause_ms_median"] = statistics.median(taken)
    figures["pause_ms_p99"] = float(np.percentile(taken, 99))
    figures["pause_ms_of_nothing"] = statistics.median(nothing)
    figures["pause_growth_10x_table"] = statistics.median(taken) / statistics.median(small_taken)


def measure_elementwise(rows: Rows) -> None:
    elementwise = Run(ROWS // 4, Adagrad(lr=LR))
    elementwise.change()
    for quantize in (False, True):
        spec = VersionSpec(layout="full", bits=8, quantize_optimizer=quantize)
        mean, capacity, _ = sizes(elementwise, spec, 2)
        name = f"element-wise Adagrad, 8 bits, accumulator {'8 bits' if quantize else 'float32'}"
        ratio = elementwise.nbytes / mean
        rows.append(
            [name, "", "", "", f"{mean / 1e6:.0f}", f"{capacity / 1e6:.0f}",
             f"{ratio:.1f}×", f"{elementwise.nbytes / capacity:.1f}×"]
        )  # fmt: skip


def measure_part(part: str, run: Run, torch_path: Path, quick: bool) -> tuple[Figures, Rows]:
    figures: Figures = {}
    rows: Rows = []
    where = torch_path.parent
    if part == "sizes":
        measure_sizes(run, quick, figures, rows)
        if not quick:
            measure_elementwise(rows)
    elif part == "speed":
        measure_speed(run, torch_path, quick, figures)
    else:
        with process_group():
            if part == "cores":
                measure_processor_time(run, where, quick, figures, rows)
            else:
                measure_stalls(run, where, part, quick, figures, rows)
    return figures, rows


PARTS = ("sizes", "speed", "cores", *TRAININGS)


def main() -> None:
    """A full run takes long: `--part` makes one part of it and keeps what it found, `--part join`
    reports all of them as one run. Each part fills its own model, and nothing passes between."""
    choices = {"part": ["all", *PARTS, "join"]}
    given = options(__file__, __doc__ or "", choices)
    chosen = given.chosen["part"]
    found: dict[str, tuple[Figures, Rows]] = {}
    if chosen == "join":
        found = {part: json.loads(kept(part).read_text()) for part in PARTS}
    else:
        run = Run()
        wanted = [part for part in PARTS if chosen in ("all", part)]
        if given.quick and chosen == "all":
            wanted.remove("dlrm")
        with in_memory() if given.quick else nullcontext(), directory() as torch_path:
            for part in wanted:
                found[part] = measure_part(part, run, torch_path, given.quick)
                if not given.quick:
                    kept(part).parent.mkdir(parents=True, exist_ok=True)
                    kept(part).write_text(json.dumps(found[part]))
    say(given, found)


def kept(part: str) -> Path:
    """Where the figures of a part of a full run wait for the others."""
    return Path(tempfile.gettempdir()) / "emberkeep-checkpoint" / f"{part}.json"


def say(given: Options, found: dict[str, tuple[Figures, Rows]]) -> None:
    full = TABLES * ROWS * (DIM + 1) * 4
    joined = given.chosen["part"] == "join"
    figures = {name: value for part, _ in found.values() for name, value in part.items()}
    notes = [
        f"Bytes less and storage less: against {full / 1e6:.0f} MB, all planes in float32.",
        ("Stall: wall time of the steps from request to commit, less as many undisturbed steps "
        "(their median just before and after); median of the rounds and its 95% interval, rounds "
        "drawn again. An increment holds about a quarter of the rows; every peer writes all."),
        ("Core-seconds: user and system time of all threads and processes of a save with "
        "nothing beside it, per GB of float32 planes before encoding; in brackets that of "
        "the whole machine, writing back pages included."),
    ]  # fmt: skip
    if "slowdown_pct_every_30min" in figures:
        notes.append(
            f"A checkpoint every 30 minutes slows training down by "
            f"{figures['slowdown_pct_every_30min']:.3f}% if it is an increment "
            f"({figures['stall_seconds_per_checkpoint']:.2f} s of stall, of which pushes were held "
            f"up for {figures['held_ms_increment']:.0f} ms), and by "
            f"{figures['slowdown_pct_full_every_30min']:.3f}% if it is a full version "
            f"({figures['stall_seconds_per_full_checkpoint']:.2f} s, "
            f"{figures['held_ms_full']:.0f} ms)."
        )
    report(
        given,
        config={
            "tables": TABLES, "rows": ROWS, "dim": DIM, "optimizer": "row-wise Adagrad",
            "row_bytes": (DIM + 1) * 4, "gigabytes": round(full / 1e9, 2),
            "lookups": LOOKUPS, "steps_per_interval": STEPS, "intervals": saved(given.quick),
            "ids": f"Zipf {SKEW}", "storage": "memory" if given.quick else "disk",
            "rounds": 1 if given.quick else ROUNDS,
        },
        figures=figures,
        columns=["what", "stall s", "commit s", "core-s per GB (machine)", "MB written",
                 "MB stored", "bytes less", "storage less"],
        rows=[row for _, part in found.values() for row in part],
        notes=notes,
        whole=len(found) == len(PARTS),
        by="checkpoint.py --part …, each, then --part join" if joined else None,
    )  # fmt: skip


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    main()
