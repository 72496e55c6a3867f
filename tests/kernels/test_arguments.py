"""A wrong argument is refused before its address is used, by an error that names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_helpers import randn

from quire.kernels import QuantizedWeight, RowKind, RowLayout
from quire.kernels.experts import ExpertWeights, Routing
from quire.kernels.quantized_experts import QuantizedExpertWeights
from quire.kernels.table import TABLE
from tests.kernels.back_ends import CPU

F32 = torch.float32
# The best of the CPU's instruction sets: the checks are the same for all. A real GPU's are those of the emulation.
CHECKED = [*CPU[:1], "emulated"]


def state_arguments(rows: torch.Tensor, starts: torch.Tensor) -> dict[str, dict[str, Any]]:
    """The calls of the kernels of layers with states."""
    past = {
        "block_table": torch.arange(4, dtype=torch.int32).view(2, 2),
        "query_start": starts,
        "context_len": torch.tensor([2, 3], dtype=torch.int32),
        "block_size": 4,
    }
    return {
        "causal_conv1d": {"x": rows, "weight": randn(32, 4, dtype=F32), "bias": randn(32, dtype=F32),
                          "scales": randn(32, dtype=F32), "tails": torch.zeros(4, 2, 3, 32),
                          "tail_ends": torch.full((4, 2), -1), **past},
        "selective_scan": {"x": rows, "dt": randn(5, 2, dtype=F32), "a_log": randn(2, dtype=F32),
                           "dt_bias": randn(2, dtype=F32), "d": randn(2, dtype=F32),
                           "states": torch.zeros(4, 2, 2, 4, 12), "state_ends": torch.full((4, 2), -1), **past,
                           "groups": 1, "dt_scale": 1.0, "dt_min": 0.0, "dt_max": 9.0},
        "gated_norm": {"x": rows, "gate": rows.clone(), "weight": randn(32, dtype=F32), "groups": 2, "eps": 1e-5},
    }  # fmt: skip


def cpu_arguments(rows: torch.Tensor) -> dict[str, dict[str, Any]]:
    """The calls of kernels that a CPU alone has: of quantized weights, and one of logits."""
    weight = QuantizedWeight(torch.zeros(7, 34, dtype=torch.uint8), RowLayout(RowKind.Q8_0, 32))
    experts = QuantizedExpertWeights([[weight], [weight]], [[None], [randn(7, dtype=F32)]])
    return {
        "likeliest": {"logits": randn(5, 40, dtype=F32)},
        "sum_rows": {"x": rows, "query_start": torch.tensor([0, 2, 5], dtype=torch.int32),
                     "sums": torch.zeros(2, 32, dtype=torch.float64)},
        "quantized_linear": {"x": rows, "weights": [weight], "biases": [randn(7, dtype=F32)]},
        "quantized_embedding": {"ids": torch.arange(5), "weight": weight, "dtype": F32, "added": rows},
        "quantized_grouped_linear": {"x": rows, "starts": torch.tensor([0, 2, 5], dtype=torch.int32),
                                     "tokens": torch.arange(5), "weights": experts},
    }  # fmt: skip


def valid_arguments(back_end: str = "emulated") -> dict[str, dict[str, Any]]:
    """For each kernel that a back end has, a call that is accepted."""
    pool = {"keys": randn(6, 2, 4, 16, dtype=F32), "values": randn(6, 2, 4, 16, dtype=F32)}
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    starts, lengths = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([9, 3], dtype=torch.int32)
    rows = randn(5, 32, dtype=F32)
    heads = {"query": randn(5, 4, 16, dtype=F32), "key": randn(5, 2, 16, dtype=F32)}
    caches = [torch.zeros(6, 32, dtype=torch.uint8) for _ in range(2)]
    blocks = {"caches": torch.tensor([cache.data_ptr() for cache in caches]), "num_blocks": 6, "block_bytes": 32}
    packed = torch.zeros(3, 2, 32, dtype=torch.uint8)
    KEPT.extend(caches)
    only_there: dict[str, dict[str, Any]] = {
        "copy_blocks": {**blocks, "sources": torch.arange(3), "targets": torch.arange(3, 6)},
        "gather_blocks": {**blocks, "sources": torch.arange(3), "packed": packed},
        "scatter_blocks": {**blocks, "targets": torch.arange(3), "packed": packed},
        "sample": {"logits": randn(2, 50, dtype=F32), "draws": torch.zeros(64, dtype=torch.uint8)},
    }
    experts: dict[str, dict[str, Any]] = {
        "route": {"logits": randn(5, 4, dtype=F32), "experts": torch.zeros(5, 2, dtype=torch.int32),
                  "weights": torch.zeros(5, 2), "routing": Routing(), "bias": randn(4, dtype=F32)},
        "sort_by_expert": {"experts": torch.arange(5, dtype=torch.int32)[:, None] % 4,
                           "starts": torch.zeros(5, dtype=torch.int32), "tokens": torch.zeros(5, dtype=torch.int64),
                           "places": torch.zeros(5, 1, dtype=torch.int32)},
        "grouped_linear": {"x": rows, "starts": torch.tensor([0, 2, 5], dtype=torch.int32), "tokens": torch.arange(5),
                           "weights": ExpertWeights([[randn(3, 32, dtype=F32)] for _ in range(2)])},
        "combine": {"x": rows, "places": torch.tensor([[4, 0], [1, 1]], dtype=torch.int32), "weights": torch.ones(2, 2),
                    "shared": randn(2, 32, dtype=F32), "shared_gate": torch.ones(2, 1)},
    }  # fmt: skip
    gpu = back_end == "emulated"
    options = {"softcap": 3.0, "visible_end": torch.tensor([8, 9, 2, 2, 3], dtype=torch.int32),
               **dict.fromkeys(["slopes", "sinks", "head_scales"], randn(4, dtype=F32)),
               **dict.fromkeys([] if gpu else ["biases"], randn(4, 7, dtype=F32))}  # fmt: skip
    return {
        "linear": {"x": rows, "weights": [randn(3, 32, dtype=F32)], "biases": [randn(3, dtype=F32)]},
        "paged_attention": {"query": heads["query"], **pool, "block_table": table, "query_start": starts,
                            "context_len": lengths, "scale": 0.25, "window": 0, **options},
        "write_kv": {"key": heads["key"], "value": randn(5, 2, 16, dtype=F32), **pool,
                     "slot_mapping": torch.arange(5)},
        "embedding": {"ids": torch.arange(5), "table": randn(7, 32, dtype=F32), "added": rows},
        "rms_norm": {"x": rows, "weight": randn(32, dtype=F32), "eps": 1e-5, "residual": rows.clone()},
        "layer_norm": {"x": rows, "weight": randn(32, dtype=F32), "bias": randn(32, dtype=F32), "eps": 1e-5,
                       "residual": rows.clone()},
        "rms_norm_heads": {"x": heads["query"], "weight": randn(4, 16, dtype=F32), "eps": 1e-5},
        "layer_norm_heads": {"x": heads["query"], "weight": randn(1, 16, dtype=F32), "bias": randn(1, 16, dtype=F32),
                             "eps": 1e-5},
        "rotary": {**heads, "positions": torch.arange(5), "cos_sin": randn(9, 16, dtype=F32)},
        "join_heads": {"first": heads["query"], "second": randn(5, 4, 8, dtype=F32)},
        "activation": {"x": rows, "kind": "silu"},
        "activation_and_mul": {"x": rows, "kind": "silu"},
        "clamped_swiglu": {"x": rows, "alpha": 1.702, "limit": 7.0},
        "xielu": {"x": rows, "alpha_p": torch.ones(1), "alpha_n": torch.ones(1), "beta": torch.ones(1),
                  "eps": -torch.ones(1)},
        "add": {"x": rows, "added": rows.clone()},
        "add_to": {"x": rows.clone(), "added": rows},
        "scale": {"x": rows, "factor": 0.5, "cap": 30.0},
        "multiply_rows": {"x": rows, "factors": randn(5, dtype=F32)},
        "clip": {"x": rows, "limit": 0.5},
        **experts,
        **(only_there if gpu else {**state_arguments(rows, starts), **cpu_arguments(rows)}),
    }  # fmt: skip


KEPT: list[torch.Tensor] = []  # what addresses among the arguments point to


def spoil(x: Any) -> dict[str, Any]:
    """x, a tensor or a quantized weight, made wrong in every way."""
    if isinstance(x, QuantizedWeight):
        return {fault: QuantizedWeight(data, x.layout) for fault, data in spoil(x.data).items()}
    return {
        "dtype": x.to(torch.int16),
        "half": x.to(torch.float16 if x.dtype is torch.float64 else torch.float64),
        "device": x.to("meta"),
        "elements apart": torch.stack([x, x], -1)[..., 0],
        "one dimension too many": x[None],
        "no dimension": x.reshape(-1)[0],
        "too long": torch.cat([x, x, x], -1),
    }


def case(back_end: str, *values: Any) -> Any:
    return pytest.param(back_end, *values, marks=[pytest.mark.emulated] if back_end == "emulated" else [])


# Fine are any number of channels for an activation on its own, and of numbers in a head that is joined; of a table,
# wider rows; values of another size than keys; biases of more distances; any vocabulary, and more draws; more experts
# than are named.
FINE = {
    ("activation", "x", "too long"),
    ("paged_attention", "biases", "too long"),
    ("activation_and_mul", "x", "too long"),
    ("clamped_swiglu", "x", "too long"),
    ("xielu", "x", "too long"),
    *(("xielu", name, "elements apart") for name in ("alpha_p", "alpha_n", "beta", "eps")),  # of one, there are none
    *((kernel, "x", "too long") for kernel in ("scale", "multiply_rows", "clip")),
    ("join_heads", "first", "too long"),
    ("join_heads", "second", "too long"),
    ("paged_attention", "block_table", "too long"),
    ("paged_attention", "values", "too long"),
    ("sample", "logits", "too long"),
    ("likeliest", "logits", "too long"),
    ("sample", "draws", "too long"),
    ("copy_blocks", "caches", "too long"),
    ("sort_by_expert", "starts", "too long"),
    ("causal_conv1d", "block_table", "too long"),
    ("selective_scan", "block_table", "too long"),
}
CASES = [
    case(back_end, kernel, name, fault)
    for back_end in CHECKED
    for kernel, arguments in valid_arguments(back_end).items()
    for name, value in arguments.items()
    if isinstance(value, (torch.Tensor, list, QuantizedWeight))
    for fault in spoil(torch.zeros(2, 2))
    if (kernel, name, fault) not in FINE
]


def name_of(kernels: Any) -> str:
    return "emulated" if hasattr(kernels, "sample") else "cpu"


@pytest.mark.parametrize(("kernels", "kernel", "name", "fault"), CASES, indirect=["kernels"])
def test_a_wrong_tensor_is_named(kernels: Any, kernel: str, name: str, fault: str) -> None:
    arguments = valid_arguments(name_of(kernels))[kernel]
    value = arguments[name]
    arguments[name] = [spoil(value[0])[fault]] if isinstance(value, list) else spoil(value)[fault]
    names = "|".join(arguments) if fault in ("dtype", "half", "too long", "one dimension too many") else name
    with pytest.raises((TypeError, ValueError), match=rf"^({names})\b"):
        getattr(kernels, kernel)(**arguments)


@pytest.mark.parametrize(
    ("kernels", "kernel"),
    [case(back_end, kernel) for back_end in CHECKED for kernel in valid_arguments(back_end)],
    indirect=["kernels"],
)
def test_a_right_call_is_taken(kernels: Any, kernel: str) -> None:
    getattr(kernels, kernel)(**valid_arguments(name_of(kernels))[kernel])


def test_every_kernel_has_its_call() -> None:
    assert {*valid_arguments(), *valid_arguments("cpu")} == set(TABLE)


WRONG = [
    ("linear", {"out_dtype": torch.float16}, TypeError, "out_dtype: .*float16"),
    ("linear", {"biases": []}, ValueError, "biases: .*1 weights, got 0"),
    ("linear", {"biases": [torch.zeros(4)]}, ValueError, "biases: .*3.*4"),
    ("linear", {"x": torch.zeros(5, 32).to_sparse()}, (TypeError, ValueError), "x: "),
    ("rms_norm", {"x": torch.zeros(5, 32).to_sparse()}, (TypeError, ValueError), "x: "),
    ("embedding", {"added": torch.zeros(4, 32)}, ValueError, "added: "),
    ("rms_norm", {"residual": torch.zeros(5, 31)}, ValueError, "residual: "),
    ("activation", {"kind": "swish"}, ValueError, "kind: .*silu.*'swish'"),
    ("activation_and_mul", {"x": torch.zeros(2, 3)}, ValueError, "x: "),
    ("rotary", {"cos_sin": torch.zeros(9, 15)}, ValueError, "cos_sin: .*even"),
    ("rotary", {"cos_sin": torch.zeros(9, 18)}, ValueError, "cos_sin: "),
    ("rotary", {"first": 1}, ValueError, "first: .*from 0 to 16 - 16, got 1"),
    ("rotary", {"first": -1, "key": None}, ValueError, "first: .*got -1"),
    ("rms_norm_heads", {"weight": torch.zeros(2, 16)}, ValueError, r"weight: .*\[1, 16\] or \[4, 16\]"),
    ("layer_norm_heads", {"bias": torch.zeros(4, 16)}, ValueError, r"bias: .*\[1, 16\]"),
    ("layer_norm_heads", {"weight": None}, ValueError, "bias: .*None where weight is None"),
    ("join_heads", {"second": torch.zeros(5, 3, 8)}, ValueError, r"second: .*\[5, 4, B\] with contiguous heads"),
    ("join_heads", {"first": torch.zeros(5, 4, 32)[..., ::2]}, ValueError, "first: .*contiguous heads"),
    ("clamped_swiglu", {"limit": 0.0}, ValueError, "limit: .*above 0, got 0.0"),
    ("clamped_swiglu", {"x": torch.zeros(2, 3)}, ValueError, "x: "),
    ("scale", {"cap": -1.0}, ValueError, "cap: .*0 or more, got -1.0"),
    ("clip", {"limit": 0.0}, ValueError, "limit: .*above 0, got 0.0"),
    ("multiply_rows", {"factors": torch.zeros(4)}, ValueError, "factors: .*5"),
    ("write_kv", {"key": torch.zeros(5, 1, 16)}, ValueError, "key: .*2 heads"),
    ("paged_attention", {"query": torch.zeros(5, 3, 16)}, ValueError, "query: .*multiple of 2"),
    ("write_kv", {"value": torch.zeros(5, 1, 16)}, ValueError, "value: .*2 heads"),
    ("write_kv", {"value": torch.zeros(5, 2, 8)}, ValueError, "value: .*16"),
    ("write_kv", {"value": None}, ValueError, "value: .*as values is one, got None"),
    ("write_kv", {"values": None}, ValueError, "values: .*as value is one, got None"),
    ("paged_attention", {"values": torch.zeros(6, 2, 3, 8)}, ValueError, "values: .*6, 2, 4, DV.*first columns"),
    ("paged_attention", {"values": torch.zeros(6, 2, 5, 16)[:, :, :4]}, ValueError, "values: .*strides"),
    ("paged_attention", {"values": torch.zeros(6, 2, 4, 32)[..., ::2]}, ValueError, "values: .*strides"),
    ("paged_attention", {"window": -1}, ValueError, "window: .*got -1"),
    ("paged_attention", {"chunk": -1}, ValueError, "chunk: .*got -1"),
    ("paged_attention", {"softcap": -0.5}, ValueError, "softcap: .*got -0.5"),
    ("paged_attention", {"softcap": float("nan")}, ValueError, "softcap: .*got nan"),
    ("paged_attention", {"sinks": torch.zeros(2)}, ValueError, "sinks: .*4"),
    ("paged_attention", {"head_scales": torch.zeros(4).double()}, TypeError, "head_scales: .*float32"),
    ("paged_attention", {"biases": torch.zeros(3, 7)}, ValueError, "biases: .*4"),
    ("paged_attention", {"biases": torch.zeros(4, 7).double()}, TypeError, "biases: .*float32"),
    ("paged_attention", {"biases": torch.zeros(4, 6)}, ValueError, "biases: .*odd number of distances, got 6"),
    ("paged_attention", {"visible_end": torch.arange(5)}, TypeError, "visible_end: .*int32"),
    ("paged_attention", {"visible_end": torch.arange(4).int()}, ValueError, "visible_end: .*5"),
    ("route", {"routing": Routing(groups=3, top_groups=1)}, ValueError, "experts: 2 of 4 .* 1 of 3 groups"),
    ("route", {"routing": Routing(groups=4, top_groups=1)}, ValueError, "experts: 2 of 4 .* 1 of 4 groups"),
    ("route", {"routing": Routing(groups=4, top_groups=4, group_best=2)}, ValueError, "experts: 2 of 4"),
    ("sort_by_expert", {"tokens": torch.zeros(4, dtype=torch.int64)}, ValueError, r"tokens: .*5 \* 1"),
    ("grouped_linear", {"weights": ExpertWeights([[torch.zeros(3, 31)]])}, ValueError, r"weights: .*\[3, 31\]"),
    ("grouped_linear", {"weights": ExpertWeights([[torch.zeros(3, 32).half()]])}, ValueError, "weights: .*float16"),
]
_Q8_0 = RowLayout(RowKind.Q8_0, 64)
WRONG_QUANTIZED = [
    ("quantized_linear", {"biases": []}, ValueError, "biases: .*1 weights, got 0"),
    ("quantized_linear", {"biases": [torch.zeros(8)]}, ValueError, "biases: .*7.*8"),
    ("quantized_linear", {"out_dtype": torch.float16}, TypeError, "out_dtype: .*float16"),
    ("quantized_linear", {"weights": [QuantizedWeight(torch.zeros(7, 68, dtype=torch.uint8), _Q8_0)]}, ValueError,
     "weights: expected rows of 32 columns, got 64"),
    ("quantized_embedding", {"weight": QuantizedWeight(torch.zeros(7, 68, dtype=torch.uint8), _Q8_0)}, ValueError,
     r"added: .*\[5, 64\]"),
    ("quantized_grouped_linear", {"weights": QuantizedExpertWeights([[QuantizedWeight(
        torch.zeros(7, 68, dtype=torch.uint8), _Q8_0)]])}, ValueError, "weights: .* 32 columns .*got 64 columns"),
    ("quantized_grouped_linear", {"weights": QuantizedExpertWeights([[QuantizedWeight(
        torch.zeros(7, 34, dtype=torch.uint8), RowLayout(RowKind.Q8_0, 32))]], [[torch.zeros(7).half()]])}, ValueError,
     "weights: .*biases of torch.float32, got .*biases of torch.float16"),
    ("quantized_grouped_linear", {"starts": torch.tensor([0, 2, 5, 5]).int()}, ValueError, "starts: .*3"),
    ("quantized_grouped_linear", {"starts": torch.tensor([0, 6, 5]).int()}, ValueError, "starts: must not"),
    ("quantized_grouped_linear", {"tokens": torch.tensor([1, 0, 2, 3, 4])}, ValueError, "tokens: "),
    ("quantized_embedding", {"dtype": torch.float64}, TypeError, "dtype: expected float32, .*got torch.float64"),
    ("quantized_embedding", {"ids": torch.tensor([0, 1, 2, 3, 7])}, IndexError, "ids: "),
    ("quantized_embedding", {"ids": torch.tensor([0, 1, 2, 3, -1])}, IndexError, "ids: "),
]  # fmt: skip
WRONG_STATES = [
    ("causal_conv1d", {"weight": torch.zeros(32, 1)}, ValueError, r"weight: .*from 2 to 16"),
    ("causal_conv1d", {"tails": torch.zeros(4, 2, 4, 32)}, ValueError, "tails: "),
    ("causal_conv1d", {"block_size": 0}, ValueError, "block_size: .*got 0"),
    ("causal_conv1d", {"query_start": torch.tensor([0, 3, 4]).int()}, IndexError, "query_start: .*context_len"),
    ("causal_conv1d", {"query_start": torch.tensor([0, 6, 5]).int()}, IndexError, "query_start: "),
    ("causal_conv1d", {"context_len": torch.tensor([1, 3]).int()}, IndexError, "query_start: "),
    ("causal_conv1d", {"context_len": torch.tensor([9, 3]).int()}, IndexError, "block_table: .*more tokens"),
    ("selective_scan", {"groups": 3}, ValueError, "groups: .*2 heads"),
    ("selective_scan", {"x": torch.zeros(5, 33)}, ValueError, "x: "),
    ("selective_scan", {"dt_min": 10.0}, ValueError, "dt_min: .*9.0"),
    ("selective_scan", {"block_table": torch.full((2, 2), 4).int()}, IndexError, "block_table: "),
    ("selective_scan", {"block_table": torch.full((2, 2), -1).int()}, IndexError, "block_table: "),
    ("gated_norm", {"groups": 3}, ValueError, "groups: .*32 channels"),
]
# What cannot be read without waiting for a GPU.
WRONG_NUMBERS = [
    ("embedding", {"ids": torch.tensor([0, 1, 2, 3, 7])}, IndexError, "ids: "),
    ("embedding", {"ids": torch.tensor([0, 1, 2, 3, -1])}, IndexError, "ids: "),
    ("rotary", {"positions": torch.tensor([0, 1, 2, 3, 9])}, IndexError, "positions: "),
    ("rotary", {"positions": torch.tensor([0, 1, 2, 3, -1])}, IndexError, "positions: "),
    ("write_kv", {"slot_mapping": torch.tensor([0, 1, 2, 3, 24])}, IndexError, "slot_mapping: "),
    ("write_kv", {"slot_mapping": torch.tensor([0, 1, 2, 3, -1])}, IndexError, "slot_mapping: "),
    ("paged_attention", {"context_len": torch.tensor([13, 3]).int()}, ValueError, "context_len: "),
    ("paged_attention", {"context_len": torch.tensor([9, 2]).int()}, ValueError, "context_len: "),
    ("paged_attention", {"query_start": torch.tensor([0, 2, 4]).int()}, ValueError, "query_start: "),
    ("paged_attention", {"query_start": torch.tensor([0, 6, 5]).int()}, ValueError, "query_start: "),
    ("paged_attention", {"block_table": torch.full((2, 3), 6).int()}, IndexError, "block_table: "),
    ("paged_attention", {"block_table": torch.tensor([[6, 6, 1], [6, 0, 0]]).int(), "window": 1}, IndexError, "block_"),
    ("paged_attention", {"visible_end": torch.tensor([7, 9, 1, 2, 3]).int()}, ValueError, "visible_end: "),
    ("paged_attention", {"visible_end": torch.tensor([8, 10, 1, 2, 3]).int()}, ValueError, "visible_end: "),
    ("paged_attention", {"visible_end": torch.tensor([8, 9, 3, 2, 3]).int()}, ValueError, "visible_end: "),
    ("sort_by_expert", {"experts": torch.full((5, 1), 4, dtype=torch.int32)}, IndexError, "experts: "),
    ("sort_by_expert", {"experts": torch.full((5, 1), -1, dtype=torch.int32)}, IndexError, "experts: "),
    ("grouped_linear", {"starts": torch.tensor([0, 2, 4]).int()}, ValueError, "starts: .*end with"),
    ("grouped_linear", {"starts": torch.tensor([1, 2, 5]).int()}, ValueError, "starts: must begin"),
    ("grouped_linear", {"starts": torch.tensor([0, 6, 5]).int()}, ValueError, "starts: must not"),
    ("grouped_linear", {"tokens": torch.tensor([1, 0, 2, 3, 4])}, ValueError, "tokens: "),
    ("combine", {"places": torch.tensor([[4, 0], [1, 5]]).int()}, IndexError, "places: "),
    ("combine", {"places": torch.tensor([[4, 0], [1, -1]]).int()}, IndexError, "places: "),
]
WRONG_THERE = [
    ("copy_blocks", {"block_bytes": 31}, ValueError, "block_bytes: .*multiple of 2 above 0, got 31"),
    ("gather_blocks", {"block_bytes": 0}, ValueError, "block_bytes: .*got 0"),
    ("scatter_blocks", {"num_blocks": -1}, ValueError, "num_blocks: .*got -1"),
    ("copy_blocks", {"targets": torch.arange(2)}, ValueError, "targets: .*3"),
    ("gather_blocks", {"packed": torch.zeros(3, 1, 32, dtype=torch.uint8)}, ValueError, "packed: .*3, 2, 32"),
    ("sample", {"draws": torch.zeros(63, dtype=torch.uint8)}, ValueError, "draws: .*multiple of 32 bytes, got 63"),
    ("sample", {"logits": torch.zeros(2, 0)}, ValueError, "logits: .*got 0"),
]


@pytest.mark.parametrize(
    ("kernels", "kernel", "change", "error", "message"),
    [
        *(case(one, *wrong) for one in CPU[:1] for wrong in [*WRONG, *WRONG_NUMBERS, *WRONG_STATES, *WRONG_QUANTIZED]),
        *(case("emulated", *wrong) for wrong in [*WRONG, *WRONG_THERE]),
    ],
    indirect=["kernels"],
)
def test_what_is_wrong_is_said(kernels: Any, kernel: str, change: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=rf"^{message}"):
        getattr(kernels, kernel)(**{**valid_arguments(name_of(kernels))[kernel], **change})
