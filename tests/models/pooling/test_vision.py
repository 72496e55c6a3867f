"""Vision-language models as embedders: vectors of texts and of images, beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from quire import LLM, PoolingParams
from quire.errors import UnsupportedModelError
from tests.models.pooling.worlds import largest_error, prompts
from tests.multimodal.tiny_vision import IMAGE, Oracle, build, picture

BARE = PoolingParams(use_activation=False)
CASES = [("LlavaForConditionalGeneration", variant) for variant in ("clip", "siglip", "qwen2_tied", "opt")] + [
    ("LlavaNextForConditionalGeneration", "clip"),
    ("Qwen2VLForConditionalGeneration", "mrope"),
]
SIZES = [(30, 100), (24, 24), (53, 47), (9, 17)]


def load(path: Path, kind: str, **settings: Any) -> LLM:
    return LLM(
        str(path), runner="pooling", convert="embed", pooler_config={"pooling_type": kind}, skip_tokenizer_init=True,
        num_gpu_blocks_override=200, debug=True, **settings,
    )  # fmt: skip


def states(oracle: Oracle, ids: list[int], images: list[Image.Image]) -> torch.Tensor:
    """The last hidden states [T, C] of one prompt, alone, in float64."""
    expanded = oracle.expanded(ids, images)
    inputs = oracle.inputs(images) if images else {}
    if oracle.mrope:
        inputs["mm_token_type_ids"] = torch.tensor([[int(token == IMAGE) for token in expanded]])
    if images:
        inputs["pixel_values"] = inputs["pixel_values"].double()
    wide = oracle.model.double()
    with torch.inference_mode():
        found = wide.model(input_ids=torch.tensor([expanded]), **inputs).last_hidden_state[0]
    oracle.model.float()
    return found


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_vectors_of_texts_and_of_images(tmp_path: Path, architecture: str, variant: str) -> None:
    oracle = Oracle(architecture, variant)
    path = build(architecture, variant, tmp_path, oracle.model)
    texts = prompts(300, [1, 7, 33])
    batch: list[tuple[list[int], list[Image.Image]]] = [(ids, []) for ids in texts]
    for number, size in enumerate(SIZES):
        batch.append(([*texts[1], IMAGE, *texts[1][:number]], [picture(number, size)]))
    batch.append(([IMAGE, 5, IMAGE], [picture(0, (24, 24)), picture(1, (40, 30))]))
    given = [{"prompt_token_ids": ids, "multi_modal_data": {"image": images}} for ids, images in batch]
    rows = [states(oracle, ids, images) for ids, images in batch]
    last = load(path, "LAST").embed(given, pooling_params=BARE, use_tqdm=False)
    assert largest_error([one.outputs.embedding for one in last], [one[-1] for one in rows]) < 1e-4
    mean = load(path, "MEAN", max_num_batched_tokens=40, block_size=4).embed(given, use_tqdm=False)
    expected = [one.mean(0) / one.mean(0).norm() for one in rows]
    assert largest_error([one.outputs.embedding for one in mean], expected) < 1e-4


def test_the_same_bits_alone_and_in_a_crowd(tmp_path: Path) -> None:
    path = build("LlavaForConditionalGeneration", "clip", tmp_path)
    batch = [
        {"prompt_token_ids": [*ids, IMAGE, 7], "multi_modal_data": {"image": picture(number, size)}}
        for number, (ids, size) in enumerate(zip(prompts(300, [3, 40, 9, 17]), SIZES, strict=True))
    ]
    for kind in ("LAST", "MEAN"):
        alone = load(path, kind, max_num_seqs=1, enable_prefix_caching=False)
        expected = [alone.encode([one], use_tqdm=False)[0].outputs.data for one in batch]
        crowd = load(path, kind, max_num_batched_tokens=31, block_size=4)
        found = [one.outputs.data for one in crowd.encode(batch, use_tqdm=False)]
        assert all(map(torch.equal, found, expected))


def test_no_classes(tmp_path: Path) -> None:
    path = build("LlavaForConditionalGeneration", "clip", tmp_path)
    with pytest.raises(UnsupportedModelError, match="no head that gives classes"):
        LLM(str(path), runner="pooling", convert="classify", skip_tokenizer_init=True)
