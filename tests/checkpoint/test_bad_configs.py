"""Configurations that are refused, and the numbers in them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from quire.checkpoint.files import SINGLE
from quire.errors import CheckpointError, UnsupportedModelError
from quire.models import loader
from quire.models.loader import load_config, load_model
from tests.checkpoint.checkpoints import GPT2, LLAMA, OPT, QWEN2, edit_config, fails, logits_of
from tests.models import tiny

# What is refused: configurations


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff\xfe", "null"])
def test_a_broken_configuration(copy_of, text):
    path = copy_of()
    (path / "config.json").write_text(text, encoding="latin-1")
    fails(path, CheckpointError, str(path / "config.json"))


def test_no_configuration(copy_of):
    path = copy_of()
    (path / "config.json").unlink()
    fails(path, CheckpointError, str(path / "config.json"), "No such file")


def test_a_configuration_that_transformers_refuses(copy_of):
    fails(edit_config(copy_of(), hidden_size="many"), CheckpointError, "config.json", "hidden_size")


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        (LLAMA, {"sliding_window": 8}, "sliding_window=8"),
        (LLAMA, {"is_causal": False}, "is_causal=False"),
        (LLAMA, {"attention_chunk_size": 4}, "attention_chunk_size=4"),
        (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        (LLAMA, {"partial_rotary_factor": 0.5, "rope_parameters": ...}, "partial_rotary_factor=0.5"),
        (LLAMA, {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "'spiral'"),
        (LLAMA, {"rope_parameters": {"rope_type": ["linear"], "rope_theta": 1e4}}, "rope_type (rotary)=['linear']"),
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        (LLAMA, {"hidden_act": "prelu"}, "'prelu'"),
        (LLAMA, {"hidden_act": "thunk"}, "'thunk'"),
        (LLAMA, {"quantization_config": {"quant_method": "hqq", "bits": 4}}, "'hqq'"),
        (LLAMA, {"vision_config": {"hidden_size": 8}}, "vision_config"),
        (
            LLAMA,
            {"architectures": ["Kosmos2ForConditionalGeneration", "LlamaForCausalLM"]},
            "Kosmos2ForConditionalGeneration",
        ),
        (LLAMA, {"architectures": []}, "no architecture"),
        (LLAMA, {"architectures": ...}, "no architecture"),
        (LLAMA, {"architectures": ...}, "hf_overrides={'architectures': [...]}"),
        (LLAMA, {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "never runs code"),
        (LLAMA, {"model_type": "own"}, "model_type 'own' is unknown to transformers"),
        (LLAMA, {"model_type": ...}, "model_type None is unknown to transformers"),
        (
            QWEN2,
            {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1, "layer_types": ...},
            "sliding_window=0",
        ),
        (QWEN2, {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "layer_types"),
        (QWEN2, {"partial_rotary_factor": 0.5, "rope_parameters": ...}, "transformers' qwen2 turns whole heads"),
        (OPT, {"num_attention_heads": 5}, "num_attention_heads=5"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention=True"),
        (GPT2, {"n_head": 5}, "n_head=5"),
    ],
)
def test_configurations_that_are_not_served(copy_of, architecture, fields, named):
    variant = next(iter(tiny.TABLE[architecture][2]))
    fails(edit_config(copy_of(architecture, variant), **fields), UnsupportedModelError, named)


def test_a_window_that_is_not_used_is_none(copy_of, checkpoint):
    """Published Qwen2 checkpoints, written by transformers 4, have one (131072 or so) and use_sliding_window=false."""
    path = edit_config(
        copy_of(QWEN2, "gqa"), use_sliding_window=False, sliding_window=8, max_window_layers=1, layer_types=...,
        rope_parameters=..., rope_theta=10000.0,
    )  # fmt: skip
    assert torch.equal(logits_of(path), logits_of(checkpoint(QWEN2, "gqa")))


ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("architecture", "field", "values"),
    [
        *((LLAMA, name, (0, -8, "8", True)) for name in (
            "hidden_size", "vocab_size", "head_dim", "num_attention_heads", "num_key_value_heads",
            "num_hidden_layers", "intermediate_size", "max_position_embeddings",
        )),
        (LLAMA, "num_hidden_layers", (10**9,)),
        (LLAMA, "head_dim", (7,)),
        (LLAMA, "rms_norm_eps", (float("nan"), -1e-5, None, "x")),
        (LLAMA, "rope_theta", ("x", 0, -1.0, float("nan"))),
        (LLAMA, "factor", (0, -2.0, float("nan"), "x", 1e-5)),
        (LLAMA, "architectures", ([5], [["LlamaForCausalLM"]], {"a": 1}, "LlamaForCausalLM")),
        (LLAMA, "quantization_config", ("gptq", ["gptq"])),
        (LLAMA, "layer_types", (5, [["full_attention"]])),
        (LLAMA, "hidden_act", (["silu"], 5)),
        (LLAMA, "model_type", (["llama"],)),
        (LLAMA, "dtype", (["float32"], "float33", "Tensor", 5)),
        *((OPT, name, (0, -8, "8")) for name in ("ffn_dim", "word_embed_proj_dim", "num_hidden_layers")),
        *((GPT2, name, (0, -8, "8")) for name in ("n_embd", "n_head", "n_layer", "n_positions", "n_inner")),
        (GPT2, "layer_norm_epsilon", (float("nan"), -1e-5, None)),
    ],
)  # fmt: skip
def test_damaged_fields_are_refused_at_load(copy_of, architecture, field, values):
    """Not with a traceback, nor taken in and then of no use to any request."""
    path = copy_of(architecture, next(iter(tiny.TABLE[architecture][2])))
    original = (path / "config.json").read_text()
    for value in values:
        (path / "config.json").write_text(original)
        fields = {"rope_parameters": ROPE | {field: value}} if field in ROPE else {field: value}
        with pytest.raises((CheckpointError, UnsupportedModelError)):
            load_model(edit_config(path, **fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000: its files hold 30 tensors"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers=5000: its files hold 30 tensors"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers=1000000000: its files hold 30 tensors"),
        ({"hidden_size": 10**6}, "hidden_size=1000000: the longest side of its files' tensors is 97"),
        ({"qk_rope_head_dim": 10**9}, "qk_rope_head_dim=1000000000: the longest side"),
        ({"num_labels": 10**9}, "num_labels=1000000000: the longest side"),
        ({"kv_channels": 10**9}, "kv_channels=1000000000: the longest side"),
        ({"head_dim": 2**31 - 1}, "head_dim=2147483647: the longest side"),
        ({"a_number": 10**400}, "a_number has 401 digits"),
        ({"pad_token_id": 2**40}, "pad_token_id=1099511627776: it must be a token id"),
        ({"bos_token_id": -2}, "bos_token_id=-2: it must be a token id"),
        ({"eos_token_id": [2, "2"]}, "eos_token_id=[2, '2']: it must be a token id"),
        ({"outer": {"inner": {"depth": 10**6, "some_token_index": 5}}}, "outer.inner.depth=1000000"),
    ],
)
def test_numbers_are_compared_with_the_files_before_anything_is_built(copy_of, monkeypatch, fields, named):
    monkeypatch.setattr(loader, "load_config", lambda path: pytest.fail("nothing is to be built of it"))
    fails(edit_config(copy_of(), **fields), CheckpointError, "config.json", named)


@pytest.mark.parametrize("fields", [{"pad_token_id": -1}, {"pad_token_id": 100}, {"max_window_layers": 5000}])
def test_numbers_that_real_checkpoints_have(copy_of, fields):
    load_model(edit_config(copy_of(), **fields))


def test_files_without_tensors(copy_of):
    path = edit_config(copy_of(), dtype=..., torch_dtype=...)
    save_file({}, path / SINGLE)
    fails(path, CheckpointError, "no tensors")


def test_code_that_comes_with_a_checkpoint_does_not_run(copy_of):
    path = edit_config(copy_of(), auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    (path / "own.py").write_text("raise SystemExit('ran')")
    assert load_config(path).model_type == "llama"  # transformers' own class; the map is not followed
    load_model(path)
