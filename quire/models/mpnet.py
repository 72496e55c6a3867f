"""MPNet (arXiv:2004.09297): BERT whose scores get a number by head and distance (arXiv:1910.10683), and without types.

Configuration fields that shape the arithmetic: those of BERT, and relative_attention_num_buckets. Whatever that is,
transformers takes 32 of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.layers import PagedAttention
from quire.models.base import refuse
from quire.models.bert import RobertaModel
from quire.models.encoder import EncoderEmbeddings, EncoderLayer, Names, Sizes
from quire.types import ForwardContext, KVCache

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PADDING = 1  # in transformers' class, whatever pad_token_id says
_BUCKETS, _FARTHEST = 32, 128  # half of the buckets for either side; from this distance on, all are in the last one


class MPNetLayer(EncoderLayer):
    def __init__(self, sizes: Sizes, names: Names) -> None:
        super().__init__(sizes, names)
        self.attend = PagedAttention.from_spec(replace(sizes.attention(), biases=True))

    def forward(
        self, x: torch.Tensor, ctx: ForwardContext, cache: KVCache, biases: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [T, C], which this overwrites -> [T, C]. biases: as of `PagedAttention.attend`."""
        return self.finish(x, self.attend(self.qkv(x), ctx, cache, biases=biases))


class Buckets(nn.Module):
    """A number for each bucket of distances and head. No `Embedding`: nothing is looked up by token, and no adapter
    changes it."""

    def __init__(self, heads: int, buckets: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, heads), requires_grad=False)
        with torch.device("cpu"):
            self._bucket_of = torch.tensor([bucket(one) for one in range(-_FARTHEST, _FARTHEST + 1)])

    def by_distance(self) -> torch.Tensor:
        """[heads, 2 * _FARTHEST + 1] float32."""
        return self.weight[self._bucket_of.to(self.weight.device)].float().T.contiguous()


class MPNetModel(RobertaModel):
    """MPNet: with whichever head its architecture has."""

    base = "mpnet"
    names: ClassVar[Names] = {
        "query": "attention.attn.q", "key": "attention.attn.k", "value": "attention.attn.v", "out": "attention.attn.o",
        "attention_norm": "attention.LayerNorm", "up": "intermediate.dense", "down": "output.dense",
        "norm": "output.LayerNorm",
    }  # fmt: skip
    supported_fields: ClassVar = frozenset({"relative_attention_num_buckets"})
    fixed_fields: ClassVar[Mapping[str, Any]] = RobertaModel.fixed_fields

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        buckets = config.relative_attention_num_buckets
        self.body.encoder.relative_attention_bias = Buckets(config.num_attention_heads, buckets)

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        buckets = config.relative_attention_num_buckets
        if type(buckets) is not int or buckets < _BUCKETS:
            refuse(config, "relative_attention_num_buckets", f"it must be {_BUCKETS} at least")

    @classmethod
    def positions(cls, config: PretrainedConfig) -> int:
        return int(config.max_position_embeddings) - _PADDING - 1

    def layer(self, config: PretrainedConfig, sizes: Sizes) -> nn.Module:
        return MPNetLayer(sizes, self.names)

    def embeddings(self, config: PretrainedConfig, sizes: Sizes) -> EncoderEmbeddings:
        self.padding = _PADDING
        return EncoderEmbeddings(
            config.vocab_size, config.max_position_embeddings, 0, sizes.hidden, sizes.eps, _PADDING + 1
        )

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        biases = self.body.encoder.relative_attention_bias.by_distance()
        x = self.embedded(embeddings, ctx)
        for layer, cache in zip(self.in_order(), kv, strict=True):
            x = layer(x, ctx, cache, biases)
        return x


def bucket(distance: int) -> int:
    """Which of 32 buckets a distance from a token to a key is in: near ones have one each."""
    half = _BUCKETS // 2
    exact, away = half // 2, abs(distance)
    if away >= exact:  # in float32, as transformers computes it
        share = torch.log(torch.tensor(away, dtype=torch.float32) / exact) / math.log(_FARTHEST / exact)
        away = min(half - 1, exact + int((share * (half - exact)).long()))
    return away + (half if distance > 0 else 0)
