"""Prompts with images in every form that callers give them, as transformers' own processors read them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlavaNextProcessor, LlavaProcessor, Qwen2VLProcessor

from quire import LLM, RequestError
from tests.multimodal.open_engine import ask, error_of, greedy, nothing_left, one, open_llm, prompt, tokens
from tests.multimodal.tiny_vision import IMAGE, SIDE, image_processor, picture
from tests.platform.conftest import make_llama

A, B = picture(1, (30, 100)), picture(2, (24, 24))
SIZES = [(30, 100), (100, 30), (24, 24), (53, 47), (9, 17)]


@pytest.fixture(scope="module")
def llm(path):
    """One for all tests of a kind, with a tokenizer: each leaves it as it was."""
    return open_llm(path, skip_tokenizer_init=False)


@pytest.fixture(autouse=True)
def leaves_nothing(request):
    yield
    if "llm" in request.fixturenames:
        nothing_left(request.getfixturevalue("llm"))


# Markers

TWO_FOR_ONE = "the prompt has 2 image markers and 1 image: "
ONE_FOR_TWO = "the prompt has 1 image marker and 2 images: "
NONE_FOR_ONE = "the prompt has 0 image markers and 1 image: "
ONE_FOR_NONE = "the prompt has 1 image marker and 0 images: "


@pytest.mark.parametrize(
    ("given", "images", "message"),
    [
        ("a <image> and <image>", [A], TWO_FOR_ONE),
        ("a <image>", [A, B], ONE_FOR_TWO),
        ("nothing", [A], NONE_FOR_ONE),
        ("a <image>", [], ONE_FOR_NONE),
        ([5, IMAGE], [A, B], ONE_FOR_TWO),
        ([5], [A], NONE_FOR_ONE),
        ([5, IMAGE], [], ONE_FOR_NONE),
    ],
)
def test_markers_must_be_as_many_as_images(llm, given, images, message):
    key = "prompt" if isinstance(given, str) else "prompt_token_ids"
    with pytest.raises(RequestError, match=message):
        ask(llm, {key: given, "multi_modal_data": {"image": images}})


@pytest.mark.parametrize(("markers", "images"), [(2, 1), (3, 2), (40, 2), (60, 1)])
def test_ids_may_hold_markers_or_all_placeholders_and_nothing_between(llm, markers, images):
    output = ask(llm, prompt([5] + [IMAGE] * markers, [A, B][:images]))[0]
    assert f"the prompt has {markers} image markers and {images} image" in error_of(output)


def test_ids_with_all_placeholders_in_place(llm):
    for given in (one(A), prompt([IMAGE, 5, IMAGE, IMAGE, 6], [A, B, A]), prompt([IMAGE, IMAGE, 7], [A, B])):
        output = ask(llm, given)[0]
        placed = {**given, "prompt_token_ids": output.prompt_token_ids}
        assert len(output.prompt_token_ids) > len(given["prompt_token_ids"]) + 3
        again = ask(llm, placed)[0]
        assert again.prompt_token_ids == output.prompt_token_ids
        assert again.outputs[0].token_ids == output.outputs[0].token_ids


def test_placeholders_of_an_image_that_are_torn_apart(llm):
    ids = list(ask(llm, prompt([IMAGE, 7], [B]))[0].prompt_token_ids)
    torn = [*ids[:3], 7, *ids[3:]]
    assert f"{len(ids) - 1} image markers and 1 image" in error_of(ask(llm, prompt(torn, [B]))[0])


def processors_of(kind, llm):
    """transformers' processor, of the same tokenizer and image processor."""
    tokenizer, images = llm.get_tokenizer(), image_processor(kind.architecture, kind.variant)
    if kind.name == "qwen":
        made = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
        made.image_processor, made.tokenizer, made.video_processor = images, tokenizer, None
        made.image_token, made.image_token_id = "<image>", IMAGE
        made.video_token, made.video_token_id, made.chat_template = "<video>", None, None
        return made
    kind_of = LlavaNextProcessor if kind.name == "next" else LlavaProcessor
    assert SIDE == 24
    return kind_of(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


@pytest.mark.parametrize("size", SIZES)
def test_ids_are_those_of_transformers_processor(llm, kind, size):
    text, image = "USER: <image>\nWhat?", picture(3, size)
    theirs = processors_of(kind, llm)(images=image, text=text, return_tensors="pt")["input_ids"][0].tolist()
    output, placed = ask(llm, [{"prompt": text, "multi_modal_data": {"image": image}}, prompt(theirs, [image])])
    assert output.prompt_token_ids == placed.prompt_token_ids == theirs and IMAGE in theirs
    assert output.outputs[0].token_ids == placed.outputs[0].token_ids
    assert output.prompt == text


# Chat

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %} {% endfor %}"
)


