"""BERT, RoBERTa, XLM-RoBERTa, DistilBERT and ELECTRA beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import PoolingParams
from quire.errors import RequestError, UnsupportedModelError
from tests.models.pooling.worlds import change, classes, engine, given, hidden, largest_error, prompts, saved

BARE = PoolingParams(use_activation=False)
SIZES = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 80, "max_position_embeddings": 70, "initializer_range": 0.3}  # fmt: skip
DISTIL = {"vocab_size": 300, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 80, "max_position_embeddings": 70,
          "initializer_range": 0.3}  # fmt: skip
# Odd sizes of heads, one head, one layer, other activations, types of tokens that there are not.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd": {"hidden_size": 45, "num_attention_heads": 3, "intermediate_size": 31, "hidden_act": "relu"},
    "one_head": {"num_attention_heads": 1, "num_hidden_layers": 1, "layer_norm_eps": 1e-5},
    "no_types": {"type_vocab_size": 1, "hidden_act": "gelu_new", "num_hidden_layers": 3},
}
OF_DISTIL: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd": {"dim": 45, "n_heads": 3, "hidden_dim": 31, "activation": "relu"},
    "one_head": {"n_heads": 1, "n_layers": 1},
    "sinusoidal": {"sinusoidal_pos_embds": True, "n_layers": 3},
}
# Narrower embeddings, too.
OF_ELECTRA = {
    "plain": {"embedding_size": 48},
    "odd": {**VARIANTS["odd"], "embedding_size": 21},
    "one_head": {**VARIANTS["one_head"], "embedding_size": 64},
    "no_types": {**VARIANTS["no_types"], "embedding_size": 48},
}
# Groups of layers that share their weights, and several layers in each.
OF_ALBERT = {
    "plain": {"embedding_size": 16},
    "odd": {**VARIANTS["odd"], "embedding_size": 21, "num_hidden_layers": 5, "num_hidden_groups": 3},
    "one_head": {**VARIANTS["one_head"], "embedding_size": 64},
    "no_types": {**VARIANTS["no_types"], "embedding_size": 48, "inner_group_num": 2, "num_hidden_groups": 2},
}
OF_MPNET = {**VARIANTS, "no_types": {"hidden_act": "gelu_new", "relative_attention_num_buckets": 40}}
FAMILIES = {
    "Bert": VARIANTS,
    "Roberta": VARIANTS,
    "XLMRoberta": VARIANTS,
    "Camembert": VARIANTS,
    "DistilBert": OF_DISTIL,
    "Electra": OF_ELECTRA,
    "Albert": OF_ALBERT,
    "MPNet": OF_MPNET,
}
CASES = [(family, variant) for family, variants in FAMILIES.items() for variant in variants]
LENGTHS = (1, 5, 17, 64, 30)


def config(family: str, variant: str, **more: Any) -> Any:
    base = DISTIL if family == "DistilBert" else SIZES
    made = {**base, **FAMILIES[family][variant], **more}
    return getattr(transformers, f"{family}Config")(**made)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_vectors(tmp_path: Path, family: str, variant: str) -> None:
    torch.manual_seed(1)
    oracle = saved(getattr(transformers, f"{family}Model")(config(family, variant)), tmp_path)
    batch = prompts(300, LENGTHS)
    states = [hidden(oracle, ids) for ids in batch]
    for kind, expected in (
        ("CLS", [one[0] for one in states]),
        ("LAST", [one[-1] for one in states]),
        ("MEAN", [one.mean(0) for one in states]),
    ):
        llm = engine(tmp_path, pooler_config={"pooling_type": kind})
        bare = llm.embed(given(batch), pooling_params=BARE, use_tqdm=False)
        assert largest_error([one.outputs.embedding for one in bare], expected) < 1e-5
        normal = llm.embed(given(batch), use_tqdm=False)
        expected = [one / one.norm() for one in expected]
        assert largest_error([one.outputs.embedding for one in normal], expected) < 1e-5
    tokens = llm.encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)
    assert largest_error([one.outputs.data for one in tokens], states) < 1e-5


@pytest.mark.parametrize(("family", "variant"), CASES)
@pytest.mark.parametrize("labels", [1, 3])
def test_classes_of_texts(tmp_path: Path, family: str, variant: str, labels: int) -> None:
    torch.manual_seed(2)
    kind = getattr(transformers, f"{family}ForSequenceClassification")
    oracle = saved(kind(config(family, variant, num_labels=labels)), tmp_path)
    batch = prompts(300, LENGTHS)
    expected = [classes(oracle, ids) for ids in batch]
    llm = engine(tmp_path)
    bare = llm.classify(given(batch), pooling_params=BARE, use_tqdm=False)
    assert largest_error([one.outputs.probs for one in bare], expected) < 1e-5
    found = llm.classify(given(batch), use_tqdm=False)
    shares = [one.softmax(0) if labels > 1 else one.sigmoid() for one in expected]
    assert largest_error([one.outputs.probs for one in found], shares) < 1e-5


@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta", "DistilBert", "Electra", "Albert", "MPNet"])
def test_classes_of_tokens(tmp_path: Path, family: str) -> None:
    torch.manual_seed(3)
    kind = getattr(transformers, f"{family}ForTokenClassification")
    oracle = saved(kind(config(family, "plain", num_labels=5)), tmp_path)
    batch = prompts(300, LENGTHS)
    expected = [classes(oracle, ids) for ids in batch]
    llm = engine(tmp_path)
    found = llm.encode(given(batch), BARE, use_tqdm=False)
    assert largest_error([one.outputs.data for one in found], expected) < 1e-5
    with pytest.raises(RequestError, match="can token_classify"):  # no class is the whole text's
        llm.classify(given(batch), use_tqdm=False)


@pytest.mark.parametrize("field", ["is_decoder", "is_causal"])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert", "Electra", "Albert", "MPNet"])
def test_tokens_that_do_not_see_later_ones(tmp_path: Path, family: str, field: str) -> None:
    """Text encoders of image captions are such: transformers hides later tokens from each."""
    saved(getattr(transformers, f"{family}Model")(config(family, "plain")), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: True}))
    with pytest.raises(UnsupportedModelError, match=field):
        engine(tmp_path)


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta", "Camembert", "Bert"])
@pytest.mark.parametrize("padding", [0, 1, 7])
def test_padding_within_a_prompt(tmp_path: Path, family: str, padding: int) -> None:
    """A text can say "<pad>": no other token's position counts it in RoBERTa."""
    torch.manual_seed(4)
    kind = getattr(transformers, f"{family}Model")
    oracle = saved(kind(config(family, "plain", pad_token_id=padding)), tmp_path)
    plain = prompts(300, (5, 30))
    at = padding
    batch = [[at], [at, at, 20], [20, at, 21, at], [20, 21, at, at, 22, 23], *plain, [*plain[1][:9], at, *plain[1][9:]]]
    expected = [hidden(oracle, ids) for ids in batch]
    llm = engine(tmp_path)
    crowd = [one.outputs.data for one in llm.encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)]
    assert largest_error(crowd, expected) < 1e-5
    for ids, one in zip(batch, crowd, strict=True):
        alone = llm.encode(given([ids]), BARE, pooling_task="token_embed", use_tqdm=False)[0].outputs.data
        assert torch.equal(alone, one)


