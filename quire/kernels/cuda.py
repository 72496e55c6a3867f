"""The GPU's column of the table: the compiled kernels of `csrc/cuda`, module `_cuda`.

Each call starts work on the current stream of its tensors' device and returns; nothing waits. What a kernel finds wrong
while it runs cannot be raised: an id, slot or block that points nowhere is passed over.

Batch invariance. Attention, norms, LoRA and sampling make a row's result with the same operations in the same order
whatever shares the call. So does `linear` (csrc/cuda/linear) while `exact_products()` is on, which is the default;
with `set_exact_products(False)`, matrix products go to cuBLAS, which chooses another algorithm for another number of
rows: faster for many rows, and the last bits of a request's logits may then depend on its company.

Quantized weights are weight-only here, of every kind: `quantized_linear` gives the bits of `linear` on weights whose
numbers are of x's dtype, each rounded once (csrc/cuda/quantized), whatever `exact_products` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import quire.kernels._cuda as _cuda
from quire.errors import QuireError
from quire.kernels.adapters import ENTRY_BYTES, SEGMENT_BYTES, LoraSegments, LoraTable, check_tables
from quire.kernels.binding import DTYPES, Numbers, column
from quire.kernels.experts import ExpertWeights
from quire.kernels.quantized import QuantizedWeight, by_rows
from quire.kernels.table import TABLE

# "cuda"; "cpu" where the module is the kernels' emulation, as tests build it.
DEVICE: str = _cuda.device
Target = tuple[int, int, int, int]  # what adapters may change: entries, slots, the first column of y, columns
# B of an adapter lies as [N, rank] (`LoraWeights.row_major`).
ROW_MAJOR_B = True

_exact = True


def exact_products() -> bool:
    """Whether matrix products are batch-invariant."""
    return _exact


def set_exact_products(exact: bool) -> None:
    """Choose, for the calls and the captures that follow in this process."""
    global _exact
    _exact = exact


def check_device(device: torch.device) -> None:
    """Raise QuireError where the kernels were not compiled for a GPU, or its driver is too old for them."""
    with torch.cuda.device(device):
        try:
            _cuda.check_device()
        except RuntimeError as error:
            major, minor = torch.cuda.get_device_capability(device)
            raise QuireError(
                f"quire's CUDA kernels do not run on {device}: {error}. They were compiled for "
                f"sm_{', sm_'.join(_cuda.architectures.split())} by CUDA {version(_cuda.runtime_version)}; it is "
                f"sm_{major}{minor}, its driver is for CUDA {version(_cuda.driver_version())}. Reinstall quire with "
                f"QUIRE_CUDA_ARCHITECTURES={major}{minor}-real, update the driver, or set device='cpu'."
            ) from None


def version(number: int) -> str:
    """CUDA's versions, 1000 major + 10 minor, as people write them."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _stream(x: torch.Tensor) -> int:
    if DEVICE == "cpu":
        return 0
    # What torch.cuda.current_stream makes an object of, which takes ten times as long.
    return torch._C._cuda_getCurrentRawStream(x.get_device())


def _linear(
    numbers: Numbers,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    y: torch.Tensor,
    tables: Sequence[LoraTable | None],
    segments: LoraSegments | None,
    T: int,
    K: int,
    dtype: torch.dtype,
) -> None:
    if _exact:
        _cuda.linear(*numbers, _stream(x))
    else:
        _multiply(x, weights, biases, y)
    if segments is not None:
        check_tables(tables, weights, K, dtype)
        _add_adapters(x, y, tables, [len(weight) for weight in weights], segments.for_rows(T))


def _quantized_linear(
    numbers: Numbers,
    x: torch.Tensor,
    weights: Sequence[QuantizedWeight],
    biases: Sequence[torch.Tensor | None],
    y: torch.Tensor,
    tables: Sequence[LoraTable | None],
    segments: LoraSegments | None,
    T: int,
    K: int,
    dtype: torch.dtype,
) -> None:
    """By quire's own products whatever `exact_products` says."""
    _, _, _, _, flat, y_at, code, out_code = numbers
    wide, places = _wide(x), [_place_of(weight) for weight in weights]
    for i, place in enumerate(places):
        if place is not weights[i].data:
            flat = (*flat[: 8 * i], place.data_ptr(), *flat[8 * i + 1 :])
    num_bytes = _cuda.quantized_workspace(T, K, flat, code)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=x.device)
    address = workspace.data_ptr() if num_bytes else 0
    _cuda.quantized_linear(
        wide.data_ptr(), T, K, wide.stride(0), flat, y_at, code, out_code, address, _stream(x)
    )  # fmt: skip
    if segments is not None:
        check_tables(tables, weights, K, dtype)
        _add_adapters(x, y, tables, by_rows(weights), segments.for_rows(T))


