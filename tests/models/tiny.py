"""Tiny random Hugging Face models: one table of configuration variants for each architecture.

The families that came later have their tables in `rows`.

`build(architecture, variant, directory)` saves one, `cases()` lists them all; the engine's parity tests use
them too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models import rows

VOCAB = 97
# Longer than every length at which a rotary type below changes its frequencies.
PROMPT = 40


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


# head_dim of the Llama base is 8: four frequencies.
_LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.5, 2.0, 3.0, 4.5]}
_ROPE: dict[str, dict[str, Any]] = {
    "rope_default": _rope("default", rope_theta=500.0),
    "rope_linear": _rope("linear", factor=3.0),
    "rope_dynamic": _rope("dynamic", factor=4.0) | {"max_position_embeddings": 24},
    "rope_yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "rope_yarn_mscale": _rope(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        mscale=0.7,
        mscale_all_dim=1.2,
        truncate=False,
    ),
    "rope_yarn_attention_factor": _rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.3),
    "rope_longrope": _rope("longrope", factor=4.0, original_max_position_embeddings=24, **_LONGROPE),
    "rope_longrope_short": _rope("longrope", factor=2.0, original_max_position_embeddings=64, **_LONGROPE),
    "rope_llama3": _rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "rope_proportional": _rope("proportional", partial_rotary_factor=0.5),
}
# A type that a later transformers adds must fail a test here until it has a variant.
ROPE_TYPES_WITHOUT_VARIANT = set(ROPE_INIT_FUNCTIONS) - {v["rope_parameters"]["rope_type"] for v in _ROPE.values()}

_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_OPT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 32,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

# architecture -> (its configuration class, base settings, variant -> settings that replace them)
TABLE: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "LlamaForCausalLM": (
        "LlamaConfig",
        _LLAMA,
        {
            "gqa": {},
            "mqa": {"num_key_value_heads": 1},
            "mha": {"num_key_value_heads": 4},
            "head_dim_apart": {"head_dim": 16},
            "attention_bias": {"attention_bias": True},
            "mlp_bias": {"mlp_bias": True},
            "tied": {"tie_word_embeddings": True},
            "gelu": {"hidden_act": "gelu"},
            "gelu_tanh": {"hidden_act": "gelu_pytorch_tanh"},
            "quick_gelu": {"hidden_act": "quick_gelu"},
            "relu": {"hidden_act": "relu"},
            "gelu_10": {"hidden_act": "gelu_10"},  # no kernel has it
            "eps": {"rms_norm_eps": 1e-2},
            "odd_sizes": {"hidden_size": 36, "intermediate_size": 51, "head_dim": 10, "vocab_size": 101},
            **_ROPE,
        },
    ),
    "Qwen2ForCausalLM": (
        "Qwen2Config",
        _LLAMA,
        {
            "gqa": {},
            "mqa": {"num_key_value_heads": 1},
            "mha": {"num_key_value_heads": 4},
            "tied": {"tie_word_embeddings": True},
            "eps": {"rms_norm_eps": 1e-2},
            "head_dim_apart": {"head_dim": 16},
            "fields_of_llama": {"attention_bias": False, "mlp_bias": True},  # without effect
            "windows": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            "odd_sizes": {
                "hidden_size": 36,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "intermediate_size": 51,
                "vocab_size": 101,
            },
            **{name: _ROPE[name] for name in ("rope_default", "rope_yarn", "rope_dynamic")},
        },
    ),
    "OPTForCausalLM": (
        "OPTConfig",
        _OPT,
        {
            "pre_norm": {},
            "post_norm": {"do_layer_norm_before": False},
            "projected": {"word_embed_proj_dim": 24},
            "projected_post_norm": {"word_embed_proj_dim": 24, "do_layer_norm_before": False},
            "no_bias": {"enable_bias": False},
            "no_affine": {"layer_norm_elementwise_affine": False},
            "no_final_norm": {"_remove_final_layer_norm": True},
            "gelu": {"activation_function": "gelu"},
            "relu6": {"activation_function": "relu6"},
            "untied": {"tie_word_embeddings": False},
            "one_head": {"num_attention_heads": 1},
        },
    ),
    "GPT2LMHeadModel": (
        "GPT2Config",
        _GPT2,
        {
            "gelu_new": {},
            "relu": {"activation_function": "relu"},
            "gelu_fast": {"activation_function": "gelu_fast"},
            "leaky_relu": {"activation_function": "leaky_relu"},
            "n_inner": {"n_inner": 52},
            "unscaled": {"scale_attn_weights": False},
            "inverse_layer_idx": {"scale_attn_by_inverse_layer_idx": True},
            "reorder_and_upcast": {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
            "untied": {"tie_word_embeddings": False},
            "eps": {"layer_norm_epsilon": 1e-2},
            "one_head": {"n_head": 1},
        },
    ),
}


# Standard deviation of a projection's result for an input of one. Learned positions need more to be
# outweighed.
GAIN = {"LlamaForCausalLM": 2.5, "Qwen2ForCausalLM": 2.5, "OPTForCausalLM": 4.0, "GPT2LMHeadModel": 4.0}


def cases() -> list[tuple[str, str]]:
    """Every (architecture, variant)."""
    return [(architecture, variant) for architecture, (_, _, table) in TABLE.items() for variant in table]


def make(architecture: str, variant: str, seed: int = 0, **settings: Any) -> Any:
    """Return the Hugging Face model of a variant, float32, in eval mode; `settings` replace the variant's."""
    config_class, base, table = TABLE.get(architecture) or rows.entry(architecture)
    # Copied: transformers writes into the rotary settings that it is given.
    wanted = {**base, **table[variant], **settings}
    wanted = {k: dict(v) if isinstance(v, dict) else v for k, v in wanted.items()}
    row = rows.all_rows().get(architecture)
    torch.manual_seed(seed)
    if row and row.oracle:
        model = row.oracle(wanted).float().eval()
    else:
        config = getattr(transformers, config_class)(**wanted)
        kind = getattr(transformers, architecture)
        eager = {"attn_implementation": row.attention if row else "eager", "experts_implementation": "eager"}
        model = kind._from_config(config, **eager).float().eval()
    randomise(model, row.gain if row else GAIN.get(architecture, 2.5))
    return model


def randomise(model: Any, gain: float = 2.5) -> None:
    """Draw every parameter: a model that forgets one looks wrong, and greedy tokens do not settle on one.

    Biases at zero and norms at one would not show; weights as small as for training leave attention without
    effect.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif any(part in name for part in ("embed_", "wte", "wpe", "lm_head")):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, gain / model.config.hidden_size**0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # of routers' scores, which are from 0 to 1
                buffer.uniform_(-0.2, 0.2)


def save(model: Any, directory: str | Path, **settings: Any) -> Path:
    model.save_pretrained(directory, **settings)
    return Path(directory)


def build(architecture: str, variant: str, directory: str | Path, seed: int = 0, **settings: Any) -> Path:
    """Save a variant's model to `directory` and return that; `settings` replace the variant's."""
    return save(make(architecture, variant, seed, **settings), directory)


def token_ids(length: int = PROMPT, vocab: int = VOCAB, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()
