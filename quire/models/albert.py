"""ALBERT (arXiv:1909.11942): BERT whose layers share their weights, and whose embeddings are narrower.

Configuration fields that shape the arithmetic: those of BERT, and embedding_size, num_hidden_groups (of layers with
weights of their own, which a prompt goes through num_hidden_layers times in all) and inner_group_num (layers of each).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire import kernels
from quire.layers import Linear
from quire.models.base import refuse
from quire.models.bert import BertModel
from quire.models.encoder import EncoderEmbeddings, Names, Sizes
from quire.types import ForwardContext

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MOST = 10_000  # layers


class AlbertModel(BertModel):
    """ALBERT: with whichever head its architecture has."""

    base = "albert"
    layers_at = "encoder.albert_layer_groups"
    word_names: ClassVar[Sequence[str]] = ()
    names: ClassVar[Names] = {
        "query": "attention.query", "key": "attention.key", "value": "attention.value", "out": "attention.dense",
        "attention_norm": "attention.LayerNorm", "up": "ffn", "down": "ffn_output", "norm": "full_layer_layer_norm",
    }  # fmt: skip
    fixed_fields: ClassVar[Mapping[str, Any]] = BertModel.fixed_fields

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.body.encoder.embedding_hidden_mapping_in = Linear(config.embedding_size, config.hidden_size)
        if not hasattr(self.body, "pooler"):
            self.adapters_ignored = (r"(?:albert\.)?pooler(?:\..+)?",)

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        for field in ("num_hidden_groups", "inner_group_num", "embedding_size"):
            value = getattr(config, field)
            if type(value) is not int or value < 1:
                refuse(config, field, "it must be a whole number above 0")
        groups, inner, layers = config.num_hidden_groups, config.inner_group_num, config.num_hidden_layers
        if groups > layers:
            refuse(config, "num_hidden_groups", "it must not be more than num_hidden_layers")
        if inner * layers > _MOST:
            refuse(config, "inner_group_num", f"with num_hidden_layers it makes more than {_MOST} layers")

    @classmethod
    def sizes(cls, config: PretrainedConfig) -> Sizes:
        sizes = super().sizes(config)
        return sizes._replace(layers=sizes.layers * config.inner_group_num)

    def embeddings(self, config: PretrainedConfig, sizes: Sizes) -> EncoderEmbeddings:
        return super().embeddings(config, sizes._replace(hidden=config.embedding_size))

    def blocks(self, config: PretrainedConfig, sizes: Sizes) -> nn.ModuleList:
        groups = nn.ModuleList()
        for _ in range(config.num_hidden_groups):
            own = nn.ModuleList(self.layer(config, sizes) for _ in range(config.inner_group_num))
            groups.append(nn.ModuleDict({"albert_layers": own}))
        return groups

    def in_order(self) -> Iterable[Any]:
        config: Any = self.config
        groups: Any = self.body.get_submodule(self.layers_at)
        times = config.num_hidden_layers / config.num_hidden_groups
        return tuple(
            layer
            for number in range(config.num_hidden_layers)
            for layer in groups[int(number / times)]["albert_layers"]
        )

    def add_text_head(self, sizes: Sizes) -> None:
        self.body.pooler = Linear(sizes.hidden, sizes.hidden)
        self.classifier = Linear(sizes.hidden, self.num_labels)

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.per_token:
            rows = kernels.activation(self.body.pooler(rows), "tanh")
        y: torch.Tensor = self.classifier(rows, torch.float32)
        return y

    def embedded(self, words: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x: torch.Tensor = self.body.encoder.embedding_hidden_mapping_in(super().embedded(words, ctx))
        return x
