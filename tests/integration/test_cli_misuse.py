"""The command line misused: odd options, odd outputs, and what changes while a command runs."""

from __future__ import annotations

import io
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from emberkeep.blobs import LocalStore
from emberkeep.cli import main
from emberkeep.cli._repository import print_json
from emberkeep.inspect import summary
from emberkeep.repository import Collector, KeepLast, Repository, Writer
from tests.integration.test_cli_repository import Shell, root, run, shell
from tests.integration.test_habits_cli import SMALL
from tests.unit.repositories import Run

__all__ = ["root", "run", "shell"]  # fixtures


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["emberkeep", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ("gc {root} --dry-run --grace inf", 2, "--grace inf is too long"),
        ("gc {root} --dry-run --grace 1e300", 2, "--grace 1e+300 is too long"),
        ("simulate --seed -1", 2, "--seed must be 0 or more"),
        ("serve --shard ²/4", 2, "--shard is I/N"),
        ("serve --metrics ²", 2, "--metrics is a port"),
        ("serve --tier-exclusive", 2, "--tier-exclusive is for --tier"),
        ("serve --port 0 --tier /proc/nope", 40, "the tier /proc/nope cannot be used"),
        ("serve --port 0 --tier /dev/null", 40, "the tier /dev/null cannot be used"),
        ("serve --tier-memory 4GB", 2, "--tier-memory is for --tier"),
        ("cluster up --shards 2 --tier-memory 4GB", 2, "--tier-memory is for servers with a tier"),
        ("cluster up --shards 2 --parity ²,1", 2, "--parity is K,R"),
        ("cluster status --connect 127.0.0.1:1 --watch -1", 2, "--watch takes seconds above 0"),
        ("cluster status --connect 127.0.0.1:1 --watch nan", 2, "--watch takes seconds above 0"),
        ("cluster status --connect 127.0.0.1:1 --watch 1e300", 2, "--watch takes seconds"),
        ("cluster status --connect 127.0.0.1:1 --watch 1 --json", 2, "leave --watch out"),
        ("cluster status --connect 127.0.0.1:1 --name x", 2, "leave --name and --address out"),
        ("cluster status --token-file x", 2, "are for --connect"),
        ("restore {root} -o s3://bucket/x", 2, "is not a local path"),
        (
            "train --demo --set checkpoint.path=x --set checkpoint.metrics_port=99999", 2,
            "metrics_port is 0 to 65535",
        ),
        ("train --demo --tensorboard {root}/repository.json/x", 20, "TensorBoard cannot write to"),
        (
            "train --demo --fresh --set checkpoint.path=x --set checkpoint.start_from={root}", 2,
            "begins with nothing, also not with checkpoint.start_from",
        ),
        ("demo --directory {root}/repository.json", 20, "cannot be written"),
    ],
)  # fmt: skip
def test_misuse_ends_with_one_line_and_changes_nothing(
    shell: Shell, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str,
    code: int, complaint: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert shell(*arguments.format(root=root).split(" ")) == code
    assert complaint in shell.err
    assert (shell.err.count("\n"), shell.out) == (1, "")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("arguments", [("versions",), ("train", "--print-config")])
@pytest.mark.parametrize("closed", [False, True])
def test_a_result_that_cannot_be_printed_is_said(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: tuple[str, ...],
    closed: bool,
) -> None:  # fmt: skip
    given = [*arguments, root] if arguments == ("versions",) else arguments
    full = None if closed else open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    assert ended(monkeypatch, *given) == 20
    assert "emberkeep: the result could not be printed: " in capsys.readouterr().err
    if full is not None:
        full.close()


def test_a_terminal_without_the_characters_gets_what_it_can_show(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert ended(monkeypatch, "diff", root, "1", "2") == 0
    assert "moved (?2)" in printed.getvalue().decode("ascii")
    printed.truncate(0)
    print_json({"table": "früher"})
    assert json.loads(printed.getvalue().strip(b"\0")) == {"table": "früher"}


def test_brackets_in_a_path_are_no_markup(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "t[/a][red]"
    sets = [part for one in (*SMALL, f"checkpoint.path={path}") for part in ("--set", one)]
    assert shell("train", "--demo", *sets) == 0, shell.err
    assert f"were written; {path} keeps" in shell.out
    assert "version was saved" in shell.out or "versions were saved" in shell.out


def test_what_a_trainer_removes_meanwhile_is_no_damage(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Run(store=LocalStore(tmp_path / "run"), layout="full")
    for _ in range(3):
        made.save(1)
    files_of = summary.files_of

    def then_removed(repository: Repository, versions: Any) -> Any:
        found = files_of(repository, versions)
        writer = Writer.open(made.repository)
        Collector(writer, policy=KeepLast(n=2), grace=timedelta(0)).collect()
        return found

    monkeypatch.setattr(summary, "files_of", then_removed)
    assert shell.json("verify", tmp_path / "run")["versions"] == [2, 3]


def test_looks_at_servers_come_one_by_one_through_a_pipe(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [[{"shard": 0, "address": "a:1", "state": state}] for state in ("first", "second")]
    monkeypatch.setattr("emberkeep.cli._cluster_status.looks", lambda *_: iter(looks))
    assert shell("cluster", "status", "--connect", "127.0.0.1:1", "--watch", "1") == 0
    assert shell.out.count("last event") == 2
    assert shell.out.index("first") < shell.out.index("second")
