"""The CPU's compiled kernels (`csrc/cpu`, module `_C`), behind the checks of `operands.py`.

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
from quire.kernels.operands import Operands, check_tables

_operands = Operands("cpu")
# B of an adapter lies packed (`adapters.pack`).
ROW_MAJOR_B = False


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


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None = None,
    tables: Sequence[LoraTable | None] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    numbers, y = _operands.linear(x, weights, biases, out_dtype)
    if segments is None:
        _C.linear(*numbers, (), 0, 0)
        return y
    segments = segments.for_rows(x.shape[0])
    check_tables(tables, weights, x.shape[1], x.dtype)
    entries: list[int] = []
    for table in tables:
        entries += (0, 0) if table is None else (table.address, len(table.entries))
    _C.linear(*numbers, tuple(entries), segments.address, len(segments.entries))
    return y


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    window: int = 0,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    if window or slopes is not None:
        raise ValueError("window, slopes: the CPU's kernel has neither sliding windows nor ALiBi")
    numbers, out = _operands.paged_attention(query, keys, values, block_table, query_start, context_len, scale)
    _C.paged_attention(*numbers)
    return out


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    _C.write_kv(*_operands.write_kv(key, value, keys, values, slot_mapping))


def embedding(ids: torch.Tensor, table: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    numbers, y = _operands.embedding(ids, table, added)
    _C.embedding(*numbers)
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    numbers, y = _operands.norm(x, weight, None, eps, residual)
    _C.rms_norm(*numbers)
    return y


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    numbers, y = _operands.norm(x, weight, bias, eps, residual)
    _C.layer_norm(*numbers)
    return y


def rotary(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    _C.rotary(*_operands.rotary(query, key, positions, cos_sin))


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    numbers, y = _operands.activation(x, kind, False)
    _C.activation(*numbers)
    return y


def activation_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    numbers, y = _operands.activation(x, kind, True)
    _C.activation(*numbers)
    return y
