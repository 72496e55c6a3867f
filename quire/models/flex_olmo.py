"""FlexOlmo (arXiv:2507.07024): OLMo 2's blocks, with experts in every layer.

Configuration fields that shape the arithmetic, beyond OLMo 2's (see `olmo2.py`): num_experts, num_experts_per_tok,
norm_topk_prob.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from quire.kernels.experts import Routing
from quire.models.decoder import Biases
from quire.models.olmo2 import Olmo2ForCausalLM
from quire.models.sparse import SparseDecoderForCausalLM, SparseMLP

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class FlexOlmoForCausalLM(Olmo2ForCausalLM, SparseDecoderForCausalLM):
    supported_fields: ClassVar = Olmo2ForCausalLM.supported_fields | {"norm_topk_prob"}

    @classmethod
    def mlp(cls, config: PretrainedConfig, biases: Biases, layer: int) -> nn.Module:
        routing = Routing(renormalise=config.norm_topk_prob)
        return SparseMLP(config, config.num_experts, config.intermediate_size, routing)
