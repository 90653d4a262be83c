"""Which rows of which files go to which tables: decided, and refused, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from emberkeep._types import Json
from emberkeep.errors import ConfigError, DataError
from emberkeep.inspect.plane_names import WEIGHT, TableMap, plane_of
from emberkeep.inspect.row_sources import Part, Source
from emberkeep.tables import OPTIMIZERS, Optimizer, Table

DimChange = Literal["error", "pad", "truncate"]
USED = "used"


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """A part, the table that it goes to, and the plane that each of its words is."""

    part: Part
    table: str
    planes: Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class Choice:
    """What the user has said of an import beside its files."""

    tables: TableMap = field(default_factory=lambda: TableMap({}))
    table: str | None = None
    """All rows go to this table."""
    dim_change: DimChange = "error"
    fill: Mapping[str, float] = field(default_factory=dict)
    """What planes begin with that rows come without; 0 unless it is said."""
    optimizer: str | None = None
    seed: int = 0


def intakes(
    sources: Sequence[Source], choice: Choice, tables: Mapping[str, Json]
) -> tuple[list[Intake], list[str]]:
    """What to read, and the names of what is passed over; `tables` are those of the repository."""
    found: list[Intake] = []
    passed_over: list[str] = []
    for source in sources:
        passed_over += source.passed_over
        for part in source.parts:
            table = choice.table or choice.tables.table_of(part.path, part.name, tables)
            if table is None or table not in tables:
                if choice.table or choice.tables.is_mapped(part.path):
                    raise ConfigError(
                        f"the repository has no table {table!r}; it has {', '.join(tables)}"
                    )
                passed_over.append(part.path)
                continue
            own: Json = tables[table]["planes"]
            planes, rest = _planes(part, own)
            passed_over += [f"{part.path}.{word}" for word in rest]
            for word, plane in planes.items():
                _check_width(part, word, table, plane, own, choice.dim_change)
            limit = tables[table].get("rows")
            if part.dense and limit is not None and part.rows > limit:
                raise DataError(
                    f"{part.file}: {part.path} has {part.rows} rows, table {table!r} has {limit}: "
                    "make the table larger, or leave rows out"
                )
            if planes:
                found.append(Intake(part=part, table=table, planes=planes))
    _check_map(choice, sources)
    _check_numbered(found)
    if not found:
        names = sorted({part.path for source in sources for part in source.parts})
        what = f"rows of {', '.join(names)}" if names else "no rows"
        raise ConfigError(
            f"nothing to import: {_files(sources)} holds {what}, the repository has tables "
            f"{', '.join(tables)}; say which goes where by --map OLD=NEW, or by --table NEW for all"
        )
    return found, _unique(passed_over)


def _check_numbered(found: Sequence[Intake]) -> None:
    """Two matrices whose rows are numbered cannot both be the rows of one table."""
    first: dict[tuple[str, str], Part] = {}
    for intake in found:
        for plane in intake.planes.values() if intake.part.dense else ():
            other = first.setdefault((intake.table, plane), intake.part)
            if other is not intake.part:
                raise DataError(
                    f"{intake.part.file}: {other.path} and {intake.part.path} both bring the "
                    f"{plane} of table {intake.table!r}: choose one by --map "
                    f"{other.path}={intake.table}"
                )


def _check_map(choice: Choice, sources: Sequence[Source]) -> None:
    if choice.table is None and choice.tables.unmet():
        names = sorted({part.path for source in sources for part in source.parts})
        raise ConfigError(
            f"--map: nothing is called {', '.join(choice.tables.unmet())} in {_files(sources)}, "
            f"which has {', '.join(names) or 'no rows'}"
        )


def _files(sources: Sequence[Source]) -> str:
    return ", ".join(source.file for source in sources)


def _unique(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _planes(part: Part, own: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The plane of each word, and the words that no plane of the table answers to."""
    known = [plane for plane in own if plane != USED]
    planes: dict[str, str] = {}
    rest = []
    for word in part.planes:
        plane = plane_of(word, known)
        if plane is None:
            rest.append(word)
        elif plane in planes.values():
            raise DataError(f"{part.file}: {part.path} has plane {plane!r} twice")
        else:
            planes[word] = plane
    return planes, rest


