"""Embedding modules for PyTorch whose rows live in Emberkeep's tables."""

from emberkeep.nn.embeddings import EmbeddingBags, Embeddings
from emberkeep.nn.jagged import KeyedJagged
from emberkeep.nn.row_optimizer import RowOptimizer

__all__ = [
    "EmbeddingBags",
    "Embeddings",
    "KeyedJagged",
    "RowOptimizer",
]
