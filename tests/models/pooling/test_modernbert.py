"""ModernBERT and EuroBERT beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import PoolingParams
from quire.errors import ContextLengthError, UnsupportedModelError
from tests.models import tiny
from tests.models.pooling.worlds import classes, engine, given, hidden, largest_error, prompts, saved

BARE = PoolingParams(use_activation=False)
SIZES = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "intermediate_size": 80, "max_position_embeddings": 70, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MODERN: dict[str, dict[str, Any]] = {
    "plain": {"local_attention": 16},
    "odd": {"hidden_size": 54, "num_attention_heads": 3, "intermediate_size": 31, "hidden_activation": "relu",
            "local_attention": 9},
    "biases": {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True,
               "classifier_activation": "silu", "classifier_pooling": "mean", "local_attention": 1},
    "all_local": {"layer_types": ["sliding_attention"] * 4, "local_attention": 5, "norm_eps": 1e-3},
    "no_local": {"layer_types": ["full_attention"] * 4, "num_attention_heads": 1, "classifier_pooling": "mean"},
    "wide": {"local_attention": 128, "hidden_activation": "gelu_new"},
    "yarn": {"local_attention": 12,
             "rope_parameters": {"full_attention": YARN,
                                 "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}},
}  # fmt: skip
EURO: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd": {"hidden_size": 54, "num_attention_heads": 3, "intermediate_size": 31, "hidden_act": "gelu",
            "classifier_pooling": "bos"},
    "grouped": {"num_key_value_heads": 2, "classifier_pooling": "mean", "rms_norm_eps": 1e-3},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "yarn": {"rope_parameters": YARN, "head_dim": 16, "classifier_pooling": "bos"},
}  # fmt: skip
FAMILIES = {"ModernBert": MODERN, "EuroBert": EURO}
CASES = [(family, variant) for family, variants in FAMILIES.items() for variant in variants]
LENGTHS = (1, 5, 17, 30, 64)


def made(family: str, ending: str, variant: str, **more: Any) -> Any:
    """transformers' model, every parameter drawn."""
    own = {"ModernBert": {"cls_token_id": 1, "sep_token_id": 2}, "EuroBert": {"mask_token_id": 3}}[family]
    wanted = {**SIZES, **own, **FAMILIES[family][variant], **more}
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**wanted)
    model = getattr(transformers, family + ending)(config)
    tiny.randomise(model, 1.25)
    return model


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_vectors(tmp_path: Path, family: str, variant: str) -> None:
    oracle = saved(made(family, "Model", variant), tmp_path)
    batch = prompts(300, LENGTHS)
    states = [hidden(oracle, ids) for ids in batch]
    llm = engine(tmp_path, pooler_config={"pooling_type": "CLS"}, max_num_batched_tokens=40)
    found = llm.embed(given(batch), use_tqdm=False)
    expected = [one[0] / one[0].norm() for one in states]
    assert largest_error([one.outputs.embedding for one in found], expected) < 1e-5
    tokens = llm.encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)
    assert largest_error([one.outputs.data for one in tokens], states) < 1e-5


@pytest.mark.parametrize("kind", ["dynamic", "linear"])
def test_prompts_longer_than_it_was_trained_with(tmp_path: Path, kind: str) -> None:
    """Rotation that stretches, of the layers that see all of a prompt; the others see a window of it."""
    full = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    plain = {"rope_type": "default", "rope_theta": 500.0}
    rope = {"full_attention": full, "sliding_attention": plain}
    model = made("ModernBert", "Model", "plain", rope_parameters=rope, max_position_embeddings=600)
    model.save_pretrained(tmp_path)
    batch = prompts(300, (5, 600, 601, 1100, 1200))
    expected = [hidden(transformers.AutoModel.from_pretrained(tmp_path).double(), ids) for ids in batch]  # each anew
    llm = engine(tmp_path, num_gpu_blocks_override=400)
    found = llm.encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)
    assert largest_error([one.outputs.data for one in found], expected) < 1e-5
    with pytest.raises(ContextLengthError):
        llm.encode(given(prompts(300, (1201,))), BARE, pooling_task="token_embed", use_tqdm=False)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_files_of_a_masked_model(tmp_path: Path, family: str) -> None:
    """Its head is left aside."""
    oracle = saved(made(family, "ForMaskedLM", "plain"), tmp_path).base_model
    batch = prompts(300, LENGTHS)
    tokens = engine(tmp_path).encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)
    assert largest_error([one.outputs.data for one in tokens], [hidden(oracle, ids) for ids in batch]) < 1e-5
    with pytest.raises(UnsupportedModelError, match="no head that gives classes"):
        engine(tmp_path, convert="classify")


@pytest.mark.parametrize(("family", "variant"), CASES)
@pytest.mark.parametrize("labels", [1, 3])
def test_classes_of_texts(tmp_path: Path, family: str, variant: str, labels: int) -> None:
    oracle = saved(made(family, "ForSequenceClassification", variant, num_labels=labels), tmp_path)
    batch = prompts(300, LENGTHS)
    expected = [classes(oracle, ids) for ids in batch]
    found = engine(tmp_path).classify(given(batch), pooling_params=BARE, use_tqdm=False)
    assert largest_error([one.outputs.probs for one in found], expected) < 1e-5


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_classes_of_tokens(tmp_path: Path, family: str, variant: str) -> None:
    oracle = saved(made(family, "ForTokenClassification", variant, num_labels=5), tmp_path)
    batch = prompts(300, LENGTHS)
    expected = [classes(oracle, ids) for ids in batch]
    found = engine(tmp_path).encode(given(batch), BARE, pooling_task="token_classify", use_tqdm=False)
    assert largest_error([one.outputs.data for one in found], expected) < 1e-5


def test_a_vector_of_a_classifiers_files(tmp_path: Path) -> None:
    """Heads are no vector's: a classifier's files give the vectors of the model below it."""
    oracle = saved(made("ModernBert", "ForSequenceClassification", "plain"), tmp_path).base_model
    batch = prompts(300, LENGTHS)
    tokens = engine(tmp_path, convert="embed").encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)
    assert largest_error([one.outputs.data for one in tokens], [hidden(oracle, ids) for ids in batch]) < 1e-5


@pytest.mark.parametrize("family", list(FAMILIES))
def test_tokens_that_do_not_see_later_ones(tmp_path: Path, family: str) -> None:
    """transformers hides later tokens from each where config.json has is_causal=true."""
    saved(made(family, "Model", "plain"), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "is_causal": True}))
    with pytest.raises(UnsupportedModelError, match="is_causal"):
        engine(tmp_path)
