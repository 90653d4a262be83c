"""How good predictions are: AUC and log-loss, exact and in float64."""

from __future__ import annotations

import numpy as np

from emberkeep._types import F32, F64
from emberkeep.errors import DataError

_Floats = F32 | F64


def auc(labels: _Floats, scores: _Floats) -> float:
    """The chance that a random positive scores above a random negative; a tie counts half.

    Exact: computed from mid-ranks over all samples, no histogram. Only the order of `scores`
    matters, so logits and probabilities give the same value. NaN where one of the two classes is
    missing, as no pair exists then, or a label is.
    """
    truth = _checked(labels, scores)
    if np.isnan(truth).any():
        return float("nan")
    positive = truth > 0.5
    positives = int(np.count_nonzero(positive))
    negatives = len(positive) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    # Runs of equal scores share the mean of their ranks.
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    ends = np.append(starts[1:], len(ordered))
    mid_ranks = np.repeat((starts + ends + 1) / 2.0, ends - starts)
    rank_sum = float(mid_ranks[positive[order]].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)


def log_loss(labels: _Floats, logits: _Floats) -> float:
    """Mean binary cross-entropy of logits; finite for every finite logit."""
    truth = _checked(labels, logits)
    x = logits.astype(np.float64)
    return float(np.mean(np.maximum(x, 0.0) - x * truth + np.log1p(np.exp(-np.abs(x)))))


def _checked(labels: _Floats, scores: _Floats) -> F64:
    if labels.shape != scores.shape or labels.ndim != 1 or len(labels) == 0:
        raise DataError(
            f"a metric needs as many scores as labels, and at least one: got {labels.shape} labels "
            f"and {scores.shape} scores"
        )
    if not np.all(np.isfinite(scores)):
        raise DataError("the model predicts NaN or infinity: training diverged, lower the rate")
    return labels.astype(np.float64)
