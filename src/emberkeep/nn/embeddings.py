"""Embedding modules for PyTorch whose rows live in Emberkeep's tables.

Rows stay in host memory (or wherever the cluster keeps them); ids may come from any device and
outputs go to `device=`, or where `module.to()` says. The rows are not torch parameters: they are
trained by `module.optimizer`, a `torch.optim.Optimizer`, alone. Among `module.parameters()` one
scalar, the *stand-in*, is there for them: its gradient is the norm of all row gradients, so
`clip_grad_norm_` counts and scales the rows, and `requires_grad_(False)` freezes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from emberkeep._types import F32, I64
from emberkeep.cluster.base import ClusterSpec
from emberkeep.errors import ConfigError
from emberkeep.nn.eager_methods import eager
from emberkeep.nn.jagged import Ends, Features, Ids, to_ids
from emberkeep.nn.row_module import Pulled, RowModule
from emberkeep.rows.lookup import Bags, Layout, Lookup
from emberkeep.tables import Optimizer, Table

_INT64 = np.dtype(np.int64)


class EmbeddingBags(RowModule):
    """Many tables, one lookup: each feature's rows are pooled to one vector per sample.

    `forward(features)` takes `{feature: ids}` with ids `[B]` (one id per sample) or `[B, L]`,
    `{feature: (values, offsets)}` as `nn.EmbeddingBag` does, or an object with the `keys`, `values`
    and `lengths` of a KeyedJaggedTensor. It returns `[B, F, D]`, features in the order of the
    tables, or `{feature: [B, D]}` when dims or tiers differ: `output="dict"` returns that in any
    case, `output="tensor"` refuses dims that differ. `per_sample_weights={feature: weights}` scales
    the rows of a sum (a KeyedJaggedTensor brings its own); they get gradients.

    Gradients accumulate until `module.optimizer.step()`: one pull per forward, one push per step,
    for all tables. Under `no_grad` or after `eval()` nothing changes: no id is inserted, no row
    becomes dirty.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        optimizer: Optimizer,
        cluster: ClusterSpec | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        include_last_offset: bool = False,
        output: Literal["auto", "tensor", "dict"] = "auto",
    ) -> None:
        dims = sorted({table.dim for table in tables})
        if output not in ("auto", "tensor", "dict"):
            raise ConfigError(f"output must be 'auto', 'tensor' or 'dict', not {output!r}")
        if output == "tensor" and len(dims) > 1:
            raise ConfigError(f"output='tensor' needs one dim, the tables have {dims}: use 'dict'")
        if output == "auto":
            output = "tensor" if len({(t.dim, t.tier) for t in tables}) <= 1 else "dict"
        super().__init__(
            tables, optimizer=optimizer, cluster=cluster, device=device, seed=seed,
            include_last_offset=include_last_offset,
        )  # fmt: skip
        self.output: Literal["tensor", "dict"] = output

    def _make_layouts(self, groups: Sequence[Sequence[int]]) -> list[Layout]:
        layouts = []
        for group in groups:
            tables = [self.tables[t] for t in group]
            names = (
                list(self.features)
                if len(groups) == 1
                else [name for table in tables for name in table.features]
            )
            layouts.append(Layout(tables, {n: i for i, n in enumerate(names)}, len(names)))
        return layouts

    @eager
    def forward(
        self, features: Features, per_sample_weights: Mapping[str, Tensor] | None = None
    ) -> Tensor | dict[str, Tensor]:
        slabs = [self._shown(out) for out in self._look_up(features, per_sample_weights)]
        if len(slabs) == 1 and self.output == "tensor":
            return slabs[0]
        by_name = {
            feature.name: out[:, feature.column]
            for layout, out in zip(self._layouts, slabs, strict=True)
            for feature in layout.features
        }
        if self.output == "tensor":
            return torch.stack([by_name[name] for name in self.features], dim=1)
        return {name: by_name[name] for name in self.features}

    def _bags(self, name: str, given: Ids, scales: Tensor | None) -> Bags:
        values, offsets = given if isinstance(given, tuple) else (given, None)
        ids = to_ids(values, name)
        if offsets is None:
            if ids.ndim not in (1, 2):
                raise ConfigError(f"feature {name!r}: ids are [B] or [B, L], not {ids.shape}")
            length, ends = (1 if ids.ndim == 1 else ids.shape[1]), None
            count = ids.shape[0]
        else:
            ends = self._ends(name, offsets, ids.size)
            length, count = -1, ends.size
        weights = None
        if scales is not None:
            weights = scales.detach().to("cpu", torch.float32).numpy().reshape(-1)
            if weights.size != ids.size:
                raise ConfigError(
                    f"feature {name!r} has {ids.size} ids and {weights.size} per-sample weights"
                )
        bags = Bags(ids=ids.reshape(-1), count=count, length=length, ends=ends, scales=weights)
        return bags.without(self._paddings.get(name))

    def _one_hot(self, features: Features) -> list[Lookup] | None:
        if not isinstance(features, dict):
            return None
        lookups, batch = [], None
        for layout in self._layouts:
            try:
                arrays = [features[feature.name].numpy() for feature in layout.features]
            except (KeyError, AttributeError, TypeError, RuntimeError):
                return None
            batch = batch or arrays[0].shape
            for array in arrays:
                if array.dtype is not _INT64 or array.ndim != 1 or array.shape != batch:
                    return None
            for feature, array in zip(layout.features, arrays, strict=True):
                if feature.padding is not None and (array == feature.padding).any():
                    return None
            lookups.append(Lookup.one_hot(layout, arrays, batch[0], self.cluster.pool))
        return lookups

    def _ends(self, name: str, offsets: Tensor | Ends, values: int) -> I64:
        if isinstance(offsets, Ends):
            return offsets.ends
        starts = to_ids(offsets, name, what="offsets")
        ends = starts[1:] if self.include_last_offset else np.append(starts[1:], values)
        if (
            starts.ndim != 1
            or starts.size == 0
            or starts[0] != 0
            or (np.diff(starts) < 0).any()
            or (starts[-1] != values if self.include_last_offset else starts[-1] > values)
        ):
            last = f" and end at {values}" if self.include_last_offset else ""
            raise ConfigError(
                f"feature {name!r}: offsets must start at 0, never fall, stay within the {values} "
                f"values{last} (include_last_offset={self.include_last_offset})"
            )
        return ends

    def _batch(self, bags: Mapping[str, Bags]) -> int | None:
        first = next(iter(bags))
        for name, bag in bags.items():
            if bag.count != bags[first].count:
                raise ConfigError(
                    f"feature {name!r} has {bag.count} samples where {first!r} has "
                    f"{bags[first].count}"
                )
        return bags[first].count

    def _outputs(self, pulled: Pulled) -> list[Tensor]:
        outputs = [
            torch.empty(
                lookup.batch, lookup.layout.width, lookup.layout.tables[0].dim, device="cpu"
            )
            for lookup in pulled.lookups
        ]
        arrays = [out.numpy() for out in outputs]
        # The gradients of per-sample weights need the rows again; a maximum needs to know the row.
        if pulled.scaled or any(lookup.maxima.size for lookup in pulled.lookups):
            pulled.rows = self.cluster.pull([lookup.wanted for lookup in pulled.lookups])
            for lookup, rows_UD, out_BFD in zip(pulled.lookups, pulled.rows, arrays, strict=True):
                lookup.pooled(rows_UD, out_BFD)
        else:
            self.cluster.pull_bags(pulled.lookups, arrays)
        return outputs

    def _slab_gradient(self, g: int, pulled: Pulled, grads: Sequence[Tensor]) -> F32:
        grad: F32 = grads[g].detach().to("cpu", torch.float32).contiguous().numpy()
        return grad.reshape(-1, grad.shape[-1])


