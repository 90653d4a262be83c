"""Plain torch embeddings as tables whose rows can be frozen, written and replaced.

The planes are views of the tensors' own memory: nothing is copied until a version is written.
Which rows a step changes is read from the gradient just before the optimizer uses it; under DDP
that is the gradient of all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from emberkeep._types import I64, U64, Bools, Planes
from emberkeep.errors import ConfigError, ShardLostError, StateError
from emberkeep.keeper import followable
from emberkeep.kernels import batch_rows as bits
from emberkeep.rows.copy_room import CopyRoom
from emberkeep.rows.priority import Priority, Ranking
from emberkeep.rows.row_source import Arrays
from emberkeep.rows.snapshot import Cut, FrozenRows, Snapshot, TableRange, freeze
from emberkeep.rows.tracker import Tracker
from emberkeep.runtime.memory import Values, lazy_zeros
from emberkeep.runtime.pool import ForkLock, shared

Hook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]

# Rows that are handed to a snapshot at once where all of them are about to change.
_SLICE_ROWS = 65536
# Rows whose bits are compared from save to save: what changed past every version counter.
_SAMPLED_ROWS = 256


class TorchTable:
    """The weight of one embedding module and the row-shaped state of its optimizer.

    Every row counts as trained: its first value is torch's and can be had from nowhere else. Row i
    is id i.

    Changes that no optimizer made are noticed. In-place operations (`nn.init`, `copy_` under
    `no_grad`) by the version counters of the tensors, with certainty; what goes past these
    (`.data`, `.numpy()`) by a sample of the rows, which is compared from save to save: with
    certainty where all rows change, with a chance of 256 in `rows` for each row alone.
    """

    def __init__(
        self, name: str, weight: Tensor, optimizer: torch.optim.Optimizer | None, lock: ForkLock
    ) -> None:
        self.name = name
        self.weight = weight
        self.optimizer = optimizer
        self.lock = lock
        self.tracker: Tracker | None = None
        self.ranking: Ranking | None = None
        self.snapshot: Snapshot | None = None
        self.lost: ShardLostError | None = None
        self.pool = shared()
        self.ids: I64 = np.empty(0, np.int64)
        self.rows = int(weight.shape[0])
        words = (self.rows + 63) >> 6
        self.touched: U64 = np.full(words, 2**64 - 1, np.uint64)
        if self.rows % 64:
            self.touched[-1] = np.uint64((1 << (self.rows % 64)) - 1)
        self.dirty: U64 = _no_rows(words)
        self.state_names = followable.state_names(optimizer)
        self._make_state()
        self.planes: Planes = self._views()
        self._addresses = self._where()
        self._warned = False
        # None while an optimizer steps, which changes them.
        self._expected: list[int] | None = self._versions()
        self._announced = self._warned_of_edits = False
        self._edits = self._edits_frozen = 0
        self._sampled: I64 = np.arange(self.rows)
        if self.rows > _SAMPLED_ROWS:
            drawn = np.random.default_rng(self.rows).choice(self.rows, _SAMPLED_ROWS, replace=False)
            self._sampled = np.sort(drawn).astype(np.int64)
        self._sample = b""

    def ranges(self) -> Sequence[TableRange]:
        return (TableRange(self.name, 0, self.rows, tuple(self.planes)),)

    def source(self) -> Arrays:
        return Arrays(self.planes)

    # -- where the bytes are ---------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {} if self.optimizer is None else self.optimizer.state.get(self.weight, {})

    def _make_state(self) -> None:
        """What SparseAdam would make at its first step is made now, so that it can be followed."""
        if isinstance(self.optimizer, torch.optim.SparseAdam) and not self._state():
            zeros = {name: torch.zeros_like(self.weight) for name in self.state_names}
            self.optimizer.state[self.weight] = {"step": 0, **zeros}

    def _tensors(self) -> dict[str, Tensor]:
        state = self._state()
        unknown = [
            name for name, value in state.items()
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == self.rows
            and name not in self.state_names
        ]  # fmt: skip
        missing = [name for name in self.state_names if name not in state]
        if unknown or missing:
            raise StateError(
                f"the optimizer of table {self.name!r} now has "
                f"{', '.join([*unknown, *(f'no {name}' for name in missing)])}, which it had not "
                "when the keeper was made: make the keeper after the optimizer has its settings"
            )
        planes = {followable.PLANES[name]: state[name] for name in self.state_names}
        return {"weight": self.weight, **planes}

    def _views(self) -> Planes:
        return {name: tensor.detach().numpy() for name, tensor in self._tensors().items()}

    def _where(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors().values()]

    def look_again(self) -> None:
        """Follows tensors that others were put in the place of, as `load_state_dict` does."""
        if self._where() == self._addresses:
            self._notice_edits()
            return
        # A snapshot under way holds on to the tensors that it froze, which nobody changes any more.
        with self.lock:
            np.bitwise_or(self.dirty, self.touched, out=self.dirty)
            self.planes = self._views()
            self._addresses = self._where()
        self._expected = self._versions()

    # -- changes past the optimizer --------------------------------------------------------------

    def _versions(self) -> list[int]:
        state = self._state()
        tensors = [self.weight, *(state[name] for name in self.state_names if name in state)]
        return [tensor._version for tensor in tensors]

    def announce(self) -> None:
        """Somebody is about to change rows past the optimizer, and says so."""
        self.change_all()
        self._announced = True

    def _notice_edits(self) -> None:
        """Has all rows count as changed if some were, by somebody who did not say so."""
        now, expected = self._versions(), self._expected
        self._expected = now
        if expected is None or now == expected:
            return
        if self._announced:
            self.change_all()
        else:
            self._edited()

    def _edited(self) -> None:
        self._edits += 1
        self.change_all()
        if not self._warned_of_edits:
            self._warned_of_edits = True
            warnings.warn(
                f"rows of table {self.name!r} were changed in place past its optimizer (nn.init, "
                "copy_, .data): all of them count as changed from here on. Call "
                "keeper.mark_all_changed() before you change rows yourself",
                stacklevel=2,
            )

    def check_edits(self) -> None:
        """Raises `StateError` if rows were changed past the optimizer since they were frozen: a
        copy of them may be of before or after. From any thread."""
        first = self._expected
        now = self._versions()
        # An optimizer that steps meanwhile makes it None, or another list.
        changed = first is not None and first is self._expected and now != first
        if self._edits != self._edits_frozen or (changed and not self._announced):
            raise StateError(
                f"rows of table {self.name!r} were changed in place while a version of them was "
                "written: it is given up, and its rows go with the next; call "
                "keeper.mark_all_changed() before you change rows yourself"
            )

    def before_freeze(self) -> None:
        """The dirty rows are about to be taken: sampled rows that are not must be as they were."""
        self.look_again()
        if self._sample:
            dirty = np.empty(self._sampled.size, np.bool_)
            bits.test_bits(self.dirty, self._sampled, dirty)
            if self._sampled_bits(~dirty) != self._sampled_then(~dirty):
                self._edited()
        self.take_sample()
        self._announced, self._edits_frozen = False, self._edits

    def take_sample(self) -> None:
        self._sample = self._sampled_bits(np.ones(self._sampled.size, np.bool_))

    def _sampled_bits(self, chosen: Bools) -> bytes:
        rows = self._sampled[chosen]
        return b"".join(plane[rows].tobytes() for plane in self.planes.values())

    def _sampled_then(self, chosen: Bools) -> bytes:
        parts, at = [], 0
        for plane in self.planes.values():
            nbytes = plane[:1].nbytes * self._sampled.size
            then = np.frombuffer(self._sample[at : at + nbytes], np.uint8)
            parts.append(then.reshape(self._sampled.size, -1)[chosen].tobytes())
            at += nbytes
        return b"".join(parts)

    # -- changes ---------------------------------------------------------------------------------

    def before_step(self, group: dict[str, Any], *, blind: bool) -> None:
        """Called with the gradient in place; `blind` if it will be computed within the step."""
        self.look_again()
        self._expected = None
        gradient = self.weight.grad
        reason = followable.moves_others(type(self.optimizer).__name__, group)
        if blind:
            reason = "the gradient is computed inside of step(closure)"
        if reason is not None:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"all rows of table {self.name!r} count as changed: {reason}", stacklevel=2
                )
            self.change_all()
        elif gradient is not None:
            self.change(followable.changed_rows(gradient).numpy())

    def after_step(self) -> None:
        self._expected = self._versions()

    def change(self, rows: I64) -> None:
        """These rows are about to change: a copy under way takes them as they are first."""
        snapshot = self.snapshot
        if snapshot is not None:
            snapshot.wait_for_room()
        with self.lock:
            if self.snapshot is not None:
                self.snapshot.before_write(rows)
            bits.set_bits(self.dirty, rows)

    def change_all(self) -> None:
        for start in range(0, self.rows, _SLICE_ROWS):
            self.change(np.arange(start, min(self.rows, start + _SLICE_ROWS)))

    def track(self) -> None:
        if self.tracker is None:
            self.tracker = Tracker(self.touched.size)
            self.dirty = self.touched.copy()

    def install(self, ids: I64, planes: Mapping[str, Values]) -> None:
        if set(planes) != set(self.planes):
            raise StateError(
                f"table {self.name!r} has planes {sorted(self.planes)}, the rows bring "
                f"{sorted(planes)}; load rows that were saved with the same optimizer"
            )
        self.look_again()
        self.change(ids)
        for name, values in planes.items():
            self.planes[name][ids] = np.asarray(values)
        bits.set_bits(self.touched, ids)

    def forget_rows(self) -> None:
        self.touched[:] = 0

    def require_rows(self) -> None:
        """After a load: every row was brought, since torch's first values cannot be had again."""
        missing = self.rows - int(np.bitwise_count(self.touched).sum())
        if missing:
            raise StateError(
                f"the version lacks {missing} of {self.rows} rows of table {self.name!r}: it was "
                "not written by a keeper; restore another"
            )

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        if self.tracker is not None:
            self.tracker.reset(self.dirty if keep_since_baseline else None)
        self.dirty = _no_rows(self.dirty.size)
        self.take_sample()


