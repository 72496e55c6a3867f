"""BERT with rotated queries and keys (arXiv:2104.09864) in the place of a table of positions: GTE (arXiv:2407.19669),
Nomic Embed (arXiv:2402.01613) and Jina Embeddings 3 (arXiv:2409.10173), as transformers reads them.

Configuration fields that shape the arithmetic: hidden_size, num_attention_heads, head_dim, intermediate_size,
num_hidden_layers, hidden_act, layer_norm_eps, max_position_embeddings, type_vocab_size, vocab_size, and the rotary ones
(see `layers/rotary.py`). Files have queries, keys and values as one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn

from quire.checkpoint.weights import StoredPart
from quire.layers import (
    ROTARY_FIELDS,
    LayerNorm,
    Linear,
    MergedLinear,
    PagedAttention,
    RotaryEmbedding,
    RotaryTable,
    activation,
    gated_activation,
)
from quire.layers.rotary import check_whole_heads, rope_parameters
from quire.layers.rows import gathered, take
from quire.models.base import refuse
from quire.models.bert import BertModel, RobertaModel
from quire.models.encoder import EncoderEmbeddings, Sizes
from quire.types import ForwardContext, KVCache

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.checkpoint.files import Checkpoint


class Form(NamedTuple):
    """Which projections have a bias, and whether the feed-forward has a gate (arXiv:2002.05202)."""

    attention: bool
    up: bool
    down: bool
    gated: bool


class RotaryAttention(nn.Module):
    """Attention with rotation, of all tokens."""

    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        spec = sizes.attention()
        width = spec.num_heads * spec.head_dim
        self.q_proj = Linear(sizes.hidden, width, bias=bias)
        self.k_proj = Linear(sizes.hidden, width, bias=bias)
        self.v_proj = Linear(sizes.hidden, width, bias=bias)
        self.o_proj = Linear(width, sizes.hidden, bias=bias)
        self.qkv = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.attend = PagedAttention.from_spec(spec)

    def forward(self, x: torch.Tensor, rope: RotaryTable, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        """x: [T, C] -> [T, C]."""
        y: torch.Tensor = self.o_proj(self.mix(x, rope, ctx, cache))
        return y

    def mix(self, x: torch.Tensor, rope: RotaryTable, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        """x: [T, C] -> [T, H * D], what `o_proj` takes."""
        return self.attend(self.qkv(x), ctx, cache, rope)


class GatedFeedForward(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, sizes: Sizes, form: Form) -> None:
        super().__init__()
        self.gate_proj = Linear(sizes.hidden, sizes.inner, bias=form.up)
        self.up_proj = Linear(sizes.hidden, sizes.inner, bias=form.up)
        self.down_proj = Linear(sizes.inner, sizes.hidden, bias=form.down)
        self.gate_up = MergedLinear(self.gate_proj, self.up_proj)
        self.activate = gated_activation(sizes.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, C] -> [T, C]."""
        y: torch.Tensor = self.down_proj(self.activate(self.gate_up(x)))
        return y


class FeedForward(nn.Module):
    """fc2(act(fc1(x)))."""

    def __init__(self, sizes: Sizes, form: Form) -> None:
        super().__init__()
        self.fc1 = Linear(sizes.hidden, sizes.inner, bias=form.up)
        self.fc2 = Linear(sizes.inner, sizes.hidden, bias=form.down)
        self.activate = activation(sizes.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, C] -> [T, C]."""
        y: torch.Tensor = self.fc2(self.activate(self.fc1(x)))
        return y


class RotaryEncoderLayer(nn.Module):
    """x = norm(x + attention(x)); x = norm(x + feed_forward(x))."""

    def __init__(self, sizes: Sizes, form: Form) -> None:
        super().__init__()
        self.self_attn = RotaryAttention(sizes, form.attention)
        self.post_attention_layernorm = LayerNorm(sizes.hidden, sizes.eps)
        self.mlp = GatedFeedForward(sizes, form) if form.gated else FeedForward(sizes, form)
        self.post_mlp_layernorm = LayerNorm(sizes.hidden, sizes.eps)

    def forward(self, x: torch.Tensor, rope: RotaryTable, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        """x: [T, C], which this overwrites -> [T, C]."""
        return self.finish(x, self.self_attn(x, rope, ctx, cache))

    def forward_rows(
        self, x: torch.Tensor, rope: RotaryTable, ctx: ForwardContext, cache: KVCache, rows: torch.Tensor
    ) -> torch.Tensor:
        """The rows [R] int64 of what `forward` returns: [R, C]."""
        x, mixed = take(rows, x, self.self_attn.mix(x, rope, ctx, cache))
        with gathered(rows):
            return self.finish(x, self.self_attn.o_proj(mixed))

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Row by row. x: [T, C], which this overwrites; attended: [T, C] -> [T, C]."""
        x = self.post_attention_layernorm(x, attended)
        y: torch.Tensor = self.post_mlp_layernorm(x, self.mlp(x))
        return y


