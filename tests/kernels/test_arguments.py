"""A wrong argument is refused before its address is used, by an error that names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_helpers import randn

native = pytest.importorskip("quire.kernels.native")

F32 = torch.float32


def valid_arguments() -> dict[str, dict[str, Any]]:
    """For each kernel, a call that is accepted."""
    pool = {"keys": randn(6, 2, 4, 16, dtype=F32), "values": randn(6, 2, 4, 16, dtype=F32)}
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    starts, lengths = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([9, 3], dtype=torch.int32)
    rows = randn(5, 32, dtype=F32)
    heads = {"query": randn(5, 4, 16, dtype=F32), "key": randn(5, 2, 16, dtype=F32)}
    return {
        "linear": {"x": rows, "weights": [randn(3, 32, dtype=F32)], "biases": [randn(3, dtype=F32)]},
        "paged_attention": {"query": heads["query"], **pool, "block_table": table, "query_start": starts,
                            "context_len": lengths, "scale": 0.25},
        "write_kv": {"key": heads["key"], "value": randn(5, 2, 16, dtype=F32), **pool,
                     "slot_mapping": torch.arange(5)},
        "embedding": {"ids": torch.arange(5), "table": randn(7, 32, dtype=F32), "added": rows},
        "rms_norm": {"x": rows, "weight": randn(32, dtype=F32), "eps": 1e-5, "residual": rows.clone()},
        "layer_norm": {"x": rows, "weight": randn(32, dtype=F32), "bias": randn(32, dtype=F32), "eps": 1e-5,
                       "residual": rows.clone()},
        "rotary": {**heads, "positions": torch.arange(5), "cos_sin": randn(9, 16, dtype=F32)},
        "activation": {"x": rows, "kind": "silu"},
        "activation_and_mul": {"x": rows, "kind": "silu"},
    }  # fmt: skip


def spoil(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x made wrong in every way."""
    apart = torch.stack([x, x], -1)[..., 0]
    return {
        "dtype": x.to(torch.int16),
        "half": x.to(torch.float64),
        "device": x.to("meta"),
        "elements apart": apart,
        "one dimension too many": x[None],
        "no dimension": x.reshape(-1)[0],
        "too long": torch.cat([x, x, x], -1),
    }


CASES = [
    (kernel, name, fault)
    for kernel, arguments in valid_arguments().items()
    for name, value in arguments.items()
    if isinstance(value, (torch.Tensor, list))
    for fault in spoil(torch.zeros(2, 2))
    # Any number of channels is fine for an activation on its own; of a table, wider rows are.
    if (kernel, name, fault)
    not in {
        ("activation", "x", "too long"),
        ("activation_and_mul", "x", "too long"),
        ("paged_attention", "block_table", "too long"),
        ("embedding", "ids", "too long"),
    }
]


@pytest.mark.parametrize(("kernel", "name", "fault"), CASES)
def test_a_wrong_tensor_is_named(kernel: str, name: str, fault: str) -> None:
    arguments = valid_arguments()[kernel]
    getattr(native, kernel)(**arguments)
    value = arguments[name]
    arguments[name] = [spoil(value[0])[fault]] if isinstance(value, list) else spoil(value)[fault]
    names = "|".join(arguments) if fault in ("dtype", "half", "too long", "one dimension too many") else name
    with pytest.raises((TypeError, ValueError), match=rf"^({names})\b"):
        getattr(native, kernel)(**arguments)


@pytest.mark.parametrize(
    ("kernel", "change", "error", "message"),
    [
        ("linear", {"out_dtype": torch.float16}, TypeError, "out_dtype: .*float16"),
        ("linear", {"biases": []}, ValueError, "biases: .*1 weights, got 0"),
        ("linear", {"biases": [torch.zeros(4)]}, ValueError, "biases: .*3.*4"),
        ("linear", {"x": torch.zeros(5, 32).to_sparse()}, (TypeError, ValueError), "x: "),
        ("embedding", {"ids": torch.tensor([0, 1, 2, 3, 7])}, IndexError, "ids: "),
        ("embedding", {"ids": torch.tensor([0, 1, 2, 3, -1])}, IndexError, "ids: "),
        ("embedding", {"added": torch.zeros(4, 32)}, ValueError, "added: "),
        ("rms_norm", {"residual": torch.zeros(5, 31)}, ValueError, "residual: "),
        ("activation", {"kind": "swish"}, ValueError, "kind: .*silu.*'swish'"),
        ("activation_and_mul", {"x": torch.zeros(2, 3)}, ValueError, "x: "),
        ("rotary", {"positions": torch.tensor([0, 1, 2, 3, 9])}, IndexError, "positions: "),
        ("rotary", {"positions": torch.tensor([0, 1, 2, 3, -1])}, IndexError, "positions: "),
        ("rotary", {"cos_sin": torch.zeros(9, 15)}, ValueError, "cos_sin: .*even"),
        ("rotary", {"cos_sin": torch.zeros(9, 18)}, ValueError, "cos_sin: "),
        ("write_kv", {"slot_mapping": torch.tensor([0, 1, 2, 3, 24])}, IndexError, "slot_mapping: "),
        ("write_kv", {"slot_mapping": torch.tensor([0, 1, 2, 3, -1])}, IndexError, "slot_mapping: "),
        ("write_kv", {"key": torch.zeros(5, 1, 16)}, ValueError, "key: .*2 heads"),
        ("paged_attention", {"query": torch.zeros(5, 3, 16)}, ValueError, "query: .*multiple of 2"),
        ("paged_attention", {"context_len": torch.tensor([13, 3]).int()}, ValueError, "context_len: "),
        ("paged_attention", {"context_len": torch.tensor([9, 2]).int()}, ValueError, "context_len: "),
        ("paged_attention", {"query_start": torch.tensor([0, 2, 4]).int()}, ValueError, "query_start: "),
        ("paged_attention", {"query_start": torch.tensor([0, 6, 5]).int()}, ValueError, "query_start: "),
        ("paged_attention", {"block_table": torch.full((2, 3), 6).int()}, IndexError, "block_table: "),
        ("paged_attention", {"values": torch.zeros(6, 2, 4, 8)}, ValueError, "values: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(kernel: str, change: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(native, kernel)(**{**valid_arguments()[kernel], **change})
