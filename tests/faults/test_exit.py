"""Processes that end right after their last version: nothing of theirs is still being freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
import emberkeep as ek
from emberkeep.blobs import MemoryStore

model = nn.Sequential(nn.Embedding(2000, 8, sparse=True), nn.Linear(8, 1))
model.dense = nn.ParameterList([nn.Parameter(torch.zeros(50_000)) for _ in range(200)])
dense = [*model[1].parameters(), *model.dense.parameters()]
optimizers = [torch.optim.SGD([model[0].weight], lr=0.1), torch.optim.Adam(dense)]
strategy = ek.incremental(every=1, layout=sys.argv[1])
keeper = ek.Keeper(MemoryStore(), model, optimizers, strategy=strategy)
keeper.resume()
for _ in range(2):
    keeper.step()
if sys.argv[2] == "closed":
    keeper.close()
"""


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["full", "grid"])
@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_no_process_aborts_when_it_ends(layout: str, end: str) -> None:
    for _ in range(20):
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, layout, end],
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
