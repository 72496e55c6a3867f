"""Adapters whose weights are damaged or belong to another model: each is refused, and nothing else is harmed."""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
from typing import Any

import pytest
import torch
from safetensors.torch import save

from quire import LLM
from quire.errors import AdapterError
from tests.lora import adapter_files as files
from tests.lora.adapter_faults import PROMPTS, Q, good, refused
from tests.lora.adapter_files import ask, config, no_adapters, open_llm, tensors
from tests.multimodal.tiny_vision import build
from tests.platform.conftest import make_llama

pytestmark = pytest.mark.usefixtures("unharmed")


# -- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 4, 8, 100, -1])
def test_a_truncated_file(llm, tmp_path, left):
    data = save(good())
    files.write(tmp_path, config(), data[:left])
    refused(llm, tmp_path, "adapter_model.safetensors: is damaged or no safetensors file")


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 8 + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 30) + b'{"a":{"dtype":"F32","shape":[9',
        struct.pack("<Q", 62) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,9999999999]}}'[:62],
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}    ' + b"\0" * 16,
        struct.pack("<Q", 60) + b'{"a":{"dtype":"Q4","shape":[4],"data_offsets":[0,16]}}      ' + b"\0" * 16,
        pickle.dumps({"a": 1}),
        os.urandom(5000),
    ],
)
def test_no_safetensors_file(llm, tmp_path, data):
    files.write(tmp_path, config(), data)
    refused(llm, tmp_path, "is damaged or no safetensors file")


def header(shapes: dict[str, list[int]]) -> bytes:
    """Of float32 tensors, one behind the other."""
    described, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        described[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize("extra", ["nobody.weight", f"{Q}.lora_A.weight", "base_model.model.lm_head.weight",
                                   "base_model.model.model.norm.original_module.weight"])  # fmt: skip
def test_a_large_file_is_refused_by_its_header(llm, tmp_path, extra, monkeypatch):
    """Half a gigabyte of nothing: refused by names and sizes, before it is read."""
    shapes = {name: list(tensor.shape) for name, tensor in good().items()} | {extra: [1 << 27]}
    data = header(shapes)
    files.write(tmp_path, config(), data)
    os.truncate(tmp_path / "adapter_model.safetensors", len(data) + 4 * sum(map(math.prod, shapes.values())))

    def read(*_: Any) -> Any:
        raise AssertionError("it is read")

    monkeypatch.setattr("quire.lora.adapter.read_tensors", read)
    refused(llm, tmp_path, str(tmp_path))


def test_a_key_that_is_twice_in_a_header(llm, tmp_path):
    made = good()
    data = save(made)
    length = struct.unpack("<Q", data[:8])[0]
    described = json.loads(data[8 : 8 + length])
    name = next(iter(made))
    text = json.dumps({name: described[name]})[:-1] + ", " + json.dumps(described)[1:]
    files.write(tmp_path, config(), struct.pack("<Q", len(text)) + text.encode() + data[8 + length :])
    refused(llm, tmp_path, "is damaged or no safetensors file", "is there twice")


def test_no_tensors(llm, tmp_path):
    files.write(tmp_path, config(), save({}))
    refused(llm, tmp_path, "holds no tensors")


@pytest.mark.parametrize(
    ("part", "shape"),
    [("lora_A", (4, 65)), ("lora_A", (3, 64)), ("lora_B", (63, 4)), ("lora_B", (4, 64)), ("lora_A", (256,)),
     ("lora_A", (4, 64, 1)), ("lora_B", ()), ("lora_A", (0, 64))],
)  # fmt: skip
def test_a_wrong_shape(llm, tmp_path, part, shape):
    made = good()
    made[f"{Q}.{part}.weight"] = torch.ones(shape)
    files.write(tmp_path, config(), made)
    refused(llm, tmp_path, "model.layers.0.self_attn.q_proj", f"{part}.weight has shape {list(shape)}")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_no_numbers(llm, tmp_path, value, part):
    made = good()
    made[f"{Q}.{part}.weight"].view(-1)[-1] = value
    files.write(tmp_path, config(), made)
    refused(llm, tmp_path, "infinite or no numbers")


@pytest.mark.parametrize(("dtype", "value"), [(torch.float64, 1e200), (torch.bfloat16, 1e30), (torch.float32, 1e5)])
def test_numbers_that_overflow_the_models_dtype(path, tmp_path, dtype, value):
    half = open_llm(path, dtype="float16", num_gpu_blocks_override=20)
    made = good()
    made[f"{Q}.lora_B.weight"] = torch.full((64, 4), value, dtype=dtype)
    files.write(tmp_path, config(), made)
    refused(half, tmp_path, "infinite or no numbers (as torch.float16)")
    no_adapters(half)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.uint8])
