"""Adapters of models that take videos, against PEFT: on the text model, the tower, what projects, and all of them.

As in test_vision_adapter_parity.py, whose fields these are; two of four prompts have videos, one an image.
"""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig

from tests.lora.conftest import Worlds
from tests.lora.peft_world import ask
from tests.lora.test_vision_adapter_parity import (
    GLM4V,
    IDEFICS,
    INTERNVL,
    ONEVISION,
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_VL,
)
from tests.multimodal.video_models import EACH

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = {"all_linear": {"target_modules": "all-linear"}}
# Where PEFT takes gate_proj for the experts' too. All linears at once leave float32 no fourth decimal of logprobs.
GLM4V_MOE: dict[str, dict[str, Any]] = {
    "text": {"target_modules": r".*language_model.*(q_proj|o_proj)", "use_rslora": True},
    "tower": {"target_modules": ["qkv", "attn.proj"], "use_dora": True},
    "merger": {"target_modules": ["merger.proj", "downsample"]},
    "both": {"target_modules": ["q_proj", "qkv", "merger.proj"], "bias": "lora_only"},
}
# The fields of the text model, of the tower, and of what is between them.
PARTS: dict[str, tuple[dict[str, dict[str, Any]], tuple[str, ...]]] = {
    "Qwen2VLForConditionalGeneration": (QWEN2_VL, ("text", "tower_dora", "merger", "save_merger")),
    "Qwen2_5_VLForConditionalGeneration": (QWEN2_5_VL, ("text", "tower", "patches_and_merger")),
    "Qwen3VLForConditionalGeneration": (QWEN3_VL, ("text", "tower", "levels")),
    "Qwen3VLMoeForConditionalGeneration": (QWEN3_VL, ("text", "tower", "levels")),
    "Glm4vForConditionalGeneration": (GLM4V, ("text", "tower", "merger", "patches")),
    "Glm4vMoeForConditionalGeneration": (GLM4V_MOE, ("text", "tower", "merger", "both")),
    "LlavaOnevisionForConditionalGeneration": (ONEVISION, ("text", "tower", "projector")),
    "LlavaNextVideoForConditionalGeneration": (ONEVISION, ("text", "tower", "projector")),
    "InternVLForConditionalGeneration": (INTERNVL, ("text", "tower", "projector", "patches")),
    "SmolVLMForConditionalGeneration": (IDEFICS, ("text", "tower", "connector", "save_tower")),
}
CASES = [
    pytest.param(
        architecture, variant, {**PARTS[architecture][0], **ALL}[name], id=f"{architecture}-{name}",
        marks=() if name in ("all_linear", "both") else pytest.mark.slow,
    )
    for architecture, variant in EACH
    for name in (*PARTS[architecture][1], *(() if PARTS[architecture][0] is GLM4V_MOE else ALL))
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "variant", "fields"), CASES)
def test_an_adapter_does_what_it_does_in_peft(
    video_worlds: Worlds, architecture: str, variant: str, fields: dict[str, Any]
) -> None:
    world = video_worlds(architecture, variant)
    assert world.agree(world.train(LoraConfig(r=4, **fields), seed=len(fields)))


@pytest.mark.parametrize(("architecture", "variant"), EACH)
def test_each_request_sees_its_videos_by_its_own_adapter(video_worlds: Worlds, architecture: str, variant: str) -> None:
    """Two adapters and the base model over the same videos at once: tokens and logprobs are those of each alone."""
    world = video_worlds(architecture, variant)
    loaded = [world.load(world.train(LoraConfig(r=3, **ALL["all_linear"]), seed=seed)) for seed in (1, 2)]
    adapters = [None, *loaded]
    alone = [[_said(ask(world.llm, [one], adapter)[0]) for one in world.prompts] for adapter in adapters]
    together = ask(world.llm, world.prompts * 3, [adapter for adapter in adapters for _ in world.prompts])
    assert [_said(output) for output in together] == [one for of_adapter in alone for one in of_adapter]
    assert alone[0][0] != alone[1][0] != alone[2][0]
    for adapter in loaded:
        world.llm.unload_lora_adapter(adapter.lora_name)


def _said(output: Any) -> tuple[Any, ...]:
    return output.outputs[0].token_ids, output.prompt_logprobs
