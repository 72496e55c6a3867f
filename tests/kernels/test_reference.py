"""The torch twins: their bits do not depend on what torch and its BLAS make of a row's place, whatever that is."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from kernel_helpers import randn, same_bits
from torch.overrides import TorchFunctionMode

from quire.kernels import ACTIVATION_KINDS, reference
from quire.kernels.adapters import LoraSegments, LoraTable, LoraWeights, pack

F32 = torch.float32
SPANS = [(0, 1), (3, 8), (19, 24), (22, 23), (24, 60), (0, 59)]


class Capricious(TorchFunctionMode):
    """A torch whose sums and functions are off by what they may be, each time and in each place by something else."""

    NAMES = frozenset(
        {"__matmul__", "matmul", "bmm", "linear", "sum", "mean", "softmax", "layer_norm", "exp", "erfc", "rsqrt",
         "sqrt", "sigmoid", "tanh", "silu", "gelu", "expm1"}
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.spoilt = 0
        self._generator = torch.Generator().manual_seed(1)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in self.NAMES or not y.is_floating_point():
            return y
        self.spoilt += 1
        with torch._C.DisableTorchFunction():
            off = torch.randint(-2, 3, y.shape, generator=self._generator)
            return y * (1 + off * torch.finfo(y.dtype).eps)


def products(dtype: torch.dtype) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Two weights, one with a bias, and adapters of two ranks and a mixture on some rows."""
    weights = [randn(n, 77, dtype=dtype, seed=n) for n in (45, 2)]
    tables = [LoraTable(77, 45, dtype, slots=2), None]
    for slot, rank in enumerate((5, 33)):
        a, b = randn(rank, 77, dtype=dtype, seed=rank), pack(randn(45, rank, dtype=dtype, seed=rank + 1))
        tables[0].put(slot, LoraWeights(a, b, 0.7, randn(45, dtype=F32), randn(45, dtype=F32, seed=9)))
    owners = [(0, 20, 0, 1.0), (22, 23, 1, 1.0), (23, 53, 0, 0.5), (23, 53, 1, 0.5)]

    def run(x: torch.Tensor, first: int) -> torch.Tensor:
        end = first + len(x)
        own = [(max(s, first) - first, min(e, end) - first, k, w) for s, e, k, w in owners if s < end and first < e]
        return reference.linear(x, weights, [None, randn(2, dtype=dtype)], None, tables, LoraSegments.of(own, len(x)))

    return run


def by_row(dtype: torch.dtype) -> dict[str, Callable[[torch.Tensor, int], torch.Tensor]]:
    scale, shift = randn(77, dtype=dtype, seed=1), randn(77, dtype=dtype, seed=2)
    half = torch.tensor([0.5])
    kinds = {kind: (lambda x, first, kind=kind: reference.activation(x, kind)) for kind in ACTIVATION_KINDS}
    return {
        "linear": products(dtype),
        "rms_norm": lambda x, first: reference.rms_norm(x, scale, 1e-5),
        "layer_norm": lambda x, first: reference.layer_norm(x, scale, shift, 1e-5),
        "rms_norm_heads": lambda x, first: reference.rms_norm_heads(x.view(-1, 7, 11), scale.view(7, 11), 1e-5, 1.0),
        "xielu": lambda x, first: reference.xielu(x, scale[:1], shift[:1], half, -half / 1000),
        "clamped_swiglu": lambda x, first: reference.clamped_swiglu(x[:, 1:].contiguous(), 1.7, 2.0, True),
        "scale": lambda x, first: reference.scale(x, 3.0, 2.0),
        "gated": lambda x, first: reference.activation_and_mul(x[:, 1:].contiguous(), "silu"),
        **kinds,
    }


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "rms_norm",
        "layer_norm",
        "rms_norm_heads",
        "gated",
        "xielu",
        "clamped_swiglu",
        "scale",
        *ACTIVATION_KINDS,
    ],
)
def test_a_row_does_not_depend_on_its_place(dtype: torch.dtype, name: str) -> None:
    run, x = by_row(dtype)[name], randn(60, 77, dtype=dtype)
    honest = run(x, 0)
    with Capricious() as torch_s_mood:
        assert same_bits(run(x, 0), honest)
        for start, end in SPANS:
            assert same_bits(run(x[start:end], start), honest[start:end])
    assert torch_s_mood.spoilt or name in ("relu", "relu2", "relu6")


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("alibi", [False, True])
def test_a_token_does_not_depend_on_its_chunk(dtype: torch.dtype, window: int, alibi: bool) -> None:
    """Nor on what comes behind it, be it no number."""
    query, keys = randn(40, 6, 16, dtype=dtype), randn(6, 2, 8, 16, dtype=dtype, seed=1)
    values, table = randn(6, 2, 8, 16, dtype=dtype, seed=2), torch.tensor([[4, 1, 0, 5, 3]], dtype=torch.int32)
    slopes = randn(6, dtype=F32, seed=3) if alibi else None

    def run(start: int, end: int) -> torch.Tensor:
        starts, lengths = torch.tensor([0, end - start]), torch.tensor([end])
        return reference.paged_attention(query[start:end], keys, values, table, starts, lengths, 0.3, window, slopes)

    honest = run(0, 40)
    with Capricious():
        for start, end in [(0, 40), (0, 1), (5, 6), (17, 40), (39, 40), (9, 30)]:
            assert same_bits(run(start, end), honest[start:end])
    values[3, 1, 7] = torch.inf  # the last token's
    assert same_bits(run(0, 40)[:39], honest[:39])


