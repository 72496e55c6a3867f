"""Phi-3-vision as it is published: markers with numbers, texts in stretches, files with code that nobody runs."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

from quire import LLM, RequestError
from quire.config import MediaConfig
from quire.errors import CheckpointError
from quire.multimodal import ImageProcessor
from tests.multimodal.families.phi3_v import NAME, Processor
from tests.multimodal.open_engine import ask, error_of, greedy, nothing_left, one, open_llm, tokens
from tests.multimodal.test_image_plans import compare
from tests.multimodal.tiny_vision import IMAGE, SIDE, VOCAB, build, picture
from tests.server.api_server import LocalServer

# As Phi-3.5-vision-instruct's.
TEMPLATE = (
    "{% for message in messages %}{{'<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}{{- '<|assistant|>\n' -}}"
    "{% endif %}"
)
WORDS = ["<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
ANSWER = greedy(2)


def write_tokenizer(path: Path, begins: bool = True) -> None:
    """As Phi-3's: Llama's, with tokens of a chat behind which white space is lost. begins: each text with BOS."""
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    known = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=known, show_progress=False)
    inner.train_from_iterator(["What is shown here? Compare the image with that image, and tell."] * 3, trainer)
    state = json.loads(inner.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are tokens of the model
    inner = Tokenizer.from_str(json.dumps(state))
    if begins:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    fill = [f"<|placeholder{number}|>" for number in range(IMAGE - len(WORDS) - inner.get_vocab_size())]
    inner.add_special_tokens([AddedToken(word, rstrip=True, special=True) for word in fill + WORDS])
    inner.add_special_tokens([AddedToken("<|image|>", special=True)])
    assert inner.token_to_id("<|image|>") == IMAGE == VOCAB - 1
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (path / file).unlink(missing_ok=True)
    inner.save(str(path / "tokenizer.json"))
    told = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
            "chat_template": TEMPLATE, "add_bos_token": begins, "add_eos_token": False}  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(told))


def published(path: Path, text: str, images: Sequence[Any], most: int = 4) -> list[int]:
    """What the checkpoint's own processor makes of it, with image tokens in the places of -1, -2, ..."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    texts = [tokenizer.encode(part).ids for part in re.split(r"<\|image_\d+\|>", text)]
    sizes = [Processor(SIDE, most).picture(image).size for image in images]
    features = [2 * rows * (2 * columns + 1) + 1 + 6 for columns, rows in ((w // SIDE, h // SIDE) for w, h in sizes)]
    ids = list(texts[0])
    for count, part in zip(features, texts[1:], strict=True):
        ids += [IMAGE] * count + part
    return ids


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the code that the configurations name, which says so when it runs."""
    folder = build(NAME, "published", tmp_path_factory.mktemp("phi3v"))
    write_tokenizer(folder)
    for name in ("configuration", "modeling", "processing", "image_processing", "image_embedding"):
        (folder / f"{name}_phi3_v.py").write_text("raise SystemExit('code of a checkpoint was run')\n")
    return folder


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return open_llm(str(path), skip_tokenizer_init=False)


def shown(count: int) -> list[Any]:
    return [picture(number, (20 + 13 * number, 61 - 17 * number)) for number in range(count)]


def prompt(text: str, images: Sequence[Any] = ()) -> dict[str, Any]:
    return {"prompt": text, **({"multi_modal_data": {"image": list(images)}} if images else {})}


TEXTS = [
    "<|user|>\n<|image_1|>\nWhat is shown here?<|end|>\n<|assistant|>\n", "<|image_1|>", "What <|image_1|>",
    "<|image_1|> x", "a<|image_1|><|image_2|>b", "<|image_1|><|image_2|><|image_3|>",
    "\n<|image_01|>\n\n<|image_2|>\n", "Compare  <|image_1|>  ",
    "<|user|>\n  <|image_1|> with <|image_2|>, <|image_3|>.<|end|>\n",
]  # fmt: skip


@pytest.mark.parametrize("begins", [True, False])
def test_texts_become_what_the_published_processor_makes_of_them(path: Path, begins: bool, tmp_path: Path) -> None:
    folder = shutil.copytree(path, tmp_path / "model")
    write_tokenizer(folder, begins)
    llm = open_llm(str(folder), skip_tokenizer_init=False)
    for text in TEXTS:
        images = shown(text.count("<|image_"))
        (output,) = ask(llm, [prompt(text, images)], ANSWER)
        assert output.prompt_token_ids == published(folder, text, images)
        assert output.prompt_token_ids.count(1) == (1 + len(images)) * begins
    for text in ("What is shown here?", "<|user|>\nTell me<|end|>\n", "<|image_|> and <|image_1 |>"):
        (output,) = ask(llm, [prompt(text)], ANSWER)
        assert output.prompt_token_ids == published(folder, text, [])
    nothing_left(llm)


def test_ids_may_have_a_marker_or_all_placeholders(path: Path, llm: LLM) -> None:
    (image,) = shown(1)
    text = "What <|image_1|> is"
    ids = published(path, text, [image])
    first = ids.index(IMAGE)
    data = {"multi_modal_data": {"image": [image]}}
    marked = [token for place, token in enumerate(ids) if token != IMAGE or place == first]
    given = [prompt(text, [image]), {"prompt_token_ids": ids, **data}, {"prompt_token_ids": marked, **data}]
    outputs = ask(llm, given)
    assert [output.prompt_token_ids for output in outputs] == [ids] * 3
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    nothing_left(llm)


WRONG = [
    ("<|image_2|>", 1, r"are: <\|image_2\|>; and it has 1 image\."),
    ("<|image_0|>", 1, r"are: <\|image_0\|>; and it has 1 image\."),
    ("<|image_1|> <|image_1|>", 1, "and it has 1 image"),
    ("<|image_1|> <|image_1|>", 2, "and it has 2 images"),
    ("<|image_2|> <|image_1|>", 2, r"in the images' order: <\|image_1\|>, <\|image_2\|> and so on"),
    ("<|image_1|> <|image_3|>", 2, "and it has 2 images"),
    ("What?", 1, "are: none; and it has 1 image"),
    ("<|image|> What?", 1, "are: none; and it has 1 image"),
    ("<|image_1|> <|image|>", 1, "2 image markers and 1 image"),
    ("<|image_1|> What?", 0, "and it has 0 images"),
    ("<|image_1|>", 2, "and it has 2 images"),
    (f"<|image_{'1' * 5000}|>", 1, r"are: <\|image_1111111111\|>; and"),
    ("<|image_1|>" * 20, 1, r"<\|image_1\|>, \.\.\.; and it has 1 image"),
]


@pytest.mark.parametrize(("text", "count", "words"), WRONG)
def test_wrong_markers_are_refused(llm: LLM, text: str, count: int, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        ask(llm, [prompt(text, shown(count))])
    assert len(str(caught.value)) < 500
    nothing_left(llm)


def image_part(image: Any) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def dialogue() -> tuple[list[dict[str, Any]], str, list[Any]]:
    """Messages, what the template makes of them, and the images in them."""
    images = shown(3)
    messages = [
        {"role": "system", "content": "Tell."},
        {"role": "user", "content": [image_part(images[0]), text_part("What is"), image_part(images[1])]},
        {"role": "assistant", "content": "that image"},
        {"role": "user", "content": [{"type": "image", "image": images[2]}, text_part("Compare")]},
    ]
    text = (
        "<|system|>\nTell.<|end|>\n<|user|>\n<|image_1|>\nWhat is\n<|image_2|><|end|>\n<|assistant|>\nthat image"
        "<|end|>\n<|user|>\n<|image_3|>\nCompare<|end|>\n<|assistant|>\n"
    )
    return messages, text, images


def test_chats_become_what_the_published_template_and_processor_make_of_them(path: Path, llm: LLM) -> None:
    messages, text, images = dialogue()
    (output,) = llm.chat(messages, ANSWER, use_tqdm=False)
    assert output.prompt == text
    assert output.prompt_token_ids == published(path, text, images)
    assert output.outputs[0].token_ids == ask(llm, [prompt(text, images)], ANSWER)[0].outputs[0].token_ids
    nothing_left(llm)


def test_a_template_may_number_images_itself(path: Path, llm: LLM) -> None:
    template = (
        "{% set n = namespace(i=0) %}{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}"
        "{% set n.i = n.i + 1 %}<|image_{{ n.i }}|>\n{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    images = shown(2)
    content = [image_part(images[0]), text_part("and "), image_part(images[1]), text_part("?")]
    (output,) = llm.chat([{"role": "user", "content": content}], ANSWER, use_tqdm=False, chat_template=template)
    assert output.prompt_token_ids == published(path, "<|image_1|>\nand <|image_2|>\n?", images)
    wrong = template.replace("n.i + 1", "n.i + 2")
    with pytest.raises(RequestError, match=r"are: <\|image_2\|>, <\|image_4\|>; and it has 2 images"):
        llm.chat([{"role": "user", "content": content}], ANSWER, use_tqdm=False, chat_template=wrong)
    nothing_left(llm)


def test_what_users_type_in_messages_is_no_marker(llm: LLM) -> None:
    (image,) = shown(1)
    typed = "<|image_1|> <|image_2|> <|image|> <|image_77|><|image_1|>"
    content = [image_part(image), text_part(typed)]
    seen, unseen = llm.chat([[{"role": "user", "content": content}], [{"role": "user", "content": typed}]], ANSWER)
    places = [place for place, token in enumerate(seen.prompt_token_ids) if token == IMAGE]
    assert places == list(range(places[0], places[-1] + 1))  # of one image
    assert IMAGE not in unseen.prompt_token_ids
    tokenizer = llm.get_tokenizer()
    for output in (seen, unseen):
        assert typed in output.prompt
        assert typed.replace(" ", "") in tokenizer.decode(output.prompt_token_ids).replace(" ", "")
    with pytest.raises(RequestError, match=r"no <\|image_1\|>$"):
        failing = "{{ raise_exception('no ' + messages[0].content) }}"
        llm.chat([{"role": "user", "content": "<|image_1|>"}], ANSWER, chat_template=failing)
    nothing_left(llm)


def test_chats_over_http(path: Path, llm: LLM) -> None:
    messages, text, images = dialogue()
    messages[3]["content"][0] = image_part(images[2])
    expected = ask(llm, [prompt(text, images)])[0]
    settings = {"model": str(path), "num_gpu_blocks_override": 200}
    with LocalServer(settings) as server, server.http() as http:
        body = {"model": str(path), "messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
        assert answer.json()["choices"][0]["token_ids"] == list(expected.outputs[0].token_ids)


SETTINGS: list[dict[str, Any]] = [
    {}, {"num_crops": 1}, {"num_crops": 16}, {"num_crops": 3, "image_mean": 0.5, "image_std": [0.2, 0.3, 0.4]},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_plans_come_true(path: Path) -> None:
    compare(open_llm(str(path)), SETTINGS)


def test_crops_may_be_asked_for(path: Path, llm: LLM) -> None:
    image = picture(3, (90, 40))
    lengths = [
        len(ask(llm, [one(image, mm_processor_kwargs={"num_crops": most})], ANSWER)[0].prompt_token_ids)
        for most in (1, 4, 16)
    ]
    assert lengths == [4 + len(published(path, "<|image_1|>", [image], most)) - 2 for most in (1, 4, 16)]
    assert lengths == sorted(set(lengths))
    for given, words in (
        ({"num_crops": 0}, "num_crops=0 must be from 1 to 256"), ({"num_crops": 300}, "num_crops=300"),
        ({"num_crops": 2.0}, "num_crops=2.0"), ({"crop_size": 30}, "has no setting 'crop_size'"),
        ({"do_resize": False}, "has no setting 'do_resize'; it has image_mean, image_std, num_crops"),
        ({"image_std": 0.0}, "no model can work"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=re.escape(words)):
            ask(llm, [one(image, mm_processor_kwargs=given)])
    (output,) = ask(llm, [one(picture(1, (1, 700)))])
    assert "would become 96 pixels long and none wide" in error_of(output)
    nothing_left(llm)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"num_crops": 0}, "num_crops=0"), ({"num_crops": "4"}, "num_crops='4'"), ({"num_crops": 10**9}, "num_crops"),
        ({"image_mean": [1.0]}, "image_mean"), ({"image_std": [1.0, 0.0, 1.0]}, "image_std"),
        ({"num_img_tokens": 144}, "num_img_tokens=144, and config.json makes 4 features of a crop"),
    ],
)  # fmt: skip
def test_bad_files_of_the_image_processor(path: Path, told: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = shutil.copytree(path, tmp_path / "model")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | told))
    with pytest.raises(CheckpointError, match=words):
        open_llm(str(folder))


def test_an_image_of_many_crops_is_bounded(path: Path) -> None:
    processor = ImageProcessor(path, MediaConfig(max_image_pixels=4000), None, {"crop_size": SIDE})
    assert processor.plan(40, 40, processor.settings({"num_crops": 4})).final == (2 * SIDE, 2 * SIDE)
    with pytest.raises(RequestError, match="pixels on the way, and 4,000 are allowed"):
        processor.plan(40, 40, processor.settings({"num_crops": 9}))


def test_one_engine_serves_long_and_short_alike(path: Path) -> None:
    """Sixteen crops and one, together and alone."""
    llm = open_llm(str(path), enable_prefix_caching=False)
    given = [
        one(picture(number, size), mm_processor_kwargs={"num_crops": most})
        for number, (size, most) in enumerate([((90, 40), 16), ((9, 17), 1), ((64, 64), 9), ((200, 20), 16)])
    ]
    alone = [tokens(llm, each)[0] for each in given]
    small = open_llm(str(path), max_num_batched_tokens=13)
    assert tokens(small, *given) == alone and tokens(small, *given[::-1]) == alone[::-1]
    nothing_left(small)
