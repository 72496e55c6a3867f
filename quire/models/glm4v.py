"""GLM-4.1V (arXiv:2507.01006): Qwen2-VL's positions and patches, and a tower of GLM's own in front of a GLM-4.

Configuration fields that shape the arithmetic: vision_config (depth, hidden_size, intermediate_size, num_heads,
hidden_act, attention_bias, rms_norm_eps, image_size, patch_size, spatial_merge_size, temporal_patch_size,
out_hidden_size), text_config (a GLM-4-0414 with `mrope_section` among its rotary parameters), image_token_id,
video_token_id. A video's frames, of which a patch has some, stand each as an image in a prompt, before the second in
which it is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from quire.layers import RotaryEmbedding
from quire.layers.rotary import rope_parameters
from quire.models.base import refuse
from quire.models.decoder import Biases, DecoderForCausalLM
from quire.models.glm import Glm4ForCausalLM
from quire.models.qwen2_vl import Qwen2VLForConditionalGeneration
from quire.models.vision.base import MediaInputs
from quire.models.vision.video import between, frames_apart, layout_of
from quire.types import MediaKind, MediaLayout, PlaceholderRange

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_START, _END = "<|begin_of_image|>", "<|end_of_image|>"
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
    # A video's features take the image's token; its own is its marker.
    token_id_fields: ClassVar = {"image": "image_token_id", "video": "image_token_id"}
    tower_width: ClassVar = "out_hidden_size"
    text_class: ClassVar[type[DecoderForCausalLM]] = Glm4vText

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self._encode: Callable[[str], list[int]] | None = None

    @property
    def media_marker_ids(self) -> dict[MediaKind, int]:
        markers: dict[MediaKind, int | None] = {"image": self.image_token_id, "video": self._video_marker}
        return {kind: number for kind, number in markers.items() if number is not None}

    @property
    def _video_marker(self) -> int | None:
        """None where there is no token for it, or none for a frame's beginning and end: no videos are taken then."""
        token = getattr(self.config, "video_token_id", None)
        if type(token) is not int or token == self.image_token_id or self._encode is None:
            return None
        return token if all(len(self._encode(mark)) == 1 for mark in (_START, _END)) else None

    def make_tower(self, vision: PretrainedConfig) -> nn.Module:
        from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel

        return Glm4vVisionModel._from_config(vision)

    @classmethod
    def check_tower(cls, config: PretrainedConfig) -> None:
        super().check_tower(config)
        side, patch = config.vision_config.image_size, config.vision_config.patch_size
        if type(side) is not int or side < patch:
            refuse(config, "vision_config.image_size", "a patch must fit, or no place has an embedding", side)

    def read_processor(self, settings: Mapping[str, Any], encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    def video_layout(self, inputs: MediaInputs) -> MediaLayout:
        """Each group of frames as an image, and the second in which every other frame is shown behind it."""
        time, height, width = grid = self.video_grid(inputs)
        encode = self._encode
        assert encode is not None, "read_processor comes first"
        shown = inputs["frame_times"].tolist()[::2][:time]
        shown += shown[-1:] * (time - len(shown))
        assert self.image_token_id is not None
        frame = [*encode(_START), *[self.image_token_id] * (height * width), *encode(_END)]
        ids = [token for second in shown for token in (*frame, *between(encode, _END, str(int(second)), _START))]
        return layout_of(ids, self.image_token_id, grid)

    def encode_video(self, inputs: MediaInputs) -> torch.Tensor:
        time, height, width = inputs["video_grid_thw"][0].tolist()
        pixels = inputs["pixel_values_videos"]
        frames = torch.tensor([[1, height, width]] * time, device=pixels.device)
        return self.encode({"pixel_values": pixels, "image_grid_thw": frames})

    def rotary_positions(self, length: int, media: Sequence[PlaceholderRange]) -> np.ndarray:
        """As of Qwen2-VL, where each group of a video's frames is an image, and its time a text."""
        return super().rotary_positions(length, [part for item in media for part in frames_apart(item)])
