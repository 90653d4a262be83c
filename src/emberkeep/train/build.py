"""From settings to the parts of a run: samples, tables, model, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from emberkeep.cluster.base import ClusterSpec
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.processes import connect, servers
from emberkeep.data import Category, Criteo, Parquet, Source, Synthetic, Window, split
from emberkeep.errors import ConfigError
from emberkeep.models.baseline import DenseOnly
from emberkeep.models.deepfm import DeepFM
from emberkeep.models.dlrm import DLRM, DLRMShape
from emberkeep.models.pnn import PNN
from emberkeep.nn.embeddings import EmbeddingBags
from emberkeep.tables import Table
from emberkeep.train.run_config import RunConfig

CRITEO_DENSE = 13
CRITEO_FEATURES = tuple(f"C{field + 1}" for field in range(26))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Samples to train on and held-out ones, and what a model must know of them."""

    train: Window
    test: Window
    dense: int
    """Dense columns."""
    rows: Mapping[str, int | None]
    """Feature → ids that it can have; None: any."""
    best_auc: float | None
    """What the true probabilities reach on the held-out samples; None where they are unknown."""


def inputs(settings: RunConfig) -> Inputs:
    """Finds and counts the samples; a file that is missing or empty is refused here."""
    given, rows = settings.data, settings.tables.rows
    if given.source == "synthetic":
        synthetic = _synthetic(settings)
        train, test = _split(synthetic, settings)
        return Inputs(
            train=train,
            test=test,
            dense=CRITEO_DENSE,
            rows=synthetic.rows,
            best_auc=synthetic.bayes_auc(test.count() or 0, start=test.start),
        )
    source: Source
    if given.source == "criteo":
        dense = CRITEO_DENSE
        source = Criteo(given.paths, sizes=rows, on_malformed=given.on_malformed)
    else:
        dense = len(given.dense)
        source = Parquet(
            given.paths,
            label=given.label,
            dense=given.dense,
            log=given.log,
            categories=[Category(column=name, size=rows) for name in given.categories],
        )
    if given.samples is not None:
        source = Window(source=source, stop=given.samples)
    train, test = _split(source, settings)
    return Inputs(train=train, test=test, dense=dense, rows=feature_rows(settings), best_auc=None)


def feature_rows(settings: RunConfig) -> Mapping[str, int | None]:
    """Feature → ids that it can have; None: any. Looks at no samples."""
    given = settings.data
    if given.source == "synthetic":
        return _synthetic(settings).rows
    names = CRITEO_FEATURES if given.source == "criteo" else given.categories
    return dict.fromkeys(names, settings.tables.rows)


def _synthetic(settings: RunConfig) -> Synthetic:
    given = settings.data
    return Synthetic(
        samples=given.samples,
        rows_total=given.rows_total,
        skew=given.skew,
        seed=settings.run.seed,
    )


def _split(source: Source, settings: RunConfig) -> tuple[Window, Window]:
    found = source.count()
    if not found:
        raise ConfigError(f"data.paths hold no samples: {', '.join(settings.data.paths)}")
    return split(source, test=settings.data.test_fraction)


def embeddings(
    settings: RunConfig,
    rows: Mapping[str, int | None],
    *,
    steps: int = 0,
    rank: int = 0,
) -> EmbeddingBags:
    """One table per feature, on shards that fail as the settings say in a run of so many steps."""
    return EmbeddingBags(
        tables(settings, rows),
        optimizer=settings.optimizer.spec(),
        cluster=_cluster(settings, steps, rank),
        seed=settings.run.seed,
    )


def tables(settings: RunConfig, rows: Mapping[str, int | None]) -> list[Table]:
    """One for each feature."""
    given = settings.tables
    dynamic = given.kind == "dynamic"
    # DeepFM reads the first-order weight of an id from one more column of its row.
    dim = given.dim + 1 if settings.model.kind == "deepfm" else given.dim
    # On servers the tier is theirs.
    tier = settings.tier.spec() if settings.cluster.kind == "local" else None
    own = settings.optimizer.tables or {}
    unknown = sorted({*own} - {*rows})
    if unknown:
        raise ConfigError(
            f"optimizer.tables names {', '.join(unknown)}; the tables are {', '.join(rows)}"
        )
    without = sorted({*(settings.checkpoint.table_bits or ())} - {*rows})
    if without:
        raise ConfigError(
            f"checkpoint.table_bits names {', '.join(without)}; the tables are {', '.join(rows)}: "
            "name one of these, or leave it out"
        )
    return [
        Table(
            name,
            rows=None if dynamic else ids,
            capacity=given.capacity,
            dim=dim,
            on_full=given.on_full,
            tier=tier,
            pooling=given.pooling or "sum",
            optimizer=own[name].spec() if name in own else None,
        )
        for name, ids in rows.items()
    ]


def _cluster(settings: RunConfig, steps: int, rank: int) -> ClusterSpec:
    given, parity, tier = settings.cluster, settings.parity.spec(), settings.tier.spec()
    if given.kind == "servers":
        return servers(shards=given.shards, timing=given.timing(), parity=parity, tier=tier)
    if given.kind == "connect":
        return connect(
            given.addresses, token_file=given.token_file, certificate=given.certificate,
            key=given.key, authority=given.authority, timing=given.timing(), parity=parity,
            on_restart=given.on_restart,
        )  # fmt: skip
    if given.kind == "ray":
        from emberkeep.server.ray.ray_cluster import RayCluster

        started = given.workers > 1  # before the workers, with their tier
        return RayCluster(
            shards=given.shards, address=given.address, name=given.name, rank=rank,
            world=given.workers, timing=given.timing(), parity=parity,
            tier=None if started else tier, memory=given.memory,
            disk=None if started else given.disk, on_restart=given.on_restart,
        )  # fmt: skip
    failures = settings.failures.schedule(shards=given.shards, steps=steps)
    return local(shards=given.shards, failures=failures, parity=parity)


def model(settings: RunConfig, bags: nn.Module, *, features: int, dense: int) -> nn.Module:
    """The network over the embeddings."""
    given, dim, seed = settings.model, settings.tables.dim, settings.run.seed
    if given.kind == "dlrm":
        return DLRM(bags, _shape(settings), features=features, dense=dense, seed=seed)
    kind = DeepFM if given.kind == "deepfm" else PNN
    return kind(bags, dim=dim, features=features, dense=dense, hidden=given.top, seed=seed)


def baseline(settings: RunConfig, *, dense: int) -> nn.Module:
    """The same widths without embeddings."""
    return DenseOnly(_shape(settings), dense=dense, seed=settings.run.seed)


def dense_optimizer(settings: RunConfig, network: nn.Module) -> torch.optim.Optimizer:
    """Torch's own, over the parameters of the network; rows have their own optimizer."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
    }
    given = settings.dense_optimizer
    return kinds[given.kind](network.parameters(), lr=given.lr)


def use_one_thread() -> None:
    """Of torch, in this process: for runs that share a machine with others."""
    torch.set_num_threads(1)


def _shape(settings: RunConfig) -> DLRMShape:
    given = settings.model
    return DLRMShape(bottom=(*given.bottom, settings.tables.dim), top=(*given.top, 1))
