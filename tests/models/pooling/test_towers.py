"""CLIP and SigLIP beside transformers: vectors of texts and of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from quire import LLM, LoRARequest, PoolingParams
from quire.errors import ContextLengthError, QuireError, RequestError, UnsupportedModelError
from tests.models.pooling.tokenizers_made import texts
from tests.models.pooling.worlds import change, engine, largest_error, prompts
from tests.models.pooling.worlds_of_towers import (
    CASES,
    END,
    FAMILIES,
    LENGTH,
    VOCAB,
    image_vector,
    processor,
    saved_with_all,
    text_vector,
)
from tests.multimodal.tiny_vision import picture

BARE = PoolingParams(use_activation=False)
SIZES = [(30, 100), (24, 24), (53, 47), (9, 17)]


def batch_of(family: str, variant: str) -> list[list[int]]:
    """Token ids of texts, with what ends them, and more behind that where it says nothing."""
    found = prompts(VOCAB - 1, (0, 4, LENGTH - 1, 9, 14))
    if family == "Siglip":
        return [*found[1:], prompts(VOCAB, (LENGTH,))[0]]
    end = {"highest": END}.get(variant, FAMILIES[family][variant]["text"]["eos_token_id"])
    ended = [[*(one for one in ids if one != end), end] for ids in found]
    return [*ended, [*ended[1], 5, 9], [*ended[3], end, end, end]]


def of_image(one: Any) -> dict[str, Any]:
    return {"prompt": "", "multi_modal_data": {"image": one}}


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_vectors(tmp_path: Path, family: str, variant: str) -> None:
    oracle = saved_with_all(family, variant, tmp_path)
    images, padding = processor(family, variant), None
    if family == "Siglip":
        padding = oracle.config.text_config.pad_token_id
    ids = batch_of(family, variant)
    pictures = [picture(number, size) for number, size in enumerate(SIZES)]
    expected = [text_vector(oracle, one, padding) for one in ids]
    expected += [image_vector(oracle, images, one) for one in pictures]
    given = [{"prompt_token_ids": one} for one in ids] + [of_image(one) for one in pictures]
    llm = engine(tmp_path, max_num_batched_tokens=64)
    bare = llm.embed(given, pooling_params=BARE, use_tqdm=False)
    assert largest_error([one.outputs.embedding for one in bare], expected) < 1e-5
    normal = llm.embed(given[::-1], use_tqdm=False)[::-1]
    assert largest_error([one.outputs.embedding for one in normal], [one / one.norm() for one in expected]) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_images_by_the_checkpoints_own_processors(tmp_path: Path, family: str) -> None:
    oracle = saved_with_all(family, "plain", tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    said = [*texts(5, seed=2, most=15), "", "None"]
    padded: dict[str, Any] = {"padding": "max_length"} if family == "Siglip" else {}
    expected = [text_vector(oracle, tokenizer(one, **padded)["input_ids"]) for one in said]
    llm = engine(tmp_path, skip_tokenizer_init=False)
    found = llm.embed([*said, {"prompt": said[0]}], pooling_params=BARE, use_tqdm=False)
    assert largest_error([one.outputs.embedding for one in found], [*expected, expected[0]]) < 1e-5
    long = "red " * 30
    ids = tokenizer(long, truncation=True, max_length=LENGTH)["input_ids"]
    cut = llm.embed([long], pooling_params=BARE, truncate_prompt_tokens=-1, use_tqdm=False)
    assert largest_error([cut[0].outputs.embedding], [text_vector(oracle, ids)]) < 1e-5
    with pytest.raises(ContextLengthError, match="truncate_prompt_tokens"):
        llm.embed([long], use_tqdm=False)
    scores = llm.score(said[0], said, use_tqdm=False)
    cosine = torch.nn.functional.cosine_similarity(expected[0][None], torch.stack(expected))
    assert largest_error([[one.outputs.score for one in scores]], [cosine]) < 1e-5


@pytest.mark.parametrize(("family", "variant"), [(family, name) for family in FAMILIES for name in ("plain", "odd")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_alone_and_in_a_crowd(tmp_path: Path, family: str, variant: str, dtype: torch.dtype) -> None:
    saved_with_all(family, variant, tmp_path, dtype)
    given: list[dict[str, Any]] = [{"prompt_token_ids": one} for one in batch_of(family, variant)]
    for number, size in enumerate(SIZES):
        given.insert(2 * number, of_image(picture(number, size)))
    alone = engine(tmp_path, max_num_seqs=1, enable_prefix_caching=False)
    expected = [alone.embed([one], use_tqdm=False)[0].outputs.embedding for one in given]
    crowd = engine(tmp_path, max_num_batched_tokens=23, block_size=4)  # texts of CLIP are cut
    for _ in range(2):  # the second time, with prefixes and features that are there
        assert [one.outputs.embedding for one in crowd.embed(given, use_tqdm=False)] == expected
    assert [one.outputs.embedding for one in crowd.embed(given[::-1], use_tqdm=False)] == expected[::-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_to_float64_as_transformers_is(tmp_path: Path, family: str) -> None:
    saved_with_all(family, "plain", tmp_path, torch.bfloat16)
    kind = getattr(transformers, f"{family}Model")
    theirs = kind.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    wide = kind.from_pretrained(tmp_path, dtype=torch.float32).double().eval()
    padding = wide.config.text_config.pad_token_id if family == "Siglip" else None
    images, llm = processor(family, "plain"), engine(tmp_path)
    ids = [one for seed in range(8) for one in prompts(VOCAB - 1, (3, 9, 15), seed)]
    ids = [[*one, END] for one in ids]
    pictures = [picture(number, (30 + number, 40)) for number in range(12)]

    def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
        pairs = zip(found, exact, strict=True)
        return float(torch.cat([(a.double() - b) for a, b in pairs]).square().mean().sqrt())

    def vectors(prompts: list[dict[str, Any]]) -> list[torch.Tensor]:
        return [one.outputs.data for one in llm.encode(prompts, BARE, use_tqdm=False)]

    exact = [text_vector(wide, one, padding) for one in ids]
    rounded = [text_vector(theirs, one, padding) for one in ids]
    assert error(vectors([{"prompt_token_ids": one} for one in ids]), exact) <= 1.1 * error(rounded, exact)
    exact = [image_vector(wide, images, one) for one in pictures]
    rounded = [image_vector(theirs, images, one) for one in pictures]
    assert error(vectors([of_image(one) for one in pictures]), exact) <= 1.1 * error(rounded, exact)


def test_a_tower_for_texts_alone(tmp_path: Path) -> None:
    whole = saved_with_all("CLIP", "odd", tmp_path)
    config = whole.config.text_config
    config.projection_dim = whole.config.projection_dim
    alone = transformers.CLIPTextModelWithProjection(config).eval()
    alone.load_state_dict({k: v for k, v in whole.float().state_dict().items() if k.startswith("text")}, strict=True)
    alone.save_pretrained(tmp_path / "text")
    ids = batch_of("CLIP", "odd")
    llm = engine(tmp_path / "text")
    found = llm.embed([{"prompt_token_ids": one} for one in ids], pooling_params=BARE, use_tqdm=False)
    expected = [text_vector(whole.double(), one) for one in ids]
    assert largest_error([one.outputs.embedding for one in found], expected) < 1e-5
    with pytest.raises(RequestError, match="takes text only"):
        llm.embed(of_image(picture(0, (24, 24))), use_tqdm=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_are_no_good(tmp_path: Path, family: str) -> None:
    saved_with_all(family, "plain", tmp_path)
    llm = engine(tmp_path, skip_tokenizer_init=False)
    image = picture(0, (24, 24))
    bad: list[tuple[Any, str]] = [
        ({"prompt": "red", "multi_modal_data": {"image": image}}, "the prompt has both"),
        ({"prompt_token_ids": [5, 6], "multi_modal_data": {"image": image}}, "the prompt has both"),
        (of_image([image, image]), "of one image, and the prompt has 2"),
        (of_image([]), "of one image, and the prompt has 0"),
        (of_image(None), "1 image marker and 0 images"),
        ({"prompt": "", "multi_modal_data": {"video": [image]}}, "video"),
        ({"prompt_token_ids": [5, 2**31 - 1]}, "1 image marker and 0 images"),
        ({"prompt_token_ids": [5, VOCAB]}, "from 0 to 63"),
    ]
    if family == "CLIP":
        bad.append(({"prompt_token_ids": [5, 6]}, f"no token {END}, which ends a text"))
    for prompt, why in bad:
        with pytest.raises(RequestError, match=why):
            llm.embed([prompt], use_tqdm=False)
    (given,) = llm.embed([of_image({"image_embeds": torch.zeros(1, 40 if family == "CLIP" else 32)})], use_tqdm=False)
    assert given.failure is not None and "give the image" in given.failure.message
    with pytest.raises(RequestError, match="are for texts"):
        llm.embed([of_image(image)], truncate_prompt_tokens=3, use_tqdm=False)
    with pytest.raises(RequestError, match="not trained for"):
        llm.embed(["red"], pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
    with pytest.raises(RequestError, match="can embed"):
        llm.encode(["red"], pooling_task="token_embed", use_tqdm=False)


@pytest.mark.parametrize(("family", "variant"), [("CLIP", "plain"), ("Siglip", "plain")])
def test_settings_and_configurations_that_are_no_good(tmp_path: Path, family: str, variant: str) -> None:
    model = saved_with_all(family, variant, tmp_path)
    with pytest.raises(QuireError, match="nothing else is pooled"):
        engine(tmp_path, pooler_config={"pooling_type": "MEAN"})
    with pytest.raises(UnsupportedModelError, match="no head that gives classes"):
        engine(tmp_path, convert="classify")
    with pytest.raises(QuireError, match="enable_prompt_embeds"):
        engine(tmp_path, enable_prompt_embeds=True)
    with pytest.raises(UnsupportedModelError):
        LLM(str(tmp_path), runner="generate", skip_tokenizer_init=True)
    text, vision = model.config.text_config.to_dict(), model.config.vision_config.to_dict()
    if family == "CLIP":
        change(tmp_path, text_config={**text, "eos_token_id": VOCAB})
        with pytest.raises(UnsupportedModelError, match="eos_token_id"):
            engine(tmp_path)
        return
    with pytest.raises(QuireError, match="padded to 20"):
        engine(tmp_path, max_model_len=12)
    change(tmp_path, vision_config={**vision, "vision_use_head": False})
    with pytest.raises(UnsupportedModelError, match="without a head"):
        engine(tmp_path)
    change(tmp_path, vision_config=vision, text_config={**text, "projection_size": 31})
    with pytest.raises(UnsupportedModelError, match="projection_size"):
        engine(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_both_towers(tmp_path: Path, family: str) -> None:
    """PEFT's of torch's attention in SigLIP's head changes nothing there, and nothing here."""
    model = saved_with_all(family, "odd", tmp_path / "model").float()
    targets = ["q_proj", "v_proj", "out_proj", "fc1", "fc2", *(["text_projection"] if family == "CLIP" else [])]
    torch.manual_seed(6)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    oracle, images = adapted.double().eval(), processor(family, "odd")
    padding = model.config.text_config.pad_token_id if family == "Siglip" else None
    ids, pictures = batch_of(family, "odd"), [picture(number, size) for number, size in enumerate(SIZES)]

    def expected() -> list[torch.Tensor]:
        return [text_vector(oracle, one, padding) for one in ids] + [
            image_vector(oracle, images, one) for one in pictures
        ]

    given = [{"prompt_token_ids": one} for one in ids] + [of_image(one) for one in pictures]
    llm = engine(tmp_path / "model", enable_lora=True, max_lora_rank=4)
    own = LoRARequest("own", 1, str(tmp_path / "adapter"))
    mixed = llm.embed(given * 2, pooling_params=BARE, lora_request=[own, None] * len(given), use_tqdm=False)
    whole = [one.outputs.embedding for one in mixed]
    adapted_rows, with_adapter = expected(), [True, False] * len(given)
    with adapted.disable_adapter():
        plain_rows = expected()
    wanted = [
        (adapted_rows if own_one else plain_rows)[place % len(given)] for place, own_one in enumerate(with_adapter)
    ]
    assert largest_error(whole, wanted) < 2e-5
    assert all((one - other).abs().max() > 1e-2 for one, other in zip(adapted_rows, plain_rows, strict=True))


def test_the_folder_of_sentence_transformers_module(tmp_path: Path) -> None:
    oracle = saved_with_all("CLIP", "plain", tmp_path / "0_CLIPModel")
    modules = [{"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (found,) = engine(tmp_path, skip_tokenizer_init=False).embed(["red circle"], pooling_params=BARE, use_tqdm=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "0_CLIPModel")
    expected = text_vector(oracle, tokenizer("red circle")["input_ids"])
    assert largest_error([found.outputs.embedding], [expected]) < 1e-5
