"""What answers of the API come down to: choices put together from a stream's chunks, and validated bodies."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from pydantic import BaseModel

from quire import LLM, LoRARequest, SamplingParams
from quire.platform.outputs.outputs import RequestOutput

_Model = TypeVar("_Model", bound=BaseModel)


def saved(value: Any) -> str:
    """base64 of what torch.save writes, for `prompt_embeds`."""
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


def post(client: Any, path: str, **body: Any) -> Any:
    """The JSON of an answer that must be 200. client: httpx."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(client: Any, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error of an answer that must have this status, and OpenAI's form."""
    response = client.post(path, json=body)
    assert response.status_code == status, (body, response.text)
    return error_of(response)


def error_of(response: Any) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert isinstance(body["error"]["type"], str)
    return body["error"]


def events(client: Any, path: str, **body: Any) -> list[dict[str, Any]]:
    """A stream's chunks; it must end with [DONE]."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def strict(kind: type[_Model], data: dict[str, Any]) -> _Model:
    """The JSON as the `openai` package's type, with nothing coerced and nothing missing."""
    return kind.model_validate_json(json.dumps(data), strict=True)


def joined(chunks: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Of each choice of a stream: text, tokens and how it ended. Exactly one chunk of each ends it."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            new = {"text": "", "tokens": [], "logprobs": [], "finish_reason": None, "stop_reason": None}
            choice = choices.setdefault(part["index"], new)
            assert choice["finish_reason"] is None, "a chunk after the last"
            choice["text"] += part["text"] if "text" in part else part["delta"].get("content", "")
            choice["tokens"] += part.get("token_ids", [])
            choice["finish_reason"] = part["finish_reason"]
            choice["stop_reason"] = part["stop_reason"]
    assert all(choice["finish_reason"] for choice in choices.values())
    return choices


_known: dict[str, RequestOutput] = {}  # by what was asked: there is one model only


def offline(llm: LLM, prompt: Any, adapter: str | None = None, **params: Any) -> RequestOutput:
    """What LLM.generate makes of it."""
    asked = repr((prompt, adapter, sorted(params.items())))
    if asked not in _known:
        request = LoRARequest(adapter) if adapter else None
        sampling = SamplingParams(**params)
        _known[asked] = llm.generate([prompt], sampling, use_tqdm=False, lora_request=request)[0]
    return _known[asked]


def conversed(llm: LLM, messages: Any, adapter: str | None = None, **params: Any) -> RequestOutput:
    """What LLM.chat makes of it. params: of SamplingParams; as many tokens as fit, unless max_tokens says otherwise."""
    asked = repr((messages, adapter, sorted(params.items())))
    if asked not in _known:
        request = LoRARequest(adapter) if adapter else None
        sampling = SamplingParams(**{"max_tokens": None, **params})
        _known[asked] = llm.chat(messages, sampling, use_tqdm=False, lora_request=request)[0]
    return _known[asked]
