"""A model that says what a test has it say: parsers and streams are seen at work whatever a model has learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from quire import LogitsProcessor, ProcessorRequest
from tests.server.api_server import LocalServer
from tests.server.fixtures import make_model

TEMPLATE = (
    "{% if tools %}<s>tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    'Say <tool_call> {"name": ..., "arguments": ...} </tool_call></s>{% endif %}'
    "{% for message in messages %}<s>{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ message.tool_call_id }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


class Scripted(LogitsProcessor):
    """extra_args: {"script": token ids}. Each is by far the likeliest; what a shape forbids stays forbidden."""

    arguments = ("script",)

    def __init__(self, request: ProcessorRequest) -> None:
        self.script = list(request.extra_args["script"])

    def apply(self, logits: torch.Tensor, output_ids: Sequence[int]) -> None:
        if len(output_ids) < len(self.script):
            logits[self.script[len(output_ids)]] += 1e4


class ScriptedServer:
    """A server and what its model is told to say."""

    def __init__(self, server: LocalServer, http: Any, path: Path) -> None:
        self.server = server
        self.http = http
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def says(self, text: str, **fields: Any) -> dict[str, Any]:
        """A body whose answer is this text, and the end token."""
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        body = {"messages": [{"role": "user", "content": "ab"}], "temperature": 0, "vllm_xargs": {"script": ids}}
        return {**body, "max_tokens": len(ids) + 200, **fields}


@contextmanager
def scripted(path: Path, special: bool, **settings: Any) -> Iterator[ScriptedServer]:
    """special: whether the tags are special tokens. settings: the server's."""
    make_model(path, TEMPLATE)
    if special:
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.add_special_tokens({"additional_special_tokens": list(TAGS)})
        tokenizer.save_pretrained(path)
    engine = {"model": str(path), "num_gpu_blocks_override": 256, "logits_processors": [Scripted]}
    with LocalServer(engine, **settings) as server:
        with server.http() as http:
            yield ScriptedServer(server, http, path)
        server.until_idle()
