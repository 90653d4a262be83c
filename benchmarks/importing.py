"""Rows of other systems into a repository and out again: speed, memory, and a kill half-way.

A million rows of 16 numbers with their Adagrad state are written by each format's own writer, and
imported by a process of its own, whose memory beyond what its libraries take is watched. The
version is read back and held against the rows, bit for bit. Then the same import is killed when
half of the file is read, and started again. The peer does the same work for one file that fits
memory: it loads the state dict with torch and saves it again.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, DIM = 1_000_000, 16
# dynamicemb needs a GPU: its files are written as its dump does, arrays one after the other.
FORMATS = ("safetensors", "torch", "parquet", "arrow", "dcp", "dynamicemb", "repository")
QUICK_FORMATS = ("torch",)
SEED = 7
NOTE = (
    "The rows take {:.0f} MB. An import reads them, sorts them on disk, and writes and syncs a "
    "version of them; `extra MB` is memory of the process itself, without pages of files."
)


def rows() -> dict[str, Any]:
    import numpy as np

    random = np.random.default_rng(SEED)
    return {
        "id": (random.permutation(ROWS).astype(np.int64) * 1_000_003) - 2**40,
        "weight": random.standard_normal((ROWS, DIM), np.float32),
        "sum": random.random((ROWS, DIM), np.float32),
    }


def write(kind: str, at: Path) -> Path:
    """The rows as a file of that format."""
    import torch

    made = rows()
    tensors = {f"items/{name}": torch.from_numpy(values) for name, values in made.items()}
    target = at / f"items.{kind}"
    if kind == "safetensors":
        import safetensors.torch

        safetensors.torch.save_file(tensors, target)
    elif kind == "torch":
        torch.save(tensors, target)
    elif kind in ("parquet", "arrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        def lists(values: Any) -> Any:
            return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), DIM)

        columns = {"id": made["id"], "weight": lists(made["weight"]), "sum": lists(made["sum"])}
        table = pa.table(columns)
        if kind == "parquet":
            pq.write_table(table, target, row_group_size=100_000)
        else:
            with pa.ipc.new_file(str(target), table.schema) as writer:
                writer.write_table(table, max_chunksize=50_000)
    elif kind == "dcp":
        import torch.distributed.checkpoint as dcp

        dcp.save(tensors, checkpoint_id=target, no_dist=True)
    elif kind == "dynamicemb":
        target.mkdir()
        for rank in range(2):
            own = made["id"] % 2 == rank
            for item, name in (("keys", "id"), ("values", "weight"), ("opt_values", "sum")):
                made[name][own].tofile(target / f"items_emb_{item}.rank_{rank}.world_size_2")
    elif kind == "repository":
        run(Path(write("safetensors", at)), target, at / "scratch")
    return target


# -- in a process of its own ---------------------------------------------------------------------


class Peak:
    """The most memory of its own that this process takes, beyond what it had at first."""

    def __init__(self) -> None:
        self._most = self._least = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _now(self) -> int:
        try:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon:"):  # pages of mapped files are the page cache's
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self._most = max(self._most, self._now())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def extra_mb(self) -> float:
        return (self._most - self._least) / 1e6


def run(
    file: Path, target: Path, scratch: Path, advance: Callable[[int], object] = lambda nbytes: None
) -> Any:
    from emberkeep.blobs import LocalStore
    from emberkeep.inspect.importer import look
    from emberkeep.inspect.intake import Choice
    from emberkeep.runtime import pool

    found = look(LocalStore(target), [str(file)], Choice(), pool.shared(), init=True)
    return found.run(scratch, advance=advance, journal_nbytes=16 * 2**20)


def child(about: dict[str, Any]) -> dict[str, Any]:
    file, target, scratch = (Path(about[name]) for name in ("file", "target", "scratch"))
    if about["do"] == "write":
        write(about["kind"], file.parent)
        return {}
    if about["do"] == "peer":
        import torch

        start, used = time.perf_counter(), time.process_time()
        with Peak() as peak:
            torch.save(torch.load(file, weights_only=True), target)
        return _taken(start, used, peak)
    _warm(target.parent / "warm")
    if about["do"] == "export":
        from emberkeep.blobs import LocalStore
        from emberkeep.inspect.export_tensors import to_safetensors
        from emberkeep.repository import Repository
        from emberkeep.runtime import pool

        repository = Repository.open(LocalStore(file))
        newest = repository.newest_whole()
        assert newest is not None
        start, used = time.perf_counter(), time.process_time()
        with Peak() as peak:
            to_safetensors(repository, newest, target, pool.shared(), force=True)
        return _taken(start, used, peak)
    left = about.get("kill_after")

    def advance(nbytes: int) -> None:
        nonlocal left
        if left is not None:
            left -= nbytes
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    start, used = time.perf_counter(), time.process_time()
    with Peak() as peak:
        imported = run(file, target, scratch, advance)
    return {**_taken(start, used, peak), "resumed": imported.resumed, "same": _same(target)}


def _taken(start: float, used: float, peak: Peak) -> dict[str, Any]:
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - used,
        "extra_mb": peak.extra_mb,
    }


def _warm(at: Path) -> None:
    """Libraries are loaded and kernels compiled before anything is measured."""
    import numpy as np
    import pyarrow.parquet  # noqa: F401
    import safetensors.numpy
    import torch  # noqa: F401

    shutil.rmtree(at, ignore_errors=True)
    at.mkdir()
    small = {"t/id": np.arange(64), "t/weight": np.ones((64, 4), np.float32)}
    safetensors.numpy.save_file(small, at / "t.safetensors")
    run(at / "t.safetensors", at / "run", at / "scratch")


def _same(target: Path) -> bool:
    """Whether the newest version holds the rows, bit for bit."""
    import numpy as np

    from emberkeep.blobs import LocalStore
    from emberkeep.checkpoint.contents import merged_rows
    from emberkeep.repository import Repository
    from emberkeep.runtime import pool

    expected = rows()
    order = np.argsort(expected["id"])
    ids, met = expected["id"][order], 0
    repository = Repository.open(LocalStore(target))
    newest = repository.newest_whole()
    assert newest is not None
    for _, chunk in merged_rows(repository, repository.chain(newest), pool.shared()):
        assert chunk.planes is not None
        at = np.searchsorted(ids, chunk.ids)
        same = np.array_equal(ids[at], chunk.ids) and all(
            np.array_equal(chunk.planes[plane], expected[name][order][at])
            for plane, name in (("weight", "weight"), ("accumulator", "sum"))
        )
        if not same:
            return False
        met += chunk.ids.size
    return met == ROWS and len(repository.versions()) == 1


# -- here ------------------------------------------------------------------------------------------


def ask(**about: Any) -> dict[str, Any] | None:
    """What a process of its own has measured; None if it was killed."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "child", json.dumps(about, default=str)],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if ended.returncode == -signal.SIGKILL:
        return None
    if ended.returncode:
        raise SystemExit(f"importing.py: a process ended with {ended.returncode}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    from _common import options, report

    given = options(__file__, __doc__ or "")
    kinds = QUICK_FORMATS if given.quick else FORMATS
    table, rates, extras, wrong = [], [], [], 0
    row_nbytes = 8 + 8 * DIM
    with tempfile.TemporaryDirectory(prefix="emberkeep-importing-") as directory:
        at = Path(directory)
        common = {"target": at / "run", "scratch": at / "scratch"}
        for kind in kinds:
            file = at / f"items.{kind}"
            ask(do="write", kind=kind, file=file, **common)
            shutil.rmtree(at / "run", ignore_errors=True)
            whole = ask(do="import", file=file, **common)
            assert whole is not None
            shutil.rmtree(at / "run")
            killed = ask(do="import", file=file, kill_after=ROWS * row_nbytes // 2, **common)
            again = ask(do="import", file=file, **common)
            assert again is not None
            went_on = killed is None and again["resumed"] and again["same"]
            wrong += not (whole["same"] and went_on)
            rates.append(ROWS / whole["seconds"])
            extras.append(max(whole["extra_mb"], again["extra_mb"]))
            table.append([
                f"import {kind}", f"{rates[-1]:,.0f}", f"{ROWS / whole['cpu_seconds']:,.0f}",
                f"{whole['extra_mb']:.0f}", "yes" if went_on else "NO",
            ])  # fmt: skip
        exported = ask(do="export", file=at / "run", **{**common, "target": at / "out"})
        peer_file = at / "items.torch"
        peer = ask(do="peer", file=peer_file, **{**common, "target": at / "out.pt"})
        assert exported is not None
        assert peer is not None
        for name, found in (("export safetensors", exported), ("torch.load + torch.save", peer)):
            table.append([
                name, f"{ROWS / found['seconds']:,.0f}", f"{ROWS / found['cpu_seconds']:,.0f}",
                f"{found['extra_mb']:.0f}", "",
            ])  # fmt: skip
    report(
        given,
        config={"rows": ROWS, "dim": DIM, "planes": "weight, accumulator"},
        figures={
            "import_rows_per_second": statistics.median(rates),
            "import_peak_extra_mb": max(extras),
            "export_rows_per_second": ROWS / exported["seconds"],
            "peer_rows_per_second": ROWS / peer["seconds"],
            "peer_peak_extra_mb": peer["extra_mb"],
            "wrong_imports": wrong,
        },
        columns=("", "rows/s", "rows/s of processor time", "extra MB", "killed and continued"),
        rows=table,
        notes=[NOTE.format(ROWS * row_nbytes / 1e6)],
        packages=("pyarrow", "safetensors"),
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(child(json.loads(sys.argv[2]))))
    else:
        main()
