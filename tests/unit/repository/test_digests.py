"""Long files are checked by their blocks, whatever release wrote their digest."""

from __future__ import annotations

from typing import Any

import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.errors import DamageError
from emberkeep.repository import Manifest, Repository, Writer
from emberkeep.repository.digests import Digester, digest
from emberkeep.repository.maintenance.verify import verify
from emberkeep.repository.maintenance.version_copy import copy_version

CONTENTS = [b"one block", b"sixteen bytes...", b"a few blocks, " * 7, b""]
BLOCK = 16


def written(store: MemoryStore) -> tuple[Repository, Manifest]:
    repository = Repository.create(store, schema={})
    draft = Writer.open(repository).begin(block_nbytes=BLOCK)
    for content in CONTENTS:
        draft.add([content], kind="rows", suffix="bin")
    return repository, draft.commit(step=1)


@pytest.mark.parametrize("format_1", [False, True])
def test_long_files_are_read_verified_and_copied(
    format_1: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    with monkeypatch.context() as patched:
        if format_1:  # whose digest of a long file was over all its bytes
            by_blocks: Any = {
                tuple(digest(c[i : i + BLOCK]) for i in range(0, len(c), BLOCK)): digest(c)
                for c in CONTENTS
                if len(c) > BLOCK
            }
            whole = Digester.whole.fget  # type: ignore[attr-defined]
            patched.setattr(
                Digester, "whole", property(lambda self: by_blocks.get(self.blocks) or whole(self))
            )
        repository, manifest = written(store)
    long = manifest.files[2]
    assert (long.digest == digest(CONTENTS[2])) == format_1
    assert [repository.read(file) for file in manifest.files] == CONTENTS
    assert [b"".join(repository.stream(file)) for file in manifest.files] == CONTENTS
    assert verify(repository).damages == ()
    other = Writer.open(Repository.create(MemoryStore(), schema={}))
    copied = copy_version(repository, manifest.version, other)
    assert [other.repository.read(file) for file in copied.files] == CONTENTS

    for damaged in (CONTENTS[2][:-1], CONTENTS[2] + b"x", b"A" + CONTENTS[2][1:]):
        store.put(long.name, damaged)
        with pytest.raises(DamageError):
            repository.read(long)
        (found,) = verify(repository).damages
        assert found.name == long.name
    store.put(long.name, CONTENTS[0])
    (found,) = verify(repository).damages
    assert "swapped" in found.problem
