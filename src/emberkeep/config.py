"""Settings: frozen dataclasses that are read from TOML and written as commented TOML.

A settings class declares each field with `setting`, which carries the default, the range and the
sentence that `to_toml` writes above it, and calls `check` when it is built. So a value is checked
once, by the class, whether it comes from a file, from the command line or from Python.

`load` refuses what it does not know: an unknown key gets the nearest valid name. Every complaint
names the file and the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import sys
import types
from collections.abc import Iterable, Mapping
from datetime import timedelta
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from emberkeep.errors import ConfigError, EmberkeepError

_Settings = TypeVar("_Settings")
_Table = dict[str, Any]

_UNSET = object()
_UNITS = {
    "ms": 1e-3, "millisecond": 1e-3,
    "s": 1.0, "sec": 1.0, "second": 1.0,
    "m": 60.0, "min": 60.0, "minute": 60.0,
    "h": 3600.0, "hour": 3600.0,
    "d": 86400.0, "day": 86400.0,
}  # fmt: skip
_LONGEST = timedelta(days=100_000)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


def setting(
    text: str,
    *,
    default: Any = dataclasses.MISSING,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    path: bool = False,
) -> Any:
    """A field of a settings class: `least` ≤ value, `above` < value, value < `below`. A `path`, or
    a list of them, is relative to the working directory (`absolute`).

    Without a default the key must be given. None as default means "not set": TOML has no null, so
    the key is then left out.
    """
    metadata = {"text": text, "least": least, "above": above, "below": below, "path": path}
    return dataclasses.field(default=default, metadata=metadata)


def check(settings: Any) -> None:
    """Holds every field against its type, range and choices; call it from `__post_init__`. What
    Python spells otherwise becomes what a file would give: a list a tuple, a `Path` its text."""
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        given = getattr(settings, field.name)
        value = _typed(given, hints[field.name], field)
        if value is not given:
            object.__setattr__(settings, field.name, value)
        hint = hints[field.name]
        choices = _choices(hint)
        unset = value is None and _required(hint) is not hint
        if choices and not unset and value not in choices:
            nearest = _nearest(str(value), choices)
            raise ConfigError(
                f"{field.name} must be one of {', '.join(choices)}, not {value!r}{nearest}"
            )
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                _check_range(field, number)


def _typed(value: Any, hint: Any, field: dataclasses.Field[Any]) -> Any:
    """`value` as its field's type, of what Python has beside TOML's; anything else is refused."""
    needed = _required(hint)
    if value is None and needed is not hint:
        return None
    if needed is timedelta:
        return as_time(field.name, value)
    if get_origin(needed) is Literal or _is_other(needed):
        if hasattr(needed, "__dataclass_fields__") and not isinstance(value, needed):
            raise ConfigError(f"{field.name} must be a {needed.__name__}, not {value!r}")
        return value
    if get_origin(needed) is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{field.name} must be a mapping, not {value!r}")
        return value
    if isinstance(value, os.PathLike) and field.metadata.get("path"):
        return os.fspath(value)
    if get_origin(needed) is tuple and isinstance(value, list | tuple):
        each = get_args(needed)[0]
        parts = tuple(_typed(part, each, field) for part in value)
        return value if parts == value and isinstance(value, tuple) else parts
    if not isinstance(value, bool | int | float | str):  # of numpy, for example
        if isinstance(value, Integral):
            value = int(value)
        elif isinstance(value, Real):
            value = float(value)
    return _converted(value, needed, field.name)


def _is_other(needed: Any) -> bool:
    """Whether it is a class that no TOML value becomes: it checks itself when it is made."""
    return isinstance(needed, type) and needed not in (bool, int, float, str)


def as_time(name: str, value: Any) -> timedelta:
    """A timedelta of 0 or more, or the text of one; anything else is refused as `name`."""
    try:
        time = value if isinstance(value, timedelta) else duration(value)
    except (ValueError, AttributeError):
        raise ConfigError(
            f"{name} must be a timedelta or a duration such as '90s' or '5min', not {value!r}"
        ) from None
    if time < timedelta(0):
        raise ConfigError(f"{name} must not be negative, not {time}")
    return time


def absolute(settings: _Settings) -> _Settings:
    """The same settings for a process that works in another directory: every path is absolute.
    URLs stay as they are."""
    changed: _Table = {}
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            changed[field.name] = absolute(value)
        elif value is not None and field.metadata.get("path"):
            several = isinstance(value, tuple)
            paths = tuple(
                path if "://" in path else os.path.abspath(path)
                for path in (value if several else (value,))
            )
            changed[field.name] = paths if several else paths[0]
    return dataclasses.replace(settings, **changed)  # type: ignore[type-var]


def load(kind: type[_Settings], path: str | Path, overrides: Iterable[str] = ()) -> _Settings:
    """Reads a TOML file; `overrides` are `section.key=value`, applied after the file, or
    `section.key=`, which leaves the key out."""
    text = read_text(path, "TOML", ConfigError)
    return parse(kind, text, source=str(path), overrides=overrides)


def read_text(path: str | Path, kind: str, error: type[EmberkeepError]) -> str:
    """The text of a file that is named by the user; `error` says why it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except IsADirectoryError:
        raise error(f"{path} is a directory; name the {kind} file in it") from None
    except UnicodeDecodeError as failure:
        raise error(f"{path} is not a {kind} file: byte {failure.start} is not UTF-8") from None
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror}") from None


