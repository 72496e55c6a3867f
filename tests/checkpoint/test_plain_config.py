"""config.json read without transformers: every attribute is what transformers' object has, or transformers reads it."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from quire.checkpoint.plain_config import PlainConfig, read_plain
from scripts import plain_configs
from tests.models import tiny

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "models" / "published.json").read_text(encoding="utf-8")
)
PLAIN = [name for name, raw in PUBLISHED.items() if raw["model_type"] in plain_configs.MODEL_TYPES]
# Their rotary types are transformers' to read.
LEFT_TO_TRANSFORMERS = {
    "microsoft/Phi-3-mini-128k-instruct", "microsoft/Phi-3.5-mini-instruct", "microsoft/Phi-4-mini-instruct",
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
SIZES = {"vocab_size": 60_000, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}


def both(raw: dict[str, Any], folder: Path) -> tuple[PlainConfig | None, Any]:
    """What is read here, and by transformers."""
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    real = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return read_plain(folder, json.loads(json.dumps(raw))), real


def check_same(raw: dict[str, Any], folder: Path) -> PlainConfig:
    plain, real = both(raw, folder)
    assert plain is not None
    mine, theirs = vars(plain), vars(real)
    assert mine == theirs
    assert {name: type(value) for name, value in mine.items()} == {name: type(value) for name, value in theirs.items()}
    for name in (*type(real).attribute_map, "model_type", "attribute_map", "is_heterogeneous"):
        assert getattr(plain, name) == getattr(real, name)
    for name in ("rope_scaling", "head_dim", "num_key_value_heads", "sliding_window", "no such field"):
        assert getattr(plain, name, "none") == getattr(real, name, "none")
    assert type(plain).__name__ == type(real).__name__
    return plain


def test_the_table_is_what_the_installed_transformers_has() -> None:
    written = plain_configs.TABLE.read_text(encoding="utf-8")
    assert json.loads(written)["types"] == json.loads(plain_configs.text())["types"], "run scripts/plain_configs.py"
    assert json.loads(written) == json.loads(plain_configs.text())


@pytest.mark.parametrize("name", PLAIN)
def test_a_published_file(name: str, tmp_path: Path) -> None:
    if name in LEFT_TO_TRANSFORMERS:
        assert both(PUBLISHED[name], tmp_path)[0] is None
    else:
        check_same(PUBLISHED[name], tmp_path)


@pytest.mark.parametrize("kind", plain_configs.MODEL_TYPES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"torch_dtype": "bfloat16"},
        {"dtype": "float16", "torch_dtype": "bfloat16"},
        {"dtype": None, "torch_dtype": None},
        {"eos_token_id": [5, 7], "pad_token_id": None, "bos_token_id": None},
        {"tie_word_embeddings": True, "transformers_version": "4.31.0", "use_cache": False},
        {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "max_length": 7},  # of generation, which are dropped
        {"_name_or_path": "somebody/something", "auto_map": {"AutoConfig": "configuration.Config"}},
        {"some_unknown_field": [1, {"a": None}], "another": None, "quantization_config": {"quant_method": "gguf"}},
        {"architectures": ["A"], "id2label": None, "label2id": None, "problem_type": None},
        {"initializer_range": 0.5, "attention_dropout": 0, "return_dict": False, "output_hidden_states": True},
    ],
)
def test_fields_that_every_kind_may_have(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"vocab_size": 300_000} if kind == "gpt2" else {**SIZES, "vocab_size": 300_000}
    check_same({"model_type": kind, **sizes, **fields}, tmp_path)


ROTARY = [kind for kind in plain_configs.MODEL_TYPES if kind not in ("gpt2", "opt")]


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500_000},
        {"rope_theta": 500_000.0, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7.0},
        {"rope_parameters": None},
        {"rope_scaling": {"type": "default"}},
    ],
)
def test_rotary_fields_old_and_new(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    check_same({"model_type": kind, **SIZES, **fields}, tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in ROTARY if kind != "phi3"])
@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4}, "rope_theta": 1e6},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "max_position_embeddings": 8192},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "max_position_embeddings": 8192},
    ],
)
def test_scaled_rotations(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    check_same({"model_type": kind, **SIZES, **fields}, tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "llama", "head_dim": 32, "num_key_value_heads": 2},
        {"model_type": "llama", "head_dim": None, "num_key_value_heads": None},
        {"model_type": "mistral", "sliding_window": None, "head_dim": None},
        {"model_type": "mixtral", "num_local_experts": 4},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8, "num_key_value_heads": None},
        {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": None, "attention_bias": True},
        {"model_type": "gemma", "hidden_act": "gelu"},
        {"model_type": "opt", "word_embed_proj_dim": 32, "_remove_final_layer_norm": True},
    ],
)
def test_what_a_class_makes_of_its_fields(raw: dict[str, Any], tmp_path: Path) -> None:
    check_same({**SIZES, **raw}, tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "olmo"},
        {"hidden_size": "64"},
        {"hidden_size": 64.0},
        {"hidden_size": True},
        {"hidden_size": None},
        {"hidden_size": 65},  # no multiple of the heads
        {"rms_norm_eps": 1},
        {"num_attention_heads": 0},
        {"initializer_range": -1.0},
        {"eos_token_id": ["5"]},
        {"eos_token_id": 60_000},
        {"dtype": "torch.bfloat16"},
        {"dtype": "float8_e4m3fn"},
        {"dtype": {"text_config": "float16"}},
        {"head_dim": 7},
        {"layer_types": ["full_attention"] * 3},
        {"rope_theta": None},
        {"rope_theta": "10000"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},  # whose length is no longer than the model's
        {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_scaling": [2.0]},
        {"partial_rotary_factor": 0.5},
        {"per_layer_config": {"0": {"hidden_size": 32}}},
        {"attn_implementation": "eager"},
        {"_attn_implementation": "eager"},
        {"output_attentions": True},
        {"num_labels": 3},
        {"id2label": {"0": "a"}},
        {"name_or_path": "a"},
        {"to_dict": 1},
        {"text_config": {"model_type": "llama"}},
        {"an_object": {"model_type": "llama"}},
    ],
)
def test_what_is_not_certain_is_left_to_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    raw = {"model_type": "llama", **SIZES, "max_position_embeddings": 1024, **fields}
    assert read_plain(tmp_path, raw) is None


def test_a_configuration_can_be_copied_and_sent(tmp_path: Path) -> None:
    raw = {"model_type": "llama", **SIZES, "rope_theta": 5.0}
    plain = check_same(raw, tmp_path)
    for other in (copy.copy(plain), copy.deepcopy(plain)):
        assert vars(other) == vars(plain) and type(other) is type(plain)
    plain.some_field = 3
    assert plain.to_dict()["some_field"] == 3
    assert plain.get_text_config() is plain
    assert plain.rope_parameters == raw.get("rope_parameters", {"rope_theta": 5.0, "rope_type": "default"})
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = plain.absent
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(plain)  # its class is made on the spot


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param(None, marks=pytest.mark.slow),
        {"rope_type": "llama3", **LLAMA3},
        pytest.param({"rope_type": "linear", "factor": 2.0}, marks=pytest.mark.slow),
    ],
)
def test_a_llama_is_loaded_without_transformers_and_answers_the_same(tmp_path: Path, rope: Any) -> None:
    tiny.build("LlamaForCausalLM", next(iter(tiny.TABLE["LlamaForCausalLM"][2])), tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    if rope is not None:
        file.write_text(
            json.dumps({**raw, "max_position_embeddings": 2048, "rope_parameters": None, "rope_scaling": rope})
        )
    code = (
        "import json, sys\nfrom quire import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 26, "
        "**({'hf_overrides': {'use_cache': True}} if sys.argv[2:] else {}))\n"
        "found = sorted({'transformers', 'huggingface_hub', 'peft', 'torch._dynamo', 'sympy'} & set(sys.modules))\n"
        "params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, ignore_eos=True)\n"
        "output = llm.generate({'prompt_token_ids': [1, 2, 3]}, params)[0].outputs[0]\n"
        "print(json.dumps([found, output.token_ids, repr(output.logprobs)]))"
    )
    answers = []
    for more in ([], ["with transformers"]):
        line = [sys.executable, "-c", code, str(tmp_path), *more]
        answers.append(json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout))
    assert answers[0][0] == [] and "transformers" in answers[1][0]
    assert answers[0][1:] == answers[1][1:]


def test_dtypes_are_torchs(tmp_path: Path) -> None:
    plain, _ = both({"model_type": "llama", **SIZES, "torch_dtype": "bfloat16"}, tmp_path)
    assert plain is not None and plain.dtype is torch.bfloat16
