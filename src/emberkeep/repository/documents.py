"""Small JSON objects that prove they are whole.

Every JSON object of a repository has the same envelope: its body, preceded by the digest of the
body's exact bytes. So a flipped, torn or foreign file is recognised as such before anything in it
is believed, in any format to come, and the file still is plain JSON for other tools.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager

import xxhash

from emberkeep._types import Json
from emberkeep.errors import ConfigError, DamageError, FormatError
from emberkeep.runtime.fields import Fields, damaged, parse

FORMAT = 2
"""The format that this release writes. Format 1 is read, and continued, by every later release."""

_HEAD = b'{"xxh3_128":"'
_MIDDLE = b'","body":'
_TAIL = b"}\n"
_HEX = 32
IDENTIFYING = len(_HEAD) + _HEX
"""So many bytes of a document tell it from any other."""

_LONG_NBYTES = 2**16
_OVERHEAD = len(_HEAD) + _HEX + len(_MIDDLE) + len(_TAIL)


def encode(name: str, kind: str, repository: str, body: Json) -> bytes:
    """The bytes of a document; the body must be JSON in the strict sense (no NaN, string keys).

    It says its own name and repository, so that a whole document in the wrong place is recognised.
    """
    try:
        text = json.dumps(
            {"kind": kind, "format": FORMAT, "name": name, "repository": repository, **body},
            allow_nan=False,
            ensure_ascii=False,
            separators=(",", ":"),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the {kind} cannot be stored as JSON: {error}") from error
    content = text.encode()
    return _HEAD + _digest(content) + _MIDDLE + content + _TAIL


def decode(name: str, data: bytes, kind: str, repository: str | None = None) -> Fields:
    """The body of the document called `name`, of which nothing was looked at but what follows.

    Raises `DamageError` if a single bit differs from what was written or another document stands
    under that name, and `FormatError` if a newer release wrote it.
    """
    content = data[len(_HEAD) + _HEX + len(_MIDDLE) : -len(_TAIL)]
    if len(data) < _OVERHEAD or data != _HEAD + _digest(content) + _MIDDLE + content + _TAIL:
        raise damaged(name, "its content does not match its digest")
    with _uncollected(len(content)):
        body = Fields(name, parse(name, content))
    if body.number("format", least=1) > FORMAT:
        release = body.text("release") if "release" in body else "of that format"
        raise FormatError(
            f"{name} has format {body.number('format')}, this release reads up to {FORMAT}: "
            f"upgrade to emberkeep {release} or newer"
        )
    expected = {"kind": kind, "name": name, "repository": repository or body.text("repository")}
    for field, value in expected.items():
        if body.text(field) != value:
            raise DamageError(
                f"{name} is damaged: it says {field} {body.text(field)!r} where {value} belongs, "
                "so it was swapped with another object",
                name=name,
            )
    return body


@contextmanager
def _uncollected(nbytes: int) -> Iterator[None]:
    """A long document becomes many objects, none of them garbage and none in a cycle: to look for
    some meanwhile, among all that the process holds, takes several times as long as to read it."""
    if nbytes < _LONG_NBYTES or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _digest(content: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(content).encode()
