"""`GuidedDecodingParams`: what vLLM called `StructuredOutputsParams` before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.platform.sampling.structured.params import StructuredOutputsParams


class GuidedDecodingParams(StructuredOutputsParams):
    """The same by its old name.

    backend, disable_fallback: one engine serves all shapes, and nothing else is fallen back on; they change nothing.
    shape: the further fields.

    Raises RequestError for none and for several shapes.
    """

    __slots__ = ()

    def __init__(
        self,
        json: str | bool | Mapping[str, Any] | type | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        *,
        backend: str | None = None,
        disable_fallback: bool = False,
        **shape: Any,
    ) -> None:
        super().__init__(json=json, regex=regex, choice=choice, grammar=grammar, json_object=json_object, **shape)

    @classmethod
    def from_optional(cls, **shape: Any) -> GuidedDecodingParams | None:
        """One of what is not None; None where nothing is."""
        given = {name: value for name, value in shape.items() if value is not None}
        return cls(**given) if given else None