def parse(
    kind: type[_Settings], text: str, *, source: str, overrides: Iterable[str] = ()
) -> _Settings:
    """Reads TOML text; `source` is named in complaints."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    for override in overrides:
        table = _merged(table, _override(override))
        source += f" with --set {override}"
    settings: _Settings = _build(kind, table, source, "")
    return settings


def duration(text: str) -> timedelta:
    """`"30min"`, `"1h 30min"`, `"5.7 minutes"`, `"2d"`; `ValueError` for anything else."""
    seconds, rest = 0.0, text.strip().lower()
    if not rest:
        raise ValueError(text)
    while match := _AMOUNT.match(rest):
        unit = match[2] if match[2] in _UNITS else match[2].removesuffix("s")
        if unit not in _UNITS:
            break
        seconds += float(match[1]) * _UNITS[unit]
        rest = rest[match.end() :]
    if rest or seconds > _LONGEST.total_seconds():
        raise ValueError(text)
    return timedelta(seconds=seconds)


def size(text: str) -> int:
    """`"2GB"`, `"512 MiB"`, `"1.5 TB"` in bytes; `ValueError` for anything else."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(text)
    base = 1024 if match[3] else 1000
    nbytes = float(match[1]) * base ** " kmgt".index(match[2] or " ")
    if nbytes >= 2**63:
        raise ValueError(text)
    return int(nbytes)


def to_toml(settings: Any) -> str:
    """Complete TOML, a comment above every key; `parse` gives the same settings back."""
    lines: list[str] = []
    _write(settings, "", lines)
    return "\n".join(lines).strip() + "\n"


