"""GPT-J (Wang and Komatsuzaki, 2021), published as GPTJForCausalLM.

Rotary positions on the first `rotary_dim` dimensions of a head, which turn in pairs side by side, and blocks whose
attention and feed-forward read one norm of the residual stream. Configuration fields that shape the arithmetic: n_embd,
n_layer, n_head, n_positions, n_inner, rotary_dim, activation_function, layer_norm_epsilon, vocab_size and
tie_word_embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.layers import (
    Embedding,
    LayerNorm,
    Linear,
    MergedLinear,
    PagedAttention,
    RotaryEmbedding,
    RotaryTable,
)
from quire.models.base import CausalLM, refuse
from quire.models.classic import PlainMLP, parallel, run
from quire.types import AttentionSpec, ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GPTJAttention(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden = config.n_embd
        self.q_proj = Linear(hidden, hidden, bias=False)
        self.k_proj = Linear(hidden, hidden, bias=False)
        self.v_proj = Linear(hidden, hidden, bias=False)
        self.out_proj = Linear(hidden, hidden, bias=False)
        self.qkv = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.attend = PagedAttention.from_spec(attention_spec(config))

    def forward(self, x: torch.Tensor, rope: RotaryTable, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        return self.out_proj(self.attend(self.qkv(x), ctx, cache, rope))


class GPTJForCausalLM(CausalLM):
    # Checkpoints saved from the bare model have no prefix.
    checkpoint_renames = ((r"((?:wte|h|ln_f)\..+)", r"transformer.\1"),)
    # Causal masks, which old versions stored as if they were weights.
    checkpoint_ignored = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)",)
    supported_fields: ClassVar = frozenset({"rotary_dim"})
    fixed_fields: ClassVar = {"rotary": True, "scale_attn_weights": True}
    tied_weights: Mapping[str, str] = {"lm_head.weight": "transformer.wte.weight"}
    attention_class: ClassVar[type[nn.Module]] = GPTJAttention

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.transformer = GPTJModel(config, self.attention_class)
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        self.kv_spec = KVSpec.of([attention_spec(config)] * config.n_layer)
        self.max_model_len = config.n_positions

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.n_embd % config.n_head:
            refuse(config, "n_head", f"it must divide n_embd={config.n_embd}")
        size = config.n_embd // config.n_head
        if type(config.rotary_dim) is not int or not 0 < config.rotary_dim <= size or config.rotary_dim % 2:
            refuse(config, "rotary_dim", f"it must be an even number of a head's {size} dimensions")

    @property
    def layers_in_order(self) -> nn.ModuleList:
        return self.transformer.h

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.transformer.wte(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.transformer(embeddings, ctx, kv)


class GPTJModel(nn.Module):
    def __init__(self, config: PretrainedConfig, attention_class: type[nn.Module]) -> None:
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList(GPTJBlock(config, attention_class) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.rotary = RotaryEmbedding(config, interleaved=True, head_dim=config.rotary_dim)

    def forward(self, residual: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.ln_f(residual, run(self.h, residual, self.rotary(ctx), ctx, kv))


class GPTJBlock(nn.Module):
    def __init__(self, config: PretrainedConfig, attention_class: type[nn.Module]) -> None:
        super().__init__()
        hidden = config.n_embd
        inner = config.n_inner if config.n_inner is not None else 4 * hidden
        self.ln_1 = LayerNorm(hidden, config.layer_norm_epsilon)
        self.attn = attention_class(config)
        self.mlp = PlainMLP(("fc_in", "fc_out"), hidden, inner, config.activation_function)

    def forward(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | None,
        rope: RotaryTable,
        ctx: ForwardContext,
        cache: KVCache,
    ) -> torch.Tensor:
        norms = self.ln_1, None
        return parallel(residual, x, norms, lambda normed: self.attn(normed, rope, ctx, cache), self.mlp)


def attention_spec(config: PretrainedConfig) -> AttentionSpec:
    return AttentionSpec(config.n_head, config.n_head, config.n_embd // config.n_head)
