"""What the tests of this folder share."""

from __future__ import annotations

from typing import Any

from quire import LLM

PATH = "/v1/completions"
PROMPT = "Once upon a time"
PROMPTS = [PROMPT, "One day, a red circle", "The blue star"]
LONG = "Once upon a time a red circle met a blue star. " * 4
MODEL = "quire-demo"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 11, "max_tokens": 24}


def ids_of(llm: LLM, text: str) -> list[int]:
    return list(llm.get_tokenizer()(text)["input_ids"])
