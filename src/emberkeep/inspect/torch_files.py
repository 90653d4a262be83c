"""Rows in files of PyTorch: state dicts and distributed checkpoints (DCP).

Nothing is unpickled but tensors and plain containers. Tensors are read where they stand in their
files, so that a file may be larger than memory.
"""

from __future__ import annotations

import errno
import io
import pickle
import re
import shutil
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from emberkeep._types import Array
from emberkeep.errors import DataError, EmberkeepError
from emberkeep.inspect.array_files import read_array
from emberkeep.inspect.row_sources import (
    Source,
    Tensor,
    fingerprint_of,
    parts_of_tensors,
)

_LOCAL_HEADER_NBYTES = 30
# A disk with less room than this is taken for full.
_LEAST_FREE_NBYTES = 2**20


def open_state_dict(file: Path) -> Source:
    """What `torch.save` has written of a state dict, or of a dict that holds some."""
    import torch

    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip(file))
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place that the file does not have
            raise
        raise DataError(f"{file} cannot be read: it was cut short") from error
    except Exception as error:  # a damaged pickle may end in any
        other = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it holds {other[1]}" if other else _first_line(error)
        raise DataError(
            f"{file} is no state dict of tensors that torch loads with weights_only=True: {what}; "
            "save a state_dict() by torch.save"
        ) from error
    tensors = {}
    others = []
    for name, value in _flat(content):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            tensors[name] = Tensor(tuple(value.shape), _reader(value))
        else:
            others.append(name)
    parts, rest = parts_of_tensors(str(file), tensors, stem=file.stem)
    return Source(
        file=str(file), kind="torch", parts=parts, passed_over=[*rest, *others],
        fingerprint=fingerprint_of([file]),
    )  # fmt: skip


@contextmanager
def _parsing(what: object) -> Iterator[None]:
    """Whatever a damaged pickle or archive ends in is said to be that."""
    try:
        yield
    except (EmberkeepError, OSError):
        raise
    except Exception as error:
        raise DataError(f"{what} cannot be read: {_first_line(error)}; is it damaged?") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def is_zip(file: Path) -> bool:
    with open(file, "rb") as opened:
        return opened.read(4) == b"PK\x03\x04"


