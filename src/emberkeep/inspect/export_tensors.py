"""One version as files of tensors: safetensors, a torch state dict, DCP, a dump of dynamicemb."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from emberkeep.checkpoint.contents import Hold, check_tables
from emberkeep.errors import ConfigError
from emberkeep.inspect.export import Exported, about, exported_rows, file_name, output, published
from emberkeep.inspect.plane_names import Style, tensor_name
from emberkeep.inspect.tensor_parts import TensorParts
from emberkeep.inspect.torch_files import save_checkpoint, save_state_dict
from emberkeep.repository import Manifest, Repository, VersionId
from emberkeep.runtime.pool import Pool

_Save = Callable[[TensorParts, Path, Manifest], object]


def to_safetensors(
    repository: Repository, version: VersionId, path: Path, pool: Pool, *,
    tables: Sequence[str] | None = None, force: bool = False, names: Style = "emberkeep",
) -> Exported:  # fmt: skip
    """One file with the tensors `<table>/id` [rows] and `<table>/<plane>` [rows, width]."""

    def save(parts: TensorParts, file: Path, manifest: Manifest) -> None:
        parts.write_safetensors(file, about(manifest))

    return _one_file(repository, version, path, pool, tables, force, names, save)


def to_torch(
    repository: Repository, version: VersionId, path: Path, pool: Pool, *,
    tables: Sequence[str] | None = None, force: bool = False, names: Style = "emberkeep",
) -> Exported:  # fmt: skip
    """The same tensors as one dict, as `torch.save` writes it."""

    def save(parts: TensorParts, file: Path, manifest: Manifest) -> None:
        save_state_dict(parts.arrays(), file)

    return _one_file(repository, version, path, pool, tables, force, names, save)


def _one_file(
    repository: Repository, version: VersionId, path: Path, pool: Pool,
    tables: Sequence[str] | None, force: bool, names: Style, save: _Save,
) -> Exported:  # fmt: skip
    chosen = check_tables(repository, tables)
    with output(path, force=force) as scratch, Hold(repository, version) as hold:
        chain = repository.chain(version)
        parts = TensorParts(
            scratch, repository, {t: partial(tensor_name, t, style=names) for t in chosen}
        )
        for chunk in exported_rows(repository, chain, pool, chosen, hold):
            parts.append(chunk)
        staged = scratch / "export"
        save(parts, staged, chain[-1])
        return published(chain[-1], parts.rows, {path: staged})


def to_checkpoint(
    repository: Repository, version: VersionId, path: Path, pool: Pool, *,
    tables: Sequence[str] | None = None, force: bool = False, names: Style = "emberkeep",
) -> Exported:  # fmt: skip
    """The same tensors as a directory that `torch.distributed.checkpoint` loads."""
    chosen = check_tables(repository, tables)
    holds = [".metadata", "*.distcp"]
    with output(path, force=force, holds=holds) as scratch, Hold(repository, version) as hold:
        chain = repository.chain(version)
        parts = TensorParts(
            scratch / "parts", repository,
            {t: partial(tensor_name, t, style=names) for t in chosen},
        )  # fmt: skip
        for chunk in exported_rows(repository, chain, pool, chosen, hold):
            parts.append(chunk)
        folder = scratch / "checkpoint"
        save_checkpoint(parts.arrays(), folder)
        staged = {path / file.name: file for file in sorted(folder.iterdir())}
        return published(chain[-1], parts.rows, staged, whole=(folder, path))


def to_dump(
    repository: Repository, version: VersionId, path: Path, pool: Pool, *,
    tables: Sequence[str] | None = None, force: bool = False,
) -> Exported:  # fmt: skip
    """A directory as dynamicemb dumps it, of one rank: keys, values and, where there are some, what
    the optimizer remembers; scores where a table evicts, the newest row with the highest."""
    chosen = check_tables(repository, tables)
    for table in chosen:
        if "/" in table:
            raise ConfigError(
                f"dynamicemb has no name for table {table!r}: choose others by --table"
            )
    holds = ["*.rank_0.world_size_1", "*_opt_args.json"]
    with output(path, force=force, holds=holds) as scratch, Hold(repository, version) as hold:
        chain = repository.chain(version)
        folder = scratch / "dump"
        folder.mkdir()
        rows = dict.fromkeys(chosen, 0)
        for table in chosen:
            optimizer, _ = _optimizer(repository, table)
            args = folder / f"{file_name(table)}_opt_args.json"
            args.write_text(json.dumps({"opt_type": optimizer}) + "\n", encoding="utf-8")
            for item in ("keys", "values"):
                (folder / _dump_name(table, item)).touch()
        for chunk in exported_rows(repository, chain, pool, chosen, hold):
            assert chunk.planes is not None
            rows[chunk.table] += chunk.ids.size
            states = _optimizer(repository, chunk.table)[1]
            items = {"keys": chunk.ids, "values": chunk.planes["weight"]}
            if states:
                items["opt_values"] = np.concatenate([chunk.planes[s] for s in states], axis=1)
            if "used" in chunk.planes:
                items["scores"] = chunk.planes["used"]
            for item, values in items.items():
                with open(folder / _dump_name(chunk.table, item), "ab") as file:
                    file.write(np.ascontiguousarray(values).data)
        staged = {path / file.name: file for file in sorted(folder.iterdir())}
        return published(chain[-1], rows, staged, whole=(folder, path))


def _dump_name(table: str, item: str) -> str:
    return f"{file_name(table)}_emb_{item}.rank_0.world_size_1"


def _optimizer(repository: Repository, table: str) -> tuple[str, list[str]]:
    """What dynamicemb calls the optimizer of a table, and its planes in dynamicemb's order."""
    planes = repository.tables[table]["planes"]
    if "step" in planes:
        raise ConfigError(
            f"dynamicemb does not count the updates of each row, as Adam(step='row') of table "
            f"{table!r} does: choose other tables by --table, or another format"
        )
    if "first_moment" in planes:
        return "adam", ["first_moment", "second_moment"]
    if "accumulator" in planes:
        row_wise = planes["accumulator"][0] == 1 and planes["weight"][0] != 1
        return "exact_row_wise_adagrad" if row_wise else "exact_adagrad", ["accumulator"]
    for plane in planes:
        if plane not in ("weight", "used"):
            raise ConfigError(f"dynamicemb has no {plane}, which table {table!r} is trained with")
    return "sgd", []