def _check_width(
    part: Part, word: str, table: str, plane: str, own: Mapping[str, Any], change: DimChange
) -> None:
    has, needs = part.planes[word], own[plane][0]
    by_dim = needs == own[WEIGHT][0]
    if has == needs or (by_dim and change == ("pad" if has < needs else "truncate")):
        return
    remedy = (
        f"allow it by --dim-change {'pad' if has < needs else 'truncate'}"
        if by_dim
        else "the optimizer is another one: leave that plane out"
    )
    raise DataError(
        f"{part.file}: {word} of {part.path} is {has} wide, plane {plane!r} of table {table!r} is "
        f"{needs}: {remedy}"
    )


# -- a new repository ------------------------------------------------------------------------------


def schema_of(sources: Sequence[Source], choice: Choice) -> Json:
    """The tables of a repository that begins with an import: those of the files.

    Ids make a table dynamic; rows that are numbered make it fixed. A matrix without ids may be a
    layer of a network: it is a table only if the user says so.
    """
    spec = _optimizer(choice.optimizer)
    parts: dict[str, list[Part]] = {}
    unsure = []
    for source in sources:
        for part in source.parts:
            mapped = choice.tables.is_mapped(part.path)
            if part.dense and not (mapped or choice.table):
                unsure.append(part.path)
                continue
            table = choice.table or choice.tables.table_of(part.path, part.name)
            if table is not None:
                parts.setdefault(table, []).append(part)
    if not parts and not unsure:
        _check_map(choice, sources)
        raise ConfigError(f"{_files(sources)} has nothing of a table in it")
    if not parts:
        raise ConfigError(
            f"{_files(sources)} has no ids, so what is a table is not known; if one of "
            f"{', '.join(unsure)} is, say so by --map NAME=TABLE"
        )
    tables = {}
    for table, own in parts.items():
        planes = _new_planes(table, own, spec)
        dense = all(part.dense for part in own)
        rows = max(part.rows for part in own) if dense else None
        dim = planes[WEIGHT][0]
        described = Table(table, dim=dim, rows=rows, capacity=None if dense else 1)
        tables[table] = {
            "rows": rows, "planes": planes, "origin": described.describe_origin(choice.seed)
        }  # fmt: skip
    return {"shards": 1, "tables": tables}


def _optimizer(name: str | None) -> Optimizer | None:
    if name is None:
        return None
    if name not in OPTIMIZERS:
        raise ConfigError(f"--optimizer is one of {', '.join(OPTIMIZERS)}, not {name!r}")
    return OPTIMIZERS[name](lr=0.0)


def _new_planes(table: str, parts: Sequence[Part], spec: Optimizer | None) -> dict[str, list[Any]]:
    words = {word: width for part in parts for word, width in part.planes.items()}
    dims = {part.planes[word] for part in parts for word in part.planes if _is_weight(word)}
    if len(dims) != 1:
        raise DataError(
            f"the weights of table {table!r} are {' and '.join(map(str, sorted(dims)))} wide"
            if dims
            else f"nothing brings the weights of table {table!r}"
        )
    dim = dims.pop()
    found = {"weight": dim}
    if spec is not None:
        found |= spec.planes(dim)
    else:
        two = "momentum2" in words or "exp_avg_sq" in words
        for word, width in words.items():
            known = ("first_moment", "second_moment", "step") if two else ()
            plane = plane_of(word, known) if not _is_weight(word) else None
            if plane not in (None, USED):
                found[str(plane)] = width
        known_sets = [kind(lr=0.0).planes(dim) for kind in OPTIMIZERS.values()]
        known_sets.append({"first_moment": dim, "second_moment": dim, "step": 1})
        if {plane: width for plane, width in found.items() if plane != WEIGHT} not in known_sets:
            raise ConfigError(
                f"table {table!r} would have planes {', '.join(found)}, which no optimizer has: "
                f"name one by --optimizer ({', '.join(OPTIMIZERS)})"
            )
    return {plane: [w, "int32" if plane == "step" else "float32"] for plane, w in found.items()}


def _is_weight(word: str) -> bool:
    return plane_of(word, ()) == WEIGHT
