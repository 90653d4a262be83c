"""Forged files with matching digests end in a clear error: no crash, no memory beyond bounds."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from emberkeep.blobs import LocalStore
from emberkeep.checkpoint.recovery import Losses
from emberkeep.errors import DamageError
from emberkeep.keeper import tier_state
from emberkeep.keeper.plain_state import Packed, unpack
from emberkeep.repository import Repository, verify
from emberkeep.tiers import superblock
from tests.faults import hostile
from tests.faults.damage import healthy, make_tier, open_tier, small_tiers
from tests.faults.lives import Nursery
from tests.nightly import examples

LABELS = ["consecutive, 4 bits", "grid"]


def ended(nursery: Nursery, log: Path, **environment: str) -> dict[str, str]:
    """How the cases ended that can end a process."""
    code = nursery.live("call", "tests.faults.hostile:main", log=log, **environment)
    said = log.read_text()
    assert code == 0, said[-2000:]
    found: dict[str, str] = json.loads(said.splitlines()[-1])
    return found


def test_no_forged_file_ends_the_process_or_takes_its_memory(
    nursery: Nursery, tmp_path: Path
) -> None:
    found = ended(nursery, tmp_path / "log", HOSTILE_ROUNDS=str(examples(100)))
    assert found.pop("fuzzed pieces") == found.pop("fuzzed segments") == "no error"
    assert found == dict.fromkeys(found, "DamageError")
    assert len(found) == len(hostile.CASES) - 2


def forge(label: str, choose: Callable[[int], int]) -> bool:
    """Reads a repository of which one document was changed in one place; whether all was well."""
    kept = healthy(label)
    documents = sorted(name for name in kept.objects if name.endswith(".json"))
    # Of a directory as often as of any other, however many documents it has.
    places = sorted({name.split("/")[0] for name in documents})
    place = places[choose(len(places))]
    names = [name for name in documents if name.split("/")[0] == place]
    name = names[choose(len(names))]
    body = hostile.mutated(hostile.body_of(kept.objects[name]), choose)
    return hostile.exercise(kept.store({name: hostile.enveloped(body)}))


@pytest.mark.parametrize("label", LABELS)
@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_forged_documents_are_refused(label: str, data: st.DataObject) -> None:
    forge(label, lambda count: data.draw(st.integers(0, count - 1)))


@settings(max_examples=100)
@given(data=st.data())
def test_forged_state_is_refused(data: st.DataObject) -> None:
    """What a keeper stores beside rows, in a version or beside a tier."""
    tensors = {"a": torch.ones(3), "i": torch.zeros(1, 2, dtype=torch.int64), "v": torch.ones(2)}
    plain = {
        "reader": {"place": 3, "float": {"$float": "nan"}},
        "losses": {"pls": 0.5, "recovered_at": {"1": 2}},
        "model": [{"$tensor": "a"}, {"$array": "a"}, {"$bytes": "AAAA"}, {"$tuple": [1, 2]}],
        "sparse": {"$sparse": {
            "indices": {"$tensor": "i"}, "values": {"$tensor": "v"}, "size": [4],
            "coalesced": False,
        }},
        "pairs": {"$dict": [[1, 2]]},
        "counter": {"$counter": [["a", 2]]},
    }  # fmt: skip
    forged = hostile.mutated(plain, lambda count: data.draw(st.integers(0, count - 1)))
    content = safetensors.torch.save(tensors, metadata={"emberkeep": forged.decode()})

    def read() -> None:
        found = unpack(Packed.decode(content))
        tier_state._beside(
            "state/step-3.safetensors", Packed(Packed.decode(content).plain, tensors)
        )
        Losses.from_dict(found["losses"])

    hostile.attempt(read)


@settings(max_examples=30)
@given(data=st.data())
def test_forged_heads_and_decisions_of_tiers_are_refused(data: st.DataObject) -> None:
    def choose(count: int) -> int:
        return data.draw(st.integers(0, count - 1))

    with small_tiers(), tempfile.TemporaryDirectory() as parent:
        top = Path(parent) / "tier"
        shutil.copytree(undecided_tier(), top)
        if choose(3):
            path = top / "rows-0-0.tier"
            head, sequence = superblock.read_head(str(path))
            text = hostile.mutated(json.loads(superblock.encode(head)), choose)
            assume(len(text) <= superblock.ROOM)
            with open(path, "r+b") as file:
                file.seek((sequence - 1) % 2 * superblock.SLOT_NBYTES)
                file.write(superblock.slot(text, sequence))
        else:
            (path,) = (top / "state").glob("decision-*")
            body = hostile.mutated(hostile.body_of(path.read_bytes()), choose)
            path.write_bytes(hostile.enveloped(body))
        hostile.attempt(lambda: open_tier(top, undecided=True))
        assert [each.name for each in Path(parent).iterdir()] == ["tier"]


@cache
def undecided_tier() -> Path:
    top = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, top)
    make_tier(top / "tier", undecided=True)
    return top / "tier"


@pytest.mark.soak
@pytest.mark.parametrize("label", LABELS)
def test_forged_documents_are_refused_whatever_the_seed(label: str) -> None:
    seed = int(os.environ.get("HOSTILE_SEED", random.SystemRandom().randrange(2**32)))
    print(f"HOSTILE_SEED={seed}")
    choose = random.Random(seed).randrange
    well = sum(forge(label, choose) for _ in range(2000))
    # Most mutations matter, or the test would look at nothing.
    assert well < 1000


@pytest.mark.soak
def test_forged_pieces_are_refused_whatever_the_seed(nursery: Nursery, tmp_path: Path) -> None:
    seed = os.environ.get("HOSTILE_SEED", str(random.SystemRandom().randrange(2**32)))
    print(f"HOSTILE_SEED={seed}")
    found = ended(nursery, tmp_path / "log", HOSTILE_SEED=seed, HOSTILE_ROUNDS="20000")
    assert found["fuzzed pieces"] == found["fuzzed segments"] == "no error"


def test_a_catalog_leads_nowhere_else(tmp_path: Path) -> None:
    """Names that lead out of the repository are refused before anything is opened or removed."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"somebody else's")
    kept = healthy("grid")
    name = max(n for n in kept.objects if n.startswith("grid/") and n.endswith(".json"))
    for forged in ("../outside", str(outside), "data/../../outside", "data/\0", "versions/x"):
        store = LocalStore(tmp_path / "repository")
        for each, content in kept.objects.items():
            store.put(each, content)
        body = hostile.body_of(kept.objects[name])
        body["parts"][0]["segments"][0][0] = forged
        store.put(name, hostile.enveloped(json.dumps(body).encode()))
        report = verify(Repository.open(store))
        assert name in {damage.name for damage in report.damages}
        with pytest.raises(DamageError):
            hostile._must(report.ok)
        assert hostile.exercise(store) is False
    assert outside.read_bytes() == b"somebody else's"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["outside", "repository"]
