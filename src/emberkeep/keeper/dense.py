"""Everything of a model that is not rows: parameters, buffers, optimizers, the user's own state.

It is captured at one instant, checked against a model before anything of it is changed, and loaded
in place. What does not fit is named, all of it at once; nothing is ever loaded in part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from emberkeep._types import Json
from emberkeep.checkpoint.restore import shortened
from emberkeep.errors import ConfigError, StateError
from emberkeep.keeper.plain_state import Packed, pack, reading_state, unpack
from emberkeep.nn.row_module import RowModule
from emberkeep.nn.row_optimizer import RowOptimizer

Rename = Callable[[str], str]


class Stateful(Protocol):
    """A scheduler, a GradScaler, or anything of the user's own that can be saved."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def check_stateful(what: str, value: Any, remedy: str) -> None:
    """Refuses at once what the first version, maybe an hour later, could not be made of."""
    needed = ("state_dict", "load_state_dict")
    missing = [name for name in needed if not callable(getattr(value, name, None))]
    if isinstance(value, type):
        raise ConfigError(f"{what} is {value.__name__}, a class, not an object: {remedy}")
    if missing:
        kind = type(value).__name__
        article = "an" if kind[0] in "aeiouAEIOU" else "a"
        raise ConfigError(f"{what} is {article} {kind} without {' and '.join(missing)}: {remedy}")


def check_states(states: Any) -> None:
    """Refuses a `state=` of a keeper that could not be saved."""
    if not isinstance(states, Mapping):
        raise ConfigError(
            f"state= is a {type(states).__name__}: give a dict that names what to save, such as "
            '{"schedule": scheduler}'
        )
    for name, state in states.items():
        if not isinstance(name, str):
            raise ConfigError(f"state= has the name {name!r}: names are strings")
        check_stateful(
            f"state={{{name!r}: ...}}", state,
            "a version stores what state_dict() returns and gives it to load_state_dict(); put "
            "plain values in an object that has both",
        )  # fmt: skip


