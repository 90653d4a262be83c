"""Widths of tables: what a version says of them, what comes back, and which restores count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import VersionSpec
from emberkeep.checkpoint.widths import Width, Widths
from emberkeep.codecs import NonNegative, Quantized, Raw
from emberkeep.errors import ConfigError, DamageError
from emberkeep.inspect.summary import codec_text, describe
from emberkeep.repository import Repository
from emberkeep.runtime.fields import Fields
from emberkeep.tables import Adagrad, Adam, RowWiseAdagrad, Table
from tests.unit.checkpoint.test_saver import opened, started, train

WIDTHS = Widths(
    tables={
        "fixed": Width(bits=2, why="it is looked up by few"),
        "wide": Width(bits=8, optimizer=True),
    },
    why="somebody said so",
)


@pytest.mark.parametrize("layout", ["full", "consecutive", "grid"])
def test_every_table_has_its_own_codec_and_says_why(layout: Any) -> None:
    cluster = opened()
    keeper = started(cluster, spec=VersionSpec(layout=layout, widths=WIDTHS))
    train(cluster, np.random.default_rng(0), steps=10)
    keeper.save(1)
    manifest = keeper.wait()
    assert manifest is not None
    fresh = opened()
    started(fresh, keeper.repository.store).restore()
    expected = {
        "fixed": {"weight": Quantized(bits=2)},
        "wide": {"weight": Quantized(bits=8), "second_moment": NonNegative()},
        "dynamic": {},
    }
    for table, codecs in expected.items():
        ids, planes = cluster.read_all(table)
        got = fresh.read(table, ids)
        for plane, values in planes.items():
            codec = codecs.get(plane, Raw())
            kind, width = values.dtype, values.shape[1]
            again = codec.decode(codec.encode(values), rows=ids.size, width=width, dtype=kind)
            assert got[plane].tobytes() == again.tobytes(), (table, plane)
            assert isinstance(codec, Raw) == (got[plane].tobytes() == values.tobytes())
    described = describe(keeper.repository, manifest.version)
    assert described["version"]["why"] == "somebody said so"
    assert described["version"]["widths"] == WIDTHS.to_dict()
    assert described["version"]["codec"].startswith("weight 2 to 8 bits (exact in some tables)")
    by_table = {table["name"]: table["planes"]["weight"]["codec"] for table in described["tables"]}
    assert by_table["fixed"]["bits"] == 2
    assert by_table["dynamic"] == Raw().to_dict()
    assert Widths.of(manifest.described.object("widths")) == WIDTHS


def test_damaged_widths_are_damage() -> None:
    for tables in ({"a": {"bits": 5, "optimizer": False, "why": ""}}, {"a": 3}, {"a": {"bits": 2}}):
        with pytest.raises(DamageError):
            Widths.of(Fields("versions/1", {"why": "", "tables": tables}))


def test_a_table_that_is_not_there_is_refused() -> None:
    widths = Widths(tables={"missing": Width(bits=4)})
    with pytest.raises(
        ConfigError, match="names table 'missing', and the model has dynamic, fixed"
    ):
        started(opened(), spec=VersionSpec(widths=widths))


def lossy(store: Any) -> int:
    return Repository.open(store).restores(exact=False)


def test_restores_of_exact_versions_do_not_count_against_the_estimate() -> None:
    store, chosen = MemoryStore(), []
    spec = VersionSpec(layout="full", expected_restores=1)
    for _ in range(4):
        cluster = opened()
        keeper = started(cluster, store, spec=spec)
        keeper.restore()
        train(cluster, np.random.default_rng(0))
        keeper.save(1)
        chosen.append(keeper.wait().layout["codecs"]["weight"]["bits"])  # type: ignore[union-attr]
        assert keeper.close(2) is not None  # an exact one
    assert chosen == [2, 2, 2, 2]
    assert lossy(store) == 0
    assert Repository.open(store).restores(exact=True) == 3
    for _ in range(2):
        cluster = opened()
        keeper = started(cluster, store, spec=spec)
        keeper.restore()
        train(cluster, np.random.default_rng(0))
        keeper.save(1)
        chosen.append(keeper.wait().layout["codecs"]["weight"]["bits"])  # type: ignore[union-attr]
    assert chosen[4:] == [2, 2]  # of an exact version, then of one that is not
    assert lossy(store) == 1


@pytest.mark.parametrize("layout", ["intermittent", "consecutive", "grid"])
def test_what_builds_on_rows_that_were_changed_is_not_exact(layout: Any) -> None:
    """A run that goes on exactly after quantized versions: its increments are, its rows are not."""
    cluster, store, random = opened(), MemoryStore(), np.random.default_rng(0)
    keeper = started(cluster, store, spec=VersionSpec(layout=layout, bits=4))
    train(cluster, random, steps=8)
    keeper.save(1)
    keeper.wait()
    cluster = opened()
    keeper = started(cluster, store, spec=VersionSpec(layout=layout))
    keeper.restore()
    train(cluster, random)
    keeper.save(2)
    manifest = keeper.wait()
    assert manifest is not None
    assert manifest.layout["codecs"] == {}
    assert manifest.layout["lossy"] is (manifest.layout["kind"] != "full")
    before = lossy(store)
    started(opened(), store).restore()
    assert lossy(store) == before + manifest.layout["lossy"]


def test_optimizer_planes_that_no_table_has_change_nothing() -> None:
    cluster = opened()  # Adam: there is no accumulator
    keeper = started(cluster, spec=VersionSpec(layout="full", quantize_optimizer=True))
    train(cluster, np.random.default_rng(0))
    keeper.save(1)
    manifest = keeper.wait()
    assert manifest is not None
    assert manifest.layout["lossy"]
    assert codec_text(keeper.repository, manifest) == "second_moment 8 bits"


def test_what_is_stored_is_described_by_the_bits_that_it_takes() -> None:
    tables = [
        Table("row_wise", rows=50, dim=6, optimizer=RowWiseAdagrad(lr=0.1)),
        Table("narrow", rows=50, dim=1, optimizer=Adagrad(lr=0.1)),
        Table("moments", rows=50, dim=6, optimizer=Adam(lr=0.1)),
    ]
    expected = {
        "row_wise": "weight 4 bits, accumulator 16 bits",
        "narrow": "accumulator 16 bits",  # its weights would not become smaller
        "moments": "weight 4 bits, second_moment 8 bits",
    }
    for name, text in expected.items():
        cluster = opened([table for table in tables if table.name == name])
        keeper = started(cluster, spec=VersionSpec(bits=4, quantize_optimizer=True))
        keeper.save(1)
        manifest = keeper.wait()
        assert manifest is not None
        assert codec_text(keeper.repository, manifest) == text
