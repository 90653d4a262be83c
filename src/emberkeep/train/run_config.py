"""What a training run is made of, as settings that are read from TOML.

Nothing here imports torch: settings are checked, printed and refused before it loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from emberkeep import config
from emberkeep.config import setting
from emberkeep.errors import ConfigError
from emberkeep.tables import Optimizer, Tier, optimizer_from
from emberkeep.train.checkpoint_settings import CheckpointSettings

if TYPE_CHECKING:
    from emberkeep.checkpoint.overheads import Job
    from emberkeep.cluster.failure_schedule import Failure
    from emberkeep.cluster.remote.timing import Timing
    from emberkeep.erasure.codes import Parity
    from emberkeep.strategies import Strategy

_FAILURE = re.compile(r"(\d+(?:\s*,\s*\d+)*)\s+at\s+(\d+)(?:\s+(pull|push))?")

# fmt: off

@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Where samples come from; the last ones are held out to judge the model."""

    source: Literal["synthetic", "criteo", "parquet"] = setting("where samples come from")
    paths: tuple[str, ...] = setting(
        "files in reading order, directories or patterns, relative to the working directory "
        "(criteo, parquet)", default=(), path=True)
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
    pooling: Literal["sum", "mean", "max"] | None = setting(
        "how several ids of one sample become one vector; sum if not set", default=None)

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
class TableOptimizerSettings:
    """How rows of one table are updated."""

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
        given = {key: value for key, value in asdict(self).items()
                 if value is not None and key != "tables"}
        try:
            return optimizer_from({"optimizer": given.pop("kind"), **given})
        except ConfigError as error:
            raise ConfigError(f"kind: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptimizerSettings(TableOptimizerSettings):
    """How rows of the tables are updated."""

    tables: Mapping[str, TableOptimizerSettings] | None = setting(
        "of single tables, others than these: a section [optimizer.tables.NAME] each",
        default=None)


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
class JobSettings:
    """What is known of a job: how often to save for partial recovery follows from it."""

    mtbf: str | None = setting(
        "mean time between failures of the whole job; nothing follows if not set", default=None)
    duration: str | None = setting("how long the job takes", default=None)
    save: str | None = setting("how long training stands still for a version", default=None)
    load: str | None = setting("how long loading takes", default=None)
    reschedule: str = setting("until there is a new machine", default="0s")
    together: int = setting("shards that one failure takes", default=1, least=1)

    def __post_init__(self) -> None:
        config.check(self)
        times = [getattr(self, key) for key in ("mtbf", "duration", "save", "load")]
        if any(times) and not all(times):
            raise ConfigError("a job has mtbf, duration, save and load: set all of them, or none")
        self.job(shards=self.together)

    def job(self, *, shards: int) -> Job | None:
        """The job on so many shards; None where nothing is known."""
        from emberkeep.checkpoint.overheads import Job

        if self.mtbf is None:
            return None
        times: dict[str, Any] = {}
        for key in ("mtbf", "duration", "save", "load", "reschedule"):
            try:
                times[key] = config.duration(getattr(self, key))
            except ValueError:
                raise ConfigError(
                    f"{key} is a duration such as 28h or 5min, not {getattr(self, key)!r}"
                ) from None
        return Job(**times, shards=shards, failing_together=self.together)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Tables larger than memory: rows in files, the hot ones in memory."""

    path: str | None = setting(
        "a directory on a fast disk in which rows live; in memory alone if not set", default=None,
        path=True)
    memory: str = setting(
        "for the hot rows of all tables, \"2GB\": at least those of one batch; with servers, that "
        "of each of them", default="2GB")
    every: str | None = setting(
        "how often the run becomes durable there, \"500 steps\", \"20min\"; it is not kept if not "
        "set", default=None)
    exclusive: bool = setting(
        "no other process will ever use path: admits a file system without locks", default=False)
    must_exist: bool = setting(
        "refuse to start over where no step is durable: a mount may be missing", default=False)

    def __post_init__(self) -> None:
        config.check(self)
        if self.must_exist and self.every is None:
            raise ConfigError("must_exist is for a run that is kept in its tier: set every")
        if self.path is None:
            if self.exclusive:
                raise ConfigError("exclusive is for path: set it")
        else:
            self.spec()
        if self.every is not None:
            from emberkeep.strategies import schedule

            schedule(self.every)

    def spec(self) -> Tier | None:
        """The tier; None where rows live in memory."""
        if self.path is None:
            return None
        return Tier(self.path, memory=self.memory, exclusive=self.exclusive)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Where rows live."""

    kind: Literal["local", "servers", "ray", "connect"] = setting(
        "in this process, on servers of this machine, on servers placed by Ray, or on those at "
        "addresses", default="local")
    shards: int = setting("shards, each of which can fail alone", default=1, least=1)
    workers: int = setting("processes that train together (ray)", default=1, least=1)
    address: str | None = setting(
        "of a Ray cluster that exists; a local one is started if not set (ray)", default=None)
    name: str | None = setting(
        "of servers that `emberkeep cluster up` has started (ray)", default=None)
    addresses: tuple[str, ...] = setting("of the servers, in shard order (connect)", default=())
    token_file: str | None = setting(
        "holds the token of the servers; EMBERKEEP_TOKEN if not set (connect)", default=None,
        path=True)
    certificate: str | None = setting(
        "of this process, a PEM file (connect)", default=None, path=True)
    key: str | None = setting("of the certificate, a PEM file (connect)", default=None, path=True)
    authority: str | None = setting(
        "who signed the servers' certificates, a PEM file (connect)", default=None, path=True)
    on_restart: Literal["rewind", "adopt"] = setting(
        "what becomes of rows that live servers hold of an earlier trainer: they go back to the "
        "newest version, or stay, and samples are applied twice (connect, ray)", default="rewind")
    memory: str | None = setting(
        "of its node that each server has set aside, such as 48GB; if not set what all rows take, "
        "or with a tier what its memory and 8 bytes for each do (ray)", default=None)
    disk: str | None = setting(
        "of its node that each server with a tier has set aside, of what nodes name as "
        "emberkeep_disk (ray)", default=None)
    lease: str = setting(
        "how long a silent server is waited for, where another can take its place", default="15s")
    patience: str = setting(
        "how long the run waits for what somebody else has to do, such as starting a server again",
        default="15min")

    def __post_init__(self) -> None:
        config.check(self)
        if self.kind != "ray":
            for key in ("workers", "address", "name", "memory", "disk"):
                if getattr(self, key) not in (None, 1):
                    raise ConfigError(f'{key} is for kind = "ray"')
        if self.on_restart == "adopt" and self.kind in ("local", "servers"):
            raise ConfigError('on_restart is for kind = "connect" or "ray": others end with a run')
        if self.kind != "connect":
            for key in ("token_file", "certificate", "key", "authority"):
                if getattr(self, key) is not None:
                    raise ConfigError(f'{key} is for kind = "connect"')
        if (self.kind == "connect") != bool(self.addresses):
            raise ConfigError('addresses are for kind = "connect", which needs them')
        if self.kind == "connect" and len(self.addresses) != self.shards:
            raise ConfigError(
                f"there are {len(self.addresses)} addresses for {self.shards} shards")
        for key in ("lease", "patience"):
            try:
                wait = config.duration(getattr(self, key))
            except ValueError:
                wait = timedelta(0)
            if not wait:
                raise ConfigError(
                    f"{key} is a duration such as 30s or 15min, not {getattr(self, key)!r}")

    def timing(self) -> Timing:
        """How long a cluster of servers waits."""
        from emberkeep.cluster.remote.timing import Timing

        lease, patience = config.duration(self.lease), config.duration(self.patience)
        return Timing(deadline=min(Timing().deadline, lease), lease=lease, patience=patience)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParitySettings:
    """How rows are protected by other shards, so that a lost one comes back with nothing lost."""

    k: int | None = setting(
        "rows on different shards that share parity rows; no parity if not set", default=None,
        least=1)
    r: int = setting("parity rows for every k: shards that may be lost at once", default=1, least=1)
    background: bool = setting(
        "bring parity up to date beside training, instead of within each step", default=False)
    chunk_rows: int = setting("rows that are rebuilt at a time", default=32768, least=1)
    rebuild_share: float = setting(
        "about how much of the time a rebuild takes", default=0.2, above=0)
    unprotected: Literal["go_on", "stop"] = setting(
        "whether training goes on while parity cannot be kept, or stops", default="go_on")

    def __post_init__(self) -> None:
        config.check(self)
        self.spec()

    def spec(self) -> Parity | None:
        """What these settings mean; None without parity."""
        from emberkeep.erasure.codes import Parity

        if self.k is None:
            return None
        return Parity(
            k=self.k, r=self.r, background=self.background, chunk_rows=self.chunk_rows,
            rebuild_share=self.rebuild_share, unprotected=self.unprotected,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSettings:
    """Shards that are made to fail, to see what that costs."""

    at: tuple[str, ...] = setting(
        "shards and the step in which they fail, \"2 at 40\", \"0, 3 at 100 push\"", default=())
    count: int | None = setting("so many random failures", default=None, least=0)
    mean_steps: float | None = setting(
        "random failures, one every so many steps on average", default=None, above=0)
    together: int = setting("shards that a random failure takes", default=1, least=1)
    shape: float = setting(
        "of the gamma distribution of the gaps; 1: exponential, less: bursts", default=1.0, above=0)
    seed: int = setting("of random failures", default=0, least=0)

    def __post_init__(self) -> None:
        config.check(self)
        if self.count is not None and self.mean_steps is not None:
            raise ConfigError("count and mean_steps are two ways to say it: leave one out")
        self.given()

    @property
    def any(self) -> bool:
        return bool(self.at or self.count or self.mean_steps)

    def given(self) -> list[Failure]:
        """Those that were written down."""
        from emberkeep.cluster.failure_schedule import Failure

        found = []
        for text in self.at:
            match = _FAILURE.fullmatch(text.strip())
            if match is None:
                raise ConfigError(
                    f"at: {text!r} is no failure: write '2 at 40' or '0, 3 at 100 push'")
            shards = tuple(int(shard) for shard in match[1].split(","))
            found.append(Failure(
                shards=shards, step=int(match[2]), when="push" if match[3] == "push" else "pull"))
        return found

    def schedule(self, *, shards: int, steps: int) -> list[Failure]:
        """All failures of a run of so many steps."""
        from emberkeep.cluster.failure_schedule import random_failures

        found = self.given()
        if self.count is not None or self.mean_steps is not None:
            found += random_failures(
                shards=shards, steps=steps, seed=self.seed, count=self.count,
                mean_steps=self.mean_steps, together=self.together, shape=self.shape,
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A training run. The same settings give the same bits."""

    data: DataSettings
    tables: TableSettings = field(default_factory=TableSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optimizer: RowOptimizerSettings = field(default_factory=RowOptimizerSettings)
    dense_optimizer: DenseOptimizerSettings = field(default_factory=DenseOptimizerSettings)
    run: RunSettings = field(default_factory=RunSettings)
    tier: TierSettings = field(default_factory=TierSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    parity: ParitySettings = field(default_factory=ParitySettings)
    failures: FailureSettings = field(default_factory=FailureSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    job: JobSettings = field(default_factory=JobSettings)

    def __post_init__(self) -> None:
        if self.data.source == "synthetic":
            if self.tables.rows is not None:
                raise ConfigError("tables.rows is not used by synthetic data; set data.rows_total")
        elif self.tables.kind == "fixed" and self.tables.rows is None:
            raise ConfigError("tables.rows must say how many ids categories are hashed to")
        highest = max((failure.shards[-1] for failure in self.failures.given()), default=0)
        if highest >= self.cluster.shards or self.failures.together > self.cluster.shards:
            raise ConfigError(
                f"failures names more shards than cluster.shards has, {self.cluster.shards}")
        if self.failures.any and self.cluster.kind != "local":
            raise ConfigError('failures are made to happen on kind = "local"; kill servers instead')
        if self.job.mtbf is not None:
            if self.checkpoint.path is None:
                raise ConfigError("[job] needs versions: set checkpoint.path")
            self.strategy()
        if self.run.batch_size % self.cluster.workers:
            raise ConfigError(
                f"run.batch_size must be a multiple of cluster.workers, {self.cluster.workers}")
        if self.checkpoint.accuracy_budget is not None and self.cluster.workers > 1:
            raise ConfigError(
                "checkpoint.accuracy_budget is measured in a run of one process: leave it out with "
                "cluster.workers, and set checkpoint.table_bits")
        parity = self.parity.spec()
        if parity is not None:
            parity.check_shards(self.cluster.shards)
            if self.tier.path is not None:
                raise ConfigError(
                    "parity over a tier would itself be larger than memory: leave out parity.k or "
                    "tier.path")
        elif (self.failures.any and self.checkpoint.recovery is None
                and self.tier.every is None):
            raise ConfigError(
                "failures end the run unless checkpoint.recovery is set, full or partial, "
                "tier.every, or parity.k")
        up = self.cluster.kind == "connect" or self.cluster.name is not None
        if self.tier.every is not None and self.tier.path is None and not up:
            raise ConfigError("tier.every needs files: set tier.path")
        if self.tier.path is not None and self.cluster.kind == "connect":
            raise ConfigError(
                'with cluster.kind = "connect" the tier is that of the servers: leave out '
                "tier.path, and start them with emberkeep serve --tier")
        if (self.tier.every is not None and self.cluster.kind != "local"
                and self.checkpoint.path is None):
            raise ConfigError(
                "whether a batch of servers took place is decided beside versions: set "
                "checkpoint.path with tier.every")
        if self.two_levels:
            if self.cluster.workers > 1:
                raise ConfigError(
                    "tier.every is for one process that trains: leave it out with cluster.workers, "
                    "and the tiers are memory alone")
            self.strategy()

    @property
    def two_levels(self) -> bool:
        """Whether batches are kept in tiers, and versions in a repository."""
        return self.tier.every is not None and self.checkpoint.path is not None

    def strategy(self) -> Strategy:
        """How the run is saved and recovered."""
        from emberkeep.checkpoint.recovery import Recovery
        from emberkeep.strategies import schedule

        given = self.checkpoint.strategy(self.job.job(shards=self.cluster.shards))
        if not self.two_levels:
            return given
        assert self.tier.every is not None
        return replace(
            given, schedule=schedule(self.tier.every), remote=given.schedule,
            recovery=given.recovery or Recovery())  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

# fmt: on


DEMO = RunConfig(
    data=DataSettings(source="synthetic", samples=1_200_000, rows_total=400_000),
    model=ModelSettings(bottom=(128, 64), top=(128, 64)),
    run=RunSettings(compare=True),
)
"""Everything in this process, about a minute on two cores."""


def load(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Settings from a TOML file, with `section.key=value` overrides."""
    return config.load(RunConfig, path, overrides)


def demo(overrides: Iterable[str] = ()) -> RunConfig:
    """The settings of the demo, with overrides."""
    return config.parse(RunConfig, config.to_toml(DEMO), source="--demo", overrides=overrides)
