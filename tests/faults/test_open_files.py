"""A process at its limit of open files: the system's own EMFILE, at every call that opens one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource")

_PROCESS = """
import os, resource, sys
from datetime import timedelta
from emberkeep.blobs import LocalStore
from emberkeep.errors import StorageError
from emberkeep.repository import Collector, KeepLast, KeepNamed, Repository, Writer
from emberkeep.testing.contracts import check_content, save

POLICY = KeepLast(n=1) | KeepNamed()
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

def with_few_files(free, action):
    # Descriptors are numbered without gaps here, so the next one is how many are open.
    handle = os.open(os.devnull, os.O_RDONLY)
    os.close(handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, (handle + free, hard))
    try:
        return action()
    except StorageError as error:
        assert "open files" in str(error), error
        return None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

store = LocalStore(sys.argv[1])
repository = Repository.create(store, schema={})
writer = Writer.open(repository)
kept = [save(writer, step) for step in range(1, 5)]
repository.tag("best", 1)
writer = Writer.open(repository)
kept.append(save(writer, 5))

def went_wrong(free):
    listed = with_few_files(free, lambda: {info.name for info in store.list()})
    if listed is not None and listed != {info.name for info in store.list()}:
        return f"{free} free: a listing of {len(listed)} names"
    newest = with_few_files(free, lambda: (repository.latest(),))
    if newest not in (None, (kept[-1].version,)):
        return f"{free} free: the newest version is {newest[0]}"
    with_few_files(free, lambda: Writer.open(repository))
    if repository.versions() != tuple(m.version for m in kept):
        return f"{free} free: opened for writing, {len(repository.versions())} versions are left"
    return None

for free in range(4):
    problem = went_wrong(free)
    if problem:
        sys.exit(problem)
for free in range(4):
    writer = Writer.open(repository)
    collector = Collector(writer, policy=POLICY, grace=timedelta(0))
    done = with_few_files(free, collector.collect)
    for manifest in (kept[0], kept[-1]):
        check_content(repository, manifest)
    if done is None:
        assert free < 3, free
assert [v.number for v in repository.versions()] == [1, 5]
"""


def test_no_free_descriptor_is_an_error_and_nothing_else(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS, str(tmp_path / "root")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
