"""What a seed means: a cluster, a job, and what will go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from random import Random
from typing import Literal, get_args

from emberkeep.erasure.codes import Parity
from emberkeep.erasure.messages import MESSAGE_NBYTES
from emberkeep.repository.policies import Grid, Layout
from emberkeep.tables import SGD, Adagrad, Adam, Momentum, Optimizer, RowWiseAdagrad, Table, Uniform

Recovers = Literal["full", "partial", "parity"]
Launches = Literal["fixed", "spawned", "moved"]
Workers = Literal["one", "synchronous", "asynchronous"]
FaultKind = Literal[
    "kill", "pause", "cut", "part", "late", "storm", "jump", "disk", "kill trainer",
    "pause trainer", "memory", "lag", "launch", "replace trainer",
]  # fmt: skip

ALL_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
KINDS = ALL_KINDS[:-4]
"""What is drawn at random, beside "memory"; the others belong to scenarios."""

COORDINATOR = -1
"""As `Fault.other`: the trainer that coordinates."""

LEASE = timedelta(seconds=15)
DEADLINE = timedelta(seconds=10)
PATIENCE = timedelta(minutes=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong at a time, and maybe ends later.

    `target` is a server (or the trainer, where `kind` says so). A *cut* lasts in one direction:
    what `target` sends, or with `inward` what is sent to it, by `other` or by everybody. What is
    *late* is reported as failed to its sender, and arrives long after. A *kill* that is `inward`
    strikes right after the next push; one that is `unheard` takes the answer to it along. A *lag*
    is a cut through which everything comes, `delay` seconds later. While *launch* lasts, nobody can
    start another server. A trainer that is *replaced* is stopped, and another started meanwhile:
    it wakes beside its successor.

    A server that is short of *memory* cannot finish the call, of those that take some, which is the
    how manieth `times` says; one that is `inward` has done its work by then.

    A fault with `on` waits until server `by` has asked others that of their parity so many `times`,
    and a kill for `delay` seconds more.
    """

    at: float
    kind: FaultKind
    target: int = 0
    seconds: float = 0.0
    other: int | None = None
    inward: bool = False
    unheard: bool = False
    delay: float = 0.0
    on: str = ""
    by: int = 0
    times: int = 1
    shares: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        if self.kind in ("kill trainer", "pause trainer", "replace trainer"):
            return f"{self.kind}{lasting}"
        if self.kind == "launch":
            return f"no server can be started{lasting}"
        if self.kind == "storm":
            named = ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items())
            return f"storm{lasting}: {named}"
        if self.kind == "disk":
            return f"the store fails{lasting}"
        if self.kind in ("cut", "part", "lag"):
            other = "everybody" if self.other is None else f"server {self.other}"
            other = "the coordinator" if self.other == COORDINATOR else other
            way = "and" if self.kind == "part" else "from" if self.inward else "to"
            late = f", {self.delay:.1f} s" if self.kind == "lag" else ""
            return f"{self.kind}{late} server {self.target} {way} {other}{lasting}"
        if self.kind == "memory":
            return f"server {self.target} will be short of memory, in call {self.times}"
        if self.kind == "late":
            return f"what is sent to server {self.target} is late{lasting}"
        when = " after its next push" if self.kind == "kill" and self.inward else ""
        when += ", unheard" if when and self.unheard else ""
        return f"{self.kind} server {self.target}{when}{lasting}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A run. Everything follows from the seed, but for what is given."""

    seed: int
    shards: int
    recovers: Recovers
    parity: Parity | None
    workers: Workers
    dynamic: bool
    layout: Layout
    optimizer: Optimizer
    launches: Launches
    servers_write: bool
    prefetches: bool
    steps: int
    every: int
    preemption: float
    tight: bool = False
    """Whether the dynamic table has room for few ids, so that pushes are refused."""
    scope: Literal["full", "partial"] = "full"
    """What is done about more losses than parity can bear."""
    pace: float = 4.0
    """How long a step takes at most, in seconds."""
    goes_on: bool = False
    """Whether the trainer uses the cluster alone, without versions, and goes on with its next step
    after a push that failed."""
    renewed: bool = False
    """Whether such a trainer renews all shards before its first step: rows that came in a
    later epoch than the first."""
    wide_rows: int = 10
    batch: int = 6
    """More than the ids that a step has of a table."""
    idles: bool = False
    """Whether the trainer that coordinates takes one step, and leaves the others to the rest."""
    watched: bool = False
    """Whether another thread of the trainer looks at the tables all the time."""
    scenario: str = ""
    faults: tuple[Fault, ...] = ()

    @property
    def message_nbytes(self) -> int:
        """How much of a write one message of parity holds: every second run cuts most of them."""
        return 64 if self.seed % 2 else MESSAGE_NBYTES

    @property
    def grid(self) -> Grid | None:
        """How a grid is kept: whether rows are moved at once, as by default or seldom, and how
        soon extraction is too far behind."""
        if self.layout != "grid":
            return None
        random = Random(f"grid {self.seed}")
        return Grid(
            ratio=random.choice((0.0, 0.15, 0.5)), concatenate=random.random() < 0.8,
            most_behind=random.choice((1, 8)), behind=random.choice(("skip", "wait")),
        )  # fmt: skip

    @property
    def own_steps(self) -> int:
        """Those of the trainer that coordinates."""
        return 1 if self.idles else self.steps

    @property
    def tables(self) -> list[Table]:
        exact = Uniform(0.0, 0.0) if self.workers == "asynchronous" else Uniform()
        tables = [Table("fixed", rows=24, dim=3, init=exact)]
        if self.dynamic:
            tables.append(Table("dynamic", rows=None, capacity=self._capacity, dim=3, init=exact))
        else:
            tables.append(Table("wide", rows=self.wide_rows, dim=5, init=exact))
        return tables

    @property
    def _capacity(self) -> int:
        return 5 * self.shards if self.tight else 64

    def __str__(self) -> str:
        parity = (
            ""
            if self.parity is None
            else (
                f" k={self.parity.k} r={self.parity.r}"
                f"{' in the background' if self.parity.background else ''}"
            )
        )
        scenario = f"{self.scenario}: " if self.scenario else ""
        tables = "tight" if self.tight else "dynamic" if self.dynamic else "fixed"
        return (
            f"{scenario}{self.shards} servers ({self.launches}), {self.recovers}{parity}, "
            f"{self.workers} worker{'' if self.workers == 'one' else 's'}, "
            f"{tables} tables, {type(self.optimizer).__name__}, "
            f"{self.layout}{' by servers' if self.servers_write else ''}, {self.steps} steps, "
            f"a version every {self.every}, {len(self.faults)} faults"
        )


