"""What encoders share: blocks in which every token sees every other one, and a norm behind each sum.

As in BERT (arXiv:1810.04805). A family says what its parts are called, and makes its own embeddings and heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers import Embedding, LayerNorm, Linear, MergedLinear, PagedAttention, activation
from quire.layers.rows import gathered, take
from quire.models.pooling.base import PoolingModel
from quire.types import MOST_RECORDED, AttentionSpec, ForwardContext, KVCache, KVSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Sizes(NamedTuple):
    """What config.json says, by whatever names. eps: of the norms. head: numbers of one; 0: all heads' make hidden."""

    hidden: int
    heads: int
    inner: int
    layers: int
    activation: str
    eps: float
    head: int = 0

    def attention(self) -> AttentionSpec:
        """Of every layer. Raises UnsupportedModelError for heads of no whole size."""
        if not self.head and self.hidden % self.heads:
            raise UnsupportedModelError(
                f"config.json: hidden size {self.hidden} is not a multiple of the {self.heads} attention heads."
            )
        return AttentionSpec(self.heads, self.heads, self.head or self.hidden // self.heads)


# What a block's parts are called: paths of modules below the block.
Names = Mapping[str, str]
BERT_NAMES: Names = {
    "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
    "out": "attention.output.dense", "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense", "down": "output.dense", "norm": "output.LayerNorm",
}  # fmt: skip


class EncoderLayer(nn.Module):
    """x = norm(x + attention(x)); x = norm(x + feed_forward(x))."""

    def __init__(self, sizes: Sizes, names: Names) -> None:
        super().__init__()
        hidden, inner = sizes.hidden, sizes.inner
        parts: dict[str, nn.Module] = {
            **{name: Linear(hidden, hidden) for name in ("query", "key", "value", "out")},
            "up": Linear(hidden, inner),
            "down": Linear(inner, hidden),
            **{name: LayerNorm(hidden, sizes.eps) for name in ("attention_norm", "norm")},
        }
        for part, name in names.items():
            put(self, name, parts[part])
        self._parts = parts.__getitem__
        query, key, value = (parts[name] for name in ("query", "key", "value"))
        assert isinstance(query, Linear) and isinstance(key, Linear) and isinstance(value, Linear)
        self.qkv = MergedLinear(query, key, value)
        self.attend = PagedAttention.from_spec(sizes.attention())
        self.activate = activation(sizes.activation)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        """x: [T, C], which this overwrites -> [T, C]."""
        return self.finish(x, self.attend(self.qkv(x), ctx, cache))

    def forward_rows(self, x: torch.Tensor, ctx: ForwardContext, cache: KVCache, rows: torch.Tensor) -> torch.Tensor:
        """The rows [R] int64 of what `forward` returns: [R, C]."""
        x, attended = take(rows, x, self.attend(self.qkv(x), ctx, cache))
        with gathered(rows):
            return self.finish(x, attended)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """x: [T, C], which this overwrites; attended: [T, C], of its heads -> [T, C]."""
        part = self._parts
        x = part("attention_norm")(x, part("out")(attended))
        y: torch.Tensor = part("norm")(x, part("down")(self.activate(part("up")(x))))
        return y


def put(module: nn.Module, path: str, part: nn.Module) -> None:
    """Have a part at this path below a module, in plain modules where there are none."""
    *before, leaf = path.split(".")
    for name in before:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    module.add_module(leaf, part)


class EncoderEmbeddings(nn.Module):
    """Words and, where a family has them, positions and types of tokens, and a norm of their sum.

    positions, types: how many; 0: there are none. first: the row of the table of positions that a prompt's first token
    takes.
    """

    def __init__(self, vocabulary: int, positions: int, types: int, hidden: int, eps: float, first: int = 0) -> None:
        super().__init__()
        self.word_embeddings = Embedding(vocabulary, hidden)
        if positions:
            self.position_embeddings = Embedding(positions, hidden)
        if types:
            self.token_type_embeddings = Embedding(types, hidden)
        self.LayerNorm = LayerNorm(hidden, eps)
        self.positions, self.types, self.first = positions, types, first
        self._first_type: dict[torch.device, torch.Tensor] = {}

    def forward(self, words: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """words: [T, C], of `word_embeddings` -> [T, C]."""
        if self.types:
            kinds = self._of_first_type(ctx.positions) if ctx.token_types is None else ctx.token_types
            words = self.token_type_embeddings(kinds, words)
        if self.positions and ctx.position_rows is not None:
            words = self.position_embeddings(ctx.position_rows, words)
        elif self.positions:
            words = self.position_embeddings(ctx.positions, words, self.first)
        y: torch.Tensor = self.LayerNorm(words)
        return y

    def _of_first_type(self, tokens: torch.Tensor) -> torch.Tensor:
        """Zeros, as many as there are tokens. Recorded steps know them by their address: they stay."""
        if len(tokens) > MOST_RECORDED:
            return torch.zeros_like(tokens)
        zeros = self._first_type.get(tokens.device)
        if zeros is None:
            zeros = self._first_type[tokens.device] = tokens.new_zeros(MOST_RECORDED)
        return zeros[: len(tokens)]


class EncoderModel(PoolingModel):
    """A family of encoders. base: what the part without a head is called."""

    base: ClassVar[str]
    bidirectional = True
    fixed_fields: ClassVar[Mapping[str, Any]] = {"is_causal": False}  # transformers masks later tokens where it is true
    names: ClassVar[Names] = BERT_NAMES
    layers_at: ClassVar[str] = "encoder.layer"
    classifier: nn.Module

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        sizes = self.sizes(config)
        body = nn.Module()
        body.add_module("embeddings", self.embeddings(config, sizes))
        put(body, self.layers_at, self.blocks(config, sizes))
        self.add_module(self.base, body)
        self.kv_spec = KVSpec.of(sizes.attention() for _ in range(sizes.layers))
        self.max_model_len = self.positions(config)
        self.add_head(config, sizes)
        self.checkpoint_ignored = self.ignored()
        own = type(self).forward is EncoderModel.forward
        self.narrows = own and all(type(one).forward is EncoderLayer.forward for one in self.in_order())
        if not hasattr(body, "pooler"):  # which nothing is made of here, whatever adapters do to it
            self.adapters_ignored = (rf"(?:{self.base}\.)?pooler\.[^.]+(?:\..+)?",)

    def blocks(self, config: PretrainedConfig, sizes: Sizes) -> nn.ModuleList:
        """All of them, at `layers_at`."""
        return nn.ModuleList(self.layer(config, sizes) for _ in range(sizes.layers))

    def in_order(self) -> Iterable[Any]:
        """The blocks as a prompt goes through them, `Sizes.layers` of them."""
        blocks: Any = self.body.get_submodule(self.layers_at)
        return tuple(blocks)

    def layer(self, config: PretrainedConfig, sizes: Sizes) -> nn.Module:
        """One block."""
        return EncoderLayer(sizes, self.names)

    def ignored(self) -> Sequence[str]:
        """Patterns of names of tensors that are not asked for; see `CausalLM.checkpoint_ignored`."""
        return ()

    @classmethod
    def sizes(cls, config: PretrainedConfig) -> Sizes:
        """By BERT's names."""
        return Sizes(
            config.hidden_size,
            config.num_attention_heads,
            config.intermediate_size,
            config.num_hidden_layers,
            config.hidden_act,
            config.layer_norm_eps,
        )

    @classmethod
    def positions(cls, config: PretrainedConfig) -> int:
        """How many tokens a prompt can have."""
        return int(config.max_position_embeddings)

    def embeddings(self, config: PretrainedConfig, sizes: Sizes) -> EncoderEmbeddings:
        """By BERT's names."""
        self.token_types = config.type_vocab_size > 1
        return EncoderEmbeddings(
            config.vocab_size, config.max_position_embeddings, config.type_vocab_size, sizes.hidden, sizes.eps
        )

    def add_head(self, config: PretrainedConfig, sizes: Sizes) -> None:
        """Build what gives classes, for an architecture that has some. Raises UnsupportedModelError."""
        if self.convert == "embed":
            return
        if self.per_token:
            self.kind = "all"
            self.classifier = Linear(sizes.hidden, self.num_labels)
        elif self.architecture.endswith("ForSequenceClassification"):
            self.add_text_head(sizes)
        else:
            raise self.no_head()

    def add_text_head(self, sizes: Sizes) -> None:
        """Build what gives the classes of a text."""
        raise NotImplementedError

    @property
    def body(self) -> Any:
        """All but the head."""
        return self._modules[self.base]

    @property
    def vocab_size(self) -> int:
        return int(self.body.embeddings.word_embeddings.num_embeddings)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        words: torch.Tensor = self.body.embeddings.word_embeddings(input_ids)
        return words

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        x = self.embedded(embeddings, ctx)
        *layers, last = zip(self.in_order(), kv, strict=True)
        for layer, cache in layers:
            x = layer(x, ctx, cache)
        block, cache = last
        return block(x, ctx, cache) if ctx.wanted is None else block.forward_rows(x, ctx, cache, ctx.wanted)

    def embedded(self, words: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """What the first block reads: words [T, E] -> [T, C]."""
        x: torch.Tensor = self.body.embeddings(words, ctx)
        return x