def test_chat_with_images_in_two_messages_and_a_marker_that_was_typed(llm):
    messages = [
        {"role": "user", "content": [{"type": "image", "image": A}, {"type": "text", "text": "what is <image>"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a star"}]},
        {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "image_pil", "image_pil": B}]},
    ]
    chat = llm.chat(messages, greedy(), use_tqdm=False, chat_template=TEMPLATE)[0]
    ids = list(chat.prompt_token_ids)
    alone = [len(ask(llm, prompt([IMAGE], [image]))[0].prompt_token_ids) for image in (A, B)]
    assert ids.count(IMAGE) == sum(alone)
    words = llm.get_tokenizer().decode([token for token in ids if token != IMAGE])
    assert words == "user: \nwhat is <image> assistant: a star user: and\n "
    first, last = ids.index(IMAGE), len(ids) - ids[::-1].index(IMAGE)
    markers = [*ids[:first], IMAGE, *ids[first + alone[0] : last - alone[1]], IMAGE, *ids[last:]]
    assert ask(llm, prompt(markers, [A, B]))[0].outputs[0].token_ids == chat.outputs[0].token_ids
    assert tokens(llm, prompt(markers, [B, A])) != [chat.outputs[0].token_ids]


# Limits and keys


def test_the_number_of_images_is_limited(path):
    llm = open_llm(path, limit_mm_per_prompt={"image": 1})
    with pytest.raises(RequestError, match=r"has 2 images, and 1 are allowed: .* limit_mm_per_prompt"):
        ask(llm, prompt([IMAGE, IMAGE], [A, A]))
    assert tokens(llm, one(A))
    with pytest.raises(RequestError, match="or 'video' or 'audio'"):
        open_llm(path, limit_mm_per_prompt={"smell": 1})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"video": A}, "has 'video', and this model takes image"),
        ({"image": A, "audio": A}, "has 'audio', and this model takes image"),
        ({"image": A, "image_embeds": torch.zeros(9, 32)}, "not the keys"),
        ([A], "not list"),
        ({"image_embeds": {"image_embeds": torch.zeros(9, 32), "pixels": 3}}, r"not \['image_embeds', 'pixels'\]"),
    ],
)
def test_unknown_keys_are_refused(llm, data, message):
    with pytest.raises(RequestError, match=message):
        ask(llm, {"prompt_token_ids": [5, IMAGE], "multi_modal_data": data})
    with pytest.raises(RequestError, match="images"):
        ask(llm, {"prompt_token_ids": [5, IMAGE], "images": [A]})


def test_a_model_of_text_alone_takes_no_images(tmp_path):
    make_llama(tmp_path)
    llm = LLM(str(tmp_path))
    for more in ({"multi_modal_data": {"image": A}}, {"mm_processor_kwargs": {"size": 3}}):
        with pytest.raises(RequestError, match="takes text only"):
            ask(llm, {"prompt_token_ids": [5], **more})
    assert tokens(llm, {"prompt_token_ids": [5], "multi_modal_data": None, "mm_processor_kwargs": None})
