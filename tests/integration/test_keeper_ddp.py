"""A keeper under DDP: two gloo ranks with batches of their own, killed and resumed to the bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from emberkeep.blobs import LocalStore
from emberkeep.repository import Repository, verify
from tests.faults.lives import Nursery


class Pair:
    """Two ranks that live and die together."""

    def __init__(self, nursery: Nursery, where: Path) -> None:
        self._nursery = nursery
        self._where = where
        self._lives = 0

    def live(
        self, path: Path, ends: dict[int, dict[str, Any]] | None = None, every: str = "3 steps"
    ) -> list[int]:
        """Exit codes by rank. Once a rank was killed, so is the other, as a launcher would do."""
        self._lives += 1
        meeting = str(self._where / f"meeting-{self._lives}")
        pids = [
            self._nursery.start(
                *("plain", str(path), str(rank), "2", meeting, every),
                log=self._where / f"rank-{rank}.log",
                end=(ends or {}).get(rank),
            )
            for rank in (0, 1)
        ]
        first = next(iter(ends)) if ends else 0
        codes = {first: self._nursery.wait(pids[first])}
        if codes[first] == -signal.SIGKILL:
            os.kill(pids[1 - first], signal.SIGKILL)
        codes[1 - first] = self._nursery.wait(pids[1 - first])
        return [codes[0], codes[1]]

    def logs(self) -> str:
        """What both have said: one that fails takes the other with it."""
        return "\n".join(
            f"rank {rank}: {(self._where / f'rank-{rank}.log').read_text()}" for rank in (0, 1)
        )

    def result(self, rank: int) -> dict[str, Any]:
        log = (self._where / f"rank-{rank}.log").read_text()
        lines = [line for line in log.splitlines() if line.startswith("{")]
        assert len(lines) == 1, self.logs()
        result: dict[str, Any] = json.loads(lines[0])
        return result


@pytest.fixture
def pair(nursery: Nursery, tmp_path: Path) -> Pair:
    return Pair(nursery, tmp_path)


@pytest.fixture(scope="module")
def expected(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a run that nobody disturbs."""
    where = tmp_path_factory.mktemp("whole")
    pair = Pair(nursery, where)
    assert pair.live(where / "run") == [0, 0], pair.logs()
    expected = pair.result(0)
    assert pair.result(1) == expected, "all ranks hold the same model"
    assert expected["steps"] == 40
    return expected


def test_two_ranks_killed_and_resumed_end_with_the_same_bits(
    pair: Pair, tmp_path: Path, expected: dict[str, Any]
) -> None:
    # Both optimizers step in every step, so 2n optimizer steps are n steps of the run.
    for ends in (
        {0: {"after_step": 5}},
        {1: {"before_step": 17}},
        {0: {"disk_call": 40}},
        {1: {"after_step": 33}},
        {0: {"before_step": 24}},
    ):
        assert -signal.SIGKILL in pair.live(tmp_path / "run", ends), ends
    assert pair.live(tmp_path / "run") == [0, 0]
    assert pair.result(0) == expected
    assert pair.result(1) == expected
    assert verify(Repository.open(LocalStore(tmp_path / "run"))).ok


def test_sigterm_to_one_rank_stops_all_with_a_version_of_the_same_step(
    pair: Pair, tmp_path: Path, expected: dict[str, Any]
) -> None:
    assert pair.live(tmp_path / "run", {1: {"sigterm_at_step": 13}}) == [75, 75]
    repository = Repository.open(LocalStore(tmp_path / "run"))
    newest = repository.latest()
    assert newest is not None
    assert repository.manifest(newest).step == 7
    assert pair.live(tmp_path / "run") == [0, 0]
    assert pair.result(0) == pair.result(1) == expected


def test_ranks_that_save_by_time_agree_when(
    pair: Pair, tmp_path: Path, expected: dict[str, Any]
) -> None:
    """The clocks of the ranks differ, and only one of them decides."""
    assert pair.live(tmp_path / "run", {1: {"after_step": 51}}, every="0.05s") != [0, 0]
    assert pair.live(tmp_path / "run", every="0.05s") == [0, 0]
    assert pair.result(0) == pair.result(1) == expected


def test_a_version_of_two_ranks_resumes_alone(pair: Pair, nursery: Nursery, tmp_path: Path) -> None:
    """The same samples in another order of summation: not the same bits, but the same run."""
    pair.live(tmp_path / "run", {0: {"after_step": 40}})
    log = tmp_path / "alone.log"
    assert nursery.live("plain", str(tmp_path / "run"), log=log) == 0, log.read_text()
    text = log.read_text()
    assert "was saved by 2 ranks, there are 1" in text
    assert json.loads(text.splitlines()[-1])["steps"] == 40
