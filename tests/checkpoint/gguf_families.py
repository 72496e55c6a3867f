"""What llama.cpp's converter does for families beyond those of `gguf_models`: rows and keys, as its sources have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Arrays = Sequence[tuple[str, np.ndarray]]
Pairs = Mapping[str, Any]


def turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Halves of heads to neighbours."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def head_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


# Rows. Names are such that the package's map knows them, or the files' own.


def internlm2(config: Any, name: str, array: np.ndarray) -> Arrays:
    """wqkv has each key head's queries, its key, its value."""
    if not name.endswith("wqkv.weight"):
        return [(name, array)]
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size = head_of(config)
    by_group = array.reshape(groups, heads // groups + 2, size, -1)
    queries, keys, values = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
    query, key, value = (one.reshape(-1, array.shape[1]) for one in (queries, keys, values))
    return _apart(name, "attention.wqkv", turned(query, heads), turned(key, groups), value)


def baichuan(config: Any, name: str, array: np.ndarray) -> Arrays:
    if name == "lm_head.weight" and config.norm_head:  # of Baichuan 2, whose files are made so before
        return [(name, array / np.linalg.norm(array, axis=1, keepdims=True))]
    if not name.endswith("W_pack.weight"):
        return [(name, array)]
    query, key, value = np.split(array, 3)
    heads = config.num_attention_heads
    return _apart(name, "self_attn.W_pack", turned(query, heads), turned(key, heads), value)


def _apart(name: str, projection: str, *parts: np.ndarray) -> Arrays:
    stem = name.partition(projection)[0]
    return [(f"{stem}self_attn.{kind}_proj.weight", one) for kind, one in zip("qkv", parts, strict=True)]


def granitemoe(config: Any, name: str, array: np.ndarray) -> Arrays:
    for end, kinds in (
        ("block_sparse_moe.input_linear.weight", ("ffn_gate_exps", "ffn_up_exps")),
        ("shared_mlp.input_linear.weight", ("ffn_gate_shexp", "ffn_up_shexp")),
    ):
        if name.endswith(end):
            layer = name.split(".")[2]
            halves = np.split(array, 2, axis=-2)
            return [(f"blk.{layer}.{kind}.weight", one) for kind, one in zip(kinds, halves, strict=True)]
    return _neighbours(config, name, array)


def gpt_oss(config: Any, name: str, array: np.ndarray) -> Arrays:
    """Experts' gates and what they multiply take turns, and lie [in, out]."""
    layer = (name.split(".") + [""] * 3)[2]
    if name.endswith("sinks"):
        return [(f"blk.{layer}.attn_sinks.weight", array)]
    suffix = "bias" if name.endswith("_bias") else "weight"
    if ".experts." in name and suffix == "weight":
        array = np.ascontiguousarray(array.swapaxes(-1, -2))
    if "gate_up_proj" in name:
        gate, up = (array[:, 0::2], array[:, 1::2])
        return [(f"blk.{layer}.ffn_gate_exps.{suffix}", gate), (f"blk.{layer}.ffn_up_exps.{suffix}", up)]
    if ".experts.down_proj" in name:
        return [(f"blk.{layer}.ffn_down_exps.{suffix}", array)]
    return [(name, array)]


def _neighbours(config: Any, name: str, array: np.ndarray) -> Arrays:
    if ".q_proj." in name:
        array = turned(array, config.num_attention_heads)
    elif ".k_proj." in name:
        array = turned(array, config.num_key_value_heads)
    return [(name, array)]


def _weights_of_neighbours(config: Any, name: str, array: np.ndarray) -> Arrays:
    return _neighbours(config, name, array) if name.endswith(".weight") else [(name, array)]


ROWS: Mapping[str, Callable[[Any, str, np.ndarray], Arrays]] = {
    **dict.fromkeys(("llama", "granite", "arcee", "smollm3", "mistral3"), _neighbours),
    **dict.fromkeys(("olmo", "minicpm"), _weights_of_neighbours),
    "internlm2": internlm2, "baichuan": baichuan, "granitemoe": granitemoe, "gpt-oss": gpt_oss,
}  # fmt: skip


# Keys


def windows(config: Any) -> Pairs:
    if not config.sliding_window:
        return {}
    slides = [one == "sliding_attention" for one in config.layer_types]
    return {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": slides}


def chosen(config: Any) -> Pairs:
    """Of experts that are chosen by corrected scores."""
    return {
        "expert_feed_forward_length": config.moe_intermediate_size, "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group, "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
    }  # fmt: skip


def granite(config: Any, rope: Pairs) -> Pairs:
    return {
        "attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling,
        "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", None) or None,
        "attention.key_length": None, "attention.value_length": None, "vocab_size": config.vocab_size,
        "rope.dimension_count": head_of(config),
    }  # fmt: skip


def minicpm(config: Any, rope: Pairs) -> Pairs:
    return {
        "embedding_scale": float(config.scale_emb),
        "residual_scale": config.scale_depth / config.num_hidden_layers**0.5,
        "logit_scale": config.hidden_size / config.dim_model_base, "attention.key_length": None,
        "attention.value_length": None,
    }  # fmt: skip


def minicpm3(config: Any, rope: Pairs) -> Pairs:
    return {
        "attention.kv_lora_rank": config.kv_lora_rank, "attention.q_lora_rank": config.q_lora_rank,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim, "attention.value_length": None,
        "rope.dimension_count": config.qk_rope_head_dim, "rope.freq_base": None,
        "rope.scaling.type": None, "vocab_size": config.vocab_size,
    }  # fmt: skip


def cohere2(config: Any, rope: Pairs) -> Pairs:
    return {
        "logit_scale": config.logit_scale, "attention.sliding_window": config.sliding_window,
        "rope.dimension_count": head_of(config), "rope.scaling.type": "none", "vocab_size": config.vocab_size,
    }  # fmt: skip


def glm(config: Any, rope: Pairs) -> Pairs:
    return {"rope.dimension_count": int(head_of(config) * rope.get("partial_rotary_factor", 0.5))}


def glm4moe(config: Any, rope: Pairs) -> Pairs:
    """The layer that guesses a token is counted, and left out where the checkpoint does not have it."""
    return {
        **glm(config, rope), **chosen(config), "expert_shared_count": config.n_shared_experts, "expert_gating_func": 2,
        "leading_dense_block_count": config.first_k_dense_replace, "nextn_predict_layers": 1,
        "block_count": config.num_hidden_layers + 1,
    }  # fmt: skip


def dots1(config: Any, rope: Pairs) -> Pairs:
    return {
        **chosen(config), "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
    }  # fmt: skip


def exaone_moe(config: Any, rope: Pairs) -> Pairs:
    shared = config.num_shared_experts
    return {
        **windows(config), **chosen(config), "expert_shared_count": shared, "expert_gating_func": 2,
        "expert_shared_feed_forward_length": shared * config.moe_intermediate_size, "nextn_predict_layers": 0,
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"), "rope.scaling.type": "none",
    }  # fmt: skip


def ernie_moe(config: Any, rope: Pairs) -> Pairs:
    """The size of shared experts is what the converter writes, whatever it means."""
    return {
        "expert_count": config.moe_num_experts, "expert_used_count": config.moe_k,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
    }  # fmt: skip


def hunyuan_moe(config: Any, rope: Pairs) -> Pairs:
    taken = config.moe_topk[0] if isinstance(config.moe_topk, list) else config.moe_topk
    return {
        "expert_used_count": taken, "expert_shared_count": 1, "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
    }  # fmt: skip


def mpt(config: Any, rope: Pairs) -> Pairs:
    attention = config.attn_config
    return {
        "context_length": config.max_seq_len, "attention.max_alibi_bias": float(attention.alibi_bias_max),
        "attention.clamp_kqv": attention.clip_qkv, "feed_forward_length": 4 * config.d_model,
    }  # fmt: skip


KEYS: Mapping[str, Callable[[Any, Pairs], Pairs]] = {
    "starcoder": lambda c, r: {"attention.head_count_kv": 1},
    "olmo": lambda c, r: {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": c.clip_qkv},
    "olmo2": lambda c, r: {**windows(c)} if getattr(c, "layer_types", None) and c.sliding_window else {},
    "cohere2": cohere2, "granite": granite, "granitemoe": granite, "minicpm": minicpm, "minicpm3": minicpm3,
    "chatglm": glm, "glm4": glm, "glm4moe": glm4moe, "dots1": dots1, "mpt": mpt, "exaone4": lambda c, r: windows(c),
    "exaone-moe": exaone_moe, "ernie4_5-moe": ernie_moe, "hunyuan-moe": hunyuan_moe,
    "internlm2": lambda c, r: {
        "attention.key_length": None, "attention.value_length": None,
        "rope.freq_base": float(r.get("rope_theta") or c.rope_theta),
    },
    "baichuan": lambda c, r: {
        "tensor_data_layout": "Meta AI original pth", "rope.dimension_count": head_of(c),
        "attention.head_count_kv": None, "attention.key_length": None, "attention.value_length": None,
    },
    "minimax-m2": lambda c, r: {
        "expert_feed_forward_length": c.intermediate_size, "expert_gating_func": 2,
        "rope.dimension_count": int(head_of(c) * r.get("partial_rotary_factor", 1.0)),
    },
    "arcee": lambda c, r: {"vocab_size": c.vocab_size, "rope.dimension_count": head_of(c)},
    "smollm3": lambda c, r: {"vocab_size": c.vocab_size, "rope.dimension_count": head_of(c)},
    "gpt-oss": lambda c, r: {
        "attention.sliding_window": c.sliding_window, "expert_feed_forward_length": c.intermediate_size,
    },
}  # fmt: skip


def scaling_of(rope: Pairs) -> dict[str, Any]:
    """What is written of every family's rotations."""
    kind = rope.get("rope_type")
    if kind not in ("linear", "yarn"):
        return {}
    found = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        names = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        found |= {f"rope.scaling.yarn_{key}": float(rope[name]) for name, key in names.items() if rope.get(name)}
    return found
