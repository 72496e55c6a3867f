"""What an attention's spec says reaches the kernels, and what a device's kernel does not compute is refused at load.

`WindowedForCausalLM` is a plug-in of a few lines: Mistral's windows, and ALiBi's slopes for the same projections.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from quire import UnsupportedModelError, kernels, registry
from quire.kernels import recording
from quire.layers import PagedAttention
from quire.models.llama import LlamaForCausalLM
from quire.models.loader import load_model
from quire.types import AttentionSpec, KVCache
from tests.models import run_model, tiny

IDS = [(7 * place + 3) % tiny.VOCAB for place in range(40)]
SLOPES = (0.5, 0.25, 0.125, 0.0625)
WINDOW = 6


class WindowedForCausalLM(LlamaForCausalLM):
    supported_fields: ClassVar = LlamaForCausalLM.supported_fields | {"sliding_window"}

    @classmethod
    def attention_spec(cls, config: Any, layer: int) -> AttentionSpec:
        spec = super().attention_spec(config, layer)
        return dataclasses.replace(spec, window=config.sliding_window)


def test_the_page_shows_the_very_class() -> None:
    page = (Path(__file__).parents[2] / "docs" / "adding-a-model.md").read_text()
    assert inspect.getsource(WindowedForCausalLM) in page


@pytest.fixture
def mistral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    row = registry.Row("MistralForCausalLM", f"{__name__}:WindowedForCausalLM", package="tests")
    monkeypatch.setattr(registry, "plugin_rows", lambda: (row,))
    config = transformers.MistralConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=WINDOW,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = transformers.MistralForCausalLM(config).eval()
    tiny.randomise(model)
    model.save_pretrained(tmp_path / "mistral")
    return model


def test_a_window_that_the_devices_kernel_lacks_is_refused_when_the_model_is_loaded(
    mistral: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_windows(*arguments: Any) -> torch.Tensor:
        assert arguments[7] == WINDOW
        raise ValueError("window: this device's kernel has none")

    monkeypatch.setattr(kernels.backend(), "paged_attention", without_windows)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.self_attn.*this device's kernel has none"):
        load_model(tmp_path / "mistral")


@pytest.mark.parametrize("chunks", [None, [1] * 40, [5, 9, 26]])
def test_a_window(mistral: Any, tmp_path: Path, chunks: list[int] | None, each_kernel: None) -> None:
    model = load_model(tmp_path / "mistral")
    with torch.inference_mode():
        expected = mistral(torch.tensor([IDS])).logits[0]
    ours = run_model.logits(model, IDS, chunks)
    assert (ours - expected).abs().max() < 1e-4
    assert torch.equal(ours, run_model.logits(model, IDS))


@pytest.fixture(params=["native", "reference"])
def each_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("QUIRE_KERNELS", request.param)
    kernels.backend.cache_clear()
    yield
    monkeypatch.undo()
    kernels.backend.cache_clear()


def step(attend: PagedAttention, tokens: int) -> tuple[torch.Tensor, torch.Tensor, Any, KVCache]:
    """qkv [T, (H + 2 G) D], q k v in the same numbers, the step's context and an empty pool."""
    spec = attend.spec
    heads, size = spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim
    qkv = torch.randn(tokens, heads * size, generator=torch.Generator().manual_seed(1))
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    shape = (3, spec.num_kv_heads, 4, size)
    return qkv, qkv.view(tokens, heads, size), run_model.context(table, 0, tokens, tokens, 4), KVCache(
        torch.zeros(shape), torch.zeros((*shape[:3], attend.value_dim))
    )  # fmt: skip


def test_every_field_reaches_the_kernel(each_kernel: None) -> None:
    """A call for query, key and value of their own sizes, and one for the merged projection."""
    scales, sinks = (0.5, 0.25, 0.125, 1.0), torch.tensor([0.5, -1.0, 3.0, 0.0])
    spec = AttentionSpec(4, 2, 8, scales, 5, SLOPES, 6, 1.5, True, chunk=7)
    attend = PagedAttention.from_spec(spec)
    assert attend.spec == spec and (attend.size, attend.value_dim) == (24, 6)
    _, heads, ctx, cache = step(attend, 9)
    query, key, value = heads[:, :4], heads[:, 4:6], heads[:, 6:, :6].contiguous()
    scores = (query.transpose(0, 1) @ key.permute(1, 2, 0).repeat_interleave(2, 0)) * torch.tensor(scales).view(4, 1, 1)
    distance = torch.arange(9).view(1, -1) - torch.arange(9).view(-1, 1)
    scores = (scores / 1.5).tanh() * 1.5 + torch.tensor(SLOPES).view(4, 1, 1) * distance
    before = torch.arange(9).view(-1, 1) // 7 != torch.arange(9).view(1, -1) // 7
    scores = scores.masked_fill((distance > 0) | (distance <= -5) | before, -torch.inf)
    shares = torch.cat([scores, sinks.view(4, 1, 1).expand(4, 9, 1)], -1).softmax(-1)[..., :-1]
    expected = (shares @ value.transpose(0, 1).repeat_interleave(2, 0)).transpose(0, 1).reshape(9, -1)
    ours = attend.of(query.clone(), key.clone(), value, ctx, cache, sinks=sinks)
    assert (ours - expected).abs().max() < 1e-5
    merged = torch.cat([part.reshape(9, -1) for part in (query, key, value)], 1)
    assert torch.equal(attend(merged, ctx, cache, sinks=sinks), ours)
    assert [list(part.shape) for part in attend.split(merged)] == [[9, 4, 8], [9, 2, 8], [9, 2, 6]]