class Embeddings(RowModule):
    """Many tables, one lookup, no pooling: each id brings its own row.

    `forward` takes what `EmbeddingBags` takes and returns `{feature: rows}`: `ids.shape + (D,)`
    for a tensor of ids of any shape, `[len(values), D]` for jagged ones. Weights that a jagged
    tensor brings are for pooling, and are not looked at.
    """

    _pools = False

    def _make_layouts(self, groups: Sequence[Sequence[int]]) -> list[Layout]:
        layouts = []
        for group in groups:
            tables = [self.tables[t] for t in group]
            layouts.append(Layout(tables, {n: 0 for t in tables for n in t.features}, 1))
        return layouts

    @eager
    def forward(self, features: Features) -> dict[str, Tensor]:
        flat = self._look_up(features, None)
        names = [feature.name for layout in self._layouts for feature in layout.features]
        by_name = {name: self._shown(out) for name, out in zip(names, flat, strict=True)}
        return {name: by_name[name] for name in self.features}

    def _bags(self, name: str, given: Ids, scales: Tensor | None) -> Bags:
        ids = to_ids(given[0] if isinstance(given, tuple) else given, name)
        flat = ids.reshape(-1)
        padding = self._paddings.get(name)
        kept = None if padding is None else flat != padding
        if kept is None or kept.all():
            return Bags(ids=flat, count=flat.size, length=1, shape=ids.shape)
        flat = flat[kept]
        return Bags(ids=flat, count=flat.size, length=1, shape=ids.shape, kept=kept)

    def _batch(self, bags: Mapping[str, Bags]) -> int | None:
        return None  # every lookup is a bag of its own

    def _outputs(self, pulled: Pulled) -> list[Tensor]:
        outputs = []
        pulled_rows = self.cluster.pull([lookup.wanted for lookup in pulled.lookups])
        for lookup, rows_UD in zip(pulled.lookups, pulled_rows, strict=True):
            for f, bag in enumerate(lookup.bags):
                out = torch.empty(bag.ids.size, rows_UD.shape[1], device="cpu")
                lookup.gathered(rows_UD, f, out.numpy())
                if bag.kept is not None:  # padding has no row: zeros
                    whole = torch.zeros(bag.kept.size, rows_UD.shape[1], device="cpu")
                    whole[torch.from_numpy(bag.kept)] = out
                    out = whole
                outputs.append(out.reshape(*bag.shape, rows_UD.shape[1]))
        return outputs

    def _slab_gradient(self, g: int, pulled: Pulled, grads: Sequence[Tensor]) -> F32:
        before = sum(len(lookup.bags) for lookup in pulled.lookups[:g])
        slab_grads = grads[before : before + len(pulled.lookups[g].bags)]
        dim = pulled.lookups[g].layout.tables[0].dim
        parts = [
            grad.detach().to("cpu", torch.float32).reshape(-1, dim).numpy() for grad in slab_grads
        ]
        bags = pulled.lookups[g].bags
        return np.concatenate(
            [
                part if bag.kept is None else part[bag.kept]
                for part, bag in zip(parts, bags, strict=True)
            ]
        )
