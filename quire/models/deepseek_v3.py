"""DeepSeek V3 and R1 (arXiv:2412.19437): V2's attention and experts, which are chosen with a correction.

Configuration fields that shape the arithmetic, beyond V2's (see `deepseek_v2.py`): norm_topk_prob, rope_interleave. An
expert's score is the logistic function of its logit; a group's, the sum of its two best, corrected. Further layers,
which predict more than one token (num_nextn_predict_layers), are left in the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from quire.models.decoder import Biases
from quire.models.latent import LatentDecoderForCausalLM
from quire.models.sparse import CorrectedMLP, SparseDecoderForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class DeepseekV3ForCausalLM(LatentDecoderForCausalLM, SparseDecoderForCausalLM):
    supported_fields: ClassVar = LatentDecoderForCausalLM.supported_fields | {
        "norm_topk_prob", "rope_interleave", "routed_scaling_factor",
    }  # fmt: skip
    fixed_fields: ClassVar = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

    @classmethod
    def has_experts(cls, config: PretrainedConfig, layer: int) -> bool:
        return bool(layer >= config.first_k_dense_replace)

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        if not cls.has_experts(config, layer):
            return super().mlp(config, biases, layer)
        shared = config.moe_intermediate_size * (config.n_shared_experts or 0)
        return CorrectedMLP(config, config.n_routed_experts, shared, biases)
