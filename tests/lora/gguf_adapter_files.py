"""Adapters in llama.cpp's format, made of PEFT's folders as its converter makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mamba.in_proj": "ssm_in", "mamba.out_proj": "ssm_out",
}  # fmt: skip
KINDS = gguf.GGMLQuantizationType


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Halves of heads' rows as neighbours, which is llama.cpp's order."""
    return rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    architecture: str = "llama",
    alpha: float | None = 8.0,
    kind: gguf.GGMLQuantizationType = KINDS.F32,
    texts: Mapping[str, str] = {},
) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, text in {"general.type": "adapter", "adapter.type": "lora", **texts}.items():
        writer.add_string(key, text)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, tensor in tensors.items():
        numbers = tensor.float().contiguous().numpy()
        writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(folder: Path, heads: int = 4, groups: int = 2) -> dict[str, torch.Tensor]:
    """A Llama's adapter under llama.cpp's names. heads: 0: rows of queries and keys are in the same order there."""
    made = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        path, _, part = name.removeprefix("base_model.model.").replace(".language_model", "").partition(".lora_")
        half = ".lora_a" if part.endswith(("A", "A.weight")) else ".lora_b"
        if path == "model.embed_tokens":
            made["token_embd.weight" + half] = tensor.t() if half == ".lora_a" else tensor
            continue
        if path == "lm_head":
            made["output.weight" + half] = tensor
            continue
        _, _, layer, module = path.split(".", 3)
        if heads and half == ".lora_b" and module.endswith(("q_proj", "k_proj")):
            tensor = permuted(tensor, heads if module.endswith("q_proj") else groups)
        made[f"blk.{layer}.{NAMES[module]}.weight{half}"] = tensor
    return made
