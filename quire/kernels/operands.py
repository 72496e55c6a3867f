"""The checks that make an address safe to hand over, the same for the CPU's extension and the GPU's.

Each method takes a kernel's arguments, as `quire.kernels` has them, and returns what the extension's function of that
name takes, with the new tensor that it writes. A call costs a few microseconds and there are some two hundred in a
decode step, so the checks are plain tests on the arguments, and only a failed one composes a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from quire.kernels.adapters import LoraTable

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
_KINDS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "quick_gelu": 4}
_FLOAT32, _INT32, _INT64 = torch.float32, torch.int32, torch.int64
_empty = torch.empty

Numbers = tuple[Any, ...]


class Operands:
    """Arguments whose tensors must all lie on one kind of device."""

    def __init__(self, device: str) -> None:
        """device: "cpu" or "cuda"."""
        self._place = {"cpu": "the CPU", "cuda": "a GPU"}.get(device, device)
        self._here: Callable[[torch.Tensor], bool] = attrgetter(f"is_{device}")

    def linear(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        out_dtype: torch.dtype | None,
    ) -> tuple[Numbers, torch.Tensor]:
        dtype = x.dtype
        code, stride, address = self._matrix(x)
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
            if weight.dtype is not dtype or len(shape) != 2 or shape[1] != features or not self._is_here(weight):
                self._reject("weights", weight, f"[N, {features}], contiguous", dtype)
            rows = shape[0]
            total += rows
            flat += weight.data_ptr(), 0 if bias is None else self.vector("biases", bias, rows, dtype), rows
        y = _empty((tokens, total), dtype=out_dtype, device=x.device)
        return (address, tokens, features, stride, tuple(flat), y.data_ptr(), code, DTYPES[out_dtype]), y

    def paged_attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        context_len: torch.Tensor,
        scale: float,
    ) -> tuple[Numbers, torch.Tensor]:
        dtype = query.dtype
        code = DTYPES.get(dtype)
        if code is None or query.dim() != 3:
            self._reject("query", query, "[T, H, D]")
        tokens = query.shape[0]
        shape = self._cache("keys", keys, dtype)
        if self._cache("values", values, dtype) != shape:
            self._reject("values", values, f"the shape of keys {tuple(shape)}", dtype)
        num_blocks, kv_heads, block_size, head_dim = shape
        heads, stride, address = self._heads("query", query, tokens, head_dim, dtype)
        if not kv_heads or heads % kv_heads:
            self._reject("query", query, f"a multiple of {kv_heads} heads", dtype)
        if block_table.dtype is not _INT32 or block_table.dim() != 2 or not self._here(block_table):
            self._reject("block_table", block_table, "[S, B]", _INT32)
        sequences, width = block_table.shape
        if width > 1 and block_table.stride(1) != 1:
            self._reject("block_table", block_table, "[S, B] with contiguous rows", _INT32)
        starts = self.vector("query_start", query_start, sequences + 1, _INT32)
        lengths = self.vector("context_len", context_len, sequences, _INT32)
        out = _empty((tokens, heads, head_dim), dtype=dtype, device=query.device)
        return (
            address, stride, tokens, heads, head_dim, keys.data_ptr(), values.data_ptr(), num_blocks, kv_heads,
            block_size, block_table.data_ptr(), block_table.stride(0), width, starts, lengths, sequences, scale,
            out.data_ptr(), code,
        ), out  # fmt: skip

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> Numbers:
        dtype = keys.dtype
        if dtype not in _BYTES:
            self._reject("keys", keys, "")
        num_blocks, kv_heads, block_size, head_dim = shape = self._cache("keys", keys, dtype)
        if self._cache("values", values, dtype) != shape:
            self._reject("values", values, f"the shape of keys {tuple(shape)}", dtype)
        tokens = slot_mapping.shape[0] if slot_mapping.dim() == 1 else -1
        slots = self.vector("slot_mapping", slot_mapping, tokens, _INT64)
        key_heads, key_stride, key_address = self._heads("key", key, tokens, head_dim, dtype)
        value_heads, value_stride, value_address = self._heads("value", value, tokens, head_dim, dtype)
        if key_heads != kv_heads:
            self._reject("key", key, f"{kv_heads} heads", dtype)
        if value_heads != kv_heads:
            self._reject("value", value, f"{kv_heads} heads", dtype)
        return (
            key_address, key_stride, value_address, value_stride, keys.data_ptr(), values.data_ptr(), slots,
            tokens, kv_heads, head_dim, block_size, num_blocks, _BYTES[dtype],
        )  # fmt: skip

    def embedding(
        self, ids: torch.Tensor, table: torch.Tensor, added: torch.Tensor | None
    ) -> tuple[Numbers, torch.Tensor]:
        dtype = table.dtype
        code = DTYPES.get(dtype)
        if code is None or table.dim() != 2 or not self._is_here(table):
            self._reject("table", table, "[V, C], contiguous")
        tokens = ids.shape[0] if ids.dim() == 1 else -1
        rows, channels = table.shape
        address = self.vector("ids", ids, tokens, _INT64)
        y = _empty((tokens, channels), dtype=dtype, device=table.device)
        more = 0 if added is None else self._same("added", added, y)
        return (address, table.data_ptr(), rows, more, y.data_ptr(), tokens, channels, code), y

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None,
    ) -> tuple[Numbers, torch.Tensor]:
        dtype = x.dtype
        code, stride, address = self._matrix(x)
        shape = x.shape
        tokens, channels = shape
        scale = 0 if weight is None else self.vector("weight", weight, channels, dtype)
        shift = 0 if bias is None else self.vector("bias", bias, channels, dtype)
        added = 0 if residual is None else self._same("residual", residual, x)
        y = _empty(shape, dtype=dtype, device=x.device)
        return (address, tokens, channels, stride, scale, shift, added, eps, y.data_ptr(), code), y

    def rotary(self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> Numbers:
        dtype = query.dtype
        code = DTYPES.get(dtype)
        if code is None or query.dim() != 3:
            self._reject("query", query, "[T, H, D]")
        tokens, head_dim = query.shape[0], query.shape[2]
        heads, query_stride, query_address = self._heads("query", query, tokens, head_dim, dtype)
        kv_heads, key_stride, key_address = self._heads("key", key, tokens, head_dim, dtype)
        if cos_sin.dtype is not _FLOAT32 or cos_sin.dim() != 2 or not self._is_here(cos_sin):
            self._reject("cos_sin", cos_sin, "[P, R], contiguous", _FLOAT32)
        limit, rotary_dim = cos_sin.shape
        if rotary_dim > head_dim or rotary_dim % 2:
            self._reject("cos_sin", cos_sin, f"an even R of at most {head_dim}", _FLOAT32)
        return (
            query_address, query_stride, key_address, key_stride,
            self.vector("positions", positions, tokens, _INT64), cos_sin.data_ptr(), tokens, heads, kv_heads,
            head_dim, rotary_dim, limit, code,
        )  # fmt: skip

    def activation(self, x: torch.Tensor, kind: str, gated: bool) -> tuple[Numbers, torch.Tensor]:
        code, stride, address = self._matrix(x)
        tokens, channels = x.shape
        number = _KINDS.get(kind)
        if number is None:
            raise ValueError(f"kind: expected one of {', '.join(_KINDS)}, got {kind!r}")
        if gated:
            if channels % 2:
                self._reject("x", x, "[T, 2 C]")
            channels //= 2
        y = _empty((tokens, channels), dtype=x.dtype, device=x.device)
        return (address, tokens, channels, stride, number, gated, y.data_ptr(), code), y

    def _reject(self, name: str, tensor: torch.Tensor, expected: str, dtype: torch.dtype | None = None) -> None:
        """Raise the error that says what is wrong with an argument."""
        if not self._here(tensor):
            raise ValueError(f"{name}: expected a tensor on {self._place}, got one on {tensor.device}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
        if dtype is None and tensor.dtype not in DTYPES:
            raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}")
        if dtype is not None and tensor.dtype is not dtype:
            raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
        shape, strides = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"{name}: expected {expected}, got shape {shape} with strides {strides}")

    def _is_here(self, x: torch.Tensor) -> bool:
        """On the device, and contiguous."""
        return self._here(x) and x.is_contiguous()

    def _matrix(self, x: torch.Tensor) -> tuple[int, int, int]:
        """Dtype code, row stride and data address of x [T, C] with contiguous rows."""
        code = DTYPES.get(x.dtype)
        if code is None or not self._here(x) or x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] > 1):
            self._reject("x", x, "[T, C] with contiguous rows")
        return code, x.stride(0), x.data_ptr()  # type: ignore[return-value]

    def vector(self, name: str, x: torch.Tensor, size: int, dtype: torch.dtype) -> int:
        """Address of x [size], contiguous."""
        if x.dtype is not dtype or x.shape != (size,) or not self._is_here(x):
            self._reject(name, x, f"[{size}], contiguous", dtype)
        return x.data_ptr()

    def rows(self, name: str, x: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
        """Row stride and address of x [R, C] with contiguous rows."""
        if x.dtype is not dtype or not self._here(x) or x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] > 1):
            self._reject(name, x, "[R, C] with contiguous rows", dtype)
        return x.stride(0), x.data_ptr()

    def array(self, name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Address of x of this shape, contiguous."""
        if x.dtype is not dtype or x.shape != shape or not self._is_here(x):
            self._reject(name, x, f"{list(shape)}, contiguous", dtype)
        return x.data_ptr()

    def _heads(
        self, name: str, x: torch.Tensor, tokens: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[int, int, int]:
        """Number of heads, token stride and address of x [T, heads, head_dim] whose tokens are contiguous."""
        if x.dtype is not dtype or not self._here(x) or x.dim() != 3:
            self._reject(name, x, "[T, heads, D]", dtype)
        length, heads, size = x.shape
        stride, head_stride, element_stride = x.stride()
        if length != tokens or size != head_dim or element_stride != 1 or (head_stride != size and heads > 1):
            self._reject(name, x, f"[{tokens}, heads, {head_dim}] with contiguous tokens", dtype)
        return heads, stride, x.data_ptr()

    def _cache(self, name: str, cache: torch.Tensor, dtype: torch.dtype) -> torch.Size:
        if cache.dtype is not dtype or cache.dim() != 4 or not self._is_here(cache):
            self._reject(name, cache, "[num_blocks, G, block_size, D], contiguous", dtype)
        return cache.shape

    def _same(self, name: str, tensor: torch.Tensor, x: torch.Tensor) -> int:
        """Address of a contiguous tensor of x's shape and dtype."""
        if tensor.dtype is not x.dtype or tensor.shape != x.shape or not self._is_here(tensor):
            self._reject(name, tensor, f"{list(x.shape)}, contiguous", x.dtype)
        return tensor.data_ptr()


def check_tables(
    tables: Sequence[LoraTable | None], weights: Sequence[torch.Tensor], features: int, dtype: torch.dtype
) -> None:
    """Whether each table belongs to its weight."""
    if len(tables) != len(weights):
        raise ValueError(f"tables: expected one or None for each of {len(weights)} weights, got {len(tables)}")
    for table, weight in zip(tables, weights):  # noqa: B905 (the lengths were compared above)
        if table is None:
            continue
        if table.in_features != features or table.out_features != weight.shape[0] or table.dtype is not dtype:
            wanted, got = f"{list(weight.shape)} {dtype}", f"[{table.out_features}, {table.in_features}] {table.dtype}"
            raise ValueError(f"tables: expected one for a weight {wanted}, got one for {got}")
