"""GPTQ (arXiv:2210.17323), as AutoGPTQ and GPTQModel write it.

qweight [K / (32 / bits), N] int32, codes down a column; qzeros [G, N / (32 / bits)] int32; scales [G, N]; g_idx [K]
int32, each column's group, which is k / group_size unless columns were taken in the order of their activations.
w = (code - zero) * scale. checkpoint_format "gptq" stores zero - 1, "gptq_v2" the zero itself.
"""

from __future__ import annotations

from functools import partial

import torch

from quire.errors import CheckpointError
from quire.kernels.quantized import RowKind, RowLayout
from quire.models.quantization.codes import codes_from_words, from_words, rows, width_of, words_of
from quire.models.quantization.settings import Settings
from quire.models.quantization.stored import FLOATS, PackedWeight, StoredLayer

# How the numbers were found, by what, and which kernels its author liked: they are the same numbers.
NOTES = frozenset({
    "act_group_aware", "amp", "autoround_version", "backend", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "cache_examples_on_gpu", "damp_auto_increment", "damp_percent", "dataset",
    "disable_exllama", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "exllama_config",
    "gradient_accumulate_steps", "hyb_act", "iters", "lm_head", "low_gpu_mem_usage", "lr", "max_input_length", "meta",
    "minmax_lr", "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "modules_to_not_convert", "mse", "nsamples", "pad_token_id", "parallel_packing",
    "provider", "scale_dtype", "seqlen", "static_groups", "to_quant_block_names", "tokenizer", "true_sequential",
    "use_cuda_fp16", "use_exllama", "use_triton", "version",
})  # fmt: skip
_INT = (torch.int32,)


class Gptq:
    """Raises UnsupportedModelError for settings that are not served."""

    leaves = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    as_linear = False

    def __init__(self, settings: Settings) -> None:
        self.bits = settings.one_of("bits", (2, 3, 4, 8))
        self.group = settings.size("group_size", -1, others=(-1,))
        self.symmetric = settings.flag("sym", True)
        legacy = settings.one_of("format", ("gptq", "gptq_v2"), "gptq")
        self.version = settings.one_of("checkpoint_format", ("gptq", "gptq_v2"), legacy)
        settings.one_of("pack_dtype", ("int32",), "int32")
        settings.one_of("data_type", ("int",), "int")
        self.by_activations = settings.flag("desc_act", False)
        _only_left_out(settings)
        settings.drop(NOTES)
        settings.finish()

    def is_quantized(self, leaves: frozenset[str]) -> bool:
        return "qweight" in leaves

    def weight(self, layer: StoredLayer) -> PackedWeight:
        bits, n, k = self.bits, layer.rows, layer.columns
        group = k if self.group == -1 else min(self.group, k)
        groups = -(-k // group)
        layer.expect("qweight", [(words_of(k, bits), n)], _INT)
        layer.expect("qzeros", [(groups, words_of(n, bits))], _INT)
        layer.expect("scales", [(groups, n)], FLOATS)
        # Without the groups, columns that were taken in another order would be read in their own.
        ordered = "g_idx" in layer or (self.by_activations and groups > 1)
        aux = layer.order("g_idx", group, groups) if ordered else None
        kind = RowKind.AFFINE4 if width_of(bits) == 4 else RowKind.AFFINE8
        # A stored zero of a narrower code is of that code; without one, codes are moved to the row's own centre.
        layout = RowLayout(kind, k, group, zeros=not self.symmetric)
        name = f"{layer.stem}.qzeros"
        make = partial(_rows, bits, n, k, self.version == "gptq", None if not self.symmetric else name)
        return PackedWeight(layout, ("qweight", "qzeros", "scales"), make, aux, ("g_idx",) if "g_idx" in layer else ())


def _only_left_out(settings: Settings) -> None:
    """GPTQModel's settings by layer: those that leave layers as they are ("-:pattern") show in the files."""
    dynamic = settings.take("dynamic", {})
    if not isinstance(dynamic, dict) or any(not str(name).startswith("-:") for name in dynamic):
        settings.refuse("dynamic", dynamic, "served are patterns of layers that are not quantized ('-:...') alone")


def _rows(
    bits: int, n: int, k: int, minus_one: bool, symmetric: str | None, qweight: torch.Tensor, qzeros: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """symmetric: the name of qzeros, if all of them must be the middle; it is not stored then."""
    zeros = from_words(qzeros, bits, n).t()
    if minus_one:
        zeros = zeros + 1 & (1 << bits) - 1
    middle = 1 << bits - 1
    if symmetric is not None and bool((zeros != middle).any()):
        raise CheckpointError(f"{symmetric}: sym is set, and its zero points are not all {middle}; set sym to false.")
    codes = codes_from_words(qweight.t().contiguous(), bits, k)
    offset = (8 if bits <= 4 else 128) - middle  # what `codes_from_words` has added
    return rows(codes, scales.t(), None if symmetric is not None else zeros.float() + offset)
