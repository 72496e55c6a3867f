"""Adapters of models that make vectors and classes, against PEFT: heads that come with them, names without a prefix.

PEFT makes, saves and reloads each adapter, all of its tensors random, and runs alone in float64.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, PoolingParams
from quire.errors import AdapterError, CheckpointError, RequestError
from tests.lora.peft_world import edit, randomise
from tests.models.pooling.worlds import classes, engine, given, hidden, largest_error, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

BARE = PoolingParams(use_activation=False)
BERT = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 80, "max_position_embeddings": 70, "initializer_range": 0.2}  # fmt: skip
DISTIL = {"vocab_size": 300, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 80, "max_position_embeddings": 70,
          "initializer_range": 0.2}  # fmt: skip
LLAMA = {**BERT, "num_key_value_heads": 2, "initializer_range": 0.2}
SIZES = {"Bert": BERT, "Roberta": BERT, "DistilBert": DISTIL, "Llama": LLAMA, "Qwen2": LLAMA}
DECODERS = ("Llama", "Qwen2")
CLASSES = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification", "FEATURE_EXTRACTION": "Model"}
QUERY = {"Bert": "query", "Roberta": "query", "DistilBert": "q_lin", "Llama": "q_proj", "Qwen2": "q_proj"}
KEY = {"Bert": "key", "Roberta": "key", "DistilBert": "k_lin", "Llama": "k_proj", "Qwen2": "k_proj"}
OUT = {"Bert": "attention.output.dense", "Roberta": "attention.output.dense", "DistilBert": "out_lin",
       "Llama": "o_proj", "Qwen2": "o_proj"}  # fmt: skip
DOWN = {"Bert": "output.dense", "Roberta": "output.dense", "DistilBert": "lin2", "Llama": "down_proj",
        "Qwen2": "down_proj"}  # fmt: skip
NORM = {"Bert": "output.LayerNorm", "Roberta": "output.LayerNorm", "DistilBert": "output_layer_norm",
        "Llama": "input_layernorm", "Qwen2": "norm"}  # fmt: skip
WORDS = {"Llama": "embed_tokens", "Qwen2": "embed_tokens"}
# PEFT takes some heads for a linear layer like others, and cannot save them then.
HEADS = ["classifier", "pre_classifier", "score"]
ALL_LINEAR = {"r": 4, "target_modules": "all-linear", "exclude_modules": HEADS}
LENGTHS = (1, 5, 17, 64)


@dataclass
class PooledWorld:
    """One base model, transformers' and the engine's, and what is asked of it."""

    family: str
    task: str
    theirs: Any
    path: Path
    llm: LLM
    batch: list[list[int]]
    made: int = 0

    def train(self, seed: int = 0, **config: Any) -> Path:
        self.made += 1
        folder = self.path.parent / f"adapter{self.made}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(copy.deepcopy(self.theirs), LoraConfig(task_type=self.task, **config))
            randomise(model, seed)
            model.create_or_update_model_card = lambda folder: None
            model.save_pretrained(folder)
        return folder

    def expected(self, folder: Path | None) -> list[torch.Tensor]:
        """Bare numbers."""
        model = copy.deepcopy(self.theirs)
        if folder is not None:
            model = PeftModel.from_pretrained(model, folder)
        return self.numbers(model.double().eval())

    def numbers(self, model: Any) -> list[torch.Tensor]:
        if self.task != "FEATURE_EXTRACTION":
            return [classes(model, ids) for ids in self.batch]
        return [hidden(model, ids)[-1 if self.family in DECODERS else 0] for ids in self.batch]

    def ask(self, adapters: Any, batch: Sequence[list[int]] | None = None) -> list[torch.Tensor]:
        task = {"SEQ_CLS": "classify", "TOKEN_CLS": "token_classify", "FEATURE_EXTRACTION": "embed"}[self.task]
        wanted = given(self.batch if batch is None else batch)
        outputs = self.llm.encode(wanted, BARE, pooling_task=task, lora_request=adapters, use_tqdm=False)
        assert all(one.failure is None for one in outputs)
        return [one.outputs.data for one in outputs]

    def load(self, folder: Path) -> LoRARequest:
        self.llm.load_lora_adapter(folder.name, str(folder))
        return LoRARequest(folder.name)


Worlds = Callable[[str, str], PooledWorld]


def save_base(family: str, kind: str, folder: Path, **more: Any) -> Any:
    torch.manual_seed(4)
    config = getattr(transformers, f"{family}Config")(**{**SIZES[family], **more})
    model = getattr(transformers, family + kind)(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # biases at zero and norms at one would not show
                parameter.copy_(torch.rand(parameter.shape) + (0.5 if "weight" in name else -0.5))
    model.save_pretrained(folder)
    model.name_or_path = model.config._name_or_path = str(folder)
    return model


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    @cache
    def get(family: str, task: str) -> PooledWorld:
        path = tmp_path_factory.mktemp(f"{family}-{task}") / "base"
        theirs = save_base(family, CLASSES[task], path, **({} if task == "FEATURE_EXTRACTION" else {"num_labels": 3}))
        llm = engine(path, enable_lora=True, runner="pooling")
        return PooledWorld(family, task, theirs, path, llm, prompts(300, LENGTHS))

    return get


def cases(family: str, task: str) -> dict[str, dict[str, Any]]:
    """PEFT's fields, by what they are called here."""
    attention = [QUERY[family], KEY[family]]
    layers = "layers" if family in DECODERS else "layer"
    made: dict[str, dict[str, Any]] = {
        "middle_of_merged": {"r": 3, "target_modules": [KEY[family]]},
        "attention": {"r": 4, "target_modules": [*attention, OUT[family]]},
        "all_linear": {**ALL_LINEAR, "exclude_modules": HEADS if task == "TOKEN_CLS" or family == "DistilBert" else []},
        "patterns": {"r": 5, "target_modules": [*attention, DOWN[family]], "rank_pattern": {KEY[family]: 9},
                     "alpha_pattern": {DOWN[family]: 3}, "use_rslora": True},
        "dora": {"r": 4, "target_modules": [*attention, DOWN[family]], "use_dora": True},
        "one_layer": {"r": 4, "target_modules": attention, "layers_to_transform": [1], "layers_pattern": layers},
        "embedding": {"r": 4, "target_modules": [WORDS.get(family, "word_embeddings"), QUERY[family]]},
        "saved_norms": {"r": 4, "target_modules": attention, "modules_to_save": [NORM[family]]},
    }  # fmt: skip
    if family != "Llama":
        made["biases"] = {"r": 4, "target_modules": attention, "bias": "lora_only"}
    if family == "DistilBert" and task == "SEQ_CLS":
        made["both_heads"] = {"r": 4, "target_modules": attention, "modules_to_save": ["pre_classifier"]}
    if family == "Bert":
        made["dense"] = {"r": 4, "target_modules": ["query", "dense"]}  # which the pooler has too
    return made