@pytest.mark.parametrize("family", ["Albert", "MPNet"])
def test_files_of_a_masked_model(tmp_path: Path, family: str) -> None:
    """Its head is left aside."""
    torch.manual_seed(5)
    oracle = saved(getattr(transformers, f"{family}ForMaskedLM")(config(family, "odd")), tmp_path).base_model
    batch = prompts(300, LENGTHS)
    tokens = engine(tmp_path).encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)
    assert largest_error([one.outputs.data for one in tokens], [hidden(oracle, ids) for ids in batch]) < 1e-5
    with pytest.raises(UnsupportedModelError, match="no head that gives classes"):
        engine(tmp_path, convert="classify")


def test_distances_that_share_a_bucket(tmp_path: Path) -> None:
    """Far tokens' scores get one number; padding's position is 1 whatever pad_token_id says."""
    torch.manual_seed(6)
    sizes = {"max_position_embeddings": 402, "pad_token_id": 9}
    oracle = saved(transformers.MPNetModel(config("MPNet", "plain", **sizes)), tmp_path)
    batch = prompts(300, (400, 129, 140, 257))
    batch[2][70:73] = [1, 9, 1]
    expected = [hidden(oracle, ids) for ids in batch]
    llm = engine(tmp_path, num_gpu_blocks_override=200)
    found = llm.encode(given(batch), BARE, pooling_task="token_embed", use_tqdm=False)
    assert largest_error([one.outputs.data for one in found], expected) < 1e-5
    with torch.no_grad():
        oracle.encoder.relative_attention_bias.weight.zero_()
    without = [hidden(oracle, ids) for ids in batch]
    assert all((one - other).abs().max() > 1e-2 for one, other in zip(expected, without, strict=True))


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("Albert", {"num_hidden_groups": 3}, "num_hidden_groups"),
        ("Albert", {"inner_group_num": 0}, "inner_group_num"),
        ("Albert", {"inner_group_num": 1 << 20}, "inner_group_num"),
        ("MPNet", {"relative_attention_num_buckets": 31}, "relative_attention_num_buckets"),
    ],
)
def test_configurations_that_are_no_good(tmp_path: Path, family: str, fields: dict[str, Any], named: str) -> None:
    saved(getattr(transformers, f"{family}Model")(config(family, "plain")), tmp_path)
    change(tmp_path, **fields)
    with pytest.raises(UnsupportedModelError, match=named):
        engine(tmp_path)
