"""Qwen3-VL (arXiv:2511.21631): positions in three dimensions by turns, and features of several depths of the tower.

Features of the tower's layers `deepstack_visual_indexes` are added behind the text model's first layers
(arXiv:2406.04334). Configuration fields that shape the arithmetic: vision_config (depth, hidden_size,
intermediate_size, num_heads, hidden_act, patch_size, spatial_merge_size, temporal_patch_size,
num_position_embeddings, deepstack_visual_indexes, out_hidden_size), text_config (a Qwen3, or Qwen3-MoE, with
`mrope_section` among its rotary parameters), image_token_id, video_token_id, vision_start_token_id,
vision_end_token_id. A video's frames stand each by itself in a prompt, behind the time at which it is shown.
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
from quire.models.decoder import WINDOW_FIELDS, DecoderForCausalLM
from quire.models.qwen2_vl import Qwen2VLForConditionalGeneration
from quire.models.qwen3 import Qwen3ForCausalLM
from quire.models.vision.base import ImageInputs, MediaInputs
from quire.models.vision.video import frames_apart
from quire.types import MediaLayout, PlaceholderRange

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INTERLEAVED = "rope_parameters.mrope_interleaved"  # for `supported_fields`
_SECTIONS = [24, 20, 20]  # of a configuration that names none


def interleaved_rotary(config: PretrainedConfig) -> RotaryEmbedding:
    """Time, height and width by turns, whether mrope_interleaved is there to say it or not."""
    parameters = rope_parameters(config)
    if parameters.get("mrope_interleaved") is False:
        refuse(config, "mrope_interleaved (rotary)", "the family's frequencies are by turns", False)
    return RotaryEmbedding(config, parameters={"mrope_section": _SECTIONS, **parameters, "mrope_interleaved": True})


class Qwen3VLText(Qwen3ForCausalLM):
    supported_fields: ClassVar = (Qwen3ForCausalLM.supported_fields - WINDOW_FIELDS) | {INTERLEAVED}

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        return (interleaved_rotary(config),)


class Qwen3VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    tower_width: ClassVar = "out_hidden_size"
    text_class: ClassVar[type[DecoderForCausalLM]] = Qwen3VLText

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.feature_levels = len(config.vision_config.deepstack_visual_indexes)
        self._token_ids: Callable[[str], list[int]] | None = None

    def make_tower(self, vision: PretrainedConfig) -> nn.Module:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

        return Qwen3VLVisionModel._from_config(vision)

    @classmethod
    def check_tower(cls, config: PretrainedConfig) -> None:
        super().check_tower(config)
        layers, depth = list(config.vision_config.deepstack_visual_indexes), config.vision_config.depth
        ascending = all(type(layer) is int and 0 <= layer < depth for layer in layers) and layers == sorted({*layers})
        if not ascending or len(layers) > config.text_config.num_hidden_layers:
            reason = "it must list layers of the tower, ascending, and no more than the text model has"
            refuse(config, "vision_config.deepstack_visual_indexes", reason, layers)

    def encode(self, inputs: ImageInputs) -> torch.Tensor:
        pixels = inputs["pixel_values"].to(self.dtype)
        result = self.visual(pixels, grid_thw=inputs["image_grid_thw"])
        # Before transformers 5 the two were the result itself.
        merged, levels = result if isinstance(result, tuple) else (result.pooler_output, result.deepstack_features)
        return torch.cat((merged, *levels), dim=-1)

    def read_processor(self, settings: Mapping[str, Any], encode: Callable[[str], list[int]]) -> None:
        self._token_ids = encode

    def video_layout(self, inputs: MediaInputs) -> MediaLayout:
        """Each group of frames: its time as text, and its features between a start and an end."""
        assert self._token_ids is not None
        time, height, width = grid = self.video_grid(inputs)
        start, end, token = (
            getattr(self.config, f"{name}_token_id") for name in ("vision_start", "vision_end", "video")
        )
        ids: list[int] = []
        mask: list[bool] = []
        for shown in _times(inputs["frame_times"].tolist(), self.span, time):
            before = [*self._token_ids(f"<{shown:.1f} seconds>"), start]
            features = height * width
            ids += [*before, *[token] * features, end]
            mask += [*[False] * len(before), *[True] * features, False]
        return MediaLayout(len(ids), grid, tuple(ids), tuple(mask))

    def rotary_positions(self, length: int, media: Sequence[PlaceholderRange]) -> np.ndarray:
        """As of Qwen2-VL, where each group of a video's frames is an image, and its time a text."""
        return super().rotary_positions(length, [part for item in media for part in frames_apart(item)])


def _times(shown: list[float], span: int, groups: int) -> list[float]:
    """Of each group of `span` frames the middle between its first and its last; the last frame fills a group."""
    shown = shown + shown[-1:] * (span * groups - len(shown))
    return [(shown[first] + shown[first + span - 1]) / 2 for first in range(0, span * groups, span)]
