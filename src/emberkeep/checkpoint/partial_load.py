"""A version into tables that are not quite those that it was saved from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from emberkeep._types import I64, Json, Planes
from emberkeep.checkpoint.restore import Restored, load_into
from emberkeep.checkpoint.target_view import TargetView, ViewPart, view_of
from emberkeep.checkpoint.targets import LimitsRows, Subject, Target
from emberkeep.cluster.base import Cluster
from emberkeep.errors import ConfigError
from emberkeep.repository import Repository, VersionId
from emberkeep.runtime.pool import Pool


class Reads(Target, Protocol):
    """A target whose rows can be read, trained or not."""

    def read(self, table: str, ids: I64) -> Planes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """What becomes of one table of the model; `old` is its name in the version."""

    old: str
    new: str
    widths: Mapping[str, int]
    """Of the planes that the rows bring along: so many columns."""
    whole: bool
    """Whether the rows bring all planes as they are."""
    same_optimizer: bool
    rows: int | None
    """Ids from here on are not the table's."""
    saved_rows: int | None
    notes: Sequence[str] = ()


@dataclass(slots=True)
class Loaded:
    """What a partial load has done."""

    rows: dict[str, int] = field(default_factory=dict)
    """By table of the model."""
    outside: dict[str, I64] = field(default_factory=dict)
    """The ids that had no place, by table."""
    notes: list[str] = field(default_factory=list)
    same_optimizers: bool = True


def plan_tables(
    saved: Json, present: Json, renamed: Mapping[str, str]
) -> tuple[list[TablePlan], list[str]]:
    """How tables of a version meet those of a model, and what is left out."""
    plans, notes = [], []
    old_names = {new: old for old, new in renamed.items() if old in saved and new in present}
    for new, now in present.items():
        old = old_names.get(new, new)
        if old not in saved or (old == new and new in renamed):
            notes.append(f"table {new!r} is not in the version: it starts as it is")
        else:
            plans.append(_plan(old, new, saved[old], now))
    used = {plan.old for plan in plans}
    notes += [
        f"table {old!r} of the version is not in the model" for old in saved if old not in used
    ]
    return plans, notes


def _plan(old: str, new: str, was: Json, now: Json) -> TablePlan:
    label = f"table {new!r}" + (f" (was {old!r})" if old != new else "")
    before, after = was["planes"], now["planes"]
    dims = before["weight"][0], after["weight"][0]
    notes, widths = [], {}
    if dims[0] < dims[1]:
        notes.append(f"{label}: dim was {dims[0]}, is {dims[1]}: new columns start as they are")
    elif dims[0] > dims[1]:
        notes.append(f"{label}: dim was {dims[0]}, is {dims[1]}: the last columns were left out")
    for plane, (width, kind) in after.items():
        old_width, old_kind = before.get(plane, (0, kind))
        # One value for each column, or as many as there are: anything else means something else.
        by_column = (old_width, width) == dims
        if old_kind == kind and old_width and (old_width == width or by_column):
            widths[plane] = min(old_width, width)
        else:
            notes.append(f"{label}: plane {plane!r} is not in the version: it starts as new")
    left = [plane for plane in before if plane not in widths]
    notes += [f"{label}: plane {plane!r} of the version was left out" for plane in left]
    if was.get("origin") != now.get("origin"):
        stored = now.get("origin") == "stored"
        what = "are as they were here" if stored else "start by this model's name, seed and init"
        if was.get("origin") != "stored":
            notes.append(f"{label}: rows that were never trained {what}")
    optimizer_planes = {*before, *after} - {"weight", "used"}
    return TablePlan(
        old=old, new=new, widths=widths, rows=now.get("rows"), notes=notes,
        saved_rows=was.get("rows"),
        whole=before == after, same_optimizer=optimizer_planes <= {*widths},
    )  # fmt: skip


