"""The compiled kernels (`csrc`, module `_C`), behind the checks that make an address safe to hand over.

A call costs a few microseconds and there are some two hundred in a decode step, so the checks are plain tests
on the arguments, and only a failed one composes a message.

At import, the extension is given the OpenMP runtime that torch itself has loaded: a kernel's parallel region
then runs on torch's own threads, as many as torch.get_num_threads() says at that moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import torch

import quire.kernels._C as _C
from quire.errors import QuireError
from quire.kernels.adapters import LoraSegments, LoraTable

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
_KINDS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "quick_gelu": 4}
_FLOAT32, _INT32, _INT64 = torch.float32, torch.int32, torch.int64
_empty = torch.empty


def _share_threads() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))

    def address(name: str) -> int:
        # Looked up in torch's library and in those that it was linked with, its OpenMP runtime among them.
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0

    _C.use_openmp(address("GOMP_parallel"))
    _C.use_thread_count(address("_ZN2at15get_num_threadsEv"))  # int at::get_num_threads()


_C.set_thread_count(torch.get_num_threads())
with contextlib.suppress(OSError, AttributeError):  # in another build of torch, the extension's own threads serve
    _share_threads()
if os.environ.get("QUIRE_ISA"):
    try:
        _C.set_isa(os.environ["QUIRE_ISA"])
    except ValueError as error:
        raise QuireError(f"QUIRE_ISA={os.environ['QUIRE_ISA']}: {error}") from None


def isa() -> str:
    """The instruction set in use: amx, avx512 (with bf16), avx512f, avx2 or portable."""
    return _C.isa()


def available_isas() -> list[str]:
    """The instruction sets that this build and this machine have, best first."""
    return _C.available_isas()


def num_threads() -> int:
    """How many threads a kernel called now may use."""
    return _C.max_threads()


def thread_pool() -> str:
    """Whose threads the kernels run on."""
    return "torch's OpenMP" if _C.uses_openmp() else "own threads"


def _reject(name: str, tensor: torch.Tensor, expected: str, dtype: torch.dtype | None = None) -> None:
    """Raise the error that says what is wrong with an argument."""
    if not tensor.is_cpu:
        raise ValueError(f"{name}: expected a tensor on the CPU, got one on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    if dtype is None and tensor.dtype not in _DTYPES:
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}")
    if dtype is not None and tensor.dtype is not dtype:
        raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
    shape, strides = tuple(tensor.shape), tensor.stride()
    raise ValueError(f"{name}: expected {expected}, got shape {shape} with strides {strides}")


def _matrix(x: torch.Tensor) -> tuple[int, int, int]:
    """Dtype code, row stride and data address of x [T, C] with contiguous rows."""
    code = _DTYPES.get(x.dtype)
    if code is None or not x.is_cpu or x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] > 1):
        _reject("x", x, "[T, C] with contiguous rows")
    return code, x.stride(0), x.data_ptr()  # type: ignore[return-value]


def _vector(name: str, x: torch.Tensor, size: int, dtype: torch.dtype) -> int:
    """Address of x [size], contiguous."""
    if x.dtype is not dtype or x.shape != (size,) or not x.is_cpu or not x.is_contiguous():
        _reject(name, x, f"[{size}], contiguous", dtype)
    return x.data_ptr()


def _heads(name: str, x: torch.Tensor, tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Number of heads, token stride and address of x [T, heads, head_dim] whose tokens are contiguous."""
    if x.dtype is not dtype or not x.is_cpu or x.dim() != 3:
        _reject(name, x, "[T, heads, D]", dtype)
    length, heads, size = x.shape
    stride, head_stride, element_stride = x.stride()
    if length != tokens or size != head_dim or element_stride != 1 or (head_stride != size and heads > 1):
        _reject(name, x, f"[{tokens}, heads, {head_dim}] with contiguous tokens", dtype)
    return heads, stride, x.data_ptr()


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None = None,
    tables: Sequence[LoraTable | None] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    dtype = x.dtype
    code, stride, address = _matrix(x)
    tokens, features = x.shape
    if out_dtype is None:
        out_dtype = dtype
    elif out_dtype is not dtype and out_dtype is not _FLOAT32:
        raise TypeError(f"out_dtype: expected {dtype} or torch.float32, got {out_dtype}")
    if len(weights) != len(biases):
        raise ValueError(f"biases: expected one or None for each of {len(weights)} weights, got {len(biases)}")
    total = 0
    flat: list[int] = []
    for weight, bias in zip(weights, biases):  # noqa: B905 (the lengths were compared above)
        shape = weight.shape
        if (
            weight.dtype is not dtype
            or len(shape) != 2
            or shape[1] != features
            or not weight.is_cpu
            or not weight.is_contiguous()
        ):
            _reject("weights", weight, f"[N, {features}], contiguous", dtype)
        rows = shape[0]
        total += rows
        flat += weight.data_ptr(), 0 if bias is None else _vector("biases", bias, rows, dtype), rows
    y = _empty((tokens, total), dtype=out_dtype)
    result = y.data_ptr()
    if segments is None:
        _C.linear(address, tokens, features, stride, tuple(flat), result, code, _DTYPES[out_dtype], (), 0, 0)
    else:
        _C.linear(
            address, tokens, features, stride, tuple(flat), result, code, _DTYPES[out_dtype],
            _entries(tables, weights, features, dtype), segments.address, len(segments.entries),
        )  # fmt: skip
    return y


