"""Nested state as plain data and tensors, and both as one safetensors file. No pickle.

What torch's objects call their state is dicts and lists of numbers, strings and tensors. `pack`
splits it: tensors go into a flat dict, everything else becomes JSON that says where they were.
`unpack` gives equal values of the same types back. What cannot be stored exactly is refused, by
the name under which it was found.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from emberkeep.errors import ConfigError, DamageError
from emberkeep.runtime.fields import Fields, parse

_KEY = "emberkeep"


@dataclass(frozen=True, slots=True)
class Packed:
    """State, split; the tensors are copies in host memory."""

    plain: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def encode(self) -> bytes:
        """One safetensors file: the plain part stands in its header."""
        content: bytes = safetensors.torch.save(
            self.tensors, metadata={_KEY: json.dumps(self.plain, allow_nan=False)}
        )
        return content

    @classmethod
    def decode(cls, content: bytes, name: str = "dense state") -> Packed:
        with reading_state(name):
            length = int.from_bytes(content[:8], "little")
            header = Fields(name, parse(name, content[8 : 8 + length]))
            plain = parse(name, header.object("__metadata__").text(_KEY).encode())
            return cls(plain, safetensors.torch.load(content))


def pack(value: Any, *, what: str = "state") -> Packed:
    """Splits state and copies its tensors; later changes do not reach the result."""
    tensors: dict[str, Tensor] = {}
    return Packed(_pack(value, tensors, what), tensors)


def unpack(packed: Packed) -> Any:
    """The state as it was, tensors in host memory; `DamageError` if it makes no sense."""
    with reading_state("state"):
        return _unpack(packed.plain, packed.tensors)


@contextmanager
def reading_state(what: str) -> Iterator[None]:
    """State is free in its form, so it cannot be held against one: whatever error it leads to where
    it is taken for what it should be, it is damaged."""
    try:
        yield
    except (
        ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
        safetensors.SafetensorError,
    ) as error:  # fmt: skip
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        raise DamageError(
            f"the {what} is no state of a keeper ({type(error).__name__}: {error}); restore "
            "another version"
        ) from error


def copied(tensor: Tensor, where: str) -> Tensor:
    """A contiguous copy in host memory."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ConfigError(f"{where} is a {tensor.layout} tensor, which cannot be stored")
    return tensor.detach().to("cpu", copy=True).contiguous()


def _pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
        # As it is, not coalesced: later sums would add up in another order.
        parts = {"indices": value._indices(), "values": value._values()}
        plain = _pack({**parts, "size": list(value.shape)}, tensors, where)
        return {"$sparse": {**plain, "coalesced": value.is_coalesced()}}
    if isinstance(value, Tensor):
        return {"$tensor": _put(copied(value, where), tensors, where)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        copy = torch.from_numpy(np.array(value, order="C"))
        return {"$array": _put(copy, tensors, where)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [_pack(item, tensors, f"{where}/{i}") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [_pack(item, tensors, f"{where}/{i}") for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        if isinstance(value, Counter):
            return {"$counter": _pairs(value, tensors, where)}
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _pack(item, tensors, f"{where}/{key}") for key, item in value.items()}
        return {"$dict": _pairs(value, tensors, where)}
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which cannot be stored: state is made of numbers, "
        "strings, bytes, tensors, arrays, lists, tuples and dicts"
    )


def _pairs(value: Mapping[Any, Any], tensors: dict[str, Tensor], where: str) -> list[Any]:
    return [
        [_pack(key, tensors, where), _pack(item, tensors, f"{where}/{key}")]
        for key, item in value.items()
    ]


def _put(tensor: Tensor, tensors: dict[str, Tensor], where: str) -> str:
    name, again = where, 1
    while name in tensors:
        again += 1
        name = f"{where}#{again}"
    tensors[name] = tensor
    return name


def _unpack(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(plain, list):
        return [_unpack(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        (kind, value), *_ = plain.items()
        match kind:
            case "$float":
                return float(value)
            case "$tensor":
                return tensors[value]
            case "$sparse":
                parts = _unpack(value, tensors)
                return torch.sparse_coo_tensor(
                    parts["indices"], parts["values"], parts["size"],
                    is_coalesced=parts["coalesced"], check_invariants=True,
                )  # fmt: skip
            case "$array":
                return tensors[value].numpy()
            case "$bytes":
                return base64.b64decode(value)
            case "$tuple":
                return tuple(_unpack(item, tensors) for item in value)
            case "$dict":
                return {_unpack(k, tensors): _unpack(v, tensors) for k, v in value}
            case "$counter":
                return Counter({_unpack(k, tensors): _unpack(v, tensors) for k, v in value})
    return {key: _unpack(item, tensors) for key, item in plain.items()}
