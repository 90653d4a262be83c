"""SIGKILL at any moment of training and saving: the run resumes and ends with the same bits.

Each life of a run is a real process. It dies in place of a system call of its store, around an
optimizer's step, or after a while; the next life resumes what was committed. `EMBERKEEP_SEED`
repeats a sequence of deaths.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from emberkeep.blobs import LocalStore
from emberkeep.errors import FencedError
from emberkeep.repository import Repository, verify
from tests.faults.lives import Nursery

CONFIG = """
[data]
source = "synthetic"
samples = 500
rows_total = 400
[tables]
dim = 4
{tables}
[optimizer]
kind = "{optimizer}"
[model]
bottom = [8]
top = [8]
[run]
batch_size = 20
[checkpoint]
path = "{path}"
every = "3 steps"
layout = "{layout}"
keep = 2
"""
DYNAMIC = 'kind = "dynamic"\ncapacity = 60\non_full = "evict_oldest"'


def seed() -> int:
    """Of the deaths; printed with every failure."""
    chosen = int(os.environ.get("EMBERKEEP_SEED", 20260726))
    print(f"EMBERKEEP_SEED={chosen}")
    return chosen


def config(where: Path, name: str, **settings: str) -> str:
    path = where / f"{name}.toml"
    defaults = {"tables": "", "optimizer": "row_wise_adagrad", "layout": "intermittent"}
    path.write_text(CONFIG.format(path=where / name, **{**defaults, **settings}))
    return str(path)


def result_in(log: Path) -> dict[str, Any]:
    """The result that a life has printed, without what depends on time."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    assert len(lines) == 1, log.read_text()
    result = json.loads(lines[0])
    return {key: result[key] for key in ("digest", "steps", "auc", "loss") if key in result}


def random_end(random: random.Random) -> dict[str, Any]:
    kind = random.choice(["disk_call", "disk_call", "before_step", "after_step", "seconds"])
    if kind == "seconds":
        return {kind: random.uniform(0.0, 1.0)}
    return {kind: random.randint(1, 300 if kind == "disk_call" else 40)}


def survive(
    nursery: Nursery, where: Path, what: str, make: Any, expected: dict[str, Any], kills: int
) -> None:
    """Runs that die until they are done, until so many have died; each ends as expected."""
    random_ = random.Random(seed())
    killed = runs = 0
    while killed < kills:
        runs += 1
        arguments = make(f"run-{runs}")
        while True:
            end = random_end(random_) if killed < kills else {}
            log = where / "life.log"
            code = nursery.live(what, *arguments, log=log, end=end)
            if code == 0:
                break
            assert code == -signal.SIGKILL, f"{end}: {log.read_text()}"
            killed += 1
        assert result_in(log) == expected, f"run {runs} of seed {seed()}"


@pytest.mark.parametrize(
    ("settings", "kills"),
    [
        ({"layout": "intermittent"}, 3),
        ({"layout": "consecutive", "tables": DYNAMIC, "optimizer": "adam"}, 3),
    ],
)
def test_emberkeep_train_survives_sigkill(
    nursery: Nursery, tmp_path: Path, settings: dict[str, str], kills: int
) -> None:
    check_train(nursery, tmp_path, settings, kills)


def test_a_keeper_of_plain_modules_survives_sigkill(nursery: Nursery, tmp_path: Path) -> None:
    check_plain(nursery, tmp_path, 4)


@pytest.mark.parametrize(("end", "code"), [("sigterm_at_step", 75), ("sigint_at_step", 130)])
def test_a_signal_saves_and_the_run_goes_on_from_there(
    nursery: Nursery, tmp_path: Path, end: str, code: int
) -> None:
    whole, log = config(tmp_path, "whole"), tmp_path / "life.log"
    assert nursery.live("train", whole, "--json", log=log) == 0, log.read_text()
    expected = result_in(log)
    path = config(tmp_path, "signalled")
    assert nursery.live("train", path, "--json", log=log, end={end: 10}) == code, log.read_text()
    versions = Repository.open(LocalStore(tmp_path / "signalled")).versions()
    # Two optimizers step: it is the fifth step that ends, and none is due there.
    newest = Repository.open(LocalStore(tmp_path / "signalled")).manifest(versions[-1])
    assert newest.step == 5
    assert nursery.live("train", path, "--json", log=log) == 0, log.read_text()
    assert result_in(log) == expected


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["full", "one_shot", "intermittent", "consecutive"])
@pytest.mark.parametrize("tables", ["", DYNAMIC])
def test_soak_train(nursery: Nursery, tmp_path: Path, layout: str, tables: str) -> None:
    check_train(nursery, tmp_path, {"layout": layout, "tables": tables, "optimizer": "adam"}, 50)


@pytest.mark.soak
def test_soak_plain(nursery: Nursery, tmp_path: Path) -> None:
    check_plain(nursery, tmp_path, 100)


def check_train(nursery: Nursery, where: Path, settings: dict[str, str], kills: int) -> None:
    log = where / "whole.log"
    whole = config(where, "whole", **settings)
    assert nursery.live("train", whole, "--json", log=log) == 0, log.read_text()
    survive(
        nursery,
        where,
        "train",
        lambda name: (config(where, name, **settings), "--json"),
        result_in(log),
        kills,
    )
    assert verify(Repository.open(LocalStore(where / "run-1"))).ok


def check_plain(nursery: Nursery, where: Path, kills: int) -> None:
    log = where / "whole.log"
    assert nursery.live("plain", str(where / "whole"), log=log) == 0, log.read_text()
    survive(nursery, where, "plain", lambda name: (str(where / name),), result_in(log), kills)
    assert verify(Repository.open(LocalStore(where / "run-1"))).ok


def test_the_older_of_two_processes_is_fenced_and_nothing_is_lost(
    nursery: Nursery, tmp_path: Path
) -> None:
    log = tmp_path / "whole.log"
    assert nursery.live("train", config(tmp_path, "whole"), "--json", log=log) == 0
    path = config(tmp_path, "run")
    # Two optimizers step: it stops itself in the middle of the run, which may be within a save.
    end = {"sigstop_at_step": 24}
    old = nursery.start("train", path, "--json", log=tmp_path / "old.log", end=end)
    nursery.wait_until_stopped(old)
    committed = Repository.open(LocalStore(tmp_path / "run")).versions()
    assert committed
    code = nursery.live("train", path, "--json", log=tmp_path / "new.log")
    assert code == 0, (tmp_path / "new.log").read_text()
    os.kill(old, signal.SIGCONT)
    assert nursery.wait(old) == FencedError.exit_code, (tmp_path / "old.log").read_text()
    assert result_in(tmp_path / "new.log") == result_in(log)
    repository = Repository.open(LocalStore(tmp_path / "run"))
    assert set(committed) <= set(repository.versions())
    assert verify(repository).ok
    # The run is finished: a further life trains nothing and ends with the same bits.
    assert nursery.live("train", path, "--json", log=tmp_path / "last.log") == 0
    assert "this training is finished" in (tmp_path / "last.log").read_text()
    assert result_in(tmp_path / "last.log") == result_in(log)
