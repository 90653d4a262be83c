"""Training with rows in a file behind a cache, beside rows in memory and other caches.

Twice, in one table. *Computed*: DLRM in its Kaggle shape on the cores that upkeep needs as well, a
tenth of the rows in the cache. *Waiting*: the paper's setting, DeepFM with vectors of 64 and
batches of 4096, caches of 0.4% and 2%; a step waits in place of the network, as beside a GPU
(`_emulated.py` says for how long, and why). Rows are spread as Criteo's Kaggle data is, ids follow
the `retail` skew. All rows were written beforehand; caches are full when the clock starts. Files
are read and written directly, so the page cache takes no part. Contenders take turns; a figure is
the median, over cycles, of the ratio within one cycle.

- *memory*: every row in DRAM;
- *tier*: ours, the next batch's misses read ahead, upkeep between pull and push;
- *ordinary cache* (the paper's Ori-Cache): the same file format, but misses are read as they are
  met (one at a time by each thread), victims are written and the list of uses is kept inside pull
  and push; checkpoints dump what changed while training waits;
- *cache alone* (the paper's Figure 9): our cache, its reads and its order of eviction, but all of
  it inside pull and push;
- *no cache* (the paper's PMem-Hash): every pull and every push goes to the file.

`--compute real` or `--compute emulated` runs one half, `--part NAME` one part of it, in a few
minutes. Each part of a full run is kept until `--part join` reports all of them; where some were
not run, in a result of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from _baselines import Kind
from _common import options, report
from _emulated import CACHES, Found, checkpoints, recovery
from _emulated import caches as caches_of
from _tier_bench import COLUMNS, Bench, Counted, Cycles, Turn, beside_memory
from _tiers import KAGGLE_SHAPE, Contender, Dumping, Tiering, probe, warm_up

SHARE = 0.10
TURN, EVERY = 25, 50
SWEEP_SHARES = (0.01, 0.02, 0.05, 0.20)
LEAST_SHARE = 0.005
SKEWS: dict[str, Any] = {"more skewed (Zipf 1.5)": 1.5, "less skewed (criteo)": "criteo"}


def computed_caches(root: Path, *, quick: bool) -> Found:
    """Figure 8, caches of several sizes, and Figure 9, what cache and pipeline do alone."""
    bench, found = Bench(root / "retail", KAGGLE_SHAPE), Found()
    ram = bench.memory()
    cases: list[tuple[str, Kind, float]] = [
        *((f"cache {share:.0%}", "pipelined", share) for share in SWEEP_SHARES),
        ("no cache (PMem-Hash)", "hash", LEAST_SHARE),
        ("hardly any cache, no pipeline", "inline", LEAST_SHARE),
        ("pipeline alone", "pipelined", LEAST_SHARE),
        ("cache alone", "inline", SHARE),
    ]
    for title, kind, share in cases:
        one = bench.contender(kind, share)
        warm_up([one])
        found.rows.append(beside_memory(ram, {"one": one}, steps=5).row("one", title))
        bench.drop(one)
    ram.close()
    return found


def computed_skews(root: Path, *, quick: bool) -> Found:
    """Figures 10 and 11."""
    found = Found()
    for title, skew in SKEWS.items():
        bench = Bench(root / "skew", KAGGLE_SHAPE, skew)
        ours, ordinary = bench.contender(), bench.contender("ordinary")
        warm_up([ours, ordinary])
        counted = Counted(ours)
        ram = bench.memory()
        taken = beside_memory(ram, {"ours": ours, "ordinary": ordinary})
        misses = f"{counted.reads_per_batch():,.0f} reads a batch ({counted.miss_rate():.1%})"
        found.rows.append(taken.row("ours", f"{title}, {misses}: tier"))
        found.rows.append(taken.row("ordinary", f"{title}, {misses}: ordinary cache"))
        for one in (ram, ours, ordinary):
            one.close()
        shutil.rmtree(root / "skew")
    return found


# What runs alone, each in a few minutes: the machine has to be quiet meanwhile.
PARTS: dict[str, Callable[..., Found]] = {
    "computed": lambda root, *, quick: computed(root, quick=quick),
    "computed-caches": computed_caches,
    "computed-skews": computed_skews,
    "cache-0.4": partial(caches_of, cache=CACHES[0]),
    "cache-2": partial(caches_of, cache=CACHES[1]),
    "checkpoints": checkpoints,
    "recovery": recovery,
}
COMPUTE = {
    "both": [*PARTS],
    "real": [part for part in PARTS if part.startswith("computed")],
    "emulated": [part for part in PARTS if not part.startswith("computed")],
}
QUICK = ("computed", "cache-0.4")


def main() -> None:
    summary = __doc__.splitlines()[0]
    given = options(
        __file__, summary,
        {"compute": tuple(COMPUTE), "part": ("all", *PARTS, "join")},
    )  # fmt: skip
    part = given.chosen["part"]
    names = COMPUTE[given.chosen["compute"]] if part in ("all", "join") else [part]
    if part == "join":
        names = [name for name in names if kept(name).exists()]
    elif given.quick and part == "all":
        names = [name for name in names if name in QUICK]
    found = Found()
    for name in names:
        if part == "join":
            one = Found(**json.loads(kept(name).read_text()))
        else:
            one = measured(name, quick=given.quick)
        found.config |= one.config
        found.figures |= one.figures
        found.rows += one.rows
        found.notes += one.notes
    whole, by = names == [*PARTS], None
    if part == "join":
        by = "tier.py --part …, each, then --part join"
        if not whole:
            given, by = replace(given, name="tier-parts"), f"tier.py --part {' and '.join(names)}"
    report(
        given, config=found.config, figures=found.figures, columns=COLUMNS, rows=found.rows,
        notes=found.notes, whole=whole or part == "join", by=by,
    )  # fmt: skip


def kept(part: str) -> Path:
    """Where the figures of a part of a full run wait for the others."""
    return Path(tempfile.gettempdir()) / "emberkeep-tier" / f"{part}.json"


def measured(name: str, *, quick: bool) -> Found:
    root = Path(tempfile.mkdtemp(prefix="emberkeep-tier-", dir=os.environ.get("EMBERKEEP_TMP")))
    start = time.monotonic()
    try:
        found = PARTS[name](root, quick=quick)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"{name} took {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    if not quick:
        kept(name).parent.mkdir(parents=True, exist_ok=True)
        kept(name).write_text(json.dumps(asdict(found)))
    return found


def computed(root: Path, *, quick: bool) -> Found:
    """The half where the network is computed."""
    found = Found()
    cycles = 1 if quick else 6
    bench = Bench(root / "retail", KAGGLE_SHAPE)
    ram, plain, kept = bench.memory(), bench.contender(), bench.contender()
    ordinary = bench.contender("ordinary")
    iops = {"tier": probe(plain, 20_000), "ordinary": probe(ordinary, 5_000)}
    keeping: dict[str, tuple[Contender, Tiering | Dumping]] = {
        "kept": (kept, Tiering(kept, EVERY)),
        "ordinary": (ordinary, Dumping(ordinary, EVERY, root / "dump")),
    }
    if not quick:
        inline = bench.contender("inline")
        keeping["inline"] = (inline, Dumping(inline, EVERY, root / "dump"))
    tiers = [plain, *(one for one, _ in keeping.values())]
    warm_up([ram, *tiers])
    # The first checkpoint saves all that was ever trained; later ones find what changed since.
    for _, saving in keeping.values():
        saving.first()
    for one in (ram, *tiers):
        one.train(3)
        one.embedding_s = 0.0
    turns: dict[str, Turn] = {"ram": partial(ram.train, TURN), "plain": partial(plain.train, TURN)}
    for name, (one, saving) in keeping.items():
        turns[name] = partial(one.train, TURN, before=saving)
    counted = Counted(plain)
    # A quick cycle is half of one, with a checkpoint at its start all the same.
    turns_of_cycle = 1 if quick else EVERY // TURN
    taken = Cycles(turns, cycles=cycles, turns=turns_of_cycle)
    keeping["kept"][1].finish()
    steps = cycles * turns_of_cycle * TURN
    embedding_ms = {
        name: one.embedding_s / steps * 1e3
        for name, one in (("ram", ram), ("tier", plain), ("ordinary", ordinary))
    }
    rows = ram.rows_of(2)
    assert all(one.rows_of(2) == rows for one in tiers), "the contenders' rows differ"
    # Of a step of the ordinary cache: what no embeddings at all and no checkpoints would leave.
    least = (taken.ms("ram") - embedding_ms["ram"]) / taken.ms("ordinary")
    per_batch, waits = counted.reads_per_batch(), counted.waits()
    found.config = {
        "rows": bench.rows, "dim": bench.shape.dim, "batch": bench.shape.batch,
        "optimizer": "adagrad", "ids": "retail", "cache_share": SHARE,
        "checkpoint_every_batches": EVERY,
        "file_mb": round(os.path.getsize(plain.slab.log.path) / 1e6),
        "cache_mb": round(plain.slab.frames.count * bench.shape.row_nbytes / 1e6),
        "page_cache": "kept out by direct I/O" if plain.slab.log.direct else "in use",
        "steps": steps,
    }  # fmt: skip
    found.figures = {
        "time_vs_dram": taken.ratio("plain", "ram"),
        "embedding_time_vs_dram": embedding_ms["tier"] / embedding_ms["ram"],
        "miss_rate": counted.miss_rate(),
        "checkpoint_overhead_pct": 100 * (taken.ratio("kept", "plain") - 1),
        "time_vs_ordinary_cache": taken.ratio("kept", "ordinary"),
        "embedding_time_vs_ordinary_cache": embedding_ms["tier"] / embedding_ms["ordinary"],
        "step_ms": taken.ms("plain"),
        "dram_step_ms": taken.ms("ram"),
        "ordinary_step_ms": taken.ms("ordinary"),
        "file_reads_per_batch": per_batch,
        "disk_reads_per_second": iops["tier"],
    }
    found.rows = [
        taken.row("ram", "memory"),
        taken.row("plain", "tier, 10% cache"),
        taken.row("kept", "tier, 10% cache, with checkpoints"),
        taken.row("ordinary", "ordinary cache with checkpoints"),
    ]
    found.notes = [
        (f"Computed: {per_batch:,.0f} file reads a batch. The disk makes {iops['tier']:,.0f} reads "
        f"a second with 64 under way and {iops['ordinary']:,.0f} one by one from each thread: "
        f"they take {per_batch / iops['tier'] * 1e3:.1f} ms of a step of the tier, beside the "
        f"network, and {per_batch / iops['ordinary'] * 1e3:.1f} ms of one of the ordinary "
        f"cache, before it. Pulls and pushes of the tier waited for room {waits} times in "
        f"{steps} steps. All contenders ended with the same bits."),
        (f"Pulls, pushes and prefetches take {embedding_ms['tier']:.1f} ms of a "
        f"step of the tier, {embedding_ms['ram']:.1f} ms in memory and "
        f"{embedding_ms['ordinary']:.1f} ms with the ordinary cache. The rest of a step "
        "is the network, on the same cores as upkeep: what upkeep computes, it takes from it. "
        f"Embeddings that cost nothing at all would take {1 - least:.0%} off the step of the "
        "ordinary cache; the more of a step the network is, the less there is to gain."),
    ]  # fmt: skip
    for one in tiers:
        bench.drop(one)
    back_s, load_s = bench.recovery(ram)
    found.figures["recovery_speedup_vs_checkpoint"] = load_s / back_s
    found.notes.append(
        f"Coming back takes {back_s:.2f} s from the file and {load_s:.2f} s from a full "
        "checkpoint that was not in the page cache."
    )
    if not quick:
        found.figures["time_vs_cache_alone"] = taken.ratio("kept", "inline")
        found.rows.append(taken.row("inline", "cache alone, with checkpoints"))
    ram.close()
    return found


if __name__ == "__main__":
    main()
