"""MiniCPM3: multi-head latent attention, with MiniCPM's multipliers of embeddings, residual stream and scores.

The configuration's class came with the checkpoints as code, which is never run, before transformers had one:
`MiniCPM3Config` stands for both. Configuration fields that shape the arithmetic, beyond latent attention's (see
`latent.py`): MiniCPM's (see `minicpm.py`), mlp_bias; rotary types are those of any decoder ("longrope").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PretrainedConfig

from quire.models.decoder import Biases
from quire.models.latent import LatentDecoderForCausalLM
from quire.models.minicpm import MiniCPMForCausalLM

if TYPE_CHECKING:
    from quire.models.decoder import Multipliers


class MiniCPM3Config(PretrainedConfig):  # type: ignore[misc]  # transformers gives it no type
    """What the files leave out."""

    model_type = "minicpm3"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 73448, "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62,
        "num_attention_heads": 40, "num_key_value_heads": None, "hidden_act": "silu", "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 10000.0, "rope_scaling": None,
        "attention_bias": False, "mlp_bias": False, "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": None, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
    }  # fmt: skip

    def __init__(self, **fields: Any) -> None:
        known = {**self.DEFAULTS, **fields}
        known["v_head_dim"] = known["v_head_dim"] or known["hidden_size"] // known["num_attention_heads"]
        # transformers looks at it when it reads "longrope"
        self.max_position_embeddings = known["max_position_embeddings"]
        super().__init__(**known)


class MiniCPM3ForCausalLM(LatentDecoderForCausalLM):
    interleaved: ClassVar = False
    supported_fields: ClassVar = LatentDecoderForCausalLM.supported_fields | {"mlp_bias", "scale_emb", "scale_depth"}

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return super().biases(config)._replace(mlp=config.mlp_bias)

    @classmethod
    def multipliers(cls, config: PretrainedConfig) -> Multipliers:
        return MiniCPMForCausalLM.multipliers(config)
