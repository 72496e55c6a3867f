"""Ernie 4.5's mixtures of experts: Ernie's attention, experts chosen with a correction, and shared ones beside them.

Configuration fields that shape the arithmetic, beyond the dense models' (see `ernie4_5.py`): moe_num_experts, moe_k,
moe_intermediate_size, moe_num_shared_experts, moe_norm_min (the least that the chosen ones' shares are divided by),
moe_layer_start_index, moe_layer_end_index and moe_layer_interval (which layers have experts at all). Routers are
float32 in a model of any dtype, as rounded ones would choose other experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.kernels.experts import Routing
from quire.layers import Linear
from quire.models.decoder import Biases, GatedMLP
from quire.models.ernie4_5 import Ernie4_5ForCausalLM
from quire.models.sparse import SparseDecoderForCausalLM, SparseMLP

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Ernie4_5MoeMLP(SparseMLP):
    def __init__(self, config: PretrainedConfig, biases: Biases) -> None:
        routing = Routing(renormalise=True, least=config.moe_norm_min)
        super().__init__(config, config.moe_num_experts, config.moe_intermediate_size, routing)
        self.moe_statics = nn.Module()
        correction = torch.empty(1, config.moe_num_experts, dtype=torch.float32)
        self.moe_statics.register_buffer("e_score_correction_bias", correction)
        self.shared_experts: GatedMLP | None = None
        if config.moe_num_shared_experts > 0:
            inner = config.moe_intermediate_size * config.moe_num_shared_experts
            self.shared_experts = GatedMLP(config, biases, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.moe_statics._buffers["e_score_correction_bias"]
        assert bias is not None
        shared = None if self.shared_experts is None else self.shared_experts(x)
        return self.experts(x, self.gate(x.float()), bias.view(-1), shared)


class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM, SparseDecoderForCausalLM):
    supported_fields: ClassVar = Ernie4_5ForCausalLM.supported_fields | {"moe_norm_min"}
    # The published files also have layers that guess the tokens after the next, which transformers leaves out, too.
    checkpoint_ignored = (*Ernie4_5ForCausalLM.checkpoint_ignored, r"(model\.)?mtp_.+")
    recorded_operations = frozenset({"_to_copy", "to"})  # the routers' inputs, as float32

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=config.use_bias)

    def keeps_float32(self, name: str) -> bool:
        return name.endswith(".gate.weight")

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        by_step = (layer + 1) % config.moe_layer_interval == 0
        if by_step and config.moe_layer_start_index <= layer <= config.moe_layer_end_index:
            return Ernie4_5MoeMLP(config, biases)
        return super().mlp(config, biases, layer)
