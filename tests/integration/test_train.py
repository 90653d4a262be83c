"""Whole training runs: what they learn, what they promise, how they end."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from emberkeep.cluster.base import Cluster
from emberkeep.errors import ConfigError, DataError, GradientError, TableFullError
from emberkeep.rows import row_digest
from emberkeep.rows.slab import Slab
from emberkeep.train import build
from emberkeep.train.hooks import Hook, Step, TensorBoard
from emberkeep.train.loop import digest, evaluate, run
from emberkeep.train.result import Result
from emberkeep.train.run_config import RunConfig, demo
from tests.faults.lives import Nursery

SMALL = [
    "data.samples=3000",
    "data.rows_total=2000",
    "run.batch_size=250",
    "run.compare=false",
    "model.bottom=[32]",
    "model.top=[32]",
    "tables.dim=4",
]


def small(*overrides: str) -> RunConfig:
    return demo([*SMALL, *overrides])


def arguments(*overrides: str) -> list[str]:
    """Of `emberkeep train`."""
    sets = [part for override in (*SMALL, *overrides) for part in ("--set", override)]
    return ["--demo", "--json", *sets]


def command() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "emberkeep.cli", "train", *arguments()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_embeddings_learn_what_the_network_alone_cannot() -> None:
    result = run(demo([*SMALL, "data.samples=20000", "run.compare=true", "optimizer.lr=0.1"]))
    assert result.baseline_auc is not None
    assert result.best_auc is not None
    assert result.baseline_auc + 0.05 < result.auc < result.best_auc
    assert result.samples + result.test_samples == 20000
    assert 0 < result.rows_trained <= result.rows


def test_the_same_settings_give_the_same_bits_in_every_process_and_for_every_thread_count(
    nursery: Nursery, tmp_path: Path
) -> None:
    process = command()
    results = []
    for threads in ("1", "4"):
        log = tmp_path / threads
        code = nursery.live("train", *arguments(), log=log, EMBERKEEP_THREADS=threads)
        assert code == 0, log.read_text()
        results.append(json.loads(log.read_text().splitlines()[-1]))
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.count("\n") == 1, "stdout holds one line of JSON and nothing else"
    results.append(json.loads(out))
    assert len({result["digest"] for result in results}) == 1
    assert len({(result["auc"], result["loss"]) for result in results}) == 1
    assert run(small("run.seed=1")).digest != results[0]["digest"]


@pytest.mark.parametrize("model", ["dlrm", "deepfm", "pnn"])
def test_every_model_trains(model: str) -> None:
    result = run(small(f"model.kind={model}"))
    assert result.steps == 11
    assert 0.4 < result.auc < 1.0
    assert json.loads(json.dumps(result.to_dict()))["settings"]["model"]["kind"] == model


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adagrad", "row_wise_adagrad", "adam"])
def test_every_optimizer_trains_both_kinds_of_tables_to_the_same_result(optimizer: str) -> None:
    """Initial values follow from the id, so a dynamic table that has room is a fixed one."""
    fixed = run(small(f"optimizer.kind={optimizer}"))
    dynamic = run(
        small(f"optimizer.kind={optimizer}", "tables.kind=dynamic", "tables.capacity=2000")
    )
    assert fixed.rows_trained == dynamic.rows_trained
    assert fixed.log_loss == dynamic.log_loss


def test_a_full_table_ends_the_run_or_evicts() -> None:
    tables = ["tables.kind=dynamic", "tables.capacity=600"]
    with pytest.raises(TableFullError, match="C3"):
        run(small(*tables, "tables.capacity=20"))
    assert run(small(*tables, "tables.on_full=evict_oldest")).rows == 26 * 600


def test_evaluation_changes_nothing() -> None:
    settings = small("tables.kind=dynamic", "tables.capacity=2000")
    inputs = build.inputs(settings)
    bags = build.embeddings(settings, inputs.rows)
    network = build.model(settings, bags, features=26, dense=inputs.dense)
    trained = {table.name: bags.cluster.digest(table.name) for table in bags.tables}
    before = digest(trained, network)
    first = evaluate(network, inputs.test, 500)
    assert evaluate(network, inputs.test, 64) == pytest.approx(first, rel=1e-5)
    trained = {table.name: bags.cluster.digest(table.name) for table in bags.tables}
    assert digest(trained, network) == before
    assert network.training


class Recorder(Hook):
    def __init__(self, fail_at: int = 0) -> None:
        self.steps: list[Step] = []
        self.ended: list[Result] = []
        self.closed = 0
        self.fail_at = fail_at

    def on_step(self, step: Step) -> None:
        self.steps.append(step)
        if step.number == self.fail_at:
            raise RuntimeError("the hook failed")

    def on_end(self, result: Result) -> None:
        self.ended.append(result)

    def close(self) -> None:
        self.closed += 1


def test_hooks_see_every_step() -> None:
    recorder = Recorder()
    result = run(small("run.compare=true"), hooks=[recorder])
    phases = [step.phase for step in recorder.steps]
    assert phases == ["embeddings"] * 11 + ["baseline"] * 11
    assert [step.samples for step in recorder.steps[:11]] == [*range(250, 2501, 250), 2700]
    assert all(step.steps == 11 for step in recorder.steps)
    assert recorder.ended == [result]
    assert recorder.closed == 1


def test_a_failing_hook_ends_the_run_and_all_are_closed() -> None:
    first, second = Recorder(fail_at=3), Recorder()
    with pytest.raises(RuntimeError, match="the hook failed"):
        run(small(), hooks=[first, second])
    assert (len(first.steps), len(second.steps)) == (3, 2)
    assert (first.closed, second.closed) == (1, 1)


def test_a_diverging_run_says_so() -> None:
    with pytest.raises(GradientError, match=r"at step \d+: training diverged|not finite|NaN"):
        run(small("dense_optimizer.kind=sgd", "dense_optimizer.lr=1e30"))


def test_tensorboard_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(small(), hooks=[TensorBoard(tmp_path / "events")])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [e.step for e in events.Scalars("loss/embeddings")][-1] == 2700
    assert len(events.Scalars("test/auc")) == 1


def test_a_missing_tensorboard_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'emberkeep\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_an_interrupt_is_one_line_and_exit_code_130(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert nursery.live("train", *arguments(), log=log, end={"sigint_at_step": 3}) == 130
    lines = log.read_text().splitlines()
    assert lines[-1] == "emberkeep: interrupted"
    assert "Traceback" not in log.read_text()
    assert not any(line.startswith("{") for line in lines), "a result of half a run"


def criteo_lines(count: int) -> str:
    random = np.random.default_rng(5)
    lines = []
    for _ in range(count):
        dense = [str(n) if n else "" for n in random.integers(0, 50, 13)]
        categories = [f"{n:08x}" if n else "" for n in random.integers(0, 30, 26)]
        lines.append("\t".join([str(random.integers(0, 2)), *dense, *categories]))
    return "\n".join(lines) + "\n"


def criteo(path: Path, *overrides: str) -> RunConfig:
    return small(
        "data.source=criteo", f'data.paths=["{path}"]', "data.samples=2000", "run.batch_size=64",
        *overrides,
    )  # fmt: skip


def test_criteo_files_plain_and_gzip_give_the_same_bits(tmp_path: Path) -> None:
    plain, packed = tmp_path / "day.tsv", tmp_path / "day.gz"
    plain.write_text(criteo_lines(500))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    results = [run(criteo(path, "tables.rows=50")) for path in (plain, packed)]
    assert (results[0].samples, results[0].test_samples) == (450, 50)
    assert results[0].digest == results[1].digest
    dynamic = run(criteo(plain, "tables.kind=dynamic", "tables.capacity=100"))
    assert dynamic.rows_trained <= 26 * 30


def test_malformed_lines_are_named_or_skipped(tmp_path: Path) -> None:
    path = tmp_path / "day.tsv"
    lines = criteo_lines(100).splitlines()
    lines[70] = "not a sample"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"day\.tsv.*71"):
        run(criteo(path, "tables.rows=50"))
    assert run(criteo(path, "tables.rows=50", "data.on_malformed=skip")).samples == 89


def test_files_without_samples(tmp_path: Path) -> None:
    empty = tmp_path / "empty.tsv"
    empty.touch()
    with pytest.raises(ConfigError, match=r"no samples: .*empty\.tsv"):
        run(criteo(empty, "tables.rows=50"))
    with pytest.raises(DataError, match="no such file"):
        run(criteo(tmp_path / "none.tsv", "tables.rows=50"))


def test_parquet_with_multi_hot_strings(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    path = tmp_path / "clicks.parquet"
    pq.write_table(
        pa.table(
            {
                "clicked": random.integers(0, 2, 400),
                "age": random.random(400),
                "user": random.integers(0, 40, 400),
                "tags": [[f"t{n}" for n in random.integers(0, 9, i % 4)] for i in range(400)],
            }
        ),
        path,
    )
    result = run(
        small(
            "data.source=parquet", f'data.paths=["{path}"]', "data.samples=400",
            "data.label=clicked", 'data.dense=["age"]', 'data.categories=["user", "tags"]',
            "tables.rows=64", "run.batch_size=64",
        )
    )  # fmt: skip
    assert (result.samples, result.rows) == (360, 128)


@pytest.mark.parametrize("shards", [1, 3])
def test_the_digest_of_a_run_gathers_no_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shards: int
) -> None:
    """Also where rows live in files; each process looks at one chunk of its own rows at a time."""
    expected = run(small()).digest
    most = 0

    def read(slab: Slab, table: int, ids: Any, unchanged: Any = Slab.read) -> Any:
        nonlocal most
        most = max(most, ids.size)
        return unchanged(slab, table, ids)

    def gathers(*_: object) -> None:
        raise AssertionError("one process gathers the rows of all shards")

    monkeypatch.setattr(row_digest, "_WORDS", 2)
    monkeypatch.setattr(Slab, "read", read)
    for name in ("read_all", "touched_ids"):
        monkeypatch.setattr(Cluster, name, gathers)
    tier = (f"tier.path={tmp_path}", "tier.memory=1MB") if shards == 1 else ()
    assert run(small(f"cluster.shards={shards}", *tier)).digest == expected
    assert 0 < most <= 2 * 64
