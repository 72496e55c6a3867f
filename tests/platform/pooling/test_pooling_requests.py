"""Requests for vectors and classes that cannot be served, that fail, and that end early; memory and formats."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quire import LLM, PoolingParams, SamplingParams
from quire.errors import ContextLengthError, QuireError, RequestError, SleepingError
from tests.checkpoint import gguf_models
from tests.models import tiny
from tests.models.pooling.tokenizers_made import SIZE, saved_tokenizer, texts
from tests.models.pooling.worlds import classes, engine, given, hidden, prompts, saved

SMALL = {"vocab_size": SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 128, "max_position_embeddings": 70, "initializer_range": 0.1}  # fmt: skip
DECODER = {**SMALL, "num_key_value_heads": 2, "pad_token_id": None}
KINDS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL)),
    "classifier": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**{**SMALL, "num_labels": 3})
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)),
}
TEXTS = texts(4, seed=11)


def made(folder: Path, kind: str) -> Any:
    torch.manual_seed(12)
    model = saved(KINDS[kind](), folder)
    saved_tokenizer(folder, "bare" if kind == "llama" else "bert")
    return model


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in found.items():
        made(folder, kind)
    return found


def open_engine(path: Path, **settings: Any) -> LLM:
    return engine(path, skip_tokenizer_init=False, **{"runner": "pooling", **settings})


@pytest.fixture(scope="module")
def llms(paths: dict[str, Path]) -> dict[str, LLM]:
    return {kind: open_engine(path) for kind, path in paths.items()}


def nothing_left(llm: LLM) -> None:
    assert not llm.llm_engine.has_unfinished_requests()
    llm.llm_engine.check_integrity()
    assert llm.llm_engine.pool.num_owned == 0


# -- what is refused ---------------------------------------------------------------------------------------------------

PROMPTS: dict[str, tuple[Any, str | None]] = {
    "empty_text_of_no_tokens": ({"prompt_token_ids": []}, "the prompt is empty"),
    "beyond_the_vocabulary": ([SIZE], "from 0 to 63"),
    "below_it": ([-1], "from 0 to 63"),
    "fraction": ([1.5], "from 0 to 63"),
    "truth": ([True], "from 0 to 63"),
    "text_among_them": (["a", 1], None),
    "number": (3, None),
    "nothing": (None, None),
    "bytes": (b"red", None),
    "surrogate": ("red \ud800", "surrogate"),
    "unknown_key": ({"prompt": "red", "promt": "x"}, "a prompt dict takes"),
    "no_key": ({}, "a prompt dict takes"),
    "pair_of_one": ({"prompt_pair": ["red"]}, "must be two texts"),
    "pair_of_three": ({"prompt_pair": ["a", "b", "c"]}, "must be two texts"),
    "pair_of_ids": ({"prompt_pair": [[5], [6]]}, "must be two texts"),
    "pair_of_letters": ({"prompt_pair": "ab"}, "must be two texts"),
    "pair_and_text": ({"prompt_pair": ["a", "b"], "prompt": "c"}, "no other prompt beside it"),
    "pair_and_ids": ({"prompt_pair": ["a", "b"], "prompt_token_ids": [5]}, "no other prompt beside it"),
    "pair_surrogate": ({"prompt_pair": ["a", "\udfff"]}, "surrogate"),
    "image": ({"prompt": "red", "multi_modal_data": {"image": np.zeros((8, 8, 3), np.uint8)}}, None),
    "too_long": (list(range(5, 60)) * 2, "truncate_prompt_tokens"),
    "too_long_text": (" ".join(["red"] * 90), "truncate_prompt_tokens"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_that_are_refused(llms: dict[str, LLM], kind: str, case: str) -> None:
    prompt, reason = PROMPTS[case]
    llm = llms[kind]
    with pytest.raises((RequestError, ContextLengthError), match=reason):
        llm.encode([TEXTS[0], prompt], use_tqdm=False)
    nothing_left(llm)
    assert len(llm.encode(TEXTS, use_tqdm=False)) == len(TEXTS)


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"task": "summarize"}, "task='summarize'"),
    ({"task": 3}, "task=3"),
    ({"dimensions": 0}, "dimensions=0"),
    ({"dimensions": -4}, "dimensions=-4"),
    ({"dimensions": 2.5}, "dimensions=2.5"),
    ({"dimensions": True}, "dimensions=True"),
    ({"dimensions": "8"}, "dimensions='8'"),
    ({"normalize": "yes"}, "normalize='yes'"),
    ({"use_activation": 2}, "use_activation=2"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens=-2"),
    ({"truncate_prompt_tokens": 1.0}, "truncate_prompt_tokens=1.0"),
    ({"prompt_name": 3}, "prompt_name=3"),
    ({"prompt_name": ["a"]}, "prompt_name="),
]


@pytest.mark.parametrize(("fields", "reason"), NONSENSE)
def test_params_that_make_no_sense(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        PoolingParams(**fields)


@pytest.mark.parametrize(
    ("kind", "pooler", "reason"),
    [
        ("bert", {"returned_token_ids": [0]}, "returned_token_ids: names classes"),
        ("classifier", {"returned_token_ids": [3]}, "this model has 3 labels"),
        ("llama", {"tok_pooling_type": "MEAN"}, "must be ALL or STEP"),
        ("classifier", {"tok_pooling_type": "last"}, "must be ALL or STEP"),
    ],
)
def test_settings_that_the_model_has_not(
    paths: dict[str, Path], kind: str, pooler: dict[str, Any], reason: str
) -> None:
    with pytest.raises(QuireError, match=reason):
        open_engine(paths[kind], pooler_config=pooler)


def test_two_texts_have_nothing_before_them(llms: dict[str, LLM]) -> None:
    with pytest.raises(RequestError, match="prompt_name"):
        llms["classifier"].encode([{"prompt_pair": ("red", "blue")}], PoolingParams(prompt_name="query"))
    nothing_left(llms["classifier"])


def test_labels_that_are_no_text(tmp_path: Path) -> None:
    """A file can name half of a character, which no answer can hold."""
    made(tmp_path, "classifier")
    llm = open_engine(tmp_path, hf_overrides={"id2label": {"0": "\ud800", "1": "b", "2": "c"}})
    assert llm.llm_engine.pooling is not None and llm.llm_engine.pooling.labels == ("?", "b", "c")


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("bert", {"dimensions": 32}, "was not trained for fewer"),
        ("bert", {"dimensions": 65}, "vectors have 64 numbers"),
        ("bert", {"task": "classify"}, "can embed, token_embed"),
        ("bert", {"task": "score"}, "can embed, token_embed"),
        ("classifier", {"task": "embed"}, "can classify, token_classify"),
        ("classifier", {"dimensions": 2}, "classes have no dimensions"),
        ("classifier", {"normalize": True}, "classes are no vectors"),
        ("llama", {"task": "token_classify"}, "can embed, token_embed"),
        ("bert", {"truncate_prompt_tokens": 71}, "takes 70 tokens at most"),
        ("bert", {"truncate_prompt_tokens": 2}, "no room beside the special tokens"),
        ("bert", {"prompt_name": "query"}, "this checkpoint's prompts are: none"),
    ],
)
def test_params_that_the_model_has_not(llms: dict[str, LLM], kind: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        llms[kind].encode(TEXTS, PoolingParams(**fields), use_tqdm=False)
    nothing_left(llms[kind])


def test_dimensions_of_models_that_have_them(paths: dict[str, Path]) -> None:
    llm = open_engine(paths["bert"], hf_overrides={"matryoshka_dimensions": [16, 32]})
    whole = llm.embed(TEXTS, pooling_params=PoolingParams(normalize=False), use_tqdm=False)
    for count in (16, 32, 64):
        found = llm.embed(TEXTS, pooling_params=PoolingParams(dimensions=count), use_tqdm=False)
        for one, other in zip(found, whole, strict=True):
            row = torch.tensor(other.outputs.embedding[:count], dtype=torch.float64)
            assert torch.allclose(torch.tensor(one.outputs.embedding).double(), row / row.norm(), atol=1e-6)
    with pytest.raises(RequestError, match="this model has 16, 32"):
        llm.embed(TEXTS, pooling_params=PoolingParams(dimensions=20), use_tqdm=False)


@pytest.mark.parametrize("call", ["encode", "embed", "classify", "reward"])
def test_lists_that_do_not_fit(llms: dict[str, LLM], call: str) -> None:
    llm = llms["classifier" if call in ("classify", "reward") else "bert"]
    assert getattr(llm, call)([], use_tqdm=False) == []
    with pytest.raises(RequestError, match="pooling_params"):
        getattr(llm, call)(TEXTS, pooling_params=[PoolingParams()] * 2, use_tqdm=False)
    with pytest.raises(RequestError):
        getattr(llm, call)(TEXTS, pooling_params=SamplingParams(), use_tqdm=False)
    nothing_left(llm)


@pytest.mark.parametrize("call", ["encode", "embed", "classify", "reward", "score"])
def test_arguments_of_vllms_calls_say_what_there_is_instead(llms: dict[str, LLM], call: str) -> None:
    llm = llms["classifier" if call in ("classify", "reward") else "bert"]
    given = (TEXTS[0], TEXTS) if call == "score" else (TEXTS,)
    with pytest.raises(RequestError, match="tokenization_kwargs: give truncate_prompt_tokens"):
        getattr(llm, call)(*given, tokenization_kwargs={"max_length": 3}, use_tqdm=False)
    if call == "score":
        with pytest.raises(RequestError, match="chat_template: texts are taken as they are"):
            llm.score(*given, chat_template="{{ messages }}", use_tqdm=False)
        assert llm.score(*given, chat_template=None, use_tqdm=False)
    assert getattr(llm, call)(*given, tokenization_kwargs=None, use_tqdm=False)


@pytest.mark.parametrize(("count", "kept"), [(-1, 70), (3, 3), (40, 40), (70, 70)])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_prompts_are_cut(llms: dict[str, LLM], kind: str, count: int, kept: int) -> None:
    long = " ".join(["red", "star"] * 50)
    ids = [7, 8] * 50
    for prompt in (long, {"prompt": long}, ids, {"prompt_token_ids": ids}):
        (found,) = llms[kind].embed([prompt], truncate_prompt_tokens=count, use_tqdm=False)
        assert len(found.prompt_token_ids) == kept
        if isinstance(prompt, str) and kind == "bert":
            assert found.prompt_token_ids[-1] == 3  # [SEP]
    (short,) = llms[kind].embed(["red"], truncate_prompt_tokens=count, use_tqdm=False)
    assert len(short.prompt_token_ids) == (3 if kind == "bert" else 1)


def test_the_other_runner(llms: dict[str, LLM], paths: dict[str, Path]) -> None:
    for kind in KINDS:
        with pytest.raises(RequestError, match="generates nothing: call embed"):
            llms[kind].generate(TEXTS, use_tqdm=False)
        nothing_left(llms[kind])
    generator = open_engine(paths["llama"], runner="generate")
    for call in (generator.embed, generator.classify, generator.encode, generator.reward):
        with pytest.raises(RequestError, match="loaded to generate: load it with runner='pooling'"):
            call(TEXTS, use_tqdm=False)
    with pytest.raises(RequestError, match="loaded to generate"):
        generator.score("red", "star", use_tqdm=False)
    assert len(generator.generate(TEXTS, SamplingParams(max_tokens=2), use_tqdm=False)) == len(TEXTS)


# -- what fails, and what ends early -----------------------------------------------------------------------------------


def rows(outputs: list[Any]) -> list[torch.Tensor]:
    assert all(one.failure is None for one in outputs)
    return [one.outputs.data for one in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_fails_harms_no_other(paths: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_engine(paths[kind], enable_prefix_caching=False)
    batch = prompts(SIZE, [4, 9, 20, 33])
    expected = rows(llm.encode(given(batch), use_tqdm=False))
    runner = llm.llm_engine.executor.runner
    step = runner._pooling.run

    def failing(chunks: Any, sequences: Any, *states: Any) -> Any:
        if any(list(one.token_ids[:20]) == batch[2] for one in sequences):
            raise RuntimeError("no luck")
        return step(chunks, sequences, *states)

    monkeypatch.setattr(runner._pooling, "run", failing)
    found = llm.encode(given(batch), use_tqdm=False)
    assert [one.failure is None for one in found] == [True, True, False, True]
    assert "no luck" in str(found[2].failure)
    for place in (0, 1, 3):
        assert torch.equal(found[place].outputs.data, expected[place])
    nothing_left(llm)
    embedded = (llm.classify if kind == "classifier" else llm.embed)(given(batch), use_tqdm=False)
    assert embedded[2].outputs is None and embedded[2].failure is not None
    monkeypatch.undo()
    assert all(map(torch.equal, rows(llm.encode(given(batch), use_tqdm=False)), expected))


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_is_aborted(paths: dict[str, Path], kind: str) -> None:
    llm = open_engine(paths[kind], max_num_batched_tokens=16, enable_prefix_caching=False)
    batch = prompts(SIZE, [40, 8, 60, 5])
    expected = rows(llm.encode(given(batch), use_tqdm=False))
    running = llm.llm_engine
    for number, ids in enumerate(batch):
        running.add_request(str(number), {"prompt_token_ids": ids}, PoolingParams())
    found = {one.request_id: one for one in running.step()}
    running.abort_request(["2"])
    while running.has_unfinished_requests():
        found.update((one.request_id, one) for one in running.step())
    assert {"0", "1", "3"} <= found.keys()
    assert all(torch.equal(found[str(place)].outputs.data, expected[place]) for place in (0, 1, 3))
    nothing_left(llm)


# -- processes, memory, formats ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "bert")) for kind in KINDS])
def test_another_process_gives_the_same_bits(paths: dict[str, Path], llms: dict[str, LLM], kind: str) -> None:
    batch = prompts(SIZE, [1, 9, 20, 64])
    for task in ("classify",) if kind == "classifier" else ("embed", "token_embed"):
        expected = rows(llms[kind].encode(given(batch), pooling_task=task, use_tqdm=False))
        other = open_engine(paths[kind], executor="process")
        assert other.llm_engine.pooling == llms[kind].llm_engine.pooling
        assert all(map(torch.equal, rows(other.encode(given(batch), pooling_task=task, use_tqdm=False)), expected))


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_sleep(paths: dict[str, Path], kind: str, level: int) -> None:
    llm = open_engine(paths[kind])
    expected = rows(llm.encode(TEXTS, use_tqdm=False))
    llm.sleep(level=level)
    with pytest.raises(SleepingError):
        llm.encode(TEXTS, use_tqdm=False)
    llm.wake_up()
    assert all(map(torch.equal, rows(llm.encode(TEXTS, use_tqdm=False)), expected))


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_with_dense_layers(tmp_path: Path, level: int) -> None:
    from tests.models.pooling.test_sentence_transformers import good

    good(tmp_path)
    llm = engine(tmp_path, skip_tokenizer_init=False)
    expected = rows(llm.encode(TEXTS, use_tqdm=False))
    llm.sleep(level=level)
    llm.wake_up()
    assert all(map(torch.equal, rows(llm.encode(TEXTS, use_tqdm=False)), expected))


def cosines(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return min(float(torch.cosine_similarity(one.double(), other.double(), dim=-1).min()) for one, other in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}])
def test_int8(paths: dict[str, Path], kind: str, settings: dict[str, Any]) -> None:
    """Near what floats give, and the same bits in any company."""
    batch = prompts(SIZE, [1, 9, 20, 64, 33])
    model = copy.deepcopy(KINDS[kind]())  # whose weights the files have
    model = type(model).from_pretrained(paths[kind]).double().eval()
    if kind == "classifier":
        expected = [classes(model, ids) for ids in batch]
    else:
        inner = model.model if kind == "llama" else model
        expected = [hidden(inner, ids)[-1 if kind == "llama" else 0] for ids in batch]
    llm = open_engine(paths[kind], **settings)
    bare = PoolingParams(use_activation=False)
    together = rows(llm.encode(given(batch), bare, use_tqdm=False))
    alone = [rows(llm.encode(given([ids]), bare, use_tqdm=False))[0] for ids in batch]
    assert all(map(torch.equal, together, alone))
    assert cosines(together, expected) > 0.99
    plain = rows(open_engine(paths[kind]).encode(given(batch), bare, use_tqdm=False))
    assert any(not torch.equal(one, other) for one, other in zip(together, plain, strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_as_an_embedder(tmp_path: Path, tied: bool) -> None:
    """Its projection to the vocabulary is left out."""
    variant = next(iter(tiny.TABLE["LlamaForCausalLM"][2]))
    path = tiny.build("LlamaForCausalLM", variant, tmp_path / "folder", tie_word_embeddings=tied)
    file = gguf_models.convert(path, "llama", transformers.AutoConfig.from_pretrained(path), tmp_path / "model.gguf")
    batch = prompts(97, [1, 9, 30])
    settings = {"runner": "pooling", "dtype": "float32"}
    expected = rows(engine(path, **settings).encode(given(batch), use_tqdm=False))
    assert all(map(torch.equal, rows(engine(file, **settings).encode(given(batch), use_tqdm=False)), expected))
