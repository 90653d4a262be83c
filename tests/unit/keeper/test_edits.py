"""Rows of torch's tables that somebody changes past the optimizer: never lost without a word."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.blobs.wrapper import WrapperStore

ROWS, DIM = 1000, 4
EVERY = ek.incremental(every=10**9, keep="all")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(ROWS, DIM, sparse=True)


def optimizer_of(net: Net) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(net.parameters(), lr=0.1)


def train(net: Net, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(0, ROWS, (16,), generator=torch.Generator().manual_seed(seed))
    net.table(ids).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _no_grad(edit: Callable[[Net], Any]) -> Callable[[Net], Any]:
    return torch.no_grad()(edit)


EDITS: dict[str, Callable[[Net], Any]] = {
    "init": lambda net: nn.init.normal_(net.table.weight),
    "mul": _no_grad(lambda net: net.table.weight.mul_(1.5)),
    "one row": _no_grad(lambda net: net.table.weight[7].zero_()),
    "copy": _no_grad(lambda net: net.table.weight.copy_(torch.ones(ROWS, DIM))),
    "data": lambda net: net.table.weight.data.mul_(1.5),
    "numpy": lambda net: np.multiply(
        net.table.weight.detach().numpy(), 2, out=net.table.weight.detach().numpy()
    ),
}


def resumed(where: Path | MemoryStore) -> Net:
    net = Net()
    nn.init.zeros_(net.table.weight)
    keeper = ek.Keeper(where, net, optimizer_of(net), strategy=EVERY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert keeper.resume() is not None
    keeper.close(save=False)
    return net


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("then", ["save", "train"])
def test_an_edit_in_place_is_noticed_and_saved(edit: str, then: str, tmp_path: Path) -> None:
    net = Net()
    optimizer = optimizer_of(net)
    keeper = ek.Keeper(tmp_path, net, optimizer, strategy=EVERY)
    keeper.resume()
    for step in range(3):
        train(net, optimizer, step)
        keeper.step()
    keeper.save()
    keeper.wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        EDITS[edit](net)
        if then == "train":
            train(net, optimizer, 5)
        keeper.step()
        keeper.save()
        keeper.wait()
    (said,) = [str(w.message) for w in caught if "in place" in str(w.message)]
    assert said.startswith("rows of table 'table' were changed in place past its optimizer")
    keeper.close(save=False)
    assert torch.equal(resumed(tmp_path).table.weight, net.table.weight)


def test_edits_of_optimizer_state_are_noticed(tmp_path: Path) -> None:
    net = Net()
    optimizer = optimizer_of(net)
    keeper = ek.Keeper(tmp_path, net, optimizer, strategy=EVERY)
    keeper.resume()
    keeper.save()
    keeper.wait()
    optimizer.state[net.table.weight]["sum"].fill_(3.0)
    keeper.step()
    with pytest.warns(UserWarning, match="changed in place"):
        keeper.save()
    keeper.close(save=False)
    again = Net()
    other = optimizer_of(again)
    keeper = ek.Keeper(tmp_path, again, other, strategy=EVERY)
    keeper.resume()
    assert float(other.state[again.table.weight]["sum"].min()) == 3.0
    keeper.close(save=False)


def test_what_is_announced_or_loaded_is_not_warned_of(tmp_path: Path) -> None:
    net = Net()
    optimizer = optimizer_of(net)
    keeper = ek.Keeper(tmp_path, net, optimizer, strategy=EVERY)
    keeper.resume()
    keeper.save()
    keeper.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keeper.mark_all_changed()
        nn.init.normal_(net.table.weight)
        for step in range(3):
            train(net, optimizer, step)
            keeper.step()
        keeper.save()
        keeper.wait()
        net.load_state_dict(Net().state_dict())
        train(net, optimizer, 3)
        keeper.step()
        keeper.save()
        keeper.wait()
    keeper.close(save=False)
    assert torch.equal(resumed(tmp_path).table.weight, net.table.weight)


class _Held(WrapperStore):
    """Holds what is put until it may."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.arrived, self.may = threading.Event(), threading.Event()
        self.may.set()

    def put(self, name: str, data: Any) -> int:
        self.arrived.set()
        assert self.may.wait(60)
        return super().put(name, data)


def test_a_version_that_an_edit_came_between_is_given_up() -> None:
    net = Net()
    optimizer = optimizer_of(net)
    store = _Held(MemoryStore())
    keeper = ek.Keeper(store, net, optimizer, strategy=EVERY)
    keeper.resume()
    train(net, optimizer, 0)
    keeper.step()
    store.arrived.clear()
    store.may.clear()
    saving = keeper.save()
    assert saving is not None
    assert store.arrived.wait(60)
    nn.init.normal_(net.table.weight)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.may.set()
        keeper._saver.join()  # type: ignore[union-attr]
        assert "given up" in str(saving.committed.exception())
        keeper.step()
        keeper.save()
        keeper.wait()
    texts = [str(w.message) for w in caught]
    assert any("given up" in text for text in texts)
    assert any("past its optimizer" in text for text in texts)
    keeper.close(save=False)
    assert torch.equal(resumed(store).table.weight, net.table.weight)


def test_training_beside_saves_is_never_taken_for_an_edit(tmp_path: Path) -> None:
    net = Net()
    optimizer = optimizer_of(net)
    keeper = ek.Keeper(tmp_path, net, optimizer, strategy=ek.incremental(every=1, keep=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keeper.resume()
        for step in range(40):
            train(net, optimizer, step)
            keeper.step()
        keeper.close()
    assert torch.equal(resumed(tmp_path).table.weight, net.table.weight)