class _Fitted:
    """A target that takes rows of other widths and planes: what they do not bring stays as it is.

    What changes since a version is not forgotten: the rows are new to the repository of the target.
    """

    def __init__(self, target: Reads, plans: Mapping[str, TablePlan], loaded: Loaded) -> None:
        self._target = target
        self._plans = plans
        self._loaded = loaded

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        plan = self._plans[table]
        if plan.rows is not None:
            own = (ids >= 0) & (ids < plan.rows)
            if not own.all():
                before = self._loaded.outside.get(plan.new, ids[:0])
                self._loaded.outside[plan.new] = np.union1d(before, ids[~own])
                ids, planes = ids[own], {name: values[own] for name, values in planes.items()}
        if not plan.whole:
            fitted = self._target.read(table, ids)
            for name, width in plan.widths.items():
                fitted[name][:, :width] = planes[name][:, :width]
            planes = fitted
        self._target.install(table, ids, planes)

    def delete(self, table: str, ids: I64) -> int:
        plan = self._plans[table]
        if plan.rows is not None:
            ids = ids[(ids >= 0) & (ids < plan.rows)]
        return self._target.delete(table, ids)

    def clear(self) -> None:
        if isinstance(self._target, Cluster):  # rows of torch's tables are replaced, never gone
            for name in self._plans:
                self._target.delete(name, self._target.touched_ids(name))

    def load_table_state(self, state: Json) -> None:
        """Steps go with what an optimizer remembers."""
        self._target.load_table_state(
            {
                name: {key: value for key, value in table.items() if key != "rows"}
                for name, table in state.items()
                if self._plans[name].same_optimizer
            }
        )
        for name, plan in self._plans.items():
            self._loaded.rows[plan.new] = (
                self._target.touched_ids(name).size
                if isinstance(self._target, Cluster)
                else min(plan.saved_rows or 0, plan.rows or 0)
            )

    def check_room(self, state: Json) -> None:
        if isinstance(self._target, LimitsRows):
            dynamic = {n: table for n, table in state.items() if self._plans[n].rows is None}
            self._target.check_room(dynamic)

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        pass


def load_partly(
    repository: Repository,
    version: VersionId,
    subject: Subject,
    pool: Pool,
    renamed: Mapping[str, str],
    fits: Callable[[Restored], object],
) -> tuple[Restored, Loaded]:
    """Brings what fits of a version into a subject, and says what did not.

    Rows are the same by id, in as many columns as both have; tables that the version does not have
    are left alone. `fits` looks at the dense state before any row has changed.
    """
    plans, notes = plan_tables(repository.tables, subject.schema()["tables"], renamed)
    loaded = Loaded(notes=notes + [note for plan in plans for note in plan.notes])
    loaded.same_optimizers = all(plan.same_optimizer for plan in plans)
    by_name = {plan.new: plan for plan in plans}
    parts = []
    for part in view_of(subject).parts:
        if getattr(part.target, "coordinates", True):
            own = {part.names[new]: by_name[new] for new in part.names if new in by_name}
            target: Any = part.target
            names = {plan.old: name for name, plan in own.items()}
            parts.append(ViewPart(_Fitted(target, own, loaded), names))
    restored = load_into(repository, version, TargetView(parts), pool, fits)
    loaded.notes += [
        f"table {name!r}: {ids.size} rows of the version are outside of it"
        for name, ids in loaded.outside.items()
    ]
    return restored, loaded


def renaming(renamed: Mapping[str, str]) -> Callable[[str], str]:
    """Names of a version as those of a model: a whole name, or the front of one up to a dot."""

    def rename(name: str) -> str:
        for old in sorted(renamed, key=len, reverse=True):
            if name == old or name.startswith(f"{old}."):
                return renamed[old] + name[len(old) :]
        return name

    return rename


def check_renaming(renamed: Mapping[str, str], old: set[str], new: set[str]) -> None:
    """Refuses names that nothing has: a misspelt one would leave out what it was to bring."""

    def known(name: str, names: set[str]) -> bool:
        return any(other == name or other.startswith(f"{name}.") for other in names)

    for was, now in renamed.items():
        others = [other for other in renamed if renamed[other] == now and other != was]
        if others:
            raise ConfigError(
                f"map gives {was!r} and {others[0]!r} the same name {now!r}: leave one out"
            )
        if not known(was, old):
            raise ConfigError(f"map names {was!r}, which is no table or tensor of the version")
        if not known(now, new):
            raise ConfigError(f"map names {now!r}, which is no table or tensor of the model")
