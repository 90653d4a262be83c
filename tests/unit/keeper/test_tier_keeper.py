"""A run that its tier keeps, through both names: what is stored beside the rows is whole and of
that very step or refused, and signals, lost shards and refusals are those of any keeper."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import emberkeep as ek
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.data import Reader, Synthetic
from emberkeep.errors import (
    CancelledError,
    ConfigError,
    DamageError,
    DeadlineError,
    NoVersionError,
    ShardLostError,
    StateError,
)
from emberkeep.keeper import tier_state
from emberkeep.keeper.plain_state import pack
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.tiers import durable_open
from tests.contracts.engine import state as rows


def by_keeper(model: nn.Module, optimizers: Any, **options: Any) -> ek.Keeper:
    return ek.Keeper(
        None, model, optimizers, strategy=ek.incremental(every="1000 steps"), **options
    )


def by_tier_keeper(model: nn.Module, optimizers: Any, **options: Any) -> ek.Keeper:
    return ek.TierKeeper(model, optimizers, every="1000 steps", **options)


@pytest.fixture(autouse=True, params=[by_keeper, by_tier_keeper], ids=["Keeper", "TierKeeper"])
def small_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    monkeypatch.setattr(Run, "kept", staticmethod(request.param))


class Model(nn.Module):
    def __init__(self, path: Path, *, shards: int = 1) -> None:
        super().__init__()
        tables = [ek.Table("a", rows=60, dim=4, tier=ek.Tier(path, memory="1MB"))]
        self.bags = ek.EmbeddingBags(
            tables, optimizer=ek.Adagrad(lr=0.1), cluster=ek.local(shards=shards)
        )
        self.top = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.bags({"a": ids}))
        return out


class Run:
    """A model over a tier, trained step by step on ids that follow from the step."""

    kept: Callable[..., ek.Keeper] = staticmethod(by_tier_keeper)

    def __init__(self, path: Path, *, shards: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Model(path, shards=shards)
        self.optimizers = [
            self.model.bags.optimizer,
            torch.optim.Adam(self.model.top.parameters(), lr=0.01),
        ]
        try:
            self.keeper = self.kept(self.model, self.optimizers, **options)
        except BaseException:
            self.end()
            raise

    def train(self, steps: int) -> None:
        for _ in range(steps):
            ids = (torch.arange(8) * 7 + self.keeper.steps * 5) % 60
            self.model(ids.reshape(4, 2)).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.keeper.step()

    def save(self) -> None:
        self.keeper.save()
        self.keeper.wait()

    def bits(self) -> list[Any]:
        dense = [parameter.detach().clone() for parameter in self.model.top.parameters()]
        return [rows(self.model.bags.cluster), [tensor.tolist() for tensor in dense]]

    def end(self) -> None:
        self.model.bags.cluster.close()


def saved(path: Path, *steps: int) -> Path:
    """A tier that was saved at these steps and closed; the file of the last one."""
    run = Run(path)
    for step in steps:
        run.train(step - run.keeper.steps)
        run.save()
        (file,) = (path / "state").glob(f"step-{step}-*.safetensors")
        shutil.copy(file, path.parent / f"step-{step}.safetensors")
    run.end()
    return file


def resumed(path: Path) -> int | None:
    run = Run(path)
    try:
        kept = run.keeper.resume()
        return None if kept is None else kept.step
    finally:
        run.end()


def test_a_flipped_bit_of_the_state_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "t", 3)
    content = file.read_bytes()
    weights = content.rindex(b"}") + 1  # tensors follow the header
    places = [3, 9, 12, 20, 30, 50, 100, len(content) // 2, weights + 16, len(content) - 1]
    for place in places:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(DamageError, match=r"step-3-\w+\.safetensors"):
            resumed(tmp_path / "t")
    for short in (0, 7, weights - 1, len(content) - 1):
        file.write_bytes(content[:short])
        with pytest.raises(DamageError, match=r"step-3-\w+\.safetensors"):
            resumed(tmp_path / "t")
    file.write_bytes(content)
    assert resumed(tmp_path / "t") == 3


def test_the_state_of_another_step_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "t", 2, 3)
    shutil.copy(tmp_path / "step-2.safetensors", file)
    with pytest.raises(DamageError, match="bring that file back; else go back to a version"):
        resumed(tmp_path / "t")
    shutil.copy(tmp_path / "step-3.safetensors", file)
    assert resumed(tmp_path / "t") == 3


def test_a_state_without_a_digest_from_before_opens(tmp_path: Path) -> None:
    file = saved(tmp_path / "t", 3)
    dense, beside = tier_state.decode(file.name, file.read_bytes())
    content = pack({**beside, "dense": dense.encode()}, what="tier").encode()
    file.write_bytes(content)
    run = Run(tmp_path / "t")
    assert run.keeper.resume() == 3
    run.train(1)
    run.save()
    run.end()
    # It has one from then on.
    (file,) = (f for f in file.parent.iterdir() if f.is_file())
    assert file.name.startswith("step-4-")
    assert tier_state.HEAD in file.read_bytes()


def test_the_state_is_a_file_for_other_tools_too(tmp_path: Path) -> None:
    file = saved(tmp_path / "t", 3)
    tensors = safetensors.torch.load_file(file)
    assert any(tensor.shape == (1, 4) for tensor in tensors.values())


def test_dense_state_may_be_of_any_size() -> None:
    """Its tensors are tensors of the file, whose header may have 100 MB and no more."""
    dense = pack({"w": torch.arange(30_000_000, dtype=torch.float32)}, what="dense")
    kept = {"reader": {"at": 5}, "losses": {}}
    beside = pack(kept, what=tier_state.BESIDE)
    content = b"".join(tier_state.encode("step-1.safetensors", dense, beside))
    back, plain = tier_state.decode("step-1.safetensors", content)
    assert torch.equal(back.tensors["dense/w"], dense.tensors["dense/w"])
    assert back.plain == dense.plain
    assert plain == kept


# -- as any keeper -------------------------------------------------------------------------------


def test_sigterm_saves_the_step_and_exits_as_a_repository_run_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, events = signal.getsignal(signal.SIGTERM), []
    run = Run(tmp_path / "t", on_event=lambda name, details: events.append((name, details)))
    run.train(2)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run.train(1)
    assert ended.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is before
    assert events[-1] == ("stopped", {"step": 3, "saved_step": 3})
    assert "SIGTERM: stopped after step 3; version of step 3 was saved" in capfd.readouterr().err
    run.end()
    assert resumed(tmp_path / "t") == 3


def test_ctrl_c_saves_the_step_too(tmp_path: Path, ctrl_c: Callable[[], None]) -> None:
    run = Run(tmp_path / "t")
    run.train(1)
    ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        run.train(1)
    run.end()
    assert resumed(tmp_path / "t") == 2


def test_shards_that_are_all_lost_go_back_to_the_durable_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "t", shards=2)
    run.train(2)
    run.save()
    run.train(1)
    run.model.bags.cluster.kill(0, 1)  # type: ignore[attr-defined]
    with run.keeper.surviving():
        run.train(1)
    assert run.keeper.steps == 2
    run.train(3)
    whole = Run(tmp_path / "whole", shards=2)
    whole.train(5)
    assert run.bits() == whole.bits()
    made = run.keeper.recoveries()
    assert made is not None
    assert (made.full, made.repeated_steps, made.pls) == (1, 1, 0.0)
    whole.end()
    run.end()


def test_without_surviving_lost_shards_end_the_loop(tmp_path: Path) -> None:
    run = Run(tmp_path / "t", shards=2)
    run.train(1)
    run.model.bags.cluster.kill(0)  # type: ignore[attr-defined]
    with pytest.raises(ShardLostError):
        run.train(1)
    with pytest.raises(NoVersionError, match="nothing to go back to"):  # nothing is durable yet
        run.keeper.recover()
    run.end()


def test_a_checkpoint_that_is_given_up_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, late = Run(tmp_path / "t", on_event=lambda name, _: events.append(name)), Future[None]()
    events: list[str] = []
    honest = LocalCluster.prepare_tiers
    monkeypatch.setattr(
        LocalCluster, "prepare_tiers", lambda self, batch, beside=(): [late, *honest(self, batch)]
    )
    run.train(1)
    saver = run.keeper._saver
    assert saver is not None
    cut = run.keeper.save()
    assert cut is not None
    assert saver.busy
    saver.cancel()
    late.set_result(None)
    with pytest.raises(CancelledError):
        cut.committed.result(60)
    run.train(1)
    run.save()
    assert events == ["save_cancelled", "saved"]
    run.end()
    assert resumed(tmp_path / "t") == 2


def test_nobody_waits_for_ever_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, late = Run(tmp_path / "{t}", clock=VirtualClock(pace=1e6)), Future[None]()
    honest = LocalCluster.prepare_tiers
    monkeypatch.setattr(
        LocalCluster, "prepare_tiers", lambda self, batch, beside=(): [late, *honest(self, batch)]
    )
    run.train(1)
    cut = run.keeper.save()
    assert cut is not None
    with pytest.raises(DeadlineError, match=r"the checkpoint of step 1 in .*{t};"):
        run.keeper.wait()
    late.set_result(None)
    assert cut.committed.result(60) == 1  # it has gone on
    run.end()


def test_what_cannot_be_saved_is_refused_when_the_keeper_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reader= is a list without state_dict"):
        Run(tmp_path / "t", reader=[1, 2])
    with pytest.raises(ConfigError, match=r"state=\{'rate': ...\} is a float without"):
        Run(tmp_path / "t", state={"rate": 0.1})
    with pytest.raises(
        ConfigError, match="about=, settings=, exclusive= and mirror= are for a repository"
    ):
        Run(tmp_path / "t", about={"name": "a"})


def test_a_run_that_must_exist_does_not_start_over_in_an_empty_tier(tmp_path: Path) -> None:
    with pytest.raises(NoVersionError, match="holds no durable step, and this run must exist"):
        Run(tmp_path / "t", must_exist=True)
    saved(tmp_path / "t", 3)
    run = Run(tmp_path / "t", must_exist=True)
    assert run.keeper.resume() == 3
    run.end()


def test_a_step_before_the_resume_and_a_named_version_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "t", 3)
    run = Run(tmp_path / "t")
    with pytest.raises(StateError, match=r"call resume\(\) before the first step"):
        run.train(1)
    with pytest.raises(ConfigError, match="one durable step and no versions"):
        run.keeper.resume(2)
    with pytest.raises(ConfigError, match="before the model is made to start over"):
        run.keeper.start_over()
    assert run.keeper.resume() == 3
    run.end()


def test_the_reader_goes_on_and_its_absence_is_reported(tmp_path: Path) -> None:
    with Reader(Synthetic(samples=64, rows_total=900), batch_size=8) as reader:
        run = Run(tmp_path / "t", reader=reader)
        for _ in zip(range(3), reader, strict=False):
            run.train(1)
        run.save()
        run.end()
    with pytest.raises(StateError, match="give the keeper reader="):
        resumed(tmp_path / "t")
    with Reader(Synthetic(samples=64, rows_total=900), batch_size=8) as reader:
        run = Run(tmp_path / "t", reader=reader)
        assert run.keeper.resume() == 3
        assert reader.samples == 24
        run.end()


class Beside(nn.Module):
    """A module over a tier, and another one."""

    def __init__(self, path: Path, other: nn.Module) -> None:
        super().__init__()
        self.over_tier = Model(path)
        self.other = other


def test_a_table_without_a_tier_is_refused(tmp_path: Path) -> None:
    """Its rows would be in no checkpoint."""
    model = Beside(tmp_path / "t", nn.Embedding(20, 4, sparse=True))
    assert isinstance(model.other, nn.Embedding)
    optimizer = torch.optim.SGD([model.other.weight], lr=0.1)
    with pytest.raises(ConfigError, match="'other' has no tier"):
        Run.kept(model, [optimizer])
    model.over_tier.bags.cluster.close()


def test_two_modules_with_tiers_are_kept_in_a_repository_as_well(tmp_path: Path) -> None:
    model = Beside(tmp_path / "v", Model(tmp_path / "w"))
    with ek.Keeper(tmp_path / "r", model, []) as keeper:
        assert keeper.resume() is None
    for one in (model.over_tier, model.other):
        one.bags.cluster.close()  # type: ignore[union-attr]


def test_a_strategy_that_a_tier_cannot_follow_is_refused(tmp_path: Path) -> None:
    model = Model(tmp_path / "t")
    for strategy in (ek.incremental(bits=4), ek.all_versions(), ek.incremental(keep=5)):
        with pytest.raises(ConfigError, match="it takes every= and recovery alone"):
            ek.Keeper(None, model, [], strategy=strategy)
    model.bags.cluster.close()
