"""Embedding modules for PyTorch whose rows live in Emberkeep's tables.

Rows stay in host memory (or wherever the cluster keeps them); ids may come from any device and
outputs go to `device=`. The rows are not torch parameters: they are trained by `module.optimizer`,
a `torch.optim.Optimizer`, through one *handle*, a scalar parameter whose gradient is the norm of
all row gradients. Whatever scales the handle's gradient before the step, `GradScaler.unscale_` or
`clip_grad_norm_`, scales the rows' gradients with it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from emberkeep._types import F32, I64, RowIds
from emberkeep.cluster.base import Cluster, ClusterSpec
from emberkeep.cluster.local.local_cluster import Local
from emberkeep.errors import ConfigError, IdError, StateError
from emberkeep.nn.jagged import KeyedJagged
from emberkeep.nn.row_optimizer import RowOptimizer
from emberkeep.rows.lookup import Bags, Layout, Lookup, merge
from emberkeep.tables import Optimizer, Table, check_tables

# Backward passes without a step after which a forgotten optimizer is the likely reason.
_FORGOTTEN_STEPS = 256
_INT64 = np.dtype(np.int64)


Ids: TypeAlias = "Tensor | tuple[Tensor, Tensor | _Ends]"
Features: TypeAlias = "Mapping[str, Ids] | KeyedJagged"


class _Rows(torch.autograd.Function):
    """Connects looked-up rows to the graph; their gradients go to the module, not to a tensor."""

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor, module: _Module, pulled: _Pulled, *scales: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.module, ctx.pulled = module, pulled
        return tuple(module._outputs(pulled))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        module, pulled = ctx.module, ctx.pulled
        scale_grads = module._accumulate(pulled, grads, ctx.needs_input_grad[3:])
        # The value is of no importance: a hook on the handle replaces it by the norm.
        return (torch.zeros(()), None, None, *scale_grads)


class _Pulled:
    """One forward pass: the lookups of each slab, and which features brought weights.

    `rows` are the unique rows of each slab, where they had to be pulled.
    """

    __slots__ = ("lookups", "rows", "scaled")

    def __init__(self, lookups: list[Lookup], scaled: list[tuple[int, int]]) -> None:
        self.lookups = lookups
        self.scaled = scaled
        self.rows: list[F32] | None = None


class _Waiting:
    """Gradients that wait for a step: by slab, with their square norms.

    An object of its own because `nn.Module` makes each assignment to an attribute slow.
    """

    __slots__ = ("grads", "norm", "passes", "squares")

    def __init__(self, slabs: int) -> None:
        self.grads: list[tuple[RowIds, F32] | None] = [None] * slabs
        self.drop()

    def drop(self) -> None:
        self.grads = [None] * len(self.grads)
        self.squares = [0.0] * len(self.grads)
        self.norm = 0.0
        self.passes = 0


class _Module(nn.Module):
    """What `EmbeddingBags` and `Embeddings` share: tables, the pull and the push of a step."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        optimizer: Optimizer,
        cluster: ClusterSpec | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        include_last_offset: bool = False,
    ) -> None:
        super().__init__()
        self.tables = check_tables(tables)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer= takes a spec such as emberkeep.Adagrad(lr=0.02), not {optimizer!r}"
            )
        self.device = torch.device(device)
        self.include_last_offset = include_last_offset
        self.cluster: Cluster = (cluster or Local()).open(self.tables, optimizer, seed=seed)
        self.features = tuple(name for table in self.tables for name in table.features)
        self._layouts = self._make_layouts(self.cluster.groups)
        # Not registered: a parameter would be averaged by DDP and "trained" by other optimizers.
        self._handle = [nn.Parameter(torch.zeros(()))]
        self._handle[0].register_post_accumulate_grad_hook(self._set_norm)  # type: ignore[no-untyped-call]
        self.optimizer = RowOptimizer(self, self._handle[0], optimizer.lr)
        self._waiting = _Waiting(len(self._layouts))
        self._next: list[tuple[Features, _Pulled] | None] = [None]

    def _make_layouts(self, groups: Sequence[Sequence[int]]) -> list[Layout]:
        raise NotImplementedError

    def _outputs(self, pulled: _Pulled) -> list[Tensor]:
        raise NotImplementedError

    def _slab_gradient(self, g: int, pulled: _Pulled, grads: Sequence[Tensor]) -> F32:
        raise NotImplementedError

    # -- rows ------------------------------------------------------------------------------------

    def touched_ids(self, table: str) -> Tensor:
        """The ids of a table's rows that were trained and not deleted since, ascending."""
        return torch.from_numpy(self.cluster.touched_ids(self._known(table)))

    def rows(self, table: str, ids: Tensor | Sequence[int]) -> dict[str, Tensor]:
        """All planes of rows: `weight` and what the optimizer remembers. A copy."""
        planes = self.cluster.read(self._known(table), _ids(torch.as_tensor(ids), table))
        return {name: torch.from_numpy(values) for name, values in planes.items()}

    def delete(self, table: str, ids: Tensor | Sequence[int]) -> int:
        """Takes rows back to their initial state; dynamic ids leave. Counts the trained ones."""
        return self.cluster.delete(self._known(table), _ids(torch.as_tensor(ids), table))

    def _known(self, table: str) -> str:
        names = [known.name for known in self.tables]
        if table not in names:
            raise ConfigError(f"there is no table {table!r}; the tables are {', '.join(names)}")
        return table

    # -- forward ---------------------------------------------------------------------------------

    def prefetch(self, features: Features) -> None:
        """Says which batch comes next: where rows live in files or on servers, they are read beside
        the work on the present batch. Returns at once; call it between `forward` and the step.

        Handing the same object to `forward` then is quickest; any other batch is as right.
        """
        if not self.cluster.reads_ahead:
            return
        pulled, _ = self._planned(features, None)
        self._next[0] = (features, pulled)
        self.cluster.fetch([lookup.wanted for lookup in pulled.lookups], ahead=True)

    def _look_up(
        self, features: Features, scales: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, ...]:
        ahead, self._next[0] = self._next[0], None
        if ahead is not None and ahead[0] is features and not (scales or ahead[1].scaled):
            return self._outputs_of(ahead[1], ())
        return self._outputs_of(*self._planned(features, scales))

    def _planned(
        self, features: Features, scales: Mapping[str, Tensor] | None
    ) -> tuple[_Pulled, Sequence[Tensor]]:
        """What a batch looks up, and its per-sample weights."""
        quick = None if scales else self._one_hot(features)
        if quick is not None:
            return _Pulled(quick, []), ()
        given, scales = self._by_feature(features, scales or {})
        bags = {}
        for name in self.features:
            if name not in given:
                raise ConfigError(
                    f"feature {name!r} is missing from the batch, which has "
                    f"{', '.join(given) or 'none'}"
                )
            bags[name] = self._bags(name, given[name], scales.get(name))
        batch = self._batch(bags)
        lookups, scaled, tensors = [], [], []
        for g, layout in enumerate(self._layouts):
            mine = [bags[feature.name] for feature in layout.features]
            lookups.append(Lookup(layout, mine, batch, self.cluster.pool))
            for f, feature in enumerate(layout.features):
                if feature.name in scales:
                    scaled.append((g, f))
                    tensors.append(scales[feature.name])
        return _Pulled(lookups, scaled), tensors

    def _outputs_of(self, pulled: _Pulled, scales: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and self.training:
            for lookup in pulled.lookups:
                lookup.trained = True
            if self.cluster.tiered:
                self.cluster.fetch([lookup.wanted for lookup in pulled.lookups])
            return _Rows.apply(self._handle[0], self, pulled, *scales)  # type: ignore[no-any-return, no-untyped-call]
        return tuple(self._outputs(pulled))

    def _one_hot(self, features: Features) -> list[Lookup] | None:
        """Lookups of a batch that is as simple as can be; None for all others."""
        return None

    def _bags(self, name: str, given: Ids, scales: Tensor | None) -> Bags:
        raise NotImplementedError

    def _batch(self, bags: Mapping[str, Bags]) -> int | None:
        raise NotImplementedError

    def _by_feature(
        self, features: Features, scales: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Ids], Mapping[str, Tensor]]:
        """Takes a jagged tensor of many features apart; a mapping is one already."""
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
        parts = lengths.sum(1).tolist()
        if sum(parts) != values.numel():
            raise ConfigError(f"lengths add up to {sum(parts)}, there are {values.numel()} values")
        by_name: dict[str, Ids] = {}
        for key, mine, its_lengths in zip(keys, torch.split(values, parts), lengths, strict=True):
            if bool((its_lengths == 1).all()):
                by_name[key] = mine
                continue
            ends = its_lengths.cumsum(0)
            by_name[key] = (mine, _Ends(ends))
        if weights is not None:
            scales = dict(zip(keys, torch.split(weights, parts), strict=True))
        return by_name, scales

    # -- backward and step -----------------------------------------------------------------------

    def _drop_gradients(self) -> None:
        self._handle[0].grad = None
        self._waiting.drop()

    def _set_norm(self, handle: Tensor) -> None:
        """After a backward pass: the handle's gradient is the norm of all rows' gradients."""
        waiting = self._waiting
        waiting.norm = float(np.float32(math.sqrt(sum(waiting.squares))))
        assert handle.grad is not None
        handle.grad.fill_(waiting.norm)

    def _factor(self) -> float:
        """By how much others scaled the handle's gradient since the last backward pass."""
        grad, norm = self._handle[0].grad, self._waiting.norm
        if grad is None or norm == 0.0:
            return 1.0
        now = float(grad)
        return 1.0 if now == norm else now / norm

    def _scale_pending(self) -> bool:
        """Brings accumulated gradients to the scale of the handle; whether that changed them."""
        factor = self._factor()
        if factor == 1.0 or not math.isfinite(factor):
            return False
        waiting = self._waiting
        waiting.squares = [square * factor * factor for square in waiting.squares]
        for pending in waiting.grads:
            if pending is not None:
                np.multiply(pending[1], np.float32(factor), out=pending[1])
        waiting.norm = 0.0
        return True

    def _accumulate(
        self, pulled: _Pulled, grads: Sequence[Tensor], wants_scale: Sequence[bool]
    ) -> list[Tensor | None]:
        self._scale_pending()
        waiting = self._waiting
        slab_grads = []
        for g, lookup in enumerate(pulled.lookups):
            grads_GD = self._slab_gradient(g, pulled, grads)
            slab_grads.append(grads_GD)
            rows_UD, square = lookup.gradients(grads_GD)
            pending = waiting.grads[g]
            if pending is None:
                waiting.grads[g] = (lookup.wanted, rows_UD)
                waiting.squares[g] = square
            else:
                merged = merge(*pending, lookup.wanted, rows_UD, self.cluster.pool)
                waiting.grads[g] = merged
                waiting.squares[g] = _square(merged[1])
        waiting.passes += 1
        if waiting.passes == _FORGOTTEN_STEPS:
            warnings.warn(
                f"gradients of {_FORGOTTEN_STEPS} backward passes wait for a step: call "
                "optimizer.step() on the `optimizer` of this module too",
                stacklevel=2,
            )
        out: list[Tensor | None] = []
        per_slab: dict[int, F32] = {}
        for (g, f), wanted in zip(pulled.scaled, wants_scale, strict=True):
            if not wanted:
                out.append(None)
                continue
            lookup = pulled.lookups[g]
            if g not in per_slab:
                assert pulled.rows is not None
                per_slab[g] = lookup.scale_gradients(slab_grads[g], pulled.rows[g])
            first = int(lookup.firsts_F[f])
            stop = (
                int(lookup.firsts_F[f + 1]) if f + 1 < lookup.firsts_F.size else lookup.ids_N.size
            )
            out.append(torch.from_numpy(per_slab[g][first:stop]))
        return out

    def _step(self, lr: float) -> None:
        waiting = self._waiting
        if waiting.passes == 0:
            return
        # The norm of what was accumulated is finite only if every gradient is.
        finite = not self._scale_pending() and math.isfinite(sum(waiting.squares))
        pending = [entry for entry in waiting.grads if entry is not None]
        self.cluster.push(
            [ids for ids, _ in pending], [grads for _, grads in pending], lr=lr, finite=finite
        )
        self._drop_gradients()

    # -- state -----------------------------------------------------------------------------------

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Every trained row with all its planes. Rows that were never trained are procedural."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for table in self.tables:
            ids, planes = self.cluster.read_all(table.name)
            at = f"{prefix}rows.{table.name}."
            destination[at + "origin"] = self._origin(table)
            destination[at + "steps"] = torch.tensor(self.cluster.steps(table.name))
            destination[at + "ids"] = torch.from_numpy(ids)
            for name, values in planes.items():
                destination[at + name] = torch.from_numpy(values)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Replaces all rows of every table that the state holds; a table that does not fit is
        left alone and named in the error."""
        taken: set[str] = set()
        for table in self.tables:
            at = f"{prefix}rows.{table.name}."
            mine = {
                key[len(at) :]: value for key, value in state_dict.items() if key.startswith(at)
            }
            taken.update(at + key for key in mine)
            absent = [key for key in ("origin", "steps", "ids", "weight") if key not in mine]
            if absent:
                missing_keys.extend(at + key for key in absent)
                continue
            if not torch.equal(mine.pop("origin"), self._origin(table)):
                error_msgs.append(
                    f"table {table.name!r} was saved with another seed, init or kind of rows: its "
                    "untrained rows would change; build the module as it was when it was saved"
                )
                continue
            steps, ids = int(mine.pop("steps")), mine.pop("ids").numpy()
            try:
                self._replace_rows(table.name, ids, {k: v.numpy() for k, v in mine.items()})
            except (StateError, IdError) as error:
                error_msgs.append(str(error))
                continue
            self.cluster.set_steps(table.name, steps)
        self._drop_gradients()
        if strict:
            unexpected_keys.extend(
                key for key in state_dict if key.startswith(prefix) and key not in taken
            )

    def _replace_rows(self, table: str, ids: I64, planes: dict[str, Any]) -> None:
        before = self.cluster.read_all(table)
        self.cluster.delete(table, before[0])
        try:
            self.cluster.install(table, ids, planes)
        except BaseException:
            self.cluster.install(table, *before)
            raise

    def _origin(self, table: Table) -> Tensor:
        return torch.tensor(int(table.origin(self.cluster.seed), 16) - 2**63)

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            f"{type(self).__name__} cannot be pickled or deep-copied: its rows may be larger than "
            "memory; save module.state_dict(), or build a second module and load it there"
        )

    def extra_repr(self) -> str:
        return "\n".join(
            f"{table.name}: {'dynamic, capacity ' if table.dynamic else ''}{table.slots:,} rows × "
            f"{table.dim}"
            for table in self.tables
        )


class EmbeddingBags(_Module):
    """Many tables, one lookup: each feature's rows are pooled to one vector per sample.

    `forward(features)` takes `{feature: ids}` with ids `[B]` (one id per sample) or `[B, L]`,
    `{feature: (values, offsets)}` as `nn.EmbeddingBag` does, or an object with the `keys`, `values`
    and `lengths` of a KeyedJaggedTensor. It returns `[B, F, D]`, features in the order of the
    tables, or `{feature: [B, D]}` when dims differ. `per_sample_weights={feature: weights}` scales
    the rows of a sum (a KeyedJaggedTensor brings its own); they get gradients.

    Gradients accumulate until `module.optimizer.step()`: one pull per forward, one push per step,
    for all tables. Under `no_grad` or after `eval()` nothing changes: no id is inserted, no row
    becomes dirty.
    """

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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, features: Features, per_sample_weights: Mapping[str, Tensor] | None = None
    ) -> Tensor | dict[str, Tensor]:
        slabs = [out.to(self.device) for out in self._look_up(features, per_sample_weights)]
        if len(slabs) == 1:
            return slabs[0]
        by_name = {
            feature.name: out[:, feature.column]
            for layout, out in zip(self._layouts, slabs, strict=True)
            for feature in layout.features
        }
        return {name: by_name[name] for name in self.features}

    def _bags(self, name: str, given: Ids, scales: Tensor | None) -> Bags:
        values, offsets = given if isinstance(given, tuple) else (given, None)
        ids = _ids(values, name)
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
        return Bags(ids=ids.reshape(-1), count=count, length=length, ends=ends, scales=weights)

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
            lookups.append(Lookup.one_hot(layout, arrays, batch[0], self.cluster.pool))
        return lookups

    def _ends(self, name: str, offsets: Tensor | _Ends, values: int) -> I64:
        if isinstance(offsets, _Ends):
            return offsets.ends
        starts = _ids(offsets, name, what="offsets")
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

    def _outputs(self, pulled: _Pulled) -> list[Tensor]:
        outputs = [
            torch.empty(lookup.batch, lookup.layout.width, lookup.layout.tables[0].dim)
            for lookup in pulled.lookups
        ]
        arrays = [out.numpy() for out in outputs]
        if pulled.scaled:  # the gradients of per-sample weights need the rows again
            pulled.rows = self.cluster.pull([lookup.wanted for lookup in pulled.lookups])
            for lookup, rows_UD, out_BFD in zip(pulled.lookups, pulled.rows, arrays, strict=True):
                lookup.pooled(rows_UD, out_BFD)
        else:
            self.cluster.pull_bags(pulled.lookups, arrays)
        return outputs

    def _slab_gradient(self, g: int, pulled: _Pulled, grads: Sequence[Tensor]) -> F32:
        grad: F32 = grads[g].detach().to("cpu", torch.float32).contiguous().numpy()
        return grad.reshape(-1, grad.shape[-1])


class Embeddings(_Module):
    """Many tables, one lookup, no pooling: each id brings its own row.

    `forward` takes what `EmbeddingBags` takes and returns `{feature: rows}`: `ids.shape + (D,)`
    for a tensor of ids of any shape, `[len(values), D]` for jagged ones.
    """

    def _make_layouts(self, groups: Sequence[Sequence[int]]) -> list[Layout]:
        layouts = []
        for group in groups:
            tables = [self.tables[t] for t in group]
            layouts.append(Layout(tables, {n: 0 for t in tables for n in t.features}, 1))
        return layouts

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: Features) -> dict[str, Tensor]:
        flat = self._look_up(features, None)
        names = [feature.name for layout in self._layouts for feature in layout.features]
        by_name = {name: out.to(self.device) for name, out in zip(names, flat, strict=True)}
        return {name: by_name[name] for name in self.features}

    def _bags(self, name: str, given: Ids, scales: Tensor | None) -> Bags:
        ids = _ids(given[0] if isinstance(given, tuple) else given, name)
        return Bags(ids=ids.reshape(-1), count=ids.size, length=1, shape=ids.shape)

    def _batch(self, bags: Mapping[str, Bags]) -> int | None:
        return None  # every lookup is a bag of its own

    def _outputs(self, pulled: _Pulled) -> list[Tensor]:
        outputs = []
        pulled_rows = self.cluster.pull([lookup.wanted for lookup in pulled.lookups])
        for lookup, rows_UD in zip(pulled.lookups, pulled_rows, strict=True):
            for f, bag in enumerate(lookup.bags):
                out = torch.empty(bag.count, rows_UD.shape[1])
                lookup.gathered(rows_UD, f, out.numpy())
                outputs.append(out.reshape(*bag.shape, rows_UD.shape[1]))
        return outputs

    def _slab_gradient(self, g: int, pulled: _Pulled, grads: Sequence[Tensor]) -> F32:
        before = sum(len(lookup.bags) for lookup in pulled.lookups[:g])
        mine = grads[before : before + len(pulled.lookups[g].bags)]
        dim = pulled.lookups[g].layout.tables[0].dim
        return np.concatenate(
            [grad.detach().to("cpu", torch.float32).reshape(-1, dim).numpy() for grad in mine]
        )


class _Ends:
    """Bag ends that were computed from lengths and need no checking."""

    __slots__ = ("ends",)

    def __init__(self, ends: Tensor) -> None:
        self.ends: I64 = ends.numpy()


def _ids(given: Tensor, name: str, what: str = "ids") -> I64:
    """Ids from any device and of any integer type, as int64 in host memory."""
    if isinstance(given, Tensor) and given.dtype == torch.int64 and given.device.type == "cpu":
        return given.detach().numpy()
    ids = torch.as_tensor(given)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ConfigError(f"feature {name!r}: {what} are integers, not {ids.dtype}")
    return ids.detach().to("cpu", torch.int64).numpy()


def _square(rows_UD: F32) -> float:
    return float(np.square(rows_UD, dtype=np.float64).sum())
