"""A model class whose layers have windows, as a plug-in that is installed; and tiny checkpoints of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import torch
from transformers import Qwen2Config
from transformers import Qwen2ForCausalLM as Oracle

from quire.models.decoder import WINDOW_FIELDS
from quire.models.qwen2 import Qwen2ForCausalLM
from tests.platform.conftest import save_tokenizer

WINDOW = 11
S, F = "sliding_attention", "full_attention"
# Two groups with the window beside a full one; a single group, which has the window; a layer that stands alone.
LAYERS = {"mixed": (S, S, F, S, S, F), "uniform": (S, S), "odd": (F, S, S)}


class WindowedForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with windows in the layers that layer_types calls sliding."""

    supported_fields: ClassVar = Qwen2ForCausalLM.supported_fields | WINDOW_FIELDS


def install(site: Path) -> Path:
    """Write the metadata of a package that brings the class, to a folder that is to stand on the path."""
    info = site / "quire_windowed-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quire-windowed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[quire.models]\nWindowedForCausalLM = {__name__}:WindowedForCausalLM\n")
    return site


def make(path: Path, kind: str, dtype: torch.dtype = torch.float32) -> Oracle:
    """Save a tiny random checkpoint with the layers of a kind; returns transformers' model of it."""
    torch.manual_seed(7)
    layers = LAYERS[kind]
    config = Qwen2Config(
        vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=len(layers), num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.25, bos_token_id=1, eos_token_id=2,
        use_sliding_window=True, sliding_window=WINDOW, layer_types=list(layers), attn_implementation="eager",
    )  # fmt: skip
    model = Oracle(config).to(dtype).eval()
    model.save_pretrained(path)
    save_tokenizer(path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"architectures": ["WindowedForCausalLM"]}))
    return model
