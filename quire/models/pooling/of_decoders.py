"""A generator's class without its projection to the vocabulary: any decoder of the registry as an embedder or a
classifier.

Heads are called as transformers calls them: `score` of *ForSequenceClassification and *ForTokenClassification; Qwen
2.5's reward models have two layers there, InternLM 2's `v_head`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quire import kernels
from quire.checkpoint.weights import StoredPart
from quire.errors import UnsupportedModelError
from quire.layers import Embedding, Linear, PagedAttention
from quire.models.base import CausalLM, refuse
from quire.models.decoder import DecoderForCausalLM
from quire.models.pooling.base import PoolingModel, specialized
from quire.models.pooling.from_tokens import token_head, token_ids
from quire.models.vision.base import VisionLanguageModel
from quire.pooling_types import Convert, PoolingKind
from quire.registry.pooling import PoolingRow

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.checkpoint.files import Checkpoint

_SEES_BOTH_WAYS = frozenset({"use_bidirectional_attention", "is_causal"})
_HEADS = r"(?:score|classifier|v_head|summary|lm_head)\..+"  # what a checkpoint may have beside the decoder
_OF_TEXTS = "ForSequenceClassification"
# Qwen2.5-Math-PRM's <extra_0>, which stands behind each step of reasoning (arXiv:2501.07301).
_STEP_TOKEN = 151651


class TwoLayers(nn.Module):
    """score.0, ReLU, score.2."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.add_module("0", Linear(width, width))
        self.add_module("2", Linear(width, labels))
        self.relu = nn.ReLU()

    def forward(self, rows: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        first, second = self._modules["0"], self._modules["2"]
        assert first is not None and second is not None
        y: torch.Tensor = second(self.relu(first(rows)), out_dtype)
        return y


class PooledDecoder(PoolingModel):
    """Stands before a generator's class, whose layers it keeps."""

    kind: PoolingKind = "last"
    score: nn.Module

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self._vocabulary = super(PoolingModel, self).vocab_size
        self._answers = None if self.convert == "embed" else token_head(config)
        self._answer_ids: list[int] = []
        if not isinstance(self, VisionLanguageModel):
            self._take_projection_off()
        self.bidirectional = self.sees_both_ways(config)
        if self.bidirectional:
            self._see_both_ways()
        self._add_head()

    @classmethod
    def sees_both_ways(cls, config: PretrainedConfig) -> bool:
        """Whether tokens see those behind them, too."""
        return bool(
            getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False
        )

    @property
    def vocab_size(self) -> int:
        return self._vocabulary

    def _take_projection_off(self) -> None:
        projection = super(PoolingModel, self).output_projection
        name = next(name for name, module in self.named_modules() if module is projection)
        path, _, leaf = name.rpartition(".")
        if self._answers is not None:
            self._check_answers(projection)
        self._projection, self._table = f"{name}.weight", self.tied_weights.get(f"{name}.weight")
        delattr(self.get_submodule(path), leaf)
        self.tied_weights = {}

    def _check_answers(self, projection: nn.Module) -> None:
        """Tokens' scores must be products of hidden states, times what `multiply` says, and nothing else."""
        own = super(PoolingModel, type(self)).logits
        known = own is CausalLM.logits or own is DecoderForCausalLM.logits
        if not known or getattr(projection, "bias", None) is not None:
            raise UnsupportedModelError(
                f"classifier_from_token: {type(self).__name__} does more to tokens' scores than to multiply."
            )

    def _see_both_ways(self) -> None:
        """Layers with a window see as far behind a token as before it; all keys are kept, as a prompt is one step.

        With is_causal=false transformers counts the window without the token itself, and otherwise with it.
        """
        if self.kv_spec.state is not None or self.kv_spec.latent:
            refuse(self.config, "is_causal", "layers with states, or latents, see what is before them alone")
        for module in self.modules():
            attend = getattr(module, "attend", None)
            if isinstance(attend, PagedAttention):
                if attend.spec.chunk:
                    refuse(self.config, "is_causal", "chunks of attention are seen from their beginning alone")
                window = attend.spec.window
                if window and getattr(self.config, "is_causal", True) is False:
                    window += 1
                    attend.spec = replace(attend.spec, window=window)
                attend.look_ahead = window - 1 if window else None
        self.kv_spec = replace(self.kv_spec, windows=())

    def _add_head(self) -> None:
        labels, width = self.num_labels, self.width
        if self.convert == "embed":
            return
        if self._answers is not None:
            if isinstance(self, VisionLanguageModel):
                raise UnsupportedModelError("classifier_from_token: a model that takes images is not served so.")
            self.score = Linear(width, len(self._answers.tokens), bias=False)
        elif self.architecture in ("Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"):
            self.score = TwoLayers(width, labels)
            if self.architecture == "Qwen2ForProcessRewardModel":
                self.kind = self.token_kind = "step"
                self.step_token = _STEP_TOKEN
        elif self.architecture == "InternLM2ForRewardModel":
            self.v_head = Linear(width, labels, bias=False)
        elif self.per_token:
            self.kind = "all"
            self.score = Linear(width, labels)
        elif self.architecture.endswith("ForSequenceClassification"):
            self.score = Linear(width, labels, bias=False)
        else:
            raise self.no_head()

    def see_files(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        if self._answers is not None:
            self._answer_ids = token_ids(self._answers.tokens, checkpoint.directory, self.vocab_size)
        return super().see_files(checkpoint)

    def checkpoint_parts(self) -> Mapping[str, StoredPart]:
        parts = super().checkpoint_parts()
        if self._answers is None:
            return parts
        shape, ids = (self.vocab_size, self.width), torch.tensor(self._answer_ids)
        made = StoredPart({self._projection: torch.Size(shape)}, lambda table: table[ids])
        if self._takes_table:  # whose rows `loaded` takes
            made = StoredPart({}, partial(torch.zeros, len(ids), self.width))
        return {**parts, "score.weight": made}

    @property
    def _takes_table(self) -> bool:
        config: Any = self.config
        return self._table is not None and bool(config.tie_word_embeddings)

    def loaded(self) -> None:
        super().loaded()
        if self._answers is not None and self._takes_table:
            assert self._table is not None
            table, weight = self.get_submodule(self._table.removesuffix(".weight")), self.score.weight
            assert isinstance(table, Embedding) and isinstance(weight, torch.Tensor)
            own = self.own_rows("score.weight")
            ids = torch.tensor(self._answer_ids, dtype=torch.int64, device=weight.device)[own]
            weight.data[own] = table.look_up(ids)

    def keeps_floats(self, name: str) -> bool:
        return (self._answers is not None and name == "score") or super().keeps_floats(name)

    @property
    def labels(self) -> tuple[str, ...]:
        return super().labels if self._answers is None else self._answers.labels

    @property
    def trailing_padding(self) -> int | None:
        """pad_token_id, where classes are a text's: transformers takes the row of the last token that is another."""
        if self.bidirectional or self._answers is not None or not self.architecture.endswith(_OF_TEXTS):
            return None
        config: Any = self.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        padding = getattr(text, "pad_token_id", None)
        return padding if type(padding) is int else None

    @property
    def num_labels(self) -> int:
        if self._answers is not None:
            return len(self._answers.labels)
        if self.architecture in ("Qwen2ForRewardModel", "InternLM2ForRewardModel"):
            return 1
        return super().num_labels

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        layer: Any = self.v_head if self.architecture == "InternLM2ForRewardModel" else self.score
        y: torch.Tensor = layer(rows, torch.float32)
        return y if self._answers is None else self._answered(y)

    def _answered(self, y: torch.Tensor) -> torch.Tensor:
        """What is told of the tokens' products [R, tokens]."""
        assert self._answers is not None
        if isinstance(self, DecoderForCausalLM) and (self.multiply.logits != 1.0 or self.multiply.softcap):
            y = kernels.scale(y, self.multiply.logits, self.multiply.softcap)
        return y[:, 1:] - y[:, :1] if self._answers.difference else y


def pooled_of(base: type[CausalLM], found: PoolingRow, architecture: str) -> type[PoolingModel]:
    """The class that makes vectors or classes, of a row's. architecture: config.json's."""
    if issubclass(base, PoolingModel):
        return specialized(base, found.convert, architecture)
    return pooled_class(base, found.convert, architecture)


def pooled_class(base: type[CausalLM], convert: Convert, architecture: str) -> type[PoolingModel]:
    """A generator's class that makes vectors or classes. architecture: config.json's."""
    ignored: Sequence[str] = (*base.checkpoint_ignored, _HEADS) if convert == "embed" else base.checkpoint_ignored
    if convert != "embed":
        ignored = (*ignored, r"lm_head\..+")
    fields: dict[str, Any] = {
        "convert": convert,
        "architecture": architecture,
        "checkpoint_ignored": ignored,
        "supported_fields": base.supported_fields | _SEES_BOTH_WAYS,
        "__module__": base.__module__,
    }
    if architecture.endswith("ForTokenClassification"):  # some families call it so
        fields["checkpoint_renames"] = ((r"classifier\.(.+)", r"score.\1"), *base.checkpoint_renames)
    return type(f"{base.__name__}Pooled", (PooledDecoder, base), fields)
