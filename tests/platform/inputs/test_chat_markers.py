"""The text of an image token where a user typed it: it stays text, whatever the template and the tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quire.errors import RequestError
from quire.platform.inputs.chat import render_chat, render_text
from quire.platform.inputs.tokenizer import encode_rendered, token_id_of
from tests.platform.inputs.test_chat_images import (
    DIALOGUE,
    LLAVA,
    LLAVA_TEMPLATE,
    QWEN,
    QWEN_TEMPLATE,
    VICUNA_TEMPLATE,
    byte_level,
    encoded,
    everywhere,
    llama,
    named,
    squeezed,
    user,
    words,
)


@everywhere
@pytest.mark.parametrize(
    ("template", "marker"), [(LLAVA_TEMPLATE, LLAVA), (QWEN_TEMPLATE, QWEN), (VICUNA_TEMPLATE, LLAVA)]
)
def test_a_typed_marker_stays_text(template: str, marker: str, tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": f"{marker} is a tag."},
        user(words(f"What does {marker} mean, or {marker}{marker}?"), named("data:1"), words(f"é {marker}")),
    ]
    options = {"image_marker": marker, "chat_template": template}
    prompt = render_chat(tokenizer(), messages, **options)
    image_id = tokenizer().convert_tokens_to_ids(marker)
    text = render_text(tokenizer(), messages, **options)
    assert text.count(marker) == 6 and prompt.token_ids.count(image_id) == 1 and prompt.images == ["data:1"]
    # LLaVA's template puts the image first, the others put it where it was: before the é.
    without = [token for token in prompt.token_ids if token != image_id]
    image_at = (
        text.index(marker, text.index("USER")) if template == LLAVA_TEMPLATE else text[: text.index("é")].rindex(marker)
    )
    assert squeezed(tokenizer().decode(without)) == squeezed(text[:image_at] + text[image_at + len(marker) :])


def test_exact_ids_around_a_typed_marker() -> None:
    message = user(words("a <image> b"), named("data:1"))
    prompt = render_chat(byte_level(), [message], image_marker=LLAVA, chat_template=VICUNA_TEMPLATE)
    typed = byte_level().encode(LLAVA, add_special_tokens=False, split_special_tokens=True)
    byte_level().encode("x")  # sets the switch back
    assert len(typed) > 1
    assert prompt.token_ids == [*encoded("<s>USER: a "), *typed, *encoded(" b\n<image> ASSISTANT:")]


@pytest.mark.parametrize("legacy", [True, False])
def test_pieces_of_a_llama_prompt_begin_without_a_space_of_their_own(legacy: bool) -> None:
    ids = encode_rendered(llama(legacy), ["is ", " a", "s<|im_end|>"], LLAVA)
    tokens = llama(legacy).convert_ids_to_tokens(ids)
    assert "".join(tokens) == "▁is▁<image>▁a<image>s<|im_end|>"
    assert token_id_of(llama(legacy), LLAVA) not in ids


@pytest.mark.parametrize("given", ["tools", "arguments", "result", "kwargs", "name"])
def test_a_marker_typed_elsewhere_stays_text(given: str) -> None:
    template = (
        "{{ tools | tojson }}{{ more | tojson }}{% for m in messages %}{{ m.role }}{{ m.name }}{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    typed = {given: LLAVA}
    nested = {"say": [{typed.get("arguments", "x"): [typed.get("arguments", "y")]}]}
    messages = [
        user(named("data:1")) | {"name": typed.get("name", "z")},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": nested}}]},
        {"role": "tool", "content": typed.get("result", "z")},
    ]
    options: dict[str, Any] = {
        "image_marker": LLAVA,
        "chat_template": template,
        "tools": [{"function": {"description": typed.get("tools", "z"), "enum": (typed.get("tools", "z"), 1, None)}}],
        "template_kwargs": {"more": {typed.get("kwargs", "z"): 1.5}},
    }
    text = render_text(byte_level(), messages, **options)
    prompt = render_chat(byte_level(), messages, **options)
    assert prompt.token_ids.count(byte_level().convert_tokens_to_ids(LLAVA)) == 1
    assert byte_level().decode(prompt.token_ids) == text
    assert text.count(LLAVA) == 1 + {"tools": 2, "arguments": 2}.get(given, 1)


def test_templates_may_change_case_and_strip() -> None:
    template = "{% for m in messages %}{{ m.content | upper | trim }}{{ m.content.title().strip() }}{% endfor %}"
    messages = [{"role": "user", "content": " <image> "}]
    assert render_text(byte_level(), messages, image_marker=LLAVA, chat_template=template) == "<image><image>"


def test_a_failing_template_quotes_what_was_typed() -> None:
    with pytest.raises(RequestError, match=r"failed: TemplateError: no <image>!$"):
        render_chat(
            byte_level(), [{"role": "user", "content": "<image>"}], image_marker=LLAVA,
            chat_template="{{ raise_exception('no ' + messages[0].content + '!') }}",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("contents", "template", "counts"),
    [
        (["<im", "age>"], "{% for m in messages %}{{ m.content }}{% endfor %}", "1 image marker for 0 images"),
        ([[named("data:1")], "<im", "age>"], "{% for m in messages %}{{ m.content }}{% endfor %}",
         "2 image markers for 1 image"),
        ([[named("data:1"), named("data:2")]], "{% for m in messages %}{% for c in m.content[:1] %}"
         "{{ '<image>' if c.type == 'image' else c.text }}{% endfor %}{% endfor %}", "1 image marker for 2 images"),
        ([[named("data:1")]], "{% for m in messages %}{% for c in m.content if c.text %}{{ c.text }}{% endfor %}"
         "{% endfor %}", "0 image markers for 1 image"),
        (["a"], "<image>{% for m in messages %}{{ m.content }}{% endfor %}", "1 image marker for 0 images"),
    ],
)  # fmt: skip
def test_as_many_image_tokens_as_images(contents: list[Any], template: str, counts: str) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    with pytest.raises(RequestError, match=f"the chat template wrote {counts}: '<image>'"):
        render_chat(byte_level(), messages, image_marker=LLAVA, chat_template=template)


def test_a_tokenizer_without_the_marker() -> None:
    options = {"image_marker": "<picture>", "chat_template": VICUNA_TEMPLATE}
    assert render_chat(byte_level(), [user(words("a"))], **options).token_ids == encoded("<s>USER: a ASSISTANT:")
    with pytest.raises(RequestError, match="no token '<picture>'"):
        render_chat(byte_level(), [user(named("data:1"))], **options)


def test_tokenizers_that_cannot_write_a_marker_as_text() -> None:
    class Slow:
        """Without a `tokenizers` object behind it."""

        special_tokens_map: dict[str, str] = {}  # noqa: RUF012

        def encode(self, text: str, **options: Any) -> list[int]:
            return encoded(text)

        def convert_tokens_to_ids(self, token: str) -> int:
            return int(byte_level().convert_tokens_to_ids(token))

        def convert_ids_to_tokens(self, token_id: int) -> str:
            return str(byte_level().convert_ids_to_tokens(token_id))

    inner = Tokenizer(models.WordLevel({"<unk>": 0, LLAVA: 1, "a": 2, "<s>": 3, "</s>": 4}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")  # its model itself knows the word
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for tokenizer in (Slow(), whole):
        options: dict[str, Any] = {"image_marker": LLAVA, "chat_template": template}
        assert len(render_chat(tokenizer, [user(named("data:1"))], **options).images) == 1
        with pytest.raises(RequestError, match="cannot write '<image>' but as its special token"):
            render_chat(tokenizer, [user(words("a<image>"))], **options)


def test_values_nested_too_deeply_are_refused() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    endless: list[Any] = []
    endless.append(endless)
    for value in (deep, endless):
        with pytest.raises(RequestError, match="nested too deeply"):
            render_chat(
                byte_level(), DIALOGUE, image_marker=QWEN, chat_template=QWEN_TEMPLATE, template_kwargs={"x": value}
            )
    for value in ({(1, 2): 3}, {1, 2}):
        with pytest.raises(RequestError, match="JSON"):
            render_chat(
                byte_level(), DIALOGUE, image_marker=QWEN, chat_template=QWEN_TEMPLATE, template_kwargs={"x": value}
            )


# ---------------------------------------------------------------------- continuing


@pytest.mark.parametrize(
    ("template", "marker", "text"),
    [
        (LLAVA_TEMPLATE, LLAVA, "USER: <image>\nWhat is <image>? ASSISTANT: Well, <image>"),
        (VICUNA_TEMPLATE, LLAVA, "<s>USER: <image>\nWhat is <image>? ASSISTANT: Well, <image>"),
        (QWEN_TEMPLATE, QWEN, "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is <|image_pad|>?"
         "<|im_end|>\n<|im_start|>assistant\nWell, <|image_pad|>"),
    ],
)  # fmt: skip
def test_continue_the_final_message(template: str, marker: str, text: str) -> None:
    options = {"image_marker": marker, "chat_template": template, "add_generation_prompt": False}
    question = user(named("data:1"), words(f"What is {marker}?"))
    for content in (f"Well, {marker}", [words(f"Well, {marker}")]):
        messages = [question, {"role": "assistant", "content": content}]
        ours = render_text(byte_level(), messages, continue_final_message=True, **options)
        assert ours.removeprefix("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n") == text
        ids = render_chat(byte_level(), messages, continue_final_message=True, **options).token_ids
        assert ids.count(byte_level().convert_tokens_to_ids(marker)) == 1
        assert byte_level().decode(ids) == ours


@pytest.mark.parametrize("content", [None, [], [words("a"), named("data:2")], [words(" ")]])
def test_continue_needs_a_text_at_the_end(content: Any) -> None:
    for template in (LLAVA_TEMPLATE, QWEN_TEMPLATE):
        with pytest.raises(RequestError, match="continue_final_message needs a last message with text"):
            render_chat(
                byte_level(), [user(named("data:1")), {"role": "assistant", "content": content}], image_marker=LLAVA,
                chat_template=template, add_generation_prompt=False, continue_final_message=True,
            )  # fmt: skip
