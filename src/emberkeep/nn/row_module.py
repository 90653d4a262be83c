"""A module whose rows live in tables: what it pulls, the gradients that wait, and its state."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from emberkeep._types import F32, I64, Array, RowIds
from emberkeep.cluster.base import Cluster, ClusterSpec
from emberkeep.cluster.local.local_cluster import Local
from emberkeep.errors import ConfigError, IdError, StateError
from emberkeep.nn.jagged import Features, Ids, by_feature, to_ids
from emberkeep.nn.row_optimizer import RowOptimizer
from emberkeep.rows.lookup import Bags, Layout, Lookup, merge
from emberkeep.tables import Optimizer, Table, check_tables

# Backward passes without a step after which a forgotten optimizer is the likely reason.
_FORGOTTEN_STEPS = 256


class _Rows(torch.autograd.Function):
    """Connects looked-up rows to the graph; their gradients go to the module, not to a tensor."""

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor, module: RowModule, pulled: Pulled, *scales: Tensor
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


class Pulled:
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


class RowModule(nn.Module):
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
        # Weakly: torch holds hooks where Python's collector does not look, and the tables would
        # never be freed.
        set_norm = weakref.WeakMethod(self._set_norm)

        def hook(handle: Tensor) -> None:
            if (method := set_norm()) is not None:
                method(handle)

        self._handle[0].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.optimizer = RowOptimizer(self, self._handle[0], optimizer.lr)
        self._waiting = _Waiting(len(self._layouts))
        self._next: list[tuple[Features, Pulled] | None] = [None]

    def _make_layouts(self, groups: Sequence[Sequence[int]]) -> list[Layout]:
        raise NotImplementedError

    def _outputs(self, pulled: Pulled) -> list[Tensor]:
        raise NotImplementedError

    def _slab_gradient(self, g: int, pulled: Pulled, grads: Sequence[Tensor]) -> F32:
        raise NotImplementedError

    # -- rows ------------------------------------------------------------------------------------

    def touched_ids(self, table: str) -> Tensor:
        """The ids of a table's rows that were trained and not deleted since, ascending."""
        return torch.from_numpy(self.cluster.touched_ids(self._known(table)))

    def rows(self, table: str, ids: Tensor | Sequence[int]) -> dict[str, Tensor]:
        """All planes of rows: `weight` and what the optimizer remembers. A copy."""
        planes = self.cluster.read(self._known(table), to_ids(torch.as_tensor(ids), table))
        return {name: torch.from_numpy(values) for name, values in planes.items()}

    def upsert(
        self, table: str, ids: Tensor | Sequence[int], planes: Tensor | Mapping[str, Tensor]
    ) -> None:
        """Writes rows that come from elsewhere: new ones, and over those that are there.

        `planes` is `{"weight": ..., "accumulator": ...}`, or a tensor of weights alone. Planes that
        are not given stay as they are, or begin as those of any new row. The next version has the
        rows; what is refused is refused before any row changes. Call it between steps.
        """
        given = planes if isinstance(planes, Mapping) else {"weight": planes}
        arrays = {name: _to_array(values) for name, values in given.items()}
        self.cluster.upsert(self._known(table), to_ids(torch.as_tensor(ids), table), arrays)

    def delete(self, table: str, ids: Tensor | Sequence[int]) -> int:
        """Takes rows back to their initial state; dynamic ids leave. Counts the trained ones."""
        return self.cluster.delete(self._known(table), to_ids(torch.as_tensor(ids), table))

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
    ) -> tuple[Pulled, Sequence[Tensor]]:
        """What a batch looks up, and its per-sample weights."""
        quick = None if scales else self._one_hot(features)
        if quick is not None:
            return Pulled(quick, []), ()
        given, scales = by_feature(features, scales or {})
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
            layout_bags = [bags[feature.name] for feature in layout.features]
            lookups.append(Lookup(layout, layout_bags, batch, self.cluster.pool))
            for f, feature in enumerate(layout.features):
                if feature.name in scales:
                    scaled.append((g, f))
                    tensors.append(scales[feature.name])
        return Pulled(lookups, scaled), tensors

    def _outputs_of(self, pulled: Pulled, scales: Sequence[Tensor]) -> tuple[Tensor, ...]:
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
        self, pulled: Pulled, grads: Sequence[Tensor], wants_scale: Sequence[bool]
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
            saved = {
                key[len(at) :]: value for key, value in state_dict.items() if key.startswith(at)
            }
            taken.update(at + key for key in saved)
            absent = [key for key in ("origin", "steps", "ids", "weight") if key not in saved]
            if absent:
                missing_keys.extend(at + key for key in absent)
                continue
            if not torch.equal(saved.pop("origin"), self._origin(table)):
                error_msgs.append(
                    f"table {table.name!r} was saved with another seed, init or kind of rows: its "
                    "untrained rows would change; build the module as it was when it was saved"
                )
                continue
            steps, ids = int(saved.pop("steps")), saved.pop("ids").numpy()
            try:
                self._replace_rows(table.name, ids, {k: v.numpy() for k, v in saved.items()})
            except (StateError, IdError) as error:
                error_msgs.append(str(error))
                continue
            self.cluster.set_steps(table.name, steps, rows=len(ids) if table.dynamic else 0)
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


def _to_array(values: Tensor | Sequence[float]) -> Array:
    found = torch.as_tensor(values).detach().cpu()
    # numpy has no bfloat16; as float32 it is the same number.
    return (found.float() if found.dtype == torch.bfloat16 else found).numpy()


def _square(rows_UD: F32) -> float:
    return float(np.square(rows_UD, dtype=np.float64).sum())
