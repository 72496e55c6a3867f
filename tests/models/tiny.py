"""Tiny random Hugging Face models, of the variants of their configurations that `rows` has.

`build(architecture, variant, directory)` saves one; the engine's parity tests use them too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models import rows

VOCAB = 97
# Longer than every length at which a rotary type below changes its frequencies.
PROMPT = 40


# The first architectures, which more tests go through: architecture -> (its configuration class, base settings, variant
# -> settings that replace them).
TABLE = {
    name: rows.entry(name) for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "OPTForCausalLM", "GPT2LMHeadModel")
}


def cases() -> list[tuple[str, str]]:
    """Every (architecture, variant) of `TABLE`."""
    return [(architecture, variant) for architecture, (_, _, table) in TABLE.items() for variant in table]


def make(architecture: str, variant: str, seed: int = 0, **settings: Any) -> Any:
    """Return the Hugging Face model of a variant, float32, in eval mode; `settings` replace the variant's."""
    config_class, base, table = rows.entry(architecture)
    # Copied: transformers writes into the rotary settings that it is given.
    wanted = {**base, **table[variant], **settings}
    wanted = {k: dict(v) if isinstance(v, dict) else v for k, v in wanted.items()}
    row = rows.all_rows()[architecture]
    torch.manual_seed(seed)
    if row.oracle:
        model = row.oracle(wanted).float().eval()
    else:
        config = getattr(transformers, config_class)(**wanted)
        kind = getattr(transformers, architecture)
        eager = {"attn_implementation": row.attention, "experts_implementation": "eager"}
        model = kind._from_config(config, **eager).float().eval()
    randomise(model, row.gain)
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