def test_ends_of_what_tokens_see_reach_the_kernel(each_kernel: None) -> None:
    attend = PagedAttention(4, 2, 8)
    qkv, heads, ctx, cache = step(attend, 9)
    ctx = dataclasses.replace(ctx, visible_end=torch.full((9,), 9, dtype=torch.int32))
    query, key, value = (part.transpose(0, 1) for part in heads.split([4, 2, 2], 1))
    key, value = key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)
    expected = (query @ key.transpose(1, 2) * 8**-0.5).softmax(-1) @ value
    assert (attend(qkv, ctx, cache) - expected.transpose(0, 1).reshape(9, -1)).abs().max() < 1e-5


def test_keys_alone_are_stored_where_values_are_a_part_of_them() -> None:
    attend = PagedAttention(4, 1, 8, value_dim=6)
    query, key = torch.randn(9, 4, 8), torch.randn(9, 1, 8)
    ctx, cache = step(attend, 9)[2:]
    latent = KVCache(cache.keys, cache.keys[..., :6])
    ours = attend.of(query.clone(), key.clone(), None, ctx, latent)
    apart = step(attend, 9)[3]
    assert torch.equal(attend.of(query.clone(), key.clone(), key[..., :6].contiguous(), ctx, apart), ours)


@torch.inference_mode()
def test_sinks_of_another_dtype_are_converted_once() -> None:
    """So that steps can be recorded."""
    attend, sinks = PagedAttention(4, 2, 8, sinks=True), torch.randn(4).bfloat16()
    qkv, _, ctx, cache = step(attend, 9)
    first = attend(qkv, ctx, cache, sinks=sinks)
    recorded = recording.record(lambda: attend(qkv, ctx, cache, sinks=sinks), recording.Workspace())
    recorded.replay()
    assert torch.equal(recorded.results, first)
    assert torch.equal(attend(qkv, ctx, cache, sinks=sinks.float()), first)


def test_sinks_that_the_spec_does_not_say() -> None:
    for has in (True, False):
        attend = PagedAttention(4, 2, 8, sinks=has)
        qkv, _, ctx, cache = step(attend, 9)
        with pytest.raises(ValueError, match=f"sinks: the spec says {has}"):
            attend(qkv, ctx, cache, sinks=None if has else torch.zeros(4))


def test_slopes_reach_the_kernel(each_kernel: None) -> None:
    attend = PagedAttention(4, 2, 8, alibi_slopes=SLOPES)
    qkv, heads, ctx, cache = step(attend, 9)
    query, key, value = (part.transpose(0, 1) for part in heads.split([4, 2, 2], 1))
    key, value = key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)
    distance = torch.arange(9).view(1, -1) - torch.arange(9).view(-1, 1)
    scores = query @ key.transpose(1, 2) * 8**-0.5 + torch.tensor(SLOPES).view(4, 1, 1) * distance
    expected = scores.masked_fill(distance > 0, -torch.inf).softmax(-1) @ value
    assert (attend(qkv, ctx, cache) - expected.transpose(0, 1).reshape(9, -1)).abs().max() < 1e-5


def test_the_steps_one_by_one_are_the_whole() -> None:
    attend = PagedAttention.from_spec(AttentionSpec(4, 2, 8, scale=0.3))
    assert attend.spec == PagedAttention(4, 2, 8, 0.3).spec
    qkv, _, ctx, cache = step(attend, 9)
    whole = attend(qkv, ctx, cache)
    again = step(attend, 9)[3]
    query, key, value = attend.split(qkv)
    assert [list(part.shape) for part in (query, key, value)] == [[9, 4, 8], [9, 2, 8], [9, 2, 8]]
    attend.store(key, value, ctx, again)
    assert torch.equal(attend.attend(query, ctx, again), whole)
    assert torch.equal(again.keys, cache.keys) and torch.equal(again.values, cache.values)
