"""Norms, embeddings and activations as layers: what single families have, against transformers; LoRA; recording."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from quire import kernels
from quire.errors import UnsupportedModelError
from quire.kernels import recording
from quire.kernels.adapters import LoraSegments
from quire.layers import Embedding, LayerNorm, PagedAttention, RMSNorm, RotaryTable, activation, gated_activation
from quire.layers.activation import KERNEL_KINDS, XIELU
from quire.layers.adapters import EmbeddingAdapters, EmbeddingChange, LoRAContext, NormAdapters, NormChange


@pytest.fixture(autouse=True, scope="module")
def with_one_thread(one_thread: None) -> None:
    pass


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(module: Any) -> Any:
    for seed, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(False).copy_(randn(*parameter.shape, seed=seed + 1) * 0.3)
    return module


def theirs(path: str, *given: Any, **named: Any) -> Any:
    family, name = path.split(".")
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)(*given, **named)


ROWS: dict[str, tuple[Any, Any]] = {
    "gemma": (lambda: RMSNorm(40, 1e-6, 1.0), lambda: theirs("gemma3.Gemma3RMSNorm", 40)),
    "olmo2": (lambda: RMSNorm(40, 1e-6), lambda: theirs("olmo2.Olmo2RMSNorm", 40)),
    "llama4": (lambda: RMSNorm(40, 1e-6, affine=False), lambda: theirs("llama4.Llama4TextL2Norm", 1e-6)),
    "nemotron": (lambda: LayerNorm(40, 1e-5, weight_offset=1.0), lambda: theirs("nemotron.NemotronLayerNorm1P", 40)),
    "cohere": (lambda: LayerNorm(40, 1e-5, bias=False), lambda: theirs("cohere.CohereLayerNorm", 40)),
    "mpt": (lambda: LayerNorm(40, 1e-5, bias=False), lambda: nn.LayerNorm(40, bias=False)),
    "olmo": (lambda: LayerNorm(40, 1e-5, affine=False), lambda: theirs("olmo.OlmoLayerNorm", 40)),
}


@pytest.mark.parametrize("family", list(ROWS))
def test_a_family_s_norm(family: str) -> None:
    mine, their = (filled(make()) for make in ROWS[family])
    assert [name for name, _ in mine.named_parameters()] == [name for name, _ in their.named_parameters()]
    x = randn(7, 3 * 40)[:, 40:80]
    torch.testing.assert_close(mine(x), their(x), rtol=1e-5, atol=1e-5)
    stream, more = randn(7, 40, seed=2), randn(7, 40, seed=3)
    want = stream + more
    torch.testing.assert_close(mine(stream, more), their(want), rtol=1e-5, atol=1e-5)
    assert torch.equal(stream, want)


HEADS: dict[str, tuple[Any, Any]] = {
    "gemma": ROWS["gemma"],
    "llama4": ROWS["llama4"],
    "phi": (lambda: LayerNorm(40, 1e-5), lambda: nn.LayerNorm(40)),
    "cohere": (lambda: LayerNorm((3, 40), bias=False), lambda: theirs("cohere.CohereLayerNorm", (3, 40))),
}


@pytest.mark.parametrize("family", list(HEADS))
@torch.inference_mode()
def test_norms_of_heads_take_a_slice(family: str) -> None:
    """As it lies in the projection, by one kernel: what copied would be no kernel's."""
    mine, their = (filled(make()) for make in HEADS[family])
    heads = randn(5, 6 * 40).view(5, 6, 40)[:, 1:4]
    recorded = recording.record(lambda: mine(heads), recording.Workspace())
    assert len(recorded) == 1
    torch.testing.assert_close(recorded.results, their(heads), rtol=1e-5, atol=1e-5)
    assert recorded.results.is_contiguous() and torch.equal(mine(heads), recorded.results)
    # In another order they are copied first.
    assert torch.equal(mine(heads.transpose(0, 1).contiguous().transpose(0, 1)), recorded.results)


def test_what_is_added_has_a_multiplier() -> None:
    """Granite's and MiniCPM's residual."""
    for norm in (RMSNorm(40, 1e-6, added_scale=0.22), LayerNorm(40, added_scale=0.22)):
        filled(norm)
        stream, more = randn(7, 40, seed=2), randn(7, 40, seed=3)
        want = stream + more * 0.22
        assert torch.equal(norm(stream, more), norm(want)) and torch.equal(stream, want)


SEGMENTS = [(0, 2, 0, 1.0), (3, 5, 1, 1.0)]


@pytest.mark.parametrize("own", [False, True], ids=["one weight", "one a head"])
@pytest.mark.parametrize("kind", ["rms", "layer", "bias"])
def test_adapters_of_norms_of_heads(kind: str, own: bool) -> None:
    """Weights that an adapter trained, for its tokens' heads alone; bit by bit those of a model that has them."""
    size = (3, 16) if own else 16

    def make() -> Any:
        return filled(RMSNorm(size, 1e-6, 1.0) if kind == "rms" else LayerNorm(size, bias=kind == "bias"))

    norm, others = make(), [make() for _ in range(2)]
    context = LoRAContext()
    norm.adapters = NormAdapters(context, "layer.q_norm")
    for slot, other in enumerate(others):
        for parameter in other.parameters():
            parameter.add_(randn(*parameter.shape, seed=9 + slot))
        norm.adapters.put(slot, NormChange(other.weight, getattr(other, "bias", None)))
    x = randn(6, 5 * 16).view(6, 5, 16)[:, 2:]
    plain = norm(x)
    context.segments = LoraSegments.of(SEGMENTS, 6)
    mixed = norm(x)
    for start, end, slot, _ in SEGMENTS:
        assert torch.equal(mixed[start:end], others[slot](x[start:end]))
    for token in (2, 5):
        assert torch.equal(mixed[token], plain[token])
    assert not torch.equal(mixed, plain)
    context.segments = LoraSegments.of(SEGMENTS, 7)
    with pytest.raises(ValueError, match=r"layer\.q_norm: .*6 rows"):
        norm(x)