class Dense:
    """The dense side of one model and its optimizers.

    `row_state` maps the id of each parameter whose rows are followed to the names of the state
    that goes with the rows: neither is captured here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        states: Mapping[str, Stateful],
        row_state: Mapping[int, Sequence[str]],
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._states = states
        self._row_state = row_state
        # What stands for rows among parameters means nothing, and is no part of a version.
        self._stand_ins = {id(m.stand_in) for m in model.modules() if isinstance(m, RowModule)}

    def capture(self, generators: list[Json]) -> Packed:
        """A copy of everything as it is now; `generators` are the random states of all ranks."""
        return pack(
            {
                "model": self._tensors(),
                "extra": {
                    path: module.get_extra_state() for path, module in self._with_extra_state()
                },
                "optimizers": [self._optimizer_state(one) for one in self._optimizers],
                "states": {name: state.state_dict() for name, state in self._states.items()},
                "generators": generators,
            },
            what="dense",
        )

    def nbytes(self) -> int:
        """About what `capture` holds: tensors of the model, and what optimizers remember of them,
        or will after their first step, as far as their settings tell."""
        tensors = {id(tensor): tensor for tensor in self._tensors().values()}
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                momentum = 2 if "betas" in group else bool(group.get("momentum"))
                moments = momentum + bool(group.get("amsgrad"))
                for parameter in group["params"]:
                    if id(parameter) in tensors:
                        kept = optimizer.state.get(parameter, {}).values()
                        held = sum(part.nbytes for part in kept if isinstance(part, Tensor))
                        nbytes += held or moments * parameter.nbytes
        return nbytes

    def check(self, packed: Packed) -> Json:
        """The state that a version holds; raises `StateError` if it does not fit the model."""
        saved: Json = unpack(packed)
        with reading_state("dense state"):
            wrong = self._wrong(saved)
        if wrong:
            raise StateError(
                "the model does not fit the version, nothing was loaded: "
                + shortened(wrong, most=20)
                + "; build the model as it was saved, or load what fits with resume(partial=True)"
            )
        return saved

    def _wrong(self, saved: Json) -> list[str]:
        """How saved state differs from what there is."""
        return [
            *_differences("tensor", _shapes(saved["model"]), _shapes(self._tensors())),
            *_differences(
                "extra state of module", _set(saved["extra"]), _set(dict(self._with_extra_state()))
            ),
            *_differences("state", _set(saved["states"]), _set(self._states)),
            *_differences(
                "optimizer",
                {str(i): _outline(one) for i, one in enumerate(saved["optimizers"])},
                {
                    str(i): _outline(self._optimizer_state(one))
                    for i, one in enumerate(self._optimizers)
                },
            ),
            *(
                f"optimizer {i} trained tables {[g['settings']['tables'] for g in one['groups']]}, "
                f"by group, now {[group['tables'] for group in optimizer.param_groups]}"
                for i, (one, optimizer) in enumerate(
                    zip(saved["optimizers"], self._optimizers, strict=False)
                )
                if len(one["groups"]) == len(optimizer.param_groups)
                and not all(_paired(optimizer.param_groups, one["groups"]))
            ),
        ]

    @torch.no_grad()
    def load(self, saved: Json) -> None:
        """Loads what `check` returned."""
        for name, tensor in self._tensors().items():
            tensor.copy_(saved["model"][name])
        for path, module in self._with_extra_state():
            module.set_extra_state(saved["extra"][path])
        for optimizer, state in zip(self._optimizers, saved["optimizers"], strict=True):
            with reading_state("state of an optimizer"):
                self._load_optimizer(optimizer, state)
            optimizer.zero_grad()
        for name, state in self._states.items():
            state.load_state_dict(saved["states"][name])

    # -- in part ---------------------------------------------------------------------------------

    def names(self) -> set[str]:
        """What of the model can be named where names of a version are mapped to it."""
        return {*self._tensors(), *dict(self._with_extra_state()), *self._states}

    @torch.no_grad()
    def load_partly(self, saved: Json, rename: Rename, *, same_rows: bool) -> list[str]:
        """Loads what fits of a version; returns what does not, and stays as it is.

        Unless rows are the `same_rows` to their optimizer, its settings stay as they are, too.
        """
        notes: list[str] = []
        with reading_state("dense state"):
            tensors = _renamed(saved["model"], rename)
            extra = _renamed(saved["extra"], rename)
            states = _renamed(saved["states"], rename)
            notes += [
                f"{what} {name!r} of the version gives way to one that map= names so"
                for what, kind in (("tensor", "model"), ("extra state of module", "extra"),
                                   ("state", "states"))
                for name in saved[kind]
                if rename(name) == name and any(
                    rename(other) == name != other for other in saved[kind])
            ]  # fmt: skip
            here, there = _shapes(self._tensors()), _shapes(tensors)
            notes += _differences("tensor", there, here)
            notes += _differences("extra state of module", _set(extra), _set(self._extra()))
            notes += _differences("state", _set(states), _set(self._states))
            for name, tensor in self._tensors().items():
                if here[name] == there.get(name):
                    tensor.copy_(tensors[name])
            notes += self._load_optimizers_partly(saved["optimizers"], rename, same_rows=same_rows)
        loads = [
            *(("extra state of module", path, module.set_extra_state, extra)
              for path, module in self._with_extra_state()),
            *(("state", name, state.load_state_dict, states)
              for name, state in self._states.items()),
        ]  # fmt: skip
        for what, name, load, given in loads:
            if name in given:
                try:
                    load(given[name])
                except Exception as error:  # the user's own, which may refuse what has changed
                    notes.append(f"{what} {name!r} was not taken ({type(error).__name__}: {error})")
        return notes

    def _load_optimizers_partly(
        self, saved: Sequence[Json], rename: Rename, *, same_rows: bool
    ) -> Iterator[str]:
        left = dict(enumerate(saved))
        for i, optimizer in enumerate(self._optimizers):
            kind, rows = type(optimizer).__name__, isinstance(optimizer, RowOptimizer)
            label = "the optimizer of rows" if rows else f"optimizer {i} ({kind})"
            same = sorted((j for j, one in left.items() if one["kind"] == kind),
                          key=lambda j: j != i)  # fmt: skip
            if not same:
                yield f"{label} starts as new: the version has none of its kind"
                continue
            found = left.pop(same[0])
            optimizer.zero_grad()
            paired = _paired(optimizer.param_groups, found["groups"], rename)
            if not any(paired) or (rows and not same_rows):
                yield f"{label}: settings such as lr stay as they are"
                paired = []
            for group, saved_group in zip(optimizer.param_groups, paired, strict=False):
                if saved_group is not None:
                    settings = {k: v for k, v in saved_group["settings"].items() if k != "tables"}
                    _set_settings(group, settings)
                else:
                    yield (
                        f"{label} of {', '.join(group['tables'])}: settings such as lr stay as "
                        "they are"
                    )
            state = _renamed(found["state"], rename)
            names = self._names(optimizer)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names.get(id(parameter))
                    if name is None or name not in state:
                        continue
                    if _fits(state[name], parameter):
                        for key, value in state[name].items():
                            _set_state(optimizer.state[parameter], key, value, parameter, group)
                    else:
                        yield f"{label}: what it remembers of {name!r} has another shape"
        for one in left.values():
            yield f"optimizer {one['kind']} of the version is not in the model"

    def _extra(self) -> dict[str, nn.Module]:
        return dict(self._with_extra_state())

    # -- the model -------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by name, shared ones once, followed tables not."""
        found: dict[str, Tensor] = {}
        seen = {*self._row_state, *self._stand_ins}
        for path, module in self._model.named_modules():
            at = f"{path}." if path else ""
            transient = module._non_persistent_buffers_set
            own = {**module._parameters, **module._buffers}
            for name, tensor in own.items():
                if tensor is None or name in transient or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                found[at + name] = tensor
        return found

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in self._model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield path, module

    # -- optimizers ------------------------------------------------------------------------------

    def _names(self, optimizer: torch.optim.Optimizer) -> dict[int, str]:
        """Parameters by name; those that are not the model's by their place."""
        known = {id(parameter): name for name, parameter in self._model.named_parameters()}
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]
                 if id(parameter) not in self._stand_ins]  # fmt: skip
        return {
            id(parameter): known.get(id(parameter), f"parameter {i}")
            for i, parameter in enumerate(every)
        }

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> Json:
        names = self._names(optimizer)
        return {
            "kind": type(optimizer).__name__,
            "groups": [
                {
                    "parameters": [
                        names[id(parameter)]
                        for parameter in group["params"]
                        if id(parameter) in names
                    ],
                    "settings": {key: value for key, value in group.items() if key != "params"},
                }
                for group in optimizer.param_groups
            ],
            "state": {
                names[id(parameter)]: {
                    key: value
                    for key, value in state.items()
                    if key not in self._row_state.get(id(parameter), ())
                }
                for parameter, state in optimizer.state.items()
                if id(parameter) in names
            },
        }

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Json) -> None:
        names = self._names(optimizer)
        paired = _paired(optimizer.param_groups, saved["groups"])
        for group, saved_group in zip(optimizer.param_groups, paired, strict=True):
            assert saved_group is not None  # `check` has seen to it
            settings = {k: v for k, v in saved_group["settings"].items() if k != "tables"}
            _set_settings(group, settings)
            for parameter in group["params"]:
                if id(parameter) not in names:
                    continue
                with_rows = self._row_state.get(id(parameter), ())
                state = saved["state"].get(names[id(parameter)], {})
                live = optimizer.state[parameter]
                for key in [key for key in live if key not in state and key not in with_rows]:
                    del live[key]
                for key, value in state.items():
                    _set_state(live, key, value, parameter, group)
                if not live:
                    del optimizer.state[parameter]


