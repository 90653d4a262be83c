"""The catalog of a shard: a log of segments that says what was appended, and stays short."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberkeep.blobs import MemoryStore
from emberkeep.errors import DamageError
from emberkeep.repository import Repository, VersionId, names
from emberkeep.repository.grid.bundle_reader import calls_at_once, runs
from emberkeep.repository.grid.bundles import Bundle, Form, Piece, Rows
from emberkeep.repository.grid.catalog import Part
from emberkeep.repository.grid.living import LivingRows
from emberkeep.repository.grid.piece_table import ALIVE, Gone, PieceTable
from emberkeep.repository.grid.segments import Segment
from emberkeep.repository.manifest import FileRef
from emberkeep.runtime.crew import Crew
from emberkeep.runtime.fields import Fields

GRID = VersionId(1, 1)
FAMILY = (Form("weight", 2, "float32", '{"codec":"raw"}', False),)


class Log:
    """A part, beside a dictionary of what it should hold: (file, head) → (birth, death)."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.store = MemoryStore()
        self.repository = Repository.create(self.store, schema={"tables": {}})
        self.part = Part(shard=0)
        self.pieces: dict[tuple[str, int], tuple[int, int | None]] = {}
        self.written = self.rounds = 0

    def round(self, version: int, came: int, went: int, ended: int = 0) -> None:
        """One file with some pieces comes; some of the pieces go, and some end where they stand."""
        keys = sorted(self.pieces)
        self.random.shuffle(keys)
        gone, in_place = keys[:went], keys[went : went + ended]
        numbers = {f.file.name: n for n, f in self.part.files(self.repository).items()}
        added = []
        for name, head in in_place:
            table = self.part.everything(self.repository)
            at = (table["file"] == numbers[name]) & (table["head"] == head)
            (bundle,) = table.taken(at).bundles()
            (piece,) = bundle.pieces
            death = max(version, piece.birth)
            added.append((numbers[name], bundle.with_pieces([piece._replace(death=death)])))
            self.pieces[name, head] = (piece.birth, death)
        if came:
            new = self.file(version, came)
            added.append((self.part.next_file, new))
            self.pieces |= {(new.name, p.head): (p.birth, p.death) for p in new.pieces}
        for key in gone:
            del self.pieces[key]
        lost = [[numbers[name], head] for name, head in (*gone, *in_place)]
        self.rounds += 1
        name = names.segment_name(GRID, 1, f"{self.rounds:016x}", 0)
        self.part = self.part.appended(
            self.repository, name, PieceTable.of(added),
            Gone(np.array(lost, np.int64).reshape(-1, 2)), f"{self.rounds}",
        )  # fmt: skip
        if name in {ref.name for ref in self.part.segments}:
            self.written += self.store.size(name)

    def file(self, version: int, count: int) -> Bundle:
        births = self.random.integers(1, version + 1, count).tolist()
        pieces = []
        for at, birth in enumerate(births):
            death = int(self.random.integers(birth, version + 1))
            pieces.append(
                Piece(
                    birth, death if self.random.random() < 0.7 else None, 0, 3, 24 * at, 24,
                    f"{at:016x}", 24 * count + 40 * at, 40, f"{2**63 + at:016x}", 2**64 - 1 - at,
                )
            )  # fmt: skip
        name = names.bundle_name(GRID, 1, f"{version:016x}", self.rounds)
        file = FileRef(
            name=name, size=64 * count, digest="0" * 32, kind="rows", metadata={"shard": 0},
            block_nbytes=2**24,
        )  # fmt: skip
        return Bundle(file, (FAMILY,), pieces)

    def check(self, versions: int) -> None:
        fresh = Repository.open(self.store)
        table = self.part.everything(fresh)
        assert _contents(table) == self.pieces
        for version in range(0, versions + 2, 3):
            expected = {
                key: (birth, death)
                for key, (birth, death) in self.pieces.items()
                if birth <= version < (ALIVE if death is None else death)
            }
            assert _contents(self.part.read_by(fresh, version)) == expected
        names_of = {f.file.name for f in self.part.files(fresh).values()}
        assert names_of == {name for name, _ in self.pieces}
        again = Part.of(Fields("a", self.part.to_json()), GRID)
        assert again == self.part


def _contents(table: PieceTable) -> dict[tuple[str, int], tuple[int, int | None]]:
    return {(b.name, p.head): (p.birth, p.death) for b in table.bundles() for p in b.pieces}


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**16),
    rounds=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=18
    ),
)
def test_a_part_holds_what_was_appended(seed: int, rounds: list[tuple[int, int, int]]) -> None:
    log = Log(seed)
    for version, (came, went, ended) in enumerate(rounds, 1):
        log.round(version, came, went, ended)
    log.check(len(rounds))


@pytest.mark.long
def test_segments_are_few_and_each_entry_is_written_a_few_times() -> None:
    """What all rounds write together grows as n log n, not with the square of their number."""
    log, per_round = Log(1), []
    for version in range(1, 301):
        log.round(version, 8, 2)
        per_round.append(log.written)
        assert len(log.part.segments) <= 2 + math.log2(version + 1)
    log.check(300)
    assert per_round[-1] / 300 < 3 * per_round[29] / 30


