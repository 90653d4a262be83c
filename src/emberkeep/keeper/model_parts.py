"""What a model is made of: tables that can be followed, tables that cannot, and the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from emberkeep.checkpoint.targets import Subject
from emberkeep.errors import ConfigError
from emberkeep.keeper import followable
from emberkeep.keeper.combined_subject import CombinedSubject
from emberkeep.keeper.dense import Dense, Stateful, check_states
from emberkeep.keeper.torch_tables import Hook, TorchTables, embeddings
from emberkeep.nn.embeddings import EmbeddingBags, Embeddings

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a model consists of."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    """Those that were given, then those of emberkeep's modules that were not."""
    tables: TorchTables
    """Torch's embeddings that are followed row by row."""
    modules: tuple[nn.Module, ...]
    """The modules of these."""
    whole: Mapping[str, str]
    """Tables that are saved with the dense state, whole every time, and why."""
    subject: CombinedSubject
    """All rows: followed tables, and the clusters of emberkeep's modules."""
    dense: Dense

    def follow(self, timed: Callable[[Hook], Hook]) -> Callable[[], None]:
        """Begins to follow torch's tables, in hooks that `timed` may wrap; returns what ends it."""
        self.tables.follow(self.optimizers, timed)

        def replaced(*_: Any) -> None:
            self.tables.announce()

        handles = [
            module.register_load_state_dict_pre_hook(replaced)  # type: ignore[no-untyped-call]
            for module in self.modules
        ]

        def stop() -> None:
            self.tables.stop_following()
            for handle in handles:
                handle.remove()

        return stop


def find_parts(
    model: nn.Module, given: Optimizers, states: Mapping[str, Stateful], *, strict: bool, ranks: int
) -> Parts:
    """Finds everything that must be saved. Warns once of tables that cannot be followed, or refuses
    them if `strict`."""
    check_states(states)
    model = unwrapped(model)
    optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
    own = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, EmbeddingBags | Embeddings)
    ]
    alone = [path for path, module in own if not module.cluster.shared]
    if alone and ranks > 1:
        raise ConfigError(
            f"{alone[0]!r} holds rows of its own in every rank, which no rank could save alone: "
            "train it in one process, put its rows on servers, or use torch's embeddings under DDP"
        )
    optimizers += [
        module.optimizer for _, module in own if not any(module.optimizer is o for o in optimizers)
    ]
    tables, modules, whole = _followed(model, optimizers)
    _tell_whole(whole, strict=strict)
    row_state = {id(table.weight): table.state_names for table in tables.tables.values()}
    parts: list[tuple[str, Subject]] = [(path, module.cluster) for path, module in own]
    return Parts(
        optimizers=tuple(optimizers),
        tables=tables,
        modules=tuple(modules),
        whole=whole,
        subject=CombinedSubject([("", tables), *parts]),
        dense=Dense(model, optimizers, states, row_state),
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module behind DDP and torch.compile: its names are the same with and without."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _followed(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[TorchTables, list[nn.Module], dict[str, str]]:
    trained_by: dict[int, list[tuple[torch.optim.Optimizer, dict[str, Any]]]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                trained_by.setdefault(id(parameter), []).append((optimizer, group))
    tables, modules, whole = TorchTables(), [], {}
    for path, module in embeddings(model):
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        trainers = trained_by.get(id(weight), [])
        first = trainers[0] if trainers else None
        reason = followable.why_not(module, *(first or (None, {})))
        if len(trainers) > 1:
            reason = "it is trained more than once per step"
        if reason is None:
            tables.add(path, weight, first[0] if first else None)
            modules.append(module)
        else:
            whole[path] = reason
    return tables, modules, whole


def _tell_whole(whole: Mapping[str, str], *, strict: bool) -> None:
    if not whole:
        return
    reasons = "; ".join(f"{name!r}: {reason}" for name, reason in whole.items())
    if strict:
        raise ConfigError(
            f"these tables cannot be saved row by row: {reasons}; use SGD without momentum and "
            "weight decay, Adagrad or SparseAdam on float32 tables in host memory, emberkeep's own "
            "modules, or strict=False to save them whole every time"
        )
    warnings.warn(
        f"these tables are saved whole every time, and copied while training waits: {reasons}",
        stacklevel=4,
    )
