"""Which versions to keep: pure policies, history in, decision out.

A policy names what the user wants kept. The newest version, whatever a kept version needs, and
what readers have pinned are kept in any case; `collector` sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from emberkeep.errors import ConfigError
from emberkeep.repository.names import VersionId


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """What a policy may know about a version."""

    version: VersionId
    tags: tuple[str, ...] = ()
    age: timedelta = timedelta(0)
    """Since its manifest was put, by the clock of the store; of a copy, since what it is a copy of
    was made."""


class RetentionPolicy(Protocol):
    """Decides from the history, oldest first, which versions to keep."""

    def keep(self, history: Sequence[VersionFacts]) -> frozenset[VersionId]: ...


class _Policy:
    __slots__ = ()

    def __or__(self: RetentionPolicy, other: RetentionPolicy) -> KeepUnion:
        return KeepUnion(policies=(self, other))

    def __and__(self: RetentionPolicy, other: RetentionPolicy) -> KeepIntersection:
        return KeepIntersection(policies=(self, other))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepLast(_Policy):
    """The newest `n` versions."""

    n: int = 3

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"KeepLast must keep at least 1 version, not {self.n}")

    def keep(self, history: Sequence[VersionFacts]) -> frozenset[VersionId]:
        return frozenset(facts.version for facts in history[-self.n :])


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEvery(_Policy):
    """Every version whose number is a multiple of `m`: a decision that never changes later."""

    m: int

    def __post_init__(self) -> None:
        if self.m < 1:
            raise ConfigError(f"KeepEvery takes a period of at least 1, not {self.m}")

    def keep(self, history: Sequence[VersionFacts]) -> frozenset[VersionId]:
        return frozenset(facts.version for facts in history if facts.version.number % self.m == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepFor(_Policy):
    """Every version that is younger than `age`. `KeepLast(n=3) | KeepFor(...)` keeps at least
    three, `KeepLast(n=3) & KeepFor(...)` at most three, and none that is older; the newest version
    stays whatever its age."""

    age: timedelta

    def __post_init__(self) -> None:
        if self.age <= timedelta(0):
            raise ConfigError(f"KeepFor takes an age above 0, not {self.age}")

    def keep(self, history: Sequence[VersionFacts]) -> frozenset[VersionId]:
        return frozenset(facts.version for facts in history if facts.age < self.age)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepNamed(_Policy):
    """Every version that has a tag."""

    def keep(self, history: Sequence[VersionFacts]) -> frozenset[VersionId]:
        return frozenset(facts.version for facts in history if facts.tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAll(_Policy):
    """Every version, for good."""

    def keep(self, history: Sequence[VersionFacts]) -> frozenset[VersionId]:
        return frozenset(facts.version for facts in history)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepUnion(_Policy):
    """What any of its policies keeps; written `KeepLast(n=3) | KeepNamed()`."""

    policies: tuple[RetentionPolicy, ...]

    def keep(self, history: Sequence[VersionFacts]) -> frozenset[VersionId]:
        return frozenset().union(*(policy.keep(history) for policy in self.policies))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepIntersection(_Policy):
    """What all of its policies keep; written `KeepLast(n=5) & KeepFor(age=timedelta(days=14))`."""

    policies: tuple[RetentionPolicy, ...]

    def keep(self, history: Sequence[VersionFacts]) -> frozenset[VersionId]:
        kept = [policy.keep(history) for policy in self.policies]
        return kept[0].intersection(*kept[1:])


DEFAULT_RETENTION: RetentionPolicy = KeepLast(n=3) | KeepNamed()
