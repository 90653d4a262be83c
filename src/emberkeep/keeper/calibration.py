"""Which width each table can bear: measured on the model's own validation loss."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from emberkeep._types import Json
from emberkeep.checkpoint.codec_choice import OPTIMIZER_PLANES
from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.checkpoint.widths import Width, Widths
from emberkeep.codecs import Codec, NonNegative, Quantized
from emberkeep.errors import ConfigError, StateError
from emberkeep.keeper.dense import generators, set_generators
from emberkeep.keeper.keeper import Keeper
from emberkeep.keeper.model_parts import Parts
from emberkeep.keeper.repository_saver import RepositorySaver
from emberkeep.rows.snapshot import Chunk

CANDIDATES = (2, 3, 4, 8)
_BUFFER_NBYTES = 64 * 2**20
_CHUNK_ROWS = 32768

Validate = Callable[[], float]
Trial = Callable[[], object]


def calibrate(
    keeper: Keeper,
    validate: Validate,
    *,
    trial: Trial | None = None,
    candidates: Sequence[int] = CANDIDATES,
) -> Widths:
    """Chooses how many bits each table gets in versions, within the strategy's `accuracy_budget`.

    `validate` returns the loss of the model as it is, on the same samples each time. Tables are
    taken one after the other, the largest first, each with its rows as a restore would bring them
    back: the narrowest of the `candidates` is taken with which the loss of all tables together
    grows by no more than their part of the budget. One restore may take `accuracy_budget` of the
    loss, divided by the restores that the strategy expects; where no width keeps that, the table
    stays exact.

    What the optimizer remembers shows in later steps alone. So it is stored exactly, unless `trial`
    trains a few steps, always on the same batches and not those of the keeper's reader: then it is
    quantized where the loss after them, from what a restore brings back of weights and optimizer
    together, exceeds that after the same steps from exact rows by no more than the budget.

    Tables that have no trained rows yet stay exact, which is warned of.

    Afterwards everything is to the bit as it was, and the next version is a baseline. The widths
    are in every manifest from then on (`emberkeep show`), with the reason for each, and a run that
    is resumed takes them from there. Call it between two steps, once the model has learned
    something. It takes as much memory again as the trained rows, in this process, wherever they
    live.
    """
    saver, spec = _checked(keeper, candidates)
    budget = spec.accuracy_budget
    assert budget is not None
    saver.join()  # rows have one snapshot at a time
    trials = _Trials(keeper, validate, trial, spec)
    try:
        with trials:
            widths = trials.weights(budget, spec.expected_restores or 1, sorted({*candidates}))
            if trial is not None:
                widths = trials.optimizers(widths)
    finally:
        keeper._ledger.step = keeper.steps  # the next one begins here: trials are no part of it
    saver.use_widths(widths)
    keeper._tell("calibrated", widths.to_dict())
    return widths


def is_calibrated(keeper: Keeper) -> bool:
    """Whether widths are known: measured here, or by the run that this one goes on with."""
    saver = keeper._saver
    return isinstance(saver, RepositorySaver) and saver.spec.widths is not None


def _checked(keeper: Keeper, candidates: Sequence[int]) -> tuple[RepositorySaver, VersionSpec]:
    """What is calibrated; refuses what cannot be."""
    if not isinstance(keeper, Keeper):
        raise ConfigError(f"calibrate() takes a keeper, not a {type(keeper).__name__}")
    if keeper._closed:
        raise StateError("the keeper is closed: make another")
    for bits in candidates:
        Quantized(bits=bits)
    if not candidates:
        raise ConfigError("candidates= is empty: name widths to choose from, such as (4, 8)")
    saver = keeper._saver
    if keeper._ranks.world > 1:
        raise ConfigError(
            "widths are calibrated in a run of one process: several ranks would have to go through "
            "every trial together; calibrate there, and give the strategy bits={table: width}"
        )
    if not isinstance(saver, RepositorySaver):
        raise ConfigError(
            "a run that is kept in its tier stores rows as they are: there is nothing to calibrate"
        )
    if saver.spec.accuracy_budget is None:
        raise ConfigError(
            "calibrate() needs to know what accuracy may cost: give the strategy accuracy_budget=, "
            "such as ek.incremental(accuracy_budget=1e-4)"
        )
    if not keeper.steps:
        raise StateError(
            "no step was trained yet, and rows that have learned nothing lose nothing: calibrate "
            "once the model is worth something"
        )
    return saver, saver.spec


@dataclass(frozen=True, slots=True)
class _TableRows:
    """What calibration knows of a table."""

    name: str
    chunks: Sequence[Chunk]

    @property
    def nbytes(self) -> int:
        return sum(
            values.nbytes for chunk in self.chunks for values in (chunk.planes or {}).values()
        )

    @property
    def has_optimizer_planes(self) -> bool:
        return any(
            plane in OPTIMIZER_PLANES for chunk in self.chunks for plane in chunk.planes or ()
        )


class _Trials:
    """Puts rows into the model as a restore would, and takes everything back."""

    def __init__(
        self, keeper: Keeper, validate: Validate, trial: Trial | None, spec: VersionSpec
    ) -> None:
        self._parts: Parts = keeper._parts
        self._subject = keeper._parts.subject
        self._validate, self._trial, self._spec = validate, trial, spec
        self._loss = self._allowed = math.nan
        self._losses: set[float] = set()
        self._budget_text = ""

    def __enter__(self) -> _Trials:
        cut = self._subject.freeze(None, _BUFFER_NBYTES)
        self._state: Json = cut.tables
        found: dict[str, list[Chunk]] = {name: [] for name in self._subject.schema()["tables"]}
        try:
            for rows in (rows for shard in cut for rows in shard):
                for chunk in rows.chunks(_CHUNK_ROWS):
                    if chunk.planes is not None and chunk.ids.size:
                        planes = {name: values.copy() for name, values in chunk.planes.items()}
                        found[chunk.table].append(Chunk(chunk.table, chunk.ids.copy(), planes))
        finally:
            for rows in (rows for shard in cut for rows in shard):
                rows.close(())
        self._tables = sorted(
            (_TableRows(name, chunks) for name, chunks in found.items() if chunks),
            key=lambda table: -table.nbytes,
        )
        self._untrained = sorted(name for name, chunks in found.items() if not chunks)
        self._dense = self._parts.dense.capture([generators()])
        self._followed = [
            (table, {name: values.copy() for name, values in table.planes.items()},
             table.touched.copy())
            for table in (self._parts.tables.tables.values() if self._trial is not None else ())
        ]  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self._rewind()

    def _rewind(self) -> None:
        """Everything as it was."""
        if self._trial is not None:
            self._subject.clear()
        for table in self._tables:
            self._install(table, {})
        self._subject.load_table_state(self._state)
        for followed, planes, touched in self._followed:
            for name, values in planes.items():
                followed.planes[name][...] = values
            followed.touched[...] = touched
        saved = self._parts.dense.check(self._dense)
        self._parts.dense.load(saved)
        set_generators(saved["generators"][0])

    def _install(self, table: _TableRows, codecs: Mapping[str, Codec]) -> None:
        """The rows of a table as they come back from these codecs."""
        for chunk in table.chunks:
            assert chunk.planes is not None
            planes = {
                name: _stored(codecs.get(name), values) for name, values in chunk.planes.items()
            }
            self._subject.install(chunk.table, chunk.ids, planes)

    def _measured(self) -> float:
        found = self._validate()
        try:
            loss = float(found)
        except (TypeError, ValueError):
            raise ConfigError(
                f"validate() returned {found!r}: it must return the loss, a number"
            ) from None
        self._losses.add(loss)
        if not math.isfinite(loss):
            raise StateError(
                f"validate() returned {loss}: a loss that is no number cannot be kept within a "
                "budget; look at the samples that it is computed from"
            )
        return loss

    # -- weights ---------------------------------------------------------------------------------

    def weights(self, budget: float, restores: int, candidates: Sequence[int]) -> Widths:
        self._loss = self._measured()
        self._allowed = budget * abs(self._loss) / restores
        self._budget_text = f"{_percent(budget)} for {restores} restore{'s' * (restores != 1)}"
        total = sum(table.nbytes for table in self._tables)
        chosen: dict[str, Width] = {}
        nbytes, reached = 0, self._loss
        for table in self._tables:
            nbytes += table.nbytes
            # The part of the budget of the tables so far: a first one must not use up all of it.
            allowed = self._allowed * nbytes / total
            tried: list[str] = []
            for bits in candidates:
                codec = self._quantized(bits)
                self._install(table, {"weight": codec})
                loss = self._measured()
                grown = f"{bits} bits {self._grown(loss)}"
                if loss - self._loss <= allowed:
                    chosen[table.name] = Width(bits=bits, why="; ".join([grown, *tried]))
                    reached = loss
                    break
                tried.append(f"{grown}, too much")
            else:
                self._install(table, {})
                chosen[table.name] = Width(bits=None, why="; ".join(tried))
        if self._tables and len(self._losses) == 1:
            warnings.warn(
                f"validate() returned {self._loss:.6g} whatever the rows were, so the narrowest "
                "width looks good for every table: it should compute the loss of the model "
                "again each time, on samples that look rows up",
                stacklevel=3,
            )
        if self._untrained:
            warnings.warn(
                f"tables {', '.join(self._untrained)} have no trained rows to measure: versions "
                "hold them exactly until widths are calibrated again, once there are some",
                stacklevel=3,
            )
        exact = Width(why="no row was trained when widths were measured")
        return Widths(
            tables={**chosen, **dict.fromkeys(self._untrained, exact)},
            why=f"accuracy budget {self._budget_text}: validation loss {self._loss:.6g} to "
            f"{reached:.6g} ({self._grown(reached)})",
            measured_for=self._spec.measures,
        )

    def _quantized(self, bits: int) -> Quantized:
        if bits == 8:
            return Quantized(bits=bits)
        return Quantized(bits=bits, bins=self._spec.bins, ratio=self._spec.range_ratio)

    def _grown(self, loss: float, since: float | None = None) -> str:
        since = self._loss if since is None else since
        return f"{100 * (loss - since) / max(abs(since), 1e-300):+.4f}%"

    # -- optimizer planes ------------------------------------------------------------------------

    def optimizers(self, widths: Widths) -> Widths:
        """Which tables' optimizer planes are quantized beside their weights: both spend the same
        budget, counted from the loss after a trial with exact rows."""
        exact = self._after_trial(Widths(tables={}), ())
        usual = reached = self._after_trial(widths, ())
        several = [table.name for table in self._tables if table.has_optimizer_planes]
        chosen: list[str] = []
        if several:
            loss = self._after_trial(widths, several)
            left = self._allowed - (usual - exact)
            if loss - exact <= self._allowed:
                chosen, reached = several, loss
            elif left >= 0:
                for done, name in enumerate(several, 1):
                    loss = self._after_trial(widths, [*chosen, name])
                    if loss - usual <= left * done / len(several):
                        chosen, reached = [*chosen, name], loss
        if reached - exact > self._allowed:
            warnings.warn(
                f"weights of these widths keep the accuracy budget, {self._budget_text}, and after "
                f"the trial the loss has grown by {self._grown(reached, exact)}: leave narrow "
                "widths out of candidates=, or take a smaller accuracy_budget=",
                stacklevel=3,
            )
        why = (
            f"{widths.why}; after a trial, from weights alone {self._grown(usual, exact)}, with "
            f"optimizer planes of {len(chosen)} of {len(several)} tables quantized "
            f"{self._grown(reached, exact)}"
        )
        tables = {
            name: replace(width, optimizer=name in chosen) for name, width in widths.tables.items()
        }
        return replace(widths, tables=tables, why=why)

    def _after_trial(self, widths: Widths, quantized: Iterable[str]) -> float:
        """The loss after some steps from what a restore with these widths brings back."""
        assert self._trial is not None
        self._rewind()
        names = {*quantized}
        for table in self._tables:
            codecs: dict[str, Codec] = {}
            bits = widths.tables.get(table.name, Width()).bits
            if bits is not None:
                codecs["weight"] = self._quantized(bits)
            if table.name in names:
                codecs |= {plane: NonNegative() for plane in OPTIMIZER_PLANES}
            self._install(table, codecs)
        self._trial()
        return self._measured()


def _stored(codec: Codec | None, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if codec is None:
        return values
    rows, width = values.shape
    return codec.decode(codec.encode(values), rows=rows, width=width, dtype=values.dtype)


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"
