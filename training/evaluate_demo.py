"""Examines quire-demo: greedy answers to questions that training never saw.

    python training/evaluate_demo.py [--backend transformers] [--questions 1300]

Prints the share of right answers by kind of question and overall, and exits with status 1 when
the overall share is under the required one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from dialogues import Conversation, ExamItem, exam
from world import is_held_out

HERE = Path(__file__).resolve().parent
MODEL_FOLDER = HERE.parent / "quire" / "demo" / "model"
REQUIRED = 0.95
MAX_NEW_TOKENS = 12  # the longest right answer has 6

Answerer = Callable[[list[Conversation]], list[str]]


def main() -> None:
    """Asks the questions and judges the answers."""
    options = _options()
    items = exam(Random(f"exam {options.seed}"), options.questions)
    answerer = {"quire": _quire, "transformers": _transformers}[options.backend](options)
    started = time.monotonic()
    answers = answerer([item.chat for item in items])
    seconds = time.monotonic() - started
    if options.wrong:
        _show_wrong(items, answers)
    share = _report(items, answers)
    print(f"{options.backend}: {seconds:.1f} s for {len(items)} held-out questions")
    if share < options.required:
        sys.exit(f"{share:.2%} is under the required {options.required:.0%}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("quire", "transformers"), default="quire")
    parser.add_argument("--model", type=Path, help="a folder (default: the bundled model)")
    parser.add_argument("--questions", type=int, default=1300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--required", type=float, default=REQUIRED)
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers")
    return parser.parse_args()


def _report(items: list[ExamItem], answers: list[str]) -> float:
    """Prints the table and returns the overall share of right answers."""
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for item, answer in zip(items, answers, strict=True):
        seen = "scene or story held out" if is_held_out(item.about) else "question held out"
        for group in (item.question.kind, f"({seen})", "overall"):
            asked[group] += 1
            right[group] += answer.strip() == item.expected
    for group in sorted(asked, key=lambda name: (name == "overall", name[0] == "(")):
        print(
            f"{group:26s} {right[group]:5d} / {asked[group]:5d}  {right[group] / asked[group]:.2%}"
        )
    return right["overall"] / asked["overall"]


def _show_wrong(items: list[ExamItem], answers: list[str]) -> None:
    for item, answer in zip(items, answers, strict=True):
        if answer.strip() != item.expected:
            said = " | ".join(message["content"] for message in item.chat)
            print(f"{said}\n    said {answer!r}, right is {item.expected!r}")


# --------------------------------------------------------------------------------------------
# Backends
# --------------------------------------------------------------------------------------------


def _quire(options: argparse.Namespace) -> Answerer:
    from quire import LLM, SamplingParams

    llm = LLM(str(options.model)) if options.model else LLM()
    params = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)
    return lambda chats: [result.outputs[0].text for result in llm.chat(chats, params)]


def _transformers(options: argparse.Namespace) -> Answerer:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    folder = options.model or MODEL_FOLDER
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def answer_some(chats: list[Conversation]) -> list[str]:
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            tokens = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        new = tokens[:, inputs["input_ids"].shape[1] :]
        return tokenizer.batch_decode(new, skip_special_tokens=True)

    def answer(chats: list[Conversation], size: int = 64) -> list[str]:
        # Chats of similar length share a batch, so that little of it is padding.
        order = sorted(range(len(chats)), key=lambda i: sum(len(m["content"]) for m in chats[i]))
        answers = [""] * len(chats)
        for start in range(0, len(order), size):
            some = order[start : start + size]
            for i, text in zip(some, answer_some([chats[i] for i in some]), strict=True):
                answers[i] = text
        return answers

    return answer


if __name__ == "__main__":
    main()
