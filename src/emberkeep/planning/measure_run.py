"""What saving, loading, parity, quantization and lost servers cost, measured by short trainings.

Each way is trained for the same few steps on this machine, its versions go to the store that is
asked for, and what a plan needs is read off: stalls from the counters that versions carry, loads by
reading the newest one back, slower steps by the median step.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import statistics
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from emberkeep.blobs import open_store
from emberkeep.errors import ConfigError
from emberkeep.planning.candidates import PARITY_K, Measurement
from emberkeep.planning.measured_inputs import Inputs
from emberkeep.planning.measurements import load_time, save_time
from emberkeep.repository import Repository
from emberkeep.train.checkpoint_settings import CheckpointSettings
from emberkeep.train.hooks import Hook, Start, Step
from emberkeep.train.result import Result
from emberkeep.train.run_config import (
    FailureSettings,
    JobSettings,
    ParitySettings,
    RunConfig,
    TierSettings,
)

STEPS = 120
LEAST_STEPS = 20
_VERSIONS = 5
_WARM_SHARE = 0.2
_BITS = 4

Tell = Callable[[str], object]


def measure(
    given: RunConfig, *, store: str | None = None, steps: int = STEPS, tell: Tell = lambda _: None
) -> Inputs:
    """Trains a few times for so many steps; nothing is left in the store.

    Rows that were not trained are not in versions: what is written and loaded is scaled up to all
    rows of the tables, stalls are taken as they were.
    """
    if steps < LEAST_STEPS:
        raise ConfigError(f"a measurement takes {LEAST_STEPS} steps or more, not {steps}")
    if given.cluster.kind == "connect":
        raise ConfigError(
            "measurements kill a server, and those at addresses are not their own: set "
            "cluster.kind to local, servers or ray"
        )
    plain = _plain(given, steps)
    with _place(store, given) as place:
        tell("training without versions")
        alone = _Watch()
        result = _train(plain, alone)
        if alone.steps < LEAST_STEPS:
            raise ConfigError(
                f"a measurement takes {LEAST_STEPS} steps or more, and the data is enough for "
                f"{alone.steps}: give it more samples, or smaller batches"
            )
        steps = min(steps, alone.steps)
        scale = max(1.0, result.rows / max(1, result.rows_trained))
        tell("training with versions")
        exact, reschedule = _saved(plain, f"{place}/exact", steps, alone, scale, bits=None)
        tell(f"training with versions in {_BITS} bits")
        quantized, _ = _saved(plain, f"{place}/quantized", steps, alone, scale, bits=_BITS)
        slowdown = None
        if plain.cluster.shards > 1:
            tell("training with parity")
            slowdown = _parity_slowdown(plain, alone)
        tier = None
        if plain.cluster.kind == "local" and "://" not in place:
            tell("training with rows in files")
            tier = _tier(plain, f"{place}/tier", steps, alone)
    return Inputs(
        save=exact.save,
        write=exact.write,
        load=exact.load,
        reschedule=reschedule,
        step=timedelta(seconds=alone.step_seconds),
        table_nbytes=alone.table_nbytes,
        rows=result.rows,
        parity_slowdown=slowdown,
        quantized=_measurement(quantized, bits=_BITS),
        tier=tier,
    )


def _measurement(found: Inputs, *, bits: int) -> Measurement:
    assert found.save is not None
    assert found.load is not None
    return Measurement(save=found.save, load=found.load, bits=bits)


def _plain(given: RunConfig, steps: int) -> RunConfig:
    share = 1 - given.data.test_fraction
    samples = max(2, round(steps * given.run.batch_size / share))
    samples = min(samples, given.data.samples or samples)
    return replace(
        given,
        data=replace(given.data, samples=samples),
        run=replace(given.run, compare=False),
        cluster=replace(given.cluster, workers=1),
        checkpoint=CheckpointSettings(),
        job=JobSettings(),
        failures=FailureSettings(),
        parity=ParitySettings(),
        tier=TierSettings(),
    )


def _train(settings: RunConfig, *hooks: Hook) -> Result:
    from emberkeep.train.loop import run

    return run(settings, hooks=hooks)


class _Watch(Hook):
    """Times steps; kills one server half-way, if asked to."""

    def __init__(self, *, kill_at: int | None = None) -> None:
        self._at: list[float] = []
        self._kill_at = kill_at
        self.recovered: list[dict[str, Any]] = []
        self.table_nbytes = 0

    def on_start(self, start: Start) -> None:
        self._cluster: Any = start.bags.cluster
        optimizer = start.settings.optimizer.spec()
        self.table_nbytes = sum(
            4 * (table.dim + sum(optimizer.planes(table.dim).values())) * table.slots
            for table in start.bags.tables
        )

    def on_step(self, step: Step) -> None:
        self._at.append(step.at)
        if step.number == self._kill_at:
            self._kill_at = None
            os.kill(self._cluster.launcher.pid(0), signal.SIGKILL)

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        if event == "recovered":
            self.recovered.append(details)

    @property
    def steps(self) -> int:
        """That were taken."""
        return len(self._at)

    @property
    def step_seconds(self) -> float:
        """The median, once everything is warm."""
        warm = self._at[int(_WARM_SHARE * len(self._at)) :]
        return statistics.median(b - a for a, b in itertools.pairwise(warm))


def _saved(
    plain: RunConfig, path: str, steps: int, alone: _Watch, scale: float, *, bits: int | None
) -> tuple[Inputs, timedelta | None]:
    """What versions cost, and how long a killed server takes to be replaced."""
    kills = plain.cluster.kind != "local" and bits is None
    watch = _Watch(kill_at=steps * 2 // 3 if kills else None)
    settings = replace(
        plain,
        checkpoint=CheckpointSettings(
            path=path, every=f"{max(2, steps // _VERSIONS)} steps", bits=bits,
            recovery="full" if kills else None,
        ),
    )  # fmt: skip
    result = _train(settings, watch)
    assert result.checkpoints is not None
    repository = Repository.open(open_store(path))
    load = load_time(repository)
    reschedule = None
    if watch.recovered:
        seconds = watch.recovered[0]["seconds"] - load.total_seconds()
        reschedule = timedelta(seconds=max(0.0, seconds))
    return Inputs(
        save=max(save_time(repository), timedelta(microseconds=1)),
        write=timedelta(seconds=scale * result.checkpoints.commit_seconds_median),
        load=scale * load,
    ), reschedule


def _parity_slowdown(plain: RunConfig, alone: _Watch) -> float:
    watch = _Watch()
    k = min(PARITY_K, plain.cluster.shards - 1)
    _train(replace(plain, parity=ParitySettings(k=k)), watch)
    return max(0.0, watch.step_seconds / alone.step_seconds - 1)


def _tier(plain: RunConfig, path: str, steps: int, alone: _Watch) -> Measurement:
    watch = _Watch()
    every = f"{max(2, steps // _VERSIONS)} steps"
    settings = replace(plain, tier=TierSettings(path=path, every=every))
    result = _train(settings, watch)
    assert result.checkpoints is not None
    versions = max(1, result.checkpoints.versions)
    opened = _Watch()
    again = _train(settings, opened)  # finished: it opens the files and reads what is there
    return Measurement(
        save=timedelta(seconds=max(1e-6, result.checkpoints.stall_seconds / versions)),
        load=timedelta(seconds=again.seconds),
        slowdown=max(0.0, watch.step_seconds / alone.step_seconds - 1),
    )


@contextmanager
def _place(store: str | None, given: RunConfig) -> Iterator[str]:
    """A place of its own in the store, removed at the end."""
    url = store or given.checkpoint.path
    if url is None:
        directory = tempfile.mkdtemp(prefix="emberkeep-measure-")
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return
    place = f"{url.rstrip('/')}-measured-{uuid.uuid4().hex[:8]}"
    # A store that cannot be written is found now, not after a training.
    probe = open_store(f"{place}/exact")
    probe.put("probe", b"")
    probe.delete(["probe"])
    try:
        yield place
    finally:
        for part in ("exact", "quantized"):
            found = open_store(f"{place}/{part}")
            found.delete([info.name for info in found.list()])
        if "://" not in place:
            shutil.rmtree(place, ignore_errors=True)
