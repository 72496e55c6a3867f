"""A family whose image processor is code in its checkpoints: a plug-in brings a class of its own, which stands for it.

`Halves` cuts an image in two, left and right; `HalvesConfig` stands for the configuration that nobody else has.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor, BatchFeature, LlavaConfig
from transformers.image_processing_utils import BaseImageProcessor

from quire import registry
from quire.errors import RequestError
from quire.models.llava import LlavaForConditionalGeneration
from quire.multimodal.plans import Plan, ProcessorKind
from quire.registry.row import IMAGES
from quire.types import MediaLayout
from tests.multimodal.open_engine import ask, error_of, greedy, nothing_left, one, open_llm, tokens
from tests.multimodal.tiny_vision import SIDE, picture

NAME = "HalvesForConditionalGeneration"


def plan(height: int, width: int, values: Any) -> Plan:
    return Plan((height, 2 * SIDE), height * 2 * SIDE)


class Halves(BaseImageProcessor):
    kind = ProcessorKind(plan, takes=frozenset({"rescale_factor"}), always={"halves": True}, lists=("order",))
    model_input_names = ("pixel_values",)

    def __init__(self, rescale_factor: float = 1 / 255, **more: Any) -> None:
        super().__init__(**more)
        self.rescale_factor = rescale_factor

    def __call__(self, image: Any, halves: bool, return_tensors: str, rescale_factor: float | None = None) -> Any:
        assert halves and return_tensors == "pt"
        pixels = np.asarray(image.resize((2 * SIDE, SIDE)), dtype=np.float32) * (rescale_factor or self.rescale_factor)
        both = torch.from_numpy(pixels).permute(2, 0, 1).split(SIDE, dim=2)
        return BatchFeature({"pixel_values": torch.stack(both)[None], "order": [1, 0]})


class HalvesConfig(LlavaConfig):
    model_type = "halves"


class TwoHalves(LlavaForConditionalGeneration):
    """Features of both halves, in the order that the processor tells."""

    def image_layout(self, inputs: Any) -> MediaLayout:
        return MediaLayout(2 * self.grid_tower.tokens)

    def planned_layout(self, size: tuple[int, int], final: tuple[int, int]) -> MediaLayout | None:
        assert final == (size[0], 2 * SIDE)
        return self.image_layout({})

    def encode(self, inputs: Any) -> torch.Tensor:
        return self._project(inputs["pixel_values"][0][inputs["order"]]).flatten(0, 1)


@pytest.fixture(scope="module")
def path(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """LLaVA's checkpoint as that family's, with files that name code beside them, as published ones do."""
    folder = tmp_path_factory.mktemp("halves") / "model"
    shutil.copytree(paths["llava"], folder)
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "configuration_halves.HalvesConfig"}
    written = {**config, "architectures": [NAME], "model_type": "halves", "auto_map": code}
    (folder / "config.json").write_text(json.dumps(written))
    code = {"AutoImageProcessor": "processing_halves.Halves"}
    for file in ("preprocessor_config.json", "processor_config.json"):
        (folder / file).unlink(missing_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Halves", "auto_map": code}))
    AutoConfig.register("halves", HalvesConfig, exist_ok=True)
    AutoImageProcessor.register(HalvesConfig, slow_image_processor_class=Halves, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        row = registry.Row(NAME, f"{__name__}:TwoHalves", IMAGES, package="tests")
        patch.setattr(registry, "plugin_rows", lambda: (row,))
        yield str(folder)


def test_its_images_are_served(path: str) -> None:
    llm = open_llm(path)
    wide = picture(1, (60, 40)).resize((2 * SIDE, SIDE))
    first, turned, other = tokens(llm, one(wide), one(picture(1, (60, 40))), one(picture(2, (60, 40))))
    output = ask(llm, one(wide))[0]
    assert len(output.prompt_token_ids) == 4 + 2 * 9 and list(output.outputs[0].token_ids) == first == turned != other
    processor = llm.llm_engine.media.preprocessor.processor
    assert isinstance(processor._processor, Halves) and processor.known["rescale_factor"] == 1 / 255
    nothing_left(llm)


def test_its_plan_and_its_settings_count(path: str) -> None:
    llm = open_llm(path)
    tall = picture(1, (8, 4000))
    given = [one(tall), one(tall, mm_processor_kwargs={"rescale_factor": 0.01})]
    plain, scaled = ask(llm, given, greedy(logprobs=1))
    assert plain.outputs[0].logprobs != scaled.outputs[0].logprobs
    with pytest.raises(RequestError, match="Halves has no setting 'do_resize'; it has rescale_factor"):
        ask(llm, one(picture(1, (8, 8)), mm_processor_kwargs={"do_resize": False}))
    tight = open_llm(path, max_image_pixels=100_000)
    assert "are allowed" in error_of(ask(tight, one(picture(1, (8, 4000))))[0])
    nothing_left(llm)
