"""What is used of TorchRec's jagged tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class KeyedJagged(Protocol):
    """What is used of TorchRec's KeyedJaggedTensor: feature by feature, sample by sample."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...
