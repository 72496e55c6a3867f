"""GLM-4.5V (arXiv:2507.01006): GLM-4.1V's tower in front of a GLM-4.5, a mixture of experts.

Configuration fields that shape the arithmetic: GLM-4.1V's (see `glm4v.py`), and of text_config those of the experts
(see `glm4_moe.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from quire.layers import RotaryEmbedding
from quire.models.decoder import DecoderAttention
from quire.models.glm4_moe import Glm4MoeForCausalLM
from quire.models.glm4v import Glm4vForConditionalGeneration, with_sections

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Glm4vMoeText(Glm4MoeForCausalLM):
    attention_class: ClassVar = DecoderAttention
    supported_fields: ClassVar = Glm4MoeForCausalLM.supported_fields - {"use_qk_norm"}

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        return (RotaryEmbedding(config, parameters=with_sections(config)),)


class Glm4vMoeForConditionalGeneration(Glm4vForConditionalGeneration):
    text_class: ClassVar = Glm4vMoeText

    def make_tower(self, vision: PretrainedConfig) -> nn.Module:
        from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeVisionModel

        return Glm4vMoeVisionModel._from_config(vision)
