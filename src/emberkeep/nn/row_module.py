"""A module whose rows live in tables: what it pulls, the gradients that wait, and its state."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from emberkeep._types import F32, I64, RowIds
from emberkeep.cluster.base import Cluster, ClusterSpec
from emberkeep.cluster.local.local_cluster import Local
from emberkeep.errors import ConfigError, GradientError, IdError, StateError, TableFullError
from emberkeep.nn.jagged import Contents, Features, Ids, by_feature, to_ids
from emberkeep.nn.loaded_rows import as_array, ids_and_planes, steps_of
from emberkeep.nn.row_copy import CopiedRows
from emberkeep.nn.row_handles import RowHandles
from emberkeep.nn.row_optimizer import RowOptimizer
from emberkeep.rows.lookup import Bags, Layout, Lookup, merge, square_norm
from emberkeep.tables import Optimizer, Table, check_tables

# Backward passes without a step after which a forgotten optimizer is the likely reason.
_FORGOTTEN_STEPS = 256


class _Rows(torch.autograd.Function):
    """Connects looked-up rows to the graph; their gradients go to the module, not to a tensor."""

    @staticmethod
    def forward(
        ctx: Any, module: RowModule, pulled: Pulled, handles: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.module, ctx.pulled, ctx.handles, ctx.scales = module, pulled, handles, tensors[handles:]
        return tuple(module._outputs(pulled))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        module, pulled, handles = ctx.module, ctx.pulled, ctx.handles
        needs = ctx.needs_input_grad[3:]
        scale_grads = module._accumulate(pulled, grads, needs[handles:], train=needs[0])
        # The value is of no importance: a hook on each handle replaces it by the norm.
        device = module.stand_in.device
        handle_grads = [
            torch.zeros((), device=device) if need else None for need in needs[:handles]
        ]
        shaped = [
            None if grad is None else grad.to(scale.device, scale.dtype).reshape(scale.shape)
            for grad, scale in zip(scale_grads, ctx.scales, strict=True)
        ]
        return (None, None, None, *handle_grads, *shaped)


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

    __slots__ = ("grads", "passes", "squares")

    def __init__(self, slabs: int) -> None:
        self.grads: list[tuple[RowIds, F32] | None] = [None] * slabs
        self.drop()

    def drop(self) -> None:
        self.grads = [None] * len(self.grads)
        self.squares = [0.0] * len(self.grads)
        self.passes = 0


class RowModule(nn.Module):
    """What `EmbeddingBags` and `Embeddings` share: tables, the pull and the push of a step."""

    _pools = True
    """Whether rows are pooled, so that weights of samples scale them."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        optimizer: Optimizer,
        cluster: ClusterSpec | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        include_last_offset: bool = False,
    ) -> None:
        super().__init__()
        self.tables = check_tables(tables)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer= takes a spec such as emberkeep.Adagrad(lr=0.02), not {optimizer!r}"
            )
        self.device = torch.get_default_device() if device is None else torch.device(device)
        if self.device.type == "meta":
            raise ConfigError(self._no_meta())
        self.dtype = torch.float32
        self.include_last_offset = include_last_offset
        self._spec: ClusterSpec = cluster or Local()
        self.cluster: Cluster = self._spec.open(self.tables, optimizer, seed=seed)
        self.features = tuple(name for table in self.tables for name in table.features)
        self._made()

    def _made(self, *, copied: bool = False) -> None:
        """What goes with the cluster: layouts, the optimizer, and what torch sees of the rows."""
        groups = self.cluster.groups
        self._layouts = self._make_layouts(groups)
        self._paddings = {
            name: table.padding_idx
            for table in self.tables for name in table.features if table.padding_idx is not None
        }  # fmt: skip
        own = [self.tables[group[0]].optimizer for group in groups]
        specs = list(dict.fromkeys(own))
        # Of each slab: the group of the optimizer that trains it.
        self._group_S = [specs.index(spec) for spec in own]
        handles = RowHandles(len(specs), self, copied=copied)
        self._handles = [handles]  # in a list: its parameters are not the module's
        # What other optimizers train of it changes nothing; DDP does not see it.
        self.stand_in = handles.stand_in
        self.optimizer = RowOptimizer(
            self,
            [
                {
                    "params": [handle],
                    "lr": (spec or self.cluster.optimizer).lr,
                    "tables": [t.name for t in self.tables if t.optimizer == spec],
                }
                for spec, handle in zip(specs, handles.handles, strict=True)
            ],
        )
        self._waiting = waiting = _Waiting(len(self._layouts))
        group_S = self._group_S

        def squares() -> list[float]:
            return [
                sum(s for s, own in zip(waiting.squares, group_S, strict=True) if own == group)
                for group in range(len(specs))
            ]

        handles.follow(squares)
        self._next: list[tuple[Features, Contents, Pulled] | None] = [None]

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
        planes = self.cluster.read(self._known(table), to_ids(ids, table))
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
        arrays = {
            name: as_array(f"table {table!r}, plane {name!r}", values)
            for name, values in given.items()
        }
        self.cluster.upsert(self._known(table), to_ids(ids, table), arrays)

    def delete(self, table: str, ids: Tensor | Sequence[int]) -> int:
        """Takes rows back to their initial state; dynamic ids leave. Counts the trained ones."""
        return self.cluster.delete(self._known(table), to_ids(ids, table))

    def _known(self, table: str) -> str:
        names = [known.name for known in self.tables]
        if table not in names:
            raise ConfigError(f"there is no table {table!r}; the tables are {', '.join(names)}")
        return table

    # -- forward ---------------------------------------------------------------------------------

    def prefetch(self, features: Features) -> None:
        """Says which batch comes next: its unique rows are found, and where rows live in files or
        on servers, they are read beside the work on the present batch. Waits for nobody; call it
        between `forward` and the step, best while an accelerator computes.

        Handing the same object to `forward` then is quickest; any other batch is as right, and so
        is the same object with other ids in it, unless they came past torch, through numpy.
        """
        pulled, _ = self._planned(features, None)
        self._next[0] = (features, Contents(features), pulled)
        wanted = [lookup.wanted for lookup in pulled.lookups]
        if self.cluster.reads_ahead:
            self.cluster.fetch(wanted, ahead=True)

    def _look_up(
        self, features: Features, scales: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, ...]:
        ahead, self._next[0] = self._next[0], None
        if ahead is not None:
            batch, contents, pulled = ahead
            if batch is features and not (scales or pulled.scaled) and contents.is_in(features):
                return self._outputs_of(pulled, ())
        return self._outputs_of(*self._planned(features, scales))

    def _planned(
        self, features: Features, scales: Mapping[str, Tensor] | None
    ) -> tuple[Pulled, Sequence[Tensor]]:
        """What a batch looks up, and its per-sample weights."""
        quick = None if scales else self._one_hot(features)
        if quick is not None:
            return Pulled(quick, []), ()
        unknown = [name for name in scales or () if name not in self.features]
        if unknown:
            raise ConfigError(
                f"per_sample_weights are given for {', '.join(unknown)}; the features are "
                f"{', '.join(self.features)}"
            )
        given, scales = by_feature(features, scales or {})
        if not self._pools:
            scales = {}
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
        (seen,) = self._handles
        seen.check()
        self.cluster.check_rows()
        handles: Sequence[Tensor] = ()
        if torch.is_grad_enabled() and self.training:
            handles = seen.handles
            if self.stand_in.requires_grad:
                for lookup in pulled.lookups:
                    lookup.trained = True
                if self.cluster.tiered:
                    self.cluster.fetch([lookup.wanted for lookup in pulled.lookups])
            else:  # frozen; per-sample weights may be trained all the same
                handles = [handle.detach() for handle in handles]
            return _Rows.apply(self, pulled, len(handles), *handles, *scales)  # type: ignore[no-any-return, no-untyped-call]
        seen.looked_up(graph=torch.is_grad_enabled() and self.stand_in.requires_grad)
        return tuple(self._outputs(pulled))

    def _one_hot(self, features: Features) -> list[Lookup] | None:
        """Lookups of a batch that is as simple as can be; None for all others."""
        return None

    def _bags(self, name: str, given: Ids, scales: Tensor | None) -> Bags:
        raise NotImplementedError

    def _batch(self, bags: Mapping[str, Bags]) -> int | None:
        raise NotImplementedError

    # -- backward and step -----------------------------------------------------------------------

    def _drop_gradients(self, *, trained: bool = False) -> None:
        self._handles[0].dropped(trained=trained)
        self._waiting.drop()

    def _scale_pending(self) -> bool:
        """Brings accumulated gradients to the scale of the handles; whether that changed them."""
        waiting, factors = self._waiting, self._handles[0].factors()
        if all(factor == 1.0 for factor in factors):
            return False
        for slab, group in enumerate(self._group_S):
            factor, pending = factors[group], waiting.grads[slab]
            if factor != 1.0 and math.isfinite(factor):
                waiting.squares[slab] *= factor * factor
                if pending is not None:
                    np.multiply(pending[1], np.float32(factor), out=pending[1])
        self._handles[0].applied()
        return True

    def _accumulate(
        self, pulled: Pulled, grads: Sequence[Tensor], wants_scale: Sequence[bool], *, train: bool
    ) -> list[Tensor | None]:
        slab_grads = [self._slab_gradient(g, pulled, grads) for g in range(len(pulled.lookups))]
        if train:
            self._collect(pulled, slab_grads)
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
            own, kept = lookup.bags[f].ids.size, lookup.bags[f].kept
            gradient = per_slab[g][first : first + own]
            if kept is not None:
                whole = np.zeros(kept.size, np.float32)
                whole[kept] = gradient
                gradient = whole
            out.append(torch.from_numpy(gradient))
        return out

    def _collect(self, pulled: Pulled, slab_grads: Sequence[F32]) -> None:
        """Adds the gradients of one backward pass to those that wait for a step."""
        waiting = self._waiting
        if waiting.passes and self._handles[0].zeroed:
            self._drop_gradients()
        self._scale_pending()
        self._handles[0].arrived(again=waiting.passes > 0)
        for g, (lookup, grads_GD) in enumerate(zip(pulled.lookups, slab_grads, strict=True)):
            rows_UD, square = lookup.gradients(grads_GD)
            pending = waiting.grads[g]
            if pending is None:
                waiting.grads[g] = (lookup.wanted, rows_UD)
                waiting.squares[g] = square
            else:
                merged = merge(*pending, lookup.wanted, rows_UD, self.cluster.pool)
                waiting.grads[g] = merged
                waiting.squares[g] = square_norm(merged[1])
        waiting.passes += 1
        if waiting.passes == _FORGOTTEN_STEPS:
            warnings.warn(
                f"gradients of {_FORGOTTEN_STEPS} backward passes wait for a step: call "
                "optimizer.step() on the `optimizer` of this module too",
                stacklevel=2,
            )

    def _step(self, lr_G: Sequence[float]) -> None:
        waiting = self._waiting
        if waiting.passes == 0:
            self._handles[0].idle_step()
            return
        if self._handles[0].zeroed:  # as torch, which leaves parameters without a gradient alone
            self._drop_gradients()
            return
        bad = [factor for factor in self._handles[0].factors() if not math.isfinite(factor)]
        if bad:
            raise GradientError(
                f"the gradients of rows were scaled by {bad[0]}, which comes of another gradient "
                "that is not finite; no row was changed. Lower the learning rate, or use a "
                "GradScaler under mixed precision"
            )
        # The norm of what was accumulated is finite only if every gradient is.
        finite = not self._scale_pending() and math.isfinite(sum(waiting.squares))
        pending = [entry for entry in waiting.grads if entry is not None]
        rates = [lr_G[group] for group in self._group_S]
        self.cluster.push(
            [ids for ids, _ in pending], [grads for _, grads in pending],
            lr=rates[0] if len(set(rates)) == 1 else rates, finite=finite,
        )  # fmt: skip
        self._drop_gradients(trained=True)

    # -- state -----------------------------------------------------------------------------------

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Every trained row with all its planes. Rows that were never trained are procedural."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}stand_in"]
        for table in self.tables:
            ids, planes = self.cluster.read_all(table.name)
            at = f"{prefix}rows.{table.name}."
            destination[at + "origin"] = self._origin(table)
            destination[at + "steps"] = torch.tensor(self.cluster.steps(table.name), device="cpu")
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
        left alone and named in the error.

        Ids and weights alone will do, as they come from elsewhere: what is not given starts as new,
        and is named as missing, so that `strict=False` is needed.
        """
        taken: set[str] = set()
        replaced = 0
        for table in self.tables:
            at = f"{prefix}rows.{table.name}."
            # No plane has a dot in its name: what goes on after one is of a table with dots.
            saved = {
                key[len(at) :]: value
                for key, value in state_dict.items()
                if key.startswith(at) and "." not in key[len(at) :]
            }
            taken.update(at + key for key in saved)
            shapes = self.cluster.schema()["tables"][table.name]["planes"]
            absent = [key for key in ("origin", "steps", "ids", *shapes) if key not in saved]
            # Without these they are rows from elsewhere; what is not given starts as new.
            whole = not {"origin", "steps", "ids", "weight"} & {*absent}
            missing_keys.extend(at + key for key in absent)
            if "weight" in absent:
                continue
            if whole and not self._is_origin(table, torch.as_tensor(saved["origin"], device="cpu")):
                error_msgs.append(
                    f"table {table.name!r} was saved with another seed, init or kind of rows: its "
                    "untrained rows would change; build the module as it was when it was saved"
                )
                continue
            try:
                steps = steps_of(table, saved)
                ids, planes = ids_and_planes(table, saved, shapes)
                self._replace_rows(table, ids, planes, shapes)
            except (StateError, IdError, TableFullError) as error:
                error_msgs.append(str(error))
                continue
            self.cluster.set_steps(table.name, steps, rows=len(ids) if table.dynamic else 0)
            replaced += 1
        if replaced == len(self.tables):
            self.cluster.choose_rows()
        self._drop_gradients()
        if strict:
            unexpected_keys.extend(
                key for key in state_dict if key.startswith(prefix) and key not in taken
            )

    def _replace_rows(
        self, table: Table, ids: I64, planes: dict[str, Any], shapes: Mapping[str, Sequence[Any]]
    ) -> None:
        """Planes that are not given start as new. All that is needed is there before the first row
        goes; where that does not end well, rows are as they were."""
        name, optimizer = table.name, table.trained_by(self.cluster.optimizer)
        new = {
            plane: np.full((len(ids), width), optimizer.initial(plane), kind)
            for plane, (width, kind) in shapes.items()
            if plane not in planes
        }
        before = self.cluster.read_all(name)
        try:
            self.cluster.delete(name, before[0])
            self.cluster.install(name, ids, {**new, **planes})
        except BaseException:  # of several shards some may have taken theirs
            self.cluster.delete(name, self.cluster.touched_ids(name))
            self.cluster.install(name, *before)
            raise

    def _origin(self, table: Table) -> Tensor:
        return _as_number(table.origin(self.cluster.seed))

    def _is_origin(self, table: Table, saved: Tensor) -> bool:
        seed = self.cluster.seed
        known = (table.origin(seed), *table.earlier_origins(seed))
        return any(torch.equal(saved, _as_number(origin)) for origin in known)

    # -- what torch does to modules --------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The stand-in of the rows, unless a module is asked for what is its own alone: that is
        how DDP and FSDP ask, which would average or shard it, and rows are trained as they are."""
        found = super().named_parameters(prefix, recurse, remove_duplicate)
        return found if recurse else (pair for pair in found if pair[1] is not self.stand_in)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowModule:
        """`to`, `cuda`, `half` and the like: outputs go there and have that type. Rows stay where
        they are, in float32."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if probe.is_meta:
            raise ConfigError(self._no_meta())
        if probe.device.type == "cpu" and probe.is_shared():  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"share_memory() does not share the rows of {type(self).__name__}: each process "
                "would train rows of its own; put them on servers with cluster=emberkeep.servers()"
            )
        self.device, self.dtype = probe.device, probe.dtype
        if self.stand_in.device != self.device:
            for parameter in (self.stand_in, *self._handles[0].handles):
                parameter.data, parameter.grad = parameter.data.to(self.device), None
            self._drop_gradients()
        self._handles[0].seal()
        return self

    def _no_meta(self) -> str:
        return (
            f"{type(self).__name__} cannot be on the meta device: its rows take no memory before "
            "they are trained; build it where it is used"
        )

    def _shown(self, output: Tensor) -> Tensor:
        return output.to(self.device, self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """For `copy.deepcopy` and pickle: a module with rows of its own, equal to these."""
        state = {
            name: value for name, value in self.__dict__.items()
            if name not in ("cluster", "optimizer", "_layouts", "_group_S", "_handles", "_waiting",
                            "_next")
        }  # fmt: skip
        state["_parameters"] = {k: v for k, v in self._parameters.items() if k != "stand_in"}
        rates = [group["lr"] for group in self.optimizer.param_groups]
        state["_copied"] = CopiedRows.of(
            self.cluster, self._spec, type(self).__name__, rates, self.stand_in.requires_grad
        )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied: CopiedRows = state.pop("_copied")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.cluster = copied.open()
        self._made(copied=True)
        for group, lr in zip(self.optimizer.param_groups, copied.rates, strict=True):
            group["lr"] = lr
        self.stand_in.requires_grad_(copied.trains)
        for parameter in (self.stand_in, *self._handles[0].handles):
            parameter.data = parameter.data.to(self.device)
        self._handles[0].seal()

    def extra_repr(self) -> str:
        return "\n".join(
            f"{table.name}: {'dynamic, capacity ' if table.dynamic else ''}{table.slots:,} rows × "
            f"{table.dim}"
            for table in self.tables
        )


def _as_number(origin: str) -> Tensor:
    return torch.tensor(int(origin, 16) - 2**63, device="cpu")


def dense_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a model by name, without what stands for rows among them."""
    rows = {id(module.stand_in) for module in model.modules() if isinstance(module, RowModule)}
    return ((n, p) for n, p in model.named_parameters() if id(p) not in rows)
