"""A prompt that comes as embeddings: read, and checked against every limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import RequestError
from quire.multimodal import EmbeddedRows, Pixels, RowsSpec, open_rows, read_rows
from quire.platform.inputs.limits import Limits
from quire.platform.inputs.prepared import ProcessedPrompt
from quire.platform.scheduling.request import MediaInput

_KEYS = frozenset({"prompt_embeds", "prompt", "cache_salt"})
_NOT_SERVED = (
    "prompt_embeds was given, and prompts are texts or token ids here: set enable_prompt_embeds=True "
    "(--enable-prompt-embeds) where callers may send embeddings"
)
_ALONE = (
    "prompt_embeds are the whole prompt: beside them, a dict takes 'prompt' (the text to show) and 'cache_salt'. What "
    "images, or tokens, are to add to it must be among its rows; it has"
)


def read_embeds(
    request_id: str, prompt: Mapping[str, Any], spec: RowsSpec | None, limits: Limits, salt: str | None
) -> ProcessedPrompt:
    """The prompt, whose token ids are zeros. Raises RequestError."""
    if spec is None:
        raise RequestError(f"request {request_id}: {_NOT_SERVED}")
    more = {key for key, value in prompt.items() if value is not None} - _KEYS
    text = prompt.get("prompt")
    if more or not isinstance(text, str | None):
        raise RequestError(f"request {request_id}: {_ALONE} {sorted(map(str, prompt))}")
    try:
        opened = open_rows(prompt["prompt_embeds"], spec)
        limits.max_tokens(request_id, len(opened), None)  # before rows are copied that could not be served
        rows = read_rows(opened, spec.dtype)
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(f"request {request_id}: {error}") from None
    except Exception as error:  # tensors of other kinds, of which torch does not say their shape
        raise RequestError(f"request {request_id}: prompt_embeds cannot be read: {type(error).__name__}") from None
    return ProcessedPrompt(text, [0] * len(opened), salt, embeds=rows)


def media_of(embeds: EmbeddedRows) -> list[MediaInput]:
    """Rows take the way of features: what stands in the place of placeholders, found by digest, encoded by itself."""
    return [MediaInput(item, Pixels({"prompt_embeds": embeds.of(item)}), None, {}, kept=True) for item in embeds.ranges]
