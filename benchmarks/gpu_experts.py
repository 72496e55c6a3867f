"""The experts' case of `gpu.py`: the kernels of one layer, at the shapes of Mixtral 8x7B and Qwen3 30B A3B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from gpu_device import Bench

from quire import kernels
from quire.kernels.experts import ExpertWeights, Routing

_DTYPE = torch.bfloat16
TOKENS = (1, 8, 32, 128, 512, 4096)


@dataclass(frozen=True)
class Experts:
    """A layer: so many experts, of which a token goes through some; gates and ups of `inner` rows each, and a down."""

    name: str
    count: int
    chosen: int
    hidden: int
    inner: int


MIXTRAL = Experts("Mixtral", 8, 2, 4096, 14336)
QWEN3 = Experts("Qwen3 A3B", 128, 8, 2048, 768)


class Layer:
    """Random weights of all experts, and one token's way through them: choice, sort, products, sum."""

    def __init__(self, shape: Experts, device: torch.device) -> None:
        self.shape, self.device = shape, device
        sizes = [(shape.inner, shape.hidden)] * 2, [(shape.hidden, shape.inner)]
        self.gate_up, self.down = (
            ExpertWeights([[self._make(*size) for size in own] for _ in range(shape.count)]) for own in sizes
        )
        self.routing = Routing(renormalise=True)

    def _make(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=_DTYPE, device=self.device).normal_(std=0.02)

    def call(self, x: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, hidden]; logits: [T, E] float32. Returns [T, hidden], and each expert's first row."""
        tokens, shape = len(x), self.shape
        numbers = [torch.empty((tokens, shape.chosen), dtype=torch.int32, device=self.device) for _ in range(2)]
        weights = torch.empty((tokens, shape.chosen), dtype=torch.float32, device=self.device)
        kernels.route(logits, numbers[0], weights, self.routing)
        starts = torch.empty((shape.count + 1,), dtype=torch.int32, device=self.device)
        rows = torch.empty((tokens * shape.chosen,), dtype=torch.int64, device=self.device)
        kernels.sort_by_expert(numbers[0], starts, rows, numbers[1])
        made = kernels.grouped_linear(kernels.embedding(rows, x), starts, rows, self.gate_up)
        inner = kernels.activation_and_mul(made, "silu")
        return kernels.combine(kernels.grouped_linear(inner, starts, rows, self.down), numbers[1], weights), starts


def case_experts(bench: Bench, shapes: Sequence[Experts] = (MIXTRAL, QWEN3), tokens: Sequence[int] = TOKENS) -> None:
    """A layer of experts by number of tokens: of the roofline of the weights that the tokens go through."""
    if bench.quick:
        tokens = [count for count in tokens if count in (1, 32, 4096)]
    for shape in shapes:
        with bench.report.trying(shape.name):
            bench.check_time()
            layer = Layer(shape, bench.device)
            for count in tokens:
                with bench.report.trying(f"{shape.name}, T={count}"):
                    bench.check_time()
                    figures(bench, layer, count)
            del layer


def figures(bench: Bench, layer: Layer, tokens: int) -> None:
    """One number of tokens. Each call has tokens of its own, which go to experts of their own."""
    shape = layer.shape
    calls = max(2, min(shape.count, 16) // tokens)
    xs = [layer._make(tokens, shape.hidden) for _ in range(calls)]
    logits = [torch.randn(tokens, shape.count, device=bench.device) for _ in range(calls)]
    active = sum(int((layer.call(*one)[1].diff() > 0).sum()) for one in zip(xs, logits, strict=True)) / calls
    expert = 3 * shape.inner * shape.hidden
    size = active * expert * _DTYPE.itemsize
    flops = 2 * tokens * shape.chosen * expert
    spent = bench.clock({"": (lambda number: layer.call(xs[number], logits[number]), calls)})[""]
    least, took = bench.roofs.seconds(flops, size), median(spent)
    more = {"us": 1e6 * took, "experts": active, "GB/s": size / took / 1e9, "TFLOP/s": flops / took / 1e12}
    bench.report.show(f"{shape.name}, T={tokens}", [least / one for one in spent], "of roof", more=more)
