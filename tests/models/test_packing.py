"""A model whose weights are packed gives the very bits of the one with rows, and stays what its files say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, NomicBertConfig, NomicBertModel, Qwen3Config, Qwen3ForCausalLM

from quire import LLM, registry
from quire.checkpoint.opening import open_checkpoint
from quire.errors import CheckpointError
from quire.kernels import native, packed
from quire.layers import Embedding, Linear
from quire.layers.shards import Shard
from quire.layers.stages import Stage
from quire.lora.base import Base
from quire.models import decoder, loader, packing
from quire.models.base import CausalLM
from quire.models.llama import LlamaForCausalLM as QuireLlama
from quire.models.loader import fill_again, load_model
from quire.models.pooling.purpose import Purpose
from tests.kernels.exchange_parties import shared, together
from tests.models import rows, run_model, tiny
from tests.models.test_staged import BLOCK, CHUNKS, QUICK, Pipe, logits
from tests.models.tiny import VOCAB

pytestmark = pytest.mark.skipif(not native.packs_rows(torch.bfloat16), reason="this processor multiplies by rows")

LEAST = packing.LEAST
IDS = [(7 * place) % (VOCAB - 4) + 3 for place in range(sum(CHUNKS))]
NONE_OF_WHOLE_GROUPS = {  # of the layers that their tiny models have
    "DeepseekV3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "Glm4MoeLiteForCausalLM",
    "MiniCPM3ForCausalLM", "YoutuForCausalLM", "VaultGemmaForCausalLM",
}  # fmt: skip
EVERY = [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in sorted(rows.all_rows())]


@pytest.fixture
def llama(tmp_path: Path) -> Callable[..., Path]:
    """Saves one of whole groups; heads of 3 x 32 and 32 columns."""

    def make(**settings: object) -> Path:
        sizes = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": False}
        torch.manual_seed(3)
        LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **settings})).to(torch.bfloat16).save_pretrained(tmp_path)
        return tmp_path

    return make


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CausalLM]:
    def make(path: Path, packs: bool, **options: object) -> CausalLM:
        monkeypatch.setattr(packing, "LEAST", 0 if packs else 1 << 60)
        return load_model(path, "bfloat16", **options)  # type: ignore[arg-type]

    return make


def names(model: CausalLM) -> set[str]:
    """Of the layers that are packed."""
    found = model.named_modules()
    return {name for name, one in found if isinstance(one, Linear) and packed.is_packed(one.weight)}


def run(model: CausalLM) -> torch.Tensor:
    return run_model.logits(model, IDS, CHUNKS, block_size=BLOCK)


@pytest.mark.parametrize("architecture", EVERY)
def test_every_family(checkpoint: Callable[[str, str], Path], load: Callable[..., CausalLM], architecture: str) -> None:
    some = False
    for variant in rows.entry(architecture)[2]:
        path = checkpoint(architecture, variant)
        model, wanted = load(path, True), run(load(path, False))
        some |= bool(names(model))
        assert torch.equal(run(model), wanted), variant
        read_again(model, path)
        assert torch.equal(run(model), wanted), variant
    assert some is (architecture not in NONE_OF_WHOLE_GROUPS)


def test_a_projection_that_is_normalised(tmp_path: Path, load: Callable[..., CausalLM]) -> None:
    """Baichuan 2's, whenever its numbers have been read."""
    tiny.build("BaichuanForCausalLM", "baichuan2_7b", tmp_path, vocab_size=128)
    model, wanted = load(tmp_path, True), run(load(tmp_path, False))
    assert "lm_head" in names(model) and torch.equal(run(model), wanted)
    read_again(model, tmp_path)
    assert "lm_head" in names(model) and torch.equal(run(model), wanted)


def test_all_layers(llama: Callable[..., Path], load: Callable[..., CausalLM]) -> None:
    path = llama()
    model, plain = load(path, True), load(path, False)
    layers = {name for name, one in plain.named_modules() if isinstance(one, Linear)}
    assert names(model) == layers and len(layers) == 15 and not names(plain)
    assert torch.equal(run(model), run(plain))
    for name in layers:
        own, other = model.get_submodule(name), plain.get_submodule(name)
        assert isinstance(own, Linear) and isinstance(other, Linear)
        assert torch.equal(own.format.rows(own, 3, 31), other.weight[3:31].float())


