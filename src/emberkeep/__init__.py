"""Emberkeep keeps the embedding tables of recommendation models alive.

Names are loaded when they are first used, so that `import emberkeep` costs nothing: neither torch
nor numba is imported before something needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emberkeep.checkpoint.overheads import Job
    from emberkeep.cluster.failure_schedule import fail_at, random_failures
    from emberkeep.cluster.local.local_cluster import local
    from emberkeep.cluster.remote.processes import connect, servers
    from emberkeep.erasure.codes import Parity
    from emberkeep.errors import EmberkeepError, ShardLostError
    from emberkeep.inference.follower import Follower
    from emberkeep.keeper import Keeper, TierKeeper
    from emberkeep.keeper.calibration import calibrate
    from emberkeep.models.deepfm import DeepFM
    from emberkeep.models.dlrm import DLRM
    from emberkeep.models.pnn import PNN
    from emberkeep.nn.embeddings import EmbeddingBags, Embeddings
    from emberkeep.server.ray.ray_cluster import ray_cluster
    from emberkeep.strategies import (
        all_versions,
        auto,
        check_n_run,
        cpr,
        ecrm,
        incr_cp,
        incremental,
        parity,
        partial,
        tiered,
    )
    from emberkeep.tables import (
        SGD,
        Adagrad,
        Adam,
        Momentum,
        Normal,
        RowWiseAdagrad,
        Table,
        Tier,
        Uniform,
    )

__version__ = "0.1.0"

_HOMES = {
    "checkpoint.overheads": ("Job",),
    "cluster.failure_schedule": ("fail_at", "random_failures"),
    "cluster.local.local_cluster": ("local",),
    "cluster.remote.processes": ("connect", "servers"),
    "errors": ("EmberkeepError", "ShardLostError"),
    "inference.follower": ("Follower",),
    "keeper": ("Keeper", "TierKeeper"),
    "keeper.calibration": ("calibrate",),
    "models.deepfm": ("DeepFM",),
    "models.dlrm": ("DLRM",),
    "models.pnn": ("PNN",),
    "nn.embeddings": ("EmbeddingBags", "Embeddings"),
    "erasure.codes": ("Parity",),
    "server.ray.ray_cluster": ("ray_cluster",),
    "strategies": (
        "all_versions", "auto", "check_n_run", "cpr", "ecrm", "incr_cp", "incremental", "parity",
        "partial", "tiered",
    ),
    "tables": (
        "SGD", "Adagrad", "Adam", "Momentum", "Normal", "RowWiseAdagrad", "Table", "Tier",
        "Uniform",
    ),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DLRM",
    "PNN",
    "SGD",
    "Adagrad",
    "Adam",
    "DeepFM",
    "EmbeddingBags",
    "Embeddings",
    "EmberkeepError",
    "Follower",
    "Job",
    "Keeper",
    "Momentum",
    "Normal",
    "Parity",
    "RowWiseAdagrad",
    "ShardLostError",
    "Table",
    "Tier",
    "TierKeeper",
    "Uniform",
    "__version__",
    "all_versions",
    "auto",
    "calibrate",
    "check_n_run",
    "connect",
    "cpr",
    "ecrm",
    "fail_at",
    "incr_cp",
    "incremental",
    "local",
    "parity",
    "partial",
    "random_failures",
    "ray_cluster",
    "servers",
    "tiered",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'emberkeep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"emberkeep.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
