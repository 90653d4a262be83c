"""What tables know beside their rows, of one shard and of all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from emberkeep._types import Json
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


def joined(states: Sequence[Json]) -> Json:
    """The state of tables from that of their shards: each push counts on all of them, while
    every shard has ticks of its own."""
    return {
        name: {
            "steps": max(state[name]["steps"] for state in states),
            "tick": max(state[name]["tick"] for state in states),
            "ticks": [state[name]["tick"] for state in states],
            **({"rows": [state[name]["rows"] for state in states]} if "rows" in table else {}),
        }
        for name, table in states[0].items()
    }


def of_shard(state: Json, shard: int, count: int) -> Json:
    """One shard's part of the state of tables; any tick that is late enough serves where another
    number of shards saved it."""
    found = {}
    for name, values in state.items():
        table = Fields("a version", values, f"tables.{name}.")
        ticks = table.list_of("ticks", int) if "ticks" in table else []
        tick = ticks[shard] if len(ticks) == count else table.number("tick")
        found[name] = {"steps": table.number("steps"), "tick": tick}
    return found