def test_no_floating_point(llm, tmp_path, dtype):
    made = good()
    made[f"{Q}.lora_A.weight"] = torch.ones(4, 64, dtype=dtype)
    files.write(tmp_path, config(), made)
    refused(llm, tmp_path, f"{Q}.lora_A.weight is of dtype {str(dtype)[6:]}")


def test_enormous_but_finite_weights_are_their_own_requests_trouble(llm, tmp_path, before):
    """Their logits overflow: such a request may fail; its neighbours' tokens stay, and those of later ones."""
    made = {name: torch.full_like(tensor, 3e38) for name, tensor in good().items()}
    files.write(tmp_path, config(lora_alpha=1e9), made)
    llm.load_lora_adapter("huge", str(tmp_path))
    for _ in range(3):
        outputs = ask(llm, [PROMPTS[0], PROMPTS[1], PROMPTS[1], PROMPTS[0]], [None, "huge", None, "huge"])
        assert [list(outputs[place].outputs[0].token_ids) for place in (0, 2)] == before
        assert all(outputs[place].outputs[0].finish_reason in ("error", "length") for place in (1, 3))
    llm.unload_lora_adapter("huge")


# -- what belongs to another model, or to nothing ------------------------------------------------------------------


def test_another_models_sizes(llm, tmp_path):
    made = {name: torch.ones(4, 128) if "lora_A" in name else torch.ones(128, 4) for name in good()}
    files.write(tmp_path, config(), made)
    refused(llm, tmp_path, "another base model", "[4, 128]", "[4, 64]")


def test_another_architectures_names(llm, tmp_path):
    made = {
        f"base_model.model.transformer.h.{layer}.attn.c_attn.lora_{part}.weight": torch.ones(1, 1)
        for layer in range(2)
        for part in "AB"
    }
    files.write(tmp_path, config(targets=("attn.c_attn",)), made)
    refused(llm, tmp_path, "target_modules", "c_attn", "name no module of this model")


def test_a_longer_model(llm, tmp_path):
    made = good()
    made.update({name.replace("layers.1.", "layers.2."): tensor.clone() for name, tensor in made.items()})
    files.write(tmp_path, config(), made)
    refused(llm, tmp_path, "does not fit", "of no use here: 4", "model.layers.2.self_attn.q_proj.lora_A.weight")


def test_missing_tensors(llm, tmp_path):
    made = good()
    del made[f"{Q}.lora_B.weight"]
    files.write(tmp_path, config(), made)
    refused(llm, tmp_path, "missing: 1 (model.layers.0.self_attn.q_proj.lora_B.weight)")


def test_extra_tensors(llm, tmp_path):
    files.write(tmp_path, config(), {**good(), "base_model.model.lm_head.bias": torch.ones(384), "x": torch.ones(1)})
    refused(llm, tmp_path, "of no use here: 2 (lm_head.bias, x)")


@pytest.mark.parametrize("extra", ["lora_magnitude_vector", "lora_B.bias", "lora_embedding_A"])
def test_tensors_of_a_variant_that_the_configuration_does_not_have(llm, tmp_path, extra):
    files.write(tmp_path, config(), {**good(), f"{Q}.{extra}": torch.ones(64)})
    refused(llm, tmp_path, "of no use here", f"model.layers.0.self_attn.q_proj.{extra}")


def test_tensors_that_are_not_targeted(llm, tmp_path):
    files.write(tmp_path, config(), tensors(targets=("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")))
    refused(llm, tmp_path, "of no use here", "mlp.up_proj.lora_A.weight (the configuration does not target it)")


def test_a_tensor_given_twice(llm, tmp_path):
    files.write(tmp_path, config(), {**good(), f"{Q[17:]}.lora_A.weight": torch.ones(4, 64)})
    refused(llm, tmp_path, "self_attn.q_proj.lora_A.weight is there twice")
    head = {"base_model.model.lm_head.weight": torch.zeros(384, 64), "lm_head.base_layer.weight": torch.ones(384, 64)}
    files.write(tmp_path, config(modules_to_save=["lm_head"]), {**good(), **head})
    refused(llm, tmp_path, "lm_head", "is there twice")
    head["lm_head.base_layer.weight"] = torch.ones(3, dtype=torch.float16)
    files.write(tmp_path, config(modules_to_save=["lm_head"]), {**good(), **head})
    refused(llm, tmp_path, "lm_head", "is there twice")


def test_lora_on_a_norm(llm, tmp_path):
    """PEFT makes no such adapter; none of its tensors may be passed over in silence."""
    made = good()
    made["base_model.model.model.norm.lora_A.weight"] = torch.ones(4, 64)
    made["base_model.model.model.norm.lora_B.weight"] = torch.ones(64, 4)
    files.write(tmp_path, config() | {"target_modules": ["q_proj", "v_proj", "model.norm"]}, made)
    refused(llm, tmp_path, "model.norm", "RMSNorm", "lora_A.weight")


