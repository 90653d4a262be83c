"""Mutations of servers keep up with the sources: each still finds the text that it changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from emberkeep.testing.simulation.scenarios import SCENARIOS
from tests.mutations.rules import SOURCES, Mutation
from tests.mutations.run import path_of
from tests.mutations.server_rules import SERVER_MUTATIONS, SIMULATED
from tests.mutations.simulated import SCENARIOS_OF, scenarios_of


@pytest.mark.parametrize("mutation", SERVER_MUTATIONS, ids=lambda mutation: mutation.rule)
def test_every_mutation_applies(mutation: Mutation) -> None:
    path = SOURCES / "emberkeep" / mutation.file
    compile(mutation.applied(path.read_text()), str(path), "exec")


def test_every_rule_is_broken_by_one() -> None:
    rules = {mutation.rule.split("-")[0] for mutation in SERVER_MUTATIONS}
    assert rules == {*(f"S{number}" for number in range(1, 16)), "W1", "W2", "W3"}
    others = {each.rule for each in SERVER_MUTATIONS if each not in SIMULATED}
    assert others == {"S9", "S13", "S14", "W3"}
    assert len({mutation.rule for mutation in SERVER_MUTATIONS}) == len(SERVER_MUTATIONS)


def test_what_notices_the_others_is_a_default_test() -> None:
    for mutation in SERVER_MUTATIONS:
        test = SOURCES.parent / path_of(mutation.noticed_by)
        assert test.exists()
        assert "pytestmark = pytest.mark.soak" not in test.read_text()


def test_every_mutation_has_scenarios_of_its_own_rule() -> None:
    """ "S1" begins the names of S10, S11 and S12, too, whose scenarios are others."""
    by_name = {mutation.rule: scenarios_of(mutation) for mutation in SIMULATED}
    assert all(by_name.values())
    assert by_name["S1-epoch"] == SCENARIOS_OF["S1"]
    assert by_name["S12"] == SCENARIOS_OF["S12"]
    assert {name for names in SCENARIOS_OF.values() for name in names} <= set(SCENARIOS)


def test_simulated_clusters_notice_what_they_had_ceased_to_notice() -> None:
    """In a process of its own, which forks before it has threads."""
    rules = ["S3-settle", "S4-flight", "S7", "S10-resend"]
    command = [sys.executable, "-m", "tests.mutations.simulated", "--seeds", "0", "--seconds", "60"]
    ended = subprocess.run(
        [*command, *rules], cwd=SOURCES.parent, capture_output=True, text=True, timeout=600
    )
    assert f"{len(rules)} of {len(rules)} caught" in ended.stdout, ended.stdout + ended.stderr
