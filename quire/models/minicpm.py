"""MiniCPM (arXiv:2404.06395): Llama with multipliers of embeddings, residual stream and scores.

The configuration's class comes with the checkpoints as code, which is never run: `MiniCPMConfig` stands for it.
Configuration fields that shape the arithmetic, beyond Llama's (see `llama.py`): scale_emb; scale_depth, divided by the
root of the number of layers; dim_model_base, which divided by hidden_size multiplies the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PretrainedConfig

from quire.models.base import refuse
from quire.models.decoder import Multipliers
from quire.models.llama import LlamaForCausalLM


class MiniCPMConfig(PretrainedConfig):  # type: ignore[misc]  # transformers gives it no type
    """What the files leave out."""

    model_type = "minicpm"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 10000.0, "rope_scaling": None,
        "attention_bias": False, "scale_emb": 1, "dim_model_base": 1, "scale_depth": 1,
    }  # fmt: skip

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{**self.DEFAULTS, **fields})


class MiniCPMForCausalLM(LlamaForCausalLM):
    supported_fields: ClassVar = (LlamaForCausalLM.supported_fields - {"mlp_bias"}) | {"scale_emb", "scale_depth"}

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if getattr(config, "sparse_config", None) is not None:
            way_out = "hf_overrides={'sparse_config': None} serves the model with full attention"
            refuse(config, "sparse_config", f"attention that leaves out blocks of long texts is not; {way_out}")

    @classmethod
    def multipliers(cls, config: PretrainedConfig) -> Multipliers:
        return Multipliers(
            float(config.scale_emb),
            config.scale_depth / config.num_hidden_layers**0.5,
            config.dim_model_base / config.hidden_size,
        )
