"""Blob stores: named immutable objects on a local disk, in memory, or in an object store."""

from emberkeep.blobs.calls import Call, caller_of, together
from emberkeep.blobs.local_store import LocalStore
from emberkeep.blobs.memory_store import MemoryStore
from emberkeep.blobs.object_store import ObjectStore
from emberkeep.blobs.store import (
    BlobInfo,
    BlobStore,
    Buffer,
    ListsNames,
    Part,
    Reading,
    ReadsInto,
    check_name,
    read_into,
    read_parts,
)
from emberkeep.blobs.system_disk import Disk
from emberkeep.blobs.url import is_shared, open_store, refuse_nested

__all__ = [
    "BlobInfo",
    "BlobStore",
    "Buffer",
    "Call",
    "Disk",
    "ListsNames",
    "LocalStore",
    "MemoryStore",
    "ObjectStore",
    "Part",
    "Reading",
    "ReadsInto",
    "caller_of",
    "check_name",
    "is_shared",
    "open_store",
    "read_into",
    "read_parts",
    "refuse_nested",
    "together",
]
