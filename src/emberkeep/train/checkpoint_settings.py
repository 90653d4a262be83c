"""What of a run is saved, where and how, as settings that are read from TOML.

Nothing here imports torch, as in `run_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from emberkeep import config
from emberkeep.config import setting
from emberkeep.errors import ConfigError

if TYPE_CHECKING:
    from emberkeep.checkpoint.overheads import Job
    from emberkeep.checkpoint.spec import SaveSettings, VersionSpec
    from emberkeep.checkpoint.widths import Widths
    from emberkeep.strategies import Strategy

# fmt: off

@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """What is saved beside training, so that a run can be stopped anywhere and resumed."""

    path: str | None = setting(
        "where versions are kept: a directory or s3://, gs://, az://; nothing is saved if not set",
        default=None, path=True)
    must_exist: bool = setting(
        "refuse to start over where there is no version: a mount may be missing", default=False)
    start_from: str | None = setting(
        "a repository whose newest version the run starts from while it has none of its own: what "
        "fits of it, the rest is named", default=None, path=True)
    map: Mapping[str, str] | None = setting(
        "names of tables and tensors there that are others here (start_from)", default=None)
    every: str | None = setting(
        "how often: \"500 steps\", \"30min\", \"2h\"; if not set every 30min, or what follows from "
        "[job] or recovery = \"auto\"", default=None)
    layout: Literal["full", "one_shot", "intermittent", "consecutive", "grid"] = setting(
        "what a version holds", default="intermittent")
    predictor: Literal["growth", "paper"] = setting(
        "when an intermittent layout starts over: growth expects increments to go on growing, "
        "paper decides as Check-N-Run does", default="growth")
    bits: int | None = setting(
        "quantize weights to 8, 4, 3 or 2 bits; exact if not set", default=None)
    table_bits: Mapping[str, int] | None = setting(
        "or bits of single tables, {user = 4, item = 8}; the others stay exact", default=None)
    expected_restores: int | None = setting(
        "choose the bits for so many restores", default=None, least=0)
    job_duration: str | None = setting(
        "how long the job will take, \"5d\": with mtbf it says how many restores to expect",
        default=None)
    mtbf: str | None = setting(
        "mean time between failures of the job, \"36h\" (job_duration), believed until some were "
        "seen (recovery auto)", default=None)
    accuracy_budget: float | None = setting(
        "measure the bits of each table instead: the share of the validation loss that restores "
        "may cost, such as 1e-4", default=None, above=0, below=1)
    calibrate_at: int | None = setting(
        "measure after this step; a tenth of the run if not set (accuracy_budget)", default=None,
        least=1)
    calibration_samples: int = setting(
        "measure on so many samples that come next (accuracy_budget)", default=16384, least=1)
    quantize_optimizer: bool = setting(
        "store accumulators and second moments in 8 bits, row-wise accumulators in 16",
        default=False)
    bins: int | None = setting(
        "steps in the search for the range of a row; the paper's if not set (4, 3, 2 bits)",
        default=None, least=1)
    range_ratio: float | None = setting(
        "how much of the range that search may give up; the paper's if not set (4, 3, 2 bits)",
        default=None, least=0)
    keep: int = setting("how many versions are kept", default=3, least=1)
    keep_for: str | None = setting(
        "also keep versions younger than this, \"14d\"", default=None)
    drop_after: str | None = setting(
        "keep no version longer than this, \"14d\", but for the newest and tagged ones",
        default=None)
    most_mb_per_second: float | None = setting(
        "write versions no faster than this, where many jobs share the storage", default=None,
        above=0)
    background_share: float | None = setting(
        "of a core, for all that saves do beside training; as much as is idle if not set",
        default=None, above=0)
    read_depth: int | None = setting(
        "reads at once when a version is brought back; 16 if not set, 64 from object stores",
        default=None, least=1)
    read_mb: int | None = setting(
        "how many MB these take together; 8 for each if not set, 256 at most (read_depth)",
        default=None, least=1)
    mirror: str | None = setting(
        "a second place: whole versions are copied there, and the newest of either is resumed",
        default=None, path=True)
    mirror_every: str | None = setting(
        "how often at most, \"2h\"; every version if not set (mirror)", default=None)
    mirror_mb_per_second: float | None = setting(
        "copy to the mirror no faster than this (mirror)", default=None, above=0)
    metrics_port: int | None = setting(
        "serve Prometheus metrics and health of the run on this port of the loopback interface",
        default=None, least=0)
    recovery: Literal["full", "partial", "auto"] | None = setting(
        "what happens when shards are lost; the run ends if not set; auto: the run plans itself",
        default=None)
    target: str | None = setting(
        "what may be lost, \"accuracy loss 0.01%\" or \"PLS 0.1\" (recovery auto)", default=None)
    max_interval: str | None = setting(
        "a version is wanted at least this often (recovery auto)", default=None)
    together: int | None = setting(
        "shards that one failure takes, believed until some were seen (recovery auto)",
        default=None, least=1)
    reschedule: str | None = setting(
        "until there is a new machine, \"3min\" (recovery auto)", default=None)
    pls: float | None = setting(
        "the portion of samples that may be lost; 0.1 with [job] (partial recovery)", default=None,
        least=0)
    accuracy_loss: float | None = setting(
        "or the AUC that may be lost, with slope (partial recovery)", default=None, least=0)
    slope: float | None = setting(
        "AUC lost per PLS of 1, as emberkeep emulate --sweep fraction fits it (partial, auto)",
        default=None, above=0)
    priority: Literal["mfu", "ssu", "scar"] | None = setting(
        "also save the rows that matter most, more often (partial recovery)", default=None)
    fraction: float = setting(
        "how many of all rows these are (priority)", default=0.125, above=0)
    period: int = setting(
        "pushes of which one is looked at (priority ssu)", default=2, least=1)
    most_pls: float | None = setting(
        "the portion of lost samples beyond which recovery is full; pls if not set (partial "
        "recovery)", default=None, least=0)

    def __post_init__(self) -> None:
        config.check(self)
        if self.recovery != "partial" and self.priority is not None:
            raise ConfigError('priority is for recovery = "partial": other recoveries need whole '
                              "versions")
        if self.recovery == "partial":
            for key in ("expected_restores", "job_duration", "accuracy_budget"):
                if getattr(self, key) is not None:
                    raise ConfigError(f"{key} is not for partial recovery: set bits")
        self._check_recovery()
        if self.metrics_port is not None and self.metrics_port > 65535:
            raise ConfigError(f"metrics_port is 0 to 65535, not {self.metrics_port}")
        if self.accuracy_budget is None and self.calibrate_at is not None:
            raise ConfigError("calibrate_at is for accuracy_budget: set that too")
        if self.mirror is None:
            for key in ("mirror_every", "mirror_mb_per_second"):
                if getattr(self, key) is not None:
                    raise ConfigError(f"{key} is for a mirror: set mirror")
        elif self.layout == "grid":
            raise ConfigError("a grid cannot be mirrored, since its rows move between the files of "
                              "its versions: set another layout, or leave mirror out")
        if self.path is not None:
            self.strategy()
        elif self.recovery is not None:
            raise ConfigError("recovery needs versions: set path")
        else:
            for key in ("must_exist", "mirror", "most_mb_per_second", "background_share",
                        "accuracy_budget", "table_bits", "read_depth", "read_mb"):
                if getattr(self, key):
                    raise ConfigError(f"{key} needs versions: set path")
            if self.start_from is not None:
                raise ConfigError("start_from needs a place for the versions of this run: set path")
        if self.map and self.start_from is None:
            raise ConfigError("map is for start_from: set that, or leave map out")

    def without_effect(self) -> list[str]:
        """The settings that are set and say how versions are kept, while no `path` says where. A
        command that takes its own place reads them all the same, and so they are not refused
        here."""
        if self.path is not None:
            return []
        return [known.name for known in fields(self)
                if known.name != "metrics_port" and getattr(self, known.name) != known.default]

    def _check_recovery(self) -> None:
        """What is said of one kind of recovery, and is not for the one that is set."""
        if self.recovery != "auto":
            if self.mtbf is not None and self.job_duration is None:
                raise ConfigError("job_duration and mtbf belong together: set both, or neither, or "
                                  'recovery = "auto"')
            for key in ("target", "max_interval", "together", "reschedule"):
                if getattr(self, key) is not None:
                    raise ConfigError(f'{key} is for recovery = "auto"')
        else:
            chosen = (*_of_specs(), "table_bits", "job_duration", "keep_for", "drop_after")
            usual = {known.name: known.default for known in fields(self)}
            if any(getattr(self, key) != usual[key] for key in chosen):
                raise ConfigError('recovery = "auto" chooses layout and bits itself, and keeps the '
                                  f"newest: leave out {', '.join(chosen)}")
        if self.recovery != "partial":
            for key in ("pls", "accuracy_loss", "most_pls"):
                if getattr(self, key) is not None:
                    raise ConfigError(f'{key} is for recovery = "partial"')
        if self.slope is not None and self.recovery not in ("partial", "auto"):
            raise ConfigError('slope is for recovery = "partial" or "auto"')

    def strategy(self, job: Job | None = None) -> Strategy:
        """What these settings mean, for that job; a combination that cannot work is refused."""
        from emberkeep.strategies import auto, incremental, partial, retention, schedule

        if self.mirror_every is not None:
            schedule(self.mirror_every, name="mirror_every")
        every = self.every or "30min"
        if job is not None and self.recovery == "auto":
            raise ConfigError(
                'recovery = "auto" measures what [job] says: leave [job] out, and set mtbf, '
                "together and reschedule of [checkpoint] to what it should begin with")
        if job is not None and (self.recovery != "partial" or self.every is not None):
            raise ConfigError(
                '[job] is for recovery = "partial", whose interval follows from it: leave out '
                "every, or [job]")
        if self.recovery == "auto":
            if self.every is not None:
                first = schedule(self.every)
                if first.time is None and self.max_interval is not None:
                    raise ConfigError("every counts steps and max_interval time: set every to a "
                                      "time, too")
            return auto(
                target=self.target or "PLS 0.1",
                mtbf=self.mtbf,
                slope=self.slope,
                together=self.together or 1,
                reschedule=self.reschedule or "0s",
                first=self.every or "10min",
                max_interval=self.max_interval,
                keep=self.keep,
            )
        if self.recovery == "partial":
            strategy = partial(
                every=every if job is None else None,
                job=job,
                pls=self.pls,
                accuracy_loss=self.accuracy_loss,
                slope=self.slope,
                priority=self.priority,
                fraction=self.fraction,
                period=self.period,
                most_pls=self.most_pls,
                keep=self.keep,
            )
            rounds = 1 if strategy.spec.priority is None else strategy.spec.priority.rounds
            return replace(
                strategy,
                spec=self._as_set(strategy.spec),
                retention=retention(
                    self.keep * rounds, keep_for=self.keep_for, drop_after=self.drop_after
                ),
            )
        strategy = incremental(
            every=every,
            keep=self.keep,
            keep_for=self.keep_for,
            drop_after=self.drop_after,
            recovery=self.recovery,
        )
        return replace(strategy, spec=self._as_set(strategy.spec))

    def _as_set(self, spec: VersionSpec) -> VersionSpec:
        """With every field that is a setting too as it is set."""
        chosen = {name: getattr(self, name) for name in _of_specs()}
        if self.table_bits:
            chosen["widths"] = self._widths(self.table_bits)
        return replace(spec, **{**chosen, "expected_restores": self._expected()})

    def _widths(self, bits: Mapping[str, int]) -> Widths:
        from emberkeep.checkpoint.widths import Width, Widths

        if self.accuracy_budget is not None:
            raise ConfigError("accuracy_budget measures the width of every table: leave out "
                              "table_bits, or accuracy_budget")
        return Widths(tables={table: Width(bits=each) for table, each in bits.items()})

    def _expected(self) -> int | None:
        """How many restores are expected: as it is set, or from the failures of the job."""
        from emberkeep.checkpoint.overheads import expected_restores

        if (self.job_duration is None) != (self.mtbf is None):
            raise ConfigError("job_duration and mtbf belong together: set both, or neither")
        if self.job_duration is None or self.mtbf is None:
            return self.expected_restores
        if self.expected_restores is not None or self.bits is not None:
            raise ConfigError(
                "job_duration and mtbf choose how many restores are expected, and so the bits: "
                "leave them out, or expected_restores and bits")
        times = []
        for key in ("job_duration", "mtbf"):
            try:
                time = config.duration(getattr(self, key))
            except ValueError:
                time = timedelta(0)
            if not time:
                raise ConfigError(
                    f"{key} is a duration such as 36h or 5d, not {getattr(self, key)!r}")
            times.append(time)
        return expected_restores(*times)

    def saving(self) -> SaveSettings | None:
        """How versions are written, where that is not as usual."""
        from emberkeep.checkpoint.spec import SaveSettings

        settings = SaveSettings(
            most_mb_per_second=self.most_mb_per_second,
            mirror_mb_per_second=self.mirror_mb_per_second,
            background_share=self.background_share,
            read_depth=self.read_depth,
            read_nbytes=None if self.read_mb is None else self.read_mb * 2**20,
        )
        return None if settings == SaveSettings() else settings


def _of_specs() -> list[str]:
    """The settings that are fields of `VersionSpec`, of the same name; a priority is made of
    several."""
    from emberkeep.checkpoint.spec import VersionSpec

    own = {known.name for known in fields(CheckpointSettings)}
    return [known.name for known in fields(VersionSpec) if known.name in own - {"priority"}]

# fmt: on
