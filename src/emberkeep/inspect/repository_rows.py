"""Rows of another repository, to be imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from emberkeep.blobs import open_store
from emberkeep.checkpoint.contents import Hold, merged_rows
from emberkeep.errors import NoVersionError
from emberkeep.inspect.intake import USED
from emberkeep.inspect.row_sources import Part, Rows, Source
from emberkeep.repository import Manifest, Repository, VersionId
from emberkeep.repository.grid.catalog import files_read, plan
from emberkeep.repository.pieces import counts_of
from emberkeep.runtime import pool


def open_rows(url: str, version: str | None) -> Source:
    """The rows of a version, the newest whole one unless another is named."""
    repository = Repository.open(open_store(url))
    chosen = repository.newest_whole() if version is None else repository.named(version)
    if chosen is None:
        raise NoVersionError(f"{url} has no version yet: save one first")
    chain = repository.chain(chosen)
    planned = plan(repository, chain[-1])
    trained = chain[-1].described.plain("tables")
    parts = [
        Part(
            file=url,
            path=table,
            name=table,
            rows=rows,
            exact=False,
            steps=int(trained.get(table, {}).get("steps", 0)),
            planes={
                name: width
                for name, (width, _) in repository.tables[table]["planes"].items()
                if name != USED
            },
            dense=False,
            chunks=partial(_rows, repository, chosen, chain, table),
        )
        for table, rows in row_counts(repository, chain).items()
        if rows
    ]
    return Source(
        file=url, kind="repository", parts=parts, fingerprint=[repository.id, str(chosen)],
        order=[] if planned is None else [planned.catalog.generation],
    )  # fmt: skip


def row_counts(repository: Repository, chain: Sequence[Manifest]) -> Counter[str]:
    """How many rows of each table the files hold that a version is read from: those that are in
    several count several times, so that there are never more."""
    counts: Counter[str] = Counter()
    for manifest in chain:
        for file in files_read(manifest, plan(repository, manifest)):
            counts.update(counts_of(file, "rows"))
    return counts


def _rows(
    repository: Repository, version: VersionId, chain: Sequence[Manifest], table: str, start: int
) -> Iterator[Rows]:
    """From a row on: those before are read again, in the same order, and passed over."""
    at = 0
    with Hold(repository, version) as hold:
        for _, chunk in merged_rows(repository, chain, pool.shared(), tables={table}):
            hold.renew()
            if chunk.planes is None:
                continue
            begin, at = at, at + chunk.ids.size
            if at <= start:
                continue
            part = slice(max(0, start - begin), None)
            planes = {name: v[part] for name, v in chunk.planes.items() if name != USED}
            yield chunk.ids[part], planes
