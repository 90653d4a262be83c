"""Codecs by plane, and by table where tables differ."""

from __future__ import annotations

from collections.abc import Mapping

from emberkeep.codecs.row_codecs import Codec, Raw

_RAW = Raw()


def key_of(table: str, plane: str) -> str:
    """What the codec of one table's plane stands under, beside those of the planes of all tables;
    no plane has a slash in its name."""
    return f"{table}/{plane}"


def codec_of(codecs: Mapping[str, Codec], table: str, plane: str) -> Codec:
    """The codec of a plane of a table: its own, else that of the plane, else none is used."""
    return codecs.get(key_of(table, plane)) or codecs.get(plane, _RAW)


def differ_by_table(codecs: Mapping[str, Codec]) -> bool:
    """Whether some table has codecs of its own."""
    return any("/" in key for key in codecs)
