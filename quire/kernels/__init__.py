"""One Python function per kernel; which implementation answers is decided by the device of the tensors.

On the CPU, the native kernels (`csrc/cpu`, through `native.py`) run with the best instruction set that the machine
has. Where the extension was not built, the torch twins in `reference.py` take over, and say so once.
Set QUIRE_KERNELS=reference to force the twins, or QUIRE_ISA=amx|avx512|avx512f|avx2|portable to force an
instruction set. On a GPU, those of `csrc/cuda` run, through `cuda.py`.

Shapes: T tokens, K in-features, H query heads, G key/value heads, D head size, S sequences, B blocks of each.
Dtypes: float32, bfloat16 or float16, the same for activations, weights and cache; sums are kept in float32.
No result depends on how many tokens or sequences share the call.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from quire.errors import QuireError

if TYPE_CHECKING:
    import torch

    from quire.kernels.adapters import LoraSegments, LoraTable

ACTIVATION_KINDS = ("silu", "relu", "gelu", "gelu_tanh", "quick_gelu")


@cache
def backend() -> ModuleType:
    """The module whose functions run: `native` or `reference`."""
    from quire.kernels import reference

    wanted = os.environ.get("QUIRE_KERNELS", "")
    if wanted == "reference":
        return reference
    if wanted not in ("", "native"):
        raise QuireError(f"QUIRE_KERNELS={wanted}: must be native or reference")
    try:
        from quire.kernels import native
    except ImportError as error:
        warnings.warn(
            f"quire's native kernels are not available ({error}); running on the slow torch reference "
            "kernels. Install a C++17 compiler and reinstall quire.",
            RuntimeWarning,
            stacklevel=3,
        )
        return reference
    return native


@cache
def cuda_backend() -> ModuleType:
    """The module whose functions work on tensors that lie on a GPU. Raises QuireError where it was not built."""
    try:
        from quire.kernels import cuda
    except ImportError as error:
        raise QuireError(
            f"quire's CUDA kernels are not available ({error}): install CUDA's compiler (nvcc) and reinstall quire, "
            "or run on the CPU (device='cpu')."
        ) from error
    return cuda


def backend_of(x: torch.Tensor) -> ModuleType:
    """The module whose functions work on x."""
    if x.is_cpu:
        return backend()
    return _without_numbers() if x.is_meta else cuda_backend()


def _without_numbers() -> ModuleType:
    from quire.kernels import rehearsal

    return rehearsal if rehearsal.is_on() else backend()


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None = None,
    tables: Sequence[LoraTable | None] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    """Return x times each weight transposed, plus its bias, side by side, plus what adapters add.

    x: [T, K], rows may be strided. weights: each [N_i, K], contiguous. biases: each [N_i] or None.
    segments: which rows belong to which adapters; tables: the adapters of each weight, or None where none changes its
    product. Of a segment's rows, a weight's product y becomes (y + scaling * weight * (x a^T) B^T) * scale + shift
    (arXiv:2106.09685), each adapter at its own rank, sums in float32; other rows stay as they are.
    Returns [T, sum N_i] in `out_dtype` (float32 or, by default, x's dtype). Raises IndexError for rows or slots that
    do not exist, ValueError for segments of another number of rows than T.
    """
    return backend_of(x).linear(x, weights, biases, out_dtype, tables, segments)


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
    """Causal softmax attention of every token over its sequence's cached keys and values.

    query: [T, H, D], tokens may be strided; keys, values: [num_blocks, G, block_size, D], H a multiple of G;
    block_table: [S, B] int32; query_start: [S + 1] int32; context_len: [S] int32 (includes this step's
    tokens, already stored). Sequence s's tokens are its last `query_start[s+1] - query_start[s]`.
    Slots past a sequence's context are never read. window: a token sees so many keys, its own the last (0: all before
    it). slopes: [H] float32, ALiBi (arXiv:2108.12409): slope * (key's position - the token's) is added to a score.
    The CPU's native kernel has neither of these two, and raises ValueError. Returns [T, H, D], contiguous.
    """
    return backend_of(query).paged_attention(
        query, keys, values, block_table, query_start, context_len, scale, window, slopes
    )


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store key and value, [T, G, D] (tokens may be strided), into pool slots `slot_mapping` [T] int64."""
    backend_of(keys).write_kv(key, value, keys, values, slot_mapping)


def embedding(ids: torch.Tensor, table: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """Return rows `ids` [T] int64 of table [V, C], plus `added` [T, C] where it is given: [T, C].

    Raises IndexError for an id outside the table.
    """
    return backend_of(table).embedding(ids, table, added)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm (arXiv:1910.07467) over the last dimension of x [T, C]; weight [C].

    With `residual` [T, C], `residual += x` is done first, in place, and the sum is what is normalised.
    """
    return backend_of(x).rms_norm(x, weight, eps, residual)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """LayerNorm (arXiv:1607.06450) over the last dimension of x [T, C]; weight and bias [C] or None.

    With `residual` [T, C], `residual += x` is done first, in place, and the sum is what is normalised.
    """
    return backend_of(x).layer_norm(x, weight, bias, eps, residual)


def rotary(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate query [T, H, D] and key [T, G, D] in place: half-split rotary embedding (arXiv:2104.09864).

    Tokens may be strided. positions: [T] int64, rows of cos_sin [P, R] float32: R/2 cosines, then R/2 sines.
    R <= D; dimensions past R stay.
    """
    backend_of(query).rotary(query, key, positions, cos_sin)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Apply one of ACTIVATION_KINDS to x [T, C] and return the result."""
    return backend_of(x).activation(x, kind)


def activation_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return act(x[:, :C]) * x[:, C:] for x [T, 2C]: the gated feed-forward (arXiv:2002.05202)."""
    return backend_of(x).activation_and_mul(x, kind)
