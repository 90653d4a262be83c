"""JSON from storage, taken field by field as the type that each must have.

A digest proves that a document is what somebody wrote, not that it makes sense: it may come from a
release with a mistake, or from somebody who wants to do harm. So nothing of a document is used
before it was taken from here: what has another type, lies outside its bounds, or is not there is
`DamageError`, naming the object and the field. What is read takes memory in proportion to the
bytes that stand on storage, whatever numbers they hold.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from emberkeep._types import Json
from emberkeep.errors import ConfigError, DamageError

MOST = 2**63 - 1
"""The largest number of a field, unless it has a bound of its own."""
MOST_LEVELS = 64
"""So deep may objects and lists of the user's own state nest: deeper ones end in recursion."""

_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_T = TypeVar("_T")


def parse(name: str, content: bytes) -> Any:
    """The value of a JSON text in the strict sense: UTF-8, no NaN or infinity, no field twice."""
    try:
        text = content.decode()
        value = json.loads(
            text, object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite
        )
        if _HALF_PAIR.search(text):
            # Half of a surrogate pair is a string that cannot be written again.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise damaged(name, f"it is not JSON: {error}") from error
    return value


def _once(pairs: list[tuple[str, Any]]) -> Json:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field stands there twice")
    return fields


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text} is no number of JSON")
    return value


def damaged(name: str, why: str) -> DamageError:
    return DamageError(
        f"{name} is damaged: {why}; copy it back from a backup, or use another version", name=name
    )


def plain(what: str, value: Any) -> Json:
    """A copy of an object as it will be read back; refuses what JSON would change."""
    if _levels(value) > MOST_LEVELS:
        raise ConfigError(f"{what} nests deeper than {MOST_LEVELS} levels: make it flatter")
    try:
        copy: Json = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} cannot be stored as JSON: {error}") from error
    if not isinstance(copy, dict) or copy != _lists(value):
        raise ConfigError(f"{what} must be a JSON object with string keys and JSON values")
    return copy


def _levels(value: Any) -> int:
    """How deep it nests, counted no further than matters."""
    levels, inner = 0, [value]
    while inner and levels <= MOST_LEVELS:
        levels += 1
        inner = [
            entry
            for each in inner
            if isinstance(each, dict | list | tuple)
            for entry in (each.values() if isinstance(each, dict) else each)
        ]
    return levels


def _lists(value: Any) -> Any:
    """Tuples as the lists that JSON makes of them, so that only real losses differ."""
    if isinstance(value, dict):
        return {key: _lists(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_lists(entry) for entry in value]
    return value


class Fields:
    """An object of a document. Every method takes one field; `DamageError` if it is not so."""

    __slots__ = ("_values", "_where", "name")

    def __init__(self, name: str, values: object, where: str = "") -> None:
        """`name` is the stored object's, `where` leads to this place in it."""
        self.name, self._where = name, where
        if not isinstance(values, dict):
            what = where.removesuffix(".") or "it"
            raise damaged(name, f"{what} is {reprlib.repr(values)}, not an object")
        self._values: Json = values

    def __contains__(self, field: str) -> bool:
        """Whether the field is there, and not null."""
        return self._values.get(field) is not None

    def _take(self, field: str, kind: type[_T], what: str) -> _T:
        value = self._values.get(field)
        # Exactly: True is an int to Python, and 1.0 equals 1.
        if type(value) is not kind:
            raise self.wrong(field, what)
        return value

    def wrong(self, field: str, what: str) -> DamageError:
        if field not in self._values:
            return damaged(self.name, f"{self._where}{field} is missing")
        value = reprlib.repr(self._values[field])
        return damaged(self.name, f"{self._where}{field} is {value}, not {what}")

    def __iter__(self) -> Iterator[str]:
        """The names of its fields."""
        return iter(self._values)

    def number(self, field: str, *, least: int = 0, most: int = MOST) -> int:
        value = self._take(field, int, "a whole number")
        if not least <= value <= most:
            raise self.wrong(field, f"a number from {least} to {most}")
        return value

    def text(self, field: str) -> str:
        return self._take(field, str, "a text")

    def flag(self, field: str) -> bool:
        return self._take(field, bool, "true or false")

    def object(self, field: str) -> Fields:
        return Fields(self.name, self._values.get(field), f"{self._where}{field}.")

    def objects(self, field: str) -> list[Fields]:
        """A list of objects."""
        entries = self._take(field, list, "a list")
        return [
            Fields(self.name, entry, f"{self._where}{field}[{at}].")
            for at, entry in enumerate(entries)
        ]

    def list_of(self, field: str, kind: type[_T]) -> list[_T]:
        """A list of values of one type; `object` is any."""
        entries: list[_T] = self._take(field, list, "a list")
        if kind is not object and not set(map(type, entries)) <= {kind}:
            raise self.wrong(field, f"a list of {kind.__name__}")
        return entries

    def dictionary(self, field: str) -> Json:
        """An object as it is, which still has to pass `plain`."""
        return self._take(field, dict, "an object")

    def plain(self, field: str) -> Json:
        """An object that other layers understand, not too deep."""
        value = self.dictionary(field)
        if _levels(value) > MOST_LEVELS:
            raise self.wrong(field, f"at most {MOST_LEVELS} levels deep")
        return value

    def parsed(self, field: str, read: Callable[[str], _T]) -> _T:
        """A text that `read` understands; it raises `ConfigError` or ValueError at any other."""
        try:
            return read(self.text(field))
        except (ConfigError, ValueError, OverflowError) as error:
            raise self.wrong(field, f"what belongs there ({error})") from error
