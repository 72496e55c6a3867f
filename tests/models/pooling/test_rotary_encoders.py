"""GTE, Nomic Embed and Jina Embeddings 3 beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import PoolingParams
from quire.errors import UnsupportedModelError
from tests.models import tiny
from tests.models.pooling.worlds import change, classes, engine, given, hidden, largest_error, prompts, saved

BARE = PoolingParams(use_activation=False)
SIZES = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 80, "max_position_embeddings": 70, "pad_token_id": 0}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd": {"hidden_size": 54, "num_attention_heads": 3, "intermediate_size": 31, "hidden_act": "relu"},
    "one_head": {"num_attention_heads": 1, "num_hidden_layers": 1, "layer_norm_eps": 1e-3, "type_vocab_size": 3},
    "tanh": {"hidden_act": "gelu_new", "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                 "original_max_position_embeddings": 16}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
                "max_position_embeddings": 24},
}  # fmt: skip
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "Gte": {"no_types": {"type_vocab_size": 0}},
    "NomicBert": {"head_dim": {"head_dim": 16}},
    "JinaEmbeddingsV3": {},
}
CASES = [(family, variant) for family, own in OWN.items() for variant in [*VARIANTS, *own]]
LENGTHS = (1, 5, 17, 30, 64)  # ascending: transformers keeps the frequencies of the longest prompt that it has seen


def made(family: str, ending: str, variant: str, **more: Any) -> Any:
    """transformers' model, every parameter drawn."""
    wanted = {**SIZES, **{**VARIANTS, **OWN[family]}[variant], **more}
    wanted = {key: dict(value) if isinstance(value, dict) else value for key, value in wanted.items()}
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**wanted)
    model = getattr(transformers, family + ending)(config)
    tiny.randomise(model, 1.5)
    return model


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_vectors(tmp_path: Path, family: str, variant: str) -> None:
    oracle = saved(made(family, "Model", variant), tmp_path)
    batch = prompts(300, LENGTHS)
    states = [hidden(oracle, ids) for ids in batch]
    llm = engine(tmp_path, pooler_config={"pooling_type": "MEAN"}, max_num_batched_tokens=40)
    found = llm.embed(given(batch), use_tqdm=False)
    expected = [one.mean(0) / one.mean(0).norm() for one in states]
    assert largest_error([one.outputs.embedding for one in found], expected) < 1e-5
    tokens = llm.encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)
    assert largest_error([one.outputs.data for one in tokens], states) < 1e-5


@pytest.mark.parametrize("family", list(OWN))
@pytest.mark.parametrize("original", [True, False])
def test_files_of_a_masked_model(tmp_path: Path, family: str, original: bool) -> None:
    """Its head is left aside. Names are those that were published first, or transformers' own."""
    model = made(family, "ForMaskedLM", "plain").eval()
    model.save_pretrained(tmp_path, save_original_format=original)
    oracle = model.base_model.double()
    batch = prompts(300, LENGTHS)
    tokens = engine(tmp_path).encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)
    assert largest_error([one.outputs.data for one in tokens], [hidden(oracle, ids) for ids in batch]) < 1e-5


@pytest.mark.parametrize(("family", "variant"), CASES)
@pytest.mark.parametrize("labels", [1, 3])
def test_classes_of_texts(tmp_path: Path, family: str, variant: str, labels: int) -> None:
    oracle = saved(made(family, "ForSequenceClassification", variant, num_labels=labels), tmp_path)
    batch = prompts(300, LENGTHS)
    expected = [classes(oracle, ids) for ids in batch]
    found = engine(tmp_path).classify(given(batch), pooling_params=BARE, use_tqdm=False)
    assert largest_error([one.outputs.probs for one in found], expected) < 1e-5


@pytest.mark.parametrize("family", list(OWN))
def test_classes_of_tokens(tmp_path: Path, family: str) -> None:
    oracle = saved(made(family, "ForTokenClassification", "plain", num_labels=5), tmp_path)
    batch = prompts(300, LENGTHS)
    expected = [classes(oracle, ids) for ids in batch]
    found = engine(tmp_path).encode(given(batch), BARE, pooling_task="token_classify", use_tqdm=False)
    assert largest_error([one.outputs.data for one in found], expected) < 1e-5


# What nomic-embed-text-v1.5's config.json has beside transformers' names, of a tiny model's sizes.
NOMIC = {
    "activation_function": "swiglu", "attn_pdrop": 0.0, "causal": False, "dense_seq_output": True,
    "fused_bias_fc": True, "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 48, "n_head": 4, "n_inner": 80, "n_layer": 2, "n_positions": 8192, "pad_vocab_size_multiple": 64,
    "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False, "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "summary_activation": None,
    "use_flash_attn": True, "use_rms_norm": False, "use_xentropy": True,
}  # fmt: skip


def test_fields_that_nomic_has(tmp_path: Path) -> None:
    oracle = saved(made("NomicBert", "Model", "plain"), tmp_path)
    change(tmp_path, **NOMIC)
    batch = prompts(300, LENGTHS)
    tokens = engine(tmp_path).encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)
    assert largest_error([one.outputs.data for one in tokens], [hidden(oracle, ids) for ids in batch]) < 1e-5


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_embd", 64), ("n_layer", 3), ("n_inner", 31), ("rotary_emb_base", 10000), ("qkv_proj_bias", True),
     ("num_experts", 8), ("prenorm", True), ("rotary_emb_fraction", 0.5), ("activation_function", "gelu")],
)  # fmt: skip
def test_fields_of_nomic_that_transformers_does_not_read(tmp_path: Path, field: str, value: Any) -> None:
    saved(made("NomicBert", "Model", "plain"), tmp_path)
    change(tmp_path, **{**NOMIC, field: value})
    with pytest.raises(UnsupportedModelError, match=field):
        engine(tmp_path)


def test_jina_with_code_of_its_own(tmp_path: Path) -> None:
    """What JinaAI published first: called as XLM-RoBERTa, and another model."""
    saved(transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**SIZES)), tmp_path)
    change(tmp_path, lora_adaptations=["retrieval.query", "retrieval.passage"])
    with pytest.raises(UnsupportedModelError, match="lora_adaptations"):
        engine(tmp_path)


@pytest.mark.parametrize("family", list(OWN))
def test_tokens_that_do_not_see_later_ones(tmp_path: Path, family: str) -> None:
    """transformers hides later tokens from each where config.json has is_causal=true."""
    saved(made(family, "Model", "plain"), tmp_path)
    change(tmp_path, is_causal=True)
    with pytest.raises(UnsupportedModelError, match="is_causal"):
        engine(tmp_path)