def _renamed(saved: Mapping[str, Any], rename: Rename) -> dict[str, Any]:
    """By the names of the model; what was renamed goes before what had the name already."""
    kept = {name: value for name, value in saved.items() if rename(name) == name}
    return kept | {rename(name): value for name, value in saved.items() if name not in kept}


def _paired(
    groups: Sequence[Json], saved: Sequence[Json], rename: Rename = str
) -> Sequence[Json | None]:
    """The saved group of each group: by the tables of rows where groups name them, else by its
    place. None where there is none, or where it would be several."""
    if len(groups) == len(saved) == 1 or not all("tables" in one["settings"] for one in saved):
        return saved if len(groups) == len(saved) else [None] * len(groups)
    owners = {rename(table): one for one in saved for table in one["settings"]["tables"]}
    found: list[Json | None] = []
    for group in groups:
        own = [owners[table] for table in group["tables"] if table in owners]
        found.append(own[0] if own and all(one is own[0] for one in own) else None)
    return found


def _set_settings(group: Json, saved: Json) -> None:
    for key, value in saved.items():
        if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
            group[key].copy_(value)
        else:
            group[key] = value


def _fits(state: Json, parameter: Tensor) -> bool:
    """Whether what an optimizer remembers of a parameter is of one of that shape."""
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
    return all(tensor.shape == parameter.shape for tensor in tensors)


def _set_state(live: Json, key: str, value: Any, parameter: Tensor, group: Json) -> None:
    """In place where that is possible: others may hold on to the tensor."""
    now = live.get(key)
    if not isinstance(value, Tensor):
        live[key] = value
    elif isinstance(now, Tensor) and _alike(now, value):
        now.copy_(value)
    else:
        # Torch keeps counters in host memory unless its kernels need them on the device.
        on_device = value.dim() > 0 or group.get("capturable") or group.get("fused")
        live[key] = value.to(parameter.device) if on_device else value.clone()


def _alike(one: Tensor, other: Tensor) -> bool:
    strided = one.layout is other.layout is torch.strided
    return strided and one.shape == other.shape and one.dtype == other.dtype


def generators() -> Json:
    """The state of every global random generator of this process."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    version, numbers, second = random.getstate()
    state: Json = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, keys, position, has_gauss, gauss),
        "python": (version, np.array(numbers, np.uint32), second),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_generators(state: Json) -> None:
    with reading_state("state of the random generators"):
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        version, numbers, second = state["python"]
        random.setstate((version, tuple(int(number) for number in numbers), second))
        if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all(state["cuda"])


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for name, tensor in tensors.items()
    }


def _set(names: Mapping[str, Any]) -> dict[str, str]:
    return dict.fromkeys(names, "")


def _outline(optimizer: Json) -> str:
    groups = [", ".join(group["parameters"]) for group in optimizer["groups"]]
    return f"{optimizer['kind']} over {' | '.join(groups)}"


def _differences(what: str, saved: Mapping[str, str], present: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*saved, *present}):
        if name not in saved:
            yield f"{what} {name!r} is not in the version"
        elif name not in present:
            yield f"{what} {name!r} of the version is not in the model"
        elif saved[name] != present[name]:
            yield f"{what} {name!r} was {saved[name]}, is {present[name]}"
