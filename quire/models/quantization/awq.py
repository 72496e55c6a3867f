"""AWQ (arXiv:2306.00978), as AutoAWQ's "gemm" version writes it.

qweight [K, N / 8] int32 of eight codes of a row of W^T each, whose nibbles hold the columns 0, 2, 4, 6, 1, 3, 5, 7;
qzeros [G, N / 8] int32 likewise; scales [G, N]. w = (code - zero) * scale.
"""

from __future__ import annotations

import torch

from quire.kernels.quantized import RowKind, RowLayout
from quire.models.quantization.codes import nibbles, rows
from quire.models.quantization.settings import Settings
from quire.models.quantization.stored import FLOATS, PackedWeight, StoredLayer

NOTES = frozenset({
    "backend", "calib_data", "damp_percent", "dataset", "desc_act", "do_fuse", "duo_scaling", "export_compatible",
    "exllama_config", "fuse_max_seq_len", "lm_head", "max_calib_samples", "max_calib_seq_len", "meta",
    "modules_to_fuse", "modules_to_not_convert", "n_parallel_calib_samples", "sym", "true_sequential",
})  # fmt: skip
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each of eight columns
_INT = (torch.int32,)
_PIECE = 1 << 22  # codes unpacked at a time


class Awq:
    """Raises UnsupportedModelError for settings that are not served."""

    leaves = frozenset({"qweight", "qzeros", "scales"})
    as_linear = False

    def __init__(self, settings: Settings) -> None:
        # AutoAWQ's own file says w_bit and q_group_size.
        settings.one_of("bits", (4,), settings.take("w_bit"))
        self.group = settings.size("group_size", settings.take("q_group_size", 128), others=(-1,))
        if not settings.flag("zero_point", True):
            settings.refuse("zero_point", False, "served are checkpoints with zero points alone")
        version = settings.take("version", settings.take("format", "gemm"))
        if not isinstance(version, str) or version.lower() != "gemm":
            settings.refuse("version", version, "served is 'gemm' alone")
        settings.drop({"format", *NOTES})
        settings.finish()

    def is_quantized(self, leaves: frozenset[str]) -> bool:
        return "qweight" in leaves

    def weight(self, layer: StoredLayer) -> PackedWeight:
        n, k = layer.rows, layer.columns
        group = k if self.group == -1 else min(self.group, k)
        groups = -(-k // group)
        layer.expect("qweight", [(k, -(-n // 8))], _INT)
        layer.expect("qzeros", [(groups, -(-n // 8))], _INT)
        layer.expect("scales", [(groups, n)], FLOATS)
        return PackedWeight(RowLayout(RowKind.AFFINE4, k, group, zeros=True), ("qweight", "qzeros", "scales"), _rows)


def _rows(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    n, step = scales.shape[1], max(1, _PIECE // (8 * len(qweight)))
    codes = torch.cat([nibbles(_columns(some).t()) for some in qweight.split(step, 1)])[:n]
    return rows(codes, scales.t(), _columns(qzeros)[:, :n].t())


def _columns(words: torch.Tensor) -> torch.Tensor:
    """[R, W] int32 -> [R, 8 W] uint8, in the order of the columns."""
    return torch.stack([(words >> 4 * place & 15).to(torch.uint8) for place in _PLACES], -1).flatten(-2)
