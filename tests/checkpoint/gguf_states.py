"""What llama.cpp's converter does to models with states (Mamba-2): see `gguf_models`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Pairs = Mapping[str, Any]


def granite(config: Any, rope: Pairs) -> Pairs:
    attends = [kind == "full_attention" for kind in config.layer_types]
    return {
        **_state(config), "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "attention.head_count_kv": [config.num_key_value_heads if one else 0 for one in attends],
        "attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling,
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "attention.key_length": None, "attention.sliding_window": None,
    }  # fmt: skip


def falcon(config: Any, rope: Pairs) -> Pairs:
    return {**_state(config), "ssm.inner_size": config.mamba_d_ssm}


def _state(config: Any) -> Pairs:
    return {
        "ssm.conv_kernel": config.mamba_d_conv, "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups, "ssm.time_step_rank": config.mamba_n_heads,
    }  # fmt: skip


def changed(arch: str, config: Any, name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Names that gguf's table knows, or those of the file; and what becomes of the numbers."""
    if arch == "falcon-h1":
        array = array * multiplier(config, name, array)
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    place = f"blk.{layer[1]}." if layer else ""
    if name.endswith("input_linear.weight"):
        gate, up = np.split(array, 2, axis=-2)
        kind = "_exps" if "block_sparse_moe" in name else "_shexp" if config.num_local_experts else ""
        yield f"{place}ffn_gate{kind}.weight", gate
        yield f"{place}ffn_up{kind}.weight", up
    elif name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        yield f"{place}ffn_down.weight", array
    elif arch == "granitehybrid" and re.search(r"\.[qk]_proj\.", name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        halves = array.reshape(heads, 2, -1, *array.shape[1:])
        yield name, halves.swapaxes(1, 2).reshape(array.shape)
    elif name.endswith(".dt_bias"):
        yield f"{place}ssm_dt.bias", array
    elif name.endswith("conv1d.weight"):
        yield name, array.squeeze()
    elif name.endswith((".A_log", ".D")):
        yield name, (-np.exp(array) if name.endswith("A_log") else array).reshape(-1, 1)
    elif name.endswith("mamba.norm.weight"):
        yield name, array.reshape(config.mamba_n_groups, -1)
    else:
        yield name, array


def multiplier(config: Any, name: str, array: np.ndarray) -> Any:
    """What Falcon-H1's weights are multiplied by. (Biases are not: such files are wrong.)"""
    attention = config.attention_in_multiplier
    parts = {
        "down_proj": config.mlp_multipliers[1], "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * attention, "q_proj": attention, "v_proj": attention,
        "o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier, "embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    if "in_proj" in name:
        state = config.mamba_n_groups * config.mamba_d_state
        sizes = [config.mamba_d_ssm, config.mamba_d_ssm, state, state, config.mamba_n_heads]
        rows = np.repeat(np.array(config.ssm_multipliers, np.float32), sizes)
        return config.ssm_in_multiplier * rows.reshape(-1, *[1] * (array.ndim - 1))
    return next((np.float32(one) for part, one in parts.items() if f".{part}." in f".{name}"), np.float32(1))