@pytest.mark.parametrize("target", ["model.norm", "input_layernorm"])
def test_trained_tokens_of_what_is_no_table(llm, tmp_path, target):
    made = good()
    names = ["model.norm"] if target == "model.norm" else [f"model.layers.{i}.input_layernorm" for i in range(2)]
    for name in names:
        made[f"base_model.model.{name}.token_adapter.trainable_tokens_delta"] = torch.ones(1, 64)
    files.write(tmp_path, config(trainable_token_indices={target: [3]}), made)
    refused(llm, tmp_path, names[0])


def test_a_resized_vocabulary(llm, tmp_path):
    made = {**good(), "base_model.model.lm_head.weight": torch.ones(390, 64)}
    files.write(tmp_path, config(modules_to_save=["lm_head"]), made)
    refused(llm, tmp_path, "lm_head.weight has shape [390, 64]", "[384, 64]", "resized vocabulary")


@pytest.mark.parametrize(("ids", "text"), [([384], "the table ends at 383"), ([10**30], "ends at 383")])
def test_tokens_beyond_the_table(llm, tmp_path, ids, text):
    made = {**good(), "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 64)}
    files.write(tmp_path, config(trainable_token_indices=ids), made)
    refused(llm, tmp_path, text)


# -- towers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = build("LlavaForConditionalGeneration", "clip", tmp_path_factory.mktemp("llava"))
    return open_llm(path)


@pytest.mark.parametrize(
    "target", ["embeddings", "patch_embedding", "position_embedding", "pre_layrnorm", "layer_norm1", "post_layernorm"]
)
@pytest.mark.parametrize("extra", ["", "lora_magnitude_vector", "lora_B.bias"])
def test_parts_of_a_tower_that_fit_nothing(seeing, tmp_path, target, extra):
    """Wrong shapes on a convolution, a norm, a table and on a module with no weight: refused, not a crash."""
    reader = seeing.llm_engine.adapters._reader
    names = [name for name in reader._namings[0].modules if name.endswith("." + target)]
    assert names
    for shape_a, shape_b in (((2, 5), (5, 2)), ((2,), (2,)), ((), ()), ((2, 3, 4, 4), (32, 2, 1, 1))):
        made = {}
        for name in names:
            made[f"{name}.lora_A.weight"], made[f"{name}.lora_B.weight"] = torch.ones(shape_a), torch.ones(shape_b)
            if target == "position_embedding":
                made[f"{name}.lora_embedding_A"] = made.pop(f"{name}.lora_A.weight")
                made[f"{name}.lora_embedding_B"] = made.pop(f"{name}.lora_B.weight")
            if extra:
                made[f"{name}.{extra}"] = torch.ones(7)
        more = {"lora_magnitude_vector": {"use_dora": True}, "lora_B.bias": {"lora_bias": True}, "": {}}[extra]
        files.write(tmp_path, {"peft_type": "LORA", "r": 2, "target_modules": [target], **more}, made)
        try:
            report = seeing.load_lora_adapter("odd", str(tmp_path))
        except AdapterError as error:
            assert str(tmp_path) in str(error)
        else:
            assert not extra and target == "patch_embedding", report
            seeing.unload_lora_adapter("odd")
    no_adapters(seeing)


def test_trained_rows_of_a_towers_table(seeing, tmp_path):
    """Which quire does not serve, and must not pass over."""
    naming, model = seeing.llm_engine.adapters._reader._namings[0], seeing.llm_engine.executor.runner.model
    table = next(name for name in naming.modules if name.endswith("position_embedding"))
    target = next(name for name in naming.modules if name.endswith("layers.0.self_attn.q_proj"))
    width = model.get_parameter(naming.parameters[f"{table}.weight"]).shape[1]
    outer, inner = model.get_submodule(naming.modules[target]).weight.shape
    made = {
        f"{table}.token_adapter.trainable_tokens_delta": torch.ones(1, width),
        f"{target}.lora_A.weight": torch.ones(2, inner),
        f"{target}.lora_B.weight": torch.ones(outer, 2),
    }
    fields = {"peft_type": "LORA", "r": 2, "target_modules": [target]}
    files.write(tmp_path, fields | {"trainable_token_indices": {"position_embedding": [1]}}, made)
    refused(seeing, tmp_path, "position_embedding")
    no_adapters(seeing)


def test_a_model_of_other_heads(tmp_path):
    """An adapter of a model with other sizes is refused by one, and taken by the other."""
    make_llama(tmp_path / "m", num_key_value_heads=4)
    llm = open_llm(tmp_path / "m", num_gpu_blocks_override=20)
    refused(llm, files.plain(tmp_path / "a", targets=("self_attn.v_proj",)), "v_proj", "[32, 4]", "[64, 4]")
    no_adapters(llm)
