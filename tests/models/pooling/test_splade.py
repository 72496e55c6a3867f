"""SPLADE: what a masked model says of the vocabulary, beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import PoolingParams
from quire.errors import RequestError, UnsupportedModelError
from tests.models import tiny
from tests.models.pooling.test_bert import config
from tests.models.pooling.tokenizers_made import SIZE, saved_tokenizer, texts
from tests.models.pooling.worlds import classes, engine, given, largest_error, prompts, saved

CASES = [(family, variant) for family in ("Bert", "DistilBert") for variant in ("plain", "odd", "one_head")]
CASES += [("Bert", "no_types"), ("DistilBert", "sinusoidal")]
LENGTHS = (1, 5, 17, 64, 30)
NEW = {"transformer_task": "fill-mask", "module_output_name": "token_embeddings",
       "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}}  # fmt: skip


def listed(path: Path, first: str = "MLMTransformer", **pooling: Any) -> None:
    """sentence-transformers' files; with "Transformer" as its newer versions write them."""
    kinds = (("", f"sentence_transformers.sparse_encoder.models.{first}"),
             ("1_SpladePooling", "sentence_transformers.sparse_encoder.models.SpladePooling"))  # fmt: skip
    modules = [
        {"idx": number, "name": str(number), "path": folder, "type": kind}
        for number, (folder, kind) in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_SpladePooling").mkdir(exist_ok=True)
    settings = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": None, **pooling}
    (path / "1_SpladePooling" / "config.json").write_text(json.dumps(settings))
    if first == "Transformer":
        (path / "sentence_bert_config.json").write_text(json.dumps(NEW))


def made(family: str, variant: str, path: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForMaskedLM")(config(family, variant, **more))
    tiny.randomise(model, 1.25)
    return saved(model, path, dtype)


def words(model: Any, ids: list[int]) -> torch.Tensor:
    return classes(model, ids).relu().log1p().amax(0)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_vectors(tmp_path: Path, family: str, variant: str) -> None:
    oracle = made(family, variant, tmp_path)
    listed(tmp_path, "Transformer" if variant == "odd" else "MLMTransformer")
    batch = prompts(300, LENGTHS)
    expected = [words(oracle, ids) for ids in batch]
    assert all(0 < int((one > 0).sum()) < 300 for one in expected[:2])
    found = engine(tmp_path).embed(given(batch), use_tqdm=False)
    assert largest_error([one.outputs.embedding for one in found], expected) < 1e-5


def test_weights_that_are_not_tied(tmp_path: Path) -> None:
    oracle = made("Bert", "plain", tmp_path, tie_word_embeddings=False)
    listed(tmp_path)
    batch = prompts(300, LENGTHS)
    found = engine(tmp_path).embed(given(batch), use_tqdm=False)
    assert largest_error([one.outputs.embedding for one in found], [words(oracle, ids) for ids in batch]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_alone_and_in_a_crowd(tmp_path: Path, dtype: torch.dtype) -> None:
    made("Bert", "odd", tmp_path, dtype, max_position_embeddings=400)
    listed(tmp_path)
    batch = prompts(300, (1, 2, 7, 300, 31, 64, 257, 5))  # more rows than the head is asked for at a time
    alone = engine(tmp_path, max_num_seqs=1)
    expected = [alone.encode(given([ids]), use_tqdm=False)[0].outputs.data for ids in batch]
    crowd = engine(tmp_path, max_num_batched_tokens=401, num_gpu_blocks_override=400)
    for some, wanted in ((batch, expected), (batch[::-1], expected[::-1])):
        assert all(map(torch.equal, [one.outputs.data for one in crowd.encode(given(some), use_tqdm=False)], wanted))


def test_bfloat16_is_as_close_to_float64_as_transformers_is(tmp_path: Path) -> None:
    made("Bert", "plain", tmp_path, torch.bfloat16)
    listed(tmp_path)
    kind = transformers.BertForMaskedLM
    theirs = kind.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    wide = kind.from_pretrained(tmp_path, dtype=torch.float32).double().eval()
    batch = [ids for seed in range(3) for ids in prompts(300, LENGTHS, seed)]
    exact = [words(wide, ids) for ids in batch]
    found = [one.outputs.data for one in engine(tmp_path).encode(given(batch), use_tqdm=False)]
    ours, bound = (
        float(torch.cat([a.double() - b for a, b in zip(rows, exact, strict=True)]).square().mean().sqrt())
        for rows in (found, [words(theirs, ids) for ids in batch])
    )
    assert ours <= 1.1 * bound


def test_scores_are_products(tmp_path: Path) -> None:
    oracle = made("Bert", "plain", tmp_path, vocab_size=SIZE)
    listed(tmp_path)
    tokenizer, said = saved_tokenizer(tmp_path), texts(5, seed=3)
    rows = [words(oracle, tokenizer(text)["input_ids"]) for text in said]
    llm = engine(tmp_path, skip_tokenizer_init=False)
    found = [one.outputs.score for one in llm.score(said[0], said[1:], use_tqdm=False)]
    assert largest_error([found], [torch.stack([rows[0] @ one for one in rows[1:]])]) < 1e-5


def test_what_is_refused(tmp_path: Path) -> None:
    made("Bert", "plain", tmp_path)
    listed(tmp_path)
    llm = engine(tmp_path)
    with pytest.raises(RequestError, match="can embed"):
        llm.encode(given([[5, 6]]), pooling_task="token_embed", use_tqdm=False)
    with pytest.raises(RequestError, match="dimensions"):
        llm.embed(given([[5, 6]]), pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
    for wrong in ({"pooling_strategy": "sum"}, {"activation_function": "log1p_relu"}):
        listed(tmp_path, **wrong)
        with pytest.raises(UnsupportedModelError, match=next(iter(wrong))):
            engine(tmp_path)
    listed(tmp_path)
    file = tmp_path / "modules.json"
    first, second = json.loads(file.read_text())
    for modules in ([first], [first, second, {**second, "type": "a.Normalize", "path": "2"}], [second, first]):
        file.write_text(json.dumps(modules))
        with pytest.raises(UnsupportedModelError, match="is not served"):
            engine(tmp_path)


@pytest.mark.parametrize(
    ("family", "ending"), [("Roberta", "ForMaskedLM"), ("Albert", "ForMaskedLM"), ("Bert", "Model")]
)
def test_models_without_a_head_for_it(tmp_path: Path, family: str, ending: str) -> None:
    saved(getattr(transformers, family + ending)(config(family, "plain")), tmp_path)
    listed(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no projection to the vocabulary"):
        engine(tmp_path)
