"""What tables know beside their rows, of one shard and of all together."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from emberkeep._types import I64, Json, Planes
from emberkeep.rows.row_digest import digest_rows
from emberkeep.runtime.fields import Fields
from emberkeep.tables import Table


def holds(table: Table, capacity: int, rows_S: Sequence[int], count: int) -> bool:
    """Whether so many shards can hold the rows that shards of a version held.

    As many shards have the same ids each; over others ids spread evenly but for chance, for which
    only rows within the capacity leave room.
    """
    if len(rows_S) != count:
        return sum(rows_S) <= capacity
    wider = replace(table, capacity=capacity)
    return all(rows <= wider.slots_on(s, count) for s, rows in enumerate(rows_S))


# Edits are summed modulo this.
_EDITS = 2**62


class Edit(NamedTuple):
    """One write from outside, which no push counts: an upsert, or a deletion.

    `stamp` follows from what is written. A shard sums up those that it has had, in whatever order:
    equal sums are of the same edits. `call` tells a call that is made again from another one.
    """

    stamp: int = 0
    call: int = 0

    @classmethod
    def of(cls, table: str, ids: I64, planes: Planes | None = None) -> Edit:
        if not ids.size:
            return NO_EDIT
        stamp = 1 + digest_rows(table, ids, planes or {}).low % (_EDITS - 1)
        return cls(stamp, secrets.randbits(62))

    def after(self, edits: int) -> int:
        return (edits + self.stamp) % _EDITS


NO_EDIT = Edit()


def edit_of(header: Json) -> Edit:
    """The edit that a request is, or is part of."""
    stamp, call = header.get("edit", NO_EDIT)
    return Edit(int(stamp), int(call))


def joined(states: Sequence[Json]) -> Json:
    """The state of tables from that of their shards: each push counts on all of them, while
    every shard has ticks of its own."""
    return {
        name: {
            "steps": max(state[name]["steps"] for state in states),
            "tick": max(state[name]["tick"] for state in states),
            "ticks": [state[name]["tick"] for state in states],
            **({"rows": [state[name]["rows"] for state in states]} if "rows" in table else {}),
            **({"edits": edits} if any(edits := edits_of(states, name)) else {}),
        }
        for name, table in states[0].items()
    }


def edits_of(states: Sequence[Json], name: str) -> list[int]:
    return [int(state[name].get("edits", 0)) for state in states]


def rows_of_shards(state: Json, name: str) -> list[int] | None:
    """How many rows each shard had of a table, where a state says so."""
    table = Fields("a version", state.get(name, {}), f"tables.{name}.")
    return table.list_of("rows", int) if "rows" in table else None


def of_shard(state: Json, shard: int, count: int) -> Json:
    """One shard's part of the state of tables; any tick that is late enough serves where another
    number of shards saved it."""
    found = {}
    for name, values in state.items():
        table = Fields("a version", values, f"tables.{name}.")
        ticks = table.list_of("ticks", int) if "ticks" in table else []
        tick = ticks[shard] if len(ticks) == count else table.number("tick")
        edits = table.list_of("edits", int) if "edits" in table else []
        found[name] = {
            "steps": table.number("steps"), "tick": tick,
            "edits": edits[shard] if len(edits) == count else 0,
        }  # fmt: skip
    return found