def _build(kind: type[Any], table: _Table, source: str, prefix: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = get_type_hints(kind)
    for key in table:
        if key not in fields:
            what = "section" if not prefix or isinstance(table[key], dict) else "key"
            raise ConfigError(
                f"{source}: unknown {what} {prefix}{key}{_nearest(key, fields)}; "
                f"known: {', '.join(fields)}"
            )
    table = {key: value for key, value in table.items() if value is not _UNSET}
    values: _Table = {}
    for name, field in fields.items():
        hint, label = hints[name], prefix + name
        if dataclasses.is_dataclass(hint):
            inner = table.get(name, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{source}: {label} is a section: write [{label}] and its keys")
            values[name] = _build(hint, inner, source, label + ".")  # type: ignore[arg-type]
        elif name in table and get_origin(_required(hint)) is Mapping:
            values[name] = _named(table[name], get_args(_required(hint))[1], source, label)
        elif name in table:
            values[name] = _converted(table[name], hint, f"{source}: {label}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            choices = _choices(hint)
            remedy = f": choose one of {', '.join(choices)}" if choices else ""
            raise ConfigError(f"{source}: {label} is missing{remedy}")
    try:
        return kind(**values)
    except ConfigError as error:
        # What begins with one of its keys is about that key, anything else about the section.
        first = re.split(r"\W", str(error), maxsplit=1)[0]
        section = f"{prefix[:-1]}: " if prefix and first not in fields else prefix
        raise ConfigError(f"{source}: {section}{error}") from None


def _named(given: Any, kind: Any, source: str, label: str) -> _Table:
    """Values, or sections, by names that the user chooses."""
    if not isinstance(given, dict):
        raise ConfigError(f"{source}: {label} is a section: write [{label}] and its keys")
    given = {key: value for key, value in given.items() if value is not _UNSET}
    if not dataclasses.is_dataclass(kind):
        return {k: _converted(v, kind, f"{source}: {label}.{k}") for k, v in given.items()}
    built: _Table = {}
    for key, inner in given.items():
        if not isinstance(inner, dict):
            raise ConfigError(f"{source}: {label}.{key} is a section: write [{label}.{key}]")
        built[key] = _build(kind, inner, source, f"{label}.{key}.")  # type: ignore[arg-type]
    return built


def _converted(value: Any, hint: Any, label: str) -> Any:
    """`value` as the type that `hint` names; only int becomes float, and a list a tuple."""
    hint = _required(hint)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{label} must be a list, not {value!r}")
        return tuple(_converted(item, get_args(hint)[0], label) for item in value)
    if get_origin(hint) is Literal:
        hint = str
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{label} must be {wanted[hint]} of at most 64 bits")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigError(f"{label} must be {wanted[hint]}, not {value!r}")
    return value


def _check_range(field: dataclasses.Field[Any], value: float) -> None:
    least, above, below = (field.metadata.get(k) for k in ("least", "above", "below"))
    if math.isfinite(value) and not (
        (least is not None and value < least)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    ):
        return
    bounds = [
        f"{least:g} or more" if least is not None else "",
        f"above {above:g}" if above is not None else "",
        f"below {below:g}" if below is not None else "",
    ]
    wanted = " and ".join(bound for bound in bounds if bound) or "a finite number"
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    raise ConfigError(f"{field.name} must be {wanted}, not {shown}")


def _required(hint: Any) -> Any:
    """The type behind `X | None`."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(arm for arm in get_args(hint) if arm is not type(None))
    return hint


def _choices(hint: Any) -> tuple[str, ...]:
    hint = _required(hint)
    return get_args(hint) if get_origin(hint) is Literal else ()


def _nearest(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]}?)" if matches else ""


def _override(text: str) -> _Table:
    """`section.key=value` as a nested table; the value is TOML, or else a string as it stands; none
    unsets the key."""
    name, equals, value = text.partition("=")
    keys = _keys(name.strip())
    try:
        parsed: _Table = tomllib.loads(f"value = {value}") if value.strip() else {"value": _UNSET}
    except tomllib.TOMLDecodeError:
        parsed = {"value": value.strip()}
    if not equals or not all(keys) or len(parsed) > 1:
        raise ConfigError(
            f"--set takes section.key=value, or section.key= to leave a key out, not {text!r}"
        )
    table = parsed["value"]
    for key in reversed(keys):
        table = {key: table}
    return dict(table)


def _keys(name: str) -> list[str]:
    """The parts of a dotted name; one with a dot or a blank within may be quoted, as in TOML."""
    try:
        table: Any = tomllib.loads(f"{name} = 0")
    except tomllib.TOMLDecodeError:
        return name.split(".")
    keys = []
    while isinstance(table, dict):
        ((key, table),) = table.items()
        keys.append(key)
    return keys


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> _Table:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(value, dict):
            merged[key] = _merged(old if isinstance(old, dict) else {}, value)
        else:
            merged[key] = value
    return merged


def _write(settings: Any, prefix: str, lines: list[str]) -> None:
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            lines += ["", *(f"# {line}" for line in _summary(value)), f"[{prefix}{field.name}]"]
            _write(value, f"{prefix}{field.name}.", lines)
            continue
        if isinstance(value, Mapping) and any(map(dataclasses.is_dataclass, value.values())):
            lines.append(f"# {field.metadata['text']}")
            for key, one in value.items():
                lines += ["", f"[{prefix}{field.name}.{_literal(key)}]"]
                _write(one, "", lines)
            continue
        choices = _choices(hints[field.name])
        text = field.metadata["text"] + (f": {', '.join(choices)}" if choices else "")
        lines.append(f"# {text}")
        lines.append(f"# {field.name} =" if value is None else f"{field.name} = {_literal(value)}")


def _summary(settings: Any) -> list[str]:
    return [(type(settings).__doc__ or "").strip().splitlines()[0]]


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, which has one more character to escape.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = [f"{_literal(key)} = {_literal(item)}" for key, item in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    return repr(value)
