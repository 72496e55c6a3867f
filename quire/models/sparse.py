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
from quire.models.decoder import Biases, DecoderForCausalLM, GatedMLP, hidden_act

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SparseMLP(nn.Module):
    """A router, and experts of which each token goes through some."""

    def __init__(self, config: PretrainedConfig, count: int, inner: int, routing: Routing) -> None:
        super().__init__()
        chosen, hidden = config.num_experts_per_tok, config.hidden_size
        self.gate = Router(hidden, count, bias=False)
        self.experts = Experts(count, chosen, hidden, inner, routing, hidden_act(config))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x, torch.float32))


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
    """

    old_names: ClassVar[Sequence[tuple[str, str]]] = ()
    new_names: ClassVar[Sequence[tuple[str, str]]] = ()

    def published_names(self, name: str) -> tuple[str, ...]:
        """The name of transformers' older versions, which is the checkpoint's, and that of the newer ones."""
        return _replaced(name, self.old_names), _replaced(name, self.new_names)


def _replaced(name: str, parts: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in parts:
        name = re.sub(pattern, replacement, name)
    return name
