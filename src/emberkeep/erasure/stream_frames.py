"""Messages of parity streams as frames: each host is sent what concerns it, and its number alone
otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep._types import I64, U8, Json
from emberkeep.erasure.codes import Placement
from emberkeep.erasure.messages import (
    Changed,
    Differences,
    Fill,
    Layer,
    Message,
    Point,
    Syndrome,
    Values,
    Wanted,
)
from emberkeep.errors import ProtocolError
from emberkeep.wire.protocol import MAX_FRAME_NBYTES, pack_frame

Arrays = dict[str, npt.NDArray[Any]]
_NO_ROWS: I64 = np.empty(0, np.int64)
_FILL = ("host", "p", "slab", "slot", "start", "stop")
_CHANGED = ("stripes", "bounds", "records", "marked", "marked_bounds", "marks")


def pack_messages(
    messages: Sequence[Message], *, host: int, host_epoch: int, placement: Placement
) -> U8:
    """Consecutive messages of one stream, for one host."""
    abouts: list[Json] = []
    arrays: Arrays = {}
    for i, message in enumerate(messages):
        about: Json = {
            "number": message.number, "settled": message.settled, "goes_to": message.goes_to
        }  # fmt: skip
        body = message.body
        if isinstance(body, Differences):
            slots = [slot for _, slot in placement.slots_on(message.source, host)]
            parts = [_of_slots(part, slots) for part in body.parts]
            about |= {
                "kind": "differences", "push": body.push, "state": body.state, "more": body.more
            }  # fmt: skip
            about["slabs"] = [part.slab for part in parts]
            for j, part in enumerate(parts):
                arrays |= {f"{i}.{j}.{name}": getattr(part, name) for name in _CHANGED}
        elif isinstance(body, Values):
            group = placement.group(message.source, body.slot)
            concerned = any(placement.host(group, p) == host for p in range(placement.r))
            about |= {"kind": "values", "decode": body.decode, "slot": body.slot}
            if concerned:
                arrays[f"{i}.unknown"] = body.unknown.view(np.uint8)
                if body.values is not None:
                    arrays[f"{i}.values"] = body.values
        else:
            about |= {"kind": "fill", **{name: getattr(body, name) for name in _FILL}}
            if body.host == host:
                for name in ("stripes", "records", "marks"):
                    arrays[f"{i}.{name}"] = getattr(body, name)
        abouts.append(about)
    first = messages[0]
    header = {
        "host_epoch": host_epoch, "source": first.source, "epoch": first.epoch, "messages": abouts
    }  # fmt: skip
    return np.frombuffer(pack_frame(header, arrays), np.uint8)


def _of_slots(part: Changed, slots: Sequence[int]) -> Changed:
    """The rows of some slots alone; there are none in the others."""
    kept = {}
    for bounds, names in (("bounds", ("stripes", "records")),
                          ("marked_bounds", ("marked", "marks"))):  # fmt: skip
        old = getattr(part, bounds)
        sizes = np.zeros(old.size, np.int64)
        for slot in slots:
            sizes[slot + 1] = old[slot + 1] - old[slot]
        kept[bounds] = np.cumsum(sizes)
        for name in names:
            pieces = [getattr(part, name)[old[slot] : old[slot + 1]] for slot in sorted(slots)]
            kept[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return Changed(slab=part.slab, **kept)


def unpack_messages(header: Json, arrays: Mapping[str, npt.NDArray[Any]]) -> list[Message]:
    """The inverse of `pack_messages`, as far as it concerned the host."""
    messages = []
    for i, about in enumerate(header["messages"]):
        kind = about["kind"]
        body: Differences | Values | Fill
        if kind == "differences":
            parts = tuple(
                Changed(slab=int(slab), **{name: arrays[f"{i}.{j}.{name}"] for name in _CHANGED})
                for j, slab in enumerate(about["slabs"])
            )
            push = about["push"]
            body = Differences(
                parts,
                None if push is None else (str(push[0]), int(push[1])),
                tuple(map(int, about["state"])),
                bool(about["more"]),
            )
        elif kind == "values":
            unknown = arrays.get(f"{i}.unknown", np.empty(0, np.uint8))
            body = Values(
                int(about["decode"]), int(about["slot"]), arrays.get(f"{i}.values"),
                unknown.view(np.bool_),
            )  # fmt: skip
        elif kind == "fill":
            host, p, slab, slot, start, stop = (int(about[name]) for name in _FILL)
            body = Fill(
                host, p, slab, slot, start, stop,
                arrays.get(f"{i}.stripes", _NO_ROWS),
                arrays.get(f"{i}.records", np.empty((0, 0), np.uint32)),
                arrays.get(f"{i}.marks", np.empty((0, 0), np.uint8)),
            )  # fmt: skip
        else:
            raise ProtocolError(f"there is no message of kind {kind!r}"[:100])
        source, epoch = int(header["source"]), int(header["epoch"])
        goes_to = tuple(map(int, about["goes_to"]))
        messages.append(
            Message(source, epoch, int(about["number"]), int(about["settled"]), body, goes_to)
        )
    return messages


# -- what coordinators ask -----------------------------------------------------------------------


def pack_wanted(wanted: Sequence[Wanted]) -> tuple[Json, Arrays]:
    """Decodes; stripes that follow each other, as those of marks do, are named by their ends."""
    names = []
    arrays: Arrays = {}
    for i, decode in enumerate(wanted):
        ends = None
        if decode.stripes.size:
            first, last = int(decode.stripes[0]), int(decode.stripes[-1])
            if last - first == decode.stripes.size - 1:
                ends = [first, last + 1]
        if ends is None:
            arrays[str(i)] = decode.stripes
        names.append([decode.number, decode.group, decode.slab, decode.layer, ends])
    return {"wanted": names}, arrays


def unpack_wanted(header: Json, arrays: Mapping[str, npt.NDArray[Any]]) -> list[Wanted]:
    wanted = []
    room = MAX_FRAME_NBYTES // 8  # of stripes that a frame could name one by one
    for i, (number, group, slab, layer, ends) in enumerate(header["wanted"]):
        if ends is None:
            stripes = arrays[str(i)]
        else:
            first, last = map(int, ends)
            room -= last - first
            if first < 0 or last < first or room < 0:
                raise ProtocolError(f"stripes {first} to {last} are more than a question may name")
            stripes = np.arange(first, last)
        wanted.append(Wanted(int(number), int(group), int(slab), layer_of(layer), stripes))
    return wanted


def layer_of(name: str) -> Layer:
    if name == "records":
        return "records"
    if name == "marks":
        return "marks"
    raise ProtocolError(f"rows have records and marks, no {name!r}"[:100])


def pack_syndromes(syndromes: Sequence[Syndrome | None]) -> tuple[Json, Arrays]:
    slots: list[list[int] | None] = []
    arrays: Arrays = {}
    for i, syndrome in enumerate(syndromes):
        slots.append(None if syndrome is None else sorted(syndrome.unknown))
        if syndrome is not None:
            arrays[f"{i}.total"] = syndrome.total
            for slot, unknown in syndrome.unknown.items():
                arrays[f"{i}.{slot}"] = unknown.view(np.uint8)
    return {"slots": slots}, arrays


def unpack_syndromes(header: Json, arrays: Mapping[str, npt.NDArray[Any]]) -> list[Syndrome | None]:
    return [
        None if slots is None else Syndrome(
            arrays[f"{i}.total"], {s: arrays[f"{i}.{s}"].view(np.bool_) for s in slots}
        )
        for i, slots in enumerate(header["slots"])
    ]  # fmt: skip


def pack_point(point: Point) -> Json:
    return {"ledger": dict(point.ledger), "state": list(point.state)}


def unpack_point(document: Json) -> Point:
    return Point(
        {str(worker): int(number) for worker, number in document["ledger"].items()},
        tuple(map(int, document["state"])),
    )
