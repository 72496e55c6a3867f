"""What tests know of an architecture that sees, and what the tiny models of several share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB = 384
IMAGE = 383  # the image token's id
SIDE = 24

LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One architecture. `config` and `processor` get a variant's entry and return transformers' objects.

    variants: by name. quick: those that tests of every day run; the others are slow. mrope: its oracle takes
    mm_token_type_ids. gains: of a variant whose text model needs larger weights to answer differently. words: special
    tokens of its tokenizer, by id; the image token among them. ids: what the checkpoint's own processor makes of an
    image's marker, of (tokenizer, configuration, what its image processor returns for the image); None: markers alone.
    features: of what transformers returns for one image, its rows. blocks: of a variant's pool, where 110 preempt
    nobody, or are too few. architecture: transformers' name, where it is not the table's. unused: of
    what the image processor returns, what the model does not take. types: of a prompt's ids, what else it takes.
    whole: all of a prompt sees itself, so that each has an image and is computed in one step. reference: the class to
    compare with, where transformers has none.
    """

    variants: Mapping[str, Any]
    config: Callable[[Any], Any]
    processor: Callable[[Any], Any]
    quick: tuple[str, ...] | None = None
    mrope: bool = False
    gains: Mapping[str, float] = field(default_factory=dict)
    words: Mapping[int, str] = field(default_factory=lambda: {IMAGE: "<image>"})
    ids: Callable[[Any, Any, Any], list[int]] | None = None
    features: Callable[[Any], Any] = lambda found: found[0]
    blocks: Mapping[str, int] = field(default_factory=dict)
    architecture: str | None = None
    unused: tuple[str, ...] = ()
    types: Callable[[list[int]], dict[str, Any]] = lambda ids: {}
    whole: bool = False
    reference: Any = None
