"""Which form of calls of tools a chat template takes, found by giving it each."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from quire.platform.inputs.chat_messages import for_template
from quire.platform.inputs.chat_renderer import RENDERER, TemplateError
from quire.platform.inputs.chat_tools import FORMS, CallForm, fit_calls

_FORMS_KEPT = 32
# Words that no template writes of its own accord, and an id of nine letters and digits.
_NAME, _KEY, _ID = "quireprobefn7c1e", "quireprobekey7c1e", "probe7c1e"


@lru_cache(maxsize=_FORMS_KEPT)
def call_form(template: str, special: str, parts: bool) -> CallForm | None:
    """What form of calls the template takes; None where it leaves them out without a word.

    special: the tokenizer's special tokens as JSON.  parts: it takes a message's content as a list of parts.

    A template that is stopped at its limits raises RequestError: nothing is known of it.
    """
    written = [_writes_calls(template, special, parts, form) for form in FORMS]
    if True in written:
        return FORMS[written.index(True)]
    return None if False in written else FORMS[0]  # it fails, be it for want of its caller's variables


def _writes_calls(template: str, special: str, parts: bool, form: CallForm) -> bool | None:
    """Whether it writes a call's name and arguments, and these not as Python writes a dict. None: it fails."""

    def content(given: list[str] | None) -> Any:
        if parts:
            return [{"type": "text", "text": text} for text in given or []]
        return None if given is None else "".join(given)

    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": {_KEY: "a"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": ["a"]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": ["a"]},
    ]
    fitted = [{**message, "content": content(message["content"])} for message in fit_calls(messages, form, template)]
    variables = {
        **json.loads(special),
        "messages": [for_template(message, template) for message in fitted],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    try:
        text = RENDERER.render(template, variables)
    except TemplateError:
        return None
    return _NAME in text and _KEY in text and f"{{'{_KEY}'" not in text
