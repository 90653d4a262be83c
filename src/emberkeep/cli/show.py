"""`emberkeep show`: one version, and what storage is used for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emberkeep.cli._repository import (
    JsonOption,
    Url,
    VersionOption,
    choose,
    count_text,
    emit,
    kind_text,
    numbers_text,
    open_repository,
    print_json,
    print_table,
    size_text,
    to_terminal,
)
from emberkeep.cli._shell import command
from emberkeep.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from emberkeep.repository import Repository, VersionId


@command
def show(
    url: Url,
    version: VersionOption = None,
    grid: Annotated[
        bool,
        typer.Option("--grid", help="Show the grid: births, deaths, and what a restore reads."),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --grid: also write the picture as a page."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a version holds, and what the repository's storage is used for."""
    from emberkeep.inspect.summary import describe

    if html is not None and not grid:
        raise ConfigError("--html draws the grid: say --grid too")
    repository, _ = open_repository(url)
    if grid:
        _show_grid(repository, choose(repository, version), html, as_json)
        return
    described = describe(repository, choose(repository, version))
    if as_json:
        print_json(described)
        return
    _print_facts(described)
    emit("")
    _print_tables(described["tables"])
    emit("")
    if described["version"]["widths"]:
        _print_widths(described["version"]["widths"])
        emit("")
    _print_files(described["files"])
    emit("")
    storage = described["storage"]
    rows = [
        (place, f"{used['objects']:,}", size_text(used["nbytes"]))
        for place, used in storage["split"].items()
    ]
    total = ("all", f"{storage['objects']:,}", size_text(storage["nbytes"]))
    print_table(["storage", "objects", "size"], [*rows, total], right=("objects", "size"))


def _show_grid(
    repository: Repository, version: VersionId, html: Path | None, as_json: bool
) -> None:
    from emberkeep.inspect.picture import as_html, as_text, picture

    drawn = picture(repository, version)
    if drawn is None:
        raise ConfigError(
            f"version {version.number} belongs to no grid: it was saved with another layout; "
            "all_versions() or layout='grid' makes one"
        )
    if html is not None:
        title = f"{repository.store.url}, version {version.number}"
        try:
            html.write_text(as_html(drawn, title), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{html} cannot be written: {error.strerror}") from error
    if as_json:
        print_json(drawn.to_json())
        return
    width = shutil.get_terminal_size().columns if to_terminal() else 100
    emit(as_text(drawn, width))
    behind = drawn.newest - drawn.covered
    facts = {
        "grid": f"started by version {drawn.grid}, generation {drawn.generation}",
        "covers": f"up to version {drawn.covered}"
        + (f", {count_text(behind, 'version')} behind" if behind else ""),
        "stored": f"{size_text(drawn.stored_nbytes)} in {count_text(drawn.files, 'file')}, "
        f"{size_text(drawn.unused_nbytes)} of it unused",
        f"version {drawn.version} reads": f"{size_text(drawn.read_nbytes)} of "
        f"{count_text(drawn.read_files, 'file')}: what is shown as 1 to 9, by size",
    }
    print_table(["", ""], list(facts.items()))


def _print_facts(described: dict[str, Any]) -> None:
    version, repository = described["version"], described["repository"]
    kind, chain = kind_text(version["kind"]), numbers_text(version["chain"])
    facts = {
        "version": f"{version['number']}, step {version['step']:,}, saved {version['created']}",
        "kind": f"{kind}, layout {version['layout']}; a restore reads {chain}",
        "stored": f"{version['codec']}; saved by {count_text(version['shards'] or 1, 'shard')}",
        "chosen because": version["why"] or "",
        "tags": ", ".join(version["tags"]),
        "reader": _plain(version["reader"]),
        "user state": _plain(version["user"]),
        "plan": _planned(version["counters"]),
        "counters": _plain({k: v for k, v in version["counters"].items() if k != "auto"}),
        "repository": f"{repository['id']} at {repository['url']}",
        "history": f"{count_text(repository['versions'], 'version')}, "
        f"restored {count_text(repository['restores'], 'time')}",
        "forked from": _plain(repository["forked_from"]),
        "exclusive": "no fencing: one process alone may write" if repository["exclusive"] else "",
    }
    print_table(["", ""], [(name, fact) for name, fact in facts.items() if fact])


def _print_tables(tables: list[dict[str, Any]]) -> None:
    rows = []
    for table in tables:
        fixed = table["fixed_rows"]
        first = (
            table["name"],
            "dynamic" if fixed is None else f"{fixed:,}",
            f"{table['rows']:,}",
            f"{table['tombstones']:,}" if table["tombstones"] else "",
        )
        for plane, spec in table["planes"].items():
            bits = spec["codec"].get("bits")
            rows.append(
                (
                    *first,
                    plane,
                    f"{spec['width']} {spec['dtype']}",
                    f"{bits} bits" if bits else spec["codec"]["codec"],
                    size_text(spec["nbytes_about"]),
                )
            )
            first = ("", "", "", "")
    print_table(
        ["table", "ids", "rows here", "deleted", "plane", "width", "codec", "about"],
        rows,
        right=("ids", "rows here", "deleted", "width", "about"),
    )


def _print_widths(widths: dict[str, Any]) -> None:
    """Those that were given or measured, with their reasons: an exact version carries them too."""
    rows = [
        (
            name,
            f"{width['bits']} bits" if width["bits"] else "exact",
            "quantized" if width["optimizer"] else "exact",
            width["why"],
        )
        for name, width in widths["tables"].items()
    ]
    print_table(["widths of", "weight", "optimizer", "because"], rows)
    if widths["why"]:
        emit(f"  {widths['why']}")


def _print_files(files: list[dict[str, Any]]) -> None:
    rows = [
        (file["name"], file["kind"], file["shard"], f"{file['rows']:,}", size_text(file["nbytes"]))
        for file in files
    ]
    print_table(["file", "kind", "shard", "rows", "size"], rows, right=("shard", "rows", "size"))


def _planned(counters: dict[str, Any]) -> str:
    """What a run that plans itself had decided, with its reason."""
    from emberkeep.cli._progress import plan_line

    plan = (counters.get("auto") or {}).get("plan")
    return plan_line(plan).removeprefix("planned ") if plan else ""


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if value else ""
