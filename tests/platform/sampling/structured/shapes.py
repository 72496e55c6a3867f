"""Requests with shapes, for the tests of this folder."""

from __future__ import annotations

import random
from typing import Any

from quire import SamplingParams
from quire.platform.sampling.structured.params import StructuredOutputsParams as Shape

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["circle", "square"]},
        "sides": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "sides"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5}


def compact(**given: Any) -> Shape:
    return Shape(disable_any_whitespace=True, **given)


SHAPES: list[Shape | None] = [
    compact(json=PERSON),
    None,
    compact(json=LIST),
    compact(regex=r"(ab|cd){3,6}x"),
    compact(choice=["the red circle", "the blue square", "la"]),
    compact(json={"const": "once upon a time a star met a triangle"}),
    None,
    compact(json_object=True),
]


def prompts(count: int) -> list[dict[str, Any]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 320) for _ in range(40)]
    own = [[rng.randrange(3, 320) for _ in range(rng.randint(1, 40))] for _ in range(count)]
    return [{"prompt_token_ids": shared[: rng.choice([0, 17, 40])] + ids} for ids in own]


def params(index: int, **more: Any) -> SamplingParams:
    """The shapes in turn, sampled in every way."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0, "seed": index, "n": 2},
        {"temperature": 1.3, "top_p": 0.9, "seed": index, "logprobs": 0},
        {"temperature": 0.7, "frequency_penalty": 0.5, "seed": index},
        {"temperature": 1.0, "seed": index, "ignore_eos": True, "logit_bias": {40: 2.0}},
    ]
    given = {"max_tokens": 60, "structured_outputs": SHAPES[index % len(SHAPES)], **ways[index % len(ways)], **more}
    return SamplingParams(**given)