def test_sums_and_functions_are_exact_but_for_one_rounding() -> None:
    """To float64 and then to float32, whatever is on the way; with ties, which no rough sum decides."""
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    for dtypes in [(F32, F32), (torch.bfloat16, torch.bfloat16), (F32, torch.float16)]:
        x, weight = (torch.randn(5, 50, generator=generator).to(dtype) for dtype in dtypes)
        weight *= torch.exp2(torch.randint(-9, 9, weight.shape, generator=generator)).to(weight.dtype)
        x[0, :4] = torch.tensor([1.0, 2.0**-24, 2.0**-30, 0.0])  # a tie but for the third
        weight[0, :4], weight[0, 4:], weight[1] = 1, 0, weight[0]
        weight[1, 2] = 0
        y = reference.linear(x, [weight], [None], F32)
        for row, column in [(0, 0), (0, 1), *((rng.randrange(5), rng.randrange(5)) for _ in range(20))]:
            terms = zip(x[row].tolist(), weight[column].tolist(), strict=True)
            exact = float(sum((Fraction(a) * Fraction(b) for a, b in terms), Fraction(0)))
            assert y[row, column] == torch.tensor(exact, dtype=torch.float64).float()


def test_a_value_is_the_same_in_every_place() -> None:
    values, before = torch.tensor([-9.5, -1.7, -0.3, 1e-4, 0.71, 2.9, 30.0]), torch.get_num_threads()
    try:
        for kind in ACTIVATION_KINDS:
            alone = torch.cat([reference.activation(value.view(1, 1), kind) for value in values]).flatten()
            for length, threads in [(2, 1), (7, 1), (17, 1), (33, 2), (101, 3), (40_001, 1), (40_001, 2), (70_003, 3)]:
                torch.set_num_threads(threads)
                which = torch.arange(length) % 7
                assert same_bits(reference.activation(values[which].unsqueeze(0), kind)[0], alone[which])
    finally:
        torch.set_num_threads(before)


def test_what_is_no_number_stays_in_its_row() -> None:
    weight = randn(3, 8, dtype=F32)
    x = randn(6, 8, dtype=F32)
    clean = reference.linear(x, [weight], [None])
    x[1, 2], x[3, 4], x[4] = torch.nan, torch.inf, 3e38
    y = reference.linear(x, [weight], [None])
    assert y[1].isnan().all() and y[3].isinf().all()
    assert same_bits(y[[0, 2, 5]], clean[[0, 2, 5]])
    assert reference.activation(torch.tensor([[torch.inf, torch.nan, -3e38, 3e38]]), "silu")[0, 1].isnan()
    assert reference.linear(x[:0], [weight], [None]).shape == (0, 3)
