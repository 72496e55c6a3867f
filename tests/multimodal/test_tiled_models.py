"""Idefics3, SmolVLM, LLaVA-OneVision and LLaVA-NeXT-Video: prompts, chats, plans of tiles, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.smolvlm import processing_smolvlm

from quire.config import MediaConfig
from quire.errors import CheckpointError, RequestError, UnsupportedModelError
from quire.models.loader import load_model
from quire.multimodal import ImageProcessor, load_picture
from tests.multimodal.open_engine import ask, error_of, greedy, nothing_left, one, open_llm, prompt, tokens
from tests.multimodal.test_image_plans import SIZES as EXTREMES
from tests.multimodal.tiny_vision import IMAGE, VOCAB, build, image_processor, make, picture

IDEFICS3, SMOLVLM, ONEVISION, NEXT_VIDEO = (
    f"{name}ForConditionalGeneration" for name in ("Idefics3", "SmolVLM", "LlavaOnevision", "LlavaNextVideo")
)
SIZES = [(30, 100), (100, 30), (24, 24), (53, 47), (9, 17)]
# What Idefics3's templates write: a colon, with a space unless an image follows.
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- message.role ~ (':' if message.content[0].type == 'image' else ': ') -}}"
    "{%- for part in message.content -%}{{- '<image>' if part.type == 'image' else part.text -}}{%- endfor -%}"
    "{{- '\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"
)


def processor_of(architecture: str, variant: str, tokenizer: Any) -> Any:
    """transformers' own processor, without that of videos, which asks for torchvision."""
    kind: Any = getattr(transformers, architecture.replace("ForConditionalGeneration", "Processor"))
    made = kind.__new__(kind)
    made.image_processor, made.tokenizer, made.video_processor = image_processor(architecture, variant), tokenizer, None
    made.chat_template, made.image_seq_len, made.image_token, made.image_token_id = TEMPLATE, 4, "<image>", IMAGE
    made.fake_image_token, made.fake_image_token_id = "<fake_token_around_image>", VOCAB - 2
    made.global_image_token = made.global_image_tag = "<global-img>"
    made.video_token, made.video_token_id = "<video>", VOCAB
    made.num_image_tokens, made.vision_feature_select_strategy, made.patch_size = 9, "full", 8
    made.vision_aspect_ratio, made.num_additional_image_tokens = "anyres_max_2", 0
    return made


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        pytest.param(IDEFICS3, "squares", marks=pytest.mark.slow),
        (SMOLVLM, "squares"),
        (ONEVISION, "scaled"),
        pytest.param(NEXT_VIDEO, "average", marks=pytest.mark.slow),
    ],
)
def test_chats_are_those_of_transformers_processor(architecture: str, variant: str, tmp_path: Path) -> None:
    llm = open_llm(str(build(architecture, variant, tmp_path)), skip_tokenizer_init=False, num_gpu_blocks_override=400)
    theirs = processor_of(architecture, variant, llm.get_tokenizer())
    images = [picture(number, size) for number, size in enumerate(SIZES)]
    for chosen in ([0], [1, 2], [3, 4, 3], []):
        parts = [{"type": "image", "image": images[number]} for number in chosen]
        messages = [
            {"role": "user", "content": [*parts, {"type": "text", "text": "\nWhat is this?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A star."}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": "And \n"}, *parts[:1], {"type": "text", "text": "?"}],
            },
        ]
        shown = [images[number] for number in (*chosen, *chosen[:1])]
        text = llm.get_tokenizer().apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, chat_template=TEMPLATE
        )
        expected = torch.as_tensor(theirs(images=shown or None, text=text, add_special_tokens=False)["input_ids"][0])
        expected = expected.tolist()
        output = llm.chat(messages, greedy(), use_tqdm=False, chat_template=TEMPLATE)[0]
        assert list(output.prompt_token_ids) == expected and (IMAGE in expected) == bool(shown)
        placed = ask(llm, prompt(expected, shown))[0]
        assert list(placed.prompt_token_ids) == expected
        assert placed.outputs[0].token_ids == output.outputs[0].token_ids
    nothing_left(llm)


