"""Rows in memory or in files behind a cache: how many machines, how long, at which price.

The question of OpenEmbedding's Table V, with machines and prices as they are given. Nothing here
knows a price. What is assumed beside the inputs is in `Assumptions`, and part of every answer.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np

from emberkeep._types import F64
from emberkeep.config import size
from emberkeep.data.synthetic import Skew, access_shares
from emberkeep.errors import ConfigError

HOUR = timedelta(hours=1)
# Of a tier's memory beside its cache, for each row and for each cached row.
_INDEX_NBYTES = 8
_FRAME_NBYTES = 48
_RANKS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine of a kind: what it has, and what an hour of it costs, in any currency."""

    memory_nbytes: int
    price_per_hour: float
    disk_nbytes: int = 0
    reads_per_second: float = 0.0
    """Random reads of 4 KiB, with many under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What is taken for granted unless it is given."""

    usable_memory: float = 0.9
    """The share of a machine's memory that rows, index and cache may take."""
    file_space: float = 2.2
    """Bytes of a tier's file for each byte of rows: records have heads, and the cleaner begins when
    more of the file is dead than alive, beside what waits for the next durable batch."""
    hidden: float = 0.59
    """The share of a step during which reads hide: the network's. As on 16 GPUs by the scaling of
    OpenEmbedding's Figure 7, where embedding is 41% of a step."""

    def __post_init__(self) -> None:
        if not (0 < self.usable_memory <= 1 and self.file_space >= 1 and 0 <= self.hidden <= 1):
            raise ConfigError(
                "usable memory lies above 0 and at most at 1, the space of files at 1 or more, and "
                "the hidden share between 0 and 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierQuestion:
    """A job: what its rows take, how they are used, and which machines could hold them."""

    table_nbytes: int
    """All rows with their optimizer state."""
    row_nbytes: int
    skew: Skew
    lookups: int
    """Rows that a batch looks up, with repetitions."""
    step: timedelta
    """Of one batch with every row in memory."""
    duration: timedelta
    """Of the job with every row in memory."""
    memory_machine: Machine
    tier_machine: Machine
    cache_nbytes: int | None = None
    """Of all machines together; what memory is left, if not given."""
    assumed: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        counts = (self.table_nbytes, self.row_nbytes, self.lookups)
        if min(counts) < 1 or min(self.step, self.duration) <= timedelta(0):
            raise ConfigError("sizes, lookups and times of a tier's plan must be above 0")
        if self.row_nbytes > self.table_nbytes:
            raise ConfigError("a row cannot be larger than the tables")
        if self.tier_machine.disk_nbytes < 1 or self.tier_machine.reads_per_second <= 0:
            raise ConfigError("the machine of a tier needs disk= and reads=")

    @property
    def rows(self) -> int:
        return self.table_nbytes // self.row_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOption:
    """One way to hold the rows. What only a tier has is None of memory."""

    machines: int
    hours: float
    price_per_hour: float
    price: float
    slowdown: float
    """How much longer a step takes than with every row in memory."""
    cache_nbytes: int | None = None
    hit_rate: float | None = None
    """Of all lookups, the share that finds its row in memory."""
    reads_per_batch: float | None = None
    read_ms_per_batch: float | None = None
    disk_nbytes: int | None = None
    written_nbytes_per_day: float | None = None
    """At least: cleaning and checkpoints write more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """Both ways, which one costs less, and why."""

    question: TierQuestion
    memory: TierOption
    tier: TierOption

    @property
    def recommended(self) -> str:
        return "tier" if self.tier.price < self.memory.price else "memory"

    @property
    def saved(self) -> float:
        """The share of the price in memory that the tier saves; negative where it costs more."""
        return 1.0 - self.tier.price / self.memory.price

    @property
    def reason(self) -> str:
        slower = (
            "in the same time" if self.tier.slowdown < 0.005
            else f"in {self.tier.hours / self.memory.hours:.2f} times the time"
        )  # fmt: skip
        if self.recommended == "tier":
            return (
                f"{self.tier.machines} instead of {self.memory.machines} machines do the job "
                f"{slower}: {self.saved:.0%} less"
            )
        return f"a tier would do the job {slower} and cost {-self.saved:.0%} more"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; every key says its unit."""
        asked = self.question
        return {
            "question": {
                "table_nbytes": asked.table_nbytes, "row_nbytes": asked.row_nbytes,
                "rows": asked.rows, "skew": asked.skew, "lookups_per_batch": asked.lookups,
                "step_ms": asked.step / timedelta(milliseconds=1),
                "hours_in_memory": asked.duration / HOUR,
                "memory_machine": asdict(asked.memory_machine),
                "tier_machine": asdict(asked.tier_machine),
                "assumed": asdict(asked.assumed),
            },
            "memory": asdict(self.memory),
            "tier": asdict(self.tier),
            "recommended": self.recommended,
            "saved": self.saved,
            "reason": self.reason,
        }  # fmt: skip


def plan_tier(asked: TierQuestion) -> TierPlan:
    """Machines, time and price of both ways. Raises where a cache does not fit its machines."""
    hours, assumed = asked.duration / HOUR, asked.assumed
    machine = asked.memory_machine
    count = math.ceil(asked.table_nbytes / (assumed.usable_memory * machine.memory_nbytes))
    rate = count * machine.price_per_hour
    memory = TierOption(
        machines=count, hours=hours, price_per_hour=rate, price=rate * hours, slowdown=0.0
    )
    return TierPlan(question=asked, memory=memory, tier=_behind_a_cache(asked))


def _behind_a_cache(asked: TierQuestion) -> TierOption:
    machine, assumed, rows = asked.tier_machine, asked.assumed, asked.rows
    usable = assumed.usable_memory * machine.memory_nbytes
    disk_nbytes = math.ceil(assumed.file_space * asked.table_nbytes)
    frame_nbytes = asked.row_nbytes + _FRAME_NBYTES
    # A batch must fit, and what is read ahead for the next one.
    least = 2 * min(asked.lookups, rows) * frame_nbytes
    held = _INDEX_NBYTES * rows + max(least, asked.cache_nbytes or 0)
    machines = max(math.ceil(disk_nbytes / machine.disk_nbytes), math.ceil(held / usable))
    cache_nbytes = asked.cache_nbytes
    if cache_nbytes is None:
        cache_nbytes = int(machines * usable) - _INDEX_NBYTES * rows
    elif cache_nbytes < least:
        raise ConfigError(
            f"a cache of {cache_nbytes / 1e9:.3g} GB does not hold two batches, which may take "
            f"{least / 1e9:.3g} GB: plan with a larger one, or smaller batches"
        )
    frames = min(rows, cache_nbytes // frame_nbytes)
    misses = asked.lookups * lru_miss_rate(rows, asked.skew, frames)
    step_s = asked.step.total_seconds()
    read_s = misses / (machine.reads_per_second * machines)
    slowdown = max(0.0, read_s - assumed.hidden * step_s) / step_s
    hours = asked.duration / HOUR * (1 + slowdown)
    rate = machines * machine.price_per_hour
    # Every row that is read takes the place of one that was trained.
    written = misses * asked.row_nbytes / (step_s * (1 + slowdown)) * 86_400
    return TierOption(
        machines=machines, hours=hours, price_per_hour=rate, price=rate * hours, slowdown=slowdown,
        cache_nbytes=min(cache_nbytes, rows * frame_nbytes), hit_rate=1 - misses / asked.lookups,
        reads_per_batch=misses, read_ms_per_batch=read_s * 1e3, disk_nbytes=disk_nbytes,
        written_nbytes_per_day=written,
    )  # fmt: skip


def lru_miss_rate(rows: int, skew: Skew, frames: int) -> float:
    """The share of lookups that a least-recently-used cache of so many rows does not hold.

    Che's approximation: a row stays for the time in which as many others are used as there are
    frames, the same time for all rows; independent lookups are assumed.
    """
    if frames >= rows:
        return 0.0
    edges = np.unique(np.concatenate([[0.0], np.geomspace(1.0, rows, _RANKS)]))
    masses: F64 = np.diff(access_shares(rows, edges, skew))
    counts: F64 = np.diff(edges)
    chances = masses / counts

    def held(time: float) -> float:
        return float((counts * -np.expm1(-chances * time)).sum())

    low, high = 0.0, 1.0
    while held(high) < frames and high < 1e30:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if held(middle) < frames else (low, middle)
    return float((masses * np.exp(-chances * low)).sum())


def read_machine(name: str, text: str) -> Machine:
    """`memory=192GB disk=756GB reads=400000 price=3.80`, as the option `name` takes it."""
    form = "write memory=192GB disk=756GB reads=400000 price=3.80 (disk and reads: of a tier)"
    given: dict[str, str] = {}
    for part in text.replace(",", " ").split():
        key, found, value = part.partition("=")
        if not found or key not in ("memory", "disk", "reads", "price") or key in given:
            raise ConfigError(f"{name}: {part!r} does not describe a machine: {form}")
        given[key] = value
    if not {"memory", "price"} <= set(given):
        raise ConfigError(f"{name} {text!r} lacks memory= or price=: {form}")
    try:
        machine = Machine(
            memory_nbytes=size(given["memory"]),
            price_per_hour=float(given["price"]),
            disk_nbytes=size(given.get("disk", "0GB")),
            reads_per_second=float(given.get("reads", "0")),
        )
    except ValueError:
        raise ConfigError(f"{name} {text!r} does not describe a machine: {form}") from None
    numbers = (machine.price_per_hour, machine.reads_per_second)
    if machine.memory_nbytes < 1 or not all(math.isfinite(n) and n >= 0 for n in numbers):
        raise ConfigError(f"{name} {text!r}: memory must be above 0, and nothing below: {form}")
    if machine.price_per_hour == 0:
        raise ConfigError(f"{name} {text!r}: a price above 0 is needed: {form}")
    return machine


def read_skew(text: str) -> Skew:
    """`retail`, `criteo`, `uniform`, or the exponent of a Zipf distribution."""
    presets: dict[str, Skew] = {"retail": "retail", "criteo": "criteo", "uniform": "uniform"}
    if text in presets:
        return presets[text]
    try:
        exponent = float(text)
    except ValueError:
        exponent = math.nan
    if not (math.isfinite(exponent) and exponent >= 0):
        raise ConfigError(
            f"--skew {text!r} is none: write retail, criteo, uniform, or an exponent such as 1.1"
        )
    return exponent
