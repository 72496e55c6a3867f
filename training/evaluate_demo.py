"""Examines quire-demo: greedy answers about texts, pictures and clips, and tool calls, that training never saw.

    python training/evaluate_demo.py [--exam text|pictures|clips|json|calls|all] [--backend transformers]

Prints the share of right answers by kind of question, and exits with status 1 when a share is under the required one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from calls import call_exam, calls_of
from clip_chats import VIDEO, clip_exam
from dialogues import exam
from json_answers import Chat, json_exam, parsed, schema_of
from picture_chats import IMAGE, picture_exam
from PIL import Image
from world import is_held_out

if TYPE_CHECKING:
    from quire import StructuredOutputsParams

HERE = Path(__file__).resolve().parent
MODEL_FOLDER = HERE.parent / "quire" / "demo" / "model"
# Of the groups of each exam, the least share of right answers.
REQUIRED = {
    "text": {"overall": 0.95},
    "pictures": {"color": 0.95, "shape": 0.95, "count": 0.90},
    "clips": {"what changed": 0.90, "overall": 0.90},
    "json": {"shapes": 0.95, "shapes, forced": 0.85},
    "calls": {"draw(shape, color)": 0.95, "count(kind)": 0.95},
}
MAX_NEW_TOKENS = 40  # the longest right answer in words, a description, has about 30
MAX_NEW_TOKENS_SHAPED = 160  # two calls, or a list of three shapes, have about 120


@dataclass(frozen=True)
class Item:
    """A conversation that ends with a question, its picture or clip if it is about one, and how its answer counts.

    clip: frames; tools: what may be called; schema: of the answer; begun: what the schema forces at the answer's start;
    read: what counts of an answer. Through quire the tools and the schema hold the answer to their form, as when it is
    served; transformers is only given the start.
    """

    chat: Chat
    image: Image.Image | None
    expected: str
    groups: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] = ()
    schema: dict[str, Any] | None = None
    begun: str = ""
    read: Callable[[str], Any] = str.strip
    clip: tuple[Image.Image, ...] = ()

    def right(self, answer: str) -> bool:
        return self.read(answer) == self.read(self.expected)

    @property
    def longest(self) -> int:
        """So many tokens an answer may have."""
        return MAX_NEW_TOKENS if self.read is str.strip else MAX_NEW_TOKENS_SHAPED


Answerer = Callable[[Sequence[Item]], list[str]]


def text_items(seed: int, size: int) -> list[Item]:
    """Held-out questions about scenes and stories that are told."""
    return [
        Item(one.chat, None, one.expected, (one.question.kind, _seen(one.about), "overall"))
        for one in exam(Random(f"exam {seed}"), size)
    ]


def _seen(about: Any) -> str:
    return "(scene or story held out)" if is_held_out(about) else "(question held out)"


def picture_items(seed: int, size: int) -> list[Item]:
    """Questions about pictures that nobody has seen, a tenth of them of scenes that are held out."""
    return [
        Item(
            [{"role": "user", "content": one.question.text}],
            one.picture.image,
            one.expected,
            (one.question.kind, *(["(scene held out)"] if is_held_out(one.picture.scene) else []), "overall"),
        )
        for one in picture_exam(Random(f"pictures {seed}"), size)
    ]


def clip_items(seed: int, size: int) -> list[Item]:
    """Questions about clips that nobody has seen, half of them of changes or scenes that are held out."""
    items = []
    for one in clip_exam(Random(f"clips {seed}"), size):
        kind = one.question.kind
        change = [f"what changed: {one.clip.change.kind}"] if kind == "what changed" else []
        seen = ["(change or scene held out)"] if one.clip.held_out else []
        chat = [{"role": "user", "content": one.question.text}]
        groups = (kind, *change, *seen, "overall")
        items.append(Item(chat, None, one.expected, groups, clip=one.clip.frames))
    return items


def json_items(seed: int, size: int) -> list[Item]:
    """Held-out questions about scenes that are told, to be answered as JSON; it counts by its value."""
    return [
        Item(
            one.chat,
            None,
            json.dumps(one.expected),
            (one.kind, "overall"),
            schema=schema_of(one.expected) if one.begun else None,
            begun=one.begun,
            read=parsed,
        )
        for one in json_exam(Random(f"json {seed}"), size)
    ]


def call_items(seed: int, size: int) -> list[Item]:
    """Held-out requests for tools; a call counts by its name and its arguments, several in their order."""
    return [
        Item(
            one.shaped.messages,
            None,
            one.expected,
            (one.kind, *(["calls"] if one.expected.startswith("{") else []), "overall"),
            one.shaped.tools,
            read=calls_of,
        )
        for one in call_exam(Random(f"calls {seed}"), size)
    ]


EXAMS = {
    "text": text_items, "pictures": picture_items, "clips": clip_items, "json": json_items, "calls": call_items,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Asks the questions and judges the answers."""
    options = _options(arguments)
    answerer = {"quire": _quire, "transformers": _transformers}[options.backend](options.model)
    if failed := examine(answerer, options):
        sys.exit("\n".join(failed))


def examine(answerer: Answerer, options: argparse.Namespace) -> list[str]:
    """Asks and prints the shares of right answers; returns which are under the required ones."""
    failed: list[str] = []
    for name in EXAMS if options.exam == "all" else [options.exam]:
        items = EXAMS[name](options.seed, options.questions)
        started = time.monotonic()
        answers = answerer(items)
        print(f"{name}: {time.monotonic() - started:.1f} s for {len(items)} questions", flush=True)
        if options.wrong:
            _show_wrong(items, answers)
        shares = _report(items, answers)
        failed += [
            f"{name}: {group} {shares[group]:.2%} is under the required {least:.0%}"
            for group, least in REQUIRED[name].items()
            if shares[group] < least
        ]
    return failed