SETTINGS: dict[str, list[dict[str, Any]]] = {
    IDEFICS3: [
        {}, {"size": {"longest_edge": 72}}, {"do_image_splitting": False}, {"do_resize": False},
        {"size": {"height": 30, "width": 50}}, {"size": {"longest_edge": 1}}, {"max_image_size": {"longest_edge": 24}},
        {"size": {"longest_edge": 200}, "do_pad": False}, {"do_rescale": False, "do_normalize": False},
    ],
    ONEVISION: [
        {}, {"size": 40}, {"size": {"height": 30, "width": 50}}, {"do_pad": False}, {"do_resize": False}, {"size": 24},
    ],
}  # fmt: skip
SETTINGS[SMOLVLM], SETTINGS[NEXT_VIDEO] = SETTINGS[IDEFICS3], SETTINGS[ONEVISION]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("architecture", "variant"),
    [pytest.param(IDEFICS3, "squares", marks=pytest.mark.slow), (SMOLVLM, "squares"), (ONEVISION, "scaled")],
)
def test_plans_come_true(architecture: str, variant: str, tmp_path: Path) -> None:
    llm = open_llm(str(build(architecture, variant, tmp_path)))
    processor, model = llm.llm_engine.media.preprocessor.processor, llm.llm_engine.executor.runner.model
    layouts = set()
    for number, (width, height) in enumerate(EXTREMES):
        shown = load_picture(picture(number, (width, height)), MediaConfig())
        for given in SETTINGS[architecture]:
            settings = processor.settings(given)
            try:
                planned: Any = model.planned_layout((height, width), processor.plan(height, width, settings).final)
            except ValueError as error:
                planned = type(error)
            try:
                made: Any = model.image_layout(processor(shown, settings))
            except ValueError as error:
                made = type(error)
            assert isinstance(made, type) if isinstance(planned, type) else planned == made, (width, height, given)
            layouts.add(made)
    assert len(layouts) > 5


def test_a_tower_computes_no_layer_that_nobody_reads(tmp_path: Path) -> None:
    """The last layer and what stands behind it are made infinite: the features are the same."""
    theirs = make(NEXT_VIDEO, "average")
    path = build(NEXT_VIDEO, "average", tmp_path, theirs)
    model, processor = load_model(path), ImageProcessor(path, MediaConfig())
    inputs = processor(load_picture(picture(1, (60, 30)), MediaConfig()), {})
    with torch.inference_mode():
        expected = model.encode(inputs)
        for name, parameter in model.named_parameters():
            if "vision_tower" in name and ("layers.2." in name or "post_layernorm" in name):
                parameter.fill_(torch.inf)
        assert torch.equal(model.encode(inputs), expected) and expected.isfinite().all()


def test_a_black_tile_is_a_tile(tmp_path: Path) -> None:
    """Transformers takes a tile of zeros for padding, and the features behind it for those of others."""
    llm = open_llm(str(build(SMOLVLM, "squares", tmp_path)), mm_processor_kwargs={"do_normalize": False})
    image = picture(3, (48, 48))
    image.paste((0, 0, 0), (0, 0, 24, 24))
    expected = tokens(llm, one(image))
    assert len(expected[0]) == 6
    nothing_left(llm)


# Given features


def test_features_of_an_image_without_tiles_are_framed(tmp_path: Path) -> None:
    path = build(SMOLVLM, "no_tiles", tmp_path)
    llm, image = open_llm(str(path)), picture(1, (60, 30))
    model, processor = llm.llm_engine.executor.runner.model, llm.llm_engine.media.preprocessor.processor
    with torch.inference_mode():
        features = model.encode(processor(load_picture(image, MediaConfig()), {}))
    assert tokens(llm, one({"image_embeds": features})) == tokens(llm, one(image))
    many = ask(llm, one({"image_embeds": features.repeat(5, 1)}))[0]
    assert "of one in tiles they do not tell its rows and columns" in error_of(many)
    nothing_left(llm)


