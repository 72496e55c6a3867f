"""Mixtures of experts: a router's logits, the experts' layers, and each token's sum over its own (arXiv:1701.06538).

All of it is done by kernels, the sorting and counting too, so that a step with experts can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from quire import kernels
from quire.kernels.adapters import LoraTable
from quire.kernels.experts import ExpertWeights, Routing
from quire.kernels.quantized_experts import QuantizedExpertWeights
from quire.layers.activation import gated_activation
from quire.layers.adapters import LinearAdapters
from quire.layers.linear import Linear
from quire.layers.quantization.rows import weight_of
from quire.layers.shards import own_rows, shard_of
from quire.layers.weight_formats import FLOAT_ROWS

# The expert with the largest logit, which counts 1.
_WHOLE = Routing("softmax_of_chosen")


class ExpertLinear(Linear):
    """A layer of one expert. `Experts` computes it, together with those of the others; so it is never called."""

    packs = False

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        raise NotImplementedError("Experts multiplies by all experts' weights at once")


class Router(Linear):
    """The layer of a router's logits, one for each expert. In some families it is float32 in a model of any dtype."""


class Expert(nn.Module):
    """One expert's layers: down(act(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = ExpertLinear(hidden, inner, bias)
        self.up_proj = ExpertLinear(hidden, inner, bias)
        self.down_proj = ExpertLinear(inner, hidden, bias)


class Experts(nn.ModuleList):
    """Gated feed-forwards, of which each token goes through `chosen`. Its modules are called 0.gate_proj and so on.

    routing: how a token's are found and weighted. activation: a name of transformers', or what is made of gates and
    then ups, [R, 2 inner] -> [R, inner]. interleaved: adapters of transformers' gate_up_proj have gate, up, gate, up.
    scales_inputs: what an expert is given is multiplied by its share, and not what it makes of that (Llama 4); of one
    expert a token. Raises ValueError where so many cannot be chosen.
    """

    def __init__(
        self,
        count: int,
        chosen: int,
        hidden: int,
        inner: int,
        routing: Routing,
        activation: str | Callable[[torch.Tensor], torch.Tensor],
        bias: bool = False,
        interleaved: bool = False,
        scales_inputs: bool = False,
    ) -> None:
        super().__init__(Expert(hidden, inner, bias) for _ in range(count))
        routing.numbers(count, chosen)
        if scales_inputs and chosen != 1:
            raise ValueError(f"scales_inputs: of one expert a token, got {chosen}")
        self.chosen = chosen
        self.inner = inner
        self.routing = routing
        self.interleaved = interleaved
        self.scales_inputs = scales_inputs
        self.activate = gated_activation(activation) if isinstance(activation, str) else activation
        self.gate_up = GroupedLinear([(one.gate_proj, one.up_proj) for one in self])  # type: ignore[misc]
        self.down = GroupedLinear([(one.down_proj,) for one in self])  # type: ignore[misc]

    def forward(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        bias: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [T, hidden], contiguous; logits: [T, E] float32 -> [T, hidden].

        bias: [E] float32, for the choice alone. shared: [T, hidden], what all tokens go through, is added; shared_gate:
        [T, 1] float32, whose logistic function it is multiplied by.
        """
        tokens, device = len(x), x.device
        experts = torch.empty((tokens, self.chosen), dtype=torch.int32, device=device)
        weights = torch.empty((tokens, self.chosen), dtype=torch.float32, device=device)
        kernels.route(logits, experts, weights, self.routing, bias)
        if self.scales_inputs:
            x = kernels.multiply_rows(x, weights.view(-1))
            kernels.route(logits, experts, weights, _WHOLE)
        starts = torch.empty((len(self) + 1,), dtype=torch.int32, device=device)
        rows = torch.empty((tokens * self.chosen,), dtype=torch.int64, device=device)
        places = torch.empty((tokens, self.chosen), dtype=torch.int32, device=device)
        kernels.sort_by_expert(experts, starts, rows, places)
        inner = self.activate(self.gate_up(kernels.embedding(rows, x), starts, rows, tokens))
        return kernels.combine(self.down(inner, starts, rows, tokens), places, weights, shared, shared_gate)


class GroupedLinear:
    """The same layers of all experts as one product: each row with its own expert's weights.

    It is no module: the parameters stay where the checkpoint names them, and this only looks at them.
    """

    def __init__(self, linears: Sequence[Sequence[Linear]]) -> None:
        self.linears = linears
        self._ends = linears[0][0], linears[-1][-1]
        self._weights: ExpertWeights | QuantizedExpertWeights | None = None
        self._read_from: tuple[object, ...] = ()

    def __call__(self, x: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        """x: [R, in_features], sorted by expert; starts, rows: as `kernels.sort_by_expert` writes them, of so many
        tokens -> [R, sum of one expert's out_features], the layers' results side by side."""
        shard = shard_of(self._ends[0])
        if shard is None:
            return self._product(x, starts, rows, tokens)
        counts = [linear.out_features for linear in self.linears[0]]
        if any(own_rows(linear).out_features for linear in self.linears[0]):
            own = self._product(x, starts, rows, tokens)
        else:
            own = torch.empty((x.shape[0], 0), dtype=x.dtype, device=x.device)
        return shard.gather(own, tuple(counts))

    def _product(self, x: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        """By the rows of the weights that are this process's."""
        adapters = self._adapters()
        segments = None if adapters is None else adapters.context.for_rows(tokens, adapters.name)
        tables = () if adapters is None else self._tables()
        weights = self._own_weights()
        if isinstance(weights, QuantizedExpertWeights):
            return kernels.quantized_grouped_linear(x, starts, rows, weights, tables, segments)
        return kernels.grouped_linear(x, starts, rows, weights, tables, segments)

    def _own_weights(self) -> ExpertWeights | QuantizedExpertWeights:
        """Looked up once: there may be thousands. They do not move once they are loaded."""
        first, last = (one._parameters["weight"] for one in self._ends)
        assert first is not None and last is not None
        read_from = first.data_ptr(), last.data_ptr(), first.dtype, first.device
        if self._weights is None or read_from != self._read_from:
            parts = [self._parts(own) for own in self.linears]
            biases = [[part._parameters["bias"] for part in own] for own in parts]
            if any(part.format is not FLOAT_ROWS for own in parts for part in own):
                self._weights = QuantizedExpertWeights([[weight_of(part) for part in own] for own in parts], biases)
            else:
                self._weights = ExpertWeights([[part.weight for part in own] for own in parts], biases)
            self._read_from = read_from
        return self._weights

    @staticmethod
    def _parts(linears: Sequence[Linear]) -> Sequence[Any]:
        """Of one expert, what this process multiplies by."""
        if shard_of(linears[0]) is None:
            return linears
        return [own for own in map(own_rows, linears) if own.out_features]

    def _adapters(self) -> LinearAdapters | None:
        """Of some layer that adapters change, if there are any in the step."""
        for own in self.linears:
            for linear in own:
                if linear.adapters is not None:
                    return linear.adapters if linear.adapters.context.segments is not None else None
        return None

    def _tables(self) -> list[list[LoraTable | None]]:
        shard = shard_of(self._ends[0])
        return [
            [
                None if one.adapters is None else one.adapters.table
                for one in own
                if shard is None or own_rows(one).out_features
            ]
            for own in self.linears
        ]
