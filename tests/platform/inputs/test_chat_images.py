"""Chat messages with images: every form of part, of template and of tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from quire.errors import RequestError
from quire.platform.inputs import chat, chat_renderer
from quire.platform.inputs.chat import render_chat, render_text

LLAVA, QWEN = "<image>", "<|image_pad|>"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", LLAVA, QWEN]
CORPUS = ["USER: What is this? ASSISTANT: An image of a system, the <image> and the image_pad.", "tool look place"]

# llava-hf/llava-1.5-7b-hf: takes lists only, and puts images first.
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{# Render all images first #}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}{# Render all text next #}{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# Qwen/Qwen2-VL-2B-Instruct, without its videos: takes a text or a list.
QWEN_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "<|im_end|>\n{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in "
    "content or 'image_url' in content %}{% set image_count.value = image_count.value + 1 %}{% if add_vision_id %}"
    "Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content "
    "%}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% endif %}"
)
# Vicuna's, with tools: takes a text only, and fails on lists.
VICUNA_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content + ' ' }}{% elif message.role == 'user' %}"
    "{{ 'USER: ' + message.content + ' ' }}{% elif message.content is none %}"
    "{{ 'ASSISTANT: ' + (message.tool_calls | tojson) + eos_token }}"
    "{% else %}{{ 'ASSISTANT: ' + message.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"far": [1, None]}}}
PICTURE = Image.new("RGB", (2, 2))


def named(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def _wrap(inner: Tokenizer, special: bool = True) -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.add_tokens([AddedToken(name, special=special or name not in (LLAVA, QWEN)) for name in SPECIAL])
    return made


@cache
def byte_level(special: bool = True) -> Any:
    """As Qwen's."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    return _wrap(inner, special)