def _quantized_embedding(numbers: Numbers, ids: torch.Tensor, weight: QuantizedWeight) -> None:
    place, (_, *rest) = _place_of(weight), numbers[3]
    _cuda.quantized_embedding(*numbers[:3], (place.data_ptr(), *rest), *numbers[4:], _stream(ids))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """x [T, K], or a copy of it with zeros behind each row, where it cannot be read 16 bytes at a time."""
    tokens, features = x.shape
    if x.dtype is torch.float32:
        return x
    if features % 8 == 0 and (x.stride(0) % 8 == 0 or tokens == 1) and x.data_ptr() % 16 == 0:
        return x
    copy = x.new_zeros((tokens, -(-features // 8) * 8))
    copy[:, :features] = x
    return copy


def _place_of(weight: QuantizedWeight) -> torch.Tensor:
    """Its bytes, or a copy where they begin as no row of memory of its own does: kernels read aligned words."""
    data, row_bytes = weight.data, weight.layout.row_bytes
    return data if data.data_ptr() % math.gcd(row_bytes, 16) == 0 else data.clone()


def _multiply(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], y: torch.Tensor
) -> None:
    """y [T, sum N_i] = what cuBLAS makes of each product, side by side."""
    column = 0
    if len(weights) == 1:
        bias = biases[0]
        if bias is None and y.dtype is x.dtype:
            torch.mm(x, weights[0].t(), out=y)
            return
    for weight, bias in zip(weights, biases, strict=True):
        first, column = column, column + len(weight)
        y[:, first:column] = F.linear(x, weight, bias)


def _add_adapters(
    x: torch.Tensor, y: torch.Tensor, tables: Sequence[LoraTable | None], widths: Sequence[int], segments: LoraSegments
) -> None:
    targets: list[Target] = []
    max_rank = column = 0
    for table, width in zip(tables, widths, strict=True):
        if table is not None:
            targets.append((table.address, len(table.entries), column, width))
            max_rank = max(max_rank, table.max_rank)
        column += width
    _add_shares(x, y, targets, segments.address, len(segments.entries), segments.layers, max_rank)


def _add_shares(
    x: torch.Tensor, y: torch.Tensor, targets: Sequence[Target], segments: int, num_segments: int, layers: int,
    max_rank: int,
) -> None:  # fmt: skip
    """Two launches for whatever mixture of adapters the segments, at that address, name."""
    rows, features = x.shape
    for place in range(0, len(targets), _cuda.most_targets):
        some = targets[place : place + _cuda.most_targets]
        hidden = torch.empty((len(some), layers, rows, max(max_rank, 1)), dtype=torch.float32, device=x.device)
        _cuda.lora(
            x.data_ptr(), rows, features, x.stride(0), [number for target in some for number in target], y.data_ptr(),
            y.shape[1], segments, num_segments, hidden.data_ptr(), layers, max_rank, DTYPES[x.dtype], DTYPES[y.dtype],
            _stream(x),
        )  # fmt: skip


def _grouped_linear(
    numbers: Numbers,
    x: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    weights: ExpertWeights,
    tables: Sequence[Sequence[LoraTable | None]],
    segments: LoraSegments | None,
    y: torch.Tensor,
) -> None:
    """By quire's own products whatever `exact_products` says: cuBLAS has none for rows counted on the device."""
    _cuda.grouped_linear(*numbers, weights.rows, weights.aligned, _stream(x))
    if segments is None or not len(x):
        return
    own = weights.device_tables(tables)
    experts, num_segments, layers = len(weights), len(segments.entries), segments.layers
    # Segments of the rows: of each expert's, those that the step has; but a row is named `layers` times at most.
    capacity = min(experts * num_segments, len(x) * layers)
    memory = partial(torch.empty, dtype=torch.uint8, device=x.device)
    rows, owners = memory(capacity * SEGMENT_BYTES), memory(4 * segments.num_rows)
    entries = memory((weights.count, capacity * ENTRY_BYTES))
    _cuda.expert_segments(
        starts.data_ptr(), tokens.data_ptr(), experts, len(x), segments.address, num_segments, segments.num_rows,
        layers, own.address, weights.count, rows.data_ptr(), entries.data_ptr(), capacity, owners.data_ptr(),
        _stream(x),
    )  # fmt: skip
    first = [sum(weights.rows[:i]) for i in range(weights.count)]
    targets = [
        (entries[i].data_ptr(), capacity, first[i], width) for i, width in enumerate(weights.rows) if own.adapted[i]
    ]
    _add_shares(x, y, targets, rows.data_ptr(), capacity, layers, own.max_rank)


def _paged_attention(
    numbers: Numbers,
    query: torch.Tensor,
    key_scales: torch.Tensor | None,
    biases: torch.Tensor | None,
    T: int,
    H: int,
    D: int,
    DV: int,
    G: int,
    size: int,
    B: int,
    S: int,
    code: int,
) -> None:
    _refuse_int8(key_scales)
    if biases is not None:
        raise RuntimeError("attention with biases by distance has kernels for the CPU alone")
    num_bytes = _cuda.attention_workspace(T, H, D, DV, G, size, B, S, code)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=query.device)
    address = workspace.data_ptr() if num_bytes else 0
    _cuda.paged_attention(*numbers[:-5], address, _stream(query))  # the last five are of int8 and biases


def _write_kv(numbers: Numbers, key: torch.Tensor, key_scales: torch.Tensor | None) -> None:
    _refuse_int8(key_scales)
    _cuda.write_kv(*numbers[:-5], _stream(key))  # the last five are of int8


def _refuse_int8(key_scales: torch.Tensor | None) -> None:
    if key_scales is not None:
        raise QuireError("quire's CUDA kernels have none for keys and values in int8: take kv_cache_dtype='auto'.")


def _refusal(what: str) -> Callable[[], None]:
    def refuse() -> None:
        raise QuireError(f"quire's CUDA kernels have none for {what}: run such a model with device='cpu'.")

    return refuse


def functions(extension: Any, device: str) -> dict[str, Callable[..., Any]]:
    """The GPU's column of the table, over a compiled module, for tensors on `device`."""
    done_by: dict[str, Callable[..., None]] = {
        "linear": _linear,
        "quantized_linear": _quantized_linear,
        "quantized_embedding": _quantized_embedding,
        "paged_attention": _paged_attention,
        "write_kv": _write_kv,
        "grouped_linear": _grouped_linear,
        **{name: _refusal(op.cpu_only) for name, op in TABLE.items() if op.cpu_only},
    }
    return column(device, extension, _stream, done_by, gpu=True)


globals().update(functions(_cuda, DEVICE))
