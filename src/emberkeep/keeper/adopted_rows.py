"""Rows that a trainer finds when it begins. Those of its run on live servers stay, and all else is
brought back; those that opening has found in files are for who asks for them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from emberkeep.checkpoint.recovery import steps_of
from emberkeep.checkpoint.target_view import view_of
from emberkeep.checkpoint.targets import Subject
from emberkeep.cluster.base import Cluster
from emberkeep.cluster.remote.remote_cluster import RemoteCluster

STEPS_APPLIED_TWICE = "steps_applied_twice"
"""Among the counters that a saver returns: how far rows are ahead of what it brought back."""


def take_adopted(subject: Subject, run: str) -> bool:
    """Whether the rows of the subject, on live servers, are of this run and stay as they are; asked
    once. Rows of another run are cleared."""
    parts = [part for part in view_of(subject).parts if part.names]
    clusters = [p.target for p in parts if isinstance(p.target, RemoteCluster)]
    adopted = [cluster for cluster in clusters if cluster.adopted is not None]
    runs = {cluster.adopted for cluster in adopted}
    for cluster in adopted:
        cluster.adopted = None
    if not adopted:
        return False
    if len(adopted) == len(parts) and runs == {run}:
        return True
    warnings.warn(
        "servers hold rows of another run, or some tables are not on servers, so none are adopted: "
        "the run goes back to its newest version",
        stacklevel=6,
    )
    for cluster in adopted:
        cluster.clear()
    return False


def has_adopted(subject: Subject) -> bool:
    """Whether servers have kept rows that `take_adopted` is to be asked about."""
    targets = [part.target for part in view_of(subject).parts]
    return any(isinstance(one, RemoteCluster) and one.adopted is not None for one in targets)


def drop_adopted(subject: Subject) -> None:
    """The run goes on from rows that it has chosen: none are adopted any more."""
    for part in view_of(subject).parts:
        if isinstance(part.target, RemoteCluster):
            part.target.adopted = None


def clear_adopted(subject: Subject) -> None:
    """Servers that have kept their rows let them go: the run starts from elsewhere."""
    for part in view_of(subject).parts:
        if isinstance(part.target, RemoteCluster) and part.target.adopted is not None:
            part.target.clear()


def _with_found(subject: Subject) -> Iterator[Cluster]:
    for part in view_of(subject).parts:
        if isinstance(part.target, Cluster) and part.target.found_rows is not None:
            yield part.target


def has_found(subject: Subject) -> bool:
    """Whether opening has found rows in files that nobody has chosen yet."""
    return any(True for _ in _with_found(subject))


def check_found(subject: Subject) -> None:
    """Refuses to begin with such rows."""
    for cluster in _with_found(subject):
        cluster.check_rows()


def choose_found(subject: Subject) -> None:
    """The run goes on from them."""
    for cluster in _with_found(subject):
        cluster.choose_rows()


def clear_found(subject: Subject) -> None:
    """The run begins with initial rows. Files keep their batch until the next one is durable."""
    for cluster in _with_found(subject):
        cluster.clear()


def steps_ahead(subject: Subject, saved: Mapping[str, Any]) -> int:
    """So many steps rows are ahead of those that a version knows its tables to have, by name."""
    ahead = 0
    for part in view_of(subject).parts:
        if not part.names:
            continue
        assert isinstance(part.target, RemoteCluster)
        steps = steps_of(part.target)
        for name, own in part.names.items():
            ahead = max(ahead, steps.get(own, 0) - int(saved.get(name, {}).get("steps", 0)))
    return ahead
