"""Prompts and chats of Qwen's and GLM's vision-language models: the ids are those of transformers' processor.

The templates are ours; what they write is what the checkpoints' own writes for images and texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.multimodal.open_engine import ask, greedy, nothing_left, open_llm, prompt
from tests.multimodal.tiny_vision import FAMILIES, IMAGE, VOCAB, build, image_processor, picture

QWEN = (
    "{%- for message in messages -%}{{- '<|im_start|>' ~ message.role ~ '\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
GLM = (
    "{{- '[gMASK]<sop>' -}}{%- for message in messages -%}{{- '<|' ~ message.role ~ '|>' -}}"
    "{%- if message.role == 'user' -%}{{- '\n' -}}{%- endif -%}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- '<|begin_of_image|><|image|><|end_of_image|>' -}}"
    "{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)
# transformers' processor, and the template.
PROCESSORS = {
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2_5_VLProcessor", QWEN),
    "Qwen3VLForConditionalGeneration": ("Qwen3VLProcessor", QWEN),
    "Glm4vForConditionalGeneration": ("Glm4vProcessor", GLM),
}
SIZES = [(30, 100), (100, 30), (24, 24), (53, 47), (9, 17)]


def processor_of(architecture: str, variant: str, tokenizer: Any) -> Any:
    """transformers' processor without the video processor, which asks for torchvision."""
    name, template = PROCESSORS[architecture]
    made = (kind := getattr(transformers, name)).__new__(kind)
    made.image_processor, made.tokenizer, made.video_processor = image_processor(architecture, variant), tokenizer, None
    words = FAMILIES[architecture].words
    made.image_token, made.image_token_id = words[IMAGE], IMAGE
    made.video_token, made.video_token_id = words[VOCAB - 2], VOCAB - 2
    made.video_start_id, made.video_end_id = VOCAB - 5, VOCAB - 6  # GLM's
    made.chat_template = template
    return made


@pytest.mark.parametrize("architecture", PROCESSORS)
def test_chats_are_those_of_transformers_processor(architecture: str, tmp_path: Path) -> None:
    variant = FAMILIES[architecture].quick[0]  # type: ignore[index]
    llm = open_llm(str(build(architecture, variant, tmp_path)), skip_tokenizer_init=False)
    theirs = processor_of(architecture, variant, llm.get_tokenizer())
    images = [picture(number, size) for number, size in enumerate(SIZES)]
    for chosen in ([0], [1, 2], [3, 4, 3], []):
        parts = [{"type": "image", "image": images[number]} for number in chosen]
        messages = [
            {"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A star."}]},
            {"role": "user", "content": [{"type": "text", "text": "And "}, *parts[:1], {"type": "text", "text": "?"}]},
        ]
        shown = [images[number] for number in (*chosen, *chosen[:1])]
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = theirs(images=shown or None, text=text, return_tensors="pt")["input_ids"][0].tolist()
        output = llm.chat(messages, greedy(), use_tqdm=False, chat_template=theirs.chat_template)[0]
        assert list(output.prompt_token_ids) == expected and (IMAGE in expected) == bool(shown)
        # The same as a text with markers, and as ids with all placeholders in their places.
        written, placed = ask(llm, [{"prompt": text, **_media(shown)}, prompt(expected, shown)])
        assert list(written.prompt_token_ids) == list(placed.prompt_token_ids) == expected
        assert written.outputs[0].token_ids == placed.outputs[0].token_ids == output.outputs[0].token_ids
    nothing_left(llm)


def _media(images: list[Any]) -> dict[str, Any]:
    return {"multi_modal_data": {"image": images}} if images else {}
