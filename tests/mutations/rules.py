"""The rules that keep state right, each broken in the smallest way.

A mutation is a piece of text of one source file and what takes its place. Rules are numbered by
protocol: `R` of the repository, `G` of the grid, `T` of the tier. `run.py` applies them one by one
to a copy of the sources, and says which ones the short runs notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent.parent.parent / "src"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One rule, and how it is broken: `old`, which occurs once in the file, becomes `new`.

    `noticed_by` is a test that is known to fail then, or the one that leads to the rule: in
    `tests/faults`, or in `tests` where it names a directory.
    """

    rule: str
    broken: str
    file: str
    old: str
    new: str
    noticed_by: str

    def applied(self, text: str) -> str:
        """The source with the rule broken; `ValueError` if the source has changed too much."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.rule}: its text occurs {text.count(self.old)} times")
        return text.replace(self.old, self.new)

    def apply(self, sources: Path) -> None:
        path = sources / "emberkeep" / self.file
        path.write_text(self.applied(path.read_text()))


WRITER = "repository/writer.py"
COLLECTOR = "repository/maintenance/collector.py"
LOG = "tiers/log.py"

MUTATIONS = (
    # -- repository --------------------------------------------------------------------------------
    Mutation(
        "R1", "a successor does not seal the epoch before",
        WRITER,
        "        if history.listing.epoch:\n"
        "            history = seal(repository, history, nonce)\n",
        "",
        "test_repository_interleavings.py",
    ),
    Mutation(
        "R1-check", "a collector does not ask whether it was replaced",
        WRITER,
        "            self.repository.store.size(names.writer_name(self.epoch + 1))\n"
        "        except MissingObjectError:\n"
        "            return\n"
        "        raise self._fenced()",
        "            return\n"
        "        except MissingObjectError:\n"
        "            return",
        "test_repository_interleavings.py",
    ),
    Mutation(
        "R2", "a name that is taken is not read back after a lost answer",
        "repository/history.py",
        "return content if store.put_if_absent(name, content) else store.get(name)",
        'return content if store.put_if_absent(name, content) else b""',
        "test_histories.py",
    ),
    Mutation(
        "R3", "a store that overwrites is admitted",
        "repository/repository.py",
        'return refused and store.get(name) == b"first"',
        "return True",
        "test_repository_schedules.py",
    ),
    Mutation(
        "R4", "gc removes files of the save in progress",
        COLLECTOR,
        "(version.epoch, version.number) > (self._writer.epoch, self._settled)",
        "version.epoch > self._writer.epoch",
        "test_repository_interleavings.py",
    ),
    Mutation(
        "R4-pins", "gc does not look for pins",
        COLLECTOR,
        "            if expires > oldest:\n",
        "            if expires < oldest:\n",
        "test_repository_interleavings.py",
    ),
    Mutation(
        "R5", "a put does not sync the directory",
        "blobs/local_store.py",
        "            self._discard(staged)\n            raise\n"
        "        self._call(name, self._disk.sync_directory, os.path.dirname(target))\n",
        "            self._discard(staged)\n            raise\n",
        "test_repository_power.py",
    ),
    Mutation(
        "R6", "rows of a failed save are forgotten",
        "rows/tracker.py",
        "            if cursor in advanced:\n                continue\n            back",
        "            if cursor in CURSORS:\n                continue\n            back",
        "test_histories.py",
    ),
    Mutation(
        "R6-freeze", "rows that change between freeze and commit are forgotten",
        "rows/snapshot.py",
        "(self._first, self._second, self._touched, self._copied, written, rows, present),",
        "(_NONE, self._second, self._touched, self._copied, written, rows, present),",
        "test_histories.py",
    ),
    Mutation(
        "R7", "what changed since the baseline is forgotten by a restore",
        "checkpoint/restore.py",
        "            target.forget_changes(keep_since_baseline=True)",
        "            target.forget_changes(keep_since_baseline=False)",
        "test_histories.py",
    ),
    Mutation(
        "R8", "the state of tables is not that of the cut",
        "cluster/base.py",
        "return Cut(cuts, joined([cut.tables for cut in cuts]))",
        "return Cut(cuts, joined([cuts[0].tables for _ in cuts]))",
        "test_histories.py",
    ),
    Mutation(
        "R9", "increments over another number of shards",
        "checkpoint/saver.py",
        "if saved_by_same_shards(manifest, self.subject):",
        "if shards:",
        "test_histories.py",
    ),
    Mutation(
        "R10", "a directory that cannot be listed is empty",
        "blobs/local_store.py",
        'found = self._call(f"the listing of {above}*", self._disk.entries, directory)',
        "with contextlib.suppress(OSError):\n"
        "                found = None\n"
        "                found = self._disk.entries(directory)",
        "test_failing_calls.py",
    ),
    Mutation(
        "R10-stat", "an object whose status fails is absent",
        "blobs/local_store.py",
        "status = self._call(name, self._disk.status, self._path(name))",
        "status = None\n"
        "        with contextlib.suppress(OSError):\n"
        "            status = self._disk.status(self._path(name))",
        "test_failing_calls.py",
    ),
    Mutation(
        "R11", "a seal under a name that gc has freed counts",
        "repository/takeover.py",
        "if not spent and sealed.listing.removed.get(epoch, 0) < number:",
        "if not spent:",
        "test_repository_schedules.py",
    ),
    Mutation(
        "R11-note", "gc frees names without a note",
        COLLECTOR,
        "superfluous += note_removed(self._store, removed, history.listing.removed)",
        "note_removed",
        "test_repository_schedules.py",
    ),
    Mutation(
        "R12", "gc does not look for a seal before it deletes",
        COLLECTOR,
        "self._writer.check_unsealed()",
        "self._writer.check()",
        "test_repository_schedules.py",
    ),
    Mutation(
        "R12-again", "gc does not look for pins and tags after its mark",
        COLLECTOR,
        "condemned -= since.keys()",
        "condemned -= frozenset()",
        "test_repository_interleavings.py",
    ),
    Mutation(
        "R12-reader", "a pin or tag is acknowledged under a mark",
        "repository/repository.py",
        "if any(mark.valid(epoch, honoured) for mark in marks):",
        "if any(mark.valid(epoch, honoured) for mark in ()):",
        "test_repository_interleavings.py",
    ),
    Mutation(
        "R13", "the grid of any version is continued",
        WRITER,
        "return version == self._newest",
        "return True",
        "test_grid_lineage.py",
    ),
    Mutation(
        "R13-held", "the version that a run goes on from is not protected",
        WRITER,
        "            self._resumed = version\n",
        "            self._resumed = None\n",
        "test_grid_lineage.py",
    ),
    Mutation(
        "R14", "a save whose commit was reported as failed is not built on",
        "checkpoint/saver.py",
        "            self._follow(settled)\n",
        "",
        "test_grid_lineage.py",
    ),
    Mutation(
        "R15", "a document is not held against its digest",
        "repository/documents.py",
        "if len(data) < _OVERHEAD or data != _HEAD + _digest(content) + _MIDDLE + content + _TAIL:",
        "if len(data) < _OVERHEAD:",
        "test_repository_damage.py",
    ),
    Mutation(
        "R15-files", "a file is not held against its digest",
        "repository/repository.py",
        "if len(content) != size or digest(content) != expected:",
        "if len(content) != size:",
        "test_repository_damage.py",
    ),
    # -- grid --------------------------------------------------------------------------------------
    Mutation(
        "Ga", "of two births of a row the older counts",
        "repository/grid/selection.py",
        "np.lexsort((deleted[listed.family_P], -listed.birth_P))",
        "np.lexsort((deleted[listed.family_P], listed.birth_P))",
        "test_histories.py",
    ),
    Mutation(
        "Gb", "deaths are recorded a version too early",
        "kernels/living_rows.py",
        "            deaths[before] = birth\n",
        "            deaths[before] = birth - 1\n",
        "test_grid_history.py",
    ),
    Mutation(
        "Gc", "pieces of versions that no catalog covers are not read",
        "repository/grid/catalog.py",
        "for each in uncovered(repository, manifest, catalog.covered):",
        "for each in uncovered(repository, manifest, catalog.covered)[-1:]:",
        "test_grid_history.py",
    ),
    Mutation(
        "Gd", "a file that was moved meanwhile is damage",
        "repository/grid/version_rows.py",
        ".generation != planned.catalog.generation:\n        raise ChangedError(",
        ".generation < 0:\n        raise ChangedError(",
        "test_grid_operations.py",
    ),
    Mutation(
        "Ge", "extraction loses a row and does not notice",
        "repository/grid/shard_extraction.py",
        "part = whole.take(np.flatnonzero(deaths == death), death or None)\n"
        "                total += part.sum\n",
        "total += whole.take(np.flatnonzero(deaths == death), None).sum\n"
        "                part = whole.take(np.flatnonzero(deaths == death)[:64], death or None)\n",
        "test_grid_history.py",
    ),
    # -- tier --------------------------------------------------------------------------------------
    Mutation(
        "T1", "records that a life wrote after its durable batch count",
        "tiers/durable_open.py",
        "lives = (*log.head.lives, (point.stamp, synced))",
        "lives = (*log.head.lives, (2**62, 2**62))",
        "test_tier_power.py",
    ),
    Mutation(
        "T2", "a batch that not every file has prepared is committed",
        "tiers/durable_open.py",
        "            if outcomes[prepared.nonce]:\n",
        "            if prepared.nonce:\n",
        "test_tier_decisions.py",
    ),
    Mutation(
        "T3", "a push overwrites rows of the checkpoint under way",
        "tiers/tiered_slab.py",
        "        if frozen.size:\n",
        "        if frozen.size < 0:\n",
        "test_tier_power.py",
    ),
    Mutation(
        "T4", "records that the committed batch needs are let go",
        "tiers/superseded.py",
        "dying = stamps <= self._boundary",
        "dying = stamps >= 0",
        "test_tier_power.py",
    ),
    Mutation(
        "T4-sync", "the cleaner's copies are not synced before their originals go",
        "tiers/upkeep.py",
        "        log.sync()  # the copies",
        "        pass  # the copies",
        "test_tier_power.py",
    ),
    Mutation(
        "T4-final", "a failed sync is retried as if nothing had happened",
        LOG,
        "            except OSError as error:\n                self.fail(error)\n",
        "            except OSError as error:\n",
        "test_tier_faults.py",
    ),
    Mutation(
        "T5", "segments are used again under their readers",
        LOG,
        "oldest = min(self._readers, default=self._turn)",
        "oldest = self._turn",
        "test_tier_cleaning.py",
    ),
    Mutation(
        "T6", "the cleaner moves records without checking them",
        "tiers/upkeep.py",
        "        if count != needed:\n",
        "        if count > needed:\n",
        "test_tier_cleaning.py",
    ),
    Mutation(
        "T7", "what nobody has decided is given up without a decision",
        "tiers/decisions.py",
        "return Decisions(home, disk).abort(point, _seen_from(home, top, lives))",
        "return False",
        "test_tier_decisions.py",
    ),
    Mutation(
        "T8", "a tier that another process has is opened",
        "tiers/directory.py",
        "                if error.errno in _TAKEN:\n"
        "                    raise _in_use(top) from None\n"
        "                if not exclusive:\n",
        "                if error.errno not in _TAKEN and not exclusive:\n",
        "test_tier_absence.py",
    ),
    Mutation(
        "T9", "the head has no room to grow",
        LOG,
        "            self._reserve_head(changes)\n",
        "            pass\n",
        "test_tier_head.py",
    ),
)  # fmt: skip
