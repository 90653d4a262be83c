"""Embedding modules for PyTorch whose rows live in Emberkeep's tables."""

from emberkeep.nn.averaged_model import AveragedModel
from emberkeep.nn.embeddings import EmbeddingBags, Embeddings
from emberkeep.nn.jagged import KeyedJagged
from emberkeep.nn.row_optimizer import RowOptimizer

__all__ = [
    "AveragedModel",
    "EmbeddingBags",
    "Embeddings",
    "KeyedJagged",
    "RowOptimizer",
]
