"""EuroBERT (arXiv:2503.05500): Llama whose tokens all see one another.

Configuration fields that shape the arithmetic: Llama's (see `llama.py`), and classifier_pooling of the head: bos, the
first token's state; mean, the mean of all; late, the mean of the classes that tokens have by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from quire import kernels
from quire.layers import Linear
from quire.models.base import refuse
from quire.models.llama import LlamaForCausalLM
from quire.models.pooling.of_decoders import PooledDecoder
from quire.pooling_types import PoolingKind
from quire.types import ForwardContext, KVCache

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_KINDS: dict[str, PoolingKind] = {"bos": "cls", "mean": "mean", "late": "mean"}


class EuroBertModel(PooledDecoder, LlamaForCausalLM):
    """EuroBERT: with whichever head its architecture has."""

    kind: PoolingKind = "mean"
    supported_fields: ClassVar = LlamaForCausalLM.supported_fields
    fixed_fields: ClassVar = {**LlamaForCausalLM.fixed_fields, "is_causal": False}
    stored_names: ClassVar = ((r"^dense\.", "classifier_dense."),)
    _late = False

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.narrows = not self._late  # else each token's row goes on
        self.checkpoint_ignored = (*LlamaForCausalLM.checkpoint_ignored, r"lm_head\..+")
        if self.convert == "embed":
            self.checkpoint_ignored = (*self.checkpoint_ignored, r"(?:classifier_dense|classifier)\..+")

    @classmethod
    def sees_both_ways(cls, config: PretrainedConfig) -> bool:
        return True

    def _add_head(self) -> None:
        if self.convert == "embed":
            return
        if self.per_token:
            self.kind = "all"
        elif self.architecture.endswith("ForSequenceClassification"):
            pooling = self.config.classifier_pooling
            if pooling not in _KINDS:
                refuse(self.config, "classifier_pooling", f"it must be one of {', '.join(_KINDS)}")
            self.kind, self._late = _KINDS[pooling], pooling == "late"
            self.classifier_dense = Linear(self.width, self.width)
        else:
            raise self.no_head()
        self.classifier = Linear(self.width, self.num_labels)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        rows = super().forward(embeddings, ctx, kv)
        # The mean of the classes is the classes of the mean of what they are made of.
        return self._before_classes(rows) if self._late else rows

    def _before_classes(self, rows: torch.Tensor) -> torch.Tensor:
        return kernels.activation(self.classifier_dense(rows), "gelu")

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        if "classifier_dense" in self._modules and not self._late:
            rows = self._before_classes(rows)
        y: torch.Tensor = self.classifier(rows, torch.float32)
        return y
