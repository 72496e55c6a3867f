"""Adapters for the tiny Llama of tests/platform, written by hand, and engines that serve them under watch.

What is in a file is known to the byte here, and may be as wrong as a test needs it.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.platform.engine.llm_engine import LLMEngine
from quire.platform.execution.in_process import InProcessExecutor

HIDDEN, INNER, VOCAB, LAYERS = 64, 96, 384, 2
SIZES = {  # of the tiny Llama: (in, out)
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, 32),
    "self_attn.v_proj": (HIDDEN, 32),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
ALL = tuple(SIZES)
_PATIENCE = 60.0  # seconds without any change

Tensors = dict[str, torch.Tensor]


def config(rank: int = 4, targets: Any = ("self_attn.q_proj", "self_attn.v_proj"), **more: Any) -> dict[str, Any]:
    names = targets if isinstance(targets, str) else [one.rpartition(".")[2] for one in targets]
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names, **more}


def tensors(
    rank: int = 4, targets: Iterable[str] = ("self_attn.q_proj", "self_attn.v_proj"), seed: int = 0, size: float = 0.3
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for layer in range(LAYERS):
        for target in targets:
            inner, outer = SIZES[target]
            name = f"base_model.model.model.layers.{layer}.{target}"
            made[f"{name}.lora_A.weight"] = torch.randn(rank, inner, generator=generator) / inner**0.5
            made[f"{name}.lora_B.weight"] = torch.randn(outer, rank, generator=generator) * size
    return made


def write(folder: Path, fields: dict[str, Any] | str | bytes, content: Tensors | bytes) -> Path:
    """An adapter's two files, whatever is in them."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(fields) if isinstance(fields, dict) else fields
    (folder / "adapter_config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    weights = folder / "adapter_model.safetensors"
    if isinstance(content, bytes):
        weights.write_bytes(content)
    else:
        save_file(content, weights)
    return folder


def plain(folder: Path, seed: int = 0, rank: int = 4, targets: Sequence[str] = ALL[::2], **more: Any) -> Path:
    """A good adapter with plain LoRA."""
    return write(folder, config(rank, targets, **more), tensors(rank, targets, seed))


def dora(folder: Path, seed: int = 0, rank: int = 4) -> Path:
    targets = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
    made = tensors(rank, targets, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name in [one for one in made if one.endswith("lora_B.weight")]:
        rows = torch.rand(made[name].shape[0], generator=generator) + 1.5
        made[name.replace("lora_B.weight", "lora_magnitude_vector")] = rows
    return write(folder, config(rank, targets, use_dora=True), made)


def saved(folder: Path, seed: int = 0, rank: int = 3) -> Path:
    """LoRA, and an output projection and a norm that were trained whole."""
    made = tensors(rank, ("mlp.down_proj",), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    made["base_model.model.lm_head.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.25
    made["base_model.model.model.norm.weight"] = torch.rand(HIDDEN, generator=generator) + 0.5
    return write(folder, config(rank, ("mlp.down_proj",), modules_to_save=["lm_head", "model.norm"]), made)


def words(folder: Path, seed: int = 0, rank: int = 5) -> Path:
    """LoRA on the embeddings too."""
    generator = torch.Generator().manual_seed(seed + 1)
    name = "base_model.model.model.embed_tokens"
    made = tensors(rank, ("self_attn.v_proj",), seed)
    made[f"{name}.lora_embedding_A"] = torch.randn(rank, VOCAB, generator=generator) * 0.3
    made[f"{name}.lora_embedding_B"] = torch.randn(HIDDEN, rank, generator=generator) * 0.3
    return write(folder, config(rank, ("self_attn.v_proj", "embed_tokens")), made)


def trained_tokens(folder: Path, seed: int = 0, rank: int = 2) -> Path:
    """LoRA, the embeddings of every third token, and what other tokens' logits are made with."""
    ids = {"embed_tokens": list(range(VOCAB))[::-3], "lm_head": [380, 7, 8, 90, 200]}
    made = tensors(rank, ("mlp.gate_proj",), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, path in (("embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head")):
        rows = torch.randn(len(ids[name]), HIDDEN, generator=generator) * 0.25
        made[f"base_model.model.{path}.token_adapter.trainable_tokens_delta"] = rows
    return write(folder, config(rank, ("mlp.gate_proj",), trainable_token_indices=ids), made)


def for_model(llm: LLM, folder: Path, seed: int, rank: int = 3, size: float = 0.3, part: str = "") -> Path:
    """LoRA on every matrix of the engine's model whose published name contains `part`."""
    naming, model = llm.llm_engine.adapters._reader._namings[0], llm.llm_engine.executor.runner.model
    generator, made = torch.Generator().manual_seed(seed), {}
    names = sorted(name for name in naming.linear if part in name)
    for name in names:
        layer = model.get_submodule(naming.modules[name])
        outer, inner = layer.out_features, layer.in_features
        made[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inner, generator=generator) / inner**0.5
        made[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outer, rank, generator=generator) * size
    return write(folder, {"peft_type": "LORA", "r": rank, "target_modules": names}, made)


def open_llm(path: Any, **settings: Any) -> LLM:
    """An LLM with adapters that checks its tables after each step, and raises where it would hang."""
    defaults = {"enable_lora": True, "num_gpu_blocks_override": 200, "skip_tokenizer_init": True, "debug": True}
    llm = LLM(str(path), **{**defaults, **settings})
    watch(llm.llm_engine)
    return llm


def watch(engine: LLMEngine) -> None:
    """Let `step` raise once nothing has changed for a long time."""
    step = engine.step
    before: Any = None
    since = 0.0

    def watched() -> list[Any]:
        nonlocal before, since
        outputs = step()
        state = [(s.id, s.num_computed, len(s.output_ids), s.running) for s in engine.scheduler.sequences()]
        if state != before or not engine.has_unfinished_requests():
            before, since = state, time.monotonic()
        if time.monotonic() - since > _PATIENCE:
            raise AssertionError("the engine hangs")
        return outputs

    engine.step = watched  # type: ignore[method-assign]


def prompt(seed: int, length: int = 12) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(length)]


def greedy(tokens: int = 6, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def ask(llm: LLM, prompts: Sequence[Any], adapters: Any = None, params: Any = None) -> list[Any]:
    """Outputs; adapters: names, None for the base model, or LoRARequests."""
    if isinstance(adapters, (list, tuple)):
        adapters = [LoRARequest(one) if isinstance(one, str) else one for one in adapters]
    elif isinstance(adapters, str):
        adapters = LoRARequest(adapters)
    return llm.generate(list(prompts), params or greedy(), lora_request=adapters, use_tqdm=False)


def tokens(llm: LLM, prompts: Sequence[Any], adapters: Any = None, params: Any = None) -> list[list[int]]:
    """As `ask`; none may fail."""
    outputs = ask(llm, prompts, adapters, params)
    assert all(c.finish_reason == "length" for output in outputs for c in output.outputs), outputs
    return [list(output.outputs[0].token_ids) for output in outputs]


def drive(engine: LLMEngine) -> dict[str, Any]:
    """Step to the end; the last output of each request."""
    outputs: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
    return outputs


def result(output: Any) -> list[int]:
    """A good output's tokens."""
    assert output.outputs[0].finish_reason == "length", output
    return list(output.outputs[0].token_ids)


def error_of(output: Any) -> str:
    assert output.finished and [c.finish_reason for c in output.outputs] == ["error"] * len(output.outputs), output
    return str(output.outputs[0].stop_reason)


def nothing_left(llm: LLM) -> None:
    """No request, block or use of an adapter is left; registry, device budget and slots agree on what is where."""
    engine = llm.llm_engine
    assert not engine.has_unfinished_requests()
    engine.step()
    engine.check_integrity()
    assert engine.pool.num_owned == 0
    budget, registry = engine.scheduler.adapters.device, engine.adapters
    assert not any(entry.references for entry in budget._entries.values())
    assert {uid for uid, version in registry._versions.items() if version.resident} == set(budget._entries)
    assert all(info.requests == 0 for info in llm.list_lora_adapters())
    assert set(registry._versions.values()) == set(registry._names.values())
    if not isinstance(engine.executor, InProcessExecutor):
        return
    slot_tables = engine.executor.runner.adapter_slots
    assert set(slot_tables._installed) == set(budget._entries)
    slots = [one.slot for one in slot_tables._installed.values()] + slot_tables._free
    assert sorted(slots) == list(range(len(slots))), "a slot is lost or given twice"


def no_adapters(llm: LLM) -> None:
    """Besides, no name is left, and no memory is taken."""
    nothing_left(llm)
    engine = llm.llm_engine
    assert llm.list_lora_adapters() == []
    assert engine.adapters.host_bytes == 0 and engine.scheduler.adapters.device.bytes == 0
    assert not engine.executor.runner.adapter_slots._installed
    for module in engine.executor.runner.model.modules():
        adapters = getattr(module, "adapters", None)
        if adapters is not None:
            held = getattr(adapters, "changes", None) or getattr(adapters, "replaced", None)
            assert not held and not (hasattr(adapters, "table") and len(adapters.table)), "weights are left in a layer"
