"""What `LLM.generate` takes for one prompt or several -> lists with one entry for each prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt or several -> a list of prompts. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)) or hasattr(prompts, "tolist"):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a text, a list of token ids, a dict or a list of these, not {prompts!r}")
    if prompts and all(isinstance(token, int) for token in prompts):
        return [prompts]
    return list(prompts)


def one_for_each(name: str, given: Any, kinds: tuple[type, ...], count: int) -> list[Any]:
    """One for all prompts, or a list of one for each -> the list. Raises RequestError."""
    if isinstance(given, kinds):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(one, kinds) for one in given):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise RequestError(f"{name} must be {names}, or a list of one for each prompt, not {given!r}")
    if len(given) != count:
        raise RequestError(f"{count} prompts, but {len(given)} {name}: give one, or one for each.")
    return list(given)
