"""hf_overrides are config.json's fields with other values, or refused; download_dir and hf_token reach the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.checkpoint.files import Hub, resolve_weights
from quire.demo import model_path
from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.loader import load_model
from quire.platform.inputs.tokenizer import eos_token_ids
from tests.models.run_model import logits
from tests.models.tiny import token_ids

LLAMA, OPT = "LlamaForCausalLM", "OPTForCausalLM"
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.fixture
def llama(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint(LLAMA, "gqa"), tmp_path / "llama"))


def edited(path: Path, **fields: Any) -> Path:
    """The same checkpoint with another config.json; ... takes a field out."""
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return path


def result(path: Path, **overrides: Any) -> torch.Tensor:
    return logits(load_model(path, overrides=overrides), token_ids(12))


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        ({"rope_theta": 77.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
        ({"rope_scaling": LINEAR}, {"rope_parameters": {**LINEAR, "rope_theta": 10000.0}}),
        ({"rope_scaling": LINEAR, "rope_theta": 77.0}, {"rope_parameters": {**LINEAR, "rope_theta": 77.0}}),
        ({"rope_parameters": {"rope_theta": 77.0}}, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
        ({"rms_norm_eps": 0.5}, {"rms_norm_eps": 0.5}),
    ],
)
def test_an_override_is_an_edit(llama, overrides, fields):
    files = [{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}]
    if "rope_parameters" not in overrides:  # as transformers 4 wrote it, without any
        files.append({"rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": None})
    original = (llama / "config.json").read_text()
    for start in files:
        (llama / "config.json").write_text(original)
        plain = result(edited(llama, **start))
        wanted = result(llama, **overrides)
        assert not torch.equal(wanted, plain)
        assert torch.equal(wanted, result(edited(llama, **{"rope_theta": ..., "rope_scaling": ..., **fields})))


def test_scaling_is_taken_out(llama):
    scaled = edited(llama, rope_parameters={**LINEAR, "rope_theta": 10000.0})
    plain = result(scaled, rope_scaling=None)
    assert torch.equal(plain, result(edited(llama, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})))


def test_a_part_of_a_model():
    prompt = "Once upon a time"
    greedy = SamplingParams(temperature=0, max_tokens=8)
    small = {"num_gpu_blocks_override": 64}
    plain = LLM(**small).generate(prompt, greedy, use_tqdm=False)[0]
    same = LLM(**small, hf_overrides={"text_config": {"max_position_embeddings": 128}})
    assert same.llm_engine.limits.max_model_len == 128
    assert same.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].text == plain.outputs[0].text
    theta = json.loads((model_path() / "config.json").read_text())["text_config"]["rope_parameters"]["rope_theta"]
    other = LLM(**small, hf_overrides={"text_config": {"rope_theta": theta / 1000}})
    assert other.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].text != plain.outputs[0].text


def test_end_tokens(llama):
    assert 7 in eos_token_ids(llama, overrides={"eos_token_id": 7})
    assert eos_token_ids(llama, overrides={"eos_token_id": [7, 8]}) >= {7, 8}
    with pytest.raises(CheckpointError, match="eos_token_id"):
        eos_token_ids(llama, overrides={"eos_token_id": "7"})


@pytest.mark.parametrize(
    ("overrides", "error", "named"),
    [
        ({"auto_map": {"AutoConfig": "own.Config"}}, CheckpointError, "none is ever run"),
        ({"rope_thetaa": 1.0}, CheckpointError, "has no 'rope_thetaa'"),
        ({"rms_norm_eps": object()}, CheckpointError, "must be JSON values"),
        ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedModelError, "quantised"),
        ({"architectures": [OPT]}, UnsupportedModelError, "is not served"),
        ({"num_hidden_layers": 7}, CheckpointError, "missing"),
        ({"num_hidden_layers": 10**6}, CheckpointError, "num_hidden_layers=1000000"),
        ({"hidden_act": "no-such"}, (CheckpointError, UnsupportedModelError), "no-such"),
    ],
)
def test_overrides_that_are_refused(llama, overrides, error, named):
    with pytest.raises(error, match=named):
        load_model(llama, overrides=overrides)


def test_a_checkpoint_that_needs_code_is_refused_whatever_is_trusted(llama, caplog):
    edited(llama, auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    (llama / "own.py").write_text("raise SystemExit('ran')")
    LLM(str(llama), trust_remote_code=True, skip_tokenizer_init=True, num_gpu_blocks_override=8)
    assert "needs no code of its own" in caplog.text
    for fields in ({"model_type": "own"}, {"architectures": ["OwnForCausalLM"]}):
        with pytest.raises(UnsupportedModelError, match="trust_remote_code=True: quire never runs code"):
            LLM(str(edited(llama, **fields)), trust_remote_code=True, skip_tokenizer_init=True)


# -- the hub -----------------------------------------------------------------------------------------------------------


class Asked:
    """What huggingface_hub is asked for; it gives a folder for every name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._folder = folder
        self.calls: list[tuple[str, dict[str, Any]]] = []
        monkeypatch.setattr("huggingface_hub.snapshot_download", self._take)

    def _take(self, name: str, **options: Any) -> str:
        self.calls.append((name, options))
        return str(self._folder)

    def places(self) -> set[tuple[str, Any, Any]]:
        return {(name, options["cache_dir"], options["token"]) for name, options in self.calls}


def test_where_files_come_from(monkeypatch, llama):
    hub = Asked(monkeypatch, llama)
    engine = {"skip_tokenizer_init": True, "enable_lora": True, "num_gpu_blocks_override": 8}
    llm = LLM("org/model", download_dir="/cache", hf_token="secret", **engine)
    with pytest.raises(ValueError):
        llm.load_lora_adapter("a", "org/adapter")  # there is none in that folder
    assert hub.places() == {("org/model", "/cache", "secret"), ("org/adapter", "/cache", "secret")}
    assert "secret" not in repr(llm.llm_engine.config)


def test_a_tokenizers_files_come_from_there_too(monkeypatch, llama):
    hub = Asked(monkeypatch, llama)
    with pytest.raises(CheckpointError, match="no tokenizer here"):
        LLM(str(llama), tokenizer="org/tokenizer", download_dir="~/cache", hf_token=True)
    [(name, folder, token)] = hub.places()
    assert (name, token) == ("org/tokenizer", True) and folder.endswith("/cache") and "~" not in folder


def test_left_out_it_is_as_the_hub_has_it(monkeypatch, llama):
    hub = Asked(monkeypatch, llama)
    resolve_weights("org/model")
    resolve_weights("org/model", hub=Hub(token=False))
    assert hub.places() == {("org/model", None, None), ("org/model", None, False)}


def test_another_hub_is_refused(monkeypatch, llama):
    hub = Asked(monkeypatch, llama)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert resolve_weights(str(llama)) == llama
    with pytest.raises(CheckpointError, match="VLLM_USE_MODELSCOPE"):
        resolve_weights("org/model")
    assert not hub.calls
