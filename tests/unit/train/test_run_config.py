from __future__ import annotations

import json
from dataclasses import replace

import pytest

from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError
from emberkeep.strategies import schedule
from emberkeep.tables import Adam, RowWiseAdagrad, Tier
from emberkeep.train.run_config import (
    DEMO,
    DataSettings,
    RowOptimizerSettings,
    RunConfig,
    TableSettings,
    demo,
)


def test_the_demo_with_overrides() -> None:
    assert demo() == DEMO
    changed = demo(["run.batch_size=64", "model.kind=pnn", "tables.dim=8"])
    assert changed == replace(
        DEMO,
        run=replace(DEMO.run, batch_size=64),
        model=replace(DEMO.model, kind="pnn"),
        tables=replace(DEMO.tables, dim=8),
    )


def test_settings_become_json() -> None:
    document = json.loads(json.dumps(DEMO.to_dict()))
    assert document["run"]["batch_size"] == DEMO.run.batch_size
    assert document["tables"]["rows"] is None


def test_the_optimizer_takes_what_it_has() -> None:
    assert RowOptimizerSettings().spec() == RowWiseAdagrad(lr=0.02)
    adam = RowOptimizerSettings(kind="adam", lr=0.1, betas=(0.8, 0.9), step="row")
    assert adam.spec() == Adam(lr=0.1, betas=(0.8, 0.9), step="row")
    with pytest.raises(ConfigError, match="kind: sgd has no setting 'momentum'"):
        RowOptimizerSettings(kind="sgd", momentum=0.9)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"source": "synthetic"}, "samples must be set"),
        ({"source": "synthetic", "samples": 10, "paths": ("a",)}, "paths are not read"),
        ({"source": "criteo"}, "paths must name the files"),
        ({"source": "criteo", "paths": ("a",), "dense": ("x",)}, "belong to parquet"),
        ({"source": "parquet", "paths": ("a",), "dense": ("x",)}, "dense and categories must"),
        ({"source": "synthetic", "samples": 1}, "samples must be 2 or more"),
        ({"source": "synthetic", "samples": 9, "test_fraction": 1.0}, "above 0 and below 1"),
    ],
)
def test_data_that_cannot_work(arguments: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        DataSettings(**arguments)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"kind": "dynamic"}, "capacity must be set"),
        ({"kind": "dynamic", "capacity": 5, "rows": 5}, "rows is for fixed tables"),
        ({"capacity": 5}, "capacity is for kind"),
        ({"dim": 0}, "dim must be 1 or more"),
        ({"on_full": "evict_oldest"}, "on_full is for"),
    ],
)
def test_tables_that_cannot_work(arguments: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        TableSettings(**arguments)


def test_files_need_a_number_of_rows() -> None:
    data = DataSettings(source="criteo", paths=("a.tsv",))
    with pytest.raises(ConfigError, match=r"tables\.rows must say"):
        RunConfig(data=data)
    RunConfig(data=data, tables=TableSettings(rows=10))
    RunConfig(data=data, tables=TableSettings(kind="dynamic", capacity=10))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["failures.count=1"], "failures end the run"),
        (["checkpoint.recovery=full"], "recovery needs versions"),
        (["checkpoint.path=x", "checkpoint.priority=mfu"], "priority is for"),
        (["checkpoint.path=x", "checkpoint.recovery=partial", "checkpoint.priority=mfu",
          "checkpoint.fraction=0.7"], "fraction"),
        (["checkpoint.path=x", "checkpoint.recovery=full", 'failures.at=["1 at 5"]'],
         "more shards than"),
        (["checkpoint.path=x", "checkpoint.recovery=full", 'failures.at=["1 @ 5"]'],
         "is no failure"),
        (["failures.count=1", "failures.mean_steps=3.0"], "leave one out"),
        (["cluster.shards=0"], "shards must be 1 or more"),
    ],
)  # fmt: skip
def test_failures_that_cannot_work(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        demo(overrides)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["tier.every=5 steps"], "every needs files"),
        (["tier.every=5 steps", "cluster.kind=ray"], "every needs files"),
        (["tier.path=x", "tier.memory=much"], "memory takes bytes"),
        (["tier.path=x", "tier.every=often"], "often"),
        (
            ["tier.path=x", "cluster.kind=connect", "cluster.addresses=['a:1']"],
            "start them with emberkeep serve --tier",
        ),
        (["tier.path=x", "tier.every=5 steps", "cluster.kind=ray"], "set checkpoint.path"),
        (
            [
                "tier.path=x",
                "tier.every=5 steps",
                "cluster.kind=ray",
                "cluster.workers=2",
                "checkpoint.path=y",
            ],
            "one process that trains",
        ),
        (["tier.path=x", "failures.count=1"], "failures end the run"),
    ],
)
def test_tiers_that_cannot_work(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        demo(overrides)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["parity.k=4"], "needs 5 shards"),
        (["parity.k=0"], "k must be"),
        (["parity.k=2", "parity.r=0", "cluster.shards=4"], "r must be"),
        (["parity.k=2", "parity.rebuild_share=2", "cluster.shards=4"], "rebuild_share"),
        (["parity.k=2", "tier.path=x", "cluster.shards=4"], "leave out parity.k"),
    ],
)
def test_parity_that_cannot_work(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        demo(overrides)


def test_batches_in_tiers_and_versions_in_a_repository() -> None:
    given = demo(
        ["tier.path=/x", "tier.every=50 steps", "checkpoint.path=/y", "checkpoint.every=1h"]
    )
    strategy = given.strategy()
    assert strategy.schedule == schedule("50 steps")
    assert strategy.remote == schedule("1h")
    on_servers = ["cluster.kind=connect", "cluster.addresses=['a:1']", "tier.every=50 steps"]
    assert demo([*on_servers, "checkpoint.path=/y"]).two_levels  # files are the servers'
    up = ["cluster.kind=ray", "cluster.name=up", "tier.every=50 steps", "checkpoint.path=/y"]
    assert demo(up).two_levels  # they have theirs from `cluster up --tier`


def test_a_tier_of_settings() -> None:
    assert demo().tier.spec() is None
    assert demo(["tier.path=/x", "tier.memory=1KB"]).tier.spec() == Tier("/x", memory=1000)


def test_parity_is_read_and_takes_the_place_of_recovery() -> None:
    assert demo().parity.spec() is None
    settings = demo(["parity.k=3", "cluster.shards=4", "failures.count=2"])
    assert settings.parity.spec() == Parity(k=3, r=1)


def test_failures_are_read_and_drawn() -> None:
    given = demo(
        ["cluster.shards=4", "checkpoint.path=x", "checkpoint.recovery=partial",
         'failures.at=["2 at 40", "0, 3 at 100 push"]', "failures.count=5"]
    )  # fmt: skip
    first, second, *drawn = given.failures.schedule(shards=4, steps=200)
    assert (first.shards, first.step, first.when) == ((2,), 40, "pull")
    assert (second.shards, second.step, second.when) == ((0, 3), 100, "push")
    assert len(drawn) == 5
    assert drawn == given.failures.schedule(shards=4, steps=200)[2:]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["job_duration=0s", "mtbf=1h"], r"checkpoint\.job_duration is a duration such as"),
        (["expected_restores=1", "bits=4"], r"checkpoint: give bits= or expected_restores="),
        (["bins=4"], r"checkpoint\.bins= and range_ratio= are for"),
        (["expected_restores=-1"], r"checkpoint\.expected_restores must be 0 or more"),
    ],
)
def test_a_complaint_names_its_key_or_its_section(overrides: list[str], complaint: str) -> None:
    given = ["checkpoint.path=runs/1", *(f"checkpoint.{each}" for each in overrides)]
    with pytest.raises(ConfigError, match=complaint):
        demo(given)