def _flat(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists, by dotted names."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            yield from _flat(value, f"{path}.{index}")
    else:
        yield path, content


def _reader(tensor: Any) -> Any:
    import torch

    def read(first: int, last: int) -> Array:
        part = tensor[first:last].detach()
        if part.is_floating_point() and part.dtype not in (torch.float16, torch.float64):
            part = part.float()  # numpy has no bfloat16 or float8; they are the same numbers
        # A copy: what is mapped would be a crash if the file were cut short later.
        found: Array = part.contiguous().numpy().copy()
        return found

    return read


def save_state_dict(arrays: Mapping[str, Array], file: Path) -> None:
    """Writes arrays as a dict of tensors; arrays that are mapped are not read into memory."""
    import torch

    with _writing(file):
        torch.save({name: torch.from_numpy(values) for name, values in arrays.items()}, file)


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    """A disk that is full comes out as the error of the system that it is."""
    try:
        yield
    except RuntimeError as error:  # torch's own writer says no more
        free = shutil.disk_usage(file.parent).free
        code = errno.ENOSPC if free < _LEAST_FREE_NBYTES else errno.EIO
        raise OSError(code, str(error).splitlines()[0]) from error


# -- DCP -------------------------------------------------------------------------------------------


def is_checkpoint(directory: Path) -> bool:
    return (directory / ".metadata").is_file()


def open_checkpoint(directory: Path) -> Source:
    """A distributed checkpoint as `torch.distributed.checkpoint` saves it to files."""
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    tensors: dict[str, Tensor] = {}
    others = []
    with _parsing(f"{directory}/.metadata"):
        with open(directory / ".metadata", "rb") as file:
            metadata = _Metadata(file).load()
        if not isinstance(metadata, Metadata):
            raise DataError(f"{directory}/.metadata is not that of a DCP checkpoint")
        stored: dict[str, list[_Chunk]] = {}
        for index, place in (metadata.storage_data or {}).items():
            stored.setdefault(index.fqn, []).append(_Chunk(directory, index, place))
        for name, about in metadata.state_dict_metadata.items():
            if isinstance(about, TensorStorageMetadata):
                shape = tuple(int(n) for n in about.size)
                chunks = _Chunks(directory, name, shape, stored.get(name, []))
                tensors[name] = Tensor(shape, chunks.read)
            else:
                others.append(name)
    parts, rest = parts_of_tensors(str(directory), tensors)
    files = sorted(file for file in directory.iterdir() if file.is_file())
    return Source(
        file=str(directory), kind="dcp", parts=parts, passed_over=[*rest, *others],
        fingerprint=fingerprint_of(files),
    )  # fmt: skip


def save_checkpoint(arrays: Mapping[str, Array], directory: Path) -> None:
    """Writes arrays as a checkpoint of one process."""
    import torch
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    with _writing(directory), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        try:
            save(tensors, checkpoint_id=directory, no_dist=True)
        except CheckpointException as error:
            causes = list(error.failures.values())
            raise (causes[0][0] if causes else error) from error


class _Metadata(pickle.Unpickler):
    """Reads what DCP writes about a checkpoint. A pickle can call anything: here nothing but the
    types that describe tensors."""

    _ALLOWED: ClassVar[dict[str, tuple[str, ...]]] = {
        "torch.distributed.checkpoint.metadata": (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch": ("Size", "device"),
        "torch.serialization": ("_get_layout",),
        "collections": ("OrderedDict", "defaultdict"),
        "pathlib": ("PosixPath", "PurePosixPath"),
        "builtins": ("dict", "list", "set", "tuple"),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in self._ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        return super().find_class(module, name)


class _Chunk:
    """A rectangle of a tensor in one of the files: what `torch.save` writes of it."""

    def __init__(self, directory: Path, index: Any, place: Any) -> None:
        self.offsets = tuple(int(n) for n in index.offset or ())
        self._place = place
        self._file = directory / place.relative_path
        self._start, self._length = int(place.offset), int(place.length)
        self._about: tuple[int, Any] | None = None

    def _look(self) -> tuple[int, Any]:
        """Where its numbers begin, and a tensor that has its shape, strides and type alone."""
        import torch

        if self._about is None:
            if getattr(self._place, "transform_descriptors", None):
                raise DataError(f"{self._file}: chunks are compressed: save them without")
            if not 0 <= self._start <= self._file.stat().st_size - self._length:
                raise DataError(f"{self._file} is shorter than .metadata says: cut short?")
            with _parsing(self._file), _View(self._file, self._start, self._length) as view:
                with zipfile.ZipFile(view) as archive:
                    records = [i for i in archive.infolist() if "/data/" in i.filename]
                if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
                    raise DataError(f"{self._file}: a chunk is not one plain tensor")
                view.seek(0)
                with torch.serialization.skip_data():
                    tensor = torch.load(cast("Any", view), weights_only=True)
                if not isinstance(tensor, torch.Tensor):
                    raise DataError(f"{self._file}: a chunk is not one plain tensor")
                view.seek(records[0].header_offset)
                header = view.read(_LOCAL_HEADER_NBYTES)
                names = sum(struct.unpack("<HH", header[26:30]))
            start = records[0].header_offset + _LOCAL_HEADER_NBYTES + names
            self._about = self._start + start, tensor
        return self._about

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._look()[1].shape)

    def read(self, first: int, last: int) -> Array:
        import torch

        start, tensor = self._look()
        if not tensor.is_contiguous():
            raise DataError(f"{self._file}: a chunk is stored transposed: save it contiguous")
        row = tensor.element_size() * int(np.prod(tensor.shape[1:], dtype=np.int64))
        at = start + tensor.storage_offset() * tensor.element_size() + first * row
        halves = tensor.dtype == torch.bfloat16
        try:
            kind = np.dtype(np.uint16) if halves else np.dtype(str(tensor.dtype).split(".")[-1])
        except TypeError as error:
            raise DataError(
                f"{self._file} holds {tensor.dtype}, for which numpy has no type"
            ) from error
        values = read_array(self._file, kind, at, (last - first) * row)
        if halves:
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return values.reshape(last - first, *tensor.shape[1:])


class _Chunks:
    """A tensor that is spread over chunks, by rows or by columns."""

    def __init__(
        self, directory: Path, name: str, shape: tuple[int, ...], chunks: list[_Chunk]
    ) -> None:
        self._where = f"{directory}: tensor {name!r}"
        self._shape = shape
        self._chunks = sorted(chunks, key=lambda chunk: chunk.offsets)

    def read(self, first: int, last: int) -> Array:
        out: Array | None = None
        filled = 0
        for chunk in self._chunks:
            offsets = chunk.offsets or (0,) * len(self._shape)
            begin, end = max(first, offsets[0]), min(last, offsets[0] + chunk.shape[0])
            if begin >= end:
                continue
            values = chunk.read(begin - offsets[0], end - offsets[0])
            if out is None:
                out = np.empty((last - first, *self._shape[1:]), values.dtype)
            columns = tuple(
                slice(o, o + n) for o, n in zip(offsets[1:], values.shape[1:], strict=True)
            )
            out[(slice(begin - first, end - first), *columns)] = values
            filled += values.size
        if out is None or filled != out.size:
            raise DataError(f"{self._where}: chunks of rows {first}..{last - 1} are missing")
        return out


class _View(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: Path, start: int, length: int) -> None:
        self._file = open(file, "rb")  # noqa: SIM115 - closed with the view
        self._start, self._length, self._at = start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + {0: 0, 1: self._at, 2: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(view.nbytes, self._length - self._at))
        self._file.seek(self._start + self._at)
        found = self._file.readinto(view[:count])
        self._at += found
        return found

    def close(self) -> None:
        self._file.close()
        super().close()
