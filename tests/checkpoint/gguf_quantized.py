"""GGUF files with blocks of several kinds, and transformers' models of the numbers that these mean."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.overrides import TorchFunctionMode

from quire.checkpoint.files import SINGLE
from tests.checkpoint import gguf_models
from tests.lora.quantized_world import RoundedLinear
from tests.models import tiny

Kind = gguf.GGMLQuantizationType
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
# Of a tensor's name, the first that is found in it: its kind. Others are floats.
Kinds = Mapping[str, str]
K_QUANTS: Kinds = {
    "attn_output": "Q3_K", "token_embd": "Q6_K", "output": "Q8_0", "attn_q.": "Q4_K", "attn_k.": "Q5_K",
    "attn_v": "Q6_K", "attn_qkv": "Q5_K", "attn_q_a.": "Q4_K", "attn_q_b.": "Q2_K", "attn_kv_a_mqa": "Q5_K",
    "attn_k_b": "Q8_0", "ffn_gate.": "Q2_K", "ffn_up.": "Q4_K", "ffn_down.": "Q6_K", "ffn_gate_exps": "Q2_K",
    "ffn_up_exps": "Q3_K", "ffn_down_exps": "Q5_K", "ffn_gate_shexp": "Q6_K", "ffn_up_shexp": "Q5_K",
    "ffn_down_shexp": "Q3_K", "ssm_in": "Q4_K", "ssm_out": "Q6_K",
}  # fmt: skip
SIZES = {"hidden_size": 256, "intermediate_size": 256}


def kind_of(kinds: Kinds, name: str, array: np.ndarray) -> Kind:
    found = next((kind for part, kind in kinds.items() if part in name and name.endswith("weight")), "F32")
    return Kind[found] if array.ndim > 1 else Kind.F32


def quantized_file(
    folder: Path, architecture: str, variant: str, arch: str, kinds: Kinds = K_QUANTS, **settings: Any
) -> tuple[Any, Path]:
    """(transformers' model of the numbers, in float32, whose layers round their inputs as whole-number products do; the
    file). settings: of the configuration."""
    model = tiny.make(architecture, variant, **{**SIZES, **settings})
    floats = tiny.save(model, folder / "floats")
    path = gguf_models.convert(
        floats, arch, model.config, folder / "model.gguf", lambda name, array: kind_of(kinds, name, array)
    )
    rounded = _put_back(floats, arch, model.config, path)
    theirs = getattr(transformers, architecture).from_pretrained(
        floats, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    if theirs.config.tie_word_embeddings:
        rounded.append("lm_head")
    for layer in rounded:
        experts = re.match(r".+\.experts(?=\.|$)", layer)
        if experts is not None:
            _round_experts(theirs.get_submodule(experts[0].replace("block_sparse_moe", "mlp")))
        elif isinstance(found := theirs.get_submodule(layer), nn.Linear) and not layer.endswith("kv_b_proj"):
            found.__class__ = RoundedLinear  # but for latents' keys and values, which are floats here
    theirs.name_or_path = theirs.config._name_or_path = str(floats)
    return theirs.eval(), path


class _Rounding(TorchFunctionMode):
    """Inputs of every product are rounded."""

    def __torch_function__(self, function: Any, types: Any, given: Any = (), settings: Any = None) -> Any:
        if function in (nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            given = (RoundedLinear.rounded(given[0]), *given[1:])
        return function(*given, **(settings or {}))


class _RoundedExperts:
    def forward(self, *given: Any) -> Any:
        with _Rounding():
            return super().forward(*given)  # type: ignore[misc]


def _round_experts(module: nn.Module) -> None:
    """transformers has all of a layer's experts as one parameter."""
    if not isinstance(module, _RoundedExperts):
        module.__class__ = type("Rounded", (_RoundedExperts, module.__class__), {})


def _put_back(floats: Path, arch: str, config: Any, path: Path) -> list[str]:
    """Write the numbers that the file's blocks mean into the saved model, and return the layers whose they are.

    Which of its numbers went where is told by their places, converted as they were.
    """
    tensors = load_file(floats / SINGLE)
    ends = list(accumulate(one.numel() for one in tensors.values()))
    starts = dict(zip(tensors, [0, *ends], strict=False))
    places = {
        name: np.arange(starts[name], starts[name] + one.numel()).reshape(one.shape) for name, one in tensors.items()
    }
    numbers = torch.cat([one.flatten() for one in tensors.values()])
    at = gguf_models.converted(places, arch, config)
    layers: set[str] = set()
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type in FLOATS:
            continue
        own = at[tensor.name].reshape(-1)
        numbers[torch.from_numpy(own)] = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).flatten()
        owners = {list(tensors)[bisect_right(ends, one)] for one in own[:: max(1, config.hidden_size)].tolist()}
        layers |= {re.sub(r"\.weight$", "", one) for one in owners}
    parts = {name: numbers[start : start + tensors[name].numel()] for name, start in starts.items()}
    save_file({name: part.view(tensors[name].shape).clone() for name, part in parts.items()}, floats / SINGLE,
              {"format": "pt"})  # fmt: skip
    return sorted(layers)
