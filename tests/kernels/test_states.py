"""The kernels of layers with states: against float64, in any chunks and any company, from states that others left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_helpers import ROUNDING, assert_close, randn, same_bits, strided_rows

from quire.errors import QuireError
from tests.kernels.back_ends import OWN, back_end
from tests.kernels.test_arguments import valid_arguments

F32 = torch.float32
SIZE = 4  # tokens of a block


@pytest.fixture(params=["reference", *OWN])
def own(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every back end but the GPU's, which refuses states."""
    with back_end(request.param) as module:
        yield module


def test_the_gpu_refuses_states(emulated_cuda: Any) -> None:
    for name in ("causal_conv1d", "selective_scan", "gated_norm"):
        with pytest.raises(QuireError, match=r"CUDA kernels have none for layers with states.*device='cpu'"):
            getattr(emulated_cuda, name)(**valid_arguments("cpu")[name])


class Layer:
    """A layer's weights, and a pool of blocks in which everything is NaN until it is written.

    heads, head_dim, state_size, groups, kernel: sizes.
    """

    def __init__(
        self, kernels: Any, dtype: torch.dtype, sizes: tuple[int, int, int, int, int], blocks: int = 24
    ) -> None:
        self.kernels, self.dtype = kernels, dtype
        self.heads, self.width, self.size, self.groups, self.taps = sizes
        self.inner = self.heads * self.width
        self.channels = self.inner + 2 * self.groups * self.size
        self.weight = randn(self.channels, self.taps, dtype=dtype, seed=1)
        self.bias = randn(self.channels, dtype=dtype, seed=2)
        self.scales = torch.rand(self.channels, generator=torch.Generator().manual_seed(3)) + 0.5
        self.a_log = randn(self.heads, dtype=dtype, seed=4) * 0.5
        self.dt_bias = randn(self.heads, dtype=dtype, seed=5)
        self.d = randn(self.heads, dtype=dtype, seed=6)
        self.states = torch.full((blocks, 2, self.heads, self.size, self.width), torch.nan)
        self.tails = torch.full((blocks, 2, self.taps - 1, self.channels), torch.nan, dtype=dtype)
        self.ends = [torch.full((blocks, 2), -1) for _ in range(2)]
        self.order = torch.randperm(blocks, generator=torch.Generator().manual_seed(7)).tolist()

    def blocks(self, tokens: int) -> list[int]:
        """New ones, in no order, for so many tokens."""
        return [self.order.pop() for _ in range(-(-tokens // SIZE))]

    def inputs(self, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = randn(tokens, self.channels, dtype=self.dtype, seed=seed)
        return x, randn(tokens, self.heads, dtype=self.dtype, seed=seed + 1)

    def run(
        self, parts: Sequence[tuple[torch.Tensor, torch.Tensor, list[int], int]], scaled: bool = True
    ) -> list[torch.Tensor]:
        """A step of (x, dt, table, tokens before it) for each sequence: the convolution's result and the scan's, side
        by side, [T, C + H P] each."""
        counts = [len(x) for x, _, _, _ in parts]
        longest = max(len(table) for _, _, table, _ in parts)
        table = torch.tensor([own + [-1] * (longest - len(own)) for _, _, own, _ in parts], dtype=torch.int32)
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        lengths = torch.tensor([before + len(x) for x, _, _, before in parts], dtype=torch.int32)
        past = table, starts, lengths, SIZE
        x, dt = (strided_rows(torch.cat([part[i] for part in parts])) for i in range(2))
        scales = self.scales if scaled else None
        y = self.kernels.causal_conv1d(x, self.weight, self.bias, scales, self.tails, self.ends[0], *past)
        scanned = self.kernels.selective_scan(
            y, dt, self.a_log, self.dt_bias, self.d, self.states, self.ends[1], *past, self.groups, 0.75, 0.01, 2.5
        )
        return list(torch.cat([y, scanned], 1).split(counts))

    def exactly(self, x: torch.Tensor, dt: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """In float64, of a whole sequence; the scan goes on from the convolution's own result y."""
        weight = (self.weight.float() * self.scales.unsqueeze(1)).double().unsqueeze(1)
        wide = F.conv1d(x.double().T[None], weight, self.bias.double(), padding=self.taps - 1, groups=self.channels)
        convolved = F.silu(wide[0, :, : len(x)].T)
        steps = F.softplus(dt.double() * 0.75 + self.dt_bias.double()).clamp(0.01, 2.5)
        values, b, c = y.double().split([self.inner, *[self.groups * self.size] * 2], 1)
        state, rows = torch.zeros(self.heads, self.width, self.size, dtype=torch.float64), []
        per_group = self.heads // self.groups
        for t in range(len(x)):
            own = values[t].view(self.heads, self.width, 1)
            b_t, c_t = (one[t].view(self.groups, 1, self.size).repeat_interleave(per_group, 0) for one in (b, c))
            decay = (-steps[t] * self.a_log.double().exp()).exp().view(-1, 1, 1)
            state = state * decay + steps[t].view(-1, 1, 1) * own * b_t
            rows.append(((state * c_t).sum(-1) + self.d.double().unsqueeze(1) * own[..., 0]).flatten())
        return convolved, torch.stack(rows)


SIZES = [(2, 16, 8, 1, 4), (6, 8, 5, 2, 4), (3, 70, 33, 3, 2), (1, 64, 128, 1, 5)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_they_compute_what_they_say(own: Any, dtype: torch.dtype, sizes: tuple[int, int, int, int, int]) -> None:
    layer = Layer(own, dtype, sizes)
    x, dt = layer.inputs(11, 20)
    got = layer.run([(x, dt, layer.blocks(11), 0)])[0]
    convolved, scanned = layer.exactly(x, dt, got[:, : layer.channels])
    assert_close(got[:, : layer.channels], convolved, 1e-5)
    assert_close(got[:, layer.channels :], scanned, 2e-5 * float(scanned.abs().max()))


@pytest.mark.parametrize("cut", [(1,) * 14, (13, 1), (3, 4, 7), (4, 4, 4, 2), (9, 5)], ids=str)
def test_any_chunks_in_any_company_have_the_same_bits(own: Any, cut: tuple[int, ...]) -> None:
    """And any blocks between, or none."""
    layer = Layer(own, torch.bfloat16, (4, 8, 6, 2, 4))
    x, dt = layer.inputs(14, 20)
    whole = layer.run([(x, dt, layer.blocks(14), 0)])[0]
    other, table, start = layer.inputs(30, 40), layer.blocks(30), 0
    mine, got = layer.blocks(14), []
    for turn, count in enumerate(cut):
        end, last = start + count, (start + count - 1) // SIZE
        # Every other time the places between have no blocks.
        seen = [block if turn % 2 or place in (start // SIZE, last, (start - 1) // SIZE) else -1
                for place, block in enumerate(mine)]  # fmt: skip
        company = tuple(one[2 * turn : 2 * turn + 2] for one in other)
        parts = [(*company, table, 2 * turn), (x[start:end], dt[start:end], seen, start)]
        got.append(layer.run(parts)[1])
        start = end
    assert same_bits(torch.cat(got), whole)


def test_a_call_may_be_repeated(own: Any) -> None:
    """With the same tokens, and with fewer; what follows finds the state of the last."""
    layer = Layer(own, F32, (2, 8, 6, 1, 4))
    x, dt = layer.inputs(13, 20)
    whole, table = layer.run([(x, dt, layer.blocks(13), 0)])[0], layer.blocks(13)
    for start, end in [(0, 6), (0, 6), (6, 7), (6, 7), (7, 13), (7, 8), (7, 8), (8, 12), (8, 9), (9, 13), (9, 13)]:
        got = layer.run([(x[start:end], dt[start:end], table, start)])[0]
        assert same_bits(got, whole[start:end])


def test_another_sequence_goes_on_from_a_block(own: Any) -> None:
    """From the end of a full one, which is only read; and from a copy of one that is filled in part."""
    layer = Layer(own, F32, (2, 8, 6, 1, 4))
    x, dt = layer.inputs(14, 20)
    table = layer.blocks(14)
    whole = layer.run([(x, dt, table, 0)])[0]
    for place in range(3):
        start, fresh = (place + 1) * SIZE, layer.blocks(4 * SIZE)
        mine = [*table[: place + 1], *fresh][:4]
        got = layer.run([(x[start:14], dt[start:14], mine, start)])[0]
        assert same_bits(got, whole[start:])
        layer.order += fresh
    (copy,) = layer.blocks(1)
    for tensor in (layer.states, layer.tails, *layer.ends):
        tensor[copy] = tensor[table[3]]
    more, dt_more = layer.inputs(5, 60)
    both = [(more, dt_more, [*table[:3], block, layer.blocks(1)[0]], 14) for block in (copy, table[3])]
    first = layer.run(both[:1])[0]
    assert same_bits(first, layer.run(both[1:])[0])


def test_a_state_that_is_not_there_is_refused(own: Any) -> None:
    layer = Layer(own, F32, (2, 8, 6, 1, 4))
    x, dt = layer.inputs(9, 20)
    table = layer.blocks(9)
    layer.run([(x[:5], dt[:5], table, 0)])
    for before, seen, error in [
        (6, table, ValueError),  # nothing is behind six tokens
        (3, table, ValueError),  # nor behind three any more
        (5, [table[0], -1, table[2]], ValueError),
        (5, [table[0], table[1], -1], IndexError),  # there is no room for what is left
        (5, [table[0], table[1], 24], IndexError),
    ]:
        with pytest.raises(error, match="block_table: "):
            layer.run([(x[5:9], dt[5:9], seen, before)])
    layer.run([(x[5:9], dt[5:9], table, 5)])


@pytest.mark.parametrize(("channels", "groups"), [(48, 1), (48, 3), (33, 1), (70, 2), (1024, 4)])
def test_gated_norm(own: Any, dtype: torch.dtype, channels: int, groups: int) -> None:
    for tokens in (0, 1, 7):
        x, gate = (strided_rows(randn(tokens, channels, dtype=dtype, seed=seed)) for seed in (1, 2))
        weight = randn(channels, dtype=dtype, seed=3)
        factor = F.silu(gate.double() * 0.5)
        assert_close(own.gated_norm(x, gate, gate_scale=0.5), x.double() * factor, 1e-6)
        for first in (False, True):
            wide = x.double() if first else x.double() * factor
            parts = wide.unflatten(1, (groups, -1))
            normed = (parts * (parts.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(1) * weight.double()
            exact = normed * factor if first else normed
            got = own.gated_norm(x, gate, weight, groups, 1e-5, 0.5, first)
            assert_close(got, exact, exact.abs() * 2e-6 + ROUNDING[F32])
            for i in range(tokens):
                assert same_bits(
                    own.gated_norm(x[i : i + 1], gate[i : i + 1], weight, groups, 1e-5, 0.5, first), got[i : i + 1]
                )