def _no_rows(words: int) -> U64:
    return lazy_zeros((words,), np.uint64).view(np.uint64)


class TorchTables:
    """All followed tables of one model, as a subject of checkpoints.

    Belongs to the thread that trains; versions are copied by another.
    """

    def __init__(self) -> None:
        self._lock = ForkLock()
        self.tables: dict[str, TorchTable] = {}
        self._handles: list[Any] = []

    def add(self, name: str, weight: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
        self.tables[name] = TorchTable(name, weight, optimizer, self._lock)

    def follow(
        self, optimizers: Sequence[torch.optim.Optimizer], timed: Callable[..., Any]
    ) -> None:
        """From now on every step of these optimizers says which rows it changes."""
        for optimizer in optimizers:
            followed = {
                id(table.weight): table
                for table in self.tables.values() if table.optimizer is optimizer
            }  # fmt: skip
            if followed:
                hook = timed(_Before(followed))
                self._handles.append(optimizer.register_step_pre_hook(hook))
                self._handles.append(optimizer.register_step_post_hook(_After(followed)))

    def stop_following(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def announce(self) -> None:
        for table in self.tables.values():
            table.announce()

    def check_edits(self) -> None:
        for table in self.tables.values():
            table.check_edits()

    def look_again(self) -> None:
        for table in self.tables.values():
            table.look_again()

    # -- what a checkpointer asks ----------------------------------------------------------------

    def schema(self) -> dict[str, Any]:
        return {
            "shards": 1,
            "tables": {
                table.name: {
                    "rows": table.rows,
                    "planes": {
                        name: [plane.shape[1], plane.dtype.name]
                        for name, plane in table.planes.items()
                    },
                    "origin": "stored",
                }
                for table in self.tables.values()
            },
        }

    def track(self, priority: Priority | None = None) -> None:
        if priority is not None and self.tables:
            raise ConfigError(
                f"table {next(iter(self.tables))!r} is a module of torch's, which has no shards: "
                "prioritised saving is for emberkeep's modules"
            )
        for table in self.tables.values():
            table.track()

    def freeze(self, since: str | None, buffer_nbytes: int) -> Cut[Sequence[FrozenRows]]:
        tables = list(self.tables.values())
        for table in tables:
            table.before_freeze()
        return Cut([freeze(tables, since=since, room=CopyRoom(buffer_nbytes))], {})

    def load_table_state(self, state: dict[str, Any]) -> None:
        for table in self.tables.values():
            table.require_rows()

    def clear(self) -> None:
        for table in self.tables.values():
            table.forget_rows()

    def install(self, table: str, ids: I64, planes: Mapping[str, npt.NDArray[Any]]) -> None:
        self.tables[table].install(ids, planes)

    def install_scattered(
        self, tables: Sequence[str], offsets: Sequence[int], ids: I64,
        planes: Mapping[str, Values], *, busy: int = 0,
    ) -> None:  # fmt: skip
        for table, start, stop in zip(tables, offsets, offsets[1:], strict=False):
            some = {name: values[start:stop] for name, values in planes.items()}
            self.tables[table].install(ids[start:stop], some)

    def read(self, table: str, ids: I64) -> Planes:
        """A copy of all planes of rows."""
        return {name: plane[ids] for name, plane in self.tables[table].planes.items()}

    def delete(self, table: str, ids: I64) -> int:
        raise StateError(f"the version deletes rows of table {table!r}, whose rows are all kept")

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        for table in self.tables.values():
            table.forget_changes(keep_since_baseline=keep_since_baseline)

    def forgot_changes(self) -> bool:
        return False


class _Before:
    """What an optimizer calls right before it steps."""

    def __init__(self, tables: Mapping[int, TorchTable]) -> None:
        self._tables = tables

    def __call__(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # `args` begins with the optimizer itself in some releases of torch.
        given = [*(arg for arg in args if arg is not optimizer), kwargs.get("closure")]
        blind = any(arg is not None for arg in given)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                table = self._tables.get(id(parameter))
                if table is not None:
                    table.before_step(group, blind=blind)


class _After:
    """What an optimizer calls when it has stepped."""

    def __init__(self, tables: Mapping[int, TorchTable]) -> None:
        self._tables = tables

    def __call__(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for table in self._tables.values():
            table.after_step()


def embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Torch's embedding modules by their path; of several that share a weight, the first."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) not in seen:
            seen.add(id(module.weight))
            yield path or "embedding", module