def test_adapters_of_a_norm_with_an_offset() -> None:
    norm, other, context = filled(RMSNorm(16, 1e-6, 1.0)), RMSNorm(16, 1e-6, 1.0), LoRAContext()
    other.weight.copy_(randn(16, seed=5))
    norm.adapters = NormAdapters(context, "norm", {0: NormChange(other.weight, None)})
    context.segments = LoraSegments.of(SEGMENTS[:1], 6)
    stream, more = randn(6, 16), randn(6, 16, seed=1)
    plain = norm(stream + more)  # whose rows 0 and 1 are changed, too
    assert torch.equal(norm(stream, more), plain)
    assert torch.equal(plain[:2], other(stream[:2]))


@pytest.mark.parametrize("kind", ["plain", "dora", "saved"])
def test_adapters_of_an_embedding_with_a_scale(kind: str) -> None:
    """Gemma's: what adapters change is what is scaled."""
    table, context = filled(Embedding(20, 16, 4.0)), LoRAContext()
    a, b, magnitude = randn(20, 3, seed=2), randn(16, 3, seed=3), randn(16, seed=4).abs()
    changes = {
        "plain": EmbeddingChange(a=a, b=b, scaling=0.5),
        "dora": EmbeddingChange(a=a, b=b, scaling=0.5, scale=magnitude),
        "saved": EmbeddingChange(weight=randn(20, 16, seed=5)),
    }
    table.adapters = EmbeddingAdapters(context, "embed", {0: changes[kind]})
    context.segments = LoraSegments.of([(1, 4, 0, 1.0)], 5)
    ids, change = torch.tensor([3, 1, 19, 1, 0]), changes[kind]
    rows = table.weight if change.weight is None else change.weight
    if change.a is not None:
        rows = rows + 0.5 * a @ b.t()
    if change.scale is not None:
        rows = rows * magnitude
    added = randn(5, 16, seed=6)
    for more in (None, added):
        want = table.weight[ids] * 4
        want[1:4] = rows[ids[1:4]] * 4
        torch.testing.assert_close(table(ids, more), want if more is None else want + more, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(kernels.backend().__name__ != "quire.kernels.native", reason="the twins are never recorded")
@torch.inference_mode()
def test_a_layer_with_norms_of_heads_is_recorded() -> None:
    """Qwen3's steps between projection and cache are three kernels; what other families have is one each."""
    attend, q_norm, k_norm = PagedAttention(4, 2, 16), filled(RMSNorm(16, 1e-6)), filled(RMSNorm(16, 1e-6))
    qkv, ids = randn(3, 8 * 16), torch.tensor([1, 0, 7])
    rope = RotaryTable(torch.tensor([5, 0, 2]), randn(6, 8, seed=4), True, 4)
    embed, act = filled(Embedding(9, 16, 3.0)), filled(XIELU())
    act.beta.fill_(0.5)
    act.eps.fill_(-1e-6)

    def function() -> list[torch.Tensor]:
        query, key, _ = attend.split(qkv)
        query, key = q_norm(query), k_norm(key)
        attend.rotate(query, key, rope)
        stream = embed(ids)
        both = kernels.add(stream, act(stream), 0.5)
        return [query, key, both, kernels.scale(both, 0.3, 30.0), kernels.clamped_swiglu(both, 1.702, 7.0)]

    expected = [one.clone() for one in function()]
    recorded = recording.record(function, recording.Workspace())
    assert len(recorded) == 8
    ids.copy_(torch.tensor([2, 2, 8]))
    recorded.replay()
    got = [one.clone() for one in recorded.results]
    assert all(map(torch.equal, got, function()))
    assert torch.equal(got[0], expected[0]) and not torch.equal(got[2], expected[2])


@pytest.mark.parametrize(
    "name", ["relu2", "relu6", "sigmoid", "tanh", "mish", "gelu_new", "silu", "laplace", "gelu_10"]
)
def test_activations_by_name(name: str) -> None:
    """Kernels where they are common; the others row by row, with the same bits in any company."""
    from transformers.activations import ACT2FN

    x = randn(9, 2 * 77) * 4
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(activation(name)(x), ACT2FN[name](x), rtol=1e-5, atol=1e-5)
    gated = gated_activation(name)
    torch.testing.assert_close(gated(x), ACT2FN[name](gate) * up, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(gated(x[t : t + 1])[0], gated(x)[t]) for t in range(9))
    assert (name in KERNEL_KINDS) is (name not in ("laplace", "gelu_10"))


def test_xielu_is_transformers_with_its_names() -> None:
    from transformers.activations import ACT2CLS

    mine, their = activation("xielu"), ACT2CLS["xielu"](dtype=torch.float32)
    assert isinstance(mine, XIELU)
    for seed, parameter in enumerate(their.parameters()):
        parameter.data.copy_(randn(1, seed=seed + 3))
    mine.load_state_dict(their.state_dict())
    x = randn(9, 77) * 4
    with torch.no_grad():
        torch.testing.assert_close(mine(x), their(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match="weights of its own"):
        gated_activation("xielu")
