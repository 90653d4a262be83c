"""What versions hold, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from emberkeep.codecs import Codec, NonNegative, Quantized
from emberkeep.errors import ConfigError
from emberkeep.repository import DEFAULT_RETENTION, RetentionPolicy
from emberkeep.repository.pieces import PIECE_NBYTES
from emberkeep.repository.policies import LAYOUTS, Grid, Layout, bits_for
from emberkeep.rows.priority import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpec:
    """What versions hold and how: selection, codec and layout.

    - `layout`: *full* saves every trained row each time; *one_shot* saves what changed since the
      first version; *intermittent* does so too and starts over when that has become cheaper;
      *consecutive* saves what changed since the last version; *grid* does so too, and rearranges
      rows beside training so that any version is restored fast, as `grid` says.
    - `bits` quantizes weights to 8, 4, 3 or 2 bits; `expected_restores` chooses the width, and
      falls back to 8 bits when reality exceeds it. Without either, nothing is lost.
    - `quantize_optimizer` stores accumulators in 8 bits too, row-wise ones in 16.
    - `priority` saves the rows that matter most between whole versions: of every
      `priority.rounds` saves the first is whole, as `layout` says, the others are prioritised.
      Those hold no instant: they bring single shards back, nothing else.
    """

    layout: Layout = "intermittent"
    bits: int | None = None
    expected_restores: int | None = None
    quantize_optimizer: bool = False
    priority: Priority | None = None
    grid: Grid | None = None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, not {self.layout!r}")
        if self.bits is not None:
            if self.expected_restores is not None:
                raise ConfigError("give bits= or expected_restores=, which chooses them, not both")
            Quantized(bits=self.bits)
        if self.grid is not None and self.layout != "grid":
            raise ConfigError(f"grid= goes with layout='grid', not {self.layout!r}")
        if self.layout == "grid" and self.priority is not None:
            raise ConfigError(
                "a grid holds whole versions, and prioritised ones are not of one instant: choose "
                "another layout, or no priority"
            )
        if self.expected_restores is not None and self.expected_restores < 0:
            raise ConfigError(f"expected_restores must be 0 or more, not {self.expected_restores}")

    @property
    def lossy(self) -> bool:
        return (
            self.bits is not None or self.expected_restores is not None or self.quantize_optimizer
        )

    @property
    def written_by_holders(self) -> bool:
        """Whether servers write versions themselves: not those of a grid, whose rows stand together
        whatever their shard; but a lossy strategy ends with an exact version outside the grid."""
        return self.layout != "grid" or self.lossy

    def codecs(self, restores: int) -> dict[str, Codec]:
        """The codec of each plane that is not stored as it is."""
        bits = self.bits
        if self.expected_restores is not None:
            bits = bits_for(self.expected_restores, restores)
        chosen: dict[str, Codec] = {}
        if bits is not None:
            chosen["weight"] = Quantized(bits=bits)
        if self.quantize_optimizer:
            chosen["accumulator"] = chosen["second_moment"] = NonNegative()
        return chosen


LOSSLESS = VersionSpec(layout="full")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """How versions are written.

    `overlap` says what a save does that finds the one before still running: "wait" for it, or
    "cancel" it, reported as `save_cancelled`; its rows are in the new one. After a save was
    cancelled none is until a version is committed: where writing takes longer than the interval,
    every other save is a version, and the one after it waits.

    A background save that fails is warned of, and its rows are in the next one; after
    `max_failures` in a row the next call raises.
    """

    overlap: Literal["wait", "cancel"] = "wait"
    threads: int = 2
    nice: int = 10
    piece_nbytes: int = PIECE_NBYTES
    buffer_nbytes: int = 256 * 2**20
    max_failures: int = 3
    retention: RetentionPolicy = DEFAULT_RETENTION
    grace: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        if self.overlap not in ("wait", "cancel"):
            raise ConfigError(f"overlap must be 'wait' or 'cancel', not {self.overlap!r}")
        for name in ("threads", "piece_nbytes", "buffer_nbytes", "max_failures"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {getattr(self, name)}")
