"""The commands over a repository: what they print, what they refuse, how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from emberkeep.blobs import Buffer, LocalStore, open_store
from emberkeep.checkpoint import Checkpointer, VersionSpec
from emberkeep.cli import main
from emberkeep.cli._repository import numbers_text, size_text
from emberkeep.cli._work import ReadingStore, _Lines
from emberkeep.errors import FencedError
from emberkeep.repository import Repository
from tests.integration.test_cli import RUN_MAIN
from tests.unit.repositories import KEEP, TABLES, Run, flipped


class Shell:
    """Runs commands in this process; `out` and `err` hold what the last one printed."""

    def __init__(self, monkeypatch: Any, capsys: Any) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        self._monkeypatch.setattr(sys, "argv", ["emberkeep", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        self.out, self.err = self._capsys.readouterr()
        return int(ended.value.code or 0)

    def json(self, *arguments: object, code: int = 0) -> Any:
        assert self(*arguments, "--json") == code, self.err
        return json.loads(self.out)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Four consecutive versions, the second one tagged; the first is larger than the others."""
    run = Run(store=LocalStore(tmp_path / "run"), bits=4)
    for steps in (12, 1, 1, 1):
        run.save(steps)
    run.repository.tag("best", 2)
    return run


@pytest.fixture
def root(run: Run, tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_versions(shell: Shell, root: Path) -> None:
    assert shell("versions", root) == 0
    lines = shell.out.splitlines()
    assert lines[0].split()[:2] == ["version", "saved"]
    assert len(lines) == 6
    assert "best" in lines[3]
    assert "weight 4 bits" in lines[2]
    found = shell.json("versions", root)
    assert [line["number"] for line in found] == [1, 2, 3, 4]
    assert [line["step"] for line in found] == [100, 200, 300, 400]
    assert [line["kind"] for line in found] == ["full", "version", "version", "version"]
    assert [line["needs"] for line in found] == [[], [1], [2], [3]]
    assert found[1]["tags"] == ["best"]


def test_show(shell: Shell, root: Path, run: Run) -> None:
    assert shell("show", root) == 0
    assert '{"samples": 2800}' in shell.out
    assert "a restore reads 1-4" in shell.out
    shown = shell.json("show", root, "--version", "best")
    assert shown["version"]["number"] == 2
    assert shown["version"]["chain"] == [1, 2]
    assert shown["version"]["shards"] == 2
    assert shown["repository"]["restores"] == 0
    assert [table["name"] for table in shown["tables"]] == [table.name for table in TABLES]
    weight = shown["tables"][0]["planes"]["weight"]
    assert weight["nbytes_about"] == shown["tables"][0]["rows"] * (4 + 3)
    files = run.repository.manifest(2).files
    assert [file["name"] for file in shown["files"]] == [file.name for file in files]
    storage = shown["storage"]
    stored = [path for path in root.rglob("*") if path.is_file() and path.name != ".reserve"]
    assert storage["objects"] == len(stored)
    assert storage["nbytes"] == sum(path.stat().st_size for path in stored)
    split = storage["split"]
    assert split["data of this version"]["nbytes"] == sum(file.size for file in files)
    assert split["data of versions that it needs"]["objects"] == 3
    assert split["data of other versions"]["objects"] == 6


def test_verify_names_what_is_wrong(shell: Shell, root: Path, run: Run) -> None:
    assert shell("verify", root) == 0
    assert "4 versions, 12 files" in shell.out
    assert "every byte is as it was saved" in shell.out
    rows, _, dense = run.repository.manifest(3).files
    flipped(run.store, rows.name)
    assert shell("verify", root, "--shallow") == 0
    (root / dense.name).unlink()
    report = shell.json("verify", root, code=8)
    assert {d["name"]: d["versions"] for d in report["damages"]} == {
        rows.name: [3, 4],
        dense.name: [3, 4],
    }
    assert report["undamaged"] == [1, 2]
    assert shell("verify", root) == 8
    assert rows.name in shell.out
    assert dense.name in shell.out
    assert "undamaged versions: 1-2" in shell.err
    assert shell("verify", root, "--version", 2) == 0
    assert shell("verify", root, "--shallow") == 8
    assert rows.name not in shell.out
    # A damaged manifest hides what it lists, not the other versions.
    flipped(run.store, run.repository.manifest(3).name)
    report = shell.json("verify", root, code=8)
    assert report["undamaged"] == [1, 2]
    assert shell("versions", root) == 8
    assert "damaged" in shell.out
    assert len(shell.out.splitlines()) == 6


def test_verify_counts_files_of_no_version(shell: Shell, root: Path, run: Run) -> None:
    assert shell("verify", root) == 0
    assert "of no version" not in shell.out
    assert shell("verify", root, "--version", 2) == 0
    assert "of no version" not in shell.out
    newest = run.repository.manifest(4)
    (root / newest.name).unlink()
    count = len(newest.files)
    line = f"{count} files of no version (a save in progress, or a manifest that was deleted)"
    for options in ([], ["--shallow"]):
        shell("verify", root, *options)
        assert line in shell.out.splitlines()
    (root / newest.files[0].name).unlink()
    (root / run.repository.manifest(3).files[0].name).unlink()
    assert shell("verify", root) == 8
    assert line.replace(str(count), str(count - 1), 1) in shell.out.splitlines()


def test_verify_finds_rows_that_have_the_right_digest_and_do_not_belong(
    shell: Shell, tmp_path: Path
) -> None:
    run = Run(store=LocalStore(tmp_path / "run"))
    run.save()
    writer = run.keeper.writer
    piece = run.repository.manifest(1).files[0]
    for content, metadata in (
        (b"no rows at all", {}),
        (run.store.get(piece.name), {**piece.metadata, "rows": {"fixed": 1}}),
    ):
        with writer.begin() as draft:
            draft.add(content, kind="rows", suffix="arrow", metadata=metadata)
            draft.commit(step=0, layout=run.repository.manifest(1).layout)
    report = shell.json("verify", tmp_path / "run", code=8)
    problems = [damage["problem"] for damage in report["damages"]]
    assert len(problems) == 2
    assert "does not hold rows" in problems[0]
    assert "its manifest says {'fixed': 1}" in problems[1]
    assert report["undamaged"] == [1]


def test_export_and_restore(shell: Shell, root: Path, run: Run, tmp_path: Path) -> None:
    assert shell("export", root, "--output", tmp_path / "out.safetensors") == 0
    assert "version 4 (step 400) written to" in shell.out
    assert shell("export", root, "-o", tmp_path / "out.safetensors") == 2
    assert "--force" in shell.err
    found = shell.json(
        "export", root, "-o", tmp_path / "out", "--format", "parquet", "--version", "1",
        "--table", "fixed", "--table", "dynamic",
    )  # fmt: skip
    ids = {name: rows[0].size for name, rows in run.states[1].items()}
    assert found["rows"] == {"fixed": ids["fixed"], "dynamic": ids["dynamic"]}
    assert shell("restore", root, "-o", tmp_path / "restored", "--version", "best") == 0
    assert json.loads((tmp_path / "restored/version.json").read_text())["version"] == 2
    flipped(run.store, run.repository.manifest(3).files[0].name)
    assert shell("restore", root, "-o", tmp_path / "newest") == 8
    assert run.repository.manifest(3).files[0].name in shell.err
    assert not (tmp_path / "newest").exists()
    assert shell("restore", root, "-o", tmp_path / "newest", "--fall-back") == 0
    assert "lost: 3-4" in shell.err
    assert json.loads((tmp_path / "newest/version.json").read_text())["version"] == 2
    assert shell("restore", root, "-o", tmp_path / "x", "--fall-back", "--version", "1") == 2


def test_diff(shell: Shell, root: Path) -> None:
    found = shell.json("diff", root, 1, "best")
    assert (found["a"], found["b"]) == (1, 2)
    assert [line["table"] for line in found["tables"]] == [table.name for table in TABLES]
    assert sum(line["changed"] for line in found["tables"]) > 0
    assert shell("diff", root, 2, 2, "--table", "fixed") == 0
    assert shell.out.splitlines()[-1].split() == ["fixed", "0", "0", "0", "0", "0"]
    assert "rounding" in shell.err


def test_gc_asks_before_it_fences(shell: Shell, tmp_path: Path) -> None:
    run = Run(store=LocalStore(tmp_path / "run"), layout="full")
    root = tmp_path / "run"
    for _ in range(8):
        run.save()
    run.repository.tag("best", 2)
    options = ("--keep-last", 2, "--keep-every", 5, "--grace", 0)
    plan = shell.json("gc", root, *options, "--dry-run")
    assert (plan["kept"], plan["removed"]) == ([2, 5, 7, 8], [1, 3, 4, 6])
    expected = {"2": ["tag best"], "5": ["retention"], "7": ["retention"]}
    assert plan["reasons"] == {**expected, "8": ["retention", "newest"]}
    assert shell("gc", root, "--dry-run") == 0
    assert "would remove no version" in shell.out  # all are young
    assert shell.out.count("grace until 20") == 8
    assert shell("gc", root, *options) == 2
    assert f"process {os.getpid()} on" in shell.err
    assert "--yes" in shell.err
    assert len(run.repository.versions()) == 8
    run.save()
    plan = shell.json("gc", root, *options, "--dry-run")
    done = shell.json("gc", root, *options, "--yes")
    assert {**done, "dry_run": True} == plan
    assert [v.number for v in run.repository.versions()] == plan["kept"]
    with pytest.raises(FencedError), pytest.warns(UserWarning, match="taken over"):
        run.save()
    assert shell("verify", root) == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_dry_run_says_what_gc_does(shell: Shell, tmp_path: Path, seed: int) -> None:
    layout = ["full", "one_shot", "intermittent", "consecutive", "grid"][seed]
    run = Run(store=LocalStore(tmp_path / "run"), layout=layout, seed=seed)
    for _ in range(7):
        run.save(1)
    run.keeper.settle()
    run.repository.tag("best", int(run.random.integers(1, 8)))
    options = ("--keep-last", 1, "--grace", 0)
    before = sorted((i.name, i.size, i.modified) for i in run.repository.store.list())
    plan = shell.json("gc", tmp_path / "run", *options, "--dry-run")
    assert sorted((i.name, i.size, i.modified) for i in run.repository.store.list()) == before
    done = shell.json("gc", tmp_path / "run", *options, "--yes")
    assert {**done, "dry_run": True} == plan


def test_tags(shell: Shell, root: Path, run: Run) -> None:
    assert shell("tag", root, "good") == 0
    assert shell.out == "good names version 4\n"
    assert shell("tag", root, "good", "--version", "1") == 2
    assert "names version" in shell.err
    assert shell("tag", root, "12") == 2
    assert shell("untag", root, "good") == 0
    assert shell("untag", root, "good") == 24
    assert "there are best" in shell.err
    assert set(run.repository.tags()) == {"best"}
    flipped(run.store, "tags/best.json")
    assert shell("versions", root) == 8
    assert "tags/best.json is damaged" in shell.err
    assert shell("untag", root, "best") == 0
    assert shell("versions", root) == 0


def test_fork(shell: Shell, root: Path, run: Run, tmp_path: Path) -> None:
    assert shell("fork", root, tmp_path / "new", "--version", "best") == 0
    assert [v["number"] for v in shell.json("versions", tmp_path / "new")] == [1, 2]
    assert shell.json("show", tmp_path / "new")["repository"]["forked_from"]["version"] == "2-1"
    assert shell("fork", root, tmp_path / "new") == 2
    assert "already holds a repository" in shell.err
    copy = Repository.open(LocalStore(tmp_path / "new"))
    Checkpointer(copy, run.cluster, spec=VersionSpec(layout="full"), settings=KEEP).restore()


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["versions", "nowhere"], 23, "holds no repository: check the path"),
        (["show", "empty"], 23, "holds no repository"),
        (["verify", "file"], 20, "a file stands where a directory is needed"),
        (["versions", "ftp://host/x"], 2, "unknown scheme 'ftp'"),
        (["show", "run", "--version", "9"], 24, "has no version 9: it has 1 to 1"),
        (["show", "run", "--version", "best"], 24, "no tag 'best': there are no tags"),
        (["diff", "run", "1", "7"], 24, "has no version 7"),
        (["export", "run", "-o", "no/where"], 20, "create the directory first"),
        (["export", "run", "-o", "empty"], 2, "empty is a directory, so it is not replaced"),
        (["gc", "run", "--keep-last", "0"], 2, "at least 1 version"),
        (["show", "fresh"], 24, "has no version yet"),
    ],
)
def test_mistakes_get_one_line_and_an_exit_code(
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    complaint: str,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    run = Run(store=LocalStore(tmp_path / "run"), layout="full")
    run.save()
    Repository.create(LocalStore(tmp_path / "fresh"), schema=run.cluster.schema())
    monkeypatch.chdir(tmp_path)
    assert shell(*arguments) == code
    assert complaint in shell.err
    assert shell.err.startswith("emberkeep: ")
    assert (shell.err.count("\n"), shell.out) == (1, "")


def test_an_empty_repository_is_no_error(shell: Shell, tmp_path: Path) -> None:
    Run(store=LocalStore(tmp_path / "run"))
    assert shell("versions", tmp_path / "run") == 0
    assert "has no version yet" in shell.err
    assert shell.json("versions", tmp_path / "run") == []
    assert shell("verify", tmp_path / "run") == 0
    assert shell("gc", tmp_path / "run", "--dry-run") == 0


def test_a_closed_pipe_is_no_error(root: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "emberkeep.cli", "versions", str(root)],
        stdout=writer, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "run"],
        ["export", "run", "-o", "out"],
        ["export", "run", "-o", "out", "--format", "parquet"],
        ["restore", "run", "-o", "out"],
        ["fork", "run", "out"],
        ["diff", "run", "1", "4"],
    ],
)
def test_an_interrupt_leaves_nothing_behind(
    shell: Shell, root: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """At every read of a data file in turn."""
    monkeypatch.chdir(root.parent)
    before = sorted(root.parent.rglob("*"))
    count_read = ReadingStore._count
    for position in range(8):
        count = iter(range(1000))

        def interrupted(store: ReadingStore, name: str, content: Buffer) -> None:
            if name.startswith("data/") and next(count) == position:  # noqa: B023
                raise KeyboardInterrupt
            count_read(store, name, content)

        monkeypatch.setattr(ReadingStore, "_count", interrupted)
        assert shell(*arguments) == 130
        assert (shell.out, shell.err) == ("", "emberkeep: interrupted\n")
        left = sorted(path for path in root.parent.rglob("*") if "out" not in path.parts)
        assert [path for path in left if path.is_file()] == [p for p in before if p.is_file()]
        if arguments[0] != "fork":  # a fork that was interrupted is no repository yet
            assert not (root.parent / "out").exists()
    monkeypatch.undo()
    monkeypatch.chdir(root.parent)
    assert shell(*arguments) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_result_that_cannot_be_printed_is_an_error(root: Path, options: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "emberkeep.cli", "versions", str(root), *options],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 20
    assert done.stderr == ("emberkeep: the result could not be printed: No space left on device\n")


def test_commands_over_s3(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moto_server = pytest.importorskip("moto.server")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        endpoint = f"http://{host}:{port}"
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "A" * 20)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b" * 40)
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/models", method="PUT"))
        where = f"?endpoint={endpoint}&allow_http=true&region=us-east-1"
        url = f"s3://models/run{where}"
        run = Run(store=open_store(url))
        run.save()
        run.save()
        assert [line["number"] for line in shell.json("versions", url)] == [1, 2]
        assert shell("verify", url) == 0
        assert shell("export", url, "-o", tmp_path / "out") == 0
        assert shell("tag", url, "best", "--version", "1") == 0
        assert shell("fork", url, f"s3://models/new{where}", "--version", "best") == 0
        assert shell.json("show", f"s3://models/new{where}")["version"]["number"] == 1
        assert shell("gc", url, "--yes") == 0
        assert shell("versions", f"s3://models/none{where}") == 23
        assert "A" * 20 not in shell.err
    finally:
        server.stop()


def test_help_of_commands_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numba', 'pyarrow', 'numpy'}"
    check = f"\nassert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    code = RUN_MAIN.format(["emberkeep", "verify", "--help"]) + check
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_sizes_numbers_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert [size_text(n) for n in (0, 999, 1000, 123_456, 5 * 10**9, 2 * 10**15)] == [
        "0 B", "999 B", "1 kB", "123 kB", "5 GB", "2e+03 TB",
    ]  # fmt: skip
    assert numbers_text([4, 1, 2, 9, 3, 7]) == "1-4, 7, 9"
    lines = _Lines("verifying", 200)
    lines.advance(50)
    lines._last -= 10
    lines.advance(50)
    assert capsys.readouterr().err == "verifying: 50% of 200 bytes\n"


def test_mirror(shell: Shell, root: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    first = shell.json("mirror", root, copies, "--version", 2)
    assert (first["version"], first["copy"]) == (2, 2)  # with version 1, which it needs
    rest = shell.json("mirror", root, copies)
    assert (rest["version"], rest["copy"]) == (4, 4)
    assert 0 < rest["nbytes"] < first["nbytes"]
    assert shell.json("mirror", root, copies)["nbytes"] == 0  # it is there
    found = shell.json("versions", copies)
    assert [line["step"] for line in found] == [100, 200, 300, 400]
    assert shell("verify", copies) == 0
    assert shell("diff", copies, 1, 4) == 0
    assert shell("mirror", copies, tmp_path / "back", "--most-mb-per-second", "1000") == 0
    assert "version 4 is version 4 of" in shell.out
    assert shell("mirror", tmp_path / "back", root) == 0  # the same versions, by way of another
    assert len(shell.json("versions", root)) == 4
    assert shell("mirror", root, root) == 2
    assert "the same place" in shell.err
    for source, to in ((root, root / "copies"), (copies, copies.parent)):
        assert shell("mirror", source, to) == 2
        assert "lies inside" in shell.err
    assert not (root / "copies").exists()
    other = Run(store=LocalStore(tmp_path / "other"))
    other.save(3)
    assert shell("mirror", root, tmp_path / "other") == 2
    assert "versions of another run" in shell.err


def test_mirror_puts_back_what_is_damaged(shell: Shell, root: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    source = Repository.open(LocalStore(root))
    source.tag("best", 2)
    source.record_restore(source.version(1))
    assert shell("mirror", root, copies) == 0
    repository = Repository.open(LocalStore(copies))
    assert repository.tags()["best"].number == 2
    assert repository.restores(exact=False) == 1
    damaged = copies / repository.manifest(1).files[0].name
    damaged.write_bytes(b"damage")
    assert shell.json("mirror", root, copies, "--no-check")["repaired_nbytes"] == 0
    assert shell("verify", copies) != 0
    again = shell.json("mirror", root, copies)
    assert (again["nbytes"], again["repaired_nbytes"]) == (0, damaged.stat().st_size)
    assert shell("verify", copies) == 0
    assert len(shell.json("versions", copies)) == 4
    assert repository.restores() == 1
    damaged.write_bytes(b"damage")
    (root / source.manifest(1).files[0].name).write_bytes(b"damage")
    assert shell("mirror", root, copies) != 0
    assert "does not have its files intact either" in shell.err


def test_gc_by_age(shell: Shell, root: Path) -> None:
    for manifest in (root / "versions").iterdir():
        os.utime(manifest, (1e9, 1e9))  # long ago

    def reasons(*options: object) -> Any:
        return shell.json("gc", root, "--dry-run", "--grace", 0, *options)["reasons"]

    assert reasons("--keep-last", 4)["3"] == ["retention", "needed by 4"]
    assert reasons("--keep-last", 4, "--drop-after", "14d")["3"] == ["needed by 4"]
    assert reasons("--keep-last", 1, "--keep-for", "20000d")["3"] == ["retention", "needed by 4"]
    assert shell("gc", root, "--dry-run", "--drop-after", "old") == 2
    assert "drop_after='old' is no age" in shell.err
