"""DeepSeek V2 (arXiv:2405.04434): multi-head latent attention, and experts of which some serve all tokens.

Configuration fields that shape the arithmetic, beyond latent attention's (see `latent.py`): n_routed_experts,
num_experts_per_tok, moe_intermediate_size, n_shared_experts, first_k_dense_replace (layers without experts),
routed_scaling_factor, topk_method ("group_limited_greedy": experts of the topk_group best of n_group groups alone),
mlp_bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.kernels.experts import Routing
from quire.models.base import refuse
from quire.models.decoder import Biases, GatedMLP
from quire.models.latent import LatentDecoderForCausalLM
from quire.models.sparse import SparseDecoderForCausalLM, SparseMLP

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_METHODS = ("greedy", "group_limited_greedy")


class SharedExpertsMLP(SparseMLP):
    """Experts, and a feed-forward beside them that all tokens go through."""

    def __init__(self, config: PretrainedConfig, biases: Biases, routing: Routing) -> None:
        super().__init__(config, config.n_routed_experts, config.moe_intermediate_size, routing)
        self.shared_experts: GatedMLP | None = None
        if config.n_shared_experts:
            self.shared_experts = GatedMLP(config, biases, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = None if self.shared_experts is None else self.shared_experts(x)
        return self.experts(x, self.gate(x, torch.float32), shared=shared)


class DeepseekV2ForCausalLM(LatentDecoderForCausalLM, SparseDecoderForCausalLM):
    supported_fields: ClassVar = LatentDecoderForCausalLM.supported_fields | {"mlp_bias", "routed_scaling_factor"}
    fixed_fields: ClassVar = {"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False}

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.topk_method not in _METHODS:
            refuse(config, "topk_method", f"it must be one of {', '.join(_METHODS)}")

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return super().biases(config)._replace(mlp=config.mlp_bias)

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        if layer < config.first_k_dense_replace:
            return super().mlp(config, biases, layer)
        groups = {}
        if config.topk_method == "group_limited_greedy":
            groups = {"groups": config.n_group, "top_groups": config.topk_group}
        return SharedExpertsMLP(config, biases, Routing(**groups, scale=config.routed_scaling_factor))