class RotaryEncoder(BertModel):
    """What the three share. form: of a block. fused: where files have several projections as one tensor; its last name
    -> these, in their order there."""

    layers_at = "layers"
    form: ClassVar[Form]
    fused: ClassVar[Mapping[str, Sequence[str]]]
    supported_fields: ClassVar = ROTARY_FIELDS
    _names: frozenset[str] = frozenset()

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.rotary = RotaryEmbedding(config)
        self.max_model_len = self.rotary.max_positions
        self.rope_threshold = self.rotary.threshold
        own = type(self).forward is RotaryEncoder.forward
        self.narrows = own and all(type(one).forward is RotaryEncoderLayer.forward for one in self.body.layers)

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        check_whole_heads(config)

    @classmethod
    def sizes(cls, config: PretrainedConfig) -> Sizes:
        return super().sizes(config)._replace(head=getattr(config, "head_dim", None) or 0)

    def layer(self, config: PretrainedConfig, sizes: Sizes) -> nn.Module:
        return RotaryEncoderLayer(sizes, self.form)

    def embeddings(self, config: PretrainedConfig, sizes: Sizes) -> EncoderEmbeddings:
        self.token_types = config.type_vocab_size > 1
        return EncoderEmbeddings(config.vocab_size, 0, config.type_vocab_size, sizes.hidden, sizes.eps)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        rope = self.rotary(ctx)
        x: torch.Tensor = self.body.embeddings(embeddings, ctx)
        *layers, last = zip(self.body.layers, kv, strict=True)
        for layer, cache in layers:
            x = layer(x, rope, ctx, cache)
        layer, cache = last
        return layer(x, rope, ctx, cache) if ctx.wanted is None else layer.forward_rows(x, rope, ctx, cache, ctx.wanted)

    def see_files(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        self._names = frozenset(checkpoint.names())
        return super().see_files(checkpoint)

    def checkpoint_parts(self) -> Mapping[str, StoredPart]:
        parts: dict[str, StoredPart] = {}
        for whole, own in self.fused.items():
            for place in (name for name, _ in self.named_parameters()):
                path, _, kind = place.rpartition(".")
                before, _, leaf = path.rpartition(".")
                stored = f"{before}.{whole}.{kind}"
                if leaf in own and stored in self._names:
                    shape = self.get_parameter(place).shape
                    shapes = {stored: torch.Size((len(own) * shape[0], *shape[1:]))}
                    parts[place] = StoredPart(shapes, partial(_share, own.index(leaf), len(own)))
        return parts


class GteModel(RotaryEncoder):
    """GTE's encoders of 2024 in transformers' form (model_type "gte")."""

    base = "gte"
    form = Form(attention=True, up=False, down=True, gated=True)
    fused: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "up_gate_proj": ("up_proj", "gate_proj")}
    stored_names: ClassVar = (
        (r"^new\.", "gte."),
        (r"(^|\.)encoder\.layer\.", r"\1layers."),
        (r"\.attention\.(qkv|o)_proj\.", r".self_attn.\1_proj."),
        (r"\.attn_ln\.", ".post_attention_layernorm."),
        (r"\.mlp_ln\.", ".post_mlp_layernorm."),
    )


# What files of JinaAI's and Nomic's have that transformers calls otherwise.
_FLASH_NAMES = (
    (r"(^|\.)emb_ln\.", r"\1embeddings.LayerNorm."),
    (r"(^|\.)encoder\.layers\.", r"\1layers."),
    (r"\.norm1\.", ".post_attention_layernorm."),
    (r"\.norm2\.", ".post_mlp_layernorm."),
)
# Names that Nomic's own files have for sizes, and transformers' configuration's, whose defaults stand where files have
# these alone.
_NOMIC_SIZES = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers", "layer_norm_epsilon": "layer_norm_eps",
}  # fmt: skip


class NomicBertModel(RotaryEncoder):
    """Nomic Embed 1 and 1.5. Mixtures of experts (version 2) are refused."""

    base = "nomic_bert"
    form = Form(attention=False, up=False, down=False, gated=True)
    fused: ClassVar = {"Wqkv": ("q_proj", "k_proj", "v_proj")}
    stored_names: ClassVar = (
        *_FLASH_NAMES,
        (r"\.attn\.Wqkv\.", ".self_attn.Wqkv."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.fc11\.", ".up_proj."),
        (r"\.fc12\.", ".gate_proj."),
        (r"\.fc2\.", ".down_proj."),
    )
    supported_fields: ClassVar = ROTARY_FIELDS | {"rotary_emb_base"}
    fixed_fields: ClassVar[Mapping[str, Any]] = {
        **RotaryEncoder.fixed_fields,
        **dict.fromkeys(
            ("causal", "prenorm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "parallel_block", "use_rms_norm",
             "rotary_emb_interleaved", "scale_attn_by_inverse_layer_idx"), False,
        ),
        "scale_attn_weights": True, "rotary_emb_fraction": 1.0, "activation_function": "swiglu",
        "rotary_scaling_factor": None, "rotary_emb_scale_base": None, "num_experts": 0,
    }  # fmt: skip

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        own = {**{name: getattr(config, ours) for name, ours in _NOMIC_SIZES.items()},
               "rotary_emb_base": rope_parameters(config)["rope_theta"]}  # fmt: skip
        for name, value in own.items():
            if getattr(config, name, None) not in (None, value):
                refuse(config, name, f"transformers leaves this field unread and computes {value!r}")


class JinaEmbeddingsV3Model(RotaryEncoder):
    """Jina Embeddings 3 in transformers' form: without an adapter; each of its tasks has one, which a request names."""

    base = "roberta"
    form = Form(attention=True, up=True, down=True, gated=False)
    fused: ClassVar = {"Wqkv": ("q_proj", "k_proj", "v_proj")}
    stored_names: ClassVar = (
        *_FLASH_NAMES,
        (r"\.mixer\.Wqkv\.", ".self_attn.Wqkv."),
        (r"\.mixer\.out_proj\.", ".self_attn.o_proj."),
    )
    add_text_head = RobertaModel.add_text_head
    head = RobertaModel.head


def _share(number: int, count: int, whole: torch.Tensor) -> torch.Tensor:
    """Share `number` of so many equal ones of `whole`, along its first dimension."""
    return whole.chunk(count)[number]
