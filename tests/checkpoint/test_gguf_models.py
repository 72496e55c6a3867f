"""GGUF files of each family: the numbers are the model's that the file was made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.checkpoint.gguf.folder import gguf_folder
from quire.models.loader import load_model
from tests.checkpoint import gguf_models
from tests.models import run_model, tiny

# (architecture, variant, general.architecture, settings instead of the variant's)
FAMILIES = [
    ("LlamaForCausalLM", "gqa", "llama", {}),
    ("LlamaForCausalLM", "tied", "llama", {}),
    ("LlamaForCausalLM", "rope_llama3", "llama", {}),
    ("LlamaForCausalLM", "attention_bias", "llama", {}),
    ("LlamaForCausalLM", "head_dim_apart", "llama", {}),
    ("MixtralForCausalLM", "as_published", "llama", {}),
    ("Qwen2ForCausalLM", "gqa", "qwen2", {}),
    ("Qwen2MoeForCausalLM", "as_published", "qwen2moe", {}),
    ("Qwen3ForCausalLM", "head_dim_apart", "qwen3", {}),
    ("Qwen3MoeForCausalLM", "as_published", "qwen3moe", {}),
    ("GemmaForCausalLM", "mqa", "gemma", {}),
    ("Gemma2ForCausalLM", "as_published", "gemma2", {"query_pre_attn_scalar": 16}),
    ("Gemma3ForCausalLM", "as_published", "gemma3", {}),
    ("PhiForCausalLM", "phi_2", "phi2", {}),
    ("Phi3ForCausalLM", "window", "phi3", {}),
    ("Phi3ForCausalLM", "longrope_never_long", "phi3", {}),
    ("FalconForCausalLM", "falcon_7b", "falcon", {}),
    ("FalconForCausalLM", "falcon_40b", "falcon", {}),
    ("FalconForCausalLM", "falcon2_11b", "falcon", {}),
    ("GPT2LMHeadModel", "gelu_new", "gpt2", {}),
    ("GPTNeoXForCausalLM", "pythia", "gptneox", {}),
    ("Starcoder2ForCausalLM", "full", "starcoder2", {}),
    ("StableLmForCausalLM", "as_published", "stablelm", {}),
    ("StableLmForCausalLM", "parallel", "stablelm", {}),
    ("Olmo2ForCausalLM", "as_published", "olmo2", {}),
    ("CohereForCausalLM", "as_published", "command-r", {}),
    ("CohereForCausalLM", "qk_norm", "command-r", {}),
    ("GraniteForCausalLM", "as_published", "granite", {}),
    ("NemotronForCausalLM", "as_published", "nemotron", {}),
    ("BloomForCausalLM", "bloom", "bloom", {}),
    ("DeepseekV2ForCausalLM", "lite", "deepseek2", {}),
    ("DeepseekV3ForCausalLM", "v3", "deepseek2", {}),
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


def build(tmp_path: Path, architecture: str, variant: str, **settings) -> tuple[Path, object]:
    model = tiny.make(architecture, variant, **settings)
    return tiny.save(model, tmp_path / "hf"), model.config


@pytest.mark.parametrize(("architecture", "variant", "arch", "settings"), FAMILIES)
def test_a_file_of_floats_is_the_model(tmp_path, architecture, variant, arch, settings):
    folder, config = build(tmp_path, architecture, variant, **settings)
    path = gguf_models.convert(folder, arch, config, tmp_path / "model.gguf")
    ids = tiny.token_ids(30)
    expected = run_model.logits(load_model(folder), ids)
    logits = run_model.logits(load_model(gguf_folder(path)), ids)
    assert (logits - expected).abs().max() < 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
