"""What the tests of this folder share."""

from __future__ import annotations

from typing import Any

from tests.server.api_answers import post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = "Once upon a time"
WHO = [{"role": "user", "content": "Who are you?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


def answer_of(http: Any, model: str, **fields: Any) -> str:
    return post(http, CHAT, model=model, messages=WHO, **{**GREEDY, **fields})["choices"][0]["message"]["content"]
