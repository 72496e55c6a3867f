"""Checkpoints in the formats of others, written by what their documentation says, number by number.

A `Written` makes of a weight [N, K] its stored tensors and the float32 numbers that these stand for. Nothing of the
loader's code is used, and sums of shifted Python integers take the place of its tricks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Stored = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Written:
    """settings: the checkpoint's quantization_config. write: of a weight, its tensors by leaf, and their numbers."""

    settings: Mapping[str, Any]
    write: Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of codes as int32 words without gaps, the first code in the lowest bits: [R, C] -> [R, C bits / 32]."""
    rows = []
    for row in codes.tolist():
        number = sum(int(code) << bits * i for i, code in enumerate(row))
        words = [number >> 32 * w & 0xFFFFFFFF for w in range(-(-len(row) * bits // 32))]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def affine(
    weight: torch.Tensor, bits: int, order: torch.Tensor, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [N, K], scales [N, G] in `dtype`, zeros [N, G]), order: each column's group."""
    groups, most = int(order.max()) + 1, (1 << bits) - 1
    scales, zeros = torch.zeros(len(weight), groups), torch.zeros(len(weight), groups)
    for g in range(groups):
        own = weight[:, order == g]
        if symmetric:
            scales[:, g], zeros[:, g] = own.abs().amax(1) / (most / 2), (most + 1) // 2
        else:
            low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            scales[:, g] = (high - low) / most
            zeros[:, g] = (-low / scales[:, g]).round()
    scales = scales.to(dtype)
    codes = (weight / scales.float()[:, order] + zeros[:, order]).round().clamp(0, most)
    return codes.to(torch.int64), scales, zeros.to(torch.int64)