def test_small_models_keep_their_rows(llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LEAST", LEAST)
    assert not names(load_model(llama(), "bfloat16"))


def test_a_projection_that_is_the_embedding(llama: Callable[..., Path], load: Callable[..., CausalLM]) -> None:
    path = llama(tie_word_embeddings=True)
    model, plain = load(path, True), load(path, False)
    table, wanted = plain.get_submodule("model.embed_tokens").weight.data, run(plain)
    assert len(names(model)) == 15 and torch.equal(run(model), wanted)
    base = Base(model)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert base.shape(name) == table.shape and base.equals(name, table) and not base.equals(name, table.flip(0))
    read_again(model, path)
    assert len(names(model)) == 15 and torch.equal(run(model), wanted)


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        ("GemmaForCausalLM", "mha"), ("Gemma3ForCausalLM", "as_published"), ("GraniteForCausalLM", "tied"),
        ("CohereForCausalLM", "as_published"), ("BloomForCausalLM", "bloom"), ("OPTForCausalLM", "post_norm"),
    ],
)  # fmt: skip
def test_families_whose_projection_is_the_embedding(
    tmp_path: Path, load: Callable[..., CausalLM], architecture: str, variant: str
) -> None:
    tiny.build(architecture, variant, tmp_path, vocab_size=128, hidden_size=64)
    model, wanted = load(tmp_path, True), run(load(tmp_path, False))
    assert [name for name, one in model.named_modules() if isinstance(one, Embedding) and packed.is_packed(one.weight)]
    assert torch.equal(run(model), wanted)
    read_again(model, tmp_path)
    assert torch.equal(run(model), wanted)


