"""Vision-language models against transformers: features, placeholders and greedy tokens.

Twelve requests with none to four images each run together; the token budget cuts images in two, the prefix cache is
on, and the pool is so small that some requests are preempted. Transformers runs each alone, in float64. Where all of a
prompt sees itself, each has an image, the budget is the longest prompt's beside the others' tokens, and the cache finds
nothing.
"""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from quire import LLM, SamplingParams
from quire.config import MediaConfig
from quire.models.loader import load_model
from quire.multimodal import ImageProcessor, load_picture
from tests.multimodal.open_engine import all_ready, drive
from tests.multimodal.tiny_vision import CASES, IMAGE, Oracle, build, make, picture

STEPS = 32
REQUESTS = 12
SIZES = [(30, 100), (100, 30), (24, 24), (53, 47), (64, 33), (200, 90), (9, 17), (48, 48)]


def prompts(seed: int = 5) -> list[tuple[list[int], list]]:
    """(ids with a marker for each image, images); several begin alike, and some images come again elsewhere."""
    rng = random.Random(seed)
    shared, first = [rng.randrange(3, 300) for _ in range(14)], picture(0, (40, 40))
    made = []
    for number in range(REQUESTS):
        ids, images = list(shared[: rng.choice([3, 9, 14])]), []
        for place in range(number % 5):
            images.append(first if place == 0 and number % 2 else picture(rng.randrange(9), rng.choice(SIZES)))
            ids += [IMAGE, *(rng.randrange(3, 300) for _ in range(rng.randint(1, 6)))]
        made.append((ids + [rng.randrange(3, 300) for _ in range(rng.randint(0, 9))], images))
    return made


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_features(architecture, variant, tmp_path):
    oracle = Oracle(architecture, variant)
    path = build(architecture, variant, tmp_path, oracle.model)
    model = load_model(path)
    processor = ImageProcessor(path, MediaConfig(), None, model.processor_settings)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    model.read_processor({}, lambda text: tokenizer.encode(text, add_special_tokens=False))
    for number, size in enumerate(SIZES):
        image = picture(number, size)
        inputs = processor(load_picture(image, MediaConfig()), {})
        with torch.inference_mode():
            ours = model.encode(inputs)
        theirs = oracle.features(image)
        assert ours.shape == theirs.shape == (model.image_layout(inputs).features, 32 * (1 + model.feature_levels))
        assert (ours - theirs).abs().max() < 1e-4
        assert theirs.std() > 0.1  # or equal would mean nothing


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_greedy_tokens(architecture, variant, tmp_path):
    oracle = Oracle(architecture, variant)
    path = build(architecture, variant, tmp_path, oracle.model)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    whole = oracle.family.whole
    batch = [(ids, images) for ids, images in prompts() if images or not whole]
    longest = max(len(oracle.expanded(ids, images, tokenizer)) for ids, images in batch)
    llm = LLM(
        str(path),
        max_num_batched_tokens=longest + REQUESTS if whole else 29,
        block_size=4,
        num_gpu_blocks_override=oracle.family.blocks.get(variant, 110),
        debug=True,
    )
    given = [{"prompt_token_ids": ids, "multi_modal_data": {"image": images}} for ids, images in batch]
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    engine = llm.llm_engine
    for number, one in enumerate(given):
        engine.add_request(str(number), one, params)
    all_ready(engine)  # or those that come late would need no room beside the others
    finished = drive(engine)
    outputs = [finished[str(number)] for number in range(len(batch))]
    assert engine.scheduler.num_preemptions > 0
    assert (sum(output.num_cached_tokens for output in outputs) > 0) is not whole
    assert engine.pool.num_owned == 0
    engine.check_integrity()
    for (ids, images), output in zip(batch, outputs, strict=True):
        expanded, answer = oracle.answer(ids, images, STEPS, tokenizer)
        assert output.prompt_token_ids == expanded
        assert output.outputs[0].token_ids == answer


def renamed(name: str, naming: str) -> str:
    """A parameter's name in transformers 5, as one of the releases before wrote it to files."""
    if naming == "since 4.52":
        return name
    name = name.removeprefix("model.")
    if naming == "clip with vision_model":
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
    if name.startswith("language_model."):
        return name.replace("language_model.", "language_model.model.", 1)
    return f"language_model.{name}" if name.startswith("lm_head") else name


@pytest.mark.parametrize("naming", ["since 4.52", "before 4.52", "clip with vision_model"])
@pytest.mark.parametrize(("architecture", "variant"), [("LlavaForConditionalGeneration", "clip"),
                                                       ("LlavaNextForConditionalGeneration", "clip"),
                                                       ("Mistral3ForConditionalGeneration", "merged"),
                                                       ("InternVLForConditionalGeneration", "tiles"),
                                                       ("Gemma3ForConditionalGeneration", "untied"),
                                                       ("PaliGemmaForConditionalGeneration", "untied")])  # fmt: skip
def test_both_namings_load(architecture, variant, naming, tmp_path):
    theirs = make(architecture, variant)
    plain = load_model(build(architecture, variant, tmp_path / "plain", theirs))
    path = build(architecture, variant, tmp_path / "named", theirs)
    save_file({renamed(k, naming): v.contiguous() for k, v in theirs.state_dict().items()}, path / "model.safetensors")
    named = load_model(path)
    for (name, one), (other_name, other) in zip(plain.named_parameters(), named.named_parameters(), strict=True):
        assert name == other_name and torch.equal(one, other)


@pytest.mark.parametrize("naming", ["since 4.52", "before 4.52"])
@pytest.mark.parametrize(("architecture", "variant"), [("Qwen2VLForConditionalGeneration", "mrope"),
                                                       ("Qwen2_5_VLForConditionalGeneration", "windows")])  # fmt: skip
def test_both_namings_of_qwen_load(architecture, variant, naming, tmp_path):
    theirs = make(architecture, variant)
    path = build(architecture, variant, tmp_path, theirs)
    state = theirs.state_dict()
    if naming == "before 4.52":
        old = [("model.visual", "visual"), ("model.language_model", "model")]
        state = {k.replace(*old[0]).replace(*old[1]): v for k, v in state.items()}
    save_file({k: v.contiguous() for k, v in state.items()}, path / "model.safetensors")
    ours = load_model(path)
    found = dict(ours.named_parameters())
    assert torch.equal(found["visual.merger.mlp.2.weight"], theirs.model.visual.merger.mlp[2].weight)
    embeddings = theirs.model.language_model.embed_tokens.weight
    assert torch.equal(found["language_model.model.embed_tokens.weight"], embeddings)
