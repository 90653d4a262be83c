"""What a run of several workers asks of Ray, which is played."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from emberkeep.erasure.codes import Parity
from emberkeep.errors import ServerError
from emberkeep.train import distributed
from emberkeep.train.distributed import run_on_ray
from emberkeep.train.run_config import demo


def test_servers_are_placed_for_the_parity_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def start(shards: int, **more: Any) -> list[Any]:
        asked.append((shards, more["parity"]))
        raise ServerError("there is no Ray here")

    monkeypatch.setattr(distributed, "connected", lambda _: nullcontext())
    monkeypatch.setattr(distributed.ray_cluster, "find", lambda _: [])
    monkeypatch.setattr(distributed.ray_cluster, "start", start)
    settings = demo(
        ["cluster.kind=ray", "cluster.shards=4", "cluster.workers=2", "parity.k=2", "parity.r=1"]
    )
    with pytest.raises(ServerError, match="there is no Ray here"):
        run_on_ray(settings)
    assert asked == [(4, Parity(k=2, r=1))]