def _entries(
    tables: Sequence[LoraTable | None], weights: Sequence[torch.Tensor], features: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """Address and slots of each table, 0 and 0 for None."""
    if len(tables) != len(weights):
        raise ValueError(f"tables: expected one or None for each of {len(weights)} weights, got {len(tables)}")
    flat: list[int] = []
    for table, weight in zip(tables, weights):  # noqa: B905 (the lengths were compared above)
        if table is None:
            flat += 0, 0
            continue
        if table.in_features != features or table.out_features != weight.shape[0] or table.dtype is not dtype:
            wanted, got = f"{list(weight.shape)} {dtype}", f"[{table.out_features}, {table.in_features}] {table.dtype}"
            raise ValueError(f"tables: expected one for a weight {wanted}, got one for {got}")
        flat += table.address, len(table.entries)
    return tuple(flat)


def _cache(name: str, cache: torch.Tensor, dtype: torch.dtype) -> torch.Size:
    if cache.dtype is not dtype or cache.dim() != 4 or not cache.is_cpu or not cache.is_contiguous():
        _reject(name, cache, "[num_blocks, G, block_size, D], contiguous", dtype)
    return cache.shape


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    dtype = query.dtype
    code = _DTYPES.get(dtype)
    if code is None or query.dim() != 3:
        _reject("query", query, "[T, H, D]")
    tokens = query.shape[0]
    shape = _cache("keys", keys, dtype)
    if _cache("values", values, dtype) != shape:
        _reject("values", values, f"the shape of keys {tuple(shape)}", dtype)
    num_blocks, kv_heads, block_size, head_dim = shape
    heads, stride, address = _heads("query", query, tokens, head_dim, dtype)
    if not kv_heads or heads % kv_heads:
        _reject("query", query, f"a multiple of {kv_heads} heads", dtype)
    if block_table.dtype is not _INT32 or block_table.dim() != 2 or not block_table.is_cpu:
        _reject("block_table", block_table, "[S, B]", _INT32)
    sequences, width = block_table.shape
    if width > 1 and block_table.stride(1) != 1:
        _reject("block_table", block_table, "[S, B] with contiguous rows", _INT32)
    starts = _vector("query_start", query_start, sequences + 1, _INT32)
    lengths = _vector("context_len", context_len, sequences, _INT32)
    out = _empty((tokens, heads, head_dim), dtype=dtype)
    _C.paged_attention(
        address, stride, tokens, heads, head_dim, keys.data_ptr(), values.data_ptr(), num_blocks, kv_heads,
        block_size, block_table.data_ptr(), block_table.stride(0), width, starts, lengths, sequences, scale,
        out.data_ptr(), code,
    )  # fmt: skip
    return out


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    dtype = keys.dtype
    if dtype not in _BYTES:
        _reject("keys", keys, "")
    num_blocks, kv_heads, block_size, head_dim = shape = _cache("keys", keys, dtype)
    if _cache("values", values, dtype) != shape:
        _reject("values", values, f"the shape of keys {tuple(shape)}", dtype)
    tokens = slot_mapping.shape[0] if slot_mapping.dim() == 1 else -1
    slots = _vector("slot_mapping", slot_mapping, tokens, _INT64)
    key_heads, key_stride, key_address = _heads("key", key, tokens, head_dim, dtype)
    value_heads, value_stride, value_address = _heads("value", value, tokens, head_dim, dtype)
    if key_heads != kv_heads:
        _reject("key", key, f"{kv_heads} heads", dtype)
    if value_heads != kv_heads:
        _reject("value", value, f"{kv_heads} heads", dtype)
    _C.write_kv(
        key_address, key_stride, value_address, value_stride, keys.data_ptr(), values.data_ptr(), slots,
        tokens, kv_heads, head_dim, block_size, num_blocks, _BYTES[dtype],
    )  # fmt: skip


def embedding(ids: torch.Tensor, table: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    dtype = table.dtype
    code = _DTYPES.get(dtype)
    if code is None or table.dim() != 2 or not table.is_cpu or not table.is_contiguous():
        _reject("table", table, "[V, C], contiguous")
    tokens = ids.shape[0] if ids.dim() == 1 else -1
    rows, channels = table.shape
    y = _empty((max(tokens, 0), channels), dtype=dtype)
    _C.embedding(
        _vector("ids", ids, tokens, _INT64), table.data_ptr(), rows, 0 if added is None else _same("added", added, y),
        y.data_ptr(), tokens, channels, code,
    )  # fmt: skip
    return y


def _same(name: str, tensor: torch.Tensor, x: torch.Tensor) -> int:
    """Address of a contiguous tensor of x's shape and dtype."""
    if tensor.dtype is not x.dtype or tensor.shape != x.shape or not tensor.is_cpu or not tensor.is_contiguous():
        _reject(name, tensor, f"{list(x.shape)}, contiguous", x.dtype)
    return tensor.data_ptr()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    dtype = x.dtype
    code, stride, address = _matrix(x)
    shape = x.shape
    tokens, channels = shape
    scale = _vector("weight", weight, channels, dtype)
    added = 0 if residual is None else _same("residual", residual, x)
    y = _empty(shape, dtype=dtype)
    _C.rms_norm(address, tokens, channels, stride, scale, 0, added, eps, y.data_ptr(), code)
    return y


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    dtype = x.dtype
    code, stride, address = _matrix(x)
    shape = x.shape
    tokens, channels = shape
    scale = 0 if weight is None else _vector("weight", weight, channels, dtype)
    shift = 0 if bias is None else _vector("bias", bias, channels, dtype)
    added = 0 if residual is None else _same("residual", residual, x)
    y = _empty(shape, dtype=dtype)
    _C.layer_norm(address, tokens, channels, stride, scale, shift, added, eps, y.data_ptr(), code)
    return y


def rotary(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    dtype = query.dtype
    code = _DTYPES.get(dtype)
    if code is None or query.dim() != 3:
        _reject("query", query, "[T, H, D]")
    tokens, head_dim = query.shape[0], query.shape[2]
    heads, query_stride, query_address = _heads("query", query, tokens, head_dim, dtype)
    kv_heads, key_stride, key_address = _heads("key", key, tokens, head_dim, dtype)
    if cos_sin.dtype is not _FLOAT32 or cos_sin.dim() != 2 or not cos_sin.is_cpu or not cos_sin.is_contiguous():
        _reject("cos_sin", cos_sin, "[P, R], contiguous", _FLOAT32)
    limit, rotary_dim = cos_sin.shape
    if rotary_dim > head_dim or rotary_dim % 2:
        _reject("cos_sin", cos_sin, f"an even R of at most {head_dim}", _FLOAT32)
    _C.rotary(
        query_address, query_stride, key_address, key_stride, _vector("positions", positions, tokens, _INT64),
        cos_sin.data_ptr(), tokens, heads, kv_heads, head_dim, rotary_dim, limit, code,
    )  # fmt: skip


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    return _activation(x, kind, False)


def activation_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    return _activation(x, kind, True)


def _activation(x: torch.Tensor, kind: str, gated: bool) -> torch.Tensor:
    code, stride, address = _matrix(x)
    tokens, channels = x.shape
    number = _KINDS.get(kind)
    if number is None:
        raise ValueError(f"kind: expected one of {', '.join(_KINDS)}, got {kind!r}")
    if gated:
        if channels % 2:
            _reject("x", x, "[T, 2 C]")
        channels //= 2
    y = _empty((tokens, channels), dtype=x.dtype)
    _C.activation(address, tokens, channels, stride, number, gated, y.data_ptr(), code)
    return y
