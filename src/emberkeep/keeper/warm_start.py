"""A run that starts from a version of another, or of itself before the model was changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from emberkeep._types import Json
from emberkeep.blobs import BlobStore, open_store
from emberkeep.checkpoint.contents import Hold
from emberkeep.checkpoint.partial_load import check_renaming, load_partly, renaming
from emberkeep.checkpoint.restore import Restored, check_schema, shortened
from emberkeep.checkpoint.spec import SaveSettings
from emberkeep.checkpoint.targets import Subject
from emberkeep.errors import ConfigError, NoVersionError
from emberkeep.keeper.adopted_rows import clear_adopted, clear_found
from emberkeep.keeper.plain_state import unpack
from emberkeep.keeper.repository_saver import captured_in
from emberkeep.keeper.run_saver import Kept
from emberkeep.keeper.run_state import RunState
from emberkeep.repository import Manifest, Repository, VersionId
from emberkeep.runtime.clock import Clock
from emberkeep.runtime.pool import Pool

Source = str | os.PathLike[str] | BlobStore


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WarmStart:
    """What a partial resume has brought back, and what it has not."""

    manifest: Manifest
    rows: Mapping[str, int]
    """How many rows came back, by table of the model."""
    skipped: tuple[str, ...]
    """Everything that the version and the model do not share, one line each; empty if nothing was
    left out."""
    source: str = field(default="")
    """The URL of the repository."""

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def version(self) -> VersionId:
        return self.manifest.version

    def to_dict(self) -> Json:
        """For those who hear of events."""
        return {
            "version": self.version.number, "step": self.step, "lost": [],
            "source": self.source, "rows": dict(self.rows), "skipped": list(self.skipped),
        }  # fmt: skip

    def __repr__(self) -> str:
        rows = f"{sum(self.rows.values()):,} rows of {len(self.rows)} tables"
        left = f"; skipped: {shortened(self.skipped, most=3)}" if self.skipped else ""
        return f"<WarmStart from version {self.version.number}, step {self.step}: {rows}{left}>"


Resumed = Kept | WarmStart


def check_partial(
    partial: bool, renamed: Mapping[str, str] | None, source: Source | None, own: BlobStore | None
) -> None:
    if renamed is not None and not isinstance(renamed, Mapping):
        raise ConfigError(f"map= is {{old name: new name}}, not a {type(renamed).__name__}")
    if renamed and not partial:
        raise ConfigError("map= is for a resume in part: add partial=True")
    if partial and source is None and own is None:
        raise ConfigError(
            "a tier comes back whole or not at all: name a repository to start from by source="
        )


def warm_start(
    source: Source | None,
    version: int | str | None,
    subject: Subject,
    state: RunState,
    *,
    renamed: Mapping[str, str],
    partial: bool,
    settings: SaveSettings,
    clock: Clock,
) -> WarmStart:
    """Loads what fits of a version of a repository; unless `partial` all of it must. Nothing has
    changed if the version is refused."""
    assert source is not None
    store = open_store(source, clock=clock) if isinstance(source, str | os.PathLike) else source
    repository = Repository.open(store, clock=clock)
    repository.reading = settings.reading(repository.store)
    chosen = repository.newest_whole() if version is None else repository.named(version)
    if chosen is None:
        raise NoVersionError(f"{store.url} has no version yet: there is nothing to start from")
    if not partial:
        check_schema(repository.tables, subject.schema())
    rename = renaming(renamed)

    def fits(found: Restored) -> None:
        saved = unpack(captured_in(found).dense)
        there = {*saved["model"], *saved["extra"], *saved["states"], *repository.tables}
        check_renaming(renamed, there, state.names() | {*subject.schema()["tables"]})
        if not partial:
            state.fit(captured_in(found))
        clear_adopted(subject)
        clear_found(subject)

    with Hold(repository, chosen):
        restored, loaded = load_partly(
            repository, chosen, subject, Pool(settings.threads), renamed, fits
        )
    notes = state.load_partly(captured_in(restored), rename, same_rows=loaded.same_optimizers)
    names = {*subject.schema()["tables"]}
    return WarmStart(
        manifest=restored.manifest,
        rows={name: count for name, count in loaded.rows.items() if name in names},
        skipped=(*loaded.notes, *notes),
        source=store.url,
    )
