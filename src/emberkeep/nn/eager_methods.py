"""Methods that `torch.compile` leaves as they are."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])


def eager(method: _Method) -> _Method:
    """`torch.compiler.disable`, which loads the compiler (2 s of a core) when it is asked for: here
    that is left to a process that compiles."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    # What the compiler looks for before it looks into a function.
    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(_Method, called)
