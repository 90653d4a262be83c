"""Click models over an embedding module: DLRM, DeepFM and PNN, and a baseline without embeddings.

Each model takes the embedding module that it looks rows up in: anything that maps ids to
`[batch, features, dim]`, `emberkeep.nn.EmbeddingBags` above all, but a plain torch module does as
well. `model(dense, ids)` returns logits `[batch]`; the sigmoid belongs to the loss.

The initial dense parameters depend on the seed alone: the global generator of torch is neither
read nor moved. Tensor names carry their axes: B batch, F features (embedded), N dense columns,
D dim.
"""

from emberkeep.models.baseline import DenseOnly
from emberkeep.models.deepfm import DeepFM
from emberkeep.models.dlrm import DLRM, KAGGLE, TERABYTE, DLRMShape
from emberkeep.models.layers import Ids
from emberkeep.models.pnn import PNN

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
