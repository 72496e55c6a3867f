"""What a model is to the engine and to the loader. Every architecture's class derives from `CausalLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.checkpoint.weights import StoredPart
from quire.layers import Linear
from quire.layers.rotary import check_rope, rope_parameters
from quire.models.fields import NEUTRAL, check_fields, refuse
from quire.types import ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.checkpoint.files import Checkpoint
    from quire.models.quantization.plan import QuantizationPlan

# Fields by what their values must be, wherever a configuration has them: what is left out, or null, is another
# matter. Name -> the largest that is taken (a damaged number must not build layers until the memory is gone).
_MOST = 2**31 - 1
_LARGEST = 1e30  # of a number
COUNTS: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 10_000),
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads",
         "max_position_embeddings", "original_max_position_embeddings", "ffn_dim", "word_embed_proj_dim",
         "n_embd", "n_head", "n_inner", "n_positions", "seq_length", "max_seq_len", "ffn_hidden_size", "kv_channels",
         "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        _MOST,
    ),
}  # fmt: skip
# Finite numbers: name -> whether 0 is one of them. These may not be null.
NUMBERS: Mapping[str, bool] = {"rms_norm_eps": True, "layer_norm_eps": True, "layer_norm_epsilon": True}
# Finite numbers, where there is something: name -> what they must be beside. Transformers would divide by 0, too.
FACTORS: Mapping[str, str] = {
    **dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logit_scale", "scale_emb",
         "scale_depth", "router_jitter_noise", "swiglu_alpha", "swiglu_limit", "moe_norm_min", "clip_qkv",
         "attn_scale", "routed_scaling_factor"),
        "",
    ),
    **dict.fromkeys(("logits_scaling", "dim_model_base"), "other than 0"),
    **dict.fromkeys(
        ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "floor_scale"), "above 0"
    ),
}  # fmt: skip
# As `NUMBERS`, among the rotary parameters.
ROPE_NUMBERS: Mapping[str, bool] = {
    "rope_theta": False, "partial_rotary_factor": False, "factor": False, "attention_factor": True,
    "low_freq_factor": False, "high_freq_factor": False, "beta_fast": False, "beta_slow": False,
    "mscale": True, "mscale_all_dim": True, "short_mscale": False, "long_mscale": False,
    "alpha": False,
}  # fmt: skip


class CausalLM(nn.Module):
    """A decoder-only language model whose keys and values live in the engine's block pool.

    A subclass builds its parameters in `__init__` (the loader calls it on the meta device, so they cost
    nothing), names them exactly as the Hugging Face state dict does, sets the three attributes below, and
    defines `embed` and `forward`.

    kv_spec: what the model asks of the pool.
    max_model_len: positions that the model has.
    rope_threshold: None, or the prompt length above which rotary frequencies depend on the prompt's length;
        keys of such a prompt's tokens are of no use to a prompt of another length.
    crosses_threshold: whether an answer may go on past `rope_threshold` from a prompt that is not beyond it. Some
        families compute everything anew there; quire ends such an answer, with the finish reason "length".
    narrows: whether `forward` returns the rows of `ForwardContext.wanted` alone, where a step has that: behind its last
        attention, nothing needs to be computed of tokens whose hidden states nobody reads.
    lm_head: the projection to the vocabulary; `logits` uses it.
    """

    kv_spec: KVSpec
    max_model_len: int
    rope_threshold: int | None = None
    crosses_threshold: ClassVar[bool] = True
    narrows: bool = False
    lm_head: Linear

    # Data for the loader. Patterns are regular expressions that must match a whole name.
    # (pattern, new name; \1 takes a group) for the checkpoint's other spellings; the first match counts:
    checkpoint_renames: Sequence[tuple[str, str]] = ()
    # Names, once renamed, of tensors that hold nothing to load:
    checkpoint_ignored: Sequence[str] = ()
    # Names, once renamed, of matrices stored [in, out]; they are transposed, once, at load:
    checkpoint_transposed: Sequence[str] = ()
    # Published names of modules that transformers' class has, with adapters that change nothing of what is served:
    adapters_ignored: Sequence[str] = ()
    # Parameter -> whose tensor it shares if tie_word_embeddings is set:
    tied_weights: Mapping[str, str] = {}
    # Configuration fields that the class implements, of those that `fields.py` refuses:
    supported_fields: ClassVar[frozenset[str]] = frozenset()
    # Fields that files have, of those too, with the one value that the class computes (null is that value):
    fixed_fields: ClassVar[Mapping[str, Any]] = {}
    # Operations of torch's, by name, that recorded steps on a CPU may have: each treats tokens one by one.
    recorded_operations: frozenset[str] = frozenset()
    # Whether a plug-in's weights may be packed (`packing.py`): once `loaded` has returned, nothing but Linear looks at
    # its linear layers' weights, and nothing but Embedding at those that are its projection's too.
    packs_weights: ClassVar[bool] = False
    # What `loaded` has made of weights, in memory of its own: it goes and comes with the weights'.
    derived: Sequence[torch.Tensor] = ()
    # Which layers are quantized, and of which tensors they are made; the loader sets it.
    quantization: QuantizationPlan | None = None
    # What the weights were read from; the loader sets it (`Checkpoint.stamp`).
    read_from: tuple[tuple[str, int, int, int], ...] = ()
    # Modules, by name, that another stage of a pipeline computes, and the layers that this one does; the loader sets
    # both.
    elsewhere: frozenset[str] = frozenset()
    own_layers: range | None = None
    # First and end of the rows that are read of parameters that are not read whole, where this process computes a part;
    # the loader sets it.
    rows_read: Mapping[str, tuple[int, int]] = MappingProxyType({})

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.check_config(config)
        self.config = config

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        """Raise UnsupportedModelError for a value that makes no sense, and for a field that changes the arithmetic
        and is not implemented."""
        _check_values(config)
        for field, value in cls.fixed_fields.items():
            if getattr(config, field, None) not in (None, value):
                refuse(config, field, f"the class that serves it computes {value!r} alone")
        check_fields(config, cls.supported_fields | cls.fixed_fields.keys())
        check_rope(config, cls.supported_fields)

    def checkpoint_parts(self) -> Mapping[str, StoredPart]:
        """Parameters that are only a part of what stands in the files, where all experts do, say; by name."""
        return {}

    def see_files(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        """Look at the files before their tensors are matched with parameters, where names follow from what is there.

        Returns a parameter's name for each of the files' names that is another.
        """
        return {}

    def computes_itself(self, name: str) -> bool:
        """Whether the module of this name may compute by torch's or transformers' own code: it was looked into."""
        return False

    def keeps_float32(self, name: str) -> bool:
        """Whether the parameter of this name is float32 whatever the model's dtype is."""
        return False

    def keeps_floats(self, name: str) -> bool:
        """Whether the layer of this name is never quantized: something is made of its numbers once they are there."""
        return False

    def check_loaded(self) -> None:
        """Called when a model is loaded and its numbers are there. Raises UnsupportedModelError if it is not right."""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of all weights that are floats, but for those of `keeps_float32`."""
        return next(one.dtype for one in self.parameters() if one.is_floating_point())

    @property
    def output_projection(self) -> nn.Module:
        """The projection to the vocabulary."""
        return self.lm_head

    @property
    def vocab_size(self) -> int:
        """Tokens that have scores."""
        return self.lm_head.out_features

    @property
    def layers_in_order(self) -> nn.ModuleList | None:
        """The layers, one after the other, where a pipeline may be cut between them: each is called with the residual
        stream, to which it adds in place, and with what the layer before left to add (None: nothing), and returns what
        is left to add. None: they are not like that."""
        return None

    @property
    def is_tied(self) -> bool:
        """Whether the configuration ties the pairs of `tied_weights`."""
        return bool(getattr(self.config, "tie_word_embeddings", False))

    def published_names(self, name: str) -> tuple[str, ...]:
        """What Hugging Face's versions call a module or parameter of this name: one name for each naming they had.

        Adapters name modules as the version did that they were trained with.
        """
        return (name,)

    def is_visual(self, name: str) -> bool:
        """Whether the module of this name works on images."""
        return False

    def loaded(self) -> None:
        """What follows of the weights, in their place: called whenever all of them have been read from the files."""

    def own_rows(self, name: str) -> slice:
        """Of a parameter, the rows that are read here: nobody may write the others, or make anything of them."""
        return slice(*self.rows_read.get(name, (None,)))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens' embeddings, of input_ids [T] int64: [T, E] in the model's dtype, in memory of their own.

        Nothing of a position is in them: the engine puts the features of images in the place of some.
        """
        raise NotImplementedError

    def embed_given(self, rows: torch.Tensor) -> torch.Tensor:
        """What stands in the place of `embed`'s rows for those that a caller gives: [T, E] in the model's dtype, as
        transformers takes them as `inputs_embeds`. A family overrides this whose module multiplies these too."""
        return rows

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        """Run one step: write the tokens' keys and values to the pool and return the hidden states.

        embeddings: [T, E], as `embed` returns them; they may be overwritten. kv: one cache for each of
        `kv_spec.num_layers`, and then one `StateCache` for each of `kv_spec.num_states`. Returns [T, C] in the model's
        dtype, after the final norm: what `logits` takes.
        """
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores [R, vocabulary] float32 of the hidden states [R, C]."""
        return self.lm_head(hidden, torch.float32)


def _check_values(config: PretrainedConfig) -> None:
    aliases = getattr(config, "attribute_map", {})  # the names that the file does not have
    for field, most in COUNTS.items():
        value = getattr(config, field, None)
        if field not in aliases and value is not None and not _is_count(value, most):
            refuse(config, field, f"it must be a whole number from 1 to {most}")
    for field, zero in NUMBERS.items():
        if field not in aliases and hasattr(config, field) and not _is_number(getattr(config, field), zero):
            refuse(config, field, f"it must be a finite number {'not below' if zero else 'above'} 0")
    for field, beside in FACTORS.items():
        value = getattr(config, field, None)
        is_none = type(value) not in (int, float) and value in NEUTRAL
        if field not in aliases and not is_none and not is_factor(value, beside):
            refuse(config, field, f"it must be a finite number {beside}".strip())
    rope = rope_parameters(config)
    _check_rope_values(config, rope)
    for by_layer in rope.values():
        if isinstance(by_layer, Mapping):
            _check_rope_values(config, by_layer)


def _check_rope_values(config: PretrainedConfig, rope: Mapping[str, Any]) -> None:
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str):
        refuse(config, "rope_type (rotary)", "it must be a name", kind)
    for field, zero in ROPE_NUMBERS.items():
        if rope.get(field) is not None and not _is_number(rope[field], zero):
            reason = f"it must be a finite number {'not below' if zero else 'above'} 0"
            refuse(config, f"{field} (rotary)", reason, rope[field])
    original = rope.get("original_max_position_embeddings")
    if original is not None and not _is_count(original, _MOST):
        reason = f"it must be a whole number from 1 to {_MOST}"
        refuse(config, "original_max_position_embeddings (rotary)", reason, original)


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _is_number(value: Any, zero: bool) -> bool:
    if type(value) not in (int, float) or not -_LARGEST < value < _LARGEST:  # false for NaN
        return False
    return bool(value > 0 or (zero and value == 0))


def is_factor(value: Any, beside: str = "") -> bool:
    """Whether it is a finite number, and what `beside` says as in `FACTORS`."""
    if type(value) not in (int, float) or not -_LARGEST < value < _LARGEST:
        return False
    return bool(value > 0 or not beside or (value < 0 and beside != "above 0"))


__all__ = ["CausalLM", "is_factor", "refuse"]
