"""Blob stores: named immutable objects on a local disk, in memory, or in an object store."""

from emberkeep.blobs.base import BlobInfo, BlobStore, Buffer, ReadsInto, check_name, read_into
from emberkeep.blobs.local import Disk, LocalStore
from emberkeep.blobs.memory import MemoryStore
from emberkeep.blobs.remote import ObjectStore
from emberkeep.blobs.url import open_store

__all__ = [
    "BlobInfo",
    "BlobStore",
    "Buffer",
    "Disk",
    "LocalStore",
    "MemoryStore",
    "ObjectStore",
    "ReadsInto",
    "check_name",
    "open_store",
    "read_into",
]
