"""Routers that a family keeps in float32: they are not rounded in a bfloat16 model, nor are their adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams, kernels
from quire.models.loader import load_model
from tests.models import run_model, tiny
from tests.models.test_parity import relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

NATIVE = kernels.backend().__name__ == "quire.kernels.native"  # the twins are never recorded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Ernie, one expert a token, whose experts' rows in routers are the same numbers as bfloat16."""
    oracle = tiny.make("Ernie4_5_MoeForCausalLM", "as_published", moe_k=1, moe_num_shared_experts=0)
    for name, parameter in oracle.named_parameters():
        if name.endswith("gate.weight"):
            first = parameter[:1].bfloat16().float()
            parameter.data.copy_(first * (1 + torch.randn(parameter.shape) / 2000))
    return tiny.save(oracle, tmp_path / "model")


def test_they_are_not_rounded(path: Path) -> None:
    """What they make of their inputs is what the files' float32 weights make of them."""
    model = load_model(path, "bfloat16")
    weights = load_file(path / "model.safetensors")
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(lambda _, given, out, name=name: seen.update({name: (given[0], out)}))
    run_model.logits(model, tiny.token_ids())
    assert len(seen) == 2
    for name, (x, logits) in seen.items():
        weight = weights[f"{name}.weight"]
        assert relative_error(logits, x.double() @ weight.double().t()) < 1e-5
        assert relative_error(logits, x.double() @ weight.bfloat16().double().t()) > 1e-4


def test_steps_are_recorded_and_adapters_change_them(path: Path, tmp_path: Path) -> None:
    """An adapter of a router, as files name it that are older than transformers' routers: the router with it added."""
    generator = torch.Generator().manual_seed(0)
    model = load_model(path, "bfloat16")
    routers = {n: m for n, m in model.named_modules() if n.endswith(".gate")}
    pairs = {
        name: [torch.randn(shape, generator=generator) for shape in ((2, one.in_features), (one.out_features, 2))]
        for name, one in routers.items()
    }
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(
        {
            f"base_model.model.{name}.lora_{part}.weight": tensor
            for name, pair in pairs.items()
            for part, tensor in zip("AB", pair, strict=True)
        },
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["gate"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    prompts = [{"prompt_token_ids": tiny.token_ids(6, seed=seed)} for seed in (1, 2)]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
    found = []
    for eager in (False, True):
        llm = LLM(
            str(path), dtype="bfloat16", skip_tokenizer_init=True, enable_lora=True, max_lora_rank=8,
            enforce_eager=eager,
        )  # fmt: skip
        outputs = llm.generate(prompts, params, lora_request=[LoRARequest("a", 1, str(folder)), None], use_tqdm=False)
        found.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs])
        shapes = llm.llm_engine.executor.runner._decode._shapes  # nothing public says it
        assert eager or not NATIVE or any(shapes.values())
    assert found[0] == found[1]
    for name, (a, b) in pairs.items():
        routers[name].weight.data += b @ a
    ids, tokens = prompts[0]["prompt_token_ids"], found[0][0][0]
    logits = run_model.logits(model, [*ids, *tokens[:-1]])[len(ids) - 1 :]
    assert logits.argmax(-1).tolist() == list(tokens)
