"""Which device is chosen, and how a GPU's memory is shared out: what can be known without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quire import LLM, QuireError
from quire.config import CacheConfig, SchedulerConfig
from quire.platform.execution import device
from quire.platform.execution.memory import count_swap_blocks, device_share, full_step

GIB = 1 << 30


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two, as torch would tell; the list has those that the kernels were asked about."""
    asked: list[torch.device] = []
    monkeypatch.delenv("QUIRE_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(device, "cuda_backend", lambda: SimpleNamespace(check_device=asked.append))
    return asked


def refuse(*_: object) -> None:
    raise QuireError("the kernels were compiled for another")


def test_the_device_that_is_named(two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.choose("cpu") == torch.device("cpu") and not two_gpus
    assert device.choose("cuda:0") == torch.device("cuda", 0)
    assert device.choose("cuda") == device.choose("auto") == torch.device("cuda", 1)
    assert len(two_gpus) == 3
    monkeypatch.setenv("QUIRE_DEVICE", "cpu")
    assert device.choose("auto") == torch.device("cpu")
    assert device.choose("cuda:0") == torch.device("cuda", 0), "what is named comes before the variable"


def test_several_processes_have_gpus_in_turn(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert device.for_processes("cpu", 2) == []
    assert device.for_processes("cuda:0", 2) == ["cuda:0", "cuda:1"] and not caplog.text
    assert device.for_processes("auto", 3) == ["cuda:1", "cuda:0", "cuda:1"], "the current one is the second"
    assert "3 processes share 2 GPUs" in caplog.text
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: ["A100", "H100"][gpu.index])
    with pytest.raises(QuireError, match=r"device='cuda:0': .* several kinds \(A100, sm_90; H100, sm_90\)"):
        device.for_processes("cuda:0", 2)
    assert device.for_processes("cuda:1", 1) == ["cuda:1"]
    monkeypatch.setattr(device, "cuda_backend", lambda: SimpleNamespace(check_device=refuse))
    with pytest.raises(QuireError, match="compiled for another"):
        device.for_processes("cuda:0", 2)


@pytest.mark.parametrize(
    "name", ["cuda:2", "cuda:200", "cuda:256", "cuda:-1", "cuda:99999999", "gpu", "mps", "cuda:", ""]
)
def test_a_device_that_is_not_there(two_gpus: list[torch.device], name: str) -> None:
    with pytest.raises(QuireError, match=f"^device='{name}'"):
        device.choose(name)


def test_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_DEVICE", "nonsense")
    with pytest.raises(QuireError, match=r"^QUIRE_DEVICE=nonsense: must be"):
        LLM()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose("auto") == torch.device("cpu")
    with pytest.raises(QuireError, match="device='cuda': torch finds no GPU"):
        device.choose("cuda")


def test_a_gpu_that_the_kernels_do_not_run_on(two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_backend", lambda: SimpleNamespace(check_device=refuse))
    with pytest.warns(RuntimeWarning, match="there is a GPU, but the kernels"):
        assert device.choose("auto") == torch.device("cpu")
    with pytest.raises(QuireError, match="compiled for another"):
        device.choose("cuda")


def test_the_share_of_the_pool() -> None:
    """Of 80 GiB, 20 are taken by weights and others' programs; a step takes 3."""
    config = CacheConfig()
    assert device_share(config, 80 * GIB, 60 * GIB, 3 * GIB) == 72 * GIB - 20 * GIB - 3 * GIB
    assert device_share(CacheConfig(memory_fraction=0.25), 80 * GIB, 60 * GIB, 3 * GIB) < 0  # refused by count_blocks
    assert count_swap_blocks(config, 1 << 20, torch.device("cpu")) == 0
    assert count_swap_blocks(CacheConfig(swap_bytes=10 << 20), 1 << 20, torch.device("cuda")) == 10


@pytest.mark.parametrize(("sequences", "tokens", "longest"), [(64, 512, 4096), (3, 40, 100), (8, 3, 50), (4, 512, 16)])
def test_a_step_of_full_size(sequences: int, tokens: int, longest: int) -> None:
    plan = full_step(SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=tokens), 8, longest)
    counts = [chunk.length for chunk in plan.chunks]
    assert len(counts) == min(sequences, tokens) and all(0 < count <= longest for count in counts)
    assert sum(counts) == min(tokens, sequences * longest)
    assert all(chunk.draws and 8 * len(chunk.block_ids) >= chunk.length for chunk in plan.chunks)
