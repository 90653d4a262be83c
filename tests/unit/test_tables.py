"""Specs of tables and optimizers refuse what is wrong when they are written down."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from emberkeep.errors import ConfigError
from emberkeep.tables import SGD, Adam, Momentum, Normal, Table, Tier, Uniform, optimizer_from


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"init": 0.1}, r"init= takes emberkeep.Uniform"),
        ({"init": Uniform}, r"init= takes emberkeep.Uniform"),
        ({"tier": "/disk"}, r"tier= takes emberkeep.Tier"),
        ({"features": [1, 2]}, r"features must be names, not \[1, 2\]"),
        ({"features": [""]}, "features must be names"),
        ({"rows": None, "capacity": 4, "padding_idx": 2**63}, "is no id: those have 64 bits"),
    ],
)
def test_a_table_of_other_parts_is_refused_by_its_name(
    wrong: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=f"table 'users': {complaint}|{complaint}"):
        Table("users", **{"dim": 4, "rows": 4, **wrong})


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Adam(lr=0.1, betas=(0.9,)), "betas must be two numbers"),
        (lambda: Adam(lr=0.1, betas=(0.9, 0.99, 0.999)), "betas must be two numbers"),
        (lambda: Adam(lr=0.1, betas=0.9), "betas must be two numbers"),
        (lambda: SGD(lr="0.1"), "lr must be a number, not '0.1'"),
        (lambda: SGD(lr=None), "lr must be a number, not None"),
        (lambda: SGD(lr=True), "lr must be a number, not True"),
        (lambda: SGD(lr=0.1, max_norm="1"), "max_norm must be a number"),
        (lambda: Momentum(lr=0.1, nesterov="no"), "nesterov is True or False"),
        (lambda: Uniform("a", "b"), "low must be a number"),
        (lambda: Normal(std=None), "std must be a number"),
        (lambda: Normal(std=10**400), "std is too large for a float"),
        (lambda: Tier("x", memory="1GB", exclusive="no"), "exclusive is True or False"),
        (lambda: Tier(None, memory="1GB"), "path must name a directory"),
        (lambda: Tier("x", memory="9" * 400 + "B"), "memory takes bytes"),
        (lambda: optimizer_from({"optimizer": ["sgd"]}), "optimizer must be one of"),
    ],
)
def test_specs_refuse_other_types(make: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()


def test_numbers_of_numpy_are_stored_as_plain_ones() -> None:
    described = Adam(lr=np.float32(0.5), betas=np.array([0.5, 0.25])).describe()
    assert optimizer_from(json.loads(json.dumps(described))) == Adam(lr=0.5, betas=(0.5, 0.25))
    table = Table("users", dim=4, rows=4, init=Uniform(np.float32(-0.5), np.float32(0.5)))
    assert json.loads(json.dumps(table.describe_origin(0)))["low"] == -0.5
    assert table.origin(0) == Table("users", dim=4, rows=4, init=Uniform(-0.5, 0.5)).origin(0)


@pytest.mark.parametrize(
    ("whole", "floats"),
    [
        (Uniform(-1, 1), Uniform(-1.0, 1.0)),
        (Uniform(0, 0.5), Uniform(0.0, 0.5)),
        (Normal(0, 2), Normal(0.0, 2.0)),
    ],
)
def test_a_whole_number_makes_the_same_rows_however_it_is_written(
    whole: Uniform | Normal, floats: Uniform | Normal
) -> None:
    ours, theirs = (Table("users", dim=4, rows=4, init=init) for init in (whole, floats))
    assert ours.origin(3) == theirs.origin(3)
    assert json.dumps(ours.describe_origin(3)) == json.dumps(theirs.describe_origin(3))
    assert str(ours.init) == str(theirs.init)


def test_origins_of_earlier_releases_are_known() -> None:
    """Those that wrote whole numbers as the model did."""
    table = Table("users", dim=4, rows=4, init=Uniform(-1, 1))

    def earlier(init: str) -> str:
        text = f"{table.key(3)} {init} False"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    assert table.origin(3) == earlier("Uniform(low=-1.0, high=1.0)")
    assert table.earlier_origins(3) == {
        earlier("Uniform(low=-1, high=1)"),
        earlier("Uniform(low=-1, high=1.0)"),
        earlier("Uniform(low=-1.0, high=1)"),
    }
    assert not Table("users", dim=4, rows=4, init=Uniform(-0.5, 0.5)).earlier_origins(3)