CASES = [(family, task, case) for family in SIZES for task in CLASSES for case in cases(family, task)]


@pytest.mark.parametrize(("family", "task", "case"), CASES)
def test_parity(worlds: Worlds, family: str, task: str, case: str) -> None:
    world = worlds(family, task)
    folder = world.train(**cases(family, task)[case])
    request = world.load(folder)
    found, base = world.ask(request), world.ask(None)
    world.llm.unload_lora_adapter(folder.name)
    assert largest_error(found, world.expected(folder)) < 1e-5
    assert largest_error(base, world.expected(None)) < 1e-5
    if case != "one_layer":  # (of a prompt of one token, queries and keys change nothing)
        assert all(not torch.equal(one, other) for one, other in zip(found[1:], base[1:], strict=True))


@pytest.mark.parametrize(("family", "task"), [(family, task) for family in SIZES for task in CLASSES])
def test_the_same_bits_alone_and_beside_others(worlds: Worlds, family: str, task: str) -> None:
    world = worlds(family, task)
    attention = [QUERY[family], KEY[family]]
    settings: list[dict[str, Any]] = [
        {"r": 1, "target_modules": attention},
        {**ALL_LINEAR, "r": 16},
        {"r": 5, "target_modules": [KEY[family], DOWN[family]], "use_dora": True},
    ]
    folders = [world.train(seed, **one) for seed, one in enumerate(settings)]
    requests: list[LoRARequest | None] = [None, *map(world.load, folders)]
    alone = {
        (who, place): world.ask(request, [ids])[0]
        for who, request in enumerate(requests)
        for place, ids in enumerate(world.batch)
    }
    order = [*alone, *alone][:: 3 if len(alone) % 3 else 5]
    mixed = world.ask([requests[who] for who, _ in order], [world.batch[place] for _, place in order])
    assert all(torch.equal(one, alone[key]) for one, key in zip(mixed, order, strict=True))
    # One goes, another one comes under its name, and nobody else sees a difference.
    name = folders[1].name
    world.llm.unload_lora_adapter(name)
    world.llm.load_lora_adapter(name, str(folders[2]))
    after = world.ask([requests[who] for who, _ in order], [world.batch[place] for _, place in order])
    for one, (who, place) in zip(after, order, strict=True):
        assert torch.equal(one, alone[3 if who == 2 else who, place])
    for folder in folders:
        world.llm.unload_lora_adapter(folder.name)
    assert torch.equal(world.ask(None, world.batch[-1:])[0], alone[0, len(world.batch) - 1])


