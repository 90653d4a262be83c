"""What saving and loading really take, from a repository that is there."""

from __future__ import annotations

import time
from datetime import timedelta

from emberkeep._types import Json
from emberkeep.checkpoint.contents import Hold
from emberkeep.checkpoint.restore import rows_of
from emberkeep.checkpoint.targets import DENSE
from emberkeep.errors import ConfigError, NoVersionError
from emberkeep.repository import Repository
from emberkeep.runtime.pool import Pool
from emberkeep.runtime.readahead import ahead_of


def save_time(repository: Repository) -> timedelta:
    """How long training stood still per whole version, as the newest version that knows it tells:
    for cuts, for saves that were still under way, and for rows copied before they were overwritten.
    Restores and recoveries are not part of it, nor is what prioritised versions cost.

    A keeper writes into each version what the versions before it have cost; so a repository needs
    two versions of one process.
    """
    for version in reversed(repository.versions()):
        counters = repository.manifest(version).counters
        if counters.get("whole_versions"):
            return timedelta(seconds=counters["saving_seconds"] / counters["whole_versions"])
    raise ConfigError(
        f"no version in {repository.store.url} tells what the ones before it cost: "
        "keep a run for two versions, or give --save-time"
    )


def load_time(repository: Repository) -> timedelta:
    """How long it takes here and now to read and decode the newest version with all it needs."""
    newest = repository.latest()
    if newest is None:
        raise NoVersionError(f"{repository.store.url} has no version yet: give --load-time")
    pool = Pool()
    with Hold(repository, newest) as hold:
        start = time.perf_counter()
        for manifest in repository.chain(newest):
            for _ in ahead_of(rows_of(repository, manifest, pool)):
                hold.renew()
        for file in repository.manifest(newest).of_kind(DENSE):
            repository.read(file)
        return timedelta(seconds=time.perf_counter() - start)


def decisions(repository: Repository) -> list[Json]:
    """What a run that planned itself has decided, oldest first, as its versions tell."""
    found: dict[tuple[int, str], Json] = {}
    for version in repository.versions():
        auto = repository.manifest(version).counters.get("auto") or {}
        for decision in auto.get("decisions", ()):
            found[decision["step"], decision["reason"]] = decision
    return sorted(found.values(), key=lambda decision: decision["step"])
