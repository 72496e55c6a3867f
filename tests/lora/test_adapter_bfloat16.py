"""Adapters of a bfloat16 model: logprobs are as near to PEFT's exact ones as PEFT's own bfloat16 run comes."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from quire import LLM, LoRARequest
from tests.lora.peft_world import ask, randomise, text_prompts
from tests.models import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("LlamaForCausalLM", {"target_modules": ALL}),
    "rank_33": ("LlamaForCausalLM", {"r": 33, "target_modules": ALL, "use_rslora": True}),
    "dora": ("LlamaForCausalLM", {"target_modules": ALL, "use_dora": True}),
    "ends": ("LlamaForCausalLM", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "dora_ends": ("LlamaForCausalLM", {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_dora": True}),
    "saved": ("LlamaForCausalLM", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "mlp", "norm"]}),
    "tokens": ("LlamaForCausalLM", {"target_modules": ["q_proj"], "trainable_token_indices": list(range(3, 60))}),
    "opt": ("OPTForCausalLM", {"target_modules": ["q_proj", "fc1", "fc2"], "bias": "all"}),
    "gpt2": ("GPT2LMHeadModel", {"target_modules": ["c_attn", "c_fc", "wpe"], "lora_alpha": 4}),
}
VARIANTS = {"LlamaForCausalLM": "gqa", "OPTForCausalLM": "pre_norm", "GPT2LMHeadModel": "gelu_new"}


def gentle(architecture: str) -> Any:
    """A bfloat16 model whose logprobs are those of a language model: there, rounding shows as it does in practice."""
    model = tiny.make(architecture, VARIANTS[architecture])
    tiny.randomise(model, gain=1.0)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.5)
    return model.to(torch.bfloat16)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Any, LLM]]:
    made = {}
    for architecture in VARIANTS:
        model = gentle(architecture)
        path = tiny.save(model, tmp_path_factory.mktemp(architecture))
        llm = LLM(str(path), dtype="bfloat16", enable_lora=True, skip_tokenizer_init=True, block_size=4, debug=True,
                  num_gpu_blocks_override=256)  # fmt: skip
        made[architecture] = model, llm
    return made


@torch.inference_mode()
def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    scores = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


@pytest.mark.parametrize("file", [torch.bfloat16, torch.float32], ids=["bf16_file", "float32_file"])
@pytest.mark.parametrize("name", CASES)
def test_bf16(models: dict[str, tuple[Any, LLM]], tmp_path: Path, name: str, file: torch.dtype) -> None:
    """A float32 file, which PEFT computes with as it is, is rounded to bfloat16 when it is loaded."""
    architecture, fields = CASES[name]
    base, llm = models[architecture]
    adapter = tmp_path / f"{name}-{file}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = get_peft_model(copy.deepcopy(base), LoraConfig(**fields), autocast_adapter_dtype=False).to(file)
        randomise(trained, 3)
        trained.save_pretrained(adapter)
        theirs = PeftModel.from_pretrained(
            copy.deepcopy(base), adapter, autocast_adapter_dtype=file is torch.float32
        ).eval()
        exact = PeftModel.from_pretrained(copy.deepcopy(base).float(), adapter).double().eval()
    prompts = text_prompts(97, count=24)
    outputs = ask(
        llm, prompts, LoRARequest(adapter.name, lora_path=str(adapter)), each=[{"max_tokens": 1}] * len(prompts)
    )
    ours_off, theirs_off, apart = [], [], []
    for (ids, _), output in zip(prompts, outputs, strict=True):
        ours = torch.tensor([output.prompt_logprobs[at][ids[at]].logprob for at in range(1, len(ids))])
        truth, half = logprobs(exact, ids), logprobs(theirs, ids)
        ours_off.append((ours - truth).abs())
        theirs_off.append((half - truth).abs())
        apart.append((ours - half).abs())
    llm.unload_lora_adapter(adapter.name)
    assert len(torch.cat(ours_off)) > 200
    assert torch.cat(apart).mean() < 0.05
    assert torch.cat(ours_off).mean() <= 1.1 * torch.cat(theirs_off).mean()  # most are 0.8: the tenth is for chance