@pytest.mark.parametrize("family", DECODERS)
def test_prefixes_are_kept_for_each_adapter(worlds: Worlds, family: str) -> None:
    world = worlds(family, "FEATURE_EXTRACTION")
    prefix, tail = prompts(300, [48, 9], seed=8)
    folders = [world.train(seed, r=4, target_modules="all-linear") for seed in (5, 6)]
    requests = [None, *map(world.load, folders)]
    texts = [prefix + tail[:cut] for cut in (3, 9)]
    uncached = engine(world.path, enable_lora=True, runner="pooling", enable_prefix_caching=False)
    cold = PooledWorld(family, world.task, world.theirs, world.path, uncached, texts)
    for folder in folders:
        cold.load(folder)
    before = world.llm.llm_engine.stats().prefix_hits
    for text in [*texts, *texts]:
        for request in requests:
            assert torch.equal(world.ask(request, [text])[0], cold.ask(request, [text])[0])
    assert world.llm.llm_engine.stats().prefix_hits > before
    for folder in folders:
        world.llm.unload_lora_adapter(folder.name)


# -- heads that the base's files do not have ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("Bert", "Model"),
        ("Bert", "ForMaskedLM"),
        ("Roberta", "ForMaskedLM"),
        ("DistilBert", "Model"),
        ("Llama", "ForCausalLM"),
        ("Qwen2", "Model"),
    ],
)
@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS"])
def test_heads_that_adapters_bring(tmp_path: Path, family: str, kind: str, task: str) -> None:
    """The base was never a classifier; each adapter has a head of its own."""
    save_base(family, kind, tmp_path / "base")
    architecture = family + CLASSES[task]
    overrides = {"architectures": [architecture], "num_labels": 3}
    base = getattr(transformers, architecture).from_pretrained(tmp_path / "base", num_labels=3)
    with pytest.raises(CheckpointError, match="missing"):
        engine(tmp_path / "base", runner="pooling", hf_overrides=overrides)
    llm = engine(tmp_path / "base", enable_lora=True, runner="pooling", hf_overrides=overrides)
    world = PooledWorld(family, task, base, tmp_path / "base", llm, prompts(300, LENGTHS))
    pooled = {"modules_to_save": ["pooler"]} if family == "Bert" and task == "SEQ_CLS" and kind != "Model" else {}
    folders = [world.train(seed, r=3, target_modules=[KEY[family]], **pooled) for seed in range(2)]
    requests = [world.load(folder) for folder in folders]
    for folder, request in zip(folders, requests, strict=True):
        assert largest_error(world.ask(request), world.expected(folder)) < 1e-5
    with pytest.raises(RequestError, match="no head that gives classes: name an adapter"):
        world.ask(None)
    bare = world.train(r=3, target_modules=[KEY[family]])
    edit(bare, modules_to_save=None)
    tensors = load_file(bare / "adapter_model.safetensors")
    save_file({name: one for name, one in tensors.items() if "lora" in name}, bare / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"base model's files have no .*does not bring all of them"):
        llm.load_lora_adapter("bare", str(bare))
    assert len(llm.list_lora_adapters()) == 2


