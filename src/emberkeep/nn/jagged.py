"""What a batch may be: ids by feature, or a jagged tensor such as TorchRec's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from emberkeep._types import I64
from emberkeep.errors import ConfigError, IdError

Ids: TypeAlias = "Tensor | tuple[Tensor, Tensor | Ends]"
Features: TypeAlias = "Mapping[str, Ids] | KeyedJagged"


@runtime_checkable
class KeyedJagged(Protocol):
    """What is used of TorchRec's KeyedJaggedTensor: feature by feature, sample by sample."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...


class Ends:
    """Bag ends that were computed from lengths and need no checking."""

    __slots__ = ("ends",)

    def __init__(self, ends: Tensor) -> None:
        self.ends: I64 = ends.numpy()


def by_feature(
    features: Features, scales: Mapping[str, Tensor]
) -> tuple[Mapping[str, Ids], Mapping[str, Tensor]]:
    """A batch as a mapping, with its per-sample weights: a jagged tensor is split by feature."""
    if isinstance(features, Mapping):
        return features, scales
    if not isinstance(features, KeyedJagged):
        raise ConfigError(
            "a batch is {feature: ids}, {feature: (values, offsets)} or an object with keys(), "
            f"values() and lengths(), not {type(features).__name__}"
        )
    keys, values, lengths = features.keys(), features.values(), features.lengths()
    lengths = lengths.to("cpu", torch.int64).reshape(len(keys), -1)
    weights = getattr(features, "weights_or_none", lambda: None)()
    counts = lengths.sum(1).tolist()
    if sum(counts) != values.numel():
        raise ConfigError(f"lengths add up to {sum(counts)}, there are {values.numel()} values")
    ids: dict[str, Ids] = {}
    for key, part, lengths_B in zip(keys, torch.split(values, counts), lengths, strict=True):
        one_hot = bool((lengths_B == 1).all())
        ids[key] = part if one_hot else (part, Ends(lengths_B.cumsum(0)))
    if weights is not None:
        if scales:
            raise ConfigError("the batch brings weights of its own: leave per_sample_weights out")
        scales = dict(zip(keys, torch.split(weights, counts), strict=True))
    return ids, scales


class Contents:
    """What a batch held, to tell whether it holds the same later: loaders fill buffers again.

    Lists, and tensors made in inference mode, never count as the same. Changes that torch does not
    count, through numpy, are not seen.
    """

    def __init__(self, features: Features) -> None:
        if isinstance(features, Mapping):
            parts: Iterable[Any] = features.values()
        else:
            weights = getattr(features, "weights_or_none", lambda: None)()
            given = (features.values(), features.lengths(), weights)
            parts = [part for part in given if part is not None]
        self._keys = list(features.keys())
        self._tensors = [
            item for part in parts for item in (part if isinstance(part, tuple) else (part,))
        ]
        self._versions = [_version(tensor) for tensor in self._tensors]

    def is_in(self, features: Features) -> bool:
        now = Contents(features)
        return (
            now._keys == self._keys
            and len(now._tensors) == len(self._tensors)
            and all(a is b for a, b in zip(now._tensors, self._tensors, strict=True))
            and None not in now._versions
            and now._versions == self._versions
        )


def _version(value: Any) -> int | None:
    """How often a tensor was written to; None where nobody counts."""
    if not isinstance(value, Tensor) or value.is_inference():
        return None
    return value._version


def to_ids(given: Tensor | Sequence[int], name: str, what: str = "ids") -> I64:
    """Ids from any device and of any integer type, as int64 in host memory."""
    if isinstance(given, Tensor) and given.dtype == torch.int64 and given.device.type == "cpu":
        return given.detach().numpy()
    try:
        ids = torch.as_tensor(given, device=None if isinstance(given, Tensor) else "cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(
            f"{name!r}: {what} are integers that fit 64 bits with a sign, as a tensor or a list "
            f"({error})"
        ) from error
    if ids.numel() == 0 and not isinstance(given, Tensor):
        ids = ids.to(torch.int64)  # of an empty list torch knows no type
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ConfigError(f"{name!r}: {what} are integers, not {ids.dtype}")
    found: I64 = ids.detach().to("cpu", torch.int64).numpy()
    if ids.dtype == torch.uint64 and found.size and found.min() < 0:
        raise IdError(f"{name!r}: id {int(found.min()) + 2**64} does not fit 63 bits")
    return found
