"""GraniteMoE: Granite's multipliers, and experts in every layer, which the files hold in one tensor; and
GraniteMoeShared, with a feed-forward beside them.

Configuration fields that shape the arithmetic, beyond Granite's (see `granite.py`): num_local_experts,
num_experts_per_tok, shared_intermediate_size. A token's experts are those of the largest logits, and its shares their
softmax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.checkpoint.weights import StoredPart
from quire.kernels.experts import Routing
from quire.layers import ROTARY_FIELDS, Linear, gated_activation
from quire.models.decoder import Biases, Multipliers, hidden_act
from quire.models.fields import refuse
from quire.models.sparse import SparseDecoderForCausalLM, SparseMLP

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.types import AttentionSpec


class GraniteMoeForCausalLM(SparseDecoderForCausalLM):
    supported_fields: ClassVar = ROTARY_FIELDS | {
        "attention_bias", "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
    }  # fmt: skip
    checkpoint_renames: Sequence[tuple[str, str]] = (
        (r"(.+)\.block_sparse_moe\.router\.layer\.weight", r"\1.mlp.gate.weight"),
    )
    old_names: ClassVar[Sequence[tuple[str, str]]] = (
        (r"\.mlp\.gate\b", ".block_sparse_moe.router.layer"),
        (r"\.mlp\b", ".block_sparse_moe"),
    )
    new_names: ClassVar[Sequence[tuple[str, str]]] = (
        (r"\.mlp\.gate\b", ".block_sparse_moe.router"),
        (r"\.mlp\b", ".block_sparse_moe"),
    )

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        for field in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
            if getattr(config, field) is None:
                refuse(config, field, "it must be a number")

    @classmethod
    def attention_spec(cls, config: PretrainedConfig, layer: int) -> AttentionSpec:
        return dataclasses.replace(super().attention_spec(config, layer), scale=config.attention_multiplier)

    @classmethod
    def biases(cls, config: PretrainedConfig) -> Biases:
        return Biases(qkv=config.attention_bias, out=config.attention_bias)

    @classmethod
    def multipliers(cls, config: PretrainedConfig) -> Multipliers:
        return Multipliers(config.embedding_multiplier, config.residual_multiplier, 1 / config.logits_scaling)

    def embed_given(self, rows: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens.scaled(rows)

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        routing = Routing("softmax_of_chosen")
        return SparseMLP(config, config.num_local_experts, config.intermediate_size, routing)

    def checkpoint_parts(self) -> Mapping[str, StoredPart]:
        """The files have input_linear [E, 2 I, H], of each expert gate and then up, and output_linear [E, H, I]."""
        config = self.config
        count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        parts = {}
        for layer in range(config.num_hidden_layers):
            stored, own = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp.experts"
            gate_up = {f"{stored}.input_linear.weight": torch.Size((count, 2 * inner, hidden))}
            down = {f"{stored}.output_linear.weight": torch.Size((count, hidden, inner))}
            for e in range(count):
                parts[f"{own}.{e}.gate_proj.weight"] = StoredPart(gate_up, partial(_rows, e, 0, inner))
                parts[f"{own}.{e}.up_proj.weight"] = StoredPart(gate_up, partial(_rows, e, inner, 2 * inner))
                parts[f"{own}.{e}.down_proj.weight"] = StoredPart(down, partial(_rows, e, 0, hidden))
        return parts


class SharedMLP(nn.Module):
    """What all tokens go through; gate and up are one layer."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.shared_intermediate_size
        self.input_linear = Linear(hidden, 2 * inner, bias=False)
        self.output_linear = Linear(inner, hidden, bias=False)
        self.activate = gated_activation(hidden_act(config))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_linear(self.activate(self.input_linear(x)))


class SharedSparseMLP(SparseMLP):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config, config.num_local_experts, config.intermediate_size, Routing("softmax_of_chosen"))
        self.shared_mlp = SharedMLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x, torch.float32), shared=self.shared_mlp(x))


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """GraniteMoeShared: GraniteMoE with a feed-forward for all tokens beside the experts."""

    checkpoint_renames = (
        *GraniteMoeForCausalLM.checkpoint_renames,
        (r"(.+\.\d+)\.shared_mlp\.(.+)", r"\1.mlp.shared_mlp.\2"),
    )
    old_names = ((r"\.mlp\.shared_mlp\b", ".shared_mlp"), *GraniteMoeForCausalLM.old_names)
    new_names = ((r"\.mlp\.shared_mlp\b", ".shared_mlp"), *GraniteMoeForCausalLM.new_names)

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        if config.shared_intermediate_size == 0:
            return super().mlp(config, biases, layer)
        return SharedSparseMLP(config)


def _rows(expert: int, first: int, end: int, stacked: torch.Tensor) -> torch.Tensor:
    return stacked[expert, first:end]
