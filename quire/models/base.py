"""What a model is to the engine and to the loader. Every architecture's class derives from `CausalLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.contracts import ForwardContext, KVCache, KVSpec
from quire.errors import UnsupportedModelError
from quire.models.layers import Linear

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Configuration fields that change the arithmetic, with the values under which they do not. A class that
# implements one names it in `supported_fields`; otherwise any other value is refused: it must never be
# ignored.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False, None),
    "is_causal": (True, None),
    "add_cross_attention": (False, None),
    "is_heterogeneous": (False, None),
    "sliding_window": (None,),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
}


class CausalLM(nn.Module):
    """A decoder-only language model whose keys and values live in the engine's block pool.

    A subclass builds its parameters in `__init__` (the loader calls it on the meta device, so they cost
    nothing), names them exactly as the Hugging Face state dict does, sets the three attributes below, and
    defines `forward`.

    kv_spec: what the model asks of the pool.
    max_model_len: positions that the model has.
    rope_threshold: None, or the prompt length above which rotary frequencies depend on the prompt's length;
        keys of such a prompt's tokens are of no use to a prompt of another length.
    lm_head: the projection to the vocabulary; `logits` uses it.
    """

    kv_spec: KVSpec
    max_model_len: int
    rope_threshold: int | None = None
    lm_head: Linear

    # Data for the loader. Patterns are regular expressions that must match a whole name.
    # (pattern, new name; \1 takes a group) for the checkpoint's other spellings; the first match counts:
    checkpoint_renames: ClassVar[Sequence[tuple[str, str]]] = ()
    # Names, once renamed, of tensors that hold nothing to load:
    checkpoint_ignored: ClassVar[Sequence[str]] = ()
    # Names, once renamed, of matrices stored [in, out]; they are transposed, once, at load:
    checkpoint_transposed: ClassVar[Sequence[str]] = ()
    # Parameter -> whose tensor it shares if tie_word_embeddings is set:
    tied_weights: ClassVar[Mapping[str, str]] = {}
    # Fields of NEUTRAL_VALUES that the class implements:
    supported_fields: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.check_config(config)
        self.config = config

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        """Raise UnsupportedModelError for a field that changes the arithmetic and is not implemented."""
        for field, neutral in NEUTRAL_VALUES.items():
            if field not in cls.supported_fields and getattr(config, field, neutral[0]) not in neutral:
                refuse(config, field, f"served only with {' or '.join(map(repr, neutral))}")
        layer_types = getattr(config, "layer_types", None)
        if "layer_types" not in cls.supported_fields and set(layer_types or ()) - {"full_attention"}:
            refuse(config, "layer_types", "every layer must be 'full_attention'")

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        """Run one step: write the tokens' keys and values to the pool and return the hidden states.

        input_ids: [T] int64. kv: one cache for each of `kv_spec.num_layers`.
        Returns [T, C] in the model's dtype, after the final norm: what `logits` takes.
        """
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores [R, vocabulary] float32 of the hidden states [R, C]."""
        return self.lm_head(hidden, torch.float32)


def refuse(config: PretrainedConfig, field: str, reason: str) -> None:
    """Raise the error for a configuration field whose value is not served."""
    value = getattr(config, field, None)
    raise UnsupportedModelError(
        f"config.json: {field}={value!r} of a {config.model_type!r} model is not served: {reason}."
    )