# What is refused


@pytest.fixture
def smolvlm(tmp_path: Path) -> Path:
    return build(SMOLVLM, "squares", tmp_path)


def edit(path: Path, name: str, **fields: Any) -> None:
    file = path / name
    written = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**written, **fields}))


@pytest.mark.parametrize(
    ("file", "fields", "error", "named"),
    [
        ("processor_config.json", {"image_seq_len": 9}, CheckpointError, "image_seq_len=9, .* 4 features of a tile"),
        ("preprocessor_config.json", {"max_image_size": {"longest_edge": 30}}, CheckpointError, "max_image_size is 30"),
        ("config.json", {"scale_factor": 3}, UnsupportedModelError, "scale_factor=3.*4 patches a side"),
        ("config.json", {"scale_factor": 0}, UnsupportedModelError, "scale_factor=0"),
        ("config.json", {"image_token_id": 300}, CheckpointError, "image_token_id=300: tokenizer and model"),
    ],
)
def test_files_that_contradict_each_other(
    smolvlm: Path, file: str, fields: dict[str, Any], error: type[Exception], named: str
) -> None:
    edit(smolvlm, file, **fields)
    with pytest.raises(error, match=named):
        open_llm(str(smolvlm))


def test_settings_that_the_processor_does_not_heed(smolvlm: Path) -> None:
    llm = open_llm(str(smolvlm))
    for given, named in (
        ({"do_center_crop": True}, "has no setting 'do_center_crop'"),
        ({"max_image_size": {"longest_edge": 48}}, "the model's tower takes {'longest_edge': 24} alone"),
        ({"size": {"shortest_edge": 48}}, "longest_edge"),
        ({"size": {"longest_edge": 10**6}}, "is more than max_image_pixels"),
    ):
        with pytest.raises(RequestError, match=named):
            ask(llm, one(picture(1, (30, 30)), mm_processor_kwargs=given))
    # 21 x 21 tiles are more than a prompt may have, which is found before they are made.
    large = one(picture(1, (30, 30)), mm_processor_kwargs={"size": {"longest_edge": 500}})
    assert "tokens" in error_of(ask(llm, large)[0])
    nothing_left(llm)


@pytest.mark.parametrize(
    ("architecture", "variant", "fields", "named"),
    [
        (ONEVISION, "scaled", {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio='pad'"),
        (ONEVISION, "scaled", {"vision_aspect_ratio": "anyres_max_0"}, "a number above 0"),
        (NEXT_VIDEO, "average", {"spatial_pool_mode": "median"}, "spatial_pool_mode='median'"),
        (NEXT_VIDEO, "average", {"spatial_pool_stride": 4}, "spatial_pool_stride=4"),
    ],
)
def test_fields_that_nobody_can_mean(
    architecture: str, variant: str, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    edit(path := build(architecture, variant, tmp_path), "config.json", **fields)
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(path)


def test_smolvlm_writes_images_as_idefics3() -> None:
    """Both families' oracles are transformers' own functions, which agree on what the model writes."""
    for rows, columns in ((0, 0), (1, 2), (2, 1)):
        inputs = {"rows": [[rows]], "cols": [[columns]]}
        theirs = processor_of(IDEFICS3, "squares", None).replace_image_token(inputs, 0)
        assert theirs == processing_smolvlm.get_image_prompt_string(
            rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>"
        )


def test_the_text_model_that_published_files_call_vllama3(smolvlm: Path) -> None:
    """Transformers goes by its model_type; what else SmolVLM's files say of it, nobody reads."""
    config = json.loads((smolvlm / "config.json").read_text())
    plain = tokens(open_llm(str(smolvlm)), prompt([5, 6, 7]))
    notes = {"architectures": ["VLlama3ForCausalLM"], "is_llama_config": True, "qk_layer_norms": False}
    edit(smolvlm, "config.json", text_config={**config["text_config"], **notes, "use_resampler": False})
    assert tokens(open_llm(str(smolvlm)), prompt([5, 6, 7])) == plain
