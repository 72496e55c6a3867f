"""GLM-4.7-Flash: DeepSeek V3's layers, of which mlp_layer_types says which have experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from quire.models.deepseek_v3 import DeepseekV3ForCausalLM
from quire.models.sparse import check_mlp_layer_types

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    supported_fields: ClassVar = DeepseekV3ForCausalLM.supported_fields | {"mlp_layer_types"}
    fixed_fields: ClassVar = {**DeepseekV3ForCausalLM.fixed_fields, "first_k_dense_replace": 1}

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        check_mlp_layer_types(config)

    @classmethod
    def has_experts(cls, config: PretrainedConfig, layer: int) -> bool:
        return bool(config.mlp_layer_types[layer] == "sparse")
