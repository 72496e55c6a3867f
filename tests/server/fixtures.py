"""Two tiny random models on disk, one with a chat template, whose answers run on until they are cut off; a server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quire import LLM
from quire.demo import ADAPTERS, adapter_path
from tests.server.api_server import ONE_THREAD, ServerProcess, adapters

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}:{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
BOS, EOS, VOCAB = 1, 2, 300


def make_model(path: Path, template: str | None) -> Path:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a"], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = template
    wrapped.save_pretrained(path)

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # the letters' logits are random and the others' zero, so the end token never wins
        model.lm_head.weight[: ord("a") - 30] = 0
        model.lm_head.weight[ord("z") - 30 :] = 0
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Continues text."""
    return make_model(tmp_path_factory.mktemp("plain"), None)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a chat template."""
    return make_model(tmp_path_factory.mktemp("chat"), TEMPLATE)


# -- the API -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def adapter_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `demo` may load adapters from; empty at first."""
    return tmp_path_factory.mktemp("adapter-root")


@pytest.fixture(scope="session")
def demo(adapter_root: Path) -> Iterator[ServerProcess]:
    """A server of the bundled model and its two adapters; the base model has two names."""
    names = ("--served-model-name", "quire-demo", "--served-model-name", "org/quire")
    with ServerProcess(*names, *adapters(adapter_root), "--enable-prompt-embeds", **ONE_THREAD) as server:
        yield server


@pytest.fixture(scope="module")
def client(demo: ServerProcess) -> Iterator[OpenAI]:
    with demo.client() as client:
        yield client


@pytest.fixture(scope="module")
def http(demo: ServerProcess) -> Iterator[Any]:
    with demo.http() as client:
        yield client


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model without a server."""
    llm = LLM(enable_lora=True, enable_prompt_embeds=True, num_gpu_blocks_override=1024)
    for name in ADAPTERS:
        llm.load_lora_adapter(name, str(adapter_path(name)))
    return llm


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that adapters may be loaded from, with a good one in it."""
    path = tmp_path_factory.mktemp("root")
    shutil.copytree(adapter_path("french"), path / "good")
    return path
