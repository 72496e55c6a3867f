"""HunYuan's mixtures of experts: the dense models' attention, experts in every layer, and a feed-forward beside them.

Configuration fields that shape the arithmetic, beyond the dense models' (see `hunyuan.py`): num_experts and moe_topk,
one number for all layers, or a list of one for each. A token's shares are the softmax over all experts, divided by the
chosen ones' sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.kernels.experts import Routing
from quire.layers import Experts, Router
from quire.models.base import refuse
from quire.models.decoder import Biases, GatedMLP, hidden_act
from quire.models.hunyuan import HunYuanDenseV1ForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Fields of published files, one number or one for each layer, which transformers' class does not read: what it makes
# of the others. Name -> what they must be, of a configuration.
_UNREAD: Mapping[str, Callable[[Any], Any]] = {
    "moe_intermediate_size": lambda config: config.intermediate_size,
    "num_shared_expert": lambda config: 1,
    "moe_layer_num_skipped": lambda config: 0,
    "moe_drop_tokens": lambda config: False,
    "use_cla": lambda config: False,
    "use_mla": lambda config: False,
    "use_mixed_mlp_moe": lambda config: True,
    "norm_topk_prob": lambda config: True,
    "add_classification_head": lambda config: False,
    "moe_random_routing_dropped_token": lambda config: False,
}


class HunYuanGate(nn.Module):
    """Only for the name that the router has in the files."""

    def __init__(self, hidden: int, count: int) -> None:
        super().__init__()
        self.wg = Router(hidden, count, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wg(x, torch.float32)


class HunYuanMoE(nn.Module):
    def __init__(self, config: PretrainedConfig, biases: Biases, layer: int) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        count, chosen = of_layer(config.num_experts, layer), of_layer(config.moe_topk, layer)
        self.gate = HunYuanGate(hidden, count)
        self.experts = Experts(count, chosen, hidden, inner, Routing(renormalise=True), hidden_act(config))
        self.shared_mlp = GatedMLP(config, biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x), shared=self.shared_mlp(x))


class HunYuanMoEV1ForCausalLM(HunYuanDenseV1ForCausalLM):
    supported_fields: ClassVar = HunYuanDenseV1ForCausalLM.supported_fields | {"norm_topk_prob"}

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        for field, wanted in _UNREAD.items():
            value = getattr(config, field, None)
            if any(one not in (None, wanted(config)) for one in (value if isinstance(value, list) else [value])):
                refuse(config, field, f"served where it is {wanted(config)!r}, as transformers computes it")
        for field in ("num_experts", "moe_topk"):
            value = getattr(config, field)
            if isinstance(value, Sequence) and len(value) < config.num_hidden_layers:
                refuse(config, field, "it must have a number for each layer")

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        return HunYuanMoE(config, biases, layer)


def of_layer(value: Any, layer: int) -> int:
    number: int = value if isinstance(value, int) else value[layer]
    return number
