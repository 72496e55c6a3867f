"""Numbers in GGML's blocks; of kinds that the gguf package reads and does not write, other numbers of the same size."""

from __future__ import annotations

import zlib

import gguf
import numpy as np

Kind = gguf.GGMLQuantizationType
# Where a block has its scale, and where its minimum's and how many times as large that is, so that the mean is 0.
_SCALES = {
    Kind.Q2_K: (80, (82, 1.5)), Kind.Q3_K: (108, None), Kind.Q4_K: (0, (2, 7.5)), Kind.Q5_K: (0, (2, 15.5)),
    Kind.Q6_K: (208, None),
}  # fmt: skip


def blocks_like(array: np.ndarray, kind: Kind) -> np.ndarray:
    """[..., row_bytes] uint8 of [..., K]."""
    if kind not in _SCALES:
        return gguf.quants.quantize(array, kind)
    rng = np.random.default_rng([zlib.crc32(array.tobytes()), int(kind)])
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (array.size // size, nbytes), np.uint8)
    _write_scales(blocks, kind, 1.0)
    spread = gguf.dequantize(blocks, kind).std()
    _write_scales(blocks, kind, rng.uniform(0.7, 1.3, len(blocks)) * array.std() / spread)
    return blocks.reshape(*array.shape[:-1], -1)


def _write_scales(blocks: np.ndarray, kind: Kind, scales: float | np.ndarray) -> None:
    at, least = _SCALES[kind]
    _write(blocks, at, scales)
    if least is not None:
        _write(blocks, least[0], scales * least[1])


def _write(blocks: np.ndarray, at: int, numbers: float | np.ndarray) -> None:
    halves = np.broadcast_to(np.float16(numbers), len(blocks))
    blocks[:, at : at + 2] = np.ascontiguousarray(halves).view(np.uint8).reshape(-1, 2)
