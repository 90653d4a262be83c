"""A step of several ranks that came back from parity is done for each rank that asks again."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from emberkeep._types import RowIds
from emberkeep.cluster.shard import Shard
from emberkeep.errors import ProtocolError
from emberkeep.runtime.pool import Pool
from emberkeep.server.epoch import Epoch, Session
from emberkeep.server.parity_service import ParityService
from emberkeep.tables import Adagrad, Table
from emberkeep.wire.protocol import APPLY, CHECK, Request, settled_of

TABLE = Table("t", rows=None, capacity=50, dim=2)
WANTED = [RowIds(np.arange(3), np.array([0, 3]))]
GRADS = [np.ones((3, 2), np.float32)]


class FromParity:
    """A stream that knows of a step, all of it settled."""

    ledger = {"ranks": 19}  # noqa: RUF012

    def settle(self) -> bool:
        return True

    def settled_push(self, _: str) -> int:
        return 19

    def note(self, *_: Any) -> None: ...


def request(kind: int, number: int, rank: int) -> Request:
    return Request(
        kind=kind, epoch=1, incarnation=7 + rank, number=number, rank=rank, world=2, lr=0.1,
        wanted=WANTED if kind == CHECK else (), grads=GRADS if kind == CHECK else (),
    )  # fmt: skip


@pytest.fixture
def epoch() -> Epoch:
    shard = Shard([TABLE], Adagrad(lr=0.1), pool=Pool(1))
    made = Epoch(
        1, shard, shards=1, coordinator="c", lease_seconds=60, meeting_seconds=0.01, pool=Pool(1),
        tables=[],
    )  # fmt: skip
    made.protect(cast(ParityService, FromParity()))
    return made


def test_a_step_that_came_back_from_parity_is_not_checked_and_not_applied_again(
    epoch: Epoch,
) -> None:
    """Its shard died between the check and the answer: the ranks make the push again."""
    session = Session()
    for rank in range(2):
        for kind in (CHECK, APPLY):
            settled, waiting = settled_of(epoch.push(request(kind, 19, rank), session))
            assert (settled, waiting) == (19, False)
    assert epoch.shard.touched_ids("t").size == 0


def test_a_step_that_did_not_come_back_has_to_be_checked_again(epoch: Epoch) -> None:
    with pytest.raises(ProtocolError, match="not checked"):
        epoch.push(request(APPLY, 20, 0), Session())