def options_of(seed: int, kinds: tuple[FaultKind, ...] = KINDS) -> Options:
    """A run that is drawn at random, with faults of these kinds."""
    random = Random(f"options {seed}")
    recovers: Recovers = random.choice(("full", "partial", "parity", "parity"))
    shards = random.randint(1, 4)
    parity = None
    if recovers == "parity":
        shards = random.randint(2, 5)
        r = random.randint(1, min(2, shards - 1))
        parity = Parity(
            k=random.randint(1, min(3, shards - r)), r=r, background=random.random() < 0.4,
            chunk_rows=random.choice((4, 16, 4096)), rebuild_share=random.choice((0.2, 1.0)),
        )  # fmt: skip
    workers: Workers = "one"
    if recovers == "full" and random.random() < 0.3:
        workers = "synchronous"
    elif recovers == "parity" and random.random() < 0.5:
        workers = random.choice(("synchronous", "asynchronous"))
    optimizers: list[Optimizer] = [
        SGD(lr=0.1), Momentum(lr=0.1), Adagrad(lr=0.1), RowWiseAdagrad(lr=0.1), Adam(lr=0.05),
    ]  # fmt: skip
    optimizer: Optimizer = random.choice(optimizers)
    if workers == "asynchronous":
        optimizer = SGD(lr=0.5)
    steps = random.randint(8, 16)
    options = Options(
        seed=seed, shards=shards, recovers=recovers, parity=parity, workers=workers,
        dynamic=random.random() < 0.5, layout=_layout(seed, random), optimizer=optimizer,
        launches=random.choice(("fixed", "spawned", "moved")),
        servers_write=random.random() < 0.5, prefetches=random.random() < 0.5, steps=steps,
        every=random.randint(1, 6), preemption=random.choice((0.0, 0.01, 0.05)),
    )  # fmt: skip
    # PLS counts steps, and a refused push has none of them: not where shards come back alone.
    alone = workers == "one"
    tight = options.dynamic and alone and recovers != "partial" and random.random() < 0.4
    scope: Literal["full", "partial"] = "full"
    if recovers == "parity" and alone and not tight and random.random() < 0.4:
        scope = "partial"
    faults = _faults(random, options, kinds)
    if kinds == KINDS:
        faults = tuple(sorted((*faults, *_shortages(options)), key=lambda fault: fault.at))
    return replace(options, tight=tight, scope=scope, faults=faults)


