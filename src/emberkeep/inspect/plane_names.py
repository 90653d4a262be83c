"""What other systems call tables and planes, and what they are called here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from emberkeep.errors import ConfigError

Style = Literal["emberkeep", "torch", "torchrec", "fbgemm"]

IDS = "id"
WEIGHT = "weight"

# Words at the end of a tensor's name. What one stands for may depend on the planes of the table:
# FBGEMM calls whatever an optimizer remembers first `momentum1`.
_MEANINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("id", "ids", "key", "keys"), (IDS,)),
    **dict.fromkeys(("weight", "weights", "embedding", "vector", "values"), (WEIGHT,)),
    **dict.fromkeys(("accumulator", "sum"), ("accumulator",)),
    **dict.fromkeys(("momentum", "momentum_buffer"), ("momentum",)),
    **dict.fromkeys(("first_moment", "exp_avg"), ("first_moment",)),
    **dict.fromkeys(("second_moment", "exp_avg_sq"), ("second_moment",)),
    "momentum1": ("accumulator", "first_moment", "momentum"),
    "momentum2": ("second_moment",),
    "step": ("step",),
    "used": ("used",),
}

_STYLES: dict[Style, dict[str, str]] = {
    "emberkeep": {},
    "torch": {
        "accumulator": "sum", "momentum": "momentum_buffer",
        "first_moment": "exp_avg", "second_moment": "exp_avg_sq",
    },
    "torchrec": {
        "accumulator": "momentum1", "momentum": "momentum1",
        "first_moment": "exp_avg", "second_moment": "exp_avg_sq",
    },
    "fbgemm": {
        "accumulator": "momentum1", "momentum": "momentum1",
        "first_moment": "momentum1", "second_moment": "momentum2",
    },
}  # fmt: skip


def styled(plane: str, style: Style) -> str:
    """The name of a plane in another system's checkpoints."""
    return _STYLES[style].get(plane, plane)


def tensor_name(table: str, plane: str, style: Style) -> str:
    """The name of a tensor in an exported file."""
    if style == "emberkeep":
        return f"{table}/{plane}"
    if style == "torch":
        return f"{table}.{styled(plane, style)}"
    prefix = f"embedding_bags.{table}"
    if plane in (WEIGHT, IDS):
        return f"{prefix}.{plane}"
    return f"{prefix}.weight.{table}.{styled(plane, style)}"


def is_plane_word(word: str) -> bool:
    return word in _MEANINGS


def plane_of(word: str, planes: Collection[str]) -> str | None:
    """The plane, of those that a table has, that another system's word stands for; None if it has
    none such. With no planes known yet, the first meaning."""
    if word in planes:  # tables of torch that a keeper follows have torch's names
        return word
    meanings = _MEANINGS.get(word, ())
    if IDS in meanings or (meanings and not planes):
        return meanings[0]
    return next((plane for plane in meanings if plane in planes), None)


def split_name(name: str) -> tuple[str, str] | None:
    """Where a tensor belongs, by its name: a path that ends with the name of a table, and the word
    for a plane. None for a tensor that is no plane of rows."""
    path, _, word = name.replace("/", ".").rpartition(".")
    if not path or not is_plane_word(word):
        return None
    # `state.emb.user.weight.sum` is what an optimizer remembers of `emb.user.weight`; TorchRec
    # names the table again, as `emb.user.weight.user.sum`.
    if word not in ("weight", "weights"):
        before, again, table = path.rpartition(".weight.")
        if again and (before == table or before.endswith(f".{table}")):
            path = before
        path = path.removesuffix(".weight")
    return (path, word) if path else None


class TableMap:
    """Which table rows of another name go to: by `--map`, or by the name itself."""

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self.pairs = dict(pairs)
        self.met: set[str] = set()
        """Names of the map that something was found under."""

    @classmethod
    def parse(cls, texts: Collection[str]) -> TableMap:
        pairs: dict[str, str] = {}
        for text in texts:
            old, equals, new = text.partition("=")
            if not equals or not old or not new:
                raise ConfigError(f"--map takes OLD=NEW, not {text!r}")
            if pairs.get(old, new) != new:
                raise ConfigError(f"--map names {old!r} twice: {pairs[old]!r} and {new!r}")
            pairs[old] = new
        return cls(pairs)

    def table_of(
        self, path: str, name: str | None = None, tables: Collection[str] = ()
    ) -> str | None:
        """The longest name of the map that a path ends with decides, then the longest of `tables`;
        else its `name`, or its last part. None if the map tells another path that ends alike from
        it."""
        parts = path.split(".")
        ends = [".".join(parts[first:]) for first in range(len(parts))]
        for end in ends:
            if end in self.pairs:
                self.met.add(end)
                return self.pairs[end]
        # `towers.item=item` chooses one of several that end alike: the others are not meant.
        if any("." in old and old.rpartition(".")[2] == parts[-1] for old in self.pairs):
            return None
        return next((end for end in ends if end in tables), name or parts[-1])

    def is_mapped(self, path: str) -> bool:
        parts = path.split(".")
        return any(".".join(parts[first:]) in self.pairs for first in range(len(parts)))

    def unmet(self) -> list[str]:
        return sorted(set(self.pairs) - self.met)
