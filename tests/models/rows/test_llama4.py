"""Llama 4 as it is published, with what it sees with, and what of it is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, RequestError, registry
from quire.errors import UnsupportedModelError
from quire.models.loader import load_model
from tests.models import run_model, tiny
from tests.models.rows import all_rows

pytestmark = pytest.mark.usefixtures("one_thread")
ROW = all_rows()["Llama4ForCausalLM"]
VISION = {
    "hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28,
    "patch_size": 14, "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(transformers' model, its folder)"""
    config = transformers.Llama4Config(text_config={**ROW.base, **ROW.variants["scout"]}, vision_config=VISION)
    torch.manual_seed(1)
    model = transformers.Llama4ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    tiny.randomise(model.language_model)
    return model, tiny.save(model, tmp_path_factory.mktemp("llama4"))


def test_the_text_of_a_published_model(published: tuple[Any, Path], caplog: pytest.LogCaptureFixture) -> None:
    theirs, path = published
    ids = tiny.token_ids()
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0]
    with caplog.at_level(logging.WARNING, "quire"):
        model = load_model(path)
    assert "images are refused" in caplog.text
    torch.testing.assert_close(run_model.logits(model, ids), want, rtol=1e-4, atol=1e-3)
    assert torch.equal(run_model.logits(model, ids, [1, 15, 2, 14, 8]), run_model.logits(model, ids))
    assert "language_model.model.layers.0.feed_forward.router" in model.published_names("model.layers.0.mlp.router")


def test_images_are_refused(published: tuple[Any, Path]) -> None:
    llm = LLM(str(published[1]), skip_tokenizer_init=True, num_gpu_blocks_override=16)
    with pytest.raises(RequestError, match="takes text only"):
        llm.generate({"prompt_token_ids": [1, 2], "multi_modal_data": {"image": "a.png"}}, use_tqdm=False)


def test_the_chunks_before_a_tokens_own_are_given_back(published: tuple[Any, Path]) -> None:
    spec = load_model(published[1]).kv_spec
    assert spec.windows == (16, 0, 16, 0)
    assert sorted(group.window for group in spec.groups) == [0, 16]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2"),
        ({"attention_chunk_size": None}, "attention_chunk_size=None"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"floor_scale": 0}, "floor_scale=0"),
    ],
)
def test_what_is_not_served_is_refused(settings: dict[str, Any], named: str) -> None:
    config = transformers.Llama4TextConfig(**ROW.base)
    for field, value in settings.items():
        setattr(config, field, value)
    with pytest.raises(UnsupportedModelError, match=named):
        registry.resolve(["Llama4ForCausalLM"]).check_config(config)