@cache
def llama(legacy: bool) -> Any:
    """As Llama 2's, with a space before every stretch of text (legacy) or before the first."""
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if legacy:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fallback = ["<unk>", *(f"<0x{value:02X}>" for value in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=fallback, show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    # Those 256 are tokens of the model, and no added ones.
    state = json.loads(inner.to_str())
    state["added_tokens"] = state["added_tokens"][:1]
    return _wrap(Tokenizer.from_str(json.dumps(state)))


TOKENIZERS = {
    "byte-level": lambda: byte_level(),
    "marker not special": lambda: byte_level(special=False),
    "llama, legacy": lambda: llama(True),
    "llama": lambda: llama(False),
}
everywhere = pytest.mark.parametrize("tokenizer", [pytest.param(made, id=name) for name, made in TOKENIZERS.items()])


def encoded(text: str, tokenizer: Any = None) -> list[int]:
    return list((tokenizer or byte_level()).encode(text, add_special_tokens=False))


def squeezed(text: str) -> str:
    """Without white space, which Llama's tokenizers put where there was none."""
    return "".join(text.split())


def seen_by_templates(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every set of variables that goes to the rendering process from now on, as JSON."""
    jobs: list[Any] = []
    render = chat_renderer.RENDERER.render

    def spy(template: str, variables: Any) -> str:
        jobs.append(json.loads(json.dumps(variables)))
        return render(template, variables)

    monkeypatch.setattr(chat_renderer.RENDERER, "render", spy)
    return jobs


DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    user(words("Compare"), named("data:1"), words("with"), named("data:2")),
    {"role": "assistant", "content": "Same."},
    user({"type": "image", "url": "data:3"}, words("And this?")),
]


@pytest.mark.parametrize(
    ("template", "marker", "text"),
    [
        (
            LLAVA_TEMPLATE,
            LLAVA,
            "Be brief. USER: <image>\n<image>\nCompare with ASSISTANT: Same. USER: <image>\nAnd this? ASSISTANT:",
        ),
        (
            QWEN_TEMPLATE,
            QWEN,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
            "Compare<|vision_start|><|image_pad|><|vision_end|>with<|vision_start|><|image_pad|><|vision_end|>"
            "<|im_end|>\n<|im_start|>assistant\nSame.<|im_end|>\n<|im_start|>user\n"
            "<|vision_start|><|image_pad|><|vision_end|>And this?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            VICUNA_TEMPLATE,
            LLAVA,
            "<s>Be brief. USER: Compare\n<image>\nwith\n<image> ASSISTANT: Same.</s>"
            "USER: <image>\nAnd this? ASSISTANT:",
        ),
    ],
    ids=["llava", "qwen2-vl", "vicuna"],
)
@everywhere
def test_each_kind_of_template_and_the_order_of_images(template: str, marker: str, text: str, tokenizer: Any) -> None:
    options = {"image_marker": marker, "chat_template": template}
    prompt = render_chat(tokenizer(), DIALOGUE, **options)
    assert prompt.images == ["data:1", "data:2", "data:3"]
    assert render_text(tokenizer(), DIALOGUE, **options) == text
    assert prompt.token_ids == encoded(text, tokenizer())
    assert prompt.token_ids.count(tokenizer().convert_tokens_to_ids(marker)) == 3


@pytest.mark.parametrize("add_vision_id", [True, False])
def test_renders_images_as_transformers_does(add_vision_id: bool) -> None:
    theirs = byte_level().apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            user(words("Compare"), {"type": "image"}, words("with"), {"type": "image"}),
            {"role": "assistant", "content": "Same."},
            user({"type": "image"}, words("And this?")),
        ],
        chat_template=QWEN_TEMPLATE, add_generation_prompt=True, tokenize=False, add_vision_id=add_vision_id,
    )  # fmt: skip
    ours = render_text(
        byte_level(), DIALOGUE, image_marker=QWEN, chat_template=QWEN_TEMPLATE,
        template_kwargs={"add_vision_id": add_vision_id},
    )  # fmt: skip
    assert ours == theirs and ("Picture 3: " in ours) is add_vision_id


@pytest.mark.parametrize("template", [LLAVA_TEMPLATE, QWEN_TEMPLATE, VICUNA_TEMPLATE])
def test_a_text_and_a_list_of_one_text_are_the_same(template: str) -> None:
    as_text, as_list = (
        [
            {"role": "system", "content": part("Be brief.")},
            {"role": "user", "content": part("Hello")},
            {"role": "assistant", "content": part("Well met")},
            {"role": "user", "content": part("")},
        ]
        for part in (str, lambda text: [words(text)])
    )
    prompts = [
        render_text(byte_level(), messages, image_marker=QWEN, chat_template=template)
        for messages in (as_text, as_list)
    ]
    assert prompts[0] == prompts[1] and "Be brief." in prompts[0] and "Well met" in prompts[0]


def test_without_images_a_template_of_texts_sees_what_it_always_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = seen_by_templates(monkeypatch)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    tools = [{"type": "function", "function": {"name": "look"}}]
    for marker in (None, LLAVA):
        render_chat(byte_level(), messages, image_marker=marker, chat_template=VICUNA_TEMPLATE, tools=tools)
        assert jobs[-1]["messages"] == messages and jobs[-1]["tools"] == tools


def test_lists_are_exactly_texts_and_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the type nothing is said of an image: templates look for 'image_url' and the like."""
    jobs = seen_by_templates(monkeypatch)
    messages = [*DIALOGUE, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "x"}]
    calls = "{% for message in messages if message.tool_calls %}{{ message.tool_calls | tojson }}{% endfor %}"
    for template, marker in ((LLAVA_TEMPLATE, LLAVA), (QWEN_TEMPLATE, QWEN)):
        render_chat(byte_level(), messages, image_marker=marker, chat_template=template + calls)
        contents = [message["content"] for message in jobs[-1]["messages"]]
        assert contents[1] == [words("Compare"), {"type": "image"}, words("with"), {"type": "image"}]
        assert contents[3] == [{"type": "image"}, words("And this?")]
        only_lists = template == LLAVA_TEMPLATE
        assert contents[2] == ([words("Same.")] if only_lists else "Same.")
        assert contents[4] == ([] if only_lists else "")  # nothing that iterating or trimming would fail on
        assert jobs[-1]["messages"][4]["tool_calls"] == [CALL]
        assert contents[5] == ([words("x")] if only_lists else "x")


def test_a_system_message_that_must_be_a_text() -> None:
    """Llama 3.2 Vision's way: lists from users, and a text from the system."""
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}|{% set messages = messages[1:] %}"
        "{% endif %}{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    for system in ("Be brief.", [words("Be brief.")]):
        messages = [{"role": "system", "content": system}, user(named("data:1"), words("a"), words("b"))]
        text = render_text(byte_level(), messages, image_marker=LLAVA, chat_template=template)
        assert text == "Be brief.|<image>ab"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (LLAVA_TEMPLATE, "parts"),
        (QWEN_TEMPLATE, "either"),
        (VICUNA_TEMPLATE, "text"),
        ("'type' {% for m in messages %}{% for c in m.content %}'{{ c.text }}'{% endfor %}{% endfor %}", "parts"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "text"),  # writes Python's way of a list
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", "text"),
        ("{% for m in messages %}{{ m.content | tojson | tojson | e }}{% endfor %}", "text"),
        ("{% for m in messages %}{{ m.content | map(attribute='type') | join }}{% endfor %}", "text"),
        ("{{ raise_exception('never') }}", "text"),
        ("{% for", "text"),
    ],
)
def test_forms_of_templates(template: str, form: str) -> None:
    assert chat._form_of(template, json.dumps(byte_level().special_tokens_map)) == form


