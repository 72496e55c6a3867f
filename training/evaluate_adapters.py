"""Examines the adapters that quire bundles: questions about fresh pictures or clips, asked of all voices.

    python training/evaluate_adapters.py [--exam pictures|clips] [--questions 700] [--seed 77]

Every question is asked in every voice, all in one batch. Prints the share of right answers by kind of question, and
exits with status 1 when a share is under the required one, or when the base model answers otherwise in the mixed batch
than by itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evaluate_demo import EXAMS, Item, _messages, _report, _show_wrong, in_voice
from styles import STYLES

from quire.demo import adapter_path

if TYPE_CHECKING:
    from quire import LLM, LoRARequest

BASE = "base"
# The least share of right answers; an answer is right only in the adapter's own style. Of clips adapters know little.
REQUIRED = {
    "pictures": {BASE: 0.95, "french": 0.97, "shout": 0.97},
    "clips": {BASE: 0.90, "french": 0.0, "shout": 0.0},
}
MAX_NEW_TOKENS = 80  # the longest right answer, a description in French, has about 40


def main(arguments: Sequence[str] | None = None) -> None:
    """Asks the questions and judges the answers."""
    from quire import LLM

    options = _options(arguments)
    items, required = EXAMS[options.exam](options.seed, options.questions), REQUIRED[options.exam]
    llm = LLM(enable_lora=True)
    alone = _ask(llm, items, {BASE: None})[BASE]
    answers = _ask(llm, items, {BASE: None, **_adapters()})
    failed = []
    for name, said in answers.items():
        expected = _in_style(items, name)
        print(f"\n{name}")
        if options.wrong:
            _show_wrong(expected, said)
        share = _report(expected, said)["overall"]
        if share < required[name]:
            failed.append(f"{name}: {share:.2%} is under the required {required[name]:.0%}")
    if changed := sum(one != other for one, other in zip(alone, answers[BASE], strict=True)):
        failed.append(f"{BASE}: {changed} answers of the mixed batch are not those of the base model by itself")
    if failed:
        sys.exit("\n".join(failed))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exam", choices=sorted(REQUIRED), default="pictures")
    parser.add_argument("--questions", type=int, default=700)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers")
    return parser.parse_args(arguments)


def _adapters() -> dict[str, LoRARequest]:
    from quire import LoRARequest

    return {name: LoRARequest(name, number, str(adapter_path(name))) for number, name in enumerate(STYLES, 1)}


def _in_style(items: Sequence[Item], name: str) -> list[Item]:
    """The same questions with the answers that this voice should give; every exam question here is a single message."""
    if name == BASE:
        return list(items)
    return [in_voice(item, STYLES[name]) for item in items]


def _ask(llm: LLM, items: Sequence[Item], voices: dict[str, LoRARequest | None]) -> dict[str, list[str]]:
    """Each voice's answers; all of them are given in one batch, in which the voices take turns."""
    from quire import SamplingParams

    started = time.monotonic()
    results = llm.chat(
        [_messages(item) for item in items for _ in voices],
        SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS),
        lora_request=[request for _ in items for request in voices.values()],
        use_tqdm=False,
    )
    print(f"{', '.join(voices)}: {len(results)} answers in {time.monotonic() - started:.1f} s")
    said = [result.outputs[0].text for result in results]
    return {name: said[number :: len(voices)] for number, name in enumerate(voices)}


if __name__ == "__main__":
    main()
