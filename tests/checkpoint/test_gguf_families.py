"""GGUF files of families, as `test_gguf_models` has others of: the numbers are the model's that it was made of."""

from __future__ import annotations

import pytest
import torch

from quire.checkpoint.gguf.families import FAMILIES
from quire.checkpoint.gguf.folder import gguf_folder
from quire.models.loader import load_model, load_structure
from tests.checkpoint import gguf_models, test_gguf_models
from tests.models import run_model, tiny

# (architecture, variant, general.architecture, settings instead of the variant's)
MODELS = [
    ("ArceeForCausalLM", "as_published", "arcee", {}),
    ("ArceeForCausalLM", "biases", "arcee", {}),
    ("BaichuanForCausalLM", "baichuan_7b", "baichuan", {}),
    ("BaichuanForCausalLM", "baichuan_13b", "baichuan", {"num_hidden_layers": 40}),
    ("BaichuanForCausalLM", "baichuan2_7b", "baichuan", {}),
    ("Cohere2ForCausalLM", "as_published", "cohere2", {}),
    ("Dots1ForCausalLM", "as_published", "dots1", {}),
    ("Dots1ForCausalLM", "groups", "dots1", {}),
    ("Ernie4_5ForCausalLM", "as_published", "ernie4_5", {}),
    ("Ernie4_5ForCausalLM", "rope_linear", "ernie4_5", {}),
    ("Ernie4_5_MoeForCausalLM", "as_published", "ernie4_5-moe", {}),
    ("Ernie4_5_MoeForCausalLM", "every_second_layer", "ernie4_5-moe", {}),
    ("Exaone4ForCausalLM", "window", "exaone4", {}),
    ("Exaone4ForCausalLM", "full", "exaone4", {}),
    ("ExaoneMoeForCausalLM", "window", "exaone-moe", {}),
    ("ExaoneMoeForCausalLM", "not_renormalised", "exaone-moe", {}),
    ("GlmForCausalLM", "as_published", "chatglm", {}),
    ("Glm4ForCausalLM", "as_published", "glm4", {}),
    ("Glm4MoeForCausalLM", "glm_4_5", "glm4moe", {}),
    ("Glm4MoeForCausalLM", "air", "glm4moe", {}),
    ("GPTBigCodeForCausalLM", "starcoder", "starcoder", {}),
    ("GptOssForCausalLM", "as_published", "gpt-oss", {}),
    ("GraniteMoeForCausalLM", "as_published", "granitemoe", {}),
    ("GraniteMoeSharedForCausalLM", "shared", "granitemoe", {}),
    ("HunYuanDenseV1ForCausalLM", "default_rope", "hunyuan-dense", {}),
    ("HunYuanMoEV1ForCausalLM", "mqa", "hunyuan-moe", {}),
    ("InternLM2ForCausalLM", "no_scaling", "internlm2", {}),
    ("InternLM2ForCausalLM", "rope_linear", "internlm2", {}),
    ("MiniCPMForCausalLM", "as_published", "minicpm", {}),
    ("MiniCPMForCausalLM", "gqa", "minicpm", {}),
    ("MiniCPM3ForCausalLM", "as_published", "minicpm3", {"dim_model_base": 256}),  # as the published model has it
    ("MiniMaxM2ForCausalLM", "as_published", "minimax-m2", {}),
    ("MptForCausalLM", "mpt_7b", "mpt", {}),
    ("MptForCausalLM", "clip_qkv", "mpt", {}),
    ("OlmoForCausalLM", "as_published", "olmo", {}),
    ("OlmoForCausalLM", "clip", "olmo", {}),
    ("Olmo3ForCausalLM", "as_published", "olmo2", {}),
    ("OlmoeForCausalLM", "as_published", "olmoe", {}),
    ("SeedOssForCausalLM", "as_published", "seed_oss", {}),
    ("SmolLM3ForCausalLM", "as_published", "smollm3", {}),
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(("architecture", "variant", "arch", "settings"), MODELS)
def test_a_file_of_floats_is_the_model(tmp_path, architecture, variant, arch, settings):
    folder = tiny.build(architecture, variant, tmp_path / "hf", **settings)
    path = gguf_models.convert(folder, arch, load_structure(folder).config, tmp_path / "model.gguf")
    ids = tiny.token_ids(30)
    expected = run_model.logits(load_model(folder), ids)
    logits = run_model.logits(load_model(gguf_folder(path)), ids)
    assert (logits - expected).abs().max() < 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_every_family_has_a_model():
    tested = {arch for _, _, arch, _ in [*MODELS, *test_gguf_models.FAMILIES]}
    assert tested == set(FAMILIES)