def test_a_templates_form_is_found_once_and_not_all_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = seen_by_templates(monkeypatch)
    template = QWEN_TEMPLATE + "{# a template not met before #}"
    for _ in range(3):
        render_chat(byte_level(), DIALOGUE, image_marker=QWEN, chat_template=template)
    assert len(jobs) == 2 + 3
    assert chat._form_of.cache_info().maxsize == chat._FORMS_KEPT


def test_a_template_that_was_stopped_has_no_form_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Perhaps the machine was busy: to take it for one of texts would last."""
    render = chat_renderer.RENDERER.render
    template = LLAVA_TEMPLATE + "{# slow at first #}"
    answers = iter([lambda *job: (_ for _ in ()).throw(RequestError("the chat template ... was stopped"))])
    monkeypatch.setattr(chat_renderer.RENDERER, "render", lambda *job: next(answers, render)(*job))
    with pytest.raises(RequestError, match="stopped"):
        render_chat(byte_level(), DIALOGUE, image_marker=LLAVA, chat_template=template)
    assert render_text(byte_level(), DIALOGUE[1:2], image_marker=LLAVA, chat_template=template) == (
        "USER: <image>\n<image>\nCompare with ASSISTANT:"
    )


def test_the_process_is_sent_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = seen_by_templates(monkeypatch)
    monkeypatch.setattr(chat_renderer, "MAX_INPUT", 5000)
    parts = [named("data:image/png;base64," + "A" * 100_000), {"type": "image", "image": PICTURE}, words("b")]
    for template in (LLAVA_TEMPLATE, VICUNA_TEMPLATE):
        prompt = render_chat(byte_level(), [user(*parts)], image_marker=LLAVA, chat_template=template)
        assert len(prompt.images) == 2 and "AAAA" not in json.dumps(jobs)
        with pytest.raises(RequestError, match="bytes of JSON, the limit is 5000"):
            render_chat(byte_level(), [user(words("b" * 5000))], image_marker=LLAVA, chat_template=template)


def test_the_process_imports_little() -> None:
    code = (
        "import quire.platform.inputs.chat_renderer, sys; "
        "print({'torch', 'numpy', 'PIL', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
