"""How rows and ids become bytes in a checkpoint, and what of them comes back."""

from emberkeep.codecs.ids import pack_ids, unpack_ids
from emberkeep.codecs.row_codecs import (
    Codec,
    NonNegative,
    NonNegative8,
    Quantized,
    Raw,
    codec_from_dict,
    is_plane,
)

__all__ = [
    "Codec",
    "NonNegative",
    "NonNegative8",
    "Quantized",
    "Raw",
    "codec_from_dict",
    "is_plane",
    "pack_ids",
    "unpack_ids",
]
