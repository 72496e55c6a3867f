"""What a family of models in GGUF files is in transformers: a row of `families`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.checkpoint.gguf.file import GgufFile

More = Callable[[GgufFile], Mapping[str, Any]]


@dataclass(frozen=True)
class Family:
    """What one general.architecture is in transformers.

    fields: keys -> fields, beyond those of all (`config.FIELDS`); "" leaves one of those out. fixed: fields that no key
    has. present: fields that are true where a tensor is there. more: what takes a closer look; it may name another
    class. rotates: whether positions turn heads; turns_partly: or a part of each. facts: keys whose values say what the
    class computes anyway; others are refused.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    more: More = lambda file: {}
    rotates: bool = True
    turns_partly: bool = False
    facts: Mapping[str, Collection[Any]] = field(default_factory=dict)
