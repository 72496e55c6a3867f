"""The GPU's compiled kernels (`csrc/cuda`, module `_cuda`), behind the checks of `operands.py`.

Each call starts work on the current stream of its tensors' device and returns; nothing waits. What a kernel finds wrong
while it runs cannot be raised: an id, slot or block that points nowhere is passed over.

Batch invariance. Attention, norms, LoRA and sampling make a row's result with the same operations in the same order
whatever shares the call. So does `linear` (csrc/cuda/linear.cu) while `exact_products()` is on, which is the default;
with `set_exact_products(False)`, matrix products go to cuBLAS, which chooses another algorithm for another number of
rows: faster for many rows, and the last bits of a request's logits may then depend on its company.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

import quire.kernels._cuda as _cuda
from quire.errors import QuireError
from quire.kernels.adapters import LoraSegments, LoraTable
from quire.kernels.operands import DTYPES, Operands, check_tables

# "cuda"; "cpu" where the module is the kernels' emulation, as tests build it.
DEVICE: str = _cuda.device
# B of an adapter lies as [N, rank] (`LoraWeights.row_major`).
ROW_MAJOR_B = True

# Of a vocabulary: more could add up to more than the sampler's integers hold.
_MOST_TOKENS = 2**20
_DRAW_BYTES = 32

_operands = Operands(DEVICE)
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


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out_dtype: torch.dtype | None = None,
    tables: Sequence[LoraTable | None] = (),
    segments: LoraSegments | None = None,
) -> torch.Tensor:
    numbers, y = _operands.linear(x, weights, biases, out_dtype)
    if _exact:
        _cuda.linear(*numbers, _stream(x))
    else:
        _multiply(x, weights, biases, y)
    if segments is not None:
        check_tables(tables, weights, x.shape[1], x.dtype)
        _add_adapters(x, y, tables, [len(weight) for weight in weights], segments.for_rows(x.shape[0]))
    return y


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
    """Two launches for whatever mixture of adapters the segments name."""
    targets: list[tuple[int, int, int, int]] = []
    max_rank = column = 0
    for table, width in zip(tables, widths, strict=True):
        if table is not None:
            targets.append((table.address, len(table.entries), column, width))
            max_rank = max(max_rank, table.max_rank)
        column += width
    tokens, features = x.shape
    for place in range(0, len(targets), _cuda.most_targets):
        some = targets[place : place + _cuda.most_targets]
        hidden = torch.empty(
            (len(some), segments.layers, tokens, max(max_rank, 1)), dtype=torch.float32, device=x.device
        )
        _cuda.lora(
            x.data_ptr(), tokens, features, x.stride(0), [number for target in some for number in target], y.data_ptr(),
            y.shape[1], segments.address, len(segments.entries), hidden.data_ptr(), segments.layers, max_rank,
            DTYPES[x.dtype], DTYPES[y.dtype], _stream(x),
        )  # fmt: skip


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
    numbers, out = _operands.paged_attention(query, keys, values, block_table, query_start, context_len, scale)
    tokens, heads, head_dim = query.shape
    more = 0 if slopes is None else _operands.vector("slopes", slopes, heads, torch.float32)
    sequences, width = block_table.shape
    size = _cuda.attention_workspace(
        tokens, heads, head_dim, keys.shape[1], keys.shape[2], width, sequences, DTYPES[query.dtype]
    )
    workspace = torch.empty(size, dtype=torch.uint8, device=query.device)
    _cuda.paged_attention(*numbers, window, more, workspace.data_ptr() if size else 0, _stream(query))
    return out


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    _cuda.write_kv(*_operands.write_kv(key, value, keys, values, slot_mapping), _stream(keys))


def embedding(ids: torch.Tensor, table: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    numbers, y = _operands.embedding(ids, table, added)
    _cuda.embedding(*numbers, _stream(table))
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    numbers, y = _operands.norm(x, weight, None, eps, residual)
    _cuda.rms_norm(*numbers, _stream(x))
    return y


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    numbers, y = _operands.norm(x, weight, bias, eps, residual)
    _cuda.layer_norm(*numbers, _stream(x))
    return y


def rotary(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    _cuda.rotary(*_operands.rotary(query, key, positions, cos_sin), _stream(query))


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    numbers, y = _operands.activation(x, kind, False)
    _cuda.activation(*numbers, _stream(x))
    return y


def activation_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    numbers, y = _operands.activation(x, kind, True)
    _cuda.activation(*numbers, _stream(x))
    return y


def copy_blocks(
    caches: torch.Tensor, num_blocks: int, block_bytes: int, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """In every cache, block sources[i] becomes block targets[i]; no block is in both.

    caches: [N] int64, the addresses of tensors of num_blocks times block_bytes. sources, targets: [count] int64.
    """
    numbers = _blocks(caches, num_blocks, block_bytes, "sources", sources)
    address = _operands.vector("targets", targets, len(sources), torch.int64)
    _cuda.copy_blocks(*numbers, sources.data_ptr(), address, len(sources), _stream(caches))


def gather_blocks(
    caches: torch.Tensor, num_blocks: int, block_bytes: int, sources: torch.Tensor, packed: torch.Tensor
) -> None:
    """Block sources[i] of every cache to packed[i]: [count, N, block_bytes] uint8. See `copy_blocks`."""
    numbers = _blocks(caches, num_blocks, block_bytes, "sources", sources)
    address = _operands.array("packed", packed, (len(sources), len(caches), block_bytes), torch.uint8)
    _cuda.gather_blocks(*numbers, sources.data_ptr(), len(sources), address, _stream(caches))


def scatter_blocks(
    caches: torch.Tensor, num_blocks: int, block_bytes: int, targets: torch.Tensor, packed: torch.Tensor
) -> None:
    """packed[i], [count, N, block_bytes] uint8, to block targets[i] of every cache. See `copy_blocks`."""
    numbers = _blocks(caches, num_blocks, block_bytes, "targets", targets)
    address = _operands.array("packed", packed, (len(targets), len(caches), block_bytes), torch.uint8)
    _cuda.scatter_blocks(*numbers, targets.data_ptr(), len(targets), address, _stream(caches))


def _blocks(
    caches: torch.Tensor, num_blocks: int, block_bytes: int, name: str, ids: torch.Tensor
) -> tuple[int, int, int, int]:
    """Address and number of the caches, and what they hold, once `ids` is known for a vector."""
    if block_bytes <= 0 or block_bytes % 2:
        raise ValueError(f"block_bytes: expected a multiple of 2 above 0, got {block_bytes}")
    if num_blocks < 0:
        raise ValueError(f"num_blocks: expected 0 or more, got {num_blocks}")
    count = caches.shape[0] if caches.dim() == 1 else -1
    address = _operands.vector("caches", caches, count, torch.int64)
    _operands.vector(name, ids, ids.shape[0] if ids.dim() == 1 else -1, torch.int64)
    return address, count, num_blocks, block_bytes


def sample(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """A token for each draw: [n] int64, -1 where there is none. `sampling.draw_tokens` says more.

    logits: [R, V] float32 with contiguous rows. draws: the bytes of n draws (`sampling.DRAW`), whose rows exist.
    """
    stride, address = _operands.rows("logits", logits, torch.float32)
    vocabulary = logits.shape[1]
    if not 0 < vocabulary <= _MOST_TOKENS:
        raise ValueError(f"logits: expected 1 to {_MOST_TOKENS} columns, got {vocabulary}")
    count, rest = divmod(draws.numel(), _DRAW_BYTES)
    _operands.vector("draws", draws, draws.numel(), torch.uint8)
    if rest:
        raise ValueError(f"draws: expected a multiple of {_DRAW_BYTES} bytes, got {draws.numel()}")
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    _cuda.sample(address, vocabulary, stride, draws.data_ptr(), count, tokens.data_ptr(), _stream(logits))
    return tokens
