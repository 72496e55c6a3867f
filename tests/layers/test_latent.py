"""What absorbs the projection of latents: products by head, one row's bits whatever else is in the call."""

from __future__ import annotations

import pytest
import torch

from quire import kernels
from quire.kernels.adapters import LoraSegments, LoraWeights, pack
from quire.layers import LatentProjection, LatentTable
from quire.layers.adapters import LinearChange, LoRAContext

HEADS, RANK, KEY, VALUE = 3, 21, 5, 7


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def layer(request: pytest.FixtureRequest) -> LatentProjection:
    made = LatentProjection(RANK, HEADS, KEY, VALUE, "q_proj")
    weight = torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(1))
    made.weight.data = weight.to(request.param)
    made.absorb(torch.empty(made.turned_shape, dtype=request.param))
    return made


def table(tokens: int) -> LatentTable:
    starts, owners = torch.empty(HEADS + 1, dtype=torch.int32), torch.empty(HEADS * tokens, dtype=torch.int64)
    numbers = torch.arange(HEADS, dtype=torch.int32).repeat(tokens, 1)
    kernels.sort_by_expert(numbers, starts, owners, torch.empty_like(numbers))
    return LatentTable(torch.arange(tokens), torch.zeros(tokens, 2), starts=starts, tokens=owners)


def rows(tokens: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, HEADS, size], heads apart, as a projection has them beside what turns."""
    wide = torch.randn(tokens, HEADS, size + 3, generator=torch.Generator().manual_seed(size))
    return wide.to(dtype)[..., :size]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    scale = 2e-2 if got.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), want, rtol=scale, atol=scale * float(want.abs().max()))


def test_the_products(layer: LatentProjection) -> None:
    dtype, weight = layer.weight.dtype, layer.weight.double().view(HEADS, KEY + VALUE, RANK)
    query, mixed = rows(6, KEY, dtype), rows(6, RANK, dtype).contiguous()
    got = layer.queries(query, table(6)), layer.outputs(mixed, table(6))
    close(got[0], torch.einsum("thn,hnr->thr", query.double(), weight[:, :KEY]))
    close(got[1], torch.einsum("thr,hvr->thv", mixed.double(), weight[:, KEY:]).flatten(1))
    for t in range(6):
        assert torch.equal(layer.queries(query[t : t + 1], table(1)), got[0][t : t + 1])
        assert torch.equal(layer.outputs(mixed[t : t + 1], table(1)), got[1][t : t + 1])
    assert torch.equal(layer.queries(query[2:5], table(3)), got[0][2:5])


def test_adapters_of_the_whole_layer(layer: LatentProjection) -> None:
    """Queries and outputs are those of W + scaling B A; of scale and shift, what concerns values."""
    dtype, random = layer.weight.dtype, torch.Generator().manual_seed(3)
    columns, rank = layer.out_features, 4
    a, b = torch.randn(rank, RANK, generator=random).to(dtype), torch.randn(columns, rank, generator=random).to(dtype)
    scale, shift = (torch.rand(columns, generator=random) + 0.5 for _ in range(2))
    context = LoRAContext()
    layer.adapters = layer.new_adapters(
        context, "kv_b_proj", dtype, 1, torch.device("cpu"), kernels.backend().ROW_MAJOR_B
    )
    change = layer.by_head(LinearChange(LoraWeights(a, pack(b), 0.5, scale, shift)))
    assert change is not None and change.key_scale is not None and not change.is_plain
    assert torch.equal(change.key_scale, scale.view(HEADS, -1)[:, :KEY])
    layer.adapters.put(0, change.for_device(layer, torch.device("cpu"), kernels.backend().ROW_MAJOR_B))
    query, mixed = rows(5, KEY, dtype), rows(5, RANK, dtype).contiguous()
    plain = layer.queries(query, table(5)), layer.outputs(mixed, table(5))
    context.segments = LoraSegments.of([(1, 4, 0, 1.0)], 5)
    got = layer.queries(query, table(5)), layer.outputs(mixed, table(5))
    weight = (layer.weight.double() + 0.5 * b.double() @ a.double()).view(HEADS, KEY + VALUE, RANK)
    close(got[0][1:4], torch.einsum("thn,hnr->thr", query.double(), weight[:, :KEY])[1:4])
    want = torch.einsum("thr,hvr->thv", mixed.double(), weight[:, KEY:])
    own = [one.double().view(HEADS, -1)[:, KEY:] for one in (scale, shift)]
    close(got[1][1:4], (want * own[0] + own[1]).flatten(1)[1:4])
    for one, other in zip(got, plain, strict=True):
        assert torch.equal(one[[0, 4]], other[[0, 4]]) and not torch.equal(one[1:4], other[1:4])
    context.segments = LoraSegments.of([(0, 1, 0, 1.0)], 1)
    assert torch.equal(layer.queries(query[2:3], table(1)), got[0][2:3])
    layer.adapters.grow(9)
    assert torch.equal(layer.queries(query[2:3], table(1)), got[0][2:3])
    layer.adapters.drop(0)
    assert torch.equal(layer.queries(query[:1], table(1)), plain[0][:1])


def test_what_is_read_again_is_absorbed_again(layer: LatentProjection) -> None:
    query = rows(2, KEY, layer.weight.dtype)
    before = layer.queries(query, table(2))
    layer.weight.data.mul_(2)
    assert torch.equal(layer.queries(query, table(2)), before)
    memory = torch.empty(layer.turned_shape, dtype=layer.weight.dtype)
    layer.absorb(memory)
    assert torch.equal(layer.queries(query, table(2)), 2 * before)


def test_nothing_is_multiplied_by_before_it_is_there() -> None:
    layer = LatentProjection(RANK, HEADS, KEY, VALUE, "q_proj")
    with pytest.raises(RuntimeError, match="absorb has not been called"):
        layer.queries(rows(1, KEY, torch.float32), table(1))
    with pytest.raises(NotImplementedError):
        layer(torch.zeros(1, RANK))


def test_weights_are_not_replaced() -> None:
    layer = LatentProjection(RANK, HEADS, KEY, VALUE, "q_proj")
    with pytest.raises(ValueError, match="cannot be replaced"):
        layer.by_head(LinearChange(weight=torch.zeros(layer.out_features, RANK)))
    assert layer.by_head(LinearChange()) is None
