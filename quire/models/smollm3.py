"""SmolLM3: Llama in which every fourth layer does not rotate.

Configuration fields that shape the arithmetic, beyond Llama's (see `llama.py`): no_rope_layers (for each layer 1 where
it rotates, and 0), and sliding_window in the layers that layer_types calls sliding, with use_sliding_window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from quire.models.base import refuse
from quire.models.decoder import WINDOW_FIELDS
from quire.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SmolLM3ForCausalLM(LlamaForCausalLM):
    # no_rope_layer_interval: transformers makes no_rope_layers of it.
    supported_fields: ClassVar = (
        LlamaForCausalLM.supported_fields | WINDOW_FIELDS | {"no_rope_layers", "no_rope_layer_interval"}
    )

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if len(config.no_rope_layers) != config.num_hidden_layers:
            refuse(config, "no_rope_layers", "it must have a number for each layer")
        if "sliding_attention" in config.layer_types and not (config.use_sliding_window and config.sliding_window):
            refuse(config, "layer_types", "there are no sliding layers without use_sliding_window and sliding_window")

    @classmethod
    def rotary_of(cls, config: PretrainedConfig, layer: int) -> int:
        return 0 if config.no_rope_layers[layer] else -1
