"""MiniMax-M2: norms of whole queries and keys, partial rotation, and experts that are chosen with a correction.

Configuration fields that shape the arithmetic, beyond the decoder's (see `decoder.py`): partial_rotary_factor or
rotary_dim; num_local_experts, num_experts_per_tok. A token's shares are the logistic functions of its logits, divided
by the chosen ones' sum. The modules that guess further tokens (use_mtp) are not loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.kernels.experts import Routing
from quire.layers import ROTARY_FIELDS
from quire.models.decoder import Biases
from quire.models.mixtral import MIXTRAL_NAMES, MIXTRAL_RENAMES
from quire.models.olmo2 import Olmo2Attention
from quire.models.sparse import SparseDecoderForCausalLM, SparseMLP

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class MiniMaxM2MLP(SparseMLP):
    def __init__(self, config: PretrainedConfig) -> None:
        count = config.num_local_experts
        super().__init__(config, count, config.intermediate_size, Routing("sigmoid", renormalise=True))
        self.register_buffer("e_score_correction_bias", torch.empty(count, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x, torch.float32), self._buffers["e_score_correction_bias"])


class MiniMaxM2ForCausalLM(SparseDecoderForCausalLM):
    turns_partly: ClassVar = True
    attention_class: ClassVar = Olmo2Attention
    # Of published files: transformers makes partial_rotary_factor of rotary_dim.
    supported_fields: ClassVar = ROTARY_FIELDS | {"rotary_dim"}
    fixed_fields: ClassVar = {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid",
                              "use_routing_bias": True, "shared_intermediate_size": 0}  # fmt: skip
    checkpoint_renames = (
        (r"(.+)\.block_sparse_moe\.e_score_correction_bias", r"\1.mlp.e_score_correction_bias"),
        *MIXTRAL_RENAMES,
    )
    checkpoint_ignored = (*SparseDecoderForCausalLM.checkpoint_ignored, r"model\.mtp.+")
    old_names = MIXTRAL_NAMES

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        return MiniMaxM2MLP(config)
