"""The codecs of the next version: from what a strategy says and how often the run was restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from emberkeep._types import Json
from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.codecs import Codec, NonNegative, Quantized
from emberkeep.codecs.table_codecs import key_of
from emberkeep.repository.policies import bits_for

# Planes that divide a step: what is kept of them is their ratio to what they were.
OPTIMIZER_PLANES = ("accumulator", "second_moment")
_FALL_BACK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The codecs of a version, by plane or by table and plane; those of tables that are not named
    are exact."""

    codecs: dict[str, Codec]
    why: str


def choose(spec: VersionSpec, restores: int) -> Choice:
    """How the next version is stored, after so many restores of versions that were not exact."""
    expected = spec.expected_restores
    if expected is None and spec.accuracy_budget is not None:
        expected = 1
    exceeded = expected is not None and restores > expected
    if spec.accuracy_budget is not None and spec.widths is None:
        return Choice(codecs={}, why="exact until widths are calibrated")
    chosen: dict[str, Codec] = {}
    if spec.widths is not None:
        for table, width in spec.widths.tables.items():
            bits = width.bits
            if bits is not None:
                bits = max(bits, _FALL_BACK) if exceeded else bits
                chosen[key_of(table, "weight")] = _quantized(spec, bits)
            if width.optimizer:
                chosen |= {key_of(table, plane): NonNegative() for plane in OPTIMIZER_PLANES}
        why = spec.widths.why or "widths of tables were given"
        if exceeded:
            why = f"{restores} restores, {expected} were expected: 8 bits instead of {why}"
    elif expected is not None:
        bits = bits_for(expected, restores)
        chosen["weight"] = _quantized(spec, bits)
        why = f"{bits} bits for {expected} expected restores, of which {restores} were made"
        if exceeded:
            why = f"{restores} restores, {expected} were expected: {bits} bits"
    elif spec.bits is not None:
        chosen["weight"] = _quantized(spec, spec.bits)
        why = f"bits={spec.bits} was given"
    else:
        why = "nothing was to be lost"
    if spec.quantize_optimizer:
        chosen |= {plane: NonNegative() for plane in OPTIMIZER_PLANES}
        why += "; quantize_optimizer was given"
    return Choice(codecs=chosen, why=why)


def has_optimizer_planes(tables: Mapping[str, Json]) -> bool:
    """Whether a table has a plane that `quantize_optimizer` is for."""
    return any(plane in OPTIMIZER_PLANES for table in tables.values() for plane in table["planes"])


def _quantized(spec: VersionSpec, bits: int) -> Quantized:
    if bits == 8:  # a narrower range does not help there
        return Quantized(bits=bits)
    return Quantized(bits=bits, bins=spec.bins, ratio=spec.range_ratio)