def _layout(seed: int, random: Random) -> Layout:
    """A quarter of the runs keeps a grid, and one in ten saves all rows each time. This has a
    generator of its own: nothing else that a seed means depends on it."""
    other: Layout = random.choice(("consecutive", "one_shot", "intermittent"))
    lot = Random(f"layout {seed}").random()
    return "grid" if lot < 0.25 else "full" if lot < 0.35 else other


def _faults(random: Random, options: Options, kinds: tuple[FaultKind, ...]) -> tuple[Fault, ...]:
    """A few faults, most of them while the job trains; a step takes about two seconds.

    What goes wrong at the same time is what nobody has thought of: they come in groups.
    """
    found: list[Fault] = []
    at = 0.0
    if "kill" in kinds and options.parity is not None and random.random() < 0.3:
        return _wave(random, options)
    for _ in range(random.choice((1, 2, 3, 4, 5, 6)) if kinds else 0):
        at += random.random() * 4
        if not found or random.random() < 0.3:
            at = random.random() * options.steps * 2
        kind = random.choice((*kinds, *kinds[:2], *kinds[:1]))  # those that servers die of
        target = random.randrange(options.shards)
        lease = LEASE.total_seconds()
        seconds = random.choice((0.1, 0.3, 0.5, 0.9, 1.2, 2.0, 4.0)) * lease * random.random()
        other = None
        if kind in ("cut", "part") and random.random() < 0.6:
            other = random.choice([COORDINATOR, *(s for s in range(options.shards) if s != target)])
        shares = {
            name: random.choice((0.03, 0.1, 0.2))
            for name in ("slow", "drop", "lose", "reset", "repeat")
            if random.random() < 0.5
        }
        fault = Fault(
            at=at, kind=kind, target=target,
            seconds=0.0 if kind in ("kill", "jump", "kill trainer") else seconds, other=other,
            inward=random.random() < 0.5, unheard=random.random() < 0.5, shares=shares,
        )  # fmt: skip
        found.append(fault)
    return tuple(sorted(found, key=lambda fault: fault.at))


def _shortages(options: Options) -> list[Fault]:
    """Servers of one run in six are short of memory, which is drawn as layouts are."""
    random = Random(f"memory {options.seed}")
    count = random.randint(1, 4) if random.random() < 1 / 6 else 0
    return [
        Fault(
            at=random.random() * options.steps * 2, kind="memory",
            target=random.randrange(options.shards), inward=random.random() < 0.5,
            times=random.choice((1, 2, 3, random.randint(4, 40))),
        )
        for _ in range(count)
    ]  # fmt: skip


def _wave(random: Random, options: Options) -> tuple[Fault, ...]:
    """One server after the other dies, often before the one before is whole again."""
    found, at = [], random.random() * 8
    for _ in range(random.randint(2, 6)):
        found.append(
            Fault(
                at=at, kind="kill", target=random.randrange(options.shards),
                inward=random.random() < 0.5, unheard=random.random() < 0.5,
            )
        )  # fmt: skip
        at += random.choice((0.3, 1.0, 4.0, 10.0)) * (0.5 + random.random())
    return tuple(found)
