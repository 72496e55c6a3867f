"""What models are built of: modules where there are parameters, plain objects and functions elsewhere."""

from quire.models.layers.activation import activation, gated_activation
from quire.models.layers.attention import PagedAttention
from quire.models.layers.embedding import Embedding
from quire.models.layers.linear import Linear, MergedLinear
from quire.models.layers.norm import LayerNorm, RMSNorm
from quire.models.layers.rotary import ROTARY_FIELDS, RotaryEmbedding, RotaryTable
from quire.models.layers.rows import gathered, repeated

__all__ = [
    "ROTARY_FIELDS",
    "Embedding",
    "LayerNorm",
    "Linear",
    "MergedLinear",
    "PagedAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "RotaryTable",
    "activation",
    "gated_activation",
    "gathered",
    "repeated",
]
