"""ModernBERT (arXiv:2412.13663): rotated queries and keys, a gate in the feed-forward, layers that see a window.

Configuration fields that shape the arithmetic: hidden_size, num_attention_heads, intermediate_size, num_hidden_layers,
hidden_activation, norm_eps, norm_bias, attention_bias, mlp_bias, layer_types, local_attention (of which half lies on
either side of a token), max_position_embeddings, vocab_size, the rotary parameters by type of layer (see
`layers/rotary.py`), and classifier_pooling, classifier_bias and classifier_activation of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from quire.layers import (
    ROTARY_FIELDS,
    Embedding,
    LayerNorm,
    Linear,
    PagedAttention,
    RotaryTable,
    activation,
    gated_activation,
)
from quire.layers.rotary import check_whole_heads
from quire.layers.rows import gathered, take
from quire.models.base import refuse
from quire.models.decoder import ROTARY_BY_TYPE, rotaries_by_type, type_of_layer
from quire.models.pooling.base import PoolingModel
from quire.types import AttentionSpec, ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_KINDS = frozenset({"full_attention", "sliding_attention"})


class ModernBertEmbeddings(nn.Module):
    """norm(words)"""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.norm = _norm(config)


class ModernBertAttention(nn.Module):
    def __init__(self, config: PretrainedConfig, layer: int) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.Wqkv = Linear(hidden, 3 * hidden, bias=bias)
        self.Wo = Linear(hidden, hidden, bias=bias)
        self.attend = PagedAttention.from_spec(_attention(config, layer))
        self.attend.look_ahead = self.attend.spec.window - 1 if self.attend.spec.window else None

    def forward(self, x: torch.Tensor, rope: RotaryTable, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        """x: [T, C] -> [T, C]."""
        y: torch.Tensor = self.Wo(self.mix(x, rope, ctx, cache))
        return y

    def mix(self, x: torch.Tensor, rope: RotaryTable, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        """x: [T, C] -> [T, C], what `Wo` takes."""
        return self.attend(self.Wqkv(x), ctx, cache, rope)


class ModernBertMLP(nn.Module):
    """Wo(act(a) * b), of Wi(x) = (a, b)."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.Wi = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.Wo = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activate = gated_activation(config.hidden_activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, C] -> [T, C]."""
        y: torch.Tensor = self.Wo(self.activate(self.Wi(x)))
        return y


