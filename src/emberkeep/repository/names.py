"""Where the objects of a repository live, and what their names say.

Numbers are padded so that a plain listing is in order. A data file's name carries the epoch and
number of the version that it was written for and a nonce, and is never used twice.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from emberkeep.errors import ConfigError

REPOSITORY = "repository.json"
WRITERS = "writers"
VERSIONS = "versions"
DATA = "data"
PINS = "pins"
TAGS = "tags"
CONDEMNED = "condemned"
RESTORES = "restores"
EXACT = "exact-"
PROBES = "probes"
GRID = "grid"
MOVED = "moved"

# Numbers and epochs begin with 1: a name with a 0 is none of ours.
_NUMBER, _EPOCH = r"((?!0{10})[0-9]{10})", r"((?!0{6})[0-9]{6})"
_VERSION = re.compile(rf"{VERSIONS}/{_NUMBER}-{_EPOCH}\.(json|void|removed)\Z")
_WRITER = re.compile(rf"{WRITERS}/{_EPOCH}\.json\Z")
_DATA = re.compile(rf"{DATA}/{_EPOCH}-{_NUMBER}-([0-9a-f]{{16}})-[0-9]+\.[a-z0-9]+\Z")
_GENERATION = re.compile(rf"{GRID}/{_NUMBER}-{_EPOCH}/([0-9]{{8}})\.json\Z")
# Format 1 had them beside the catalogs, which are looked for often.
_BUNDLE = re.compile(
    rf"(?:{GRID}|{MOVED})/{_NUMBER}-{_EPOCH}/{_EPOCH}-[0-9a-f]{{16}}-[0-9]+\.grid\Z"
)
_SEGMENT = re.compile(rf"{MOVED}/{_NUMBER}-{_EPOCH}/{_EPOCH}-[0-9a-f]{{16}}-[0-9]+\.catalog\Z")
_MARK = re.compile(CONDEMNED + r"/([0-9]{6}-[0-9a-f]{16})(\.decision)?\.json\Z")
_TEXT = re.compile(r"([0-9]{1,10})-([0-9]{1,6})\Z")
_TAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}\Z")


class _Numbers(NamedTuple):
    number: int
    epoch: int


class VersionId(_Numbers):
    """A version's number, which orders the history, and the epoch of the writer that made it.

    A tuple: of thousands of versions each is hashed and compared several times in every look.
    """

    __slots__ = ()

    def __new__(cls, number: int, epoch: int) -> VersionId:
        if not 0 < number < 10**10 or not 0 < epoch < 10**6:
            raise ConfigError(f"there can be no version {number} of epoch {epoch}")
        return super().__new__(cls, number, epoch)

    def __repr__(self) -> str:
        return f"VersionId(number={self.number}, epoch={self.epoch})"

    def __str__(self) -> str:
        return f"{self.number}-{self.epoch}"

    @classmethod
    def parse(cls, text: str) -> VersionId:
        match = _TEXT.match(text)
        if match is None:
            raise ConfigError(f"{text!r} is not a version: write <number>-<epoch>")
        return cls(int(match[1]), int(match[2]))

    @property
    def manifest_name(self) -> str:
        return f"{VERSIONS}/{self.number:010d}-{self.epoch:06d}.json"

    @property
    def void_name(self) -> str:
        return f"{VERSIONS}/{self.number:010d}-{self.epoch:06d}.void"

    @property
    def removed_name(self) -> str:
        return f"{VERSIONS}/{self.number:010d}-{self.epoch:06d}.removed"


@lru_cache(maxsize=2**14)
def parse_version(name: str) -> tuple[VersionId, str] | None:
    """The version that an object under `versions/` is about, and what it is: `json` for a manifest
    or a seal, `void`, `removed`. The same names are found by every look, thousands of them."""
    match = _VERSION.match(name)
    return match and (VersionId(int(match[1]), int(match[2])), match[3])


def is_note(name: str) -> bool:
    """Whether an object notes how far gc has removed an epoch: then its name is all there is."""
    return name.endswith(".removed") and parse_version(name) is not None


def writer_name(epoch: int) -> str:
    return f"{WRITERS}/{epoch:06d}.json"


def parse_writer(name: str) -> int | None:
    match = _WRITER.match(name)
    return match and int(match[1])


def data_name(version: VersionId, nonce: str, index: int, suffix: str) -> str:
    name = f"{DATA}/{version.epoch:06d}-{version.number:010d}-{nonce}-{index}.{suffix}"
    if not _DATA.match(name):
        raise ConfigError(f"a data file cannot have the suffix {suffix!r}: use letters and digits")
    return name


def parse_data(name: str) -> tuple[VersionId, str] | None:
    """The version and nonce in a data file's name."""
    match = _DATA.match(name)
    return match and (VersionId(int(match[2]), int(match[1])), match[3])


def grid_directory(grid: VersionId) -> str:
    return f"{GRID}/{grid.number:010d}-{grid.epoch:06d}"


def generation_name(grid: VersionId, generation: int) -> str:
    return f"{grid_directory(grid)}/{generation:08d}.json"


def bundle_name(grid: VersionId, epoch: int, nonce: str, index: int) -> str:
    return f"{round_prefix(grid, epoch, nonce)}{index}.grid"


def segment_name(grid: VersionId, epoch: int, nonce: str, index: int) -> str:
    return f"{round_prefix(grid, epoch, nonce)}{index}.catalog"


def round_prefix(grid: VersionId, epoch: int, nonce: str) -> str:
    """What the names of all files begin with that one round writes."""
    return f"{MOVED}/{grid.number:010d}-{grid.epoch:06d}/{epoch:06d}-{nonce}-"


def parse_generation(name: str) -> tuple[VersionId, int] | None:
    """The grid and the generation in a catalog's name."""
    match = _GENERATION.match(name)
    return match and (VersionId(int(match[1]), int(match[2])), int(match[3]))


def parse_bundle(name: str) -> tuple[VersionId, int] | None:
    """The grid of a bundle, and the epoch that wrote it."""
    match = _BUNDLE.match(name)
    return match and (VersionId(int(match[1]), int(match[2])), int(match[3]))


def parse_segment(name: str) -> tuple[VersionId, int] | None:
    """The grid of a segment of a catalog, and the epoch that wrote it."""
    match = _SEGMENT.match(name)
    return match and (VersionId(int(match[1]), int(match[2])), int(match[3]))


def mark_name(key: str, *, decision: bool) -> str:
    return f"{CONDEMNED}/{key}{'.decision' if decision else ''}.json"


def parse_mark(name: str) -> tuple[str, bool] | None:
    """The key of a mark, and whether the object is its decision."""
    match = _MARK.match(name)
    return match and (match[1], match[2] is not None)


def is_part(name: str) -> bool:
    """Whether an object can only be of a repository: a version, a writer's claim, or data."""
    patterns = (_VERSION, _WRITER, _DATA, _GENERATION, _BUNDLE, _SEGMENT)
    return any(pattern.match(name) for pattern in patterns)


def tag_name(tag: str) -> str:
    if not _TAG.match(tag):
        raise ConfigError(
            f"{tag!r} cannot name a version: use up to 100 letters, digits, '_', '-' and inner dots"
        )
    return f"{TAGS}/{tag}.json"
