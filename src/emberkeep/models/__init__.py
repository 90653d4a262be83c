"""Click models over an embedding module: DLRM, DeepFM and PNN, and a baseline without them."""

from emberkeep.models.dlrm import DLRM, KAGGLE, PNN, TERABYTE, DeepFM, DenseOnly, DLRMShape, Ids

__all__ = [
    "DLRM",
    "KAGGLE",
    "PNN",
    "TERABYTE",
    "DLRMShape",
    "DeepFM",
    "DenseOnly",
    "Ids",
]
