"""`emberkeep show`: one version, and what storage is used for."""

from __future__ import annotations

import json
from typing import Any

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
)
from emberkeep.cli._shell import command


@command
def show(url: Url, version: VersionOption = None, as_json: JsonOption = False) -> None:
    """Show what a version holds, and what the repository's storage is used for."""
    from emberkeep.inspection import describe

    repository, _ = open_repository(url)
    described = describe(repository, choose(repository, version))
    if as_json:
        print_json(described)
        return
    _print_facts(described)
    emit("")
    _print_tables(described["tables"])
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


def _print_facts(described: dict[str, Any]) -> None:
    version, repository = described["version"], described["repository"]
    kind, chain = kind_text(version["kind"]), numbers_text(version["chain"])
    facts = {
        "version": f"{version['number']}, step {version['step']:,}, saved {version['created']}",
        "kind": f"{kind}, layout {version['layout']}; a restore reads {chain}",
        "stored": f"{version['codec']}; saved by {count_text(version['shards'] or 1, 'shard')}",
        "tags": ", ".join(version["tags"]),
        "reader": _plain(version["reader"]),
        "user state": _plain(version["user"]),
        "counters": _plain(version["counters"]),
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


def _print_files(files: list[dict[str, Any]]) -> None:
    rows = [
        (file["name"], file["kind"], file["shard"], f"{file['rows']:,}", size_text(file["nbytes"]))
        for file in files
    ]
    print_table(["file", "kind", "shard", "rows", "size"], rows, right=("shard", "rows", "size"))


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if value else ""
