"""Towers of CLIP and SigLIP on quire's kernels: answers are transformers', and do not depend on other images."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.models.llava import ROWS_TOGETHER
from quire.models.loader import load_model
from quire.models.vision.siglip import SiglipTower
from quire.models.vision.tower_parts import PatchConvolution
from quire.models.vision.towers import FixedGridTower, build_tower
from quire.platform.execution.encoder_runner import EncoderRunner
from quire.platform.scheduling.plan import EncodeImage
from tests.multimodal import tiny_vision

SIZES = {"num_channels": 3, "hidden_size": 72, "intermediate_size": 50, "num_hidden_layers": 3}
GRIDS = {"one row of 26": (26, 1), "heads of 72": (31, 1), "heads of 12": (20, 6)}  # image_size, heads
CHOICES: list[Any] = [-2, 0, -1, [0, 1, 3], [-1, -1], [2, 0]]


def configuration(kind: str, image_size: int, heads: int, **more: Any) -> Any:
    from transformers import CLIPVisionConfig, SiglipVisionConfig

    make = {"clip": CLIPVisionConfig, "siglip": SiglipVisionConfig}[kind]
    return make(**SIZES, image_size=image_size, patch_size=5, num_attention_heads=heads, **more)


def with_values(tower: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    for module in tower.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                value = 0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)
                module._parameters[name] = torch.nn.Parameter(value.to(dtype), requires_grad=False)
    return tower


def oracle(config: Any, values: torch.nn.Module) -> Any:
    from transformers import AutoModel

    model = AutoModel.from_config(config, attn_implementation="eager")
    model = getattr(model, "vision_model", model)
    missing = model.load_state_dict({name: one.float() for name, one in values.state_dict().items()}, strict=False)
    assert not missing.unexpected_keys and all("head" in name for name in missing.missing_keys)
    return model.eval()


def built(config: Any) -> torch.nn.Module:
    from transformers import AutoModel

    with torch.device("meta"):
        tower = build_tower(lambda: AutoModel.from_config(config))
    return getattr(tower, "vision_model", tower)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", ["clip", "siglip"])
@torch.inference_mode()
def test_chosen_hidden_states(kind: str, grid: str, choice: Any, dtype: torch.dtype) -> None:
    image_size, heads = GRIDS[grid]
    config = configuration(kind, image_size, heads)
    whole = SimpleNamespace(
        vision_config=config,
        vision_feature_layer=choice,
        vision_feature_select_strategy="default" if kind == "clip" else "full",
    )
    tower = FixedGridTower(whole, built(config))
    with_values(tower.tower, dtype)
    pixels = torch.randn(3, 3, image_size, image_size, generator=torch.Generator().manual_seed(5)).to(dtype)
    before = pixels.clone()
    together = tower(pixels)
    assert torch.equal(torch.cat([tower(one[None]) for one in pixels]), together) and torch.equal(pixels, before)
    model = oracle(config, tower.tower)
    states = model(pixels.float(), output_hidden_states=True).hidden_states
    chosen = [choice] if isinstance(choice, int) else choice
    wanted = torch.cat([states[one][:, kind == "clip" :] for one in chosen], dim=-1)
    assert together.shape == wanted.shape == (3, tower.tokens, tower.channels)
    error, scale = (together.float() - wanted).abs().max(), wanted.abs().max()
    assert error <= scale * (2e-6 if dtype == torch.float32 else 4e-2)


@torch.inference_mode()
def test_siglip_to_its_end() -> None:
    config = configuration("siglip", 20, 6, vision_use_head=False)
    with torch.device("meta"):
        tower = SiglipTower(SimpleNamespace(vision_config=config))
    with_values(tower.tower, torch.float32)
    pixels = torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(6))
    wanted = oracle(config, tower.tower)(pixels).last_hidden_state
    torch.testing.assert_close(tower(pixels), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_patch_embedding_is_the_convolution(bias: bool) -> None:
    convolution = torch.nn.Conv2d(3, 10, (4, 5), stride=(4, 5), bias=bias)
    pixels = torch.randn(2, 3, 11, 16)  # 3 rows and a column of pixels are in no patch
    torch.testing.assert_close(PatchConvolution(convolution)(pixels), convolution(pixels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["clip", "siglip"])
@torch.inference_mode()
def test_small_images_are_encoded_together(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """As many as pay, in the bits of each alone; not those of other adapters, and no features that a caller gives."""
    tiny_vision.build("LlavaForConditionalGeneration", variant, tmp_path)
    model: Any = load_model(tmp_path, dtype)
    tower, length, digests = model.grid_tower, model.grid_tower.tokens, [bytes([i]) for i in range(6)]
    assert model.images_together == ROWS_TOGETHER // tower.rows > 1
    model.images_together = 3
    sizes: list[int] = []
    model.grid_tower = lambda pixels: (sizes.append(len(pixels)), tower(pixels))[1]
    inputs = {one: {"pixel_values": torch.randn(1, 3, tower.side, tower.side)} for one in digests}
    given = torch.randn(length, model.config.text_config.hidden_size)
    inputs[digests[2]] = {"image_embeds": given}

    def encoded(wanted: list[bytes]) -> list[torch.Tensor]:
        runner = EncoderRunner(model, torch.device("cpu"))
        for one in wanted:
            runner.take_pixels(one, inputs[one])
        runner.run([EncodeImage(one, length) for one in wanted])
        for one in wanted:  # and does not keep the others' memory
            assert runner.features[one].untyped_storage().nbytes() == runner.features[one].nbytes
        return [runner.features[one] for one in wanted]

    together = encoded(digests)
    assert sizes == [3, 2] and torch.equal(together[2], given.to(dtype))
    assert all(torch.equal(encoded([one])[0], features) for one, features in zip(digests, together, strict=True))
    sizes.clear()
    runner = EncoderRunner(model, torch.device("cpu"))
    for one in digests[3:]:
        runner.take_pixels(one, inputs[one])
    mixes = [((1, 1.0),), ((1, 0.5),), ((1, 1.0),)]
    runner.run([EncodeImage(one, length, mix) for one, mix in zip(digests[3:], mixes, strict=True)])
    assert sizes == [2, 1]
    wrong = {one: {"pixel_values": torch.randn(1, 3, tower.side, tower.side)} for one in digests[:2]}
    runner = EncoderRunner(model, torch.device("cpu"))
    for one in wrong:
        runner.take_pixels(one, wrong[one])
    with pytest.raises(RuntimeError, match=f"{length} features, and 1 placeholders"):
        runner.run([EncodeImage(one, 1) for one in wrong])
