"""`emberkeep train` over a tier: the same bits, kept in the tier itself, shards that come back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from emberkeep.errors import ConfigError, NoVersionError, StateError
from emberkeep.nn import EmbeddingBags
from emberkeep.tiers import durable_open
from emberkeep.train.hooks import Hook, Step
from emberkeep.train.loop import run
from emberkeep.train.run_config import RunConfig
from tests.integration.test_train import small

STEPS = 11  # of 250 samples, from 2700


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 32 * 1024)


def tiered(path: Path, *overrides: str, every: str = "3 steps") -> RunConfig:
    given = [f'tier.path="{path}"', 'tier.memory="80KB"', f'tier.every="{every}"']
    return small(*given, *overrides)


class Stop(Hook):
    """Ends a run after a step; hears the events, and waits until what was due is durable."""

    def __init__(self, after: int | None = None, *, every: int = 3) -> None:
        self._after, self._every = after, every
        self._saved = threading.Condition()
        self.events: list[tuple[str, dict[str, Any]]] = []

    def on_step(self, step: Step) -> None:
        if step.number % self._every == 0:
            with self._saved:  # a version and a batch of an earlier step may come late
                assert self._saved.wait_for(lambda: step.number in self._saved_steps(), 60)
        if step.number == self._after:
            raise KeyboardInterrupt

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        with self._saved:
            self.events.append((event, details))
            self._saved.notify_all()

    def _saved_steps(self) -> list[int]:
        return [details["step"] for details in self.heard("saved")]

    def heard(self, event: str) -> list[dict[str, Any]]:
        return [details for name, details in self.events if name == event]


def test_a_tier_gives_the_same_bits_and_reads_ahead_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    prefetch = EmbeddingBags.prefetch

    def counted(self: EmbeddingBags, features: Any) -> None:
        asked.append(self.cluster.tiered)
        prefetch(self, features)

    monkeypatch.setattr(EmbeddingBags, "prefetch", counted)
    plain = run(small())
    assert not asked
    behind = run(tiered(tmp_path / "t"))
    assert asked
    assert all(asked)
    assert behind.digest == plain.digest
    assert behind.auc == plain.auc
    only_memory = run(small(f'tier.path="{tmp_path / "u"}"', 'tier.memory="80KB"'))
    assert only_memory.digest == plain.digest


def test_a_run_goes_on_from_the_durable_step_with_the_same_bits(tmp_path: Path) -> None:
    whole = run(tiered(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        run(tiered(tmp_path / "t"), hooks=[Stop(after=8)])
    again = Stop()
    result = run(tiered(tmp_path / "t"), hooks=[again])
    assert result.digest == whole.digest
    assert result.resumed_step == 6
    assert again.heard("resumed") == [{"version": None, "step": 6, "lost": []}]
    finished = Stop()
    assert run(tiered(tmp_path / "t"), hooks=[finished]).digest == whole.digest
    assert [name for name, _ in finished.events] == ["resumed", "finished"]


def test_a_tier_that_is_memory_alone_is_kept_in_a_repository(tmp_path: Path) -> None:
    given = [f'tier.path="{tmp_path / "t"}"', 'tier.memory="80KB"']
    kept = [*given, f'checkpoint.path="{tmp_path / "r"}"', 'checkpoint.every="4 steps"']
    plain = run(small())
    with pytest.raises(KeyboardInterrupt):
        run(small(*kept), hooks=[Stop(after=8, every=4)])
    assert run(small(*kept)).digest == plain.digest


def test_a_tier_that_is_memory_alone_does_not_begin_with_what_it_was_left(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tiered(tmp_path / "t"), hooks=[Stop(after=4)])
    alone = [f'tier.path="{tmp_path / "t"}"', 'tier.memory="80KB"']
    kept = [*alone, f'checkpoint.path="{tmp_path / "r"}"', 'checkpoint.every="4 steps"']
    for given in (alone, kept):
        with pytest.raises(StateError, match=r"/t has the rows of step 3, .*tier\.every.*--fresh"):
            run(small(*given))
    assert run(small(*kept), fresh=True).digest == run(small()).digest
    again = run(tiered(tmp_path / "t"))  # the batch was left as it is
    assert again.resumed_step == 3


@pytest.mark.soak  # the next one has the same on servers, with batches
def test_servers_with_a_tier_give_the_same_bits(tmp_path: Path) -> None:
    on_servers = [
        f'tier.path="{tmp_path / "t"}"', 'tier.memory="80KB"', "cluster.kind=servers",
        "cluster.shards=2", f'checkpoint.path="{tmp_path / "r"}"', 'checkpoint.every="4 steps"',
    ]  # fmt: skip
    assert run(small(*on_servers)).digest == run(small("cluster.shards=2")).digest
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == ["shard-0", "shard-1"]


@pytest.mark.parametrize("kind", ["local", pytest.param("servers", marks=pytest.mark.soak)])
def test_batches_in_tiers_and_versions_in_a_repository(tmp_path: Path, kind: str) -> None:
    two_levels = [
        f"cluster.kind={kind}", "cluster.shards=2", f'checkpoint.path="{tmp_path / "r"}"',
        'checkpoint.every="6 steps"',
    ]  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        run(tiered(tmp_path / "t", *two_levels), hooks=[Stop(after=10)])
    again = Stop()
    result = run(tiered(tmp_path / "t", *two_levels), hooks=[again])
    assert result.resumed_step == 9
    assert again.heard("resumed") == [{"version": None, "step": 9, "lost": []}]
    assert result.digest == run(small("cluster.shards=2")).digest


@pytest.mark.parametrize(("when", "step"), [("pull", 8), ("push", 9)])
def test_a_lost_shard_comes_back_alone_and_its_losses_are_counted(
    tmp_path: Path, when: str, step: int
) -> None:
    failing = [f'failures.at=["1 at {step} {when}"]', "cluster.shards=4"]
    hook = Stop()
    result = run(tiered(tmp_path / "t", *failing), hooks=[hook])
    (made,) = hook.heard("recovered")
    assert made["shards"] == (1,)
    assert made["step"] == step - 1
    assert made["pls"] == pytest.approx((step - 1 - 6) / (STEPS * 4))
    assert result.recoveries is not None
    assert result.recoveries.pls == made["pls"]
    assert (result.recoveries.failures, result.recoveries.partial) == (1, 1)
    # What was lost is part of what is durable: a process that goes on knows of it.
    again = run(tiered(tmp_path / "t", *failing))
    assert again.digest == result.digest
    assert again.recoveries is not None
    assert again.recoveries.pls == made["pls"]


def test_what_a_shard_lost_before_is_not_counted_twice(tmp_path: Path) -> None:
    failing = ['failures.at=["0 at 7", "0 at 9"]', "cluster.shards=2"]
    hook = Stop(every=5)
    run(tiered(tmp_path / "t", *failing, every="5 steps"), hooks=[hook])
    first, second = hook.heard("recovered")
    assert first["pls"] == pytest.approx(1 / (STEPS * 2))
    assert second["pls"] - first["pls"] == pytest.approx(2 / (STEPS * 2))


def test_all_shards_lost_go_back_to_the_durable_step(tmp_path: Path) -> None:
    failing = ['failures.at=["0, 1 at 8"]', "cluster.shards=2"]
    hook = Stop()
    result = run(tiered(tmp_path / "t", *failing), hooks=[hook])
    (made,) = hook.heard("recovered")
    assert (made["scope"], made["step"], made["repeated_steps"]) == ("full", 6, 1)
    assert result.digest == run(small("cluster.shards=2")).digest


def test_a_shard_lost_before_anything_is_durable_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(NoVersionError, match="nothing to go back to"):
        run(tiered(tmp_path / "u", 'failures.at=["0 at 2"]', "cluster.shards=2"))


def test_a_run_of_other_settings_and_a_fresh_start_are_refused(tmp_path: Path) -> None:
    run(tiered(tmp_path / "t"))
    with pytest.raises(StateError, match=r"optimizer\.lr was"):
        run(tiered(tmp_path / "t", "optimizer.lr=0.5"))
    with pytest.raises(ConfigError, match=r"once .* is removed"):
        run(tiered(tmp_path / "t"), fresh=True)
