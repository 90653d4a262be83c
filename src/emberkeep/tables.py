"""What a user says about tables: their rows, how rows start, and how they are optimized.

Specs are frozen and validate themselves; a wrong value is refused when it is written down, before
any memory is taken.
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from itertools import product
from numbers import Real
from typing import Any, ClassVar, Literal

from emberkeep.config import size
from emberkeep.errors import ConfigError

MAX_SLOTS = 2**32 - 2


def _plain_numbers(spec: object, names: Sequence[str]) -> None:
    """Refuses what is no number, and makes those of numpy plain: specs are stored as JSON."""
    for name in names:
        value = getattr(spec, name)
        plain = isinstance(value, int | float)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ConfigError(f"{type(spec).__name__}: {name} must be a number, not {value!r}")
        if not plain:
            object.__setattr__(spec, name, float(value))


def _floats(spec: object, names: Sequence[str]) -> None:
    """Makes numbers floats: 1 and 1.0 are written differently, and must not make two specs."""
    _plain_numbers(spec, names)
    for name in names:
        try:
            object.__setattr__(spec, name, float(getattr(spec, name)))
        except OverflowError:
            raise ConfigError(f"{type(spec).__name__}: {name} is too large for a float") from None


@dataclass(frozen=True, slots=True)
class Uniform:
    """Initial weights spread evenly over [low, high)."""

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        _floats(self, ("low", "high"))
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ConfigError(f"Uniform needs finite low <= high, not {self.low} and {self.high}")


@dataclass(frozen=True, slots=True)
class Normal:
    """Normally distributed initial weights."""

    mean: float = 0.0
    std: float = 0.05

    def __post_init__(self) -> None:
        _floats(self, ("mean", "std"))
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std >= 0):
            raise ConfigError(
                f"Normal needs a finite mean and std >= 0, not {self.mean}, {self.std}"
            )


Initial = Uniform | Normal


@dataclass(frozen=True, slots=True, init=False)
class Tier:
    """Rows live in files below `path`, on any file system; the hot ones in `memory`.

    `memory` (bytes, or "2GB", "512 MiB") is shared by all tables that name the same tier, over all
    shards, by the size of their rows. It must hold the rows of one batch. Beside it every row
    costs 8 bytes in memory, whether it is hot or not.

    One process uses a path at a time: its lock keeps others out. A file system without locks is
    refused unless `exclusive` says that no other process will ever use that path.
    """

    path: str
    _: KW_ONLY
    memory: int
    exclusive: bool = False

    def __init__(
        self, path: str | os.PathLike[str], *, memory: int | str, exclusive: bool = False
    ) -> None:
        if isinstance(memory, str):
            try:
                memory = size(memory)
            except ValueError:
                raise ConfigError(
                    f"Tier: memory takes bytes or a text such as '2GB', not {memory!r}"
                ) from None
        if not _is_count(memory):
            raise ConfigError(f"Tier: memory must be a number of bytes above 0, not {memory!r}")
        if not isinstance(path, str | bytes | os.PathLike) or not os.fspath(path):
            raise ConfigError(f"Tier: path must name a directory, not be {path!r}")
        if not isinstance(exclusive, bool):
            raise ConfigError(f"Tier: exclusive is True or False, not {exclusive!r}")
        object.__setattr__(self, "path", os.path.abspath(os.path.expanduser(os.fsdecode(path))))
        object.__setattr__(self, "memory", memory)
        object.__setattr__(self, "exclusive", exclusive)


@dataclass(frozen=True, slots=True)
class Table:
    """A set of rows named by an integer id.

    With `rows=N` the table is *fixed*: its ids are 0..N-1. With `rows=None, capacity=M` it is
    *dynamic*: any 64-bit id, at most M of them; an id takes its place when it is first trained.
    A full dynamic table refuses new ids (`on_full="error"`) or gives up the rows that were
    trained least recently (`"evict_oldest"`).

    `features` are the names by which a batch brings ids of this table; several features may share
    one table. `pooling` says how the rows of one bag become one vector. `padding_idx` is an id that
    stands for nothing: it adds nothing to a bag, counts in no mean, and its row is never trained.
    `optimizer` trains this table instead of the module's. With a `tier` the rows live in files, and
    the table may be larger than memory.
    """

    name: str
    _: KW_ONLY
    dim: int
    rows: int | None = None
    capacity: int | None = None
    features: Sequence[str] = ()
    pooling: Literal["sum", "mean", "max"] = "sum"
    init: Initial = field(default_factory=Uniform)
    on_full: Literal["error", "evict_oldest"] = "error"
    tier: Tier | None = None
    padding_idx: int | None = None
    optimizer: Optimizer | None = None

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ConfigError(f"a table needs a name, not {self.name!r}")
        where = f"table {self.name!r}"
        if not _is_count(self.dim):
            raise ConfigError(f"{where}: dim must be a whole number from 1 up, not {self.dim!r}")
        if self.rows is None:
            if not _is_count(self.capacity):
                raise ConfigError(
                    f"{where}: a dynamic table (rows=None) needs capacity=, the most rows it may "
                    f"hold, not {self.capacity!r}"
                )
            assert self.capacity is not None
            if self.capacity > MAX_SLOTS:
                raise ConfigError(f"{where}: capacity is at most {MAX_SLOTS} rows per table")
        elif not _is_count(self.rows):
            raise ConfigError(f"{where}: rows must be a whole number from 1 up, not {self.rows!r}")
        elif self.capacity is not None:
            raise ConfigError(f"{where}: capacity= is for dynamic tables; leave it out, or rows=")
        elif self.on_full != "error":
            raise ConfigError(f"{where}: on_full= is for dynamic tables; a fixed one is never full")
        if self.pooling not in ("sum", "mean", "max"):
            raise ConfigError(
                f"{where}: pooling must be 'sum', 'mean' or 'max', not {self.pooling!r}"
            )
        if not isinstance(self.init, Uniform | Normal):
            raise ConfigError(
                f"{where}: init= takes emberkeep.Uniform(...) or emberkeep.Normal(...), not "
                f"{self.init!r}"
            )
        if not isinstance(self.tier, Tier | None):
            raise ConfigError(
                f"{where}: tier= takes emberkeep.Tier(path, memory=...), not {self.tier!r}"
            )
        if self.optimizer is not None and not isinstance(self.optimizer, Optimizer):
            raise ConfigError(
                f"{where}: optimizer= takes a spec such as emberkeep.Adagrad(lr=0.02), not "
                f"{self.optimizer!r}"
            )
        self._check_padding(where)
        if self.on_full not in ("error", "evict_oldest"):
            raise ConfigError(
                f"{where}: on_full must be 'error' or 'evict_oldest', not {self.on_full!r}"
            )
        if isinstance(self.features, str):
            raise ConfigError(f"{where}: features must be a list of names, not a string")
        features = tuple(self.features or ())
        if not all(isinstance(name, str) and name for name in features):
            raise ConfigError(f"{where}: features must be names, not {list(features)}")
        object.__setattr__(self, "features", features or (self.name,))

    def _check_padding(self, where: str) -> None:
        padding, rows = self.padding_idx, self.rows
        if padding is None:
            return
        if isinstance(padding, bool) or not hasattr(padding, "__index__"):
            raise ConfigError(f"{where}: padding_idx is an id, not {padding!r}")
        padding = operator.index(padding)  # of numpy's integers, too
        object.__setattr__(self, "padding_idx", padding)
        if rows is not None:
            if not -rows <= padding < rows:
                raise ConfigError(
                    f"{where}: padding_idx={padding} is outside of its {rows} rows; a dynamic "
                    "table (rows=None) can have any"
                )
            # From the end, as torch counts it.
            object.__setattr__(self, "padding_idx", padding % rows)
        elif not -(2**63) <= padding < 2**63:
            raise ConfigError(f"{where}: padding_idx={padding} is no id: those have 64 bits")

    def trained_by(self, default: Optimizer) -> Optimizer:
        """The table's own optimizer, or the module's."""
        return default if self.optimizer is None else self.optimizer

    @property
    def dynamic(self) -> bool:
        return self.rows is None

    @property
    def slots(self) -> int:
        """The rows that the whole table can hold."""
        slots = self.capacity if self.rows is None else self.rows
        assert slots is not None
        return slots

    def slots_on(self, shard: int, shards: int) -> int:
        """The rows of this table that one of `shards` shards can hold."""
        if self.rows is not None:
            return (self.rows - shard + shards - 1) // shards
        # A mixed hash spreads ids evenly but not exactly: leave room for the fullest shard.
        share = self.slots / shards
        return self.slots if shards == 1 else min(self.slots, math.ceil(share + 6 * share**0.5))

    def origin(self, seed: int) -> str:
        """Where untrained rows come from: they are stored nowhere, so a load must agree on it."""
        return self._origin(seed, str(self.init))

    def earlier_origins(self, seed: int) -> frozenset[str]:
        """What `origin` was in earlier releases for a model that wrote 1 and not 1.0: such states
        and files are those of this table."""
        given = asdict(self.init)
        spellings = [
            [f"{name}={value}", f"{name}={int(value)}"]
            if value.is_integer()
            else [f"{name}={value}"]
            for name, value in given.items()
        ]
        kind = type(self.init).__name__
        return frozenset(
            self._origin(seed, f"{kind}({', '.join(spelling)})") for spelling in product(*spellings)
        ) - {self.origin(seed)}

    def _origin(self, seed: int, init: str) -> str:
        text = f"{self.key(seed)} {init} {self.dynamic}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def describe_origin(self, seed: int) -> dict[str, Any]:
        """`origin` as plain data: all that a reader without the table needs to compute such rows.

        `origin_from` reads it.
        """
        kind = "normal" if isinstance(self.init, Normal) else "uniform"
        return {"key": f"{self.key(seed):016x}", "init": kind, **asdict(self.init)}

    def key(self, seed: int) -> int:
        """What the initial values of this table's rows are keyed by: the seed and the name."""
        text = f"{seed}:{self.name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def origin_from(described: Mapping[str, Any]) -> tuple[int, Initial]:
    """The inverse of `Table.describe_origin`: what initial values are keyed by, and how spread."""
    settings = dict(described)
    key = int(settings.pop("key"), 16)
    kind: type[Initial] = Normal if settings.pop("init") == "normal" else Uniform
    return key, kind(**settings)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_tables(tables: Sequence[Table]) -> tuple[Table, ...]:
    """The tables of one model: at least one, names and features all different."""
    if not tables:
        raise ConfigError("at least one table is needed")
    for what, names in (
        ("table", [table.name for table in tables]),
        ("feature", [name for table in tables for name in table.features]),
    ):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"{what} names must differ; given twice: {', '.join(twice)}")
    return tuple(tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """How rows are updated. `max_norm` scales a row back to that norm when it is updated."""

    lr: float
    max_norm: float | None = None

    name: ClassVar[str]

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if str(f.type).startswith("float")]
        _plain_numbers(self, [n for n in given if n != "max_norm" or self.max_norm is not None])
        self._check("lr", self.lr >= 0, "0 or more")
        self._check("max_norm", self.max_norm is None or self.max_norm > 0, "above 0")

    def _check(self, field_name: str, holds: bool, wanted: str) -> None:
        value = getattr(self, field_name)
        finite = value is None or all(
            math.isfinite(v) for v in (value if isinstance(value, tuple) else (value,))
        )
        if not (holds and finite):
            raise ConfigError(
                f"{type(self).__name__}: {field_name} must be {wanted}, not {value!r}"
            )

    def planes(self, dim: int) -> dict[str, int]:
        """The planes that a row has beside its weight, and how wide each is."""
        return {}

    def initial(self, plane: str) -> float:
        """The value of a plane of a row that was never trained; 0 for those that are not the
        optimizer's, so that such a row has no age."""
        return 0.0

    def describe(self) -> dict[str, object]:
        """The spec as plain data; `optimizer_from` makes it a spec again."""
        return {"optimizer": self.name, **{f.name: getattr(self, f.name) for f in fields(self)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(Optimizer):
    """Plain gradient descent; equals `torch.optim.SGD` with sparse gradients."""

    name: ClassVar[str] = "sgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum(Optimizer):
    """Lazy momentum: only rows that were looked up move.

    Torch's sparse momentum also moves rows that were not; no increment could follow that.
    """

    name: ClassVar[str] = "momentum"
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        if not isinstance(self.nesterov, bool):
            raise ConfigError(f"Momentum: nesterov is True or False, not {self.nesterov!r}")
        self._check("momentum", 0 <= self.momentum < 1, "from 0 to below 1")

    def planes(self, dim: int) -> dict[str, int]:
        return {"momentum": dim}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(Optimizer):
    """Adagrad; equals `torch.optim.Adagrad` with sparse gradients."""

    name: ClassVar[str] = "adagrad"
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        self._check("eps", self.eps > 0, "above 0")
        self._check("initial_accumulator_value", self.initial_accumulator_value >= 0, "0 or more")

    def planes(self, dim: int) -> dict[str, int]:
        return {"accumulator": dim}

    def initial(self, plane: str) -> float:
        return self.initial_accumulator_value if plane == "accumulator" else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator per row: the mean square of the row's gradient, summed."""

    name: ClassVar[str] = "row_wise_adagrad"

    def planes(self, dim: int) -> dict[str, int]:
        return {"accumulator": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(Optimizer):
    """Adam on the rows of each step.

    `step="table"` counts the steps of the table and equals `torch.optim.SparseAdam`;
    `step="row"` counts each row's own updates, so a rare row gets its full bias correction.
    """

    name: ClassVar[str] = "adam"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    step: Literal["table", "row"] = "table"

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        try:
            first, second = map(float, self.betas)
        except (TypeError, ValueError):
            raise ConfigError(f"Adam: betas must be two numbers, not {self.betas!r}") from None
        object.__setattr__(self, "betas", (first, second))
        self._check("betas", all(0 <= beta < 1 for beta in self.betas), "from 0 to below 1")
        self._check("eps", self.eps > 0, "above 0")
        if self.step not in ("table", "row"):
            raise ConfigError(f"Adam: step must be 'table' or 'row', not {self.step!r}")

    def planes(self, dim: int) -> dict[str, int]:
        moments = {"first_moment": dim, "second_moment": dim}
        return {**moments, "step": 1} if self.step == "row" else moments


OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.name: kind for kind in (SGD, Momentum, Adagrad, RowWiseAdagrad, Adam)
}


def optimizer_from(described: dict[str, object]) -> Optimizer:
    """The inverse of `Optimizer.describe`; an unknown optimizer or setting is refused."""
    settings = dict(described)
    name = settings.pop("optimizer", None)
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise ConfigError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, not {name!r}")
    kind = OPTIMIZERS[name]
    known = [f.name for f in fields(kind)]
    for setting in settings:
        if setting not in known:
            raise ConfigError(f"{name} has no setting {setting!r}; it has {', '.join(known)}")
    return kind(**settings)  # type: ignore[arg-type]
