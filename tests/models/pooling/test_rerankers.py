"""Scores of pairs: cross-encoders, generators that answer with a word, and embedders, beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, PoolingParams
from quire.errors import CheckpointError, QuireError, RequestError, UnsupportedModelError
from tests.models.pooling.tokenizers_made import SIZE, saved_tokenizer, texts
from tests.models.pooling.worlds import engine, hidden, saved

BARE = PoolingParams(use_activation=False)
SMALL = {"vocab_size": SIZE, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 80, "max_position_embeddings": 70, "initializer_range": 0.25}  # fmt: skip
DECODER = {**SMALL, "num_key_value_heads": 2, "head_dim": 12, "pad_token_id": None}
FIRST, SECOND = texts(6, seed=2), texts(6, seed=3)


def open_engine(path: Path, **settings: Any) -> LLM:
    return engine(path, skip_tokenizer_init=False, **settings)


def scores(llm: LLM, first: Any, second: Any, **more: Any) -> torch.Tensor:
    found = llm.score(first, second, use_tqdm=False, **more)
    return torch.tensor([one.outputs.score for one in found], dtype=torch.float64)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


# -- cross-encoders ----------------------------------------------------------------------------------------------------

CROSS = {"Bert": "bert", "Roberta": "roberta", "Llama": "bare", "Qwen3": "bare"}


def cross_encoder(folder: Path, family: str) -> tuple[Any, Any]:
    torch.manual_seed(5)
    sizes = {**(DECODER if CROSS[family] == "bare" else SMALL), "num_labels": 1}
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = saved(getattr(transformers, f"{family}ForSequenceClassification")(config), folder)
    return model, saved_tokenizer(folder, CROSS[family])


def pair_scores(model: Any, tokenizer: Any, pairs: list[tuple[str, str]], **cut: Any) -> torch.Tensor:
    rows = []
    for one, other in pairs:
        made = tokenizer(one, other, return_tensors="pt", **cut)
        if getattr(model.config, "type_vocab_size", 1) < 2:
            made.pop("token_type_ids", None)
        with torch.no_grad():
            rows.append(model(**made).logits[0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("family", CROSS)
def test_cross_encoders(tmp_path: Path, family: str) -> None:
    model, tokenizer = cross_encoder(tmp_path, family)
    llm = open_engine(tmp_path)
    bare = pair_scores(model, tokenizer, list(zip(FIRST, SECOND, strict=True)))
    assert error(scores(llm, FIRST, SECOND, pooling_params=BARE), bare) < 1e-5
    assert error(scores(llm, FIRST, SECOND), bare.sigmoid()) < 1e-5
    one = pair_scores(model, tokenizer, [(FIRST[0], other) for other in SECOND])
    assert error(scores(llm, FIRST[0], SECOND, pooling_params=BARE), one) < 1e-5


@pytest.mark.parametrize("family", CROSS)
@pytest.mark.parametrize("most", [8, 13, 20, 31])
def test_pairs_are_cut_as_transformers_cuts_them(tmp_path: Path, family: str, most: int) -> None:
    model, tokenizer = cross_encoder(tmp_path, family)
    first, second = texts(12, seed=5), texts(12, seed=6)
    cut = {"truncation": "longest_first", "max_length": most}
    expected = pair_scores(model, tokenizer, list(zip(first, second, strict=True)), **cut)
    llm = open_engine(tmp_path)
    assert error(scores(llm, first, second, pooling_params=BARE, truncate_prompt_tokens=most), expected) < 1e-5


def test_types_tell_the_second_text(tmp_path: Path) -> None:
    """The tokens are the same, and the border is elsewhere."""
    cross_encoder(tmp_path, "Bert")
    llm = open_engine(tmp_path)
    pair = scores(llm, ["red", "red [SEP] blue"], ["blue [SEP] star", "star"], pooling_params=BARE)
    assert pair[0] != pair[1]


def test_types_that_the_tokenizer_does_not_name(tmp_path: Path) -> None:
    """transformers does not tell a model of them then."""
    model, _ = cross_encoder(tmp_path, "Bert")
    tokenizer = saved_tokenizer(tmp_path, "bert", model_input_names=["input_ids", "attention_mask"])
    bare = pair_scores(model, tokenizer, list(zip(FIRST, SECOND, strict=True)))
    assert error(scores(open_engine(tmp_path), FIRST, SECOND, pooling_params=BARE), bare) < 1e-5


def test_the_same_bits_in_any_company(tmp_path: Path) -> None:
    cross_encoder(tmp_path, "Bert")
    llm = open_engine(tmp_path)
    together = scores(llm, FIRST, SECOND)
    alone = torch.cat([scores(llm, one, other) for one, other in zip(FIRST, SECOND, strict=True)])
    assert torch.equal(together, alone)


# -- generators that answer with a word --------------------------------------------------------------------------------

QWEN = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True}  # fmt: skip
LLAMA = {"architectures": ["LlamaForSequenceClassification"], "method": "from_2_way_softmax",
         "classifier_from_token": ["no", "yes"]}  # fmt: skip


def generator(folder: Path, family: str, tied: bool) -> tuple[Any, Any]:
    torch.manual_seed(6)
    config = getattr(transformers, f"{family}Config")(**DECODER, tie_word_embeddings=tied)
    model = saved(getattr(transformers, f"{family}ForCausalLM")(config), folder)
    return model, saved_tokenizer(folder, "bare")


def answers(model: Any, tokenizer: Any) -> torch.Tensor:
    """Logits [pairs, vocabulary] of what follows each pair."""
    rows = []
    for one, other in zip(FIRST, SECOND, strict=True):
        ids = tokenizer(one, other, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            rows.append(model(ids).logits[0, -1])
    return torch.stack(rows)


@pytest.mark.parametrize(("family", "overrides"), [("Qwen3", QWEN), ("Llama", LLAMA)])
@pytest.mark.parametrize("tied", [False, True])
def test_the_share_of_yes(tmp_path: Path, family: str, overrides: dict[str, Any], tied: bool) -> None:
    model, tokenizer = generator(tmp_path, family, tied)
    no, yes = tokenizer.convert_tokens_to_ids(["no", "yes"])
    logits = answers(model, tokenizer)
    llm = open_engine(tmp_path, hf_overrides=overrides)
    found = scores(llm, FIRST, SECOND)
    assert error(found, logits[:, [no, yes]].softmax(1)[:, 1]) < 1e-5
    assert error(found, (logits[:, yes] - logits[:, no]).sigmoid()) < 1e-5
    bare = scores(llm, FIRST, SECOND, pooling_params=BARE)
    assert error(bare, logits[:, yes] - logits[:, no]) < 1e-5
    by_number = {**overrides, "classifier_from_token": [no, yes]}
    assert torch.equal(scores(open_engine(tmp_path, hf_overrides=by_number), FIRST, SECOND), found)
    llm.sleep(level=2)
    llm.wake_up()
    assert torch.equal(scores(llm, FIRST, SECOND), found)


@pytest.mark.parametrize("tied", [False, True])
def test_scores_of_several_tokens(tmp_path: Path, tied: bool) -> None:
    model, tokenizer = generator(tmp_path, "Llama", tied)
    words = ["star", "yes", "no"]
    overrides = {**LLAMA, "method": "no_post_processing", "classifier_from_token": words}
    llm = open_engine(tmp_path, hf_overrides=overrides)
    prompts = [tokenizer(one, other)["input_ids"] for one, other in zip(FIRST, SECOND, strict=True)]
    found = llm.classify(prompts, pooling_params=BARE, use_tqdm=False)
    expected = answers(model, tokenizer)[:, tokenizer.convert_tokens_to_ids(words)]
    assert error(torch.tensor([one.outputs.probs for one in found], dtype=torch.float64), expected) < 1e-5
    assert llm.llm_engine.pooling.labels == tuple(words)


def test_a_converted_file_has_the_same_scores(tmp_path: Path) -> None:
    """As published conversions are: score.weight is the difference of the two rows."""
    model, tokenizer = generator(tmp_path / "original", "Qwen3", True)
    no, yes = tokenizer.convert_tokens_to_ids(["no", "yes"])
    found = scores(open_engine(tmp_path / "original", hf_overrides=QWEN), FIRST, SECOND)
    config = transformers.Qwen3Config(**DECODER, tie_word_embeddings=True, num_labels=1)
    converted = transformers.Qwen3ForSequenceClassification(config)
    converted.model.load_state_dict(model.model.state_dict())
    rows = model.lm_head.weight.detach()
    converted.score.weight.data = rows[[yes]] - rows[[no]]
    saved(converted, tmp_path / "converted")
    saved_tokenizer(tmp_path / "converted", "bare")
    assert error(scores(open_engine(tmp_path / "converted"), FIRST, SECOND), found) < 1e-5


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"classifier_from_token": ["no", "maybe"]}, "'maybe' is no token"),
        ({"classifier_from_token": ["no"]}, "a list of two tokens"),
        ({"classifier_from_token": ["no", "yes", "a"]}, "a list of two tokens"),
        ({"classifier_from_token": "no"}, "a list of two tokens"),
        ({"classifier_from_token": [1, SIZE]}, f"{SIZE} is no token"),
        ({"classifier_from_token": [-1, 2]}, "-1 is no token"),
        ({"classifier_from_token": None}, "must name two tokens"),
        ({"is_original_qwen3_reranker": False}, "method=None must be one of"),
        ({"is_original_qwen3_reranker": False, "method": "sum"}, "method='sum' must be one of"),
        ({"is_original_qwen3_reranker": False, "method": "no_post_processing", "classifier_from_token": []}, "a list"),
    ],
)
def test_tokens_that_are_refused(tmp_path: Path, overrides: dict[str, Any], named: str) -> None:
    generator(tmp_path, "Qwen3", True)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        open_engine(tmp_path, hf_overrides={**QWEN, **overrides})


def test_words_without_a_tokenizer(tmp_path: Path) -> None:
    generator(tmp_path, "Qwen3", True)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="give tokens' numbers"):
        engine(tmp_path, hf_overrides=QWEN)


@pytest.mark.parametrize("family", ["Gemma2", "Granite"])
def test_scores_that_are_scaled_or_capped(tmp_path: Path, family: str) -> None:
    """Which the difference of two rows would not show."""
    torch.manual_seed(8)
    own = {"Gemma2": {"final_logit_softcapping": 3.0}, "Granite": {"logits_scaling": 0.3}}[family]
    config = getattr(transformers, f"{family}Config")(**{**DECODER, **own, "pad_token_id": 0})
    model = saved(getattr(transformers, f"{family}ForCausalLM")(config), tmp_path)
    tokenizer = saved_tokenizer(tmp_path, "bare")
    no, yes = tokenizer.convert_tokens_to_ids(["no", "yes"])
    llm = open_engine(tmp_path, hf_overrides={**LLAMA, "architectures": [f"{family}ForSequenceClassification"]})
    logits = answers(model, tokenizer)
    assert error(scores(llm, FIRST, SECOND, pooling_params=BARE), logits[:, yes] - logits[:, no]) < 1e-5


def test_scores_with_a_bias(tmp_path: Path) -> None:
    saved(transformers.PhiForCausalLM(transformers.PhiConfig(**{**SMALL, "pad_token_id": 0})), tmp_path)
    saved_tokenizer(tmp_path, "bare")
    with pytest.raises(UnsupportedModelError, match="more to tokens' scores"):
        open_engine(tmp_path, hf_overrides={**LLAMA, "architectures": ["PhiForSequenceClassification"]})


# -- embedders ---------------------------------------------------------------------------------------------------------


def embedder(folder: Path) -> tuple[Any, Any]:
    torch.manual_seed(7)
    model = saved(transformers.BertModel(transformers.BertConfig(**SMALL)), folder)
    return model, saved_tokenizer(folder)


def states(model: Any, tokenizer: Any, words: list[str]) -> list[torch.Tensor]:
    return [hidden(model, tokenizer(one)["input_ids"]) for one in words]


@pytest.mark.parametrize("kind", ["CLS", "MEAN", "LAST"])
@pytest.mark.parametrize("normalize", [True, False])
def test_cosines(tmp_path: Path, kind: str, normalize: bool) -> None:
    model, tokenizer = embedder(tmp_path)
    pool = {"CLS": lambda one: one[0], "LAST": lambda one: one[-1], "MEAN": lambda one: one.mean(0)}[kind]
    rows = [torch.stack([pool(one) for one in states(model, tokenizer, side)]) for side in (FIRST, SECOND)]
    llm = open_engine(tmp_path, pooler_config={"pooling_type": kind, "normalize": normalize})
    expected = torch.nn.functional.cosine_similarity(*rows)
    assert error(scores(llm, FIRST, SECOND), expected) < 1e-5
    one = torch.nn.functional.cosine_similarity(rows[0][:1], rows[1])
    assert error(scores(llm, FIRST[0], SECOND), one) < 1e-5


def test_each_side_has_its_own_prompt(tmp_path: Path) -> None:
    model, tokenizer = embedder(tmp_path)
    prompts = {"query": "query of ", "passage": "the star "}
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "query"}))
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    llm = open_engine(tmp_path)
    names = ("query", "passage")
    sides = [
        torch.stack([one[0] for one in states(model, tokenizer, [prompts[name] + text for text in side])])
        for name, side in zip(names, (FIRST, SECOND), strict=True)
    ]
    params = tuple(PoolingParams(prompt_name=name) for name in names)
    found = torch.tensor([one.outputs.score for one in llm.score(FIRST, SECOND, pooling_params=params, use_tqdm=False)])
    assert error(found, torch.nn.functional.cosine_similarity(*sides)) < 1e-5
    for wrong in (params[:1], (params[0], "passage"), [*params, params[0]]):
        with pytest.raises(RequestError, match="or two of them"):
            llm.score(FIRST, SECOND, pooling_params=wrong, use_tqdm=False)  # type: ignore[arg-type]
    cross_encoder(tmp_path / "cross", "Bert")
    pairs = open_engine(tmp_path / "cross")
    with pytest.raises(RequestError, match="reads both texts together"):
        pairs.score("a", ["red"], pooling_params=(PoolingParams(), PoolingParams(use_activation=False)), use_tqdm=False)


def test_late_interaction(tmp_path: Path) -> None:
    model, tokenizer = embedder(tmp_path)
    sides = [
        [torch.nn.functional.normalize(one, dim=1) for one in states(model, tokenizer, side)]
        for side in (FIRST, SECOND)
    ]
    expected = torch.stack([(a @ b.T).amax(1).sum() for a, b in zip(*sides, strict=True)])
    llm = open_engine(tmp_path, pooler_config={"pooling_type": "ALL"})
    found = scores(llm, FIRST, SECOND)
    assert float(((found - expected) / expected.abs().clamp(min=1)).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ([], ["a"], "data_1: must be"),
        ("a", [], "data_2: must be"),
        (["a", "b"], ["a", "b", "c"], "as many, or one"),
        (["a", 3], ["a", "b"], "data_1: must be"),
        ("a", ["\ud800"], "lone surrogate"),
    ],
)
@pytest.mark.parametrize("cross", [True, False])
def test_pairs_that_are_refused(tmp_path: Path, cross: bool, first: Any, second: Any, named: str) -> None:
    cross_encoder(tmp_path, "Bert") if cross else embedder(tmp_path)
    llm = open_engine(tmp_path)
    with pytest.raises(RequestError, match=named):
        llm.score(first, second, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.score("a", ["red"], use_tqdm=False)) == 1


def test_a_query_of_many_texts_is_computed_once(tmp_path: Path) -> None:
    embedder(tmp_path)
    llm = open_engine(tmp_path)
    found = llm.score(FIRST[0], SECOND, use_tqdm=False)
    assert len({one.request_id.partition("_")[0] for one in found}) == 1
    each = [llm.score(FIRST[0], text, use_tqdm=False)[0].outputs.score for text in SECOND]
    assert [one.outputs.score for one in found] == each


def test_a_classifier_of_several_classes_scores_nothing(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SMALL, num_labels=3)
    saved(transformers.BertForSequenceClassification(config), tmp_path)
    saved_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="tells 3 classes apart"):
        open_engine(tmp_path).score("a", "a", use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("torch.nn.modules.linear.Identity", "bare"), ("torch.nn.modules.activation.Sigmoid", "share")],
)
@pytest.mark.parametrize("field", ["newest", "new", "old"])
def test_activations_of_cross_encoders_files(tmp_path: Path, name: str, numbers: str, field: str) -> None:
    model, tokenizer = cross_encoder(tmp_path, "Bert")
    if field == "newest":
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"activation_fn": name}))
        list_modules(tmp_path, "Transformer")
        task = {"transformer_task": "sequence-classification", "module_output_name": "scores",
                "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}}  # fmt: skip
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps(task))
    elif field == "new":
        edit_config(tmp_path, sentence_transformers={"activation_fn": name, "version": "5.0.0"})
    else:
        edit_config(tmp_path, sbert_ce_default_activation_function=name)
    expected = pair_scores(model, tokenizer, list(zip(FIRST, SECOND, strict=True)))
    expected = expected if numbers == "bare" else expected.sigmoid()
    assert error(scores(open_engine(tmp_path), FIRST, SECOND), expected) < 1e-5


def test_an_activation_that_is_not_known(tmp_path: Path) -> None:
    cross_encoder(tmp_path, "Bert")
    edit_config(tmp_path, sentence_transformers={"activation_fn": "torch.nn.modules.activation.Hardtanh"})
    with pytest.raises(QuireError, match="Hardtanh"):
        open_engine(tmp_path)


def test_modules_behind_a_classifier(tmp_path: Path) -> None:
    cross_encoder(tmp_path, "Bert")
    list_modules(tmp_path, "Transformer", "Pooling")
    with pytest.raises(UnsupportedModelError, match=r"lists Transformer, Pooling.*convert='embed'"):
        open_engine(tmp_path)
    list_modules(tmp_path, "Transformer")
    prompts = {"prompts": {"query": "red "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with pytest.raises(UnsupportedModelError, match="default_prompt_name='query'"):
        open_engine(tmp_path)


def list_modules(folder: Path, *kinds: str) -> None:
    found = [{"path": f"{number}_{kind}" if number else "", "type": f"a.{kind}"} for number, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(found))


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
