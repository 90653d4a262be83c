"""How many bits the planes of each table get in versions, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from emberkeep._types import Json
from emberkeep.codecs import Quantized
from emberkeep.errors import ConfigError, DamageError
from emberkeep.repository import Manifest
from emberkeep.runtime.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """How one table is stored: `bits` of its weights, None for all of them, and whether its
    `optimizer` planes are quantized; `why` is for people."""

    bits: int | None = None
    optimizer: bool = False
    why: str = ""

    def __post_init__(self) -> None:
        if self.bits is not None:
            Quantized(bits=self.bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """A width for each table; tables that are not named are exact. `measured_for` is what they had
    to keep, as the strategy that they were measured for says it; empty if they were given."""

    tables: Mapping[str, Width] = field(hash=False)
    why: str = ""
    measured_for: str = ""

    def to_dict(self) -> Json:
        return {
            "why": self.why,
            "measured_for": self.measured_for,
            "tables": {
                name: {"bits": width.bits, "optimizer": width.optimizer, "why": width.why}
                for name, width in self.tables.items()
            },
        }

    @classmethod
    def of(cls, fields: Fields) -> Widths:
        """As a manifest has it."""
        tables, found = fields.object("tables"), {}
        for name in tables:
            table = tables.object(name)
            bits = table.number("bits") if "bits" in table else None
            try:
                found[name] = Width(
                    bits=bits, optimizer=table.flag("optimizer"), why=table.text("why")
                )
            except ConfigError as error:
                raise table.wrong("bits", f"a width ({error})") from error
        measured_for = fields.text("measured_for") if "measured_for" in fields else ""
        return cls(tables=found, why=fields.text("why"), measured_for=measured_for)


def check_tables(widths: Widths | None, tables: Iterable[str]) -> None:
    """Refuses widths of tables that there are not."""
    known = sorted(tables)
    unknown = sorted({*(widths.tables if widths else ())} - {*known})
    if unknown:
        raise ConfigError(
            f"bits= names table {unknown[0]!r}, and the model has "
            f"{', '.join(known[:6])}{', ...' if len(known) > 6 else ''}: "
            "name one of these, or leave it out"
        )


def loses(codecs: Iterable[str], tables: Mapping[str, Json]) -> bool:
    """Whether codecs of these keys change a row of these tables: those of planes that the tables
    do not have change nothing."""
    planes = {plane for table in tables.values() for plane in table["planes"]}
    return any(key.rpartition("/")[2] in planes for key in codecs)


def is_lossy(chain: Sequence[Manifest], tables: Mapping[str, Json]) -> bool:
    """Whether a restore of the last version of a chain brings rows back that are not what they
    were. What was written before versions said so is judged by its codecs."""
    newest = chain[-1].described
    if "lossy" in newest:
        return newest.flag("lossy")
    try:
        return any(loses(version.layout.get("codecs", {}), tables) for version in chain)
    except (AttributeError, TypeError) as error:
        raise DamageError(f"the codecs of a version are damaged: {error}") from error
