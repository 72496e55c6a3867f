"""Granite 4: Granite's layers with attention or with a state (Mamba-2), experts and a feed-forward for all tokens.

Configuration fields that shape the arithmetic, beyond GraniteMoE's (see `granitemoe.py`) and those of `hybrid.py`:
layer_types, position_embedding_type ("rope", or there are no rotations), shared_intermediate_size, num_local_experts
(0: there are none).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.checkpoint.weights import StoredPart
from quire.kernels.experts import Routing
from quire.layers import Mamba2, MambaSpec, RotaryEmbedding, RotaryTable
from quire.models.decoder import Biases, DecoderForCausalLM, DecoderLayer
from quire.models.fields import refuse
from quire.models.granitemoe import GraniteMoeForCausalLM, SharedMLP
from quire.models.hybrid import MAMBA_FIELDS, check_mamba, mamba_spec, with_states
from quire.models.sparse import SparseMLP
from quire.types import ForwardContext, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ATTENTION, _STATE = "full_attention", "linear_attention"


class AddedSparseMLP(SparseMLP):
    """Experts, whose sum is added to what all tokens have gone through."""

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.experts(x, self.gate(x, torch.float32), shared=shared)


class GraniteHybridLayer(DecoderLayer):
    def __init__(self, config: PretrainedConfig, family: type[DecoderForCausalLM], layer: int) -> None:
        nn.Module.__init__(self)
        biases = family.biases(config)
        self.has_state = config.layer_types[layer] == _STATE
        if self.has_state:
            self.mamba = Mamba2(config.hidden_size, granite_mamba(config))
        else:
            self.self_attn = family.attention_class(config, family.attention_spec(config, layer), biases)
        has_experts = bool(config.num_local_experts)
        self.mlp: nn.Module | None = family.mlp(config, biases, layer) if has_experts else None  # type: ignore[assignment]
        self.shared_mlp = SharedMLP(config)
        self.norms = tuple(family.norm(config, config.hidden_size) for _ in self.norm_names)
        for name, norm in zip(self.norm_names, self.norms, strict=True):
            self.add_module(name, norm)

    def forward(
        self, residual: torch.Tensor, x: torch.Tensor | None, rope: RotaryTable | None, ctx: ForwardContext, cache: Any
    ) -> torch.Tensor:
        before_mixer, before_mlp = self.norms
        x = before_mixer(residual, x)
        x = self.mamba(x, ctx, cache) if self.has_state else self.self_attn(x, rope, ctx, cache)
        x = before_mlp(residual, x)
        shared: torch.Tensor = self.shared_mlp(x)
        return shared if self.mlp is None else self.mlp(x, shared)


def granite_mamba(config: PretrainedConfig) -> MambaSpec:
    """What a layer's state is: the norm is of the gated result, over groups; both projections have a bias, or none."""
    return mamba_spec(config, out_bias=bool(config.mamba_proj_bias))


class GraniteMoeHybridForCausalLM(GraniteMoeForCausalLM):
    supported_fields: ClassVar = GraniteMoeForCausalLM.supported_fields | MAMBA_FIELDS | {"position_embedding_type"}
    layer_kinds: ClassVar = frozenset({_ATTENTION, _STATE})
    layer_class: ClassVar = GraniteHybridLayer
    fewest = 0

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        kinds = config.layer_types
        keys = KVSpec.of(self.attention_spec(config, layer) for layer, kind in enumerate(kinds) if kind == _ATTENTION)
        self.kv_spec = with_states(keys, granite_mamba(config), kinds.count(_STATE))

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        check_mamba(config)
        if config.position_embedding_type not in (None, "nope", "rope"):
            refuse(config, "position_embedding_type", "it must be 'rope', 'nope' or null")
        inner = config.shared_intermediate_size
        if type(inner) is not int or inner < 1:
            refuse(config, "shared_intermediate_size", "it must be a whole number from 1")

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        routing = Routing("softmax_of_chosen")
        return AddedSparseMLP(config, config.num_local_experts, config.intermediate_size, routing)

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        return super().rotaries(config) if config.position_embedding_type == "rope" else ()

    @classmethod
    def rotary_of(cls, config: PretrainedConfig, layer: int) -> int:
        return 0 if config.position_embedding_type == "rope" else -1

    def checkpoint_parts(self) -> Mapping[str, StoredPart]:
        return super().checkpoint_parts() if self.config.num_local_experts else {}

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[Any]) -> torch.Tensor:
        return self.model(embeddings, ctx, list(self._by_layer(kv)))

    def _by_layer(self, kv: Sequence[Any]) -> Iterator[Any]:
        keys, states = iter(kv[: self.kv_spec.num_layers]), iter(kv[self.kv_spec.num_layers :])
        for kind in self.config.layer_types:
            yield next(states) if kind == _STATE else next(keys)
