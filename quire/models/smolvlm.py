"""SmolVLM, SmolVLM2 (arXiv:2504.05299): Idefics3 with a tower of its own name, and videos.

A video is a text that tells how many frames it has and how long it lasts, and then, for each frame, when it is shown
and an image of one tile. Configuration fields that shape the arithmetic: Idefics3's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quire.models.idefics3 import AROUND, Idefics3ForConditionalGeneration
from quire.models.vision.base import MediaInputs
from quire.models.vision.video import FramesAsImages, between, in_words, layout_of
from quire.types import MediaLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger("quire")

_HEAD = "You are provided the following series of"


class SmolVLMForConditionalGeneration(FramesAsImages, Idefics3ForConditionalGeneration):
    around_video_marker = (_HEAD, "\n\n")

    def make_tower(self, vision: PretrainedConfig) -> nn.Module:
        from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionTransformer

        return SmolVLMVisionTransformer._from_config(vision)

    def read_processor(self, settings: Mapping[str, Any], encode: Callable[[str], list[int]]) -> None:
        super().read_processor(settings, encode)
        self.read_video_marker(encode)
        texts = [_introduction(count, 2) for count in (1, 8, 21, 101)]
        if any(encode(_HEAD + text) != encode(_HEAD) + encode(text) for text in texts):
            logger.warning("no videos are taken: the tokenizer joins words, so that the text before a video is unknown")
            self.video_marker_id = None

    def video_layout(self, inputs: MediaInputs) -> MediaLayout:
        shape = tuple(inputs["pixel_values"].shape)
        if len(shape) != 5 or shape[2:] != (3, self.side, self.side):
            raise ValueError(
                f"the video processor makes {list(shape)} of it, and the tower takes frames of "
                f"[3, {self.side}, {self.side}]"
            )
        times = inputs["frame_times"].tolist()
        lasts = int(inputs["duration"][0] if "duration" in inputs else times[-1])
        encode, frame = self.token_ids, self.one_tile.ids or ()
        ids: list[int] = []
        for number, shown in enumerate(times):
            when = f"\nFrame from {int(shown // 60):02d}:{int(shown % 60):02d}:"
            if number:
                ids += between(encode, AROUND, when, AROUND)
            else:
                ids += encode(_introduction(len(times), lasts) + when + AROUND)[:-1]
            ids += frame
        return layout_of(ids, self.image_token_id)

    def encode_video(self, inputs: MediaInputs) -> torch.Tensor:
        return self.encode(inputs)


def _introduction(frames: int, seconds: int) -> str:
    """What follows `_HEAD`."""
    return f" {in_words(frames)} frames from a {timedelta(seconds=seconds)} [H:MM:SS] video.\n"
