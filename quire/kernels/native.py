"""The CPU's column of the table: the compiled kernels of `csrc/cpu`, module `_C`.

At import, the extension is given the OpenMP runtime that torch itself has loaded: a kernel's parallel region
then runs on torch's own threads, as many as torch.get_num_threads() says at that moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import quire.kernels._C as _C
from quire.errors import QuireError
from quire.kernels.adapters import LoraSegments, LoraTable, check_tables
from quire.kernels.binding import DTYPES, Numbers, column
from quire.kernels.experts import ExpertWeights
from quire.kernels.packed import GROUP, STEP, as_packed
from quire.kernels.quantized import QuantizedWeight
from quire.kernels.quantized_experts import QuantizedExpertWeights

# B of an adapter lies packed (`adapters.pack`).
ROW_MAJOR_B = False


def _share_threads() -> Callable[[], None]:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))

    def address(name: str) -> int:
        # Looked up in torch's library and in those that it was linked with, its OpenMP runtime among them.
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0

    _C.use_openmp(address("GOMP_parallel"))
    _C.use_thread_count(address("_ZN2at15get_num_threadsEv"))  # int at::get_num_threads()

    def compute_alone() -> None:
        torch.get_num_threads()  # torch sets the number of a new thread when it is first asked
        library.omp_set_num_threads(1)

    return compute_alone


# From then on the calling thread does by itself all that it calls, be it a kernel or torch's. None: it cannot.
compute_alone: Callable[[], None] | None = None

_C.set_thread_count(torch.get_num_threads())
with contextlib.suppress(OSError, AttributeError):  # in another build of torch, the extension's own threads serve
    compute_alone = _share_threads()
if os.environ.get("QUIRE_ISA"):
    try:
        _C.set_isa(os.environ["QUIRE_ISA"])
    except ValueError as error:
        raise QuireError(f"QUIRE_ISA={os.environ['QUIRE_ISA']}: {error}") from None


def isa() -> str:
    """The instruction set in use: amx, avx512 (with bf16), avx512vnni, avx512f, avxvnni, avx2 or portable."""
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


def simulate_team(threads: int) -> None:
    """Simulate teams of so many threads, 64 at most, from now on (csrc/cpu/common/simulated_team.h); 0: no more. Only
    while no kernel runs. Results stay the same, and take much longer. Raises ValueError."""
    _C.simulate_team(threads)


def simulated_time() -> tuple[int, float, float]:
    """Since `simulate_team`: parallel regions; seconds for which threads have worked in them; seconds that the regions
    would have taken."""
    return _C.simulated_time()


def packs_rows(dtype: torch.dtype) -> bool:
    """Whether weights of a dtype are multiplied by faster once they are packed (`packed.py`)."""
    code = DTYPES.get(dtype)
    return code is not None and _C.packs_rows(code)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether a weight can be packed, and is multiplied by faster then."""
    if weight.dim() != 2 or not weight.is_cpu or not weight.is_contiguous() or not packs_rows(weight.dtype):
        return False
    rows, features = weight.shape
    return rows > 0 and features > 0 and rows % GROUP == 0 and features % STEP == 0


def pack(weight: torch.Tensor, rows: tuple[int, int] | None = None) -> torch.Tensor:
    """Pack a weight [N, K], for which `can_pack`, where it lies. rows: the first and the end of those that are there,
    multiples of 32; None: all. Returns it in its new shape. Raises ValueError."""
    first, end = (0, len(weight)) if rows is None else rows
    if not can_pack(weight) or first % GROUP or end % GROUP:
        raise ValueError(f"weight: rows {first} to {end} of {list(weight.shape)} {weight.dtype} cannot be packed here")
    own = weight[first:end]
    _C.pack_rows(own.data_ptr(), *own.shape)
    return as_packed(weight)


def _linear(
    numbers: Numbers,
    weights: Sequence[torch.Tensor],
    tables: Sequence[LoraTable | None],
    segments: LoraSegments | None,
    T: int,
    K: int,
    dtype: torch.dtype,
) -> None:
    if segments is None:
        _C.linear(*numbers, (), 0, 0)
        return
    segments = segments.for_rows(T)
    check_tables(tables, weights, K, dtype)
    _C.linear(*numbers, _entries(tables), segments.address, len(segments.entries))


def _quantized_linear(
    numbers: Numbers,
    weights: Sequence[QuantizedWeight],
    tables: Sequence[LoraTable | None],
    segments: LoraSegments | None,
    T: int,
    K: int,
    dtype: torch.dtype,
) -> None:
    if segments is None:
        _C.quantized_linear(*numbers, (), 0, 0)
        return
    segments = segments.for_rows(T)
    check_tables(tables, weights, K, dtype)
    _C.quantized_linear(*numbers, _entries(tables), segments.address, len(segments.entries))


def _entries(tables: Sequence[LoraTable | None]) -> tuple[int, ...]:
    """(entries, slots) of each table, flat."""
    entries: list[int] = []
    for table in tables:
        entries += (0, 0) if table is None else (table.address, len(table.entries))
    return tuple(entries)


def _grouped_linear(
    numbers: Numbers,
    weights: ExpertWeights,
    tables: Sequence[Sequence[LoraTable | None]],
    segments: LoraSegments | None,
) -> None:
    if segments is None:
        _C.grouped_linear(*numbers, (), 0, 0, 0)
        return
    weights.check_tables(tables)
    entries = _entries([table for own in tables for table in own])
    _C.grouped_linear(*numbers, entries, segments.address, len(segments.entries), segments.num_rows)


def _quantized_grouped_linear(
    numbers: Numbers,
    weights: QuantizedExpertWeights,
    tables: Sequence[Sequence[LoraTable | None]],
    segments: LoraSegments | None,
    dtype: torch.dtype,
) -> None:
    if segments is None:
        _C.quantized_grouped_linear(*numbers, (), 0, 0, 0)
        return
    weights.check_tables(tables, dtype)
    entries = _entries([table for own in tables for table in own])
    _C.quantized_grouped_linear(*numbers, entries, segments.address, len(segments.entries), segments.num_rows)


_DONE_BY: dict[str, Callable[..., None]] = {
    "linear": _linear,
    "grouped_linear": _grouped_linear,
    "quantized_linear": _quantized_linear,
    "quantized_grouped_linear": _quantized_grouped_linear,
}
globals().update(column("cpu", _C, done_by=_DONE_BY))
