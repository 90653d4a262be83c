"""Rows that a module is given from outside, and rows that it gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

import emberkeep as ek
from emberkeep.blobs import LocalStore
from emberkeep.errors import ConfigError, IdError, StateError
from emberkeep.inspect.importer import look
from emberkeep.inspect.intake import Choice
from emberkeep.runtime import pool


def bags() -> ek.EmbeddingBags:
    table = ek.Table("item", rows=None, capacity=500, dim=4)
    return ek.EmbeddingBags([table], optimizer=ek.Adagrad(lr=0.1))


def test_rows_come_and_go_as_tensors() -> None:
    module = bags()
    weights = torch.randn(3, 4)
    module.upsert("item", [7, -2, 9], weights)
    sums = torch.full((1, 4), 2.0)
    module.upsert("item", torch.tensor([9], dtype=torch.int32), {"accumulator": sums})
    rows = module.rows("item", [7, -2, 9])
    assert torch.equal(rows["weight"], weights)
    assert rows["accumulator"].tolist() == [[0.0] * 4, [0.0] * 4, [2.0] * 4]
    assert torch.equal(module({"item": torch.tensor([9])})[0], weights[2:])
    halves = weights.bfloat16()
    module.upsert("item", [7, -2, 9], halves)
    assert torch.equal(module.rows("item", [7, -2, 9])["weight"], halves.float())


def test_upserted_rows_are_trained_on() -> None:
    module = bags()
    module.upsert(
        "item", [1], {"weight": torch.zeros(1, 4), "accumulator": torch.full((1, 4), 3.0)}
    )
    module({"item": torch.tensor([1])}).sum().backward()
    module.optimizer.step()
    rows = module.rows("item", [1])
    assert rows["accumulator"].tolist() == [[4.0] * 4]
    assert torch.allclose(rows["weight"], torch.full((1, 4), -0.05))


def test_what_does_not_fit_is_refused() -> None:
    module = bags()
    with pytest.raises(ConfigError, match=r"no table 'user'; the tables are item"):
        module.upsert("user", [1], torch.ones(1, 4))
    with pytest.raises(StateError, match=r"shape \(1, 4\), not \(1, 3\)"):
        module.upsert("item", [1], torch.ones(1, 3))
    with pytest.raises(IdError, match="id 1 is given twice"):
        module.upsert("item", [1, 1], torch.ones(2, 4))
    with pytest.raises(ConfigError, match="integers"):
        module.upsert("item", torch.tensor([0.5]), torch.ones(1, 4))
    assert module.touched_ids("item").numel() == 0


def test_a_run_goes_on_from_a_repository_that_begins_with_an_import(tmp_path: Path) -> None:
    ids, weight = (
        np.arange(5, 90, dtype=np.int64),
        np.random.default_rng(0).random((85, 4)).astype(np.float32),
    )
    tensors = {"item/id": ids, "item/weight": weight}
    safetensors.numpy.save_file(tensors, tmp_path / "rows.safetensors")
    files = [str(tmp_path / "rows.safetensors")]
    choice = Choice(optimizer="adagrad", fill={"accumulator": 0.5})
    found = look(LocalStore(tmp_path / "run"), files, choice, pool.shared(), init=True)
    found.run(tmp_path / "scratch")
    module = bags()
    model = torch.nn.ModuleDict({"bags": module, "top": torch.nn.Linear(4, 1)})
    before = model["top"].weight.clone()
    dense = torch.optim.SGD(model["top"].parameters(), lr=0.1)
    optimizers = [module.optimizer, dense]
    with ek.Keeper(str(tmp_path / "run"), model, optimizers) as keeper:
        keeper.resume()
        assert torch.equal(model["top"].weight, before)
        rows = module.rows("item", torch.from_numpy(ids))
        assert np.array_equal(rows["weight"].numpy(), weight)
        assert (rows["accumulator"] == 0.5).all()
        model["top"](module({"item": torch.arange(5, 15)})).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        keeper.step()
    trained, again = module.rows("item", [5])["weight"], bags()
    model = torch.nn.ModuleDict({"bags": again, "top": torch.nn.Linear(4, 1)})
    dense = torch.optim.SGD(model["top"].parameters(), lr=0.1)
    with ek.Keeper(str(tmp_path / "run"), model, [again.optimizer, dense]) as keeper:
        keeper.resume()
        assert torch.equal(again.rows("item", [5])["weight"], trained)


def test_ids_that_are_none_too_large_or_of_another_kind() -> None:
    module = ek.EmbeddingBags([ek.Table("item", capacity=9, dim=4)], optimizer=ek.SGD(lr=0.1))
    assert module.rows("item", [])["weight"].shape == (0, 4)
    module.upsert("item", [], torch.empty(0, 4))
    assert module.delete("item", []) == 0
    unsigned = torch.tensor([2**64 - 1], dtype=torch.uint64)
    with pytest.raises(IdError, match=f"id {2**64 - 1} does not fit 63 bits"):
        module({"item": unsigned})
    with pytest.raises(IdError, match=f"id {2**64 - 1} does not fit 63 bits"):
        module.upsert("item", unsigned, torch.ones(1, 4))
    with pytest.raises(ConfigError, match="fit 64 bits"):
        module.rows("item", [2**70])
    with pytest.raises(StateError, match="a dense tensor"):
        module.upsert("item", [1], torch.ones(1, 4).to_sparse())
    module.upsert("item", [1], torch.ones(1, 4).to(torch.float8_e4m3fn))
    assert module.rows("item", [1])["weight"].eq(1).all()
