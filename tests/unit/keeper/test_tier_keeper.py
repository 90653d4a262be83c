"""What a tier's keeper stores beside the rows: whole and of that very step, or refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import emberkeep as ek
from emberkeep.errors import DamageError
from emberkeep.keeper import tier_state
from emberkeep.keeper.plain_state import pack
from emberkeep.tiered import durable_open

WIDTH = 3


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)


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

    def __init__(self, path: Path, *, shards: int = 1) -> None:
        torch.manual_seed(0)
        self.model = Model(path, shards=shards)
        self.optimizers = [
            self.model.bags.optimizer,
            torch.optim.Adam(self.model.top.parameters(), lr=0.01),
        ]
        self.keeper = ek.TierKeeper(self.model, self.optimizers, every="1000 steps")
        self.resumed = None

    def train(self, steps: int) -> None:
        for _ in range(steps):
            ids = (torch.arange(8) * 7 + self.keeper.steps * 5) % 60
            self.model(ids.reshape(4, 2)).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.keeper.step()

    def save(self) -> None:
        self.keeper.checkpoint()
        self.keeper.wait()

    def end(self) -> None:
        self.model.bags.cluster.close()


def saved(path: Path, *steps: int) -> Path:
    """A tier that was saved at these steps and closed; the file of the last one."""
    run = Run(path)
    for step in steps:
        run.train(step - run.keeper.steps)
        run.save()
        file = path / "state" / f"step-{step}.safetensors"
        shutil.copy(file, path.parent / file.name)
    run.end()
    return file


def resumed(path: Path) -> int | None:
    run = Run(path)
    try:
        return run.keeper.resume()
    finally:
        run.end()


def test_a_flipped_bit_of_the_state_is_told(tmp_path: Path) -> None:
    file = saved(tmp_path / "t", 3)
    content = file.read_bytes()
    weights = content.rindex(b"}") + 1  # tensors follow the header
    places = [3, 9, 12, 20, 30, 50, 100, len(content) // 2, weights + 16, len(content) - 1]
    for place in places:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(DamageError, match=r"step-3\.safetensors"):
            resumed(tmp_path / "t")
    for short in (0, 7, weights - 1, len(content) - 1):
        file.write_bytes(content[:short])
        with pytest.raises(DamageError, match=r"step-3\.safetensors"):
            resumed(tmp_path / "t")
    file.write_bytes(content)
    assert resumed(tmp_path / "t") == 3


def test_the_state_of_another_step_is_told(tmp_path: Path) -> None:
    file = saved(tmp_path / "t", 2, 3)
    shutil.copy(tmp_path / "step-2.safetensors", file)
    with pytest.raises(DamageError, match="bring that file back, or restore"):
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
    assert [f.name for f in file.parent.iterdir() if f.is_file()] == ["step-4.safetensors"]
    assert tier_state.HEAD in (file.parent / "step-4.safetensors").read_bytes()


def test_the_state_is_a_file_for_other_tools_too(tmp_path: Path) -> None:
    file = saved(tmp_path / "t", 3)
    tensors = safetensors.torch.load_file(file)
    assert any(tensor.shape == (1, 4) for tensor in tensors.values())


def test_dense_state_may_be_of_any_size() -> None:
    """Its tensors are tensors of the file, whose header may have 100 MB and no more."""
    dense = pack({"w": torch.arange(30_000_000, dtype=torch.float32)}, what="dense")
    content = b"".join(tier_state.encode("step-1.safetensors", dense, {"reader": {"at": 5}}))
    back, beside = tier_state.decode("step-1.safetensors", content)
    assert torch.equal(back.tensors["dense/w"], dense.tensors["dense/w"])
    assert back.plain == dense.plain
    assert beside == {"reader": {"at": 5}}
