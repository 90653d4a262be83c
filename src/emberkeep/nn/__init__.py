"""Embedding modules for PyTorch whose rows live in Emberkeep's tables."""

from emberkeep.nn.embeddings import EmbeddingBags, Embeddings, KeyedJagged, RowOptimizer

__all__ = [
    "EmbeddingBags",
    "Embeddings",
    "KeyedJagged",
    "RowOptimizer",
]
