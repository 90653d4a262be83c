"""A run but for its rows: dense state, the generators of all ranks, and the place of the reader."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import xxhash

from emberkeep._types import Json
from emberkeep.errors import DamageError, EmberkeepError, StateError
from emberkeep.keeper.dense import Dense, Rename, check_stateful, generators, set_generators
from emberkeep.keeper.plain_state import Packed, pack, unpack
from emberkeep.keeper.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The state of one instant, beside the rows."""

    dense: Packed
    reader: Json
    """What the reader's `state_dict` returned; empty without a reader."""


def check_reader(reader: Any) -> None:
    if reader is not None:
        check_stateful(
            "reader=", reader,
            "a version holds the reader's place; use emberkeep.data.Reader or torchdata's "
            "StatefulDataLoader, or leave reader= out, and the data starts over after a resume",
        )  # fmt: skip


def warn_of_data(step: int) -> None:
    """A resume without a reader, said where the user called it."""
    warnings.warn(
        f"step {step} was resumed and the keeper has no reader: the data starts over, unless you "
        "see to its place yourself; give the keeper reader= from the start to go on where the "
        "version ends",
        stacklevel=3,
    )


class RunState:
    """Captures that state on all ranks together; checks it before anything changes, then loads it.

    The rank that writes has all of it; loading is every rank's own.
    """

    def __init__(self, dense: Dense, reader: Any, ranks: Ranks) -> None:
        self._dense = dense
        self._reader = reader
        self._ranks = ranks
        self._fitting: Json = {}

    def capture(self) -> Captured | None:
        """Everything as it is now on every rank; None but for the rank that writes."""
        reader = self._place()
        every = self._generators(reader)
        if not self._ranks.leads:
            return None
        return Captured(dense=self._dense.capture(every), reader=reader)

    def fit(self, saved: Captured) -> None:
        """Refuses what does not fit this run; nothing has changed yet."""
        if bool(saved.reader) != bool(self._place()):
            raise StateError(
                "the version holds the place of a reader: give the keeper reader="
                if saved.reader
                else "the version holds no place of a reader: leave reader= out"
            )
        self._fitting = {**self._dense.check(saved.dense), "reader": saved.reader}
        if not isinstance(self._fitting.get("generators"), list):
            raise DamageError("the version holds no state of random generators: it is damaged")

    def load(self) -> None:
        """Loads what `fit` has accepted; nothing if it was not asked, of imported rows alone."""
        saved, self._fitting = self._fitting, {}
        if not saved:
            return
        if self._reader is not None:
            self._reader.load_state_dict(saved["reader"])
        self._dense.load(saved)
        ranks = len(saved["generators"])
        if ranks != self._ranks.world:
            warnings.warn(
                f"the version was saved by {ranks} ranks, there are {self._ranks.world}: the same "
                "bits need the same number",
                stacklevel=5,
            )
        if self._ranks.rank < ranks:
            set_generators(saved["generators"][self._ranks.rank])

    def load_partly(self, saved: Captured, rename: Rename, *, same_rows: bool) -> list[str]:
        """Loads what fits of a version; returns what does not."""
        dense = unpack(saved.dense)
        notes = self._dense.load_partly(dense, rename, same_rows=same_rows)
        if self._reader is None or not saved.reader:
            if self._reader is not None:
                notes.append("the version holds no place of a reader: the data starts over")
            elif saved.reader:
                notes.append("the place of a reader was left out: the keeper has no reader=")
        else:
            try:
                self._reader.load_state_dict(saved.reader)
            except (EmberkeepError, LookupError, TypeError, ValueError) as error:
                notes.append(f"the data starts over: {error}")
        generators = dense.get("generators", [])
        if self._ranks.rank < len(generators):
            set_generators(generators[self._ranks.rank])
        return notes

    def names(self) -> set[str]:
        return self._dense.names()

    def _place(self) -> Json:
        return {} if self._reader is None else self._reader.state_dict()

    def _generators(self, reader: Json) -> list[Json]:
        if self._ranks.world == 1:
            return [generators()]
        place = xxhash.xxh3_128_digest(pack(reader, what="reader").encode())
        own = pack({"generators": generators(), "reader": place})
        every = [unpack(Packed.decode(it)) for it in self._ranks.gathered(own.encode())]
        if len({rank["reader"] for rank in every}) > 1:
            raise StateError(
                "the readers of the ranks are at different places, and one version holds one: use "
                "a reader whose state is the same on all ranks, as emberkeep's is"
            )
        return [rank["generators"] for rank in every]