def test_a_projection_that_others_look_at_keeps_its_rows(
    llama: Callable[..., Path], load: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two projections, or a table whose class may look at its rows."""

    class Table(Embedding):
        pass

    path = llama(tie_word_embeddings=True)
    with monkeypatch.context() as patched:
        patched.setattr(decoder, "Embedding", Table)
        model = load(path, True)
    assert isinstance(model.get_submodule("model.embed_tokens"), Table) and "lm_head" not in names(model)
    path = llama()
    model = load(path, False)
    mlp = model.get_submodule("model.layers.0.mlp")
    mlp.gate_proj.weight = mlp.up_proj.weight
    monkeypatch.setattr(packing, "LEAST", 0)
    packing.pack_weights(model)
    kept = {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")}
    assert len(names(model)) == 13 and names(model).isdisjoint(kept)


def test_some_layers_alone(llama: Callable[..., Path], load: Callable[..., CausalLM]) -> None:
    """Rows of no whole group stay rows, merged with others that are packed."""
    path = llama(num_key_value_heads=1, num_attention_heads=4, head_dim=24, vocab_size=97)
    model = load(path, True)
    assert names(model) == {
        f"model.layers.{layer}.{name}"
        for layer in range(2)
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    }
    assert torch.equal(run(model), run(load(path, False)))


def test_other_dtypes(llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LEAST", 0)
    path = llama()
    assert not names(load_model(path, "float32")) and not names(load_model(path, "float16"))
    assert not names(load_model(path, "bfloat16", quantized="int8"))


def test_read_again(llama: Callable[..., Path], load: Callable[..., CausalLM]) -> None:
    """As an engine does that has slept."""
    path = llama()
    model = load(path, True)
    wanted, before = run(model), names(model)
    read_again(model, path)
    assert torch.equal(run(model), wanted) and names(model) == before


def test_read_again_in_vain(
    llama: Callable[..., Path], load: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = llama()
    model = load(path, True)
    wanted, before = run(model), names(model)

    def fails(*_: object) -> None:
        raise CheckpointError("gone")

    weights = {name: model.get_parameter(f"{name}.weight") for name in before}
    numbers = {name: one.clone() for name, one in weights.items()}
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="gone"):
        patched.setattr(loader, "read_into", fails)
        fill_again(model, open_checkpoint(path, "auto"))
    assert names(model) == before
    assert all(torch.equal(weights[name], numbers[name]) for name in before), "memory that was given back is written to"
    read_again(model, path)
    assert torch.equal(run(model), wanted)


def read_again(model: CausalLM, path: Path) -> None:
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
    fill_again(model, open_checkpoint(path, "auto"))


QWEN = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"]}


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ({**CLASSIFIER, "classifier_from_token": [*range(5, 37)], "method": "no_post_processing"}, {}),
        ({**CLASSIFIER, "num_labels": 32}, {"enable_lora": True}),
    ],
    ids=["of tokens", "an adapter's"],
)
def test_heads_that_the_files_do_not_have(tmp_path: Path, overrides: dict[str, Any], options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    Qwen3ForCausalLM(Qwen3Config(**QWEN)).to(torch.bfloat16).save_pretrained(tmp_path)
    pooling: dict[str, Any] = {"runner": "pooling", "skip_tokenizer_init": True, "num_gpu_blocks_override": 16}
    llm = LLM(str(tmp_path), dtype="bfloat16", hf_overrides=overrides, **pooling, **options)

    def answer() -> list[float]:
        return llm.classify([{"prompt_token_ids": [*range(3, 20)]}], use_tqdm=False)[0].outputs.probs

    model = llm.llm_engine.executor.runner.model
    assert "score" in names(model)
    head = layer_rows(model, "score").clone()
    before = None if options else answer()  # of no head there is no answer without its adapter
    llm.sleep(level=2)
    llm.wake_up()
    assert "score" in names(model) and torch.equal(layer_rows(model, "score"), head)
    assert options or answer() == before


def test_fused_files_of_an_encoder(tmp_path: Path, load: Callable[..., CausalLM]) -> None:
    """Nomic's, whose shapes are asked for when they are read again too."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64}
    config = NomicBertConfig(num_hidden_layers=1, num_attention_heads=2, pad_token_id=0, **sizes)
    NomicBertModel(config).to(torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        tensors[name.replace(".q_proj.", ".Wqkv.")] = torch.cat(parts)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = load(tmp_path, True, purpose=Purpose())
    before = {name: layer_rows(model, name).clone() for name in names(model)}
    assert before
    read_again(model, tmp_path)
    assert names(model) == set(before)
    assert all(torch.equal(layer_rows(model, name), before[name]) for name in before)


def layer_rows(model: CausalLM, name: str) -> torch.Tensor:
    layer = model.get_submodule(name)
    assert isinstance(layer, Linear)
    return layer.format.rows(layer, 0, layer.out_features)


class Other(QuireLlama):
    """As a plug-in's, which may look at any weight."""


@pytest.mark.parametrize("says", [False, True])
def test_a_plug_in_says_whether(
    llama: Callable[..., Path], load: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch, says: bool
) -> None:
    monkeypatch.setattr(Other, "packs_weights", says)
    monkeypatch.setattr(registry, "resolve", lambda *_: Other)
    model = load(llama(), True)
    assert isinstance(model, Other) and bool(names(model)) is says


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_shares_of_processes(llama: Callable[..., Path], load: Callable[..., CausalLM], size: int, tied: bool) -> None:
    path = llama(tie_word_embeddings=tied)
    wanted = run(load(path, False))

    def by_one(rank: int, parties: list) -> torch.Tensor:  # type: ignore[type-arg]
        model = load(path, True, shard=Shard(rank, size, parties[rank]))
        assert names(model)
        for parameter in model.parameters():  # others' rows have no numbers of this process's
            parameter.data.fill_(float("nan"))
        fill_again(model, open_checkpoint(path, "auto"))
        return run(model)

    with closing(shared(size)) as exchanges:
        parties = next(exchanges)
        own: list[torch.Tensor] = together(size, lambda rank: by_one(rank, parties))
    assert all(torch.equal(one, wanted) for one in own)


@pytest.mark.parametrize("tied", [False, True])
def test_stages(llama: Callable[..., Path], load: Callable[..., CausalLM], tied: bool) -> None:
    path, pipe = llama(tie_word_embeddings=tied), Pipe()
    stages = [load(path, True, stage=Stage(number, 2, pipe)) for number in range(2)]
    assert all(names(stage) for stage in stages) and "lm_head" in names(stages[1])
    wanted = run(load(path, False))
    assert torch.equal(logits(stages, IDS), wanted)
    for stage in stages:
        fill_again(stage, open_checkpoint(path, "auto"))
    assert torch.equal(logits(stages, IDS), wanted)


def test_what_an_adapter_saves_is_compared_with_rows(llama: Callable[..., Path], load: Callable[..., CausalLM]) -> None:
    path = llama()
    base, plain = Base(load(path, True)), load(path, False)
    saved = plain.lm_head.weight.data.clone()
    assert base.shape("lm_head.weight") == saved.shape and base.equals("lm_head.weight", saved)
    saved[70, 5] += 1
    assert not base.equals("lm_head.weight", saved)
