"""Mixtral (arXiv:2401.04088): Llama's attention, and experts in every layer.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): num_local_experts,
num_experts_per_tok, sliding_window. A token's shares are the softmax over all experts, divided by the chosen ones' sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from quire.kernels.experts import Routing
from quire.layers import ROTARY_FIELDS
from quire.models.decoder import Biases
from quire.models.sparse import SparseDecoderForCausalLM, SparseMLP

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Layers of an expert as Mixtral's checkpoints call them -> our names.
MIXTRAL_RENAMES = (
    (r"(.+)\.block_sparse_moe\.gate\.weight", r"\1.mlp.gate.weight"),
    (r"(.+)\.block_sparse_moe\.experts\.(\d+)\.w1\.weight", r"\1.mlp.experts.\2.gate_proj.weight"),
    (r"(.+)\.block_sparse_moe\.experts\.(\d+)\.w2\.weight", r"\1.mlp.experts.\2.down_proj.weight"),
    (r"(.+)\.block_sparse_moe\.experts\.(\d+)\.w3\.weight", r"\1.mlp.experts.\2.up_proj.weight"),
)
MIXTRAL_NAMES = (
    (r"\.mlp\b", ".block_sparse_moe"), (r"\.gate_proj\b", ".w1"), (r"\.down_proj\b", ".w2"), (r"\.up_proj\b", ".w3"),
)  # fmt: skip


class MixtralForCausalLM(SparseDecoderForCausalLM):
    supported_fields: ClassVar = ROTARY_FIELDS | {"sliding_window"}
    checkpoint_renames = MIXTRAL_RENAMES
    old_names = MIXTRAL_NAMES

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        return SparseMLP(config, config.num_local_experts, config.intermediate_size, Routing(renormalise=True))
