from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.data.accuracy import auc, log_loss
from emberkeep.errors import DataError


def auc_by_pairs(labels: np.ndarray, scores: np.ndarray) -> float:
    """The definition, pair by pair."""
    above = [
        1.0 if p > n else 0.5 if p == n else 0.0
        for p in scores[labels == 1]
        for n in scores[labels == 0]
    ]
    return float(np.mean(above))


@given(st.lists(st.tuples(st.booleans(), st.integers(-4, 4)), min_size=2, max_size=60))
def test_auc_equals_its_definition_with_ties(samples: list[tuple[bool, int]]) -> None:
    labels = np.array([float(label) for label, _ in samples], np.float32)
    scores = np.array([float(score) for _, score in samples], np.float32)
    if labels.min() == labels.max():
        assert math.isnan(auc(labels, scores))
    else:
        assert auc(labels, scores) == pytest.approx(auc_by_pairs(labels, scores), abs=1e-12)


def test_auc_depends_on_the_order_alone() -> None:
    random = np.random.default_rng(1)
    labels = random.integers(0, 2, 1000).astype(np.float32)
    logits = random.normal(size=1000)
    assert auc(labels, logits) == auc(labels, 1 / (1 + np.exp(-logits)))
    assert auc(labels, np.zeros(1000)) == 0.5


def test_log_loss_equals_its_definition() -> None:
    random = np.random.default_rng(2)
    labels = random.integers(0, 2, 500).astype(np.float32)
    logits = random.normal(size=500).astype(np.float32)
    chance = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = -np.mean(labels * np.log(chance) + (1 - labels) * np.log(1 - chance))
    assert log_loss(labels, logits) == pytest.approx(expected, rel=1e-12)


def test_log_loss_is_finite_for_large_logits() -> None:
    assert log_loss(np.array([1.0, 0.0]), np.array([-1000.0, 1000.0])) == 1000.0


@pytest.mark.parametrize("metric", [auc, log_loss])
def test_a_missing_label_counts_for_neither_class(metric) -> None:
    assert math.isnan(metric(np.array([1.0, np.nan, 0.0]), np.array([0.5, 0.9, 0.1])))


@pytest.mark.parametrize("metric", [auc, log_loss])
def test_what_cannot_be_judged_is_refused(metric) -> None:
    with pytest.raises(DataError, match="as many scores as labels"):
        metric(np.zeros(2), np.zeros(3))
    with pytest.raises(DataError, match="at least one"):
        metric(np.zeros(0), np.zeros(0))
    with pytest.raises(DataError, match="diverged"):
        metric(np.array([0.0, 1.0]), np.array([0.0, np.nan]))
