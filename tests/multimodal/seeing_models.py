"""LLaVAs of which tokens see one another and features have levels, as a plug-in that is installed; and checkpoints.

`SeeingLlava` sets an image between two tokens, in two ranges of tokens that see one another, and adds two further rows
to each feature's. Of `WholeLlava`, all tokens of a prompt see one another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import torch
import transformers

from quire.models.llava import LlavaForConditionalGeneration
from quire.types import MediaLayout
from tests.multimodal.families import FAMILIES
from tests.multimodal.families.family import IMAGE, SIDE
from tests.multimodal.tiny_vision import build, randomise

FRAME = (11, *(IMAGE,) * 9, 12)
SPANS = ((1, 5), (5, 10))  # of the frame; longer than a block, and apart from its ends
WINDOW = 12
S, F = "sliding_attention", "full_attention"
TEXT = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "sliding_window": WINDOW, "layer_types": [S, F, S], "query_pre_attn_scalar": 8,
}  # fmt: skip


class SeeingLlava(LlavaForConditionalGeneration):
    feature_levels: ClassVar = 2

    def image_layout(self, inputs):
        assert super().image_layout(inputs).tokens == 9
        return MediaLayout(len(FRAME), ids=FRAME, mask=tuple(token == IMAGE for token in FRAME), sees=SPANS)

    def planned_layout(self, size, final):
        return None

    def encode(self, inputs):
        features = super().encode(inputs)
        return torch.cat([features, features.flip(0), 0.5 * features.roll(1, 1)], 1)


class WholeLlava(LlavaForConditionalGeneration):
    prompt_sees: ClassVar = True


NAMES = {"seeing": "SeeingLlava", "whole": "WholeLlava"}


def install(site: Path) -> str:
    """Write the metadata of a package that brings the classes, to a folder that is to stand on the path."""
    info = site / "quire_seeing-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quire-seeing\nVersion: 1.0\n")
    rows = [f"{name} = {__name__}:{name} [image]\n" for name in NAMES.values()]
    (info / "entry_points.txt").write_text("[quire.models]\n" + "".join(rows))
    return str(site)


def make(path: Path, kind: str, variant: str = "clip") -> Path:
    """Save a tiny random checkpoint: `whole` with Llama's text model, `seeing` with Gemma 3's, that has windows.

    variant: of LLaVA's, for another text model.
    """
    family = FAMILIES["LlavaForConditionalGeneration"]
    config = family.config(family.variants[variant])
    if kind == "seeing" and variant == "clip":
        config.text_config = transformers.Gemma3TextConfig(**TEXT)
    torch.manual_seed(3)
    model = transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation="eager").float().eval()
    randomise(model.model.language_model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "language_model" not in name:
                parameter.normal_(0.0, 0.5 if parameter.dim() == 1 else (1.5 / parameter[0].numel()) ** 0.5)
    assert config.vision_config.image_size == SIDE
    build("LlavaForConditionalGeneration", "clip", path, model)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"architectures": [NAMES[kind]]}))
    return path