class ModernBertLayer(nn.Module):
    """Pre-norm; the first layer's attention reads the embeddings, which a norm has made."""

    def __init__(self, config: PretrainedConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = _norm(config) if layer else None
        self.attn = ModernBertAttention(config, layer)
        self.mlp_norm = _norm(config)
        self.mlp = ModernBertMLP(config)

    def forward(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | None,
        rope: RotaryTable,
        ctx: ForwardContext,
        cache: KVCache,
    ) -> torch.Tensor:
        """residual: [T, C], to which this adds, in place, x [T, C]: what the layer before left to add."""
        return self.finish(residual, self.attn(self.begin(residual, x), rope, ctx, cache))

    def forward_rows(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | None,
        rope: RotaryTable,
        ctx: ForwardContext,
        cache: KVCache,
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, where behind attention some rows are wanted alone, [R] int64: those of the residual stream, and
        what is left to add to them, each [R, C]."""
        mixed = self.attn.mix(self.begin(residual, x), rope, ctx, cache)
        residual, mixed = take(rows, residual, mixed)
        with gathered(rows):
            return residual, self.finish(residual, self.attn.Wo(mixed))

    def begin(self, residual: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        """Add x to the residual stream; what attention reads."""
        return residual if self.attn_norm is None else self.attn_norm(residual, x)

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Row by row: what is left to add. attended: what attention did."""
        made: torch.Tensor = self.mlp(self.mlp_norm(residual, attended))
        return made


class ModernBertEncoder(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        layers = range(config.num_hidden_layers)
        self.embeddings = ModernBertEmbeddings(config)
        self.layers = nn.ModuleList(ModernBertLayer(config, layer) for layer in layers)
        self.final_norm = _norm(config)
        self.rotaries = tuple(rotaries_by_type(config))
        self.rotary_of = [type_of_layer(config, layer) for layer in layers]

    def forward(self, words: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        """words: [T, C], of the table -> [T, C]."""
        ropes = [rotary(ctx) for rotary in self.rotaries]
        residual, x = self.embeddings.norm(words), None
        *layers, last = zip(self.layers, self.rotary_of, kv, strict=True)
        for layer, which, cache in layers:
            x = layer(residual, x, ropes[which], ctx, cache)
        block, which, cache = cast("tuple[Any, int, KVCache]", last)
        if ctx.wanted is None:
            y: torch.Tensor = self.final_norm(residual, block(residual, x, ropes[which], ctx, cache))
            return y
        residual, x = block.forward_rows(residual, x, ropes[which], ctx, cache, ctx.wanted)
        with gathered(ctx.wanted):
            y = self.final_norm(residual, x)
        return y


class ModernBertHead(nn.Module):
    """norm(act(dense(row)))"""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
        self.norm = _norm(config)
        self.activate = activation(config.classifier_activation)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [R, C] -> [R, C]."""
        y: torch.Tensor = self.norm(self.activate(self.dense(rows)))
        return y


class ModernBertModel(PoolingModel):
    """ModernBERT: with whichever head its architecture has."""

    bidirectional = True
    stored_names: ClassVar = ((r"^head\.", "prediction_head."),)
    supported_fields: ClassVar = (
        ROTARY_FIELDS
        | ROTARY_BY_TYPE
        | {"layer_types", "local_attention", "norm_bias", "norm_eps", "attention_bias", "mlp_bias", "sliding_window",
           "hidden_activation", "decoder_bias", "global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"}
    )  # fmt: skip
    fixed_fields: ClassVar = {"position_embedding_type": "rope", "is_causal": False}

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = ModernBertEncoder(config)
        self.narrows = type(self).forward is ModernBertModel.forward
        if self.convert == "embed":
            self.checkpoint_ignored = (r"(?:prediction_head|decoder|classifier)\..+",)
        else:
            self._add_head(config)
        specs = [_attention(config, layer) for layer in range(config.num_hidden_layers)]
        # A prompt is one step: no key is given back before all have been read.
        self.kv_spec = KVSpec.of(replace(spec, window=0) for spec in specs)
        self.max_model_len = min(self.model.rotaries[which].max_positions for which in self._tables_of_lengths(config))
        for rotary in self.model.rotaries:
            rotary.max_positions = max(rotary.max_positions, self.max_model_len)
        thresholds = [rotary.threshold for rotary in self.model.rotaries if rotary.threshold is not None]
        self.rope_threshold = min(thresholds, default=None)

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        check_whole_heads(config)
        if config.hidden_size % config.num_attention_heads:
            refuse(config, "hidden_size", "it must be a multiple of num_attention_heads")
        types = config.layer_types
        if not _KINDS.issuperset(types) or len(types) != config.num_hidden_layers:
            refuse(config, "layer_types", f"it must have one of {', '.join(sorted(_KINDS))} for each layer")
        if type(config.local_attention) is not int or config.local_attention < 1:
            refuse(config, "local_attention", "it must be a whole number from 1")

    def _tables_of_lengths(self, config: PretrainedConfig) -> set[int]:
        """The tables of rotation that bound a prompt's length: those of layers that see all of it, if there are any.

        In a window, differences of positions are small however long a prompt is.
        """
        layers = range(config.num_hidden_layers)
        found = {self.model.rotary_of[layer] for layer in layers if config.layer_types[layer] == "full_attention"}
        return found or set(self.model.rotary_of)

    def _add_head(self, config: PretrainedConfig) -> None:
        if self.per_token:
            self.kind = "all"
        elif self.architecture.endswith("ForSequenceClassification"):
            if config.classifier_pooling not in ("cls", "mean"):
                refuse(config, "classifier_pooling", "it must be cls or mean")
            self.kind = config.classifier_pooling
        else:
            raise self.no_head()
        self.prediction_head = ModernBertHead(config)
        self.classifier = Linear(config.hidden_size, self.num_labels)

    @property
    def vocab_size(self) -> int:
        return int(self.model.embeddings.tok_embeddings.num_embeddings)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        words: torch.Tensor = self.model.embeddings.tok_embeddings(input_ids)
        return words

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        y: torch.Tensor = self.model(embeddings, ctx, kv)
        return y

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.classifier(self.prediction_head(rows), torch.float32)
        return y


def _norm(config: PretrainedConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)


def _attention(config: PretrainedConfig, layer: int) -> AttentionSpec:
    """Layers that slide see half of local_attention on either side, and the token itself."""
    slides = config.layer_types[layer] == "sliding_attention"
    heads = config.num_attention_heads
    window = config.local_attention // 2 + 1 if slides else 0
    return AttentionSpec(heads, heads, config.hidden_size // heads, window=window)
