"""What a row of the registry is tested with: one small data file a family, beside this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB = 97
# What most families' configurations have. A prompt has up to 47 tokens, and its answer 48.
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ModelRow:
    """An architecture, and the variants of its configuration that are compared with transformers'.

    config: name of transformers' configuration class. base: its settings, which a variant's replace.
    quick: the variants whose bits are compared in company, three at most; the first stands for the family where one is
    enough. `make test` runs the first two; one alone is joined by the next in the table (`compared`).
    by_length: variants whose rotary frequencies depend on how long the request is. token_by_token: variants that
    transformers shall run so, too. upcasts: variants in which transformers insists on float32. gain: of
    `tiny.randomise`.
    linears: names of the layers that an adapter of "all-linear" changes. saved: of modules, beside the projection to
    the vocabulary, that an adapter saves whole. embedding: the name of the table of tokens.
    adapted: settings, beside those of the first variant, of the model whose adapters are compared with PEFT's.
    recorded: whether steps of one token a sequence are recorded; unrecorded: variants whose are not. aliases: other
    names that it is published under. attention: transformers' implementation of it. head: the projection to the
    vocabulary. not_linear: layers that PEFT's "all-linear" means and cannot change.
    oracle: makes the model to compare with of a variant's settings, where transformers has no class for it.
    """

    architecture: str
    config: str
    variants: Mapping[str, Mapping[str, Any]]
    quick: tuple[str, ...]
    base: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    by_length: frozenset[str] = frozenset()
    token_by_token: frozenset[str] = frozenset()
    upcasts: frozenset[str] = frozenset()
    gain: float = 2.5
    linears: tuple[str, ...] = LINEARS
    saved: tuple[str, ...] = ("norm",)
    embedding: str = "embed_tokens"
    adapted: Mapping[str, Any] = field(default_factory=dict)
    recorded: bool = True
    unrecorded: frozenset[str] = frozenset()
    head: str = "lm_head"
    not_linear: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    attention: str = "eager"
    oracle: Callable[[dict[str, Any]], Any] | None = None

    @property
    def first(self) -> str:
        return self.quick[0]

    @property
    def compared(self) -> tuple[str, ...]:
        """The quick variants, two at least."""
        others = (name for name in self.variants if name not in self.quick)
        return self.quick if len(self.quick) > 1 else (*self.quick, next(others))

    def adapters(self) -> dict[str, dict[str, Any]]:
        """Fields of PEFT's LoraConfig by the name of a case."""
        first, last = self.linears[0], self.linears[-1]
        patterns = {"rank_pattern": {first: 7, f"layers.0.*{last}": 2}, "alpha_pattern": {last: 3}}
        saved = {"target_modules": [self.embedding, first], "modules_to_save": [self.head, *self.saved]}
        return {
            "all_linear": {"r": 4, "target_modules": "all-linear", "exclude_modules": list(self.not_linear) or None},
            "dora_patterns": {"r": 4, "target_modules": list(self.linears), "use_dora": True, **patterns},
            "embedding_and_saved": {"r": 4, **saved},
        }


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}
