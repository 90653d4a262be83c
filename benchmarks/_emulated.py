"""The half of `tier.py` where a step waits in place of the network, as beside a GPU.

**The wait is fixed beforehand**, by embedding's share of a step in memory as the paper has it. Its
section VI-C1 (with Figure 7; the copy at hand has no page numbers) says that the time of DRAM-PS
falls by 40% and 65% as 4 GPUs become 8 and 16. With a part that GPUs share, C, and one that they do
not, E, such times are C·4/GPUs + E; least squares over the three give E = 0.15 of the time on 4
GPUs, so 26% of that on 8 and 41% of that on 16. Figures 8 to 12 are of 16 GPUs, hence `SHARE`:
embedding is 41% of a step in memory. It takes about `EMBEDDING_MS` in memory on two cores, and the
wait follows from both.
It is a constant, and not measured again in every run: a machine that is busy at that moment would
be given something longer to hide behind. The paper prints no such share itself; that E holds
embedding alone is an assumption.

**On a faster machine that wait hides more than the paper's**: embedding is a smaller share of the
step. So the wait at which it *is* the paper's share stands beside it (`…_paper_share`). For that
the time of memory is measured in the same run, before any tier is there, and printed. Waits of 5 to
80 ms, and the share that a run has found, stand beside both.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

import emberkeep as ek
from _tier_bench import Bench, Counted, Cycles, Turn
from _tiers import LR, PAPER_SHAPE, Contender, Taken, Tiering, probe, warm_up

# (GPUs, time of DRAM-PS beside that on 4), section VI-C1 and Figure 7.
_SCALING = ((4, 1.0), (8, 0.6), (16, 0.35))
_GPUS = 16
# What a step of `PAPER_SHAPE` in memory takes beyond a wait of 30 ms, measured beforehand while the
# machine did nothing else: 11.3 to 13.6 ms, in ten turns of 20 steps.
EMBEDDING_MS = 13.0
# Two GB of 500 GB (section VI-C2), and five times that.
CACHES = (0.004, 0.02)
WAITS_MS = (5, 10, 20, 40, 80)
INTERVALS = (10, 25, 50, 100)
STEPS = 5
# The wait beside which the time of memory is measured, as `EMBEDDING_MS` was.
_MEASURING_MS = 30.0
_CHECKED_BATCHES = 4


def embedding_share(gpus: int) -> float:
    """Of a step in memory on so many GPUs, by the paper's scaling."""
    inverse = np.array([4 / count for count, _ in _SCALING])
    compute, embedding = np.polyfit(inverse, [time for _, time in _SCALING], 1)
    return float(embedding / (compute * 4 / gpus + embedding))


SHARE = embedding_share(_GPUS)


