"""BERT (arXiv:1810.04805), RoBERTa (arXiv:1907.11692), XLM-RoBERTa (arXiv:1911.02116), DistilBERT (arXiv:1910.01108),
ELECTRA (arXiv:2003.10555), and ColBERT (arXiv:2004.12832), which keeps a vector of each of BERT's tokens.

Configuration fields that shape the arithmetic: hidden_size, num_attention_heads, intermediate_size, num_hidden_layers,
hidden_act, layer_norm_eps, max_position_embeddings, type_vocab_size, vocab_size, pad_token_id (RoBERTa's positions
begin behind it); DistilBERT calls them dim, n_heads, hidden_dim, n_layers and activation. ELECTRA's embeddings may be
narrower (embedding_size).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire import kernels
from quire.layers import LayerNorm, Linear, activation
from quire.models.base import refuse
from quire.models.encoder import EncoderEmbeddings, EncoderModel, Names, Sizes, put
from quire.pooling_types import PoolingKind
from quire.types import ForwardContext

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HEADS = (
    r"(?:cls|lm_head|vocab_\w+|classifier|pre_classifier|qa_outputs|generator_\w+|discriminator_predictions"
    r"|predictions|sop_classifier)\..+"
)
_COLBERT_SIZE = 128  # of a token's vector, where config.json says nothing


class Classifier(nn.Module):
    """out_proj(act(dense(row)))."""

    def __init__(self, hidden: int, labels: int, activation: str = "tanh") -> None:
        super().__init__()
        self.kind = activation
        self.dense = Linear(hidden, hidden)
        self.out_proj = Linear(hidden, labels)

    def forward(self, rows: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """rows: [R, C] -> [R, labels] of `out_dtype`."""
        y: torch.Tensor = self.out_proj(kernels.activation(self.dense(rows), self.kind), out_dtype)
        return y


class WordHead:
    """What a masked model tells of the vocabulary: decoder(norm(act(dense(row)))).

    It is no module: the three belong to `owner`. names: what the family calls them below it.
    """

    def __init__(self, owner: nn.Module, names: Sequence[str], sizes: Sizes, words: int) -> None:
        parts = Linear(sizes.hidden, sizes.hidden), LayerNorm(sizes.hidden, sizes.eps), Linear(sizes.hidden, words)
        for name, part in zip(names, parts, strict=True):
            put(owner, name, part)
        self._parts = parts.__getitem__
        self.activate = activation(sizes.activation)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [R, C] -> [R, words] float32."""
        dense, norm, decoder = (self._parts(place) for place in range(3))
        y: torch.Tensor = decoder(norm(self.activate(dense(rows))), torch.float32)
        return y


class BertModel(EncoderModel):
    """BERT: with whichever head its architecture has."""

    base = "bert"
    # Of the masked model's head: its layers, its decoder last; and whose bias is the decoder's, in files.
    word_names: ClassVar[Sequence[str]] = (
        "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder",
    )  # fmt: skip
    word_bias: ClassVar[str] = "cls.predictions.bias"
    words: WordHead | None = None
    fixed_fields: ClassVar[Mapping[str, Any]] = {**EncoderModel.fixed_fields, "is_decoder": False}

    def ignored(self) -> Sequence[str]:
        ignored = [rf"(?:{self.base}\.)?embeddings\.position_ids"]
        if not hasattr(self.body, "pooler"):
            ignored.append(rf"(?:{self.base}\.)?pooler\..+")
        return [*ignored, _HEADS] if self.convert == "embed" else ignored

    def add_vocabulary(self) -> None:
        if self.architecture != f"{type(self).__name__.removesuffix('Model')}ForMaskedLM" or not self.word_names:
            super().add_vocabulary()
        self.words = WordHead(self, self.word_names, self.sizes(self.config), self.vocab_size)
        decoder = self.word_names[-1]
        self.tied_weights = {f"{decoder}.weight": f"{self.base}.embeddings.word_embeddings.weight"}
        if self.word_bias:
            owner, _, leaf = self.word_bias.rpartition(".")
            bias = nn.Parameter(torch.empty(self.vocab_size), requires_grad=False)
            self.get_submodule(owner).register_parameter(leaf, bias)
            self.tied_weights = {**self.tied_weights, f"{decoder}.bias": self.word_bias}
        kept = (one for one in self.checkpoint_ignored if one != _HEADS)
        self.checkpoint_ignored = [*kept, r"cls\.seq_relationship\..+"]

    @property
    def width(self) -> int:
        return super().width if self.words is None else self.vocab_size

    def pool(self, rows: torch.Tensor) -> torch.Tensor:
        return super().pool(rows) if self.words is None else self.words(rows)

    def add_text_head(self, sizes: Sizes) -> None:
        self.body.pooler = nn.Module()
        self.body.pooler.dense = Linear(sizes.hidden, sizes.hidden)
        self.classifier = Linear(sizes.hidden, self.num_labels)

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.per_token:
            rows = kernels.activation(self.body.pooler.dense(rows), "tanh")
        y: torch.Tensor = self.classifier(rows, torch.float32)
        return y


