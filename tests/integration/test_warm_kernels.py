"""`emberkeep warm` leaves no kernel behind: what runs after it brings no types that it did not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import importlib, json, pkgutil, sys, warnings
from pathlib import Path
import emberkeep.kernels
from emberkeep.kernels import _jit
for module in pkgutil.iter_modules(emberkeep.kernels.__path__):
    importlib.import_module("emberkeep.kernels." + module.name)
from emberkeep.train.train_warmup import warm_up

warnings.simplefilter("ignore")
warm_up()

def name(kernel):
    return f"{kernel.py_func.__module__}.{kernel.py_func.__name__}"

before = {name(k): {str(s) for s in k.signatures} for k in _jit.KERNELS}
from emberkeep.cli import main
from emberkeep.tiers import durable_open

durable_open.SEGMENT_NBYTES = 2**16  # small enough to be cleaned
work = Path(sys.argv[1])
small = ["data.samples=2000", "data.rows_total=1000", "run.batch_size=200", "run.compare=false",
         "model.bottom=[8]", "model.top=[8]", "tables.dim=4"]

def run(*arguments):
    sys.argv = ["emberkeep", *map(str, arguments)]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)

def train(where, *overrides):
    every = [f"checkpoint.path={work / where}", "checkpoint.every=3 steps"] if where else []
    run("train", "--demo", *(p for s in (*small, *every, *overrides) for p in ("--set", s)))

train("grid", "checkpoint.layout=grid", "cluster.shards=2", "tables.kind=dynamic",
      "tables.capacity=3000", "tables.on_full=evict_oldest")
train("bits", "checkpoint.bits=4", "optimizer.kind=adam", "checkpoint.layout=consecutive")
train("servers", "cluster.kind=servers", "cluster.shards=2", "optimizer.kind=adagrad")
train(None, "cluster.shards=4", "parity.k=2", "parity.r=2", "failures.at=['1, 2 at 4']",
      "optimizer.kind=momentum")
train("partial", "cluster.shards=2", "checkpoint.recovery=partial", "checkpoint.priority=mfu",
      "failures.at=['1 at 6']", "optimizer.kind=sgd")
train(None, f"tier.path={work / 'tier'}", "tier.memory=4MB", "tier.every=2 steps")
for repository in ("grid", "bits"):
    run("versions", work / repository)
    run("verify", work / repository)
    run("restore", work / repository, "-o", work / f"{repository}-files")
    run("diff", work / repository, "1", "2")
    run("fork", work / repository, work / f"{repository}-fork")
late = {
    f"{name(k)}{signature}" for k in _jit.KERNELS
    for signature in map(str, k.signatures) if signature not in before[name(k)]
}
modules = {module.name for module in pkgutil.iter_modules(emberkeep.kernels.__path__)}
warm = {kernel.rpartition(".")[0].rpartition(".")[2] for kernel, types in before.items() if types}
cold = [module for module in modules - warm if not module.startswith("_")]
print(json.dumps({"kernels": len(before), "late": sorted(late), "cold": sorted(cold)}))
"""


@pytest.mark.soak
def test_no_command_compiles_after_warm(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, "EMBERKEEP_QUIET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kernels"] > 100
    assert found["late"] == []
    assert found["cold"] == []  # modules of which no kernel was compiled
