"""What the decoders before Llama share: a fused projection of query, key and value, and a plain feed-forward.

Their blocks read the residual stream once for attention and feed-forward ("parallel", as in GPT-J), or one after the
other. Parts are called differently in each family's files; the families say how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from quire import kernels
from quire.layers import HeadOrder, Linear, PagedAttention, RotaryTable, activation
from quire.types import AttentionSpec, ForwardContext, KVCache

Norm = Callable[..., torch.Tensor]


class FusedAttention(nn.Module):
    """Attention with one projection for query, key and value.

    names: of the two projections, in and out. order: of the heads in the first one, unless they lie as attention takes
    them.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden: int,
        names: tuple[str, str] = ("query_key_value", "dense"),
        biases: tuple[bool, bool] = (True, True),
        order: HeadOrder | None = None,
    ) -> None:
        super().__init__()
        self.names = names
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.add_module(names[0], Linear(hidden, width, bias=biases[0]))
        self.add_module(names[1], Linear(spec.num_heads * spec.head_dim, hidden, bias=biases[1]))
        self.order = order
        self.attend = PagedAttention.from_spec(spec)

    def forward(self, x: torch.Tensor, rope: RotaryTable | None, ctx: ForwardContext, cache: KVCache) -> torch.Tensor:
        """x: [T, C] -> [T, C]"""
        project, out = (self._modules[name] for name in self.names)
        assert project is not None and out is not None
        qkv = self.adjust(project(x))
        if self.order is not None:
            qkv = self.order(qkv)
        y: torch.Tensor = out(self.attend(qkv, ctx, cache, rope))
        return y

    def adjust(self, qkv: torch.Tensor) -> torch.Tensor:
        """What a family does to the projection, [T, all heads' dimensions]. Most do nothing."""
        return qkv


class PlainMLP(nn.Module):
    """second(act(first(x))); names: what the family calls the two."""

    def __init__(
        self, names: tuple[str, str], hidden: int, inner: int, activation_name: str, bias: bool = True
    ) -> None:
        super().__init__()
        self.names = names
        self.add_module(names[0], Linear(hidden, inner, bias=bias))
        self.add_module(names[1], Linear(inner, hidden, bias=bias))
        self.activate = activation(activation_name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self._modules[name] for name in self.names)
        assert first is not None and second is not None
        y: torch.Tensor = second(self.activate(first(x)))
        return y


def sequential(
    residual: torch.Tensor, x: torch.Tensor | None, norms: tuple[Norm, Norm], attend: Norm, feed_forward: Norm
) -> torch.Tensor:
    """A block in which the feed-forward reads what attention has added.

    residual: [T, C], to which this adds, in place, x [T, C]: what the block before left to add (None: nothing).
    Returns what is left to add, [T, C].
    """
    x = attend(norms[0](residual, x))
    return feed_forward(norms[1](residual, x))


def parallel(
    residual: torch.Tensor, x: torch.Tensor | None, norms: tuple[Norm, Norm | None], attend: Norm, feed_forward: Norm
) -> torch.Tensor:
    """A block in which both read the same: by a norm of its own each, or by one (the second is None). See
    `sequential`."""
    normed = norms[0](residual, x)
    # The second norm first: a product's memory is then free again for the next.
    other = normed if norms[1] is None else norms[1](residual)
    return kernels.add(feed_forward(other), attend(normed))


def run(
    layers: Iterable[nn.Module],
    residual: torch.Tensor,
    rope: RotaryTable | None,
    ctx: ForwardContext,
    kv: Sequence[KVCache],
) -> torch.Tensor | None:
    """All blocks, one after the other; returns what the last one left to add to the residual stream."""
    x = None
    for layer, cache in zip(layers, kv, strict=True):
        x = layer(residual, x, rope, ctx, cache)
    return x


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """One slope a head (arXiv:2108.12409); where the heads are no power of two, every other one of twice as many
    follows."""
    whole = 2 ** math.floor(math.log2(heads))

    def powers(count: int) -> list[float]:
        base = torch.tensor(2.0 ** -(2.0 ** -(math.log2(count) - 3)), dtype=torch.float32, device="cpu")
        return torch.pow(base, torch.arange(1, count + 1, device="cpu")).tolist()

    return (*powers(whole), *powers(2 * whole)[::2][: heads - whole])
