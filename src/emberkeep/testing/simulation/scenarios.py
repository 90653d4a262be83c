"""Runs that lead straight to one rule of the protocols: chosen faults, and chance for the rest.

A seed that is drawn at random comes across some of these once in thousands of runs. They are runs
like all others: a part of all seeds is one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from emberkeep.erasure.codes import Parity
from emberkeep.tables import SGD, RowWiseAdagrad
from emberkeep.testing.simulation.sim_options import (
    COORDINATOR,
    KINDS,
    LEASE,
    Fault,
    FaultKind,
    Options,
    options_of,
)

_LEASE = LEASE.total_seconds()


def run_of(seed: int, kinds: tuple[FaultKind, ...] = KINDS) -> Options:
    """The run of a seed: one in five is a scenario, if all faults may happen."""
    random = Random(f"scenario {seed}")
    if kinds == KINDS and random.random() < 0.2:
        return scenario_of(random.choice(list(SCENARIOS)), seed)
    return options_of(seed, kinds)


def scenario_of(name: str, seed: int) -> Options:
    """The run of a seed in a scenario."""
    random = Random(f"{name} {seed}")
    base = replace(
        options_of(seed, ()), workers="one", dynamic=False, tight=False, scope="full", parity=None,
        shards=3, recovers="full", optimizer=RowWiseAdagrad(lr=0.1), scenario=name, steps=12,
        prefetches=random.random() < 0.5, launches="spawned",
    )  # fmt: skip
    chosen = SCENARIOS[name](random)
    return replace(base, **chosen)


def _parity(random: Random, k: int = 2, r: int = 1, **more: Any) -> dict[str, Any]:
    spec = Parity(
        k=k, r=r, background=more.pop("background", False),
        chunk_rows=random.choice((4, 16)),
        rebuild_share=more.pop("rebuild_share", None) or random.choice((0.2, 1.0)),
    )  # fmt: skip
    return {"recovers": "parity", "parity": spec, "shards": k + r + random.randint(0, 1), **more}


def _kill(at: float, target: int, **more: Any) -> Fault:
    return Fault(at=at, kind="kill", target=target, **more)


def _outlived(random: Random) -> dict[str, Any]:
    """A server that its coordinator does not reach is replaced elsewhere, while another worker
    still talks to it: cut off, or stopped for longer than its lease."""
    at, stopped = random.uniform(3, 8), random.random() < 0.6
    fault = (
        Fault(at=at, kind="pause", seconds=_LEASE * random.uniform(2, 3.5))
        if stopped
        else Fault(at=at, kind="part", other=COORDINATOR, seconds=_LEASE * 4)
    )
    return _parity(
        random, k=1, workers="asynchronous", optimizer=SGD(lr=0.5), launches="moved",
        faults=(fault,), steps=20,
    )  # fmt: skip


def _late(random: Random) -> dict[str, Any]:
    """Pushes arrive after a full recovery has gone behind them."""
    at = random.uniform(3, 12)
    late = Fault(at=at, kind="late", target=1, seconds=random.uniform(2, 6))
    return {"faults": (late, _kill(at + random.uniform(0, 2), 2))}


def _unheard(random: Random) -> dict[str, Any]:
    """A server applies a push, its hosts hold it, and it dies before it can say so."""
    ats = [random.uniform(1, 6), random.choice((random.uniform(8, 14), random.uniform(30, 34)))]
    faults = tuple(_kill(at, random.randrange(2), inward=True, unheard=True) for at in ats)
    return _parity(
        random, k=random.choice((1, 2)), faults=faults, dynamic=random.random() < 0.5, steps=16
    )


def _behind(random: Random) -> dict[str, Any]:
    """In the background, hosts hold less than was acknowledged, and not all of them as much, when
    the server dies."""
    at, r = random.uniform(2, 10), random.choice((1, 2))
    cuts = [
        Fault(at=at, kind="cut", target=0, other=other, seconds=random.uniform(4, 8))
        for other in (range(1, 4) if r == 1 else random.sample((1, 2, 3), 2))
    ]
    return _parity(
        random, r=r, background=True, dynamic=random.random() < 0.5, shards=4,
        faults=(*cuts, _kill(at + random.uniform(1, 5), 0, inward=True)),
    )  # fmt: skip


def _acknowledged(random: Random) -> dict[str, Any]:
    """The worker that would send a push again dies, then the server that acknowledged it, whose
    hosts were out of reach."""
    at = random.uniform(3, 8)
    cuts = [Fault(at=at, kind="cut", target=0, other=o, seconds=8.0) for o in (1, 2)]
    return _parity(
        random, k=1, workers="asynchronous", optimizer=SGD(lr=0.5), shards=3, prefetches=False,
        faults=(*cuts, Fault(at=at + 4, kind="kill trainer", target=1), _kill(at + 4.1, 0)),
        pace=1.0, steps=24,
    )  # fmt: skip


def _wave(random: Random) -> dict[str, Any]:
    """One server after the other dies while others push, before the last one is whole."""
    at, faults = random.uniform(1, 5), []
    for _ in range(5):
        faults.append(_kill(at, random.randrange(3), inward=random.random() < 0.3))
        at += random.choice((0.2, 0.7, 2.0, 6.0))
    return _parity(
        random, r=random.choice((1, 2)), faults=tuple(faults), workers="asynchronous",
        optimizer=SGD(lr=0.5), steps=20, background=random.random() < 0.5,
    )  # fmt: skip


def _busy(random: Random) -> dict[str, Any]:
    """Rows are decoded while others push many times a second, and another server dies then."""
    at = random.uniform(1, 3)
    faults = [_kill(at, 0), _kill(at + random.uniform(0.5, 1.5), 1)]
    storm = Fault(at=at, kind="storm", seconds=6.0, shares={"slow": random.choice((0.05, 0.2))})
    return _parity(
        random, r=random.choice((1, 2)), faults=(*faults, storm), workers="asynchronous",
        optimizer=SGD(lr=0.5), steps=40, pace=0.2, every=30, background=random.random() < 0.5,
    )  # fmt: skip


def _sealed(random: Random) -> dict[str, Any]:
    """What a server had sent before it was stopped arrives while it is being replaced."""
    at = random.uniform(2, 6)
    lasting = random.uniform(33, 46)
    cuts = [Fault(at=at, kind="cut", target=0, other=o, seconds=lasting) for o in (1, 2)]
    return _parity(
        random, k=1, background=True, shards=3, launches="moved", prefetches=False,
        faults=(*cuts, Fault(at=at + 3, kind="pause", seconds=100.0)),
    )  # fmt: skip


def _together(random: Random) -> dict[str, Any]:
    """More die at once than parity can bear, or as many as it just can."""
    at, r = random.uniform(2, 14), random.choice((1, 1, 2))
    lost = random.sample(range(3), random.choice((2, 2, 3)))
    later = [random.choice((0.0, 0.0, 0.6, 1.2)) for _ in lost]
    faults = tuple(_kill(at + t, shard) for t, shard in zip(later, lost, strict=True))
    return _parity(
        random, r=r, shards=4, faults=faults, dynamic=random.random() < 0.5, prefetches=False
    )


def _unchanged(random: Random) -> dict[str, Any]:
    """Right after a version more shards die than parity can bear, and come back from it alone; one
    of the others dies later."""
    at, lost = random.uniform(2, 8), random.sample(range(4), 2)
    more = [_kill(at + random.uniform(9, 14), random.randrange(4))]
    return _parity(
        random, shards=4, every=1, steps=16, scope=random.choice(("full", "partial")),
        faults=(*(_kill(at, shard) for shard in lost), *more), prefetches=False,
    )  # fmt: skip


def _parted(random: Random) -> dict[str, Any]:
    """Two servers do not reach each other for long, one of them dies then."""
    at = random.uniform(1, 6)
    part = Fault(at=at, kind="part", target=0, other=1, seconds=_LEASE * random.uniform(1, 3))
    return _parity(
        random, k=1, r=random.choice((1, 2)), shards=3, steps=16,
        faults=(part, _kill(at + random.uniform(14, 50), random.randrange(2))),
    )  # fmt: skip


def _unreached(random: Random) -> dict[str, Any]:
    """A server dies, and its replacement does not reach one of the others, or only at first."""
    at, k = random.uniform(1, 8), random.choice((1, 2))
    other, later = random.randint(1, k + 1), random.choice((0.0, 0.0, random.uniform(0, 4)))
    seconds = _LEASE * random.choice((0.5, 1.5, 4, 7))
    cut = Fault(
        at=at + later, kind=random.choice(("part", "cut")), target=0, other=other, seconds=seconds,
        inward=random.random() < 0.2,
    )  # fmt: skip
    return _parity(
        random, k=k, r=2, steps=random.choice((12, 24)), background=random.random() < 0.4,
        faults=tuple(sorted((cut, _kill(at, 0, inward=random.random() < 0.3)), key=lambda f: f.at)),
    )  # fmt: skip


def _tight(random: Random) -> dict[str, Any]:
    """Pushes are refused, while others that were acknowledged are held by no host yet."""
    at = random.uniform(3, 8)
    cuts = [Fault(at=at, kind="cut", target=0, other=o, seconds=6.0) for o in (1, 2, 3)]
    return _parity(
        random, background=True, dynamic=True, tight=True, shards=4, steps=30, pace=1.0,
        prefetches=False, faults=(*cuts, _kill(at + random.uniform(2, 5.5), 0)),
    )  # fmt: skip


def _ahead(random: Random) -> dict[str, Any]:
    """A shard dies between a push and the pull that was made ahead of it."""
    faults = tuple(
        _kill(at, random.randrange(3), inward=True) for at in (2.0, random.uniform(8, 16))
    )
    return {
        "recovers": "partial", "prefetches": True, "every": random.choice((1, 2)), "faults": faults
    }  # fmt: skip


def _ranks(random: Random) -> dict[str, Any]:
    """Two ranks, whose messages get lost, come late and come twice."""
    shares = {name: random.choice((0.1, 0.2)) for name in ("slow", "lose", "reset", "repeat")}
    storm = Fault(at=random.uniform(0, 4), kind="storm", seconds=12.0, shares=shares)
    with_parity = random.random() < 0.5
    return {
        **(_parity(random) if with_parity else {}),
        "workers": "synchronous", "dynamic": random.random() < 0.5, "faults": (storm,),
    }  # fmt: skip


def _goes_on(random: Random) -> dict[str, Any]:
    """Servers are out of reach for longer than a lease, or stopped. Who pushes has no versions, and
    goes on after a push that failed."""
    at, faults = random.uniform(1, 6), []
    for _ in range(random.choice((1, 2, 3))):
        kind: FaultKind = random.choice(("part", "part", "cut", "pause"))
        faults.append(
            Fault(
                at=at, kind=kind, target=random.randrange(3), seconds=random.uniform(20, 70),
                other=random.choice((None, COORDINATOR)), inward=random.random() < 0.5,
            )
        )  # fmt: skip
        at += random.choice((random.uniform(0, 5), random.uniform(40, 80)))
    return {
        "goes_on": True, "faults": tuple(faults), "steps": 30,
        "launches": random.choice(("spawned", "moved")), "renewed": random.random() < 0.5,
    }  # fmt: skip


def _unlaunched(random: Random) -> dict[str, Any]:
    """A server is out of reach until it is given up, nobody can be started in its place, and it
    returns."""
    at = random.uniform(2, 12)
    part = Fault(at=at, kind="part", target=random.randrange(3), seconds=random.uniform(30, 60))
    launch = Fault(at=at, kind="launch", seconds=100.0)
    return {
        "recovers": "partial", "launches": "moved", "every": random.randint(3, 6), "steps": 20,
        "faults": (part, launch),
    }  # fmt: skip


def _watched(random: Random) -> dict[str, Any]:
    """A server returns to its coordinator while it is being replaced, and other threads and other
    workers would go on with it."""
    at = random.uniform(2, 8)
    part = Fault(at=at, kind="part", other=COORDINATOR, seconds=random.uniform(28, 50))
    return _parity(
        random, k=1, workers="asynchronous", optimizer=SGD(lr=0.5), launches="moved",
        faults=(part,), steps=30, watched=True, prefetches=False,
    )  # fmt: skip


def _usurped(random: Random) -> dict[str, Any]:
    """A trainer is stopped, another takes its place, and the first one wakes up."""
    at = random.uniform(4, 12)
    replaced = Fault(at=at, kind="replace trainer", seconds=random.uniform(45, 60))
    with_parity = random.random() < 0.5
    return {
        **(_parity(random) if with_parity else {}),
        "launches": "fixed", "faults": (replaced,), "steps": 45,
    }  # fmt: skip


def _decoding(random: Random) -> dict[str, Any]:
    """A server asks for what others have said about its lost rows, and the question takes long.
    Meanwhile they change their own rows, which one does not tell all of its hosts before it dies.
    """
    at = random.uniform(2, 6)
    # The first beside it has rows in most of its groups, and the parity that is asked for of none.
    other = random.choice((1, 1, 1, random.randrange(1, 5)))
    # Not the first table: who met the loss waits for its rows, and changes none meanwhile.
    asks: dict[str, Any] = {
        "at": at, "on": "syndromes", "by": 0, "times": random.randint(5, 7),
    }  # fmt: skip
    slow = [
        Fault(**asks, kind="lag", target=0, other=o, seconds=8.0, delay=random.uniform(4, 4.8))
        for o in range(1, 5)
    ]
    dies = []
    if random.random() < 0.8:
        host = random.choice([shard for shard in range(1, 5) if shard != other])
        dies = [
            Fault(**asks, kind="lag", target=other, other=host, seconds=12.0, delay=8.0),
            Fault(**asks, kind="kill", target=other, delay=random.uniform(1, 1.8)),
        ]
    return _parity(
        random, k=3, r=2, shards=5, faults=(_kill(at, 0), *slow, *dies), workers="asynchronous",
        idles=True, optimizer=SGD(lr=0.5), steps=24, pace=1.0, every=60, wide_rows=30, batch=24,
        rebuild_share=0.04, background=random.random() < 0.7, prefetches=False,
    )  # fmt: skip


def _in_flight(random: Random) -> dict[str, Any]:
    """A server has asked what others say about its lost rows, and asks slowly what that comes to.
    Meanwhile they change their own rows of the same stripes, a few rows at a time: most steps need
    none of the lost ones, and wait for nothing."""
    at = random.uniform(6, 9)
    slow = [
        Fault(
            at=at, on="syndromes", by=0, times=random.choice((1, 1, 2, 4)), kind="lag", target=0,
            other=o, seconds=6.0, delay=random.uniform(3, 4.5),
        )
        for o in range(1, 5)
    ]  # fmt: skip
    return _parity(
        random, k=3, r=random.choice((1, 2)), shards=5, faults=(_kill(at, 0), *slow),
        workers="asynchronous", optimizer=SGD(lr=0.5), steps=80, pace=0.3, every=90, batch=2,
        wide_rows=25, rebuild_share=1.0, background=True, prefetches=False,
    )  # fmt: skip


def _resumed(random: Random) -> dict[str, Any]:
    """Trainers die beside servers that live, often while a version is being written."""
    faults, at = [], random.uniform(2, 6)
    for _ in range(4):
        faults.append(Fault(at=at, kind="kill trainer"))
        at += _LEASE + random.uniform(0.5, 4)
    return {
        "launches": random.choice(("fixed", "spawned")), "dynamic": random.random() < 0.5,
        "every": 1, "steps": 50, "pace": 0.4, "faults": tuple(faults),
    }  # fmt: skip


SCENARIOS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "outlived": _outlived,
    "late": _late,
    "unheard": _unheard,
    "behind": _behind,
    "acknowledged": _acknowledged,
    "wave": _wave,
    "busy": _busy,
    "sealed": _sealed,
    "together": _together,
    "unchanged": _unchanged,
    "parted": _parted,
    "unreached": _unreached,
    "tight": _tight,
    "ahead": _ahead,
    "ranks": _ranks,
    "goes on": _goes_on,
    "unlaunched": _unlaunched,
    "watched": _watched,
    "usurped": _usurped,
    "decoding": _decoding,
    "in flight": _in_flight,
    "resumed": _resumed,
}
