"""A model whose layers are several stages' gives the very bits of the whole one, in every family."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import UnsupportedModelError
from quire.layers.stages import Stage
from quire.models.base import CausalLM
from quire.models.loader import load_model
from quire.platform.execution.kv_tensors import allocate_cache
from quire.types import KVSpec
from tests.models import rows, run_model
from tests.models.tiny import VOCAB

CHUNKS = (5, 1, 9, 1)
BLOCK = 4
# Those whose layers are not called one after the other with a residual stream, or have states.
REFUSED = {"BloomForCausalLM", "OPTForCausalLM", "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM"}

QUICK = {"LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "GptOssForCausalLM", "DeepseekV2ForCausalLM"}


class Pipe:
    """In one process: what a stage sends, the next receives."""

    def __init__(self) -> None:
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def send(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        self.sent.append((residual.clone(), x.clone()))

    def receive(self, residual: torch.Tensor) -> torch.Tensor:
        own, x = self.sent.pop()
        residual.copy_(own)
        return x


def load(path: Path, number: int, count: int, pipe: Any, dtype: str = "float32") -> CausalLM:
    return load_model(path, dtype, stage=Stage(number, count, pipe))


def logits(models: list[CausalLM], ids: list[int]) -> torch.Tensor:
    """As `run_model.logits`, by all stages; each has a pool of its own."""
    pools = [run_model.pool(model, len(ids), BLOCK) for model in models]
    start, parts = 0, []
    for size in CHUNKS:
        token_ids = torch.tensor(ids[start : start + size])
        with torch.inference_mode():
            for model, (caches, table) in zip(models, pools, strict=True):
                context = run_model.context(table, start, size, len(ids), BLOCK)
                hidden = model(model.embed(token_ids), context, caches)
            parts.append(models[-1].logits(hidden))
        start += size
    return torch.cat(parts)


def check(path: Path, count: int, dtype: str) -> None:
    ids = [(7 * place) % (VOCAB - 4) + 3 for place in range(sum(CHUNKS))]
    whole = load_model(path, dtype)
    expected = run_model.logits(whole, ids, CHUNKS, block_size=BLOCK)
    pipe = Pipe()
    stages = [load(path, number, count, pipe, dtype) for number in range(count)]
    assert torch.equal(logits(stages, ids), expected) and not pipe.sent
    read = dict.fromkeys(dict(whole.named_parameters()), 0)
    for stage in stages:
        own = dict(stage.named_parameters())
        for name, parameter in whole.named_parameters():
            if name.rpartition(".")[0] in stage.elsewhere:
                assert not own[name].count_nonzero(), f"{name} was read where nobody needs it"
            else:
                assert torch.equal(own[name], parameter)
                read[name] += 1
    assert all(read.values())
    within = {f"{name}." for name, module in whole.named_modules() if module is whole.layers_in_order}
    assert all(count == 1 for name, count in read.items() if name.startswith(tuple(within)))


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK | REFUSED)) for one in sorted(rows.all_rows())],
)
def test_two_stages(checkpoint: Callable[[str, str], Path], architecture: str) -> None:
    path = checkpoint(architecture, next(iter(rows.entry(architecture)[2])))
    if architecture in REFUSED:
        with pytest.raises(UnsupportedModelError, match=r"pipeline_parallel_size=2: .* take tensor_parallel_size"):
            load(path, 0, 2, Pipe())
    else:
        check(path, 2, "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "variant"),
    [(one, variant) for one in sorted(rows.all_rows().keys() - REFUSED) for variant in rows.entry(one)[2]],
)
def test_every_variant(checkpoint: Callable[[str, str], Path], architecture: str, variant: str) -> None:
    path = checkpoint(architecture, variant)
    layers = load_model(path).layers_in_order
    assert layers is not None
    check(path, min(3, len(layers)), "bfloat16")


@pytest.mark.parametrize("count", [2, 3])
def test_a_table_that_the_files_have_as_the_projection(
    checkpoint: Callable[[str, str], Path], tmp_path: Path, count: int
) -> None:
    """The first stage looks tokens up in it, though the projection is the last one's."""
    shutil.copytree(checkpoint("LlamaForCausalLM", "tied"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, {"format": "pt"})
    whole, pipe = load_model(tmp_path / "model"), Pipe()
    stages = [load(tmp_path / "model", number, count, pipe) for number in range(count)]
    ids = [(7 * place) % (VOCAB - 4) + 3 for place in range(sum(CHUNKS))]
    assert torch.equal(logits(stages, ids), run_model.logits(whole, ids, CHUNKS, block_size=BLOCK))


def test_more_stages_than_layers(checkpoint: Callable[[str, str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"pipeline_parallel_size=4: .* has 3 layers"):
        load(checkpoint("LlamaForCausalLM", "gqa"), 0, 4, Pipe())


def test_transformers_own_modules(checkpoint: Callable[[str, str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="is not cut between its layers"):
        load_model(checkpoint("LlamaForCausalLM", "gqa"), impl="transformers", stage=Stage(0, 2, SimpleNamespace()))


@pytest.mark.parametrize(("layers", "stages"), [(7, 3), (4, 4), (16, 2), (5, 4)])
def test_layers_go_to_one_stage_each(layers: int, stages: int) -> None:
    shares = [Stage(number, stages, SimpleNamespace()).own(layers) for number in range(stages)]
    assert [layer for share in shares for layer in share] == list(range(layers))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_a_stage_has_memory_for_its_own_layers() -> None:
    """Groups, their block tables and numbers, are those of the whole model."""
    spec = KVSpec(8, 2, 16, windows=(0, 8, 8, 8) * 2)
    device = torch.device("cpu")
    assert len(spec.groups) > 1
    for own in (range(4), range(1, 4), range(7, 8)):
        part = KVSpec(8, 2, 16, windows=(0, 8, 8, 8) * 2, own=own)
        caches = allocate_cache(part, 3, 4, torch.float32, device)
        whole = allocate_cache(spec, 3, 4, torch.float32, device)
        assert [cache.group for cache in caches] == [cache.group for cache in whole]
        kept = {caches[layer].keys.data_ptr() for layer in own}
        assert {cache.keys.data_ptr() for cache in caches} == kept and len(kept) == part.layers_a_block
        for group in spec.groups:
            apart = [caches[layer].keys.data_ptr() for layer in group.layers if layer in own]
            assert len(set(apart)) == len(apart)
