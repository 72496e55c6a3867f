"""What published files call tensors where the model has another name, and what they hold that is no weight."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.models.loader import load_model
from tests.models import run_model, tiny

# architecture -> (renames from transformers' names to the files', further tensors)
STORED: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "GPTNeoXForCausalLM": (
        {r"lm_head\.": "embed_out."},
        ("gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.masked_bias",
         "gpt_neox.layers.2.attention.rotary_emb.inv_freq"),
    ),
    "PhiForCausalLM": ({}, ("model.layers.0.self_attn.rotary_emb.inv_freq",)),
    "GPTBigCodeForCausalLM": ({r"transformer\.": ""}, ("transformer.h.0.attn.bias", "transformer.bias")),
    "GPTJForCausalLM": ({}, ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias")),
    "CodeGenForCausalLM": ({}, ("transformer.h.0.attn.causal_mask",)),
    "FalconForCausalLM": ({}, ("transformer.h.0.self_attention.rotary.inv_freq",)),
    "BloomForCausalLM": ({r"transformer\.": ""}, ()),
    "MptForCausalLM": ({r"transformer\.": ""}, ()),
    "BaichuanForCausalLM": ({}, ("model.layers.0.self_attn.rotary_emb.inv_freq",)),
    "ChatGLMModel": ({}, ("transformer.rotary_pos_emb.inv_freq",)),
    "Ernie4_5_MoeForCausalLM": (
        {}, ("model.mtp_block.0.self_attn.q_proj.weight", "model.mtp_emb_norm.0.weight", "mtp_linear_proj.0.weight"),
    ),
}  # fmt: skip
FIRST = {"GPTNeoXForCausalLM": "pythia", "PhiForCausalLM": "phi_1", "GPTBigCodeForCausalLM": "starcoder",
         "GPTJForCausalLM": "published", "CodeGenForCausalLM": "published", "FalconForCausalLM": "falcon_7b",
         "BloomForCausalLM": "bloom", "MptForCausalLM": "mpt_7b", "BaichuanForCausalLM": "baichuan_7b",
         "ChatGLMModel": "chatglm3_6b", "Ernie4_5_MoeForCausalLM": "as_published"}  # fmt: skip


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("architecture", STORED)
def test_they_are_found(architecture: str, tmp_path: Path) -> None:
    path = tiny.build(architecture, FIRST[architecture], tmp_path)
    ids = tiny.token_ids()
    want = run_model.logits(load_model(path), ids)
    renames, further = STORED[architecture]
    weights = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        for old, new in renames.items():
            name = re.sub(f"^{old}", new, name)
        weights[name] = tensor
    assert all(any(name.startswith(new) for name in weights) for new in renames.values())
    weights |= {name: torch.ones(4) for name in further}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(run_model.logits(load_model(path), ids), want)


def test_adapters_know_a_head_by_its_older_name(tmp_path: Path) -> None:
    model = load_model(tiny.build("GPTNeoXForCausalLM", "pythia", tmp_path))
    assert model.published_names("lm_head") == ("embed_out", "lm_head")
