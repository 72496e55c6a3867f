"""The decoder that most families share: blocks of grouped-query attention and a feed-forward.

Root mean square norms (arXiv:1910.07467), grouped-query attention (arXiv:2305.13245), rotary positions
(arXiv:2104.09864), SwiGLU (arXiv:2002.05202). A family derives from `DecoderForCausalLM` and says what is its own, by
the hooks of that class: what it does not say is Llama's. Modules are called as in Llama's state dict.

Configuration fields that shape the arithmetic: hidden_size, intermediate_size, num_hidden_layers,
num_attention_heads, num_key_value_heads, head_dim, hidden_act, rms_norm_eps, tie_word_embeddings, vocab_size,
max_position_embeddings, and the rotary ones (see `layers/rotary.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn

from quire import kernels
from quire.errors import UnsupportedModelError
from quire.layers import (
    ROTARY_FIELDS,
    Embedding,
    Linear,
    MergedLinear,
    PagedAttention,
    RMSNorm,
    RotaryEmbedding,
    RotaryTable,
)
from quire.layers.rotary import check_whole_heads
from quire.layers.rows import gathered, take
from quire.models.base import CausalLM, refuse
from quire.models.feed_forward import Biases as Biases  # which families import from here
from quire.models.feed_forward import FusedGatedMLP as FusedGatedMLP
from quire.models.feed_forward import GatedMLP as GatedMLP
from quire.models.feed_forward import PlainMLP as PlainMLP
from quire.models.feed_forward import hidden_act as hidden_act
from quire.models.fields import check_window
from quire.types import AttentionSpec, ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Windows in the layers that layer_types calls sliding, for a family's `supported_fields`. Where a family has
# sliding_window alone there, all its layers have that.
WINDOW_FIELDS = frozenset({"sliding_window", "use_sliding_window", "layer_types"})
# Rotary parameters by type of layer, see `rotaries_by_type`.
ROTARY_BY_TYPE = frozenset({"rope_parameters.full_attention", "rope_parameters.sliding_attention"})


class Multipliers(NamedTuple):
    """Numbers that a family multiplies by.

    embedding: the embeddings. residual: what attention and feed-forward add to the residual stream. logits: the scores;
    softcap: then the scores become softcap * tanh(score / softcap), unless it is 0.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    softcap: float = 0.0


