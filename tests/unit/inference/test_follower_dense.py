"""What a follower says of everything but rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import emberkeep as ek


def test_dense_state_is_named_as_the_model_names_it(tmp_path: Path) -> None:
    def made() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    model = made()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    keeper = ek.Keeper(tmp_path, model, optimizer)
    keeper.resume()
    keeper.save()
    keeper.close()
    follower = ek.Follower(tmp_path)
    follower.refresh()
    fresh = made()
    fresh.load_state_dict({name: torch.tensor(a) for name, a in follower.dense().items()})
    assert torch.equal(fresh[0].weight, model[0].weight)
    assert any("exp_avg" in name for name in follower.dense(whole=True))
