"""What a training run is made of, as settings that are read from TOML.

Nothing here imports torch: settings are checked, printed and refused before it loads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from emberkeep import config
from emberkeep.config import setting
from emberkeep.errors import ConfigError
from emberkeep.tables import Optimizer, optimizer_from

if TYPE_CHECKING:
    from emberkeep.strategies import Preset

# fmt: off

@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Where samples come from; the last ones are held out to judge the model."""

    source: Literal["synthetic", "criteo", "parquet"] = setting("where samples come from")
    paths: tuple[str, ...] = setting(
        "files in reading order, relative to the working directory (criteo, parquet)", default=())
    samples: int | None = setting("use so many samples, all if not set", default=None, least=2)
    test_fraction: float = setting(
        "the share held out at the end for AUC and log-loss", default=0.1, above=0, below=1)
    rows_total: int = setting(
        "rows of all fields together (synthetic)", default=1_000_000, least=104)
    skew: Literal["criteo", "retail", "uniform"] = setting(
        "how unevenly ids are looked up (synthetic)", default="criteo")
    label: str = setting("the label column (parquet)", default="label")
    dense: tuple[str, ...] = setting("dense columns (parquet)", default=())
    log: tuple[str, ...] = setting(
        "dense columns that become their logarithm (parquet)", default=())
    categories: tuple[str, ...] = setting("id columns (parquet)", default=())
    on_malformed: Literal["error", "skip"] = setting(
        "what a malformed line does (criteo)", default="error")

    def __post_init__(self) -> None:
        config.check(self)
        if self.source == "synthetic":
            if self.paths:
                raise ConfigError('paths are not read when source is "synthetic": leave one out')
            if self.samples is None:
                raise ConfigError("samples must be set for synthetic data, which has no end")
        elif not self.paths:
            raise ConfigError(f"paths must name the files that {self.source} data is read from")
        if self.source == "parquet" and not (self.dense and self.categories):
            raise ConfigError("dense and categories must each name at least one parquet column")
        if self.source != "parquet" and (self.dense or self.log or self.categories):
            raise ConfigError(f"dense, log and categories belong to parquet, not {self.source}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSettings:
    """One embedding table per field."""

    dim: int = setting("width of a row", default=16, least=1)
    kind: Literal["fixed", "dynamic"] = setting(
        "fixed: categories are hashed to `rows` ids; dynamic: any id finds a row", default="fixed")
    rows: int | None = setting(
        "rows of each table; synthetic data knows them itself (fixed)", default=None, least=2)
    capacity: int | None = setting(
        "most rows that each table holds (dynamic)", default=None, least=1)
    on_full: Literal["error", "evict_oldest"] = setting(
        "what a full dynamic table does with a new id", default="error")

    def __post_init__(self) -> None:
        config.check(self)
        if self.kind == "dynamic" and self.capacity is None:
            raise ConfigError("capacity must be set for dynamic tables")
        if self.kind == "dynamic" and self.rows is not None:
            raise ConfigError("rows is for fixed tables; dynamic ones take capacity")
        if self.kind == "fixed" and self.capacity is not None:
            raise ConfigError('capacity is for kind = "dynamic"; fixed tables take rows')
        if self.kind == "fixed" and self.on_full != "error":
            raise ConfigError('on_full is for kind = "dynamic"; a fixed table is never full')


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The network over the embeddings."""

    kind: Literal["dlrm", "deepfm", "pnn"] = setting("which network", default="dlrm")
    bottom: tuple[int, ...] = setting(
        "layers over the dense columns, before the last one, which is dim wide (dlrm)",
        default=(512, 256, 64), least=1)
    top: tuple[int, ...] = setting(
        "layers before the logit (dlrm; the deep layers of deepfm and pnn)",
        default=(512, 256), least=1)

    def __post_init__(self) -> None:
        config.check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptimizerSettings:
    """How rows of the tables are updated."""

    kind: Literal["sgd", "momentum", "adagrad", "row_wise_adagrad", "adam"] = setting(
        "which rule", default="row_wise_adagrad")
    lr: float = setting("learning rate", default=0.02, above=0)
    momentum: float | None = setting("share of the last step (momentum)", default=None)
    betas: tuple[float, ...] | None = setting("decay of the two moments (adam)", default=None)
    eps: float | None = setting("added to the root (adagrad, adam)", default=None)
    step: Literal["table", "row"] | None = setting("what counts steps (adam)", default=None)

    def __post_init__(self) -> None:
        config.check(self)
        self.spec()

    def spec(self) -> Optimizer:
        """The optimizer; a setting that it does not have is refused."""
        given = {key: value for key, value in asdict(self).items() if value is not None}
        try:
            return optimizer_from({"optimizer": given.pop("kind"), **given})
        except ConfigError as error:
            raise ConfigError(f"kind: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseOptimizerSettings:
    """How the parameters of the network are updated."""

    kind: Literal["sgd", "adagrad", "adam"] = setting("which of torch's rules", default="adam")
    lr: float = setting("learning rate", default=0.001, above=0)

    def __post_init__(self) -> None:
        config.check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How the run goes."""

    batch_size: int = setting("samples per step", default=2048, least=1)
    seed: int = setting("of initial values and synthetic data", default=0, least=0)
    compare: bool = setting(
        "also train the network without embeddings, to show what they bring", default=False)

    def __post_init__(self) -> None:
        config.check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """What is saved beside training, so that a run can be stopped anywhere and resumed."""

    path: str | None = setting(
        "where versions are kept: a directory or s3://, gs://, az://; nothing is saved if not set",
        default=None)
    every: str = setting("how often: \"500 steps\", \"30min\", \"2h\"", default="30min")
    layout: Literal["full", "one_shot", "intermittent", "consecutive"] = setting(
        "what a version holds", default="intermittent")
    bits: int | None = setting(
        "quantize weights to 8, 4, 3 or 2 bits; exact if not set", default=None)
    expected_restores: int | None = setting(
        "choose the bits for so many restores", default=None, least=0)
    keep: int = setting("how many versions are kept", default=3, least=1)

    def __post_init__(self) -> None:
        config.check(self)
        if self.path is not None:
            self.preset()

    def preset(self) -> Preset:
        """What these settings mean; a combination that cannot work is refused."""
        from emberkeep.strategies import incremental

        return incremental(
            every=self.every,
            layout=self.layout,
            bits=self.bits,
            expected_restores=self.expected_restores,
            keep=self.keep,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A training run. The same settings give the same bits."""

    data: DataSettings
    tables: TableSettings = field(default_factory=TableSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optimizer: RowOptimizerSettings = field(default_factory=RowOptimizerSettings)
    dense_optimizer: DenseOptimizerSettings = field(default_factory=DenseOptimizerSettings)
    run: RunSettings = field(default_factory=RunSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)

    def __post_init__(self) -> None:
        if self.data.source == "synthetic":
            if self.tables.rows is not None:
                raise ConfigError("tables.rows is not used by synthetic data; set data.rows_total")
        elif self.tables.kind == "fixed" and self.tables.rows is None:
            raise ConfigError("tables.rows must say how many ids categories are hashed to")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

# fmt: on


DEMO = Settings(
    data=DataSettings(source="synthetic", samples=1_200_000, rows_total=400_000),
    model=ModelSettings(bottom=(128, 64), top=(128, 64)),
    run=RunSettings(compare=True),
)
"""Everything in this process, about a minute on two cores."""


def load(path: str | Path, overrides: Iterable[str] = ()) -> Settings:
    """Settings from a TOML file, with `section.key=value` overrides."""
    return config.load(Settings, path, overrides)


def demo(overrides: Iterable[str] = ()) -> Settings:
    """The settings of the demo, with overrides."""
    return config.parse(Settings, config.to_toml(DEMO), source="--demo", overrides=overrides)
