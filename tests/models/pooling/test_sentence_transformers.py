"""Checkpoints of sentence-transformers: what stands behind the model and before a text, beside transformers.

`clients/sentences` compares with the package itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from quire import LLM, PoolingParams
from quire.checkpoint import modules as checkpoint_modules
from quire.checkpoint.files import resolve_weights
from quire.checkpoint.plain import open_plain
from quire.errors import CheckpointError, ContextLengthError, QuireError, RequestError, UnsupportedModelError
from tests.models.pooling.tokenizers_made import SIZE, saved_tokenizer, texts
from tests.models.pooling.worlds import engine, hidden, saved

HIDDEN = 48
SMALL = {"vocab_size": SIZE, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 80, "max_position_embeddings": 70, "initializer_range": 0.25}  # fmt: skip
TEXTS = texts(7, seed=4)
POOLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda one: one[0], "lasttoken": lambda one: one[-1], "mean": lambda one: one.mean(0),
}  # fmt: skip
OLD = {"cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}
ACTIVATIONS = {"Identity": torch.nn.Identity(), "Tanh": torch.nn.Tanh(), "ReLU": torch.nn.ReLU(),
               "GELU": torch.nn.GELU(), "SiLU": torch.nn.SiLU(), "Sigmoid": torch.nn.Sigmoid()}  # fmt: skip
PATHS = {"Identity": "torch.nn.modules.linear", **dict.fromkeys(list(ACTIVATIONS)[1:], "torch.nn.modules.activation")}


def write(file: Path, value: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value))


def modules(folder: Path, *kinds: str) -> None:
    """modules.json: a Transformer, and these, in folders named by number and kind."""
    names = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds, 1))]
    listed = zip(names, ["Transformer", *kinds], strict=True)
    found = [{"idx": number, "name": str(number), "path": name, "type": f"sentence_transformers.models.{kind}"}
             for number, (name, kind) in enumerate(listed)]  # fmt: skip
    write(folder / "modules.json", found)


def base(folder: Path, family: str = "Bert", **tokenizer: Any) -> tuple[Any, Any]:
    torch.manual_seed(9)
    sizes = SMALL if family == "Bert" else {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = saved(getattr(transformers, f"{family}Model")(config), folder)
    return model, saved_tokenizer(folder, "bert" if family == "Bert" else "bare", **tokenizer)


def dense(folder: Path, number: int, before: int, behind: int, activation: str, bias: bool, pickled: bool) -> Any:
    """A layer in its folder; what it makes of rows in float64."""
    generator = torch.Generator().manual_seed(number)
    where = folder / f"{number}_Dense"
    weight = torch.randn(behind, before, generator=generator) / before**0.5
    tensors = {"linear.weight": weight, **({"linear.bias": torch.randn(behind, generator=generator)} if bias else {})}
    write(where / "config.json", {"in_features": before, "out_features": behind, "bias": bias,
                                  "activation_function": f"{PATHS[activation]}.{activation}"})  # fmt: skip
    if pickled:
        torch.save(tensors, where / "pytorch_model.bin")
    else:
        save_file(tensors, where / "model.safetensors")
    wide = {name: one.double() for name, one in tensors.items()}

    def run(row: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = ACTIVATIONS[activation](wide["linear.weight"] @ row + wide.get("linear.bias", 0))
        return made

    return run


def open_engine(path: Path, **settings: Any) -> LLM:
    return engine(path, skip_tokenizer_init=False, **settings)


def vectors(llm: LLM, batch: list[str], **more: Any) -> list[torch.Tensor]:
    params = PoolingParams(**more) if more else None
    outputs = llm.embed(batch, pooling_params=params, use_tqdm=False)
    return [torch.tensor(one.outputs.embedding, dtype=torch.float64) for one in outputs]


def agree(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and float((one - other).abs().max()) < 1e-5


def states(model: Any, tokenizer: Any, batch: list[str], **cut: Any) -> list[torch.Tensor]:
    return [hidden(model, tokenizer(text, **cut)["input_ids"]) for text in batch]


@pytest.mark.parametrize("mode", POOLS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_pooling(tmp_path: Path, mode: str, normalize: bool, old: bool, family: str) -> None:
    model, tokenizer = base(tmp_path, family)
    modules(tmp_path, "Pooling", *(["Normalize"] if normalize else []))
    given = {"word_embedding_dimension": HIDDEN, **{OLD[one]: one == mode for one in POOLS}}
    write(tmp_path / "1_Pooling" / "config.json", given if old else {"pooling_mode": mode, "include_prompt": True})
    expected = [POOLS[mode](one) for one in states(model, tokenizer, TEXTS)]
    found = vectors(open_engine(tmp_path), TEXTS)
    agree(found, [one / one.norm() for one in expected] if normalize else expected)


def test_a_pooling_that_names_none_is_the_mean(tmp_path: Path) -> None:
    model, tokenizer = base(tmp_path)
    modules(tmp_path, "Pooling")
    write(tmp_path / "1_Pooling" / "config.json", dict.fromkeys(OLD.values(), False))
    agree(vectors(open_engine(tmp_path), TEXTS), [one.mean(0) for one in states(model, tokenizer, TEXTS)])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("bias", "pickled"), [(True, False), (False, True)])
def test_dense_layers(tmp_path: Path, activation: str, bias: bool, pickled: bool) -> None:
    model, tokenizer = base(tmp_path)
    modules(tmp_path, "Pooling", "Dense", "Dense", "Normalize")
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    first = dense(tmp_path, 2, HIDDEN, 32, activation, bias, pickled)
    second = dense(tmp_path, 3, 32, 21, "Identity", not bias, pickled)
    rows = [second(first(one.mean(0))) for one in states(model, tokenizer, TEXTS)]
    llm = open_engine(tmp_path)
    agree(vectors(llm, TEXTS), [one / one.norm() for one in rows])
    agree(vectors(llm, TEXTS, normalize=False), rows)
    assert llm.llm_engine.pooling.width == 21
    together = vectors(llm, TEXTS)
    assert all(torch.equal(vectors(llm, [text])[0], one) for text, one in zip(TEXTS, together, strict=True))


def test_prompts(tmp_path: Path) -> None:
    model, tokenizer = base(tmp_path)
    modules(tmp_path, "Pooling")
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    prompts = {"query": "query of ", "passage": "the star: ", "document": ""}
    write(tmp_path / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    llm = open_engine(tmp_path)
    for name, before in (("query", "query of "), ("passage", "the star: "), ("document", ""), ("", "")):
        expected = [one.mean(0) for one in states(model, tokenizer, [before + text for text in TEXTS])]
        agree(vectors(llm, TEXTS, prompt_name=name), expected)
        if name == "query":
            agree(vectors(llm, TEXTS), expected)
    with pytest.raises(RequestError, match="checkpoint's prompts are: document, passage, query"):
        vectors(llm, TEXTS, prompt_name="other")
    with pytest.raises(RequestError, match="a prompt of token ids has no text"):
        llm.embed([[5, 6]], pooling_params=PoolingParams(prompt_name="query"), use_tqdm=False)


@pytest.mark.parametrize("where", ["sentence_bert_config.json", "tokenizer_config.json"])
def test_long_texts_are_cut_where_that_is_asked_for(tmp_path: Path, where: str) -> None:
    model, tokenizer = base(tmp_path)
    modules(tmp_path, "Pooling")
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    if where == "sentence_bert_config.json":
        write(tmp_path / where, {"max_seq_length": 12})
    else:
        given = json.loads((tmp_path / where).read_text())
        write(tmp_path / where, {**given, "model_max_length": 12})
    llm = open_engine(tmp_path)
    long = texts(3, seed=7, least=40, most=60)
    with pytest.raises(ContextLengthError, match="12"):
        vectors(llm, long)
    cut = states(model, tokenizer, long, truncation=True, max_length=12)
    assert all(len(one) == 12 for one in cut)
    agree(vectors(llm, long, truncate_prompt_tokens=-1), [one.mean(0) for one in cut])


def test_a_tokenizer_that_cuts_and_pads(tmp_path: Path) -> None:
    """As real tokenizer.json files do."""
    model, tokenizer = base(tmp_path)
    file = tmp_path / "tokenizer.json"
    write(file, {**json.loads(file.read_text()),
                 "truncation": {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
                 "padding": {"strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                             "pad_type_id": 0, "pad_token": "[PAD]"}})  # fmt: skip
    modules(tmp_path, "Pooling")
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    found = open_engine(tmp_path).embed(TEXTS, use_tqdm=False)
    assert [list(one.prompt_token_ids) for one in found] == [tokenizer(text)["input_ids"] for text in TEXTS]
    rows = [torch.tensor(one.outputs.embedding, dtype=torch.float64) for one in found]
    agree(rows, [one.mean(0) for one in states(model, tokenizer, TEXTS)])


def test_texts_made_lower_case(tmp_path: Path) -> None:
    base(tmp_path)
    modules(tmp_path, "Pooling")
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    prompts = {"query": "RED Star "}
    write(tmp_path / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    given = ["The Red CIRCLE sings", "PARIS [SEP] no"]
    upper = open_engine(tmp_path).embed(given, use_tqdm=False)
    write(tmp_path / "sentence_bert_config.json", {"do_lower_case": True})
    lower = open_engine(tmp_path).embed(given, use_tqdm=False)
    known = saved_tokenizer(tmp_path / "other")
    expected = ["red star the red circle sings", "red star paris [SEP] no"]  # special tokens are found before
    assert [list(one.prompt_token_ids) for one in lower] == [known(text)["input_ids"] for text in expected]
    assert all(one.prompt_token_ids != other.prompt_token_ids for one, other in zip(upper, lower, strict=True))


# -- damaged files, and others that are not served --------------------------------------------------------------------


def good(folder: Path) -> None:
    base(folder)
    modules(folder, "Pooling", "Dense", "Normalize")
    write(folder / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    dense(folder, 2, HIDDEN, 32, "Tanh", True, False)


def listed(**changed: Any) -> list[dict[str, Any]]:
    """modules.json with another Dense."""
    kind = "sentence_transformers.models."
    return [{"path": "", "type": f"{kind}Transformer"}, {"path": "1_Pooling", "type": f"{kind}Pooling"},
            {"path": "2_Dense", "type": f"{kind}Dense", **changed}]  # fmt: skip


POOLING = "1_Pooling/config.json"
DENSE = "2_Dense/config.json"
SIZES = {"in_features": HIDDEN, "out_features": 32, "bias": True}
BAD: dict[str, tuple[str, Any, str]] = {
    "no_json": ("modules.json", b"[{", "cannot be read"),
    "no_list": ("modules.json", {"path": ""}, "must be a list"),
    "no_objects": ("modules.json", [1, 2], "must be a list of objects"),
    "deep": ("modules.json", b"[" * 100_000, "cannot be read"),
    "huge": ("modules.json", b" " * (1 << 21), "cannot be read"),
    "not_utf8": ("modules.json", b"\xff\xfe[]", "cannot be read"),
    "key_twice": ("modules.json", b'[{"path": "", "path": "x"}]', "is there twice"),
    "many": ("modules.json", listed() * 100, "at most 64"),
    "above": ("modules.json", listed(path="../2_Dense"), "not the name of a folder"),
    "absolute": ("modules.json", listed(path="/etc"), "not the name of a folder"),
    "below": ("modules.json", listed(path="a/b"), "not the name of a folder"),
    "backslash": ("modules.json", listed(path="a\\b"), "not the name of a folder"),
    "dots": ("modules.json", listed(path=".."), "not the name of a folder"),
    "zero": ("modules.json", listed(path="a\0b"), "not the name of a folder"),
    "number": ("modules.json", listed(path=3), "not the name of a folder"),
    "empty": ("modules.json", listed(path=""), "not the name of a folder"),
    "absent": ("modules.json", listed(path="3_Dense"), "3_Dense.*cannot be read"),
    "unknown": ("modules.json", listed(type="mine.Router"), "a module of type 'mine.Router'"),
    "no_type": ("modules.json", listed(type=None), "a module of type None"),
    "twice": ("modules.json", [*listed(), {"path": "1_Pooling", "type": "a.Pooling"}], "a module of type 'a.Pooling'"),
    "dense_first": ("modules.json", [listed()[0], listed()[2], listed()[1]], "models.Pooling' at this place"),
    "normal_first": ("modules.json", [listed()[0], {"path": "3", "type": "a.Normalize"}, listed()[1]],
                     "models.Pooling' at this place"),
    "elsewhere": ("modules.json", [{"path": "0_T", "type": "a.Transformer"}], "give that folder as the model"),
    "pooling_list": (POOLING, [1], "not an object"),
    "two_modes": (POOLING, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "pools by"),
    "two_named": (POOLING, {"pooling_mode": ["mean", "cls"]}, "pools by"),
    "max": (POOLING, {"pooling_mode_max_tokens": True}, "pools by"),
    "odd_mode": (POOLING, {"pooling_mode": [[1]]}, "pools by"),
    "mode_object": (POOLING, {"pooling_mode": {"mean": True}}, "pools by"),
    "no_prompt": (POOLING, {"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
    "no_sizes": (DENSE, {}, "must be whole numbers"),
    "huge_size": (DENSE, {**SIZES, "out_features": 10**12}, "must be whole numbers"),
    "negative": (DENSE, {**SIZES, "in_features": -3}, "must be whole numbers"),
    "text": (DENSE, {**SIZES, "in_features": "48"}, "must be whole numbers"),
    "truth": (DENSE, {**SIZES, "in_features": True}, "must be whole numbers"),
    "bias": (DENSE, {**SIZES, "bias": "no"}, "bias='no'"),
    "other_width": (DENSE, {**SIZES, "in_features": 47}, "in_features=47, and the row before has 48"),
    "other_shape": (DENSE, {**SIZES, "out_features": 31}, "shape"),
    "bias_absent": (DENSE, {**SIZES, "bias": False}, "of no use"),
    "own_code": (DENSE, {**SIZES, "activation_function": "mine.Tanh"}, "activation_function 'mine.Tanh'"),
    "activation": (DENSE, {**SIZES, "activation_function": "torch.nn.Softmax"}, "is not served"),
    "residual": (DENSE, {**SIZES, "use_residual": True}, "use_residual"),
    "of_tokens": (DENSE, {**SIZES, "module_input_name": "token_embeddings"}, "single tokens"),
    "prompts": ("config_sentence_transformers.json", {"prompts": ["a"]}, "prompts must be"),
    "prompt_text": ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "prompts must be"),
    "default": ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "a"}, "is none of"),
    "default_list": ("config_sentence_transformers.json", {"default_prompt_name": ["a"]}, "is none of"),
    "length": ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length=0"),
    "length_text": ("sentence_bert_config.json", {"max_seq_length": "9"}, "max_seq_length='9'"),
    "task": ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "fill-mask"),
    "chat": ("sentence_bert_config.json", {"modality_config": {"message": {"method": "forward"}}}, "served is a"),
    "layer": ("sentence_bert_config.json", {"modality_config": {"text": {
        "method": "forward", "method_output_name": "pooler_output"}}}, "last_hidden_state are taken"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_files_that_are_refused(tmp_path: Path, case: str) -> None:
    good(tmp_path)
    name, content, reason = BAD[case]
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / name).write_bytes(data)
    with pytest.raises((CheckpointError, UnsupportedModelError, QuireError), match=reason):
        open_engine(tmp_path)


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    good(tmp_path)
    open_engine(tmp_path)
    os.remove(tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: .*sentence_dense\.0"):
        open_engine(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    good(tmp_path)
    os.remove(tmp_path / POOLING)
    os.mkfifo(tmp_path / POOLING)
    with pytest.raises(CheckpointError, match="1_Pooling"):
        open_engine(tmp_path)


# -- the hub -----------------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("revision", [None, "main"])
def test_files_in_folders_are_fetched_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    """From the same commit, and nothing but them."""
    folder = tmp_path / COMMIT
    good(folder)
    calls: list[dict[str, Any]] = []

    def take(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", take)
    assert resolve_weights("org/model", revision) == folder
    first, second = calls
    assert (first["revision"], second["revision"]) == (revision, COMMIT)
    assert "*/*" in first["ignore_patterns"] and second["ignore_patterns"] == []
    files = ("config.json", "model.safetensors", "pytorch_model.bin")
    folders = ("1_Pooling", "2_Dense", "3_Normalize")
    assert sorted(second["allow_patterns"]) == sorted(f"{one}/{file}" for one in folders for file in files)


@pytest.mark.parametrize("name", ["..", "*", "a/b", "?", "[ab]", "", ".git"])
def test_odd_names_are_never_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = tmp_path / COMMIT
    good(folder)
    write(folder / "modules.json", listed(path=name))
    calls: list[list[str]] = []

    def take(_: str, **options: Any) -> str:
        calls.append(options["allow_patterns"])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", take)
    resolve_weights("org/model")
    assert [one for one in calls[1] if not one.startswith("1_Pooling/")] == []


@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_the_list_of_modules_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    base(tmp_path, family)
    modules(tmp_path, "Pooling", "Dense", "Normalize")
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    dense(tmp_path, 2, HIDDEN, 8, "Tanh", True, False)
    opened: list[Path] = []
    monkeypatch.setattr(checkpoint_modules, "open_plain", lambda file: opened.append(file) or open_plain(file))
    assert open_engine(tmp_path).llm_engine.pooling is not None
    assert opened == [tmp_path / "modules.json"]
    modules(tmp_path, "Pooling", "Dense")  # another one is read
    assert open_engine(tmp_path).llm_engine.pooling is not None
    assert len(opened) == 2


def test_a_folder_here_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked"))
    assert resolve_weights(str(tmp_path)) == tmp_path
