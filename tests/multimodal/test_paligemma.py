"""PaliGemma: texts that its processor lays out as a whole, prompts that see all of themselves, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import AutoTokenizer
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor

from quire.errors import CheckpointError, RequestError, UnsupportedModelError
from quire.models.loader import load_model
from quire.models.paligemma import PaliGemmaForConditionalGeneration
from quire.platform.execution import batch
from tests.multimodal.open_engine import ask, error_of, greedy, nothing_left, one, open_llm, prompt, tokens
from tests.multimodal.test_image_plans import compare
from tests.multimodal.tiny_vision import FAMILIES, IMAGE, Oracle, build, image_processor, make, picture

PALIGEMMA = "PaliGemmaForConditionalGeneration"
BOS, PATCHES = 1, 9
TEXTS = [
    "<image>caption en", "caption en", "see <image> there", "<image><image>both", "<image>\nfirst, <image>then",
    "", "<image>", "two", "<image>detect <loc0000><loc1023> ; <seg127>", "<image> a line\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With a tokenizer that writes BOS before a text, as PaliGemma's did."""
    folder = build(PALIGEMMA, "gemma", tmp_path_factory.mktemp("paligemma"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(  # as quire's tests of tokenizers do
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).encode("a")[0] == BOS
    return str(folder)


def theirs(path: str, text: str, images: list[Any]) -> list[int]:
    """The ids that transformers' processor makes."""
    processor = PaliGemmaProcessor(image_processor(PALIGEMMA, "gemma"), AutoTokenizer.from_pretrained(path))
    return list(processor(text=[text], images=[images])["input_ids"][0])


def pictures(text: str) -> list[Any]:
    """As many as it has markers; of a text without any, one, or two if it says so."""
    return [picture(number, (30, 40)) for number in range(text.count("<image>") or 1 + (text == "two"))]


@pytest.mark.filterwarnings("ignore")
def test_texts_become_what_the_processor_makes_of_them(path: str) -> None:
    llm = open_llm(path, skip_tokenizer_init=False)
    for text in TEXTS:
        images = pictures(text)
        expected = theirs(path, text, images)
        (output,) = ask(llm, [{"prompt": text, "multi_modal_data": {"image": images}}])
        assert output.prompt_token_ids == expected, text
        assert expected.count(IMAGE) == PATCHES * len(images) and expected.count(BOS) == 1
    nothing_left(llm)


@pytest.mark.filterwarnings("ignore")
def test_chats_become_what_the_processor_makes_of_them(path: str) -> None:
    """What a user typed is no marker: BOS stands behind the last image."""
    llm = open_llm(path, skip_tokenizer_init=False)
    template = (
        "{% for m in messages %}{% for p in m.content %}"
        "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    images = [picture(number, (30, 40)) for number in (3, 4)]
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "compare"}]
    output = llm.chat([{"role": "user", "content": parts}], greedy(), chat_template=template, use_tqdm=False)[0]
    assert output.prompt_token_ids == theirs(path, "<image><image>compare", images)
    typed = [parts[0], {"type": "text", "text": "a <image> is"}]
    output = llm.chat([{"role": "user", "content": typed}], greedy(), chat_template=template, use_tqdm=False)[0]
    ids = output.prompt_token_ids
    assert ids[: PATCHES + 1] == [IMAGE] * PATCHES + [BOS] and ids.count(IMAGE) == PATCHES
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(ids[PATCHES + 1 :]) == "a <image> is\n"
    nothing_left(llm)


def test_a_text_alone_is_refused(path: str) -> None:
    """Transformers' processor takes none, and its model answers otherwise by another attention."""
    llm = open_llm(path, skip_tokenizer_init=False)
    for given in ("caption en", prompt([5, 6])):
        with pytest.raises(RequestError, match="with an image among them: give one"):
            llm.generate([given], greedy(), use_tqdm=False)
    with pytest.raises(RequestError, match="2 image markers and 1 image"):
        ask(llm, [{"prompt": "<image><image>", "multi_modal_data": {"image": [picture(0, (30, 40))]}}])
    with pytest.raises(RequestError, match="no token '<loc0005>'"):
        ask(llm, [{"prompt": "<loc0005><loc1024>", "multi_modal_data": {"image": [picture(0, (30, 40))]}}])
    nothing_left(llm)


def test_a_prompt_that_no_step_takes_is_refused(path: str) -> None:
    llm = open_llm(path, max_num_batched_tokens=PATCHES + 4)
    image = picture(0, (30, 40))
    answered, refused = ask(llm, [one(image), one(image, after=(7, 8, 9))])
    assert len(answered.outputs[0].token_ids) == 6
    assert f"takes {PATCHES + 4} here: raise max_num_batched_tokens" in error_of(refused)
    (refused,) = ask(llm, [one({"image_embeds": torch.randn(8, 32)})])
    assert f"{PATCHES} features" in error_of(refused)
    nothing_left(llm)


def test_later_tokens_are_seen_and_answers_are_causal(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [one(picture(number, (24, 24))) for number in range(4)]
    before = tokens(open_llm(path), *given)
    monkeypatch.setattr(PaliGemmaForConditionalGeneration, "prompt_sees", False)
    assert tokens(open_llm(path), *given) != before


def test_a_prompt_sees_all_of_itself_whatever_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the answer behind it keeps to the window, as in transformers."""
    oracle = Oracle(PALIGEMMA, "gemma2")
    path, images = build(PALIGEMMA, "gemma2", tmp_path, oracle.model), [picture(1, (30, 40)), picture(2, (24, 24))]
    window, ids = oracle.model.config.text_config.sliding_window, [5, 6, IMAGE, 9, IMAGE, BOS, 7, 8, 9]
    length = len(ids) + 2 * (PATCHES - 1)
    assert window < length
    given, params = prompt(ids, images), greedy(window + 4, prompt_logprobs=0)
    llm = open_llm(str(path))
    (output,) = ask(llm, [given], params)
    expanded, answer = oracle.answer(ids, images, window + 4)
    assert output.prompt_token_ids == expanded and list(output.outputs[0].token_ids) == answer
    with torch.inference_mode():
        inputs = oracle.inputs(images) | oracle.family.types(expanded)
        inputs["pixel_values"] = inputs["pixel_values"].double()
        scores = oracle.model.double()(input_ids=torch.tensor([expanded]), **inputs).logits[0].log_softmax(-1)
    found = [known[token].logprob for token, known in zip(expanded[1:], output.prompt_logprobs[1:], strict=True)]
    truth = scores[torch.arange(length - 1), torch.tensor(expanded[1:])]
    assert ((torch.tensor(found) - truth).abs() < 1e-4 + 2e-5 * truth.abs()).all()  # as of adapters' scores
    beside = ask(llm, [given, one(images[0]), given], params)  # others are computed in the same steps
    assert [each.prompt_logprobs for each in beside[::2]] == [output.prompt_logprobs] * 2
    monkeypatch.setattr(batch, "whole_prompts", lambda *_: None)
    (hidden,) = ask(open_llm(str(path)), [given], params)
    assert hidden.prompt_logprobs != output.prompt_logprobs


def test_an_image_token_that_the_vocabulary_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variants: Any = FAMILIES[PALIGEMMA].variants
    tower, text, *more = variants["gemma2"]
    monkeypatch.setitem(variants, "gemma2", (tower, {**text, "vocab_size": IMAGE}, *more))
    oracle = Oracle(PALIGEMMA, "gemma2")
    path, images = build(PALIGEMMA, "gemma2", tmp_path, oracle.model), [picture(1, (30, 40)), picture(2, (24, 24))]
    ids = [IMAGE, 5, 6, IMAGE, BOS, 7, 8, 9]
    llm = open_llm(str(path))
    expanded, answer = oracle.answer(ids, images, 12)
    (output,) = ask(llm, [prompt(ids, images)], greedy(12))
    assert output.prompt_token_ids == expanded and list(output.outputs[0].token_ids) == answer
    nothing_left(llm)


@pytest.mark.filterwarnings("ignore")
def test_plans_come_true(path: str) -> None:
    compare(open_llm(path), [{}, {"size": {"height": 30, "width": 50}}, {"do_resize": False}])


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_the_file_says_of_both_directions_changes_nothing(tmp_path: Path) -> None:
    """A prompt's ranges say it, here and in transformers."""
    given = one(picture(1, (30, 40)))
    folder = build(PALIGEMMA, "gemma", tmp_path)
    before = tokens(open_llm(str(folder)), given)
    for value in (False, True, None):
        changed = edited(folder, lambda config, value=value: config["text_config"].update(
            use_bidirectional_attention=value))  # fmt: skip
        assert tokens(open_llm(str(changed)), given) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda config: config.update(projection_dim=24), "projection_dim=24"),
        (lambda config: config["text_config"].update(model_type="llama"), "gemma, gemma2"),
        (lambda config: config["vision_config"].update(model_type="clip_vision_model"), "siglip_vision_model"),
        (
            lambda config: config["text_config"].update(
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "must not depend on the length",
        ),
    ],
)
def test_what_is_not_computed_is_refused(
    change: Callable[[dict[str, Any]], object], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(edited(build(PALIGEMMA, "gemma", tmp_path, make(PALIGEMMA, "gemma")), change))


def test_an_image_processor_of_another_size(tmp_path: Path) -> None:
    folder = build(PALIGEMMA, "gemma", tmp_path)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_seq_length": 16}))
    with pytest.raises(CheckpointError, match=r"image_seq_length is 16, and .* makes 9 features"):
        open_llm(str(folder))
