"""What models are built of: modules where there are parameters, plain objects and functions elsewhere."""

from quire.layers.activation import activation, gated_activation
from quire.layers.attention import PagedAttention
from quire.layers.embedding import Embedding
from quire.layers.experts import ExpertLinear, Experts, Router
from quire.layers.factors import PositionFactors
from quire.layers.heads import HeadOrder, grouped_heads, head_order
from quire.layers.latent import LatentProjection, LatentRotary, LatentTable
from quire.layers.linear import Linear, MergedLinear
from quire.layers.mamba import Mamba2, MambaSpec
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.rotary import ROTARY_FIELDS, RotaryEmbedding, RotaryTable
from quire.layers.rows import gathered, repeated
from quire.layers.segments import Segments

__all__ = [
    "ROTARY_FIELDS",
    "Embedding",
    "ExpertLinear",
    "Experts",
    "HeadOrder",
    "LatentProjection",
    "LatentRotary",
    "LatentTable",
    "LayerNorm",
    "Linear",
    "Mamba2",
    "MambaSpec",
    "MergedLinear",
    "PagedAttention",
    "PositionFactors",
    "RMSNorm",
    "RotaryEmbedding",
    "RotaryTable",
    "Router",
    "Segments",
    "activation",
    "gated_activation",
    "gathered",
    "grouped_heads",
    "head_order",
    "repeated",
]
