"""The shared decoder with mixtures of experts in the place of feed-forwards.

Checkpoints have each expert's layers by themselves, and so do the models here: `mlp.experts.3.gate_proj.weight`. What a
family calls otherwise is renamed when it is loaded. Transformers' newer versions hold all experts' in one parameter,
`mlp.experts.gate_up_proj`: adapters that were trained there are taken apart when they are read (`lora/fused.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.kernels.experts import Routing
from quire.layers import Experts, Linear, Router
from quire.models.base import refuse
from quire.models.decoder import Biases, DecoderForCausalLM, GatedMLP, hidden_act

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# What families call the number of their experts, how many each token goes through, and other numbers from 1.
_EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k")
_FROM_ONE = ("moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step", "moe_layer_interval")


class SparseMLP(nn.Module):
    """A router, and experts of which each token goes through some."""

    def __init__(self, config: PretrainedConfig, count: int, inner: int, routing: Routing) -> None:
        super().__init__()
        chosen, hidden = config.num_experts_per_tok, config.hidden_size
        self.gate = Router(hidden, count, bias=False)
        self.experts = Experts(count, chosen, hidden, inner, routing, hidden_act(config))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x, torch.float32))


class CorrectedMLP(SparseMLP):
    """Experts of the largest logistic functions of their logits, with a correction for the choice alone, which the
    router has (arXiv:2412.19437); and a feed-forward that all tokens go through, `shared` wide, beside them.

    Fields: n_group and topk_group, norm_topk_prob, routed_scaling_factor.
    """

    def __init__(self, config: PretrainedConfig, count: int, shared: int, biases: Biases) -> None:
        routing = Routing(
            "sigmoid", config.n_group, config.topk_group, 2, config.norm_topk_prob, 1e-20,
            scale=config.routed_scaling_factor,
        )  # fmt: skip
        super().__init__(config, count, config.moe_intermediate_size, routing)
        self.gate.register_buffer("e_score_correction_bias", torch.empty(count, dtype=torch.float32))
        self.shared_experts = GatedMLP(config, biases, shared) if shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = None if self.shared_experts is None else self.shared_experts(x)
        bias = self.gate._buffers["e_score_correction_bias"]
        return self.experts(x, self.gate(x, torch.float32), bias, shared)


class GatedSharedMLP(SparseMLP):
    """The same, with a feed-forward that all tokens go through, each as far as a logit of its own says."""

    def __init__(
        self, config: PretrainedConfig, count: int, inner: int, routing: Routing, shared: int, biases: Biases
    ) -> None:
        super().__init__(config, count, inner, routing)
        self.shared_expert = GatedMLP(config, biases, shared)
        self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.shared_expert_gate(x, torch.float32)
        return self.experts(x, self.gate(x, torch.float32), shared=self.shared_expert(x), shared_gate=gate)


class SparseDecoderForCausalLM(DecoderForCausalLM):
    """A family of such decoders. Its `mlp` says which layers have experts.

    old_names: (pattern, replacement) of parts of the modules' names, in the order in which they are replaced, where
    checkpoints and older versions of transformers call them otherwise. new_names: where the newer versions do.
    fewest: experts that a configuration must have.
    """

    old_names: ClassVar[Sequence[tuple[str, str]]] = ()
    new_names: ClassVar[Sequence[tuple[str, str]]] = ()
    fewest: ClassVar[int] = 1

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        experts = _number(config, _EXPERTS, cls.fewest)
        chosen = _number(config, _CHOSEN, 1 if experts is None or experts[1] else 0)
        if experts and experts[1] and chosen and chosen[1] > experts[1]:
            refuse(config, chosen[0], f"there are {experts[0]}={experts[1]}")
        for field in _FROM_ONE:
            _number(config, (field,), 1)

    def published_names(self, name: str) -> tuple[str, ...]:
        """The name of transformers' older versions, which is the checkpoint's, and that of the newer ones."""
        return _replaced(name, self.old_names), _replaced(name, self.new_names)


def check_mlp_layer_types(config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError unless mlp_layer_types says of each layer whether it has experts."""
    given = config.mlp_layer_types
    fits = isinstance(given, (list, tuple)) and len(given) == config.num_hidden_layers
    if not fits or any(one not in ("dense", "sparse") for one in given):
        refuse(config, "mlp_layer_types", "it must have one of dense, sparse for each layer")


def further_layers(config: PretrainedConfig) -> tuple[str, ...]:
    """Patterns for `checkpoint_ignored`: the layers behind the last, which guess further tokens
    (num_nextn_predict_layers)."""
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    return tuple(rf"model\.layers\.{config.num_hidden_layers + place}\..+" for place in range(count))


def _number(config: PretrainedConfig, names: Sequence[str], least: int) -> tuple[str, int] | None:
    """The name of these that config.json has, and its whole number; None: it has none of them."""
    aliases = getattr(config, "attribute_map", {})
    field = next((name for name in names if name not in aliases and hasattr(config, name)), None)
    if field is None:
        return None
    value = getattr(config, field)
    if type(value) is not int or value < least:
        refuse(config, field, f"it must be a whole number from {least}")
    return field, value


def _replaced(name: str, parts: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in parts:
        name = re.sub(pattern, replacement, name)
    return name
