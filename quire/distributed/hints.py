"""Which replica a request is best answered by, told from the request: the adapter, and how its prompt begins."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import from_json

# Ids of what a replica keeps begin with so many digits that stand for it.
TAG = 8
_KEPT = re.compile(rf"(?:resp_)?([0-9a-f]{{{TAG}}})[0-9a-f]{{32,}}")
_PREFIX = 512  # characters of a prompt that say what it is likely to share with others
_MOST_CONTAINERS = 20_000  # lists and objects of such a body: the door would stand still while they are made
_LARGEST = 4 << 20  # bytes of a body that is looked at; larger ones (images) go where there is room


def tag_of(replica: str) -> str:
    """Of a replica's name: what ids begin with that belong to it."""
    return hashlib.sha256(replica.encode()).hexdigest()[:TAG]


def hints_of(path: str, body: bytes, base: Collection[str] = ()) -> dict[str, Any]:
    """For `router.ReplicaRouter`: tag (a replica that keeps what is asked for), adapter, prefix. None of them is
    certain, and no answer depends on them. base: the base model's names."""
    for part in path.split("/"):
        if kept := _KEPT.fullmatch(part):
            return {"tag": kept[1]}
    if not body or len(body) > _LARGEST or body.count(b"[") + body.count(b"{") > _MOST_CONTAINERS:
        return {}
    try:
        fields = from_json(body, cache_strings=False)
    except ValueError:
        return {}  # a replica says what is wrong
    if not isinstance(fields, dict):
        return {}
    found = _of_fields(fields)
    if found.get("adapter") in base:
        del found["adapter"]
    return found


def _of_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    previous = fields.get("previous_response_id")
    if isinstance(previous, str) and (kept := _KEPT.fullmatch(previous)):
        found["tag"] = kept[1]
    if isinstance(fields.get("model"), str):
        found["adapter"] = fields["model"]
    prompt = next((fields[name] for name in ("messages", "prompt", "input") if name in fields), None)
    if prompt is not None:
        begins = [fields.get("cache_salt"), fields.get("system") or fields.get("instructions"), _beginning(prompt)]
        found["prefix"] = hashlib.sha256(json.dumps(begins, default=str).encode()).hexdigest()
    return found


def _beginning(prompt: Any) -> Any:
    """Of a conversation its first message, of a text or ids the first ones."""
    first = prompt[0] if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else prompt
    if isinstance(first, Mapping):
        return str(first.get("content"))[:_PREFIX]
    return first[:_PREFIX] if isinstance(first, str | list) else None
