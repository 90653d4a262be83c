"""What versions hold, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from emberkeep import config
from emberkeep.blobs import BlobStore, Reading
from emberkeep.checkpoint.widths import Widths
from emberkeep.codecs import Quantized
from emberkeep.errors import ConfigError
from emberkeep.repository import DEFAULT_RETENTION, RetentionPolicy
from emberkeep.repository.pieces import PIECE_NBYTES
from emberkeep.repository.policies import Grid, Layout, Predictor, bits_for
from emberkeep.rows.priority import Priority
from emberkeep.runtime.bandwidth import check_rate
from emberkeep.runtime.core_time import check_share


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpec:
    """What versions hold and how: selection, codec and layout.

    - `layout`: *full* saves every trained row each time; *one_shot* saves what changed since the
      first version; *intermittent* does so too and starts over when that has become cheaper;
      *consecutive* saves what changed since the last version; *grid* does so too, and rearranges
      rows beside training so that any version is restored fast, as `grid` says.
      An intermittent layout expects increments to go on growing; with `predictor="paper"` it
      decides as Check-N-Run does, from the last one.
    - `bits` quantizes weights to 8, 4, 3 or 2 bits; `expected_restores` chooses the width, and
      falls back to 8 bits when reality exceeds it; `widths` names one for each table. Without any
      of them, nothing is lost.
    - `accuracy_budget` is the share of the validation loss that the `expected_restores` (one if not
      given) may cost together: versions are exact until `ek.calibrate` has measured which
      widths keep it.
    - `bins` and `range_ratio` are those of the search for the range of a row, for 4 bits and fewer
      (`Quantized`, where it is `ratio`); by default the paper's.
    - `quantize_optimizer` stores Adagrad's accumulators and Adam's second moments in 8 bits too,
      row-wise accumulators in 16. Momentum and first moments stay float32; a keeper warns where
      no table has a plane that this is for.
    - `priority` saves the rows that matter most between whole versions: of every
      `priority.rounds` saves the first is whole, as `layout` says, the others are prioritised.
      Those hold no instant: they bring single shards back, nothing else.
    """

    layout: Layout = "intermittent"
    bits: int | None = None
    expected_restores: int | None = None
    quantize_optimizer: bool = False
    widths: Widths | None = None
    accuracy_budget: float | None = None
    bins: int | None = None
    range_ratio: float | None = None
    predictor: Predictor = "growth"
    priority: Priority | None = None
    grid: Grid | None = None

    def __post_init__(self) -> None:
        if self.bits is not None:
            Quantized(bits=self.bits)
        config.check(self)
        self._check_widths()
        if self.predictor != "growth" and self.layout != "intermittent":
            raise ConfigError(
                f"predictor= decides when an intermittent layout starts over, and this one is "
                f"{self.layout}: leave it out"
            )
        if self.grid is not None and self.layout != "grid":
            raise ConfigError(f"grid= goes with layout='grid', not {self.layout!r}")
        if self.layout == "grid" and self.priority is not None:
            raise ConfigError(
                "a grid holds whole versions, and prioritised ones are not of one instant: choose "
                "another layout, or no priority"
            )

    def _check_widths(self) -> None:
        if self.bits is not None:
            if self.expected_restores is not None:
                raise ConfigError("give bits= or expected_restores=, which chooses them, not both")
            if self.widths is not None or self.accuracy_budget is not None:
                other = "accuracy_budget=" if self.widths is None else "widths of single tables"
                raise ConfigError(f"bits= is the width of every table: leave out {other}, or bits=")
        if self.expected_restores is not None and self.expected_restores < 0:
            raise ConfigError(f"expected_restores must be 0 or more, not {self.expected_restores}")
        if self.accuracy_budget is not None and not 0 < self.accuracy_budget < 1:
            raise ConfigError(
                "accuracy_budget is a share of the validation loss, such as 1e-4, not "
                f"{self.accuracy_budget}"
            )
        if self.bins is not None or self.range_ratio is not None:
            if not self._searches:
                expected = self.expected_restores
                if expected is not None and self.widths is None:
                    raise ConfigError(
                        "bins= and range_ratio= are for weights of 4, 3 or 2 bits, and "
                        f"{expected} expected restores need {bits_for(expected, 0)}: leave them "
                        "out, or give bits="
                    )
                given = "" if self.bits is None else f", not {self.bits}"
                raise ConfigError(
                    f"bins= and range_ratio= are for weights of 4, 3 or 2 bits{given}: give such "
                    "bits=, expected_restores= or accuracy_budget=, or leave them out"
                )
            if self.range_ratio is not None and not 0 <= self.range_ratio <= 1:
                raise ConfigError(
                    f"range_ratio must be a number from 0 to 1, not {self.range_ratio}"
                )
            Quantized(bits=2, bins=self.bins, ratio=self.range_ratio)
        if self.quantize_optimizer and self.accuracy_budget is not None:
            raise ConfigError(
                "accuracy_budget= finds out whether optimizer planes are quantized: leave out "
                "quantize_optimizer="
            )

    @property
    def _searches(self) -> bool:
        """Whether the range of some row may be searched for: at 8 bits a narrower one is no help.
        Which widths a budget comes to is not known before."""
        if self.accuracy_budget is not None:
            return True
        if self.widths is not None:
            return any(width.bits not in (None, 8) for width in self.widths.tables.values())
        if self.expected_restores is not None:
            return bits_for(self.expected_restores, 0) != 8
        return self.bits not in (None, 8)

    @property
    def quantizes(self) -> bool:
        """Whether weights are quantized, or will be."""
        given = (self.bits, self.expected_restores, self.widths, self.accuracy_budget)
        return any(value is not None for value in given)

    @property
    def measures(self) -> str:
        """What measured widths have to keep, and how ranges are searched for meanwhile."""
        if self.accuracy_budget is None:
            return ""
        said = f"accuracy_budget={float(self.accuracy_budget)!r}"
        said += f" expected_restores={self.expected_restores or 1}"
        if self.bins is not None:
            said += f" bins={self.bins}"
        if self.range_ratio is not None:
            said += f" range_ratio={float(self.range_ratio)!r}"
        return said

    @property
    def lossy(self) -> bool:
        """Whether versions may be rounded; which of them are is known of each one."""
        return self.quantizes or self.quantize_optimizer


LOSSLESS = VersionSpec(layout="full")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """How versions are written.

    `overlap` says what a save does that finds the one before still running: "wait" for it, or
    "cancel" it, reported as `save_cancelled`; its rows are in the new one. After a save was
    cancelled none is until a version is committed: where writing takes longer than the interval,
    every other save is a version, and the one after it waits.

    `most_mb_per_second` is how fast versions are written at most, by all servers together, and
    `mirror_mb_per_second` how fast they are copied to a mirror; a save that is due waits for the
    one before, and training with it. A process that is being stopped writes as fast as it can.
    From it follows how often a version can be taken (`Keeper.shortest_interval`).

    Background threads can be made to yield: by `nice`, and by `background_share`, a part of a core
    that they keep to on average, in this process and in each server. They hurry while pushes wait
    for them, in this process also while training waits for the save. A save then lasts longer, and
    more rows change before it has copied them, so that pushes copy them: it is for cores that
    others need, and makes the stall longer, not shorter.

    `read_depth` is how many reads of a version are under way at once when one is brought back (16
    unless the store says otherwise, 64 for object stores), and `read_nbytes` how many bytes they
    and what was not used yet take together (8 MiB for each read, 256 MiB at most). Servers that
    read versions themselves use what suits the store. From a local disk a thread reads whole
    batches of a grid, up to 128 parts of them at once: there `read_depth` says how many such
    threads there may be, and how long a part is.

    A background save that fails is warned of, and its rows are in the next one; after
    `max_failures` in a row the next call raises.
    """

    overlap: Literal["wait", "cancel"] = "wait"
    threads: int = 2
    nice: int = 0
    piece_nbytes: int = PIECE_NBYTES
    buffer_nbytes: int = 256 * 2**20
    max_failures: int = 3
    retention: RetentionPolicy = DEFAULT_RETENTION
    grace: timedelta = timedelta(minutes=10)
    most_mb_per_second: float | None = None
    mirror_mb_per_second: float | None = None
    background_share: float | None = None
    read_depth: int | None = None
    read_nbytes: int | None = None

    def __post_init__(self) -> None:
        config.check(self)
        for name in ("threads", "piece_nbytes", "buffer_nbytes", "max_failures"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {getattr(self, name)}")
        check_rate(self.most_mb_per_second)
        check_rate(self.mirror_mb_per_second, "mirror_mb_per_second")
        check_share(self.background_share)
        self.reading(None)

    def reading(self, store: BlobStore | None) -> Reading:
        """How much of a store is read at once."""
        return Reading.of(store, self.read_depth, self.read_nbytes)
