"""What a tier's keeper stores beside the rows, as one file that proves it is whole.

The file is safetensors, so that other tools can read it. The metadata in its header begins with
the XXH3 128-bit digest of the file's name, a zero byte and the file, the digest itself being 32
zeros there: flipped bits, a torn file and the file of another step are all noticed before anything
of it is used.
"""

from __future__ import annotations

import json

import xxhash

from emberkeep._types import Json
from emberkeep.errors import DamageError
from emberkeep.keeper.plain_state import Packed, reading_state, unpack
from emberkeep.runtime.fields import Fields, parse

HEAD = b'{"__metadata__":{"xxh3_128":"'
_NONE = b"0" * 32
_AT = 8 + len(HEAD)  # the length of the header comes first
_PLAIN = "emberkeep"
BESIDE = "beside"  # begins the names of tensors that are not of the dense state


def encode(name: str, dense: Packed, beside: Packed) -> list[bytes | memoryview]:
    """The file called `name`, in pieces; `beside` is whatever state was packed as `BESIDE`."""
    assert not any(key.startswith(BESIDE) for key in dense.tensors)
    both = Packed(
        {"dense": dense.plain, "beside": beside.plain}, {**dense.tensors, **beside.tensors}
    )
    content = both.encode()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = {"xxh3_128": _NONE.decode(), **header.pop("__metadata__")}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    assert head[8:_AT] == HEAD
    tensors = memoryview(content)[start:]
    digest = _digest(name, head, tensors)
    return [head[:_AT] + digest + head[_AT + len(_NONE) :], tensors]


def decode(name: str, content: bytes) -> tuple[Packed, Json]:
    """Dense state and what stood beside it; raises `DamageError` if it is not what was written.

    A file from before there were digests is taken as it is: the next one has one.
    """
    if content[8:_AT] != HEAD:
        return _decode_without_digest(name, content)
    stated = content[_AT : _AT + len(_NONE)]
    view = memoryview(content)
    if _digest(name, content[:_AT] + _NONE, view[_AT + len(_NONE) :]) != stated:
        raise damaged(name, "its content does not match its digest, which also names the step")
    both = _decoded(name, content)
    others = {key: t for key, t in both.tensors.items() if key.startswith(BESIDE)}
    dense = {key: t for key, t in both.tensors.items() if key not in others}
    plain = Fields(name, both.plain)
    beside = _beside(name, Packed(plain.dictionary("beside"), others))
    return Packed(plain.dictionary("dense"), dense), beside


def _decode_without_digest(name: str, content: bytes) -> tuple[Packed, Json]:
    try:
        header = parse(name, content[8 : 8 + int.from_bytes(content[:8], "little")])
        keys = set(Fields(name, header).object("__metadata__"))
    except DamageError as error:
        raise damaged(name, "it has no readable header") from error
    # Files from before have this key alone: damage of the digest's own key adds another.
    if keys != {_PLAIN}:
        raise damaged(name, "it has no digest")
    beside = _beside(name, _decoded(name, content))
    with reading_state(name):
        return Packed.decode(beside.pop("dense")), beside


def _beside(name: str, packed: Packed) -> Json:
    """What stands beside the dense state: the place of the reader, and what was lost so far."""
    beside = unpack(packed)
    fields = Fields(name, beside)
    for field in ("reader", "losses"):
        fields.dictionary(field)
    whole: Json = beside
    return whole


def _decoded(name: str, content: bytes) -> Packed:
    try:
        return Packed.decode(content)
    except DamageError as error:
        raise damaged(name, str(error)) from error


def damaged(name: str, why: str) -> DamageError:
    return DamageError(
        f"{name}, the state beside a tier's rows, is damaged: {why}; nothing was loaded. If a copy "
        "exists, bring that file back; else go back to a version: with resume(fall_back=True) "
        "where ek.tiered keeps some, or into a new tier",
        name=name,
    )


def _digest(name: str, *parts: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128(name.encode() + b"\0")
    for part in parts:
        digest.update(part)
    return digest.hexdigest().encode()
