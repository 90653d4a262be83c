"""The training loop: one pass over the samples, then AUC and log-loss on held-out ones.

The same settings give the same bits: the digest of a result covers every trained row and every
dense parameter. It does not depend on the number of threads that rows are updated with; torch
makes that promise for a given number of its own threads. Nor does it depend on how many shards
hold the rows, or where: each makes the digest of its own, and no row leaves it. Nor does it depend
on how often the run was stopped and resumed, where versions are saved in float32.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext

import numpy as np
import torch
import xxhash
from torch import nn

from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.cluster.protected_cluster import tier_use
from emberkeep.cluster.remote.remote_cluster import RemoteCluster
from emberkeep.data import Batch, Reader, Window
from emberkeep.data.accuracy import auc, log_loss
from emberkeep.errors import ConfigError, GradientError
from emberkeep.keeper import Keeper
from emberkeep.models.layers import Ids
from emberkeep.nn.embeddings import EmbeddingBags
from emberkeep.nn.row_module import dense_parameters
from emberkeep.rows.row_digest import RowDigest
from emberkeep.train import build
from emberkeep.train.hooks import Hook, Start, Step
from emberkeep.train.kept_run import Keeping, Progress
from emberkeep.train.result import Result
from emberkeep.train.run_config import RunConfig
from emberkeep.train.width_calibration import calibrate_when_due, check_calibration


def run(
    settings: RunConfig, *, hooks: Sequence[Hook] = (), fresh: bool = False, rank: int = 0
) -> Result:
    """Trains, evaluates, and if asked to does the same with the network that has no embeddings.

    With `checkpoint.path` set the run goes on from the newest version that is there, unless
    `fresh` starts it over; with `tier.every` set, from the step that is durable in the tier.

    With `cluster.workers` this process is one `rank` of them, and torch.distributed is set up. The
    result is the same on all but for the held-out samples, which rank 0 alone looks at.
    """
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.close)
        check_start(settings, fresh)
        return _run(settings, hooks, fresh, rank, stack)


def check_start(settings: RunConfig, fresh: bool) -> None:
    """Refuses to start a run over that cannot, and to start one that is not saved as its settings
    say."""
    if fresh and settings.tier.every is not None and not settings.two_levels:
        raise ConfigError(
            f"a run that its tier keeps starts over once {settings.tier.path} is removed; leave "
            "--fresh out"
        )
    if fresh and settings.checkpoint.path is None:
        raise ConfigError(
            "a fresh start is for runs that are saved: set checkpoint.path, or leave --fresh out"
        )
    if fresh and settings.checkpoint.start_from is not None:
        raise ConfigError(
            "a fresh start begins with nothing, also not with checkpoint.start_from: leave one of "
            "them out, or set another checkpoint.path to start from there once more"
        )
    tiered, given = settings.tier.every is not None, settings.checkpoint
    unused = [f"checkpoint.{key}" for key in given.without_effect()]
    if unused:
        kept = "tier.every keeps the run exactly, in its tier" if tiered else "the run saves none"
        raise ConfigError(
            f"{', '.join(unused)}: for versions in a repository, and {kept}; set checkpoint.path, "
            "or leave out what is for versions"
        )
    if given.metrics_port is not None and given.path is None and not tiered:
        raise ConfigError(
            "checkpoint.metrics_port serves the metrics of a run that is kept: set "
            "checkpoint.path or tier.every, or leave it out"
        )


def _run(
    settings: RunConfig, hooks: Sequence[Hook], fresh: bool, rank: int, stack: ExitStack
) -> Result:
    inputs = build.inputs(settings)
    batch_size, world = settings.run.batch_size, settings.cluster.workers
    steps = -(-(inputs.train.count() or 0) // batch_size)
    bags = build.embeddings(settings, inputs.rows, steps=steps, rank=rank)
    cluster = bags.cluster
    if isinstance(cluster, LocalCluster) or (isinstance(cluster, RemoteCluster) and cluster.tiered):
        stack.callback(cluster.close)
    network = build.model(settings, bags, features=len(inputs.rows), dense=inputs.dense)
    trained = network if world == 1 else nn.parallel.DistributedDataParallel(network)
    optimizers = [bags.optimizer, build.dense_optimizer(settings, network)]
    for hook in hooks:
        hook.on_start(Start(settings=settings, inputs=inputs, bags=bags, network=network))

    keeping = Keeping(settings=settings, fresh=fresh, hooks=hooks)
    start = time.perf_counter()
    progress = fit(
        trained,
        optimizers,
        inputs.train,
        batch_size,
        hooks=hooks,
        phase="embeddings",
        keeping=keeping if settings.checkpoint.path or settings.tier.every else None,
        place=(rank, world),
    )
    seconds = time.perf_counter() - start
    tier = tier_use([bags.cluster])
    for hook in hooks:
        hook.on_trained()
    found_auc = found_log_loss = math.nan
    if rank == 0:
        found_auc, found_log_loss = evaluate(network, inputs.test, batch_size)

    baseline_auc = baseline_log_loss = None
    if settings.run.compare:
        plain = build.baseline(settings, dense=inputs.dense)
        optimizer = build.dense_optimizer(settings, plain)
        fit(plain, [optimizer], inputs.train, batch_size, hooks=hooks, phase="baseline")
        baseline_auc, baseline_log_loss = evaluate(plain, inputs.test, batch_size)

    digests = {table.name: bags.cluster.digest(table.name) for table in bags.tables}
    result = Result(
        settings=settings,
        samples=inputs.train.count() or 0,
        steps=progress.steps,
        seconds=seconds,
        samples_per_second=world * progress.samples / seconds,
        loss=float(np.mean(progress.losses)),
        test_samples=inputs.test.count() or 0,
        auc=found_auc,
        log_loss=found_log_loss,
        baseline_auc=baseline_auc,
        baseline_log_loss=baseline_log_loss,
        best_auc=inputs.best_auc,
        rows=sum(table.slots for table in bags.tables),
        rows_trained=sum(digest.rows for digest in digests.values()),
        peak_memory_nbytes=_peak_memory_nbytes(),
        digest=digest(digests, network),
        resumed_step=progress.resumed_step,
        checkpoints=progress.costs,
        recoveries=progress.recoveries,
        tier=tier,
    )
    for hook in hooks:
        hook.on_end(result)
    return result


def fit(
    network: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    samples: Window,
    batch_size: int,
    *,
    hooks: Sequence[Hook],
    phase: str,
    keeping: Keeping | None = None,
    place: tuple[int, int] = (0, 1),
) -> Progress:
    """One pass in the order of the source, or the rest of one that was saved.

    As one of several ranks, `place`, it trains on its part of every batch; a last batch that cannot
    be shared evenly is left out.
    """
    network.train()
    criterion = nn.BCEWithLogitsLoss()
    rank, world = place
    count = samples.count() or 0
    steps = -(-count // batch_size) if world == 1 else count // batch_size
    progress = Progress(steps)
    if keeping is not None:
        check_calibration(keeping.settings.checkpoint, steps)
    with ExitStack() as stack:
        reader = stack.enter_context(
            Reader(
                samples, batch_size=batch_size // world, rank=rank, world=world, drop_last=world > 1
            )
        )
        keeper: Keeper | None = None
        if keeping is not None:
            keeper = keeping.begin(network, optimizers, reader, progress)
            stack.enter_context(keeper)

        bags = [module for module in network.modules() if isinstance(module, EmbeddingBags)]
        ahead: list[tuple[Batch, _Tensors]] = []

        def loss_of(batch: Batch) -> torch.Tensor:
            dense, ids, labels = _tensors(batch)
            loss: torch.Tensor = criterion(network(dense, ids), labels)
            return loss

        def train(batch: Batch) -> None:
            prepared = ahead.pop() if ahead else None
            if prepared is not None and prepared[0] is batch:
                dense, ids, labels = prepared[1]
            else:
                dense, ids, labels = _tensors(batch)
            loss = criterion(network(dense, ids), labels)
            following = reader.peek() if any(bag.cluster.reads_ahead for bag in bags) else None
            if following is not None:  # never past a version: the reader knows its budget
                ahead.append((following, _tensors(following)))
                for bag in bags:
                    bag.prefetch(ahead[0][1][1])
            number, value = progress.steps + 1, loss.item()
            if not math.isfinite(value):
                raise GradientError(
                    f"the loss is {value} at step {number}: training diverged; lower "
                    "optimizer.lr or dense_optimizer.lr"
                )
            loss.backward()
            # Rows first: where a shard is lost the push changes nothing, and the rest must not.
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            progress.add(value, len(batch))
            if keeper is not None and keeping is not None:
                keeper.step()
                calibrate_when_due(
                    keeper, keeping.settings.checkpoint, step=progress.steps, total=steps,
                    samples=samples, place=reader.samples, batch_size=batch_size, loss_of=loss_of,
                    optimizers=optimizers,
                )  # fmt: skip
            step = Step(
                phase=phase, number=number, steps=steps, samples=reader.samples, loss=value,
                cut=keeper is not None and keeper.cut_step == keeper.steps,
            )  # fmt: skip
            for hook in hooks:
                hook.on_step(step)

        if keeper is None:
            for batch in reader:
                train(batch)
            return progress
        # Ranks cannot go back alone: what only a full recovery helps ends them all, and they
        # resume from the newest version when they are started again.
        surviving = keeper.surviving if world == 1 else nullcontext
        while True:
            for batch in keeper.batches():
                with surviving():
                    train(batch)
            with surviving():
                keeper.close()
                break
        progress.costs, progress.recoveries = keeper.costs(), keeper.recoveries()
    return progress


def evaluate(network: nn.Module, samples: Window, batch_size: int) -> tuple[float, float]:
    """AUC and log-loss; changes nothing in the model."""
    training = network.training
    network.eval()
    logits, labels = [], []
    with torch.no_grad(), Reader(samples, batch_size=batch_size) as reader:
        for batch in reader:
            dense, ids, truth = _tensors(batch)
            logits.append(network(dense, ids).numpy())
            labels.append(truth.numpy())
    network.train(training)
    truth_all, logits_all = np.concatenate(labels), np.concatenate(logits)
    return auc(truth_all, logits_all), log_loss(truth_all, logits_all)


def digest(tables: Mapping[str, RowDigest], network: nn.Module) -> str:
    """Of every trained row, by its table's digest, and of every dense parameter."""
    digest = xxhash.xxh3_128()
    for table, rows in tables.items():
        digest.update(f"{table}/{rows.rows}/{rows.low:x}/{rows.high:x};".encode())
    for name, parameter in sorted(dense_parameters(network)):
        digest.update(f"{name};".encode())
        digest.update(parameter.detach().contiguous().numpy().data)
    return digest.hexdigest()


_Tensors = tuple[torch.Tensor, Ids, torch.Tensor]


def _tensors(batch: Batch) -> _Tensors:
    ids: Ids = {
        feature: (torch.from_numpy(given[0]), torch.from_numpy(given[1]))
        if isinstance(given, tuple)
        else torch.from_numpy(given)
        for feature, given in batch.ids.items()
    }
    return torch.from_numpy(batch.dense), ids, torch.from_numpy(batch.labels)


def _peak_memory_nbytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
