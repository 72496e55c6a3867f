"""Numbers in a vision-language model's config.json that nobody can mean: refused by name, before they cost anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.errors import CheckpointError, QuireError, UnsupportedModelError
from quire.models.loader import load_model
from tests.multimodal.tiny_vision import build

LLAVA, QWEN = "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration"
QWEN25, QWEN3 = "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"
QWEN3_MOE = "Qwen3VLMoeForConditionalGeneration"
GLM = "Glm4vForConditionalGeneration"
VARIANTS = {LLAVA: "clip", QWEN: "mrope", QWEN25: "windows", QWEN3: "deepstack", QWEN3_MOE: "experts", GLM: "half"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoints(architecture) -> a directory whose config.json a test may replace."""

    @cache
    def made(architecture: str) -> Path:
        path = build(architecture, VARIANTS[architecture], tmp_path_factory.mktemp("vision"))
        (path / "config.json").rename(path / "original.json")
        return path

    return made


def edited(path: Path, field: str, value: Any) -> Path:
    """Set a field, "outer.inner"; "..." takes it out."""
    config = json.loads((path / "original.json").read_text())
    *outer, name = field.split(".")
    part = config
    for one in outer:
        part = part[one]
    if value is ...:
        del part[name]
    else:
        part[name] = value
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("architecture", "field", "value", "error", "named"),
    [
        (LLAVA, "vision_config.num_hidden_layers", 10**6, CheckpointError, "vision_config.num_hidden_layers=1000000"),
        (LLAVA, "text_config.num_hidden_layers", 10**6, CheckpointError, "text_config.num_hidden_layers=1000000"),
        (LLAVA, "vision_config.hidden_size", 2**40, CheckpointError, "vision_config.hidden_size=1099511627776"),
        (LLAVA, "vision_config.image_size", 2**24, UnsupportedModelError, "image_size"),
        (LLAVA, "vision_config.patch_size", 1000, UnsupportedModelError, "patch_size=1000"),
        (LLAVA, "vision_config.hidden_act", "xielu", UnsupportedModelError, "hidden_act='xielu'"),
        (LLAVA, "image_token_index", 2**40, CheckpointError, "image_token_index=1099511627776"),
        (LLAVA, "image_token_index", -1, UnsupportedModelError, "-1"),
        (LLAVA, "image_token_index", "383", CheckpointError, "image_token_index='383'"),
        (QWEN, "vision_config.depth", 10**6, CheckpointError, "vision_config.depth=1000000"),
        (QWEN, "vision_config.embed_dim", 10**9, CheckpointError, "vision_config.embed_dim=1000000000"),
        (QWEN, "image_token_id", 2**40, CheckpointError, "image_token_id=1099511627776"),
        (QWEN, "vision_start_token_id", -(2**40), CheckpointError, "vision_start_token_id=-1099511627776"),
        (QWEN, "vision_config.num_heads", 16, UnsupportedModelError, "num_heads=16"),
        (QWEN25, "vision_config.window_size", 7, UnsupportedModelError, "window_size=7"),
        (QWEN25, "vision_config.fullatt_block_indexes", ["1"], CheckpointError, "fullatt_block_indexes"),
        (QWEN25, "vision_config.out_hidden_size", 64, UnsupportedModelError, "out_hidden_size=64"),
        (QWEN25, "vision_config.num_heads", 5, UnsupportedModelError, "num_heads=5"),
        (QWEN3, "vision_config.deepstack_visual_indexes", [2, 0], UnsupportedModelError, "deepstack_visual_indexes"),
        (QWEN3, "vision_config.deepstack_visual_indexes", [0, 9], UnsupportedModelError, "deepstack_visual_indexes"),
        (QWEN3, "text_config.sliding_window", 6, UnsupportedModelError, "sliding_window=6"),
        (QWEN3_MOE, "text_config.sliding_window", 6, UnsupportedModelError, "sliding_window=6"),
        (GLM, "vision_config.image_size", 2, UnsupportedModelError, "image_size=2"),
    ],
)
def test_numbers_are_refused_by_name(checkpoints, architecture, field, value, error, named) -> None:
    with pytest.raises(error) as caught:
        load_model(edited(checkpoints(architecture), field, value))
    assert issubclass(error, QuireError)
    assert named in str(caught.value)
