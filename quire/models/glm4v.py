"""GLM-4.1V (arXiv:2507.01006): Qwen2-VL's positions and patches, and a tower of GLM's own in front of a GLM-4.

Configuration fields that shape the arithmetic: vision_config (depth, hidden_size, intermediate_size, num_heads,
hidden_act, attention_bias, rms_norm_eps, image_size, patch_size, spatial_merge_size, temporal_patch_size,
out_hidden_size), text_config (a GLM-4-0414 with `mrope_section` among its rotary parameters), image_token_id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from quire.layers import RotaryEmbedding
from quire.layers.rotary import rope_parameters
from quire.models.base import refuse
from quire.models.decoder import Biases, DecoderForCausalLM
from quire.models.glm import Glm4ForCausalLM
from quire.models.qwen2_vl import Qwen2VLForConditionalGeneration

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SECTIONS = [8, 12, 12]  # of a configuration that names none


def with_sections(config: PretrainedConfig) -> dict[str, Any]:
    """The rotary parameters, of which mrope_section is always one."""
    return {"mrope_section": _SECTIONS, **rope_parameters(config)}


class Glm4vText(Glm4ForCausalLM):
    """Query, key and value have biases, whatever attention_bias says."""

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=True)

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        return (RotaryEmbedding(config, interleaved=True, parameters=with_sections(config)),)


class Glm4vForConditionalGeneration(Qwen2VLForConditionalGeneration):
    # A video's features would take the image's token, each frame behind its time: videos are not served.
    token_id_fields: ClassVar = {"image": "image_token_id"}
    tower_width: ClassVar = "out_hidden_size"
    text_class: ClassVar[type[DecoderForCausalLM]] = Glm4vText

    def make_tower(self, vision: PretrainedConfig) -> nn.Module:
        from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel

        return Glm4vVisionModel._from_config(vision)

    @classmethod
    def check_tower(cls, config: PretrainedConfig) -> None:
        super().check_tower(config)
        side, patch = config.vision_config.image_size, config.vision_config.patch_size
        if type(side) is not int or side < patch:
            refuse(config, "vision_config.image_size", "a patch must fit, or no place has an embedding", side)
