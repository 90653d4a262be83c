"""Mutations keep up with the sources: each still finds the text that it changes."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutations.rules import MUTATIONS, SOURCES, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.rule)
def test_every_mutation_applies(mutation: Mutation) -> None:
    path = SOURCES / "emberkeep" / mutation.file
    compile(mutation.applied(path.read_text()), str(path), "exec")


def test_every_rule_is_broken_by_one() -> None:
    rules = Counter(mutation.rule.split("-")[0] for mutation in MUTATIONS)
    assert set(rules) == {
        *(f"R{number}" for number in range(1, 16)),
        *(f"G{letter}" for letter in "abcde"),
        *(f"T{number}" for number in range(1, 10)),
    }
    assert len({mutation.rule for mutation in MUTATIONS}) == len(MUTATIONS)