class RobertaModel(BertModel):
    """RoBERTa, XLM-RoBERTa and CamemBERT: BERT with another head, whose positions begin behind the padding's.

    Padding within a prompt is counted by no other token's position.
    """

    base = "roberta"
    word_names: ClassVar[Sequence[str]] = ()

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if getattr(config, "lora_adaptations", None):
            refuse(config, "lora_adaptations", "Jina Embeddings 3 is served in transformers' form, jina_embeddings_v3")

    @classmethod
    def positions(cls, config: PretrainedConfig) -> int:
        return int(config.max_position_embeddings) - _first(config)

    def embeddings(self, config: PretrainedConfig, sizes: Sizes) -> EncoderEmbeddings:
        made = super().embeddings(config, sizes)
        made.first = _first(config)
        self.padding = config.pad_token_id
        return made

    def add_text_head(self, sizes: Sizes) -> None:
        self.classifier = Classifier(sizes.hidden, self.num_labels)

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.classifier(rows, torch.float32)
        return y


class DistilBertModel(BertModel):
    """DistilBERT: BERT of half the layers, without types of tokens."""

    base = "distilbert"
    layers_at = "transformer.layer"
    names: ClassVar[Names] = {
        "query": "attention.q_lin", "key": "attention.k_lin", "value": "attention.v_lin", "out": "attention.out_lin",
        "attention_norm": "sa_layer_norm", "up": "ffn.lin1", "down": "ffn.lin2", "norm": "output_layer_norm",
    }  # fmt: skip
    supported_fields: ClassVar = frozenset({"activation"})
    word_names: ClassVar[Sequence[str]] = ("vocab_transform", "vocab_layer_norm", "vocab_projector")
    word_bias: ClassVar[str] = ""

    @classmethod
    def sizes(cls, config: PretrainedConfig) -> Sizes:
        return Sizes(config.dim, config.n_heads, config.hidden_dim, config.n_layers, config.activation, 1e-12)

    def embeddings(self, config: PretrainedConfig, sizes: Sizes) -> EncoderEmbeddings:
        return EncoderEmbeddings(config.vocab_size, config.max_position_embeddings, 0, sizes.hidden, sizes.eps)

    def add_text_head(self, sizes: Sizes) -> None:
        self.pre_classifier = Linear(sizes.hidden, sizes.hidden)
        self.classifier = Linear(sizes.hidden, self.num_labels)

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.per_token:
            rows = kernels.activation(self.pre_classifier(rows), "relu")
        y: torch.Tensor = self.classifier(rows, torch.float32)
        return y


class ElectraModel(RobertaModel):
    """ELECTRA: BERT with RoBERTa's kind of head, and embeddings that may be narrower."""

    base = "electra"

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        if config.embedding_size != config.hidden_size:
            self.body.embeddings_project = Linear(config.embedding_size, config.hidden_size)

    @classmethod
    def positions(cls, config: PretrainedConfig) -> int:
        return int(config.max_position_embeddings)

    def embeddings(self, config: PretrainedConfig, sizes: Sizes) -> EncoderEmbeddings:
        return BertModel.embeddings(self, config, sizes._replace(hidden=config.embedding_size))

    def add_text_head(self, sizes: Sizes) -> None:
        self.classifier = Classifier(sizes.hidden, self.num_labels, "gelu")

    def embedded(self, words: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x = super().embedded(words, ctx)
        return self.body.embeddings_project(x) if hasattr(self.body, "embeddings_project") else x


class ColBertModel(BertModel):
    """ColBERT: BERT and a projection of each token. The marks of queries and documents are the caller's to set."""

    kind: PoolingKind = "all"

    def add_head(self, config: PretrainedConfig, sizes: Sizes) -> None:
        if self.convert != "embed":
            raise self.no_head()
        self.linear = Linear(sizes.hidden, self.width, bias=False)

    @property
    def width(self) -> int:
        return int(getattr(self.config, "colbert_dim", None) or getattr(self.config, "dim", None) or _COLBERT_SIZE)

    def pool(self, rows: torch.Tensor) -> torch.Tensor:
        return super().pool(self.linear(rows))


def _first(config: PretrainedConfig) -> int:
    """The row of the table of positions that a prompt's first token takes."""
    padding = config.pad_token_id
    return (0 if padding is None else int(padding)) + 1
