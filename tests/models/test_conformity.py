"""What a plug-in's class gets wrong is found when a checkpoint is loaded: by name, and with the way out."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from quire import demo, kernels
from quire.checkpoint.files import SINGLE, Checkpoint
from quire.errors import CheckpointError, UnsupportedModelError
from quire.models import loader
from quire.models.base import CausalLM
from quire.models.llama import LlamaForCausalLM
from quire.models.loader import fill_again, load_model
from quire.models.vision.base import VisionLanguageModel
from tests.models import run_model, tiny

LLAMA = next(iter(tiny.TABLE))


@pytest.fixture
def load(checkpoint, tmp_path, monkeypatch) -> Callable[..., Any]:
    """load(class or what to do to a Llama when it is built, extra tensors, dtype) -> the model."""

    def loaded(what: Any, tensors: dict[str, torch.Tensor] | None = None, dtype: str = "auto") -> CausalLM:
        path = tmp_path / "model"
        shutil.copytree(checkpoint(LLAMA, "gqa"), path, dirs_exist_ok=True)
        if tensors:
            save_file(load_file(path / SINGLE) | tensors, path / SINGLE)
        monkeypatch.setattr(loader, "_model_class", lambda *_: what if isinstance(what, type) else changed(what))
        return load_model(path, dtype)

    return loaded


def changed(change: Callable[[Any], object]) -> type[CausalLM]:
    class Changed(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            change(self)

    return Changed


def refused(load: Any, what: Any, *parts: str, error: type[Exception] = UnsupportedModelError, **more: Any) -> None:
    with pytest.raises(error) as caught:
        load(what, **more)
    for part in (*parts, "" if error is CheckpointError else "adding-a-model"):
        assert part in str(caught.value)


def put(name: str, module: nn.Module | None) -> Callable[[Any], None]:
    owner, _, leaf = name.rpartition(".")
    return lambda model: setattr(model.get_submodule(owner), leaf, module)


# Layers that are not quire's


@pytest.mark.parametrize(
    ("name", "module", "parts"),
    [
        ("model.layers.1.mlp.down_proj", nn.Linear(48, 32, bias=False), ["quire.layers.Linear"]),
        ("model.layers.1.mlp.down_proj", Conv1D(32, 48), ["Conv1D", "quire.layers.Linear"]),
        ("model.embed_tokens", nn.Embedding(97, 32), ["torch.nn", "quire.layers.Embedding"]),
        ("model.norm", nn.LayerNorm(32), ["quire.layers.LayerNorm"]),
        ("model.norm", nn.RMSNorm(32), ["quire.layers.RMSNorm"]),
        ("model.layers.0.mlp.activate", nn.SiLU(), ["quire.layers.activation"]),
        ("model.layers.0.attend", nn.MultiheadAttention(32, 4), ["MultiheadAttention"]),
    ],
)
def test_layers_that_are_not_quires(load, name, module, parts):
    refused(load, put(name, module), f"{name} is ", "batch", "LoRA", *parts)


def test_many_of_them_are_counted(load):
    def change(model):
        for number in range(3):
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                setattr(model.model.layers[number].mlp, leaf, nn.Linear(2, 2))

    refused(load, change, "model.layers.0.mlp.gate_proj is torch.nn", "and 4 more")


def test_what_does_nothing_to_a_row_is_taken(load, checkpoint):
    want = run_model.logits(load_model(checkpoint(LLAMA, "gqa")), tiny.token_ids(8))
    model = load(put("model.layers.0.drop", nn.Sequential(nn.Dropout(0.5), nn.Identity())))
    assert torch.equal(run_model.logits(model, tiny.token_ids(8)), want)


# What the engine asks of a class


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda model: delattr(model, "kv_spec"), ["sets no `kv_spec`", "KVSpec("]),
        (lambda model: setattr(model, "kv_spec", (3, 2, 8)), ["has a tuple for `kv_spec`"]),
        (lambda model: delattr(model, "max_model_len"), ["sets no `max_model_len`"]),
        (lambda model: delattr(model, "lm_head"), ["sets no `lm_head`", "quire.layers.Linear"]),
    ],
)
def test_attributes_that_are_not_set(load, change, parts):
    refused(load, change, "Changed", *parts)


@pytest.mark.parametrize(
    ("base", "method"), [(CausalLM, "embed"), (CausalLM, "forward"), (VisionLanguageModel, "encode")]
)
def test_methods_that_are_not_defined(load, base, method):
    own = {"forward": lambda *_: None, "embed": lambda *_: None, "image_layout": lambda *_: None}
    own.pop(method, None)
    refused(load, type("Unfinished", (base,), own), f"Unfinished has no method `{method}`")


@pytest.mark.parametrize(
    ("table", "value", "said"),
    [
        ("checkpoint_renames", (r"a\.(.+)", r"b.\1"), "it should look like [("),
        ("checkpoint_renames", {r"a\.(.+)": r"b.\1"}, "it should look like [("),
        ("checkpoint_ignored", ".+bias", "it should look like ["),
        ("checkpoint_transposed", ".+bias", "it should look like ["),
        ("checkpoint_transposed", ["(.+"], "no regular expression"),
        ("checkpoint_renames", [("(.+", "a")], "no regular expression"),
        ("tied_weights", ("a", "b"), "it should look like {"),
    ],
)
def test_tables_of_another_form(load, table, value, said):
    refused(load, lambda model: setattr(model, table, value), "Changed", said, "docs/adding-a-model.md")


# Buffers


def with_buffer(dtype: torch.dtype = torch.float32, persistent: bool = True) -> Callable[[Any], None]:
    return lambda model: model.model.layers[1].mlp.register_buffer(
        "e_score_correction_bias", torch.empty(4, dtype=dtype), persistent=persistent
    )


NAME = "model.layers.1.mlp.e_score_correction_bias"
BIAS = torch.tensor([0.1, 1e-9, 3.0, -7.7])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_buffer_is_loaded_and_keeps_its_dtype(load, tmp_path, dtype):
    model = load(with_buffer(), {NAME: BIAS}, dtype)
    buffer = model.get_buffer(NAME)
    assert buffer.dtype is torch.float32 and torch.equal(buffer, BIAS)
    assert NAME not in dict(model.named_parameters())
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for tensor in model.state_dict().values():
        tensor.zero_()
    fill_again(model, Checkpoint(tmp_path / "model"))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_a_buffer_of_whole_numbers(load):
    table = torch.arange(4)
    assert torch.equal(load(with_buffer(torch.int64), {NAME: table}).get_buffer(NAME), table)
    refused(load, with_buffer(torch.int64), NAME, "float32", "int64", error=CheckpointError, tensors={NAME: BIAS})
    refused(load, with_buffer(), NAME, "int64", error=CheckpointError, tensors={NAME: table})


def test_buffers_are_matched_both_ways(load):
    refused(load, with_buffer(), f"missing: 1 ({NAME})", error=CheckpointError)
    refused(load, lambda model: None, f"of no use: 1 ({NAME})", error=CheckpointError, tensors={NAME: BIAS})
    refused(load, with_buffer(), "shape (5,)", error=CheckpointError, tensors={NAME: torch.ones(5)})


def test_buffers_count_as_memory(load, monkeypatch):
    monkeypatch.setattr("quire.checkpoint.weights.huge_pages.available_bytes", lambda device: 100_000)
    many = {NAME: torch.ones(30_000)}
    size = lambda model: model.model.layers[1].mlp.register_buffer("e_score_correction_bias", torch.empty(30_000))  # noqa: E731
    with pytest.raises(CheckpointError, match="weights take"):
        load(size, many)


def test_a_buffer_that_the_model_computes(load):
    def change(model):
        with torch.device("cpu"):
            model.register_buffer("angles", torch.arange(4.0), persistent=False)
            model.register_buffer("table", torch.arange(4.0))

    assert load(change).table.tolist() == [0, 1, 2, 3]
    assert load(change, {"table": BIAS}).table.tolist() == BIAS.tolist()  # the files outweigh it


def test_a_buffer_without_numbers(load):
    with pytest.raises(UnsupportedModelError, match=rf"{NAME} has no numbers.*torch\.device"):
        load(with_buffer(persistent=False))


# What the kernels refuse


def attending(**options: Any) -> Callable[[Any], None]:
    """Let layer 1 ask for other attention."""

    def change(model: Any) -> None:
        module = model.model.layers[1].self_attn

        def forward(x, rope, ctx, cache):
            query, key, value = module.qkv(x).view(len(x), -1, 8).split([4, 2, 2], 1)
            kernels.write_kv(key, value, cache.keys, cache.values, ctx.slot_mapping)
            out = kernels.paged_attention(
                query, cache.keys, cache.values, ctx.block_table, ctx.query_start, ctx.context_len, 0.3, **options
            )
            return module.o_proj(out.view(len(x), -1))

        module.forward = forward

    return change


def test_options_of_attention_that_the_device_lacks(load, monkeypatch):
    """Each set is tried once on the device, with one token."""
    calls = []

    def limited(query, keys, *others):
        calls.append(len(query))
        if others[5]:
            raise ValueError("window: this device has none")
        return torch.zeros_like(query)

    monkeypatch.setattr(kernels.backend(), "paged_attention", limited)
    refused(load, attending(window=4), "model.layers.1", "window: this device has none", "cpu")
    load(attending())
    assert set(calls) == {1} and len(calls) <= 5


def wrong_kv_spec(model: Any) -> None:
    model.kv_spec = dataclasses.replace(model.kv_spec, head_dim=16)


def wrong_activation(model: Any) -> None:
    model.model.layers[2].mlp.activate = lambda x: kernels.activation(x, "thunk")


@pytest.mark.parametrize(
    ("change", "dtype", "parts"),
    [
        (wrong_kv_spec, "auto", ["model.layers.0.self_attn", "(2, 2, 8)"]),
        (wrong_activation, "auto", ["model.layers.2.mlp", "thunk"]),
    ],
)
def test_arguments_that_no_kernel_takes(load, change, dtype, parts):
    refused(load, change, *parts, dtype=dtype)


def widening(model: Any) -> None:
    norm = model.model.layers[1].post_attention_layernorm
    own = type(norm).forward
    norm.forward = lambda *arguments: own(norm, *arguments) * torch.ones(1, device=norm.weight.device)[0:1]


def test_a_dtype_that_does_not_go_through(load):
    """Multiplied by a float32, a row of bfloat16 is one of float32, which no product with the weights takes."""
    load(widening)
    refused(load, widening, "model.layers.1.mlp", "bfloat16", dtype="bfloat16")


def looking(answer: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        embed = model.embed
        model.embed = lambda ids: embed(ids) if ids.max().item() < 5 else answer
        if answer is not None:
            model.embed = lambda ids: embed(ids)[:, : 5 if ids.max().item() < 5 else 32]

    return change


def test_a_step_that_needs_numbers_is_run_with_the_weights(load):
    load(looking(None))
    refused(load, looking(5), "model.layers.0")


@pytest.mark.parametrize("architecture", tiny.TABLE)
def test_a_rehearsal_needs_no_numbers_and_leaves_nothing(checkpoint, monkeypatch, architecture):
    monkeypatch.setattr(loader, "run_once", lambda *_: pytest.fail("it needs numbers"))
    for variant in tiny.TABLE[architecture][2]:
        model = load_model(checkpoint(architecture, variant), "bfloat16")
        assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_a_rehearsal_of_a_model_that_sees(monkeypatch):
    monkeypatch.setattr(loader, "run_once", lambda *_: pytest.fail("it needs numbers"))
    load_model(demo.model_path())
