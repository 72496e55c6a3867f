"""Texts and chats with images against Hugging Face's own processors, and what callers may ask of image processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from tests.multimodal.families.gemma import END, LINES, WORDS
from tests.multimodal.open_engine import ask, error_of, greedy, nothing_left, one, open_llm
from tests.multimodal.test_image_plans import compare
from tests.multimodal.tiny_vision import IMAGE, build, image_processor, picture

SMALL = {"size": {"height": 30, "width": 50}}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "InternVLForConditionalGeneration-tiles": [
        {}, {"crop_to_patches": False}, {"max_patches": 7}, {"max_patches": 6, "min_patches": 4}, {"max_patches": 1},
        {"min_patches": 9}, SMALL,
    ],
    "Mistral3ForConditionalGeneration-merged": [
        {}, {"size": {"longest_edge": 20}}, {"size": {"longest_edge": 7}}, {"do_resize": False}, SMALL,
        {"size": {"longest_edge": 3}},
    ],
    "Gemma3ForConditionalGeneration-windows": [{}, SMALL, {"do_resize": False}],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", SETTINGS)
def test_plans_come_true(case: str, tmp_path: Path) -> None:
    compare(open_llm(str(build(*case.split("-"), tmp_path))), SETTINGS[case])


TEXTS = [
    "{0} says", "a {0}b", "first\n{0}\nthen {0}", "\n\n{0}\n\n\nwhat?", "{0}{0}", "no\n\n picture", "x {0}\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build("Gemma3ForConditionalGeneration", "windows", tmp_path_factory.mktemp("gemma")))


def theirs(path: str, text: str, images: list[Any]) -> list[int]:
    """The ids that transformers' processor makes."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    names = ("boi_token", "image_token", "eoi_token")
    for (number, word), name in zip(WORDS.items(), names, strict=True):
        setattr(tokenizer, name, word)
        setattr(tokenizer, f"{name}_id", number)
    own = image_processor("Gemma3ForConditionalGeneration", "windows")
    processor = Gemma3Processor(own, tokenizer, image_seq_length=9)
    return list(processor(text=text, images=images or None)["input_ids"][0])


def test_texts_become_what_gemmas_processor_makes_of_them(gemma: str) -> None:
    llm = open_llm(gemma, skip_tokenizer_init=False)
    marker = WORDS[IMAGE]
    for number, form in enumerate(TEXTS):
        text = form.format(marker)
        images = [picture(number + place, (30, 40)) for place in range(text.count(marker))]
        expected = theirs(gemma, text, images)
        (output,) = ask(llm, [{"prompt": text, **({"multi_modal_data": {"image": images}} if images else {})}])
        assert output.prompt_token_ids == expected
        assert output.prompt_token_ids.count(END) == len(images)
        assert LINES.keys() & set(output.prompt_token_ids)
    nothing_left(llm)


def test_chats_become_what_gemmas_processor_makes_of_them(gemma: str) -> None:
    llm = open_llm(gemma, skip_tokenizer_init=False)
    template = (
        "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}"
        "{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text }}{% endif %}{% endfor %}\n{% endfor %}"
    )
    image = picture(3, (30, 40))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "what is it"}]
    output = llm.chat([{"role": "user", "content": parts}], greedy(), chat_template=template, use_tqdm=False)[0]
    assert output.prompt_token_ids == theirs(gemma, "[user]<start_of_image>what is it", [image])
    nothing_left(llm)


def test_crops_are_refused_and_so_are_features_of_another_number(gemma: str) -> None:
    llm = open_llm(gemma)
    with pytest.raises(Exception, match="has no setting 'do_pan_and_scan'"):
        ask(llm, one(picture(1, (40, 160)), mm_processor_kwargs={"do_pan_and_scan": True}))
    (output,) = ask(llm, one({"image_embeds": torch.randn(8, 32)}))
    assert "9 features" in error_of(output)
    nothing_left(llm)


def test_rows_need_a_grid(tmp_path: Path) -> None:
    """Features that a caller brings do not say how they lie."""
    llm = open_llm(str(build("Mistral3ForConditionalGeneration", "merged", tmp_path)))
    features = torch.randn(6, 32)
    (output,) = ask(llm, one({"image_embeds": features}))
    assert "must come with their image_grid_thw" in error_of(output)
    (output,) = ask(llm, one({"image_embeds": features, "image_grid_thw": torch.tensor([1, 4, 6])}))
    assert output.prompt_token_ids == [5, 6, *[383] * 3, 382, *[383] * 3, 381, 7, 8]
    nothing_left(llm)
