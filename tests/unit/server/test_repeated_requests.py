"""Requests that come twice, or late: each takes effect once, and holds up nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from emberkeep._types import RowIds
from emberkeep.cluster.shard import Shard
from emberkeep.errors import EpochError
from emberkeep.runtime.pool import Pool
from emberkeep.server.epoch import Epoch, Session
from emberkeep.server.request_order import RequestOrder
from emberkeep.tables import Adagrad, Table
from emberkeep.wire.protocol import PUSH, Request

WANTED = [RowIds(np.arange(3), np.array([0, 3]))]


def test_a_push_that_comes_again_before_the_first_is_applied_is_applied_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sender gave up waiting, and sent it on another stream: both are found new at first."""
    shard = Shard([Table("t", rows=10, dim=2)], Adagrad(lr=0.1), pool=Pool(1))
    epoch = Epoch(
        1, shard, shards=1, coordinator="c", lease_seconds=60, meeting_seconds=0.01, pool=Pool(1),
        tables=[],
    )  # fmt: skip
    shard.serve()
    request = Request(
        kind=PUSH, epoch=1, incarnation=7, number=1, rank=0, world=1, lr=0.1, wanted=WANTED,
        grads=[np.ones((3, 2), np.float32)],
    )  # fmt: skip
    perform = epoch._perform

    def comes_again(*given: Any) -> Any:
        monkeypatch.setattr(epoch, "_perform", perform)
        epoch.push(request, Session())
        return perform(*given)

    monkeypatch.setattr(epoch, "_perform", comes_again)
    epoch.push(request, Session())
    assert (shard.read("t", np.arange(3))["accumulator"] == 1).all()
    assert epoch.applied(7) == 1


def ordered(client: str, number: int, epoch: int = 1) -> dict[str, Any]:
    return {"order": [client, number], "epoch": epoch}


def test_a_slow_request_of_one_client_holds_up_no_other() -> None:
    """A save goes its own way beside what changes rows, and so does another client."""
    order, served = RequestOrder(), threading.Event()

    def serve() -> None:
        with order.of(ordered("b rows", 1)), order.of({}):
            served.set()

    with order.of(ordered("a save", 1)):
        other = threading.Thread(target=serve, daemon=True)
        other.start()
        assert served.wait(30)
        other.join()


def test_requests_of_one_client_are_served_in_turn_and_late_ones_refused() -> None:
    order = RequestOrder()
    seen: list[int] = []
    entered = threading.Event()

    def serve(number: int, then: Callable[[], object] = lambda: None) -> None:
        with order.of(ordered("a rows", number)):
            then()
            seen.append(number)

    def wait_for_next() -> None:
        entered.set()
        assert not following.is_alive() or not seen

    following = threading.Thread(target=serve, args=[3], daemon=True)
    first = threading.Thread(target=serve, args=[2, wait_for_next], daemon=True)
    first.start()
    assert entered.wait(30)
    following.start()
    for thread in (first, following):
        thread.join(30)
    assert seen == [2, 3]
    with pytest.raises(EpochError, match="this is late"):
        serve(1)
    assert seen == [2, 3]


def test_no_client_of_an_epoch_is_forgotten() -> None:
    """Each server of a large cluster has hundreds of others as clients."""
    order = RequestOrder()
    for client in range(2_000):
        with order.of(ordered(f"{client} parity", 2)):
            pass
    for client in range(2_000):
        late = ordered(f"{client} parity", 1)
        with pytest.raises(EpochError, match="this is late"), order.of(late):
            pass


def test_clients_of_earlier_epochs_are_forgotten() -> None:
    order = RequestOrder()
    for epoch in range(1, 50):
        order.begin(epoch)
        for client in range(5):
            with order.of(ordered(f"{client} rows", 2, epoch)):
                pass
        assert len(order._ways) == 5
    with pytest.raises(EpochError, match="this is late"), order.of(ordered("4 rows", 1, 49)):
        pass