def test_such_heads_in_another_process_asleep_and_beside_int8(tmp_path: Path) -> None:
    save_base("Bert", "Model", tmp_path / "base", hidden_size=64, intermediate_size=128)
    overrides = {"architectures": ["BertForSequenceClassification"], "num_labels": 3}
    base = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    batch = prompts(300, LENGTHS)

    def world(**settings: Any) -> PooledWorld:
        llm = engine(tmp_path / "base", enable_lora=True, hf_overrides=overrides, **settings)
        return PooledWorld("Bert", "SEQ_CLS", base, tmp_path / "base", llm, batch)

    here, there, int8 = world(), world(executor="process"), world(quantization="int8")
    folder = here.train(r=3, target_modules=["query", "key"])
    expected = here.ask(here.load(folder))
    request = there.load(folder)
    assert all(map(torch.equal, there.ask(request), expected))
    for level in (1, 2):
        there.llm.sleep(level=level)
        there.llm.wake_up()
        assert all(map(torch.equal, there.ask(request), expected))
    with pytest.raises(RequestError, match="no head"):
        there.ask(None)
    found = int8.ask(int8.load(folder))
    assert 0 < largest_error(found, expected) < 0.2


# -- what does not fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "task", "reason"),
    [
        ("SEQ_CLS", "TOKEN_CLS", "trained to classify tokens, and this model classifies texts"),
        ("SEQ_CLS", "FEATURE_EXTRACTION", "trained for vectors of texts, and this model classifies texts"),
        ("TOKEN_CLS", "SEQ_CLS", "trained to classify texts, and this model classifies tokens"),
        ("FEATURE_EXTRACTION", "SEQ_CLS", r"makes vectors of texts: a base whose .*\*ForSequenceClassification"),
        ("FEATURE_EXTRACTION", "QUESTION_ANS", "no such task is served"),
        ("FEATURE_EXTRACTION", "SEQ_2_SEQ_LM", "no such task is served"),
    ],
)
@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_tasks_that_do_not_fit(worlds: Worlds, family: str, base: str, task: str, reason: str) -> None:
    world = worlds(family, base)
    folder = world.train(r=2, target_modules=[QUERY[family]])
    edit(folder, task_type=task)
    with pytest.raises(AdapterError, match=f"task_type={task}.*{reason}"):
        world.llm.load_lora_adapter("a", str(folder))
    assert world.llm.list_lora_adapters() == []


def test_a_generators_layers_may_be_an_embedders(worlds: Worlds, tmp_path: Path) -> None:
    """An adapter of LlamaForCausalLM, whose names have a prefix."""
    world = worlds("Llama", "FEATURE_EXTRACTION")
    generator = save_base("Llama", "ForCausalLM", tmp_path / "base")
    generator.model.load_state_dict(world.theirs.state_dict())
    other = PooledWorld("Llama", "CAUSAL_LM", generator, tmp_path / "base", world.llm, world.batch)
    folder = other.train(r=4, target_modules="all-linear")
    found = world.ask(world.load(folder))
    world.llm.unload_lora_adapter(folder.name)
    oracle = PeftModel.from_pretrained(copy.deepcopy(generator), folder).double().eval()
    expected = [hidden(oracle.base_model.model.model, ids)[-1] for ids in world.batch]
    assert largest_error(found, expected) < 1e-5


def test_a_classifiers_adapter_is_none_of_a_generator(worlds: Worlds, tmp_path: Path) -> None:
    world = worlds("Llama", "SEQ_CLS")
    folder = world.train(r=2, target_modules=["q_proj"])
    save_base("Llama", "ForCausalLM", tmp_path)
    llm = LLM(str(tmp_path), enable_lora=True, skip_tokenizer_init=True, num_gpu_blocks_override=16)
    with pytest.raises(AdapterError, match=r"task_type=SEQ_CLS.*this model generates"):
        llm.load_lora_adapter("a", str(folder))


@pytest.mark.parametrize("task", CLASSES)
def test_files_that_do_not_fit(worlds: Worlds, task: str) -> None:
    world = worlds("Bert", task)
    other = save_base("Bert", CLASSES[task], world.path.parent / "other", hidden_size=40, num_labels=4)
    wrong = PooledWorld("Bert", task, other, world.path.parent / "other", world.llm, []).train(target_modules=["query"])
    with pytest.raises(AdapterError, match="another base model"):
        world.llm.load_lora_adapter("a", str(wrong))
    folder = world.train(r=2, target_modules=["query"])
    config = json.loads((folder / "adapter_config.json").read_text())
    edit(folder, modules_to_save=[*(config["modules_to_save"] or []), "qa_outputs"])
    with pytest.raises(AdapterError, match="qa_outputs"):
        world.llm.load_lora_adapter("a", str(folder))
    assert world.llm.list_lora_adapters() == []