def test_a_segment_that_is_cut_short_or_changed_is_damaged() -> None:
    log = Log(2)
    log.round(1, 30, 0)
    log.round(2, 5, 3)
    (ref, *_) = log.part.segments
    content = log.store.get(ref.name)
    for broken in (content[:-1], content[: ref.index_nbytes], b"", content[::-1]):
        log.store.put(ref.name, broken)
        with pytest.raises(DamageError, match=r"\.catalog"):
            _ = Segment.open(log.store, ref).everything
    log.store.delete([ref.name])
    with pytest.raises(DamageError, match="missing"):
        Segment.open(log.store, ref)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**16), versions=st.integers(1, 12))
def test_living_rows_know_who_ended_whom(seed: int, versions: int) -> None:
    """Against a dictionary, with ids that leave and come back, and pieces that are split."""
    random, rows = np.random.default_rng(seed), LivingRows()
    truth: dict[tuple[str, int], dict[tuple[int, int], int]] = {}
    newest: dict[tuple[int, int], tuple[str, int]] = {}

    def head(name: str, birth: int, keys: list[tuple[int, int]], alive: bool) -> None:
        nonlocal heads
        tables = np.array([t for t, _ in keys], np.int32)
        ids = np.array([i for _, i in keys], np.int64)
        file = FileRef(name=name, size=1, digest="", kind="rows", block_nbytes=1)
        piece = Piece(birth, None, 0, len(keys), 0, 0, "", 0, 1, "", 0)
        bundle = Bundle(file, (FAMILY if alive else (),), [piece])
        heads.append((bundle, piece, Rows(tables, np.ones(len(keys), np.int64), ids)))
        truth[name, 0] = dict.fromkeys(keys, 0)

    for version in range(1, versions + 1):
        heads: list[tuple[Bundle, Piece, Rows]] = []
        drawn = {(int(random.integers(3)), int(random.integers(40))) for _ in range(30)}
        left = {key for key in drawn if random.random() < 0.2}
        back = {key for key in left if random.random() < 0.5}
        head(f"gone-{version}", version, sorted(left), False)
        head(f"rows-{version}", version, sorted(drawn - left | back), True)
        for key in drawn:
            if key in newest:
                truth[newest[key]][key] = version
            newest[key] = (f"{'gone' if key in left - back else 'rows'}-{version}", 0)
        for key in back:
            truth[f"gone-{version}", 0][key] = version
        rows.admit(heads)
        if random.random() < 0.4:  # a piece is split, and what lives of it stands elsewhere
            old = sorted(truth)[int(random.integers(len(truth)))]
            known = truth.pop(old)
            if random.random() < 0.5:  # or moves as it is, with what has died
                known = {key: death for key, death in known.items() if not death}
            heads = []
            living = rows.pieces[old]
            name = f"{old[0]}+"
            head(name, living.piece.birth, list(known), bool(living.bundle.families[0]))
            ended = {key: death for key, death in known.items() if death}
            rows.replace([old], heads, {(living.piece.birth, living.is_tombstones): ended})
            truth[name, 0] = known
            for key in known.keys() - ended.keys():
                newest[key] = (name, 0)
        assert {*rows.pieces} == {*truth}
        for place, living in rows.pieces.items():
            tables, ids, deaths = rows.rows_of(living)
            found = dict(
                zip(zip(tables.tolist(), ids.tolist(), strict=True), deaths.tolist(), strict=True)
            )
            assert found == truth[place]
            assert rows.dead(living) == sum(death > 0 for death in found.values())


@pytest.mark.parametrize("nbytes", [[10, 0, 20, 5], [10, 20, 0, 5]])
def test_a_piece_without_a_body_takes_nothing_from_its_neighbour(nbytes: list[int]) -> None:
    assert list(runs([0, 10, 10, 30], nbytes)) == [(0, 4, 0, 35)]


def test_short_reads_of_a_disk_are_made_together_if_there_are_more_than_pay_off_at_once() -> None:
    store = MemoryStore()
    store.reads_at_once = 4  # type: ignore[misc]
    repository = Repository.create(store, schema={"tables": {}})
    every, long = [100] * 4, 2**21
    assert calls_at_once(repository, every) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert calls_at_once(repository, every * 4) == [(0, 4), (4, 8), (8, 12), (12, 16)]
    assert calls_at_once(repository, [long, *every, long]) == [(0, 1), (1, 5), (5, 6)]
    assert calls_at_once(repository, []) == []
    with Crew(2, "requests") as crew:  # as a store that waits for a network
        store.calls_at_once = crew  # type: ignore[attr-defined]
        assert calls_at_once(repository, every * 4) == [(at, at + 1) for at in range(16)]


def test_files_are_described_when_somebody_asks_and_not_for_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Log(1)
    for version in range(1, 4):
        log.round(version, 4, 0)

    def refused(*_: object) -> FileRef:
        raise AssertionError("described")

    with monkeypatch.context() as patched:
        patched.setattr(FileRef, "of", refused)
        part = Part.of(Fields("part", log.part.to_json()), GRID)
        table = part.everything(Repository.open(log.store))
        assert len(table) == 12
        with pytest.raises(AssertionError, match="described"):
            table.bundles()
    assert len(table.bundles()) == 3
