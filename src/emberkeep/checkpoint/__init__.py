"""From the engine to a repository and back. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emberkeep.checkpoint.overheads import Job
    from emberkeep.checkpoint.restore import Restored, load
    from emberkeep.checkpoint.save import Extras, Saving
    from emberkeep.checkpoint.saver import Checkpointer
    from emberkeep.checkpoint.spec import LOSSLESS, SaveSettings, VersionSpec

__all__ = [
    "LOSSLESS",
    "Checkpointer",
    "Extras",
    "Job",
    "Restored",
    "SaveSettings",
    "Saving",
    "VersionSpec",
    "load",
]

_MODULES = {
    "overheads": ["Job"],
    "restore": ["Restored", "load"],
    "save": ["Extras", "Saving"],
    "saver": ["Checkpointer"],
    "spec": ["LOSSLESS", "SaveSettings", "VersionSpec"],
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