def in_voice(item: Item, style: Callable[[str, str], str]) -> Item:
    """The same question with the answer that an adapter's voice should give."""
    return replace(item, expected=style(item.chat[-1]["content"], item.expected))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exam", choices=(*EXAMS, "all"), default="all")
    parser.add_argument("--backend", choices=("quire", "transformers"), default="quire")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="a folder (default: the bundled model)")
    parser.add_argument("--questions", type=int, default=1300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers")
    return parser.parse_args(arguments)


def _report(items: Sequence[Item], answers: Sequence[str]) -> dict[str, float]:
    """Prints the table and returns the share of right answers of each group."""
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for item, answer in zip(items, answers, strict=True):
        asked.update(item.groups)
        right.update(item.groups if item.right(answer) else ())
    for group in sorted(asked, key=lambda name: (name == "overall", name == "calls", name[0] == "(")):
        print(f"{group:26s} {right[group]:5d} / {asked[group]:5d}  {right[group] / asked[group]:.2%}")
    return {group: right[group] / asked[group] for group in asked}


def _show_wrong(items: Sequence[Item], answers: Sequence[str]) -> None:
    for item, answer in zip(items, answers, strict=True):
        if not item.right(answer):
            said = " | ".join(message["content"] or "(a call)" for message in item.chat)
            tools = [tool["function"]["name"] for tool in item.tools]
            print(f"{said} {tools or ''}\n    said {answer!r}, right is {item.expected!r}")


def _messages(item: Item) -> list[dict[str, Any]]:
    """The conversation, with the picture or the clip before the first question's text."""
    if item.image is None and not item.clip:
        return [dict(message) for message in item.chat]
    first, *others = item.chat
    media = {"type": "image", "image": item.image} if item.image else {"type": "video", "video": list(item.clip)}
    parts = [media, {"type": "text", "text": first["content"]}]
    return [{"role": first["role"], "content": parts}, *others]


def _prompt(tokenizer: Any, item: Item) -> str:
    """What the model goes on from."""
    chat, tools = _messages(item), list(item.tools) or None
    return tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, tokenize=False)


# --------------------------------------------------------------------------------------------
# Backends
# --------------------------------------------------------------------------------------------


def _quire(folder: Path) -> Answerer:
    from quire import LLM, SamplingParams

    llm = LLM(str(folder))
    tokenizer = llm.get_tokenizer()

    def answer(items: Sequence[Item]) -> list[str]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=item.longest, structured_outputs=_held_to(item))
            for item in items
        ]
        if any(item.image is not None or item.clip for item in items):
            results = llm.chat([_messages(item) for item in items], params)
        else:
            texts = [_prompt(tokenizer, item) for item in items]
            ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            results = llm.generate([{"prompt_token_ids": one} for one in ids], params)
        return [result.outputs[0].text for result in results]

    return answer


def _held_to(item: Item) -> StructuredOutputsParams | None:
    """The answer's schema; or, from where the model begins to call a tool, those of the tools."""
    from quire import StructuredOutputsParams

    if item.schema is not None:
        return StructuredOutputsParams(json=item.schema)
    if not item.tools:
        return None
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": "{tool["function"]["name"]}", "arguments": ',
            "content": {"type": "json_schema", "json_schema": tool["function"]["parameters"]},
            "end": "}\n</tool_call>",
        }
        for tool in item.tools
    ]
    tagged = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": tagged})


def _transformers(folder: Path, device: str = "cpu", adapter: Path | None = None) -> Answerer:
    """transformers knows no videos of a LLaVA's: it is given a clip's frames as pictures, which is the same."""
    import torch
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    torch.set_num_threads(2)
    processor = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.padding_side = "left"
    model: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16).eval().to(device)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval()

    def answer_some(items: Sequence[Item]) -> list[str]:
        texts = [_prompt(processor.tokenizer, item).replace(VIDEO, IMAGE * len(item.clip)) for item in items]
        texts = [text + item.begun for text, item in zip(texts, items, strict=True)]
        images = [image for item in items for image in ([item.image] if item.image else item.clip)]
        inputs = processor(
            text=texts, images=images or None, padding=True, add_special_tokens=False, return_tensors="pt"
        ).to(device)
        if images:
            inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
        wanted = ("input_ids", "attention_mask", "pixel_values")
        with torch.no_grad():
            tokens = model.generate(
                **{name: inputs[name] for name in wanted if name in inputs},
                do_sample=False,
                max_new_tokens=max(item.longest for item in items),
            )
        said = processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [item.begun + text for item, text in zip(items, said, strict=True)]

    size = 64 if device == "cpu" else 512

    def answer(items: Sequence[Item]) -> list[str]:
        # Chats of similar length share a batch, so that little of it is padding.
        lengths = [(len(item.clip), sum(len(m["content"] or "") for m in item.chat)) for item in items]
        order = sorted(range(len(items)), key=lengths.__getitem__)
        answers = [""] * len(items)
        for start in range(0, len(order), size):
            some = order[start : start + size]
            for i, text in zip(some, answer_some([items[i] for i in some]), strict=True):
                answers[i] = text
        return answers

    return answer


if __name__ == "__main__":
    main()
