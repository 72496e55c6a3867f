"""A step on a device that is not the CPU, without a GPU: torch's meta device refuses what a GPU would refuse.

Its tensors have no values. Where one meets a tensor of the CPU, or a number is read from it, torch raises; on a GPU the
first is an error too, and the second waits. The kernels check their arguments and do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quire import LLM, kernels
from quire.config import SchedulerConfig
from quire.kernels import binding, expert_ops, ops, row_ops
from quire.layers.adapters import LinearChange
from quire.lora import AdapterSlots
from quire.models.base import CausalLM
from quire.models.loader import load_model
from quire.platform.execution import model_runner as runners
from quire.platform.execution.kv_tensors import allocate_cache
from quire.platform.execution.memory import full_step
from quire.platform.execution.model_runner import ModelRunner
from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.sampler import Sampling
from quire.platform.sampling.sampling_input import SamplingInput
from quire.platform.scheduling.plan import PENDING_TOKEN, Chunk, EncodeImage, NewSequence, StepPlan
from quire.types import PlaceholderRange
from tests.lora import adapter_files
from tests.models import tiny
from tests.multimodal import tiny_vision
from tests.platform.conftest import make_llama

META = torch.device("meta")


@pytest.fixture
def pretended(emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """`quire.kernels.cuda` over kernels that do nothing, for meta tensors. Yields the names of what was called."""
    cuda, calls = emulated_cuda, []

    def stub(name: str) -> Any:
        def called(*numbers: Any) -> int:
            calls.append(name)
            return 16

        return called

    module = ModuleType("stub")
    for name in dir(cuda._cuda):
        if not name.startswith("_"):
            setattr(module, name, stub(name))
    module.most_targets = 8  # type: ignore[attr-defined]
    monkeypatch.setattr(cuda, "_cuda", module)
    monkeypatch.setattr(cuda, "DEVICE", "cpu")  # no stream
    for name, function in cuda.functions(module, "meta").items():
        monkeypatch.setattr(cuda, name, function)
    monkeypatch.setattr(binding, "_empty", torch.empty)
    real = kernels.backend_of
    for user in (kernels, ops, row_ops, expert_ops):
        monkeypatch.setattr(user, "backend_of", lambda x: cuda if x.is_meta else real(x))  # models load on the CPU
    monkeypatch.setattr(runners, "begin", begin)
    yield calls


def begin(logits: torch.Tensor, specs: Sequence[Any], likeliest: Sequence[int] | None = None) -> Sampling:
    assert logits.is_meta and len(logits) >= len({spec.row for spec in specs})
    sampling = Sampling(specs, [None] * len(specs))
    sampling.tokens = torch.empty(len(specs), dtype=torch.int64, device=META)
    return sampling


def moved(model: CausalLM) -> CausalLM:
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = torch.nn.Parameter(parameter.detach().to(META), requires_grad=False)
        for leaf, buffer in module._buffers.items():
            module._buffers[leaf] = None if buffer is None else buffer.to(META)
    return model


def runner_for(model: CausalLM, adapter_slots: AdapterSlots | None = None) -> ModelRunner:
    weight = next(model.parameters())
    caches = allocate_cache(model.kv_spec, 64, 8, weight.dtype, META)
    return ModelRunner(model, caches, META, enforce_eager=True, adapter_slots=adapter_slots)


SAMPLING = SamplingInput(SamplingParams(temperature=1.0))


def steps(owner: Any = ()) -> list[StepPlan]:
    """A prompt beside a token, a part of a prompt, and tokens of which some are not known yet."""
    return [
        StepPlan(
            (
                Chunk(1, 0, 3, 3, (), 0, (3,), (0,)),
                Chunk(2, 8, 1, 9, (), 0, (4, 5), (0,)),
                Chunk(3, 0, 2, 9, (), 0, (6,)),
            ),
            ((3, 9), (9, 10)),
            new=(
                NewSequence(1, (5, 6, 7), 3, SAMPLING, owner),
                NewSequence(2, (9,) * 9, 8, SAMPLING),
                NewSequence(3, (1, 2) + (3,) * 7, 9, SAMPLING),
            ),
        ),
        StepPlan(
            (
                Chunk(1, 3, 1, 3, (PENDING_TOKEN,), 1, (), (0,)),
                Chunk(2, 9, 1, 9, (PENDING_TOKEN,), 2, (), (0,)),
            ),
            poison=(20, 21),
        ),
    ]


def run(runner: ModelRunner, plans: Sequence[StepPlan]) -> None:
    for plan in plans:
        runner.prepare(plan)
        execution = runner.execute(plan)
        assert execution.known_there


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        ("LlamaForCausalLM", "gqa"),
        ("LlamaForCausalLM", "tied"),
        ("Qwen2ForCausalLM", "gqa"),
        ("OPTForCausalLM", "post_norm"),
        ("GPT2LMHeadModel", "relu"),
        ("Qwen2MoeForCausalLM", "as_published"),
    ],
)
def test_text(pretended, tmp_path: Path, architecture: str, variant: str) -> None:
    tiny.build(architecture, variant, tmp_path)
    model = moved(LLM(str(tmp_path), skip_tokenizer_init=True).llm_engine.executor.runner.model)
    runner = runner_for(model)
    run(runner, steps())
    assert {"linear", "paged_attention", "write_kv", "embedding"} <= set(pretended)
    full = full_step(SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=40), 8, 100)
    runner.prepare(full)
    runner.execute(full)


@pytest.mark.parametrize("kind", ["plain", "dora", "saved", "words", "trained_tokens"])
def test_adapters(pretended, tmp_path: Path, kind: str) -> None:
    """Read for a model on the device, put there, and used by a part of the rows."""
    make_llama(tmp_path / "model")
    engine = LLM(str(tmp_path / "model"), skip_tokenizer_init=True, enable_lora=True).llm_engine
    model = engine.executor.runner.model
    moved(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", lambda self: torch.ones_like(self, device="cpu") if self.is_meta else self)
        engine.load_lora_adapter("one", str(getattr(adapter_files, kind)(tmp_path / "adapter")))
    version = engine.adapters._named("one")
    adapter_slots = AdapterSlots(model, lambda uid: version.adapter)
    runner = runner_for(model, adapter_slots)
    adapter_slots.install(version.ref.uid)
    run(runner, steps(((version.ref.uid, 1.0),)))
    assert ("lora" in pretended) == any(isinstance(change, LinearChange) for change in version.adapter.changes.values())
    adapter_slots.drop(version.ref.uid)


@pytest.mark.parametrize(
    ("architecture", "variant"), [("LlavaForConditionalGeneration", v) for v in ("clip", "siglip")]
)
def test_images(pretended, tmp_path: Path, architecture: str, variant: str) -> None:
    tiny_vision.build(architecture, variant, tmp_path)
    model: Any = load_model(tmp_path)
    runner = runner_for(moved(model))
    pixels = torch.zeros(1, 3, model.grid_tower.side, model.grid_tower.side)
    tokens = model.image_layout({"pixel_values": pixels}).tokens
    ids = [5, *[model.image_token_id] * tokens]
    new = NewSequence(1, tuple(ids), len(ids), SAMPLING, media=(PlaceholderRange(b"x", 1, tokens),))
    chunk = Chunk(1, 0, len(ids), len(ids), (), 0, tuple(range(16)), (0,))
    runner.take_pixels(b"x", {"pixel_values": pixels})
    run(runner, [StepPlan((chunk,), encode=(EncodeImage(b"x", tokens),), new=(new,))])