class DecoderAttention(nn.Module):
    """Project, norms of heads, rotate, store, attend: `mix`. A family overrides the steps that are its own."""

    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__()
        hidden, heads, kv_heads, size = config.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.q_proj = Linear(hidden, heads * size, bias=biases.qkv)
        self.k_proj = Linear(hidden, kv_heads * size, bias=biases.qkv)
        self.v_proj = Linear(hidden, kv_heads * size, bias=biases.qkv)
        self.o_proj = Linear(heads * size, hidden, bias=biases.out)
        self.qkv = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.attend = PagedAttention.from_spec(spec)

    def forward(self, x: torch.Tensor, rope: RotaryTable | None, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        return self.o_proj(self.mix(x, rope, ctx, cache))

    def mix(self, x: torch.Tensor, rope: RotaryTable | None, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        """x: [T, C] -> [T, H * D], what `o_proj` takes."""
        query, key, value = self.project(x)
        query, key = self.norm_heads(query, key)
        return self.attend.of(query, key, value, ctx, cache, rope)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x: [T, C] -> query [T, H, D], key and value [T, G, D]."""
        return self.attend.split(self.qkv(x))

    def norm_heads(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key as they are rotated. Most families have no norms of heads."""
        return query, key


class HeadNormAttention(DecoderAttention):
    """A norm over each head of query and key, before they are rotated."""

    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        super().__init__(config, spec, biases)
        self.q_norm = self.head_norm(config, spec.head_dim)
        self.k_norm = self.head_norm(config, spec.head_dim)

    def head_norm(self, config: PretrainedConfig, size: int) -> nn.Module:
        return RMSNorm(size, config.rms_norm_eps)

    def norm_heads(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm(query), self.k_norm(key)


class FusedAttention(DecoderAttention):
    """Query, key and value are one layer, `qkv_proj`: all queries' heads, then all keys', then all values'."""

    def __init__(self, config: PretrainedConfig, spec: AttentionSpec, biases: Biases) -> None:
        nn.Module.__init__(self)
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv_proj = Linear(config.hidden_size, width, bias=biases.qkv)
        self.o_proj = Linear(spec.num_heads * spec.head_dim, config.hidden_size, bias=biases.out)
        self.attend = PagedAttention.from_spec(spec)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.attend.split(self.qkv_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm: attention and feed-forward each read a norm of the residual stream, and are added to it.

    norm_names: of the layer's norms, in the order in which they are used; `norms` has them in that order.
    """

    norm_names: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")

    def __init__(self, config: PretrainedConfig, family: type[DecoderForCausalLM], layer: int) -> None:
        super().__init__()
        biases = family.biases(config)
        self.self_attn = family.attention_class(config, family.attention_spec(config, layer), biases)
        self.mlp = family.mlp(config, biases, layer)
        self.norms = tuple(family.norm(config, config.hidden_size) for _ in self.norm_names)
        for name, norm in zip(self.norm_names, self.norms, strict=True):
            self.add_module(name, norm)

    def forward(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | None,
        rope: RotaryTable | None,
        ctx: ForwardContext,
        cache: KVCache,
    ) -> torch.Tensor:
        """residual: [T, C], to which this adds, in place, x [T, C]: what the layer before left to add."""
        x = self.begin(residual, x)
        return self.finish(residual, x, self.self_attn(x, rope, ctx, cache))

    def forward_rows(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | None,
        rope: RotaryTable | None,
        ctx: ForwardContext,
        cache: KVCache,
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, where behind attention some rows are wanted alone, [R] int64: those of the residual stream, and
        what is left to add to them, each [R, C]."""
        x = self.begin(residual, x)
        mixed = self.self_attn.mix(x, rope, ctx, cache)
        residual, x, mixed = take(rows, residual, x, mixed)
        with gathered(rows):
            return residual, self.finish(residual, x, self.self_attn.o_proj(mixed))

    @property
    def narrows(self) -> bool:
        """Whether `forward_rows` does what `forward` does."""
        plain = type(self).forward is DecoderLayer.forward
        return plain and type(self.self_attn).forward is DecoderAttention.forward

    def begin(self, residual: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        """Add x to the residual stream; what attention reads."""
        y: torch.Tensor = self.norms[0](residual, x)
        return y

    def finish(self, residual: torch.Tensor, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Row by row: what is left to add. x: what `begin` returned; attended: what attention did."""
        return self.mlp(self.norms[1](residual, attended))


class SandwichLayer(DecoderLayer):
    """Norms before attention and feed-forward, and of what they give."""

    norm_names = (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip

    def finish(self, residual: torch.Tensor, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        _, after_attention, before_mlp, after_mlp = self.norms
        return after_mlp(self.mlp(before_mlp(residual, after_attention(attended))))


class PostNormLayer(DecoderLayer):
    """Attention and feed-forward read the residual stream as it is, and a norm of each is added to it."""

    norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")

    def begin(self, residual: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        if x is not None:
            kernels.add_to(residual, x)
        return residual

    def finish(self, residual: torch.Tensor, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        after_attention, after_mlp = self.norms
        kernels.add_to(residual, after_attention(attended))
        return after_mlp(self.mlp(residual))


class ParallelLayer(DecoderLayer):
    """Attention and feed-forward read the same norm of the residual stream; their sum is added to it."""

    norm_names = ("input_layernorm",)

    def finish(self, residual: torch.Tensor, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        kernels.add_to(attended, self.mlp(x))
        return attended


class Decoder(nn.Module):
    """Embeddings, layers and the last norm.

    rotaries: tables of rotations. rotary_of: for each layer the number of its own; -1: it has none.
    """

    def __init__(self, config: PretrainedConfig, family: type[DecoderForCausalLM]) -> None:
        super().__init__()
        layers = range(config.num_hidden_layers)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, family.multipliers(config).embedding)
        self.layers = nn.ModuleList(family.layer(config, layer) for layer in layers)
        self.norm = family.norm(config, config.hidden_size)
        self.rotaries = tuple(family.rotaries(config))
        self.rotary_of = [family.rotary_of(config, layer) for layer in layers]

    def forward(self, residual: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        ropes, x = [*(rotary(ctx) for rotary in self.rotaries), None], None
        levels = 0 if ctx.level_features is None else len(ctx.level_features)
        last: Any = self.layers[-1]
        for number, (layer, which, cache) in enumerate(zip(self.layers, self.rotary_of, kv, strict=True)):
            if ctx.wanted is not None and number == len(self.layers) - 1:
                residual, x = last.forward_rows(residual, x, ropes[which], ctx, cache, ctx.wanted)
                with gathered(ctx.wanted):
                    return self.norm(residual, x)
            x = layer(residual, x, ropes[which], ctx, cache)
            if number < levels:
                ctx.add_level(number, residual)
        return self.norm(residual, x)


class DecoderForCausalLM(CausalLM):
    """A family of such decoders. What is a family's own, it says by these attributes and by the methods of a class.

    attention_class: made of (config, spec, biases) for each layer. mlp_class: of (config, biases). layer_class: of
    (config, family, number of the layer): where the norms stand.
    """

    tied_weights: Mapping[str, str] = {"lm_head.weight": "model.embed_tokens.weight"}
    supported_fields: ClassVar[frozenset[str]] = ROTARY_FIELDS
    checkpoint_ignored: Sequence[str] = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
    attention_class: ClassVar[type[DecoderAttention]] = DecoderAttention
    mlp_class: ClassVar[type[nn.Module]] = GatedMLP
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    # What layer_types may call a layer.
    layer_kinds: ClassVar[frozenset[str]] = frozenset({"full_attention", "sliding_attention"})
    # Whether partial_rotary_factor says how much of a head turns: in most families, transformers turns the whole.
    turns_partly: ClassVar[bool] = False

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config, type(self))
        last: Any = self.model.layers[-1]
        self.narrows = type(self).forward is DecoderForCausalLM.forward and last.narrows
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.multiply = self.multipliers(config)
        self.kv_spec = KVSpec.of(self.attention_spec(config, layer) for layer in range(config.num_hidden_layers))
        reach = (rotary.max_positions for rotary in self.model.rotaries)
        self.max_model_len = min(reach, default=config.max_position_embeddings)
        thresholds = [rotary.threshold for rotary in self.model.rotaries if rotary.threshold is not None]
        self.rope_threshold = min(thresholds, default=None)

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.num_attention_heads % kv_heads(config):
            raise UnsupportedModelError(
                f"config.json: num_attention_heads={config.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={config.num_key_value_heads}."
            )
        types = getattr(config, "layer_types", None)
        if types and (not cls.layer_kinds.issuperset(types) or len(types) != config.num_hidden_layers):
            refuse(config, "layer_types", f"it must have one of {', '.join(sorted(cls.layer_kinds))} for each layer")
        check_window(config, cls.supported_fields)
        if not cls.turns_partly:
            check_whole_heads(config)

    @classmethod
    def attention_spec(cls, config: PretrainedConfig, layer: int) -> AttentionSpec:
        """What the attention of layer number `layer` computes."""
        slides = "layer_types" not in cls.supported_fields or config.layer_types[layer] == "sliding_attention"
        window = getattr(config, "sliding_window", None) or 0 if slides else 0
        return AttentionSpec(config.num_attention_heads, kv_heads(config), head_dim(config), window=window)

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases()

    @classmethod
    def multipliers(cls, config: PretrainedConfig) -> Multipliers:
        return Multipliers()

    @classmethod
    def layer(cls, config: PretrainedConfig, layer: int) -> DecoderLayer:
        """Layer number `layer`."""
        return cls.layer_class(config, cls, layer)

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        """The feed-forward of layer number `layer`."""
        return cls.mlp_class(config, biases)

    @classmethod
    def norm(cls, config: PretrainedConfig, size: int) -> nn.Module:
        """A norm of the residual stream. What it adds to the stream, it multiplies by the residual's multiplier."""
        return RMSNorm(size, config.rms_norm_eps, added_scale=cls.multipliers(config).residual)

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        """The tables of rotations that the layers have."""
        return (RotaryEmbedding(config),)

    @classmethod
    def rotary_of(cls, config: PretrainedConfig, layer: int) -> int:
        """Which of `rotaries` a layer turns by; -1: it does not."""
        return 0

    @property
    def layers_in_order(self) -> nn.ModuleList:
        return self.model.layers

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.model(embeddings, ctx, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = super().logits(hidden)
        if self.multiply.logits == 1.0 and not self.multiply.softcap:
            return scores
        return kernels.scale(scores, self.multiply.logits, self.multiply.softcap)


def rotaries_by_type(config: PretrainedConfig, **settings: Any) -> Sequence[RotaryEmbedding]:
    """A table for each type of layer that there is, where rotary parameters are by type; see `type_of_layer`."""
    return [RotaryEmbedding(config, layer_type=kind, **settings) for kind in sorted(set(config.layer_types))]


def type_of_layer(config: PretrainedConfig, layer: int) -> int:
    """The number of a layer's type, in the order of `rotaries_by_type`."""
    return sorted(set(config.layer_types)).index(config.layer_types[layer])


def head_dim(config: PretrainedConfig) -> int:
    """`head_dim` where the configuration has it; it need not be hidden_size / num_attention_heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_heads(config: PretrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads
