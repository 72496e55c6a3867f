"""GGUF files of tiny models, as llama.cpp's converter would write them.

Names are the gguf package's (`get_tensor_name_map`); what the converter does to rows, and which keys it writes, was
read in its sources (https://github.com/ggml-org/llama.cpp, conversion/), not in what reads the files here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from quire.checkpoint.files import SINGLE
from tests.checkpoint import gguf_families, gguf_states
from tests.checkpoint.gguf_blocks import blocks_like

Kind = gguf.GGMLQuantizationType


def apart(rows: np.ndarray, groups: int, queries: int) -> np.ndarray:
    """Queries with their key and value, group by group, to all queries, all keys, all values."""
    by_group = rows.reshape(groups, queries + 2, -1, *rows.shape[1:])
    parts = by_group[:, :queries], by_group[:, queries], by_group[:, queries + 1]
    return np.concatenate([one.reshape(-1, *rows.shape[1:]) for one in parts])


def tensors_of(folder: Path, arch: str, config: Any) -> dict[str, np.ndarray]:
    """A saved model's tensors by their names in a GGUF file."""
    return converted({name: one.float().numpy() for name, one in load_file(folder / SINGLE).items()}, arch, config)


def converted(arrays: Mapping[str, np.ndarray], arch: str, config: Any) -> dict[str, np.ndarray]:
    """The same of arrays under transformers' names."""
    layers = getattr(config, "num_hidden_layers", None) or config.n_layer
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[arch], layers)
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, array in arrays.items():
        for own, changed in _changed(arch, config, name, array):
            expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", own)
            if expert:
                experts.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = changed
                continue
            found[names.get_name(_known(own), try_suffixes=(".weight", ".bias")) or own] = changed
    for name, parts in experts.items():
        stacked = np.stack([parts[number] for number in range(len(parts))])
        mixtral = re.fullmatch(r"model\.(layers\.\d+)\.block_sparse_moe\.experts\.(w\d\.weight)", name)
        if mixtral:
            name = f"{mixtral[1]}.feed_forward.experts.{mixtral[2]}"
        found[names.get_name(name, try_suffixes=(".weight",))] = stacked
    return found


def _known(name: str) -> str:
    """Names that the converter changes before it looks them up."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    return re.sub(r"^transformer\.(word_embeddings|h\.)", r"\1", name) if "self_attention" in name else name


def _changed(arch: str, config: Any, name: str, array: np.ndarray) -> Sequence[tuple[str, np.ndarray]]:
    heads = config.num_attention_heads
    if arch in ("granitehybrid", "falcon-h1"):
        return [(own, part) for own, part in gguf_states.changed(arch, config, name, array)]
    if arch == "apertus" and ".act_fn." in name:
        return []  # which stand in keys
    if arch in gguf_families.ROWS:
        return gguf_families.ROWS[arch](config, name, array)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return [(name, array + 1)]
    if arch == "nemotron" and name.endswith("norm.weight"):
        return [(name, array + 1)]
    if "query_key_value" in name and arch in ("falcon", "bloom", "gptneox"):
        keys = heads
        if arch == "falcon":
            keys = config.num_kv_heads if config.new_decoder_architecture else 1
        return [(name, apart(array, keys, heads // keys))]
    if arch == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
        return [(name, array.T.copy())]
    if arch == "deepseek2" and name.endswith("kv_b_proj.weight"):
        both = array.reshape(heads, config.qk_nope_head_dim + config.v_head_dim, -1)
        keys, values = both[:, : config.qk_nope_head_dim], both[:, config.qk_nope_head_dim :]
        k_b = np.ascontiguousarray(keys.swapaxes(1, 2))
        return [(name.replace("kv_b", "k_b"), k_b), (name.replace("kv_b", "v_b"), values)]
    return [(name, array)]


Pairs = Mapping[str, Any]


def metadata_of(arch: str, config: Any) -> dict[str, Any]:
    """Keys behind the architecture's name. Numbers are as Python has them; `write` tells their kinds."""
    get = lambda *fields: next((one for name in fields if (one := getattr(config, name, None)) is not None), None)  # noqa: E731
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    heads = get("num_attention_heads", "n_head")
    found: dict[str, Any] = {
        "block_count": get("num_hidden_layers", "n_layer"),
        "context_length": get("max_position_embeddings", "n_positions", "seq_length") or 2048,
        "embedding_length": get("hidden_size", "n_embd"),
        "feed_forward_length": get("intermediate_size", "ffn_hidden_size") or 4 * get("hidden_size", "n_embd"),
        "attention.head_count": heads,
        "attention.head_count_kv": get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": get("rms_norm_eps"),
        "attention.layer_norm_epsilon": get("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
        "attention.key_length": get("head_dim") if arch not in ("deepseek2",) else None,
        "rope.freq_base": full.get("rope_theta"),
        "expert_count": get("num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": get("num_experts_per_tok"),
        "attention.sliding_window": get("sliding_window") if arch in _WINDOWS else None,
    }
    if arch not in ("falcon", "gpt2", "phi2", "phi3", "chatglm"):
        found["attention.value_length"] = found["attention.key_length"]
    if arch not in ("deepseek2", "phi3"):
        found.update(gguf_families.scaling_of(full))
    found.update(_SPECIAL.get(arch, lambda config, rope: {})(config, full))
    return {name: one for name, one in found.items() if one is not None}


_WINDOWS = ("gemma2", "gemma3", "phi3")


def _mistral3(config: Any, rope: Pairs) -> Pairs:
    more = {"attention.temperature_scale": rope.get("llama_4_scaling_beta")}
    if rope.get("rope_type") == "yarn":
        more |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"), "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
            "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
        }  # fmt: skip
    return more


def _turned_part(config: Any, rope: Pairs) -> int:
    return int(rope.get("partial_rotary_factor", 1.0) * config.hidden_size // config.num_attention_heads)


def _deepseek(config: Any, rope: Pairs) -> Pairs:
    more = {
        "attention.head_count_kv": 1, "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim, "rope.dimension_count": config.qk_rope_head_dim,
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob or None, "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }  # fmt: skip
    if rope.get("rope_type") == "yarn":
        more |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
            "rope.scaling.yarn_beta_slow": float(rope["beta_slow"]),
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }  # fmt: skip
    return more


_SPECIAL: Mapping[str, Callable[[Any, Pairs], Pairs]] = {
    "llama": lambda c, r: {"vocab_size": c.vocab_size, "rope.dimension_count": _head(c)},
    "qwen2moe": lambda c, r: {
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
    },
    "qwen3moe": lambda c, r: {"expert_feed_forward_length": c.moe_intermediate_size},
    "gemma2": lambda c, r: {
        "attn_logit_softcapping": c.attn_logit_softcapping, "final_logit_softcapping": c.final_logit_softcapping,
    },
    "phi2": lambda c, r: {"rope.dimension_count": _turned_part(c, r), "attention.head_count_kv": 4},
    "phi3": lambda c, r: {
        "rope.scaling.original_context_length": c.original_max_position_embeddings,
        "rope.dimension_count": _turned_part(c, r), "attention.sliding_window": c.sliding_window or 0,
        "rope.scaling.type": "longrope" if r.get("long_factor") else None,
    },
    "falcon": lambda c, r: {
        "context_length": 2048, "rope.freq_base": None, "attention.key_length": None,
        "attention.head_count_kv": c.num_kv_heads if c.new_decoder_architecture else 1,
    },
    "gptneox": lambda c, r: {
        "rope.dimension_count": _turned_part(c, r), "use_parallel_residual": c.use_parallel_residual,
        "rope.freq_base": None,
    },
    "gpt2": lambda c, r: {"attention.key_length": None},
    "bloom": lambda c, r: {"attention.head_count_kv": c.n_head, "context_length": 128},
    "stablelm": lambda c, r: {
        "rope.dimension_count": _turned_part(c, r), "use_parallel_residual": c.use_parallel_residual,
        "rope.freq_base": None,
    },
    "command-r": lambda c, r: {"logit_scale": c.logit_scale, "rope.scaling.type": "none"},
    "nemotron": lambda c, r: {"rope.dimension_count": _turned_part(c, r)},
    "deepseek2": _deepseek,
    "mistral3": _mistral3,
    "qwen3vlmoe": lambda c, r: {"expert_feed_forward_length": c.moe_intermediate_size},
    "qwen2vl": lambda c, r: {"rope.dimension_sections": [2, 1, 1, 0]},
    "granitehybrid": gguf_states.granite,
    "falcon-h1": gguf_states.falcon,
    **gguf_families.KEYS,
}  # fmt: skip


def _head(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def factors_of(arch: str, config: Any) -> dict[str, np.ndarray]:
    """Tensors with frequencies' factors."""
    rope = getattr(config, "rope_parameters", None) or {}
    found = {}
    for name in ("long", "short"):
        if arch in ("phi3", "minicpm3") and rope.get(f"{name}_factor"):
            found[f"rope_factors_{name}.weight"] = np.array(rope[f"{name}_factor"], np.float32)
    if rope.get("rope_type") == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        size = _head(config)
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
        found["rope_freqs.weight"] = (plain / scaled).numpy()
    return found


def write(
    path: Path, arch: str, pairs: Pairs, tensors: Mapping[str, np.ndarray], kind_of: Callable[[str, np.ndarray], Kind]
) -> Path:
    """A GGUF file. kind_of: of a tensor, by its name and numbers."""
    writer = gguf.GGUFWriter(path, arch)
    for name, one in pairs.items():
        key = name if name.startswith(("tokenizer.", "general.", "quantize.", "xielu.")) else f"{arch}.{name}"
        whole = writer.add_int32 if type(one) is int and one < 0 else writer.add_uint32
        adds = {bool: writer.add_bool, int: whole, float: writer.add_float32, str: writer.add_string}
        adds.get(type(one), writer.add_array)(key, one)
    for name, array in tensors.items():
        kind = kind_of(name, array)
        if kind == Kind.F32:
            writer.add_tensor(name, array.astype(np.float32))
        elif kind == Kind.F16:
            writer.add_tensor(name, array.astype(np.float16))
        else:
            writer.add_tensor(name, blocks_like(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain(name: str, array: np.ndarray) -> Kind:
    return Kind.F32


def convert(folder: Path, arch: str, config: Any, path: Path, kind_of: Callable[..., Kind] = plain) -> Path:
    """The GGUF file of a saved model."""
    tensors = {**tensors_of(folder, arch, config), **factors_of(arch, config)}
    return write(path, arch, {**metadata_of(arch, config), **_of_activations(folder, arch)}, tensors, kind_of)


def _of_activations(folder: Path, arch: str) -> Pairs:
    """Apertus' trained numbers, layer by layer."""
    found: dict[str, dict[int, float]] = {}
    for name, tensor in load_file(folder / SINGLE).items() if arch == "apertus" else ():
        place = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.act_fn\.(\w+)", name)
        if place:
            found.setdefault(f"xielu.{place[2]}", {})[int(place[1])] = float(tensor)
    return {key: [own[layer] for layer in sorted(own)] for key, own in found.items()}
