"""Qwen3-VL-MoE (arXiv:2511.21631): Qwen3-VL with a text model of experts, whose files have all experts' in one tensor.

Configuration fields that shape the arithmetic, beyond Qwen3-VL's (see `qwen3_vl.py`): those of the experts in
text_config (see `qwen2_moe.py`). The chosen ones' shares are always divided by their sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.checkpoint.weights import StoredPart
from quire.layers import RotaryEmbedding
from quire.models.base import refuse
from quire.models.decoder import WINDOW_FIELDS
from quire.models.qwen2_moe import has_experts
from quire.models.qwen3_moe import Qwen3MoeForCausalLM
from quire.models.qwen3_vl import INTERLEAVED, Qwen3VLForConditionalGeneration, interleaved_rotary

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_STORED = "model.language_model.layers"


class Qwen3VLMoeText(Qwen3MoeForCausalLM):
    supported_fields: ClassVar = (Qwen3MoeForCausalLM.supported_fields - WINDOW_FIELDS) | {INTERLEAVED}

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if getattr(config, "norm_topk_prob", True) is not True:
            refuse(config, "norm_topk_prob", "the family divides shares by their sum")

    @classmethod
    def rotaries(cls, config: PretrainedConfig) -> Sequence[RotaryEmbedding]:
        return (interleaved_rotary(config),)

    @classmethod
    def renormalises(cls, config: PretrainedConfig) -> bool:
        return True


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    text_class: ClassVar = Qwen3VLMoeText
    # What is made of parts keeps its name.
    own_renames: ClassVar = (
        (r"(model\.language_model\.layers\.\d+\.mlp\.experts\.(?:gate_up|down)_proj)", r"\1"),
        *Qwen3VLForConditionalGeneration.own_renames,
    )

    def make_tower(self, vision: PretrainedConfig) -> nn.Module:
        from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

        return Qwen3VLMoeVisionModel._from_config(vision)

    def checkpoint_parts(self) -> Mapping[str, StoredPart]:
        """The files have gate_up_proj, of each expert gate and then up, and down_proj: as published [E, in, out], as
        transformers 5 saves them [E, out, in]."""
        config, parts = self.config.text_config, {}
        count, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        for layer in range(config.num_hidden_layers):
            if not has_experts(config, layer):
                continue
            stored, own = f"{_STORED}.{layer}.mlp.experts", f"language_model.model.layers.{layer}.mlp.experts"
            gate_up = {f"{stored}.gate_up_proj": torch.Size((count, 2 * inner, hidden))}
            down = {f"{stored}.down_proj": torch.Size((count, hidden, inner))}
            for e in range(count):
                for leaf, shapes, first, end in (
                    ("gate_proj", gate_up, 0, inner), ("up_proj", gate_up, inner, 2 * inner),
                    ("down_proj", down, 0, hidden),
                ):  # fmt: skip
                    rows = partial(_rows, e, first, end)
                    parts[f"{own}.{e}.{leaf}.weight"] = StoredPart(shapes, rows, either_way=True)
        return parts


def _rows(expert: int, first: int, end: int, stacked: torch.Tensor) -> torch.Tensor:
    return stacked[expert, first:end]