@dataclass(slots=True)
class Found:
    """What this half adds to the report."""

    config: dict[str, object] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def caches(root: Path, *, quick: bool, cache: float) -> Found:
    """All contenders with a cache of this share. A quick run has a quarter of the rows and as many
    of them in the cache."""
    scale = 4 if quick else 1
    bench = Bench(root / "paper", replace(PAPER_SHAPE, rows=PAPER_SHAPE.rows // scale))
    embedding_ms = _embedding_ms(bench, turns=3 if quick else 10, steps=5 if quick else 20)
    ram = bench.memory(wait_s=0.0)
    found, shape, wait_ms = Found(), bench.shape, wait_of(_GPUS)
    found.config = {
        "emulated_rows": bench.rows, "emulated_dim": shape.dim, "emulated_batch": shape.batch,
        "emulated_network": shape.network, "emulated_optimizer": "row-wise adagrad",
        "emulated_cache_shares": [scale * share for share in CACHES],
        "emulated_embedding_share": round(SHARE, 3),
    }  # fmt: skip
    found.figures["emulated_wait_ms"] = wait_ms
    suffix = "" if cache == CACHES[0] else f"_cache_{cache * 100:g}pct"
    found.figures[f"emulated_embedding_ms{suffix}"] = embedding_ms
    _at(bench, ram, scale * cache, wait_ms, embedding_ms, found, suffix, quick=quick)
    ram.close()
    if cache == CACHES[0]:
        found.notes.append(_about(bench.rows, wait_ms))
    return found


def _embedding_ms(bench: Bench, *, turns: int, steps: int) -> float:
    """What a step in memory takes beyond its wait, on this machine."""
    ram = bench.memory(wait_s=_MEASURING_MS / 1e3)
    ram.train(steps)
    taken = [ram.train(steps).ms - _MEASURING_MS for _ in range(turns)]
    ram.close()
    median = statistics.median(taken)
    print(
        f"a step in memory takes {median:.1f} ms ({min(taken):.1f} to {max(taken):.1f}) beyond a "
        f"wait of {_MEASURING_MS:g} ms; {EMBEDDING_MS:g} were measured beforehand",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return median


def _about(rows: int, wait_ms: float) -> str:
    return (
        f"Where a step waits: DeepFM of dim {PAPER_SHAPE.dim}, batches of {PAPER_SHAPE.batch}, "
        f"{rows:,} rows. The paper's share of embedding on {_GPUS} GPUs is {SHARE:.0%} of a step "
        f"in memory, and {EMBEDDING_MS:g} ms were measured beforehand: a step waits for "
        f"{wait_ms:.1f} ms. With the shares of 8 and 4 GPUs ({embedding_share(8):.0%} and "
        f"{embedding_share(4):.0%}) it would wait for {wait_of(8):.0f} and {wait_of(4):.0f} ms. "
        "All contenders find the unique rows of the next batch while they wait. Core ms are of all "
        f"threads. After the same batches the rows of the last {_CHECKED_BATCHES} were the same "
        "bits for all of them."
    )


def checkpoints(root: Path, *, quick: bool) -> Found:
    """Figure 12: the tier alone, with checkpoints at several intervals."""
    bench, found, wait_ms = Bench(root / "paper", PAPER_SHAPE), Found(), wait_of(_GPUS)
    swept = bench.contender(share=CACHES[-1], wait_s=wait_ms / 1e3, last=True)
    warm_up([swept])
    found.rows += _intervals(swept, wait_ms)
    swept.close()
    return found


def wait_of(gpus: int, embedding_ms: float = EMBEDDING_MS) -> float:
    """Milliseconds in place of the network, as on so many GPUs, where embedding takes so long."""
    share = embedding_share(gpus)
    return embedding_ms * (1 - share) / share


def _at(
    bench: Bench, ram: Contender, cache: float, wait_ms: float, embedding_ms: float, found: Found,
    suffix: str, *, quick: bool,
) -> None:  # fmt: skip
    """All contenders with a cache of this share."""
    behind = {
        "inline": bench.contender("inline", cache),
        "ordinary": bench.contender("ordinary", cache),
    }
    if not quick:
        behind["hash"] = bench.contender("hash", cache)
    behind["tier"] = bench.contender("pipelined", cache, last=quick)
    everybody = {"ram": ram, **behind}
    warm_up(list(everybody.values()))
    for one in everybody.values():
        one.wait_s = wait_ms / 1e3
        one.train(2)
    per_second = [probe(behind["tier"], 10_000)]
    counted = Counted(behind["tier"])
    turns: dict[str, Turn] = {n: partial(one.train, STEPS) for n, one in everybody.items()}
    taken = Cycles(turns, cycles=3 if quick else 12)
    reads, missed, stood = counted.reads_per_batch(), counted.miss_rate(), counted.wait_ms()
    kept = {name: one.rows_of(_CHECKED_BATCHES) for name, one in everybody.items()}
    assert all(rows == kept["ram"] for rows in kept.values()), "the contenders' rows differ"
    titled = f"waiting {wait_ms:.0f} ms, cache {cache:.1%}"
    found.rows += [
        taken.row("ram", f"{titled}: memory"),
        taken.row("tier", f"{titled}: tier"),
        taken.row("inline", f"{titled}: cache alone"),
        taken.row("ordinary", f"{titled}: ordinary cache"),
    ]
    if "hash" in behind:
        found.rows.append(taken.row("hash", f"{titled}: no cache (PMem-Hash)"))
    found.figures |= {
        f"emulated_time_vs_dram{suffix}": taken.ratio("tier", "ram"),
        f"emulated_time_vs_ordinary_cache{suffix}": taken.ratio("tier", "ordinary"),
        f"pipeline_gain{suffix}": 1 - taken.ratio("tier", "inline"),
    }
    # No step is shorter than the disk takes to make its reads, whatever they are hidden behind.
    per_second.append(probe(behind["tier"], 10_000))
    disk_ms = reads / max(per_second) * 1e3
    found.figures |= {
        f"emulated_disk_ms{suffix}": disk_ms,
        f"emulated_time_vs_bound{suffix}": taken.ms("tier") / max(taken.ms("ram"), disk_ms),
    }
    low, high = taken.interval("tier", "ram")
    found.notes.append(
        f"Waiting, cache {cache:.1%}: {reads:,.0f} reads a batch "
        f"({missed:.1%} of rows), for which the disk alone takes {disk_ms:.1f} ms with 64 of them "
        f"under way, and writes come on top; pulls and pushes of the tier stood still for "
        f"{stood:.1f} ms of a step. Embedding is {1 - wait_ms / taken.ms('ram'):.0%} "
        f"of a step in memory here. Tier beside memory {low:.3f} to {high:.3f}, beside "
        f"the ordinary cache {_span(taken, 'ordinary')}, beside the cache alone "
        f"{_span(taken, 'inline')} (95% intervals). The paper's pipeline takes 55% off the time of "
        "its cache alone (Figure 9)."
    )
    some = {name: everybody[name] for name in ("ram", "tier", "inline", "ordinary")}
    _at_paper_share(some, cache, embedding_ms, found, suffix, quick=quick)
    if not quick:
        found.rows += _waits(some, cache)
        if cache != CACHES[0]:
            found.rows += _computed(some, cache)
    for one in behind.values():
        bench.drop(one)


def _at_paper_share(
    contenders: dict[str, Contender], cache: float, embedding_ms: float, found: Found, suffix: str,
    *, quick: bool,
) -> None:  # fmt: skip
    """With the wait at which embedding is the paper's share of a step in memory, here."""
    wait_ms = wait_of(_GPUS, embedding_ms)
    taken = _waiting(contenders, wait_ms, cycles=2 if quick else 12)
    found.rows += _titled(taken, f"waiting {wait_ms:.1f} ms (the paper's share), cache {cache:.1%}")
    found.figures |= {
        f"emulated_paper_share_wait_ms{suffix}": wait_ms,
        f"emulated_time_vs_dram_paper_share{suffix}": taken.ratio("tier", "ram"),
    }
    low, high = taken.interval("tier", "ram")
    found.notes.append(
        f"With the paper's share, cache {cache:.1%}: a step in memory takes {embedding_ms:.1f} ms "
        f"beyond a wait of {_MEASURING_MS:g} ms on this machine, measured before any tier was "
        f"there, so that embedding is {SHARE:.0%} of it where a step waits for {wait_ms:.1f} ms; "
        f"{1 - wait_ms / taken.ms('ram'):.0%} was found. Tier beside memory {low:.3f} to "
        f"{high:.3f}, beside the ordinary cache {_span(taken, 'ordinary')} (95% intervals)."
    )


def _span(taken: Cycles, beside: str) -> str:
    low, high = taken.interval("tier", beside)
    return f"{low:.2f} to {high:.2f}"


_TITLES = {
    "ram": "memory", "tier": "tier", "inline": "cache alone", "ordinary": "ordinary cache",
}  # fmt: skip


def _waits(contenders: dict[str, Contender], cache: float) -> Iterator[list[str]]:
    """Other waits than the one that was fixed."""
    for wait_ms in WAITS_MS:
        taken = _waiting(contenders, wait_ms, cycles=4)
        yield from _titled(taken, f"waiting {wait_ms} ms, cache {cache:.1%}")


def _waiting(contenders: dict[str, Contender], wait_ms: float, *, cycles: int) -> Cycles:
    """Everybody takes turns with this wait."""
    for one in contenders.values():
        one.wait_s = wait_ms / 1e3
    turns: dict[str, Turn] = {n: partial(one.train, STEPS) for n, one in contenders.items()}
    return Cycles(turns, cycles=cycles)


def _titled(taken: Cycles, title: str) -> Iterator[list[str]]:
    for name, who in _TITLES.items():
        yield taken.row(name, f"{title}: {who}")


def _computed(contenders: dict[str, Contender], cache: float) -> Iterator[list[str]]:
    """The same contenders with the network computed, on the cores that they need themselves."""
    for one in contenders.values():
        one.wait_s = None
    turns: dict[str, Turn] = {name: partial(one.train, 2) for name, one in contenders.items()}
    yield from _titled(Cycles(turns, cycles=3), f"DeepFM computed, cache {cache:.1%}")


def _intervals(one: Contender, wait_ms: float) -> Iterator[list[str]]:
    """Figure 12: checkpoints at several intervals against none."""

    def kept(every: int) -> Turn:
        def turn() -> Taken:
            tiering = Tiering(one, every)
            taken = one.train(max(INTERVALS), before=tiering)
            tiering.finish()
            return taken

        return turn

    turns: dict[str, Turn] = {"none": partial(one.train, max(INTERVALS))}
    turns |= {str(every): kept(every) for every in INTERVALS}
    taken = Cycles(turns, cycles=8)
    title = f"waiting {wait_ms:.0f} ms, cache {CACHES[-1]:.1%}: tier, checkpoint every"
    for every in map(str, INTERVALS):
        row = taken.row(every, f"{title} {every}", beside="none")
        yield [*row[:3], f"{row[3]} of none", row[4]]


def recovery(root: Path, *, quick: bool) -> Found:
    """Figure 14 with more than 2 GB of rows."""
    found = Found()
    shape = replace(PAPER_SHAPE, optimizer=ek.Adagrad(lr=LR))
    bench = Bench(root / "large", shape)
    ram = bench.memory()
    times = [bench.recovery(ram) for _ in range(3)]
    ram.close()
    ratios = [loaded / back for back, loaded in times]
    back_s, load_s = (statistics.median(column) for column in zip(*times, strict=True))
    found.figures["recovery_speedup_vs_checkpoint_2gb"] = statistics.median(ratios)
    planes = shape.width + sum(shape.optimizer.planes(shape.width).values())
    found.notes.append(
        f"Of {bench.rows * 4 * planes / 1e9:.2f} GB of rows (DeepFM's, with Adagrad) coming back "
        f"takes {back_s:.2f} s from the file and {load_s:.2f} s from a full checkpoint, medians of "
        f"3; ratios {min(ratios):.1f} to {max(ratios):.1f}."
    )
    return found