def numbers(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return (codes - zeros[:, order]).float() * scales.float()[:, order]


def in_order(columns: int, group: int) -> torch.Tensor:
    return torch.arange(columns) // (columns if group == -1 else group)


def shuffled(columns: int, group: int) -> torch.Tensor:
    """Groups of columns that were taken in the order of something else."""
    return in_order(columns, group)[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]


def gptq(bits: int, group: int, *, sym: bool = True, desc_act: bool = False, version: str = "gptq") -> Written:
    def write(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        order = (shuffled if desc_act else in_order)(weight.shape[1], group)
        codes, scales, zeros = affine(weight, bits, order, sym, torch.float16)
        stored_zeros = (zeros - 1) % (1 << bits) if version == "gptq" else zeros
        tensors = {
            "qweight": packed(codes, bits).t().contiguous(),
            "qzeros": packed(stored_zeros.t(), bits),
            "scales": scales.t().contiguous(),
            "g_idx": order.to(torch.int32),
        }
        return tensors, numbers(codes, scales, zeros, order)

    settings = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": sym,
        "damp_percent": 0.1, "true_sequential": True, "checkpoint_format": version,
    }  # fmt: skip
    return Written(settings, write)


def awq(group: int) -> Written:
    def shuffle(codes: torch.Tensor) -> torch.Tensor:
        return codes.reshape(len(codes), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)

    def write(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        order = in_order(weight.shape[1], group)
        codes, scales, zeros = affine(weight, 4, order, False, torch.float16)
        tensors = {
            "qweight": packed(shuffle(codes.t()), 4),
            "qzeros": packed(shuffle(zeros.t()), 4),
            "scales": scales.t().contiguous(),
        }
        return tensors, numbers(codes, scales, zeros, order)

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Written(settings, write)


def groups_of(weights: Mapping[str, Any], form: str, **more: Any) -> dict[str, Any]:
    inputs = more.pop("input_activations", None)
    group = {
        "targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed", **more,
    }  # fmt: skip


def weights_of(bits: int, group: int | None, sym: bool, kind: str = "int", **more: Any) -> dict[str, Any]:
    strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    return {
        "num_bits": bits, "type": kind, "symmetric": sym, "strategy": strategy, "dynamic": False, "actorder": None,
        "group_size": group if strategy == "group" else None, "observer": "minmax", "block_structure": None, **more,
    }  # fmt: skip


def compressed_ints(
    bits: int,
    group: int | None,
    *,
    sym: bool = True,
    form: str = "pack-quantized",
    actorder: str | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Written:
    """group: None, one scale for the whole weight; -1, one a row."""

    def write(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        own = weight.reshape(1, -1) if group is None else weight
        order = (shuffled if actorder == "group" else in_order)(own.shape[1], group or -1)
        codes, scales, zeros = affine(own, bits, order, sym, torch.bfloat16)
        made = numbers(codes, scales, zeros, order).reshape(weight.shape)
        codes = codes.reshape(weight.shape)
        middle = 1 << bits - 1
        tensors: Stored = {"weight_scale": scales if group is not None else scales.reshape(1)}
        if form == "pack-quantized":
            tensors["weight_packed"] = packed(codes, bits)
            tensors["weight_shape"] = torch.tensor(weight.shape)
            if not sym:
                tensors["weight_zero_point"] = packed(zeros.t(), bits).t().contiguous()
        else:
            tensors["weight"] = (codes - middle).to(torch.int8)
            if not sym:
                tensors["weight_zero_point"] = (zeros - middle).to(torch.int8)
        if actorder == "group":
            tensors["weight_g_idx"] = order.to(torch.int32)
        return tensors, made

    return Written(groups_of(weights_of(bits, group, sym, actorder=actorder), form, input_activations=inputs), write)


W8A8_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def scaled_floats(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(float8 [N, K], scales of blocks [N / rows, K / columns], the numbers)"""
    n, k = weight.shape
    scales = torch.zeros(-(-n // rows), -(-k // columns))
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            scales[i, j] = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].abs().max() / 448
    wide = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    small = (weight / wide).to(torch.float8_e4m3fn)
    return small, scales, small.float() * wide


def compressed_floats(strategy: str, block: tuple[int, int] = (0, 0)) -> Written:
    """block: [rows, columns] of strategy "block", [1, columns] of "group"."""

    def write(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        n, k = weight.shape
        size = {"tensor": (n, k), "channel": (1, k)}.get(strategy, block)
        small, scales, made = scaled_floats(weight, *size)
        return {"weight": small, "weight_scale": scales.reshape(1) if strategy == "tensor" else scales}, made

    weights = weights_of(8, None, True, "float", strategy=strategy)
    if strategy == "group":
        weights["group_size"] = block[1]
    if strategy == "block":
        weights["block_structure"] = list(block)
    return Written(groups_of(weights, "float-quantized"), write)


def fine_grained(block: tuple[int, int] | None) -> Written:
    def write(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        small, scales, made = scaled_floats(weight, *(block or weight.shape))
        return {"weight": small, "weight_scale_inv": scales if block else scales.reshape(())}, made

    settings = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
        "weight_block_size": list(block) if block else None, "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    return Written(settings, write)


def eight_bits() -> Written:
    """bitsandbytes' LLM.int8()."""

    def write(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        largest = weight.abs().amax(1)
        codes = (weight * (127 / largest[:, None])).round().to(torch.int8)
        tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes.float() * (largest / 127)[:, None]

    settings = {
        "quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0,
        "_load_in_8bit": True, "_load_in_4bit": False, "bnb_4bit_quant_type": "fp4", "llm_int8_skip_modules": None,
        "bnb_4bit_use_double_quant": False, "llm_int8_has_fp16_weight": False, "bnb_4bit_compute_dtype": "float32",
        "llm_int8_enable_fp32_cpu_offload": False, "bnb_4bit_quant_storage": "uint8",
    }  # fmt: skip
    return Written(settings, write)


# QLoRA's table, and bitsandbytes' four-bit floats: sign, two bits of exponent, one of mantissa, over 12.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(sign * one / 12 for sign in (1, -1) for one in (0, 0.0625, 8, 12, 4, 6, 2, 3))


def four_bits(kind: str = "nf4", size: int = 64, double: bool = False, storage: torch.dtype = torch.uint8) -> Written:
    """bitsandbytes' NF4 and FP4."""

    def write(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        table, flat = torch.tensor(NF4 if kind == "nf4" else FP4), weight.flatten()
        blocks = [flat[i : i + size] for i in range(0, len(flat), size)]
        scales = torch.stack([block.abs().max() for block in blocks])
        state: dict[str, Any] = {
            "quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": list(weight.shape)
        }  # fmt: skip
        tensors: Stored = {"weight.quant_map": table}
        if double:
            offset, inner = float(scales.mean()), 256
            outer = torch.stack([(scales[i : i + inner] - offset).abs().max() for i in range(0, len(scales), inner)])
            steps = torch.linspace(-1, 1, 256)
            wide = outer.repeat_interleave(inner)[: len(scales)]
            small = torch.tensor([int((steps - one).abs().argmin()) for one in (scales - offset) / wide])
            tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": steps}
            tensors["weight.absmax"] = small.to(torch.uint8)
            state |= {"nested_blocksize": inner, "nested_dtype": "float32", "nested_offset": offset}
            scales = steps[small] * wide + torch.tensor(offset)
        else:
            tensors["weight.absmax"] = scales
        wide = scales.repeat_interleave(size)[: len(flat)]
        codes = (flat / wide).unsqueeze(1).sub(table).abs().argmin(1)
        tensors["weight"] = (codes[::2] * 16 + codes[1::2]).to(torch.uint8).view(storage).unsqueeze(1)
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        return tensors, (table[codes] * wide).view(weight.shape)

    settings = {
        **eight_bits().settings, "load_in_8bit": False, "load_in_4bit": True, "_load_in_8bit": False,
        "_load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double,
    }  # fmt: skip
    return Written(settings, write)


FORMATS: dict[str, Written] = {
    "gptq_4": gptq(4, 32),
    "gptq_4_asymmetric": gptq(4, 16, sym=False),
    "gptq_4_by_activations": gptq(4, 32, sym=False, desc_act=True),
    "gptq_4_v2": gptq(4, -1, sym=False, version="gptq_v2"),
    "gptq_8": gptq(8, 32),
    "gptq_8_by_activations": gptq(8, -1, sym=False, desc_act=True),
    "gptq_2": gptq(2, 16, sym=False),
    "gptq_3": gptq(3, 32),
    "awq": awq(32),
    "awq_whole": awq(-1),
    "w4a16": compressed_ints(4, 32),
    "w4a16_asymmetric": compressed_ints(4, 16, sym=False),
    "w4a16_channel": compressed_ints(4, -1),
    "w4a16_by_activations": compressed_ints(4, 32, actorder="group"),
    "w4a16_weight_order": compressed_ints(4, 32, actorder="weight"),
    "w3a16": compressed_ints(3, 32, sym=False),
    "w6a16": compressed_ints(6, 32),
    "w8a16": compressed_ints(8, -1),
    "w8a16_asymmetric": compressed_ints(8, 32, sym=False),
    "w8a16_int": compressed_ints(8, -1, form="int-quantized"),
    "w8a16_tensor": compressed_ints(8, None, form="naive-quantized"),
    "w8a16_int_asymmetric": compressed_ints(8, -1, sym=False, form="int-quantized"),
    "w4a16_int": compressed_ints(4, 32, form="naive-quantized", sym=False),
    "w8a8": compressed_ints(8, -1, form="int-quantized", inputs=W8A8_INPUTS),
    "fp8_tensor": compressed_floats("tensor"),
    "fp8_channel": compressed_floats("channel"),
    "fp8_group": compressed_floats("group", (1, 32)),
    "fp8_block": compressed_floats("block", (16, 32)),
    "deepseek_fp8": fine_grained((16, 32)),
    "deepseek_fp8_large_blocks": fine_grained((128, 128)),
    "fp8_whole": fine_grained(None),
    "bnb_8": eight_bits(),
    "nf4": four_bits(),
    "nf4_double": four_bits(double=True),
    "fp4": four_bits("fp4", 32),
    "nf4_in_bfloat16": four_bits(storage=torch.bfloat16),
}


def is_projection(name: str) -> bool:
    return name.endswith("proj.weight")


def convert(
    folder: Path, written: Written, chosen: Callable[[str], bool] = is_projection, into: Path | None = None
) -> dict[str, torch.Tensor]:
    """Quantize the chosen weights of a checkpoint in its folder; `into`: a folder for the same numbers as floats.

    Returns these numbers, by name.
    """
    file = folder / "model.safetensors"
    tensors = load_file(file)
    made, quantized = dict(tensors), dict(tensors)
    for name in filter(chosen, tensors):
        stored, made[name] = written.write(quantized.pop(name).float())
        quantized.update({name.removesuffix("weight") + leaf: one.contiguous() for leaf, one in stored.items()})
    save_file(quantized, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if into is not None:
        into.mkdir(parents=True, exist_ok=True)
        (into / "config.json").write_text(json.dumps(config))
        save_file({name: one.contiguous() for name, one in made.items()}, into / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(written.settings)}))
    return {name: one for name, one in made.items() if chosen(name)}
