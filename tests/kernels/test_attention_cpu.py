"""What the CPU's paged attention has beside the others: threads among which it is split, and checks of its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import page, stream
from kernel_helpers import same_bits


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """To begin with, and the number of before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("window", [0, 70, *(pytest.param(size, marks=pytest.mark.slow) for size in (512, 900))])
def test_bits_do_not_depend_on_threads_or_splitting(cpu: Any, dtype: torch.dtype, window: int) -> None:
    """One stream is split by spans where there are threads to spare, and walked in one piece otherwise."""
    more: dict[str, Any] = {"window": window, "sinks": torch.tensor([0.5, 3.0, -1.0, 8.0])} if window else {}
    subject, short = stream(2100, (4, 2), 64, dtype), stream(20, (4, 2), 64, dtype, seed=1)
    chunks = [(subject, 2000, 2100)]
    crowd = [(short, 19, 20)] * 40 + chunks
    outs = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        outs.append(page(chunks, **more).run(cpu))
        outs.append(page(crowd, 8, **more).run(cpu)[40:])
        alone = [page([(subject, p, p + 1)], **more).run(cpu) for p in (2000, 2047, 2048, 2099)]
        outs.append(outs[0].clone().index_copy_(0, torch.tensor([0, 47, 48, 99]), torch.cat(alone)))
    assert all(same_bits(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize("dim", [7, 20, 64, 80, 96, 112, 256, (576, 512)])
@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (4, 2), (9, 3), (4, 1)])
def test_bits_of_few_rows_are_those_of_many(
    cpu: Any, dtype: torch.dtype, heads: tuple[int, int], dim: int | tuple[int, int]
) -> None:
    """Scores of a token or two are made of keys where they lie, those of a chunk of keys that are packed once."""
    key_dim, value_dim = dim if isinstance(dim, tuple) else (dim, dim)
    subject = stream(150, heads, key_dim, dtype, value_dim=value_dim)
    for block_size in (1, 16):
        chunk = page([(subject, 100, 150)], block_size).run(cpu)
        for p in (100, 127, 128, 149):
            assert same_bits(page([(subject, p, p + 1)], block_size).run(cpu), chunk[p - 100 : p - 99]), (p, block_size)


def test_bits_of_one_token_alone_among_denormals(cpu: Any) -> None:
    """Products of floats are another way to the sums of vdpbf16ps, which takes denormals for zeros."""
    plain = stream(40, (4, 2), 64, torch.bfloat16)
    subject = replace(plain, query=plain.query * 1e-19, key=plain.key * 1e-19)
    chunk = page([(subject, 0, 40)], scale=1e37).run(cpu)
    assert not same_bits(chunk, page([(replace(plain, query=plain.query * 0), 0, 40)]).run(cpu))  # scores tell
    for p in (0, 1, 17, 39):
        assert same_bits(page([(subject, p, p + 1)], scale=1e37).run(cpu), chunk[p : p + 1]), p


def test_arguments_are_checked(cpu: Any) -> None:
    call = page([(stream(20, (4, 2), 16, torch.float32), 10, 20)], 8)
    bad = [
        ("query", call.query.double(), TypeError, "query"),
        ("query", call.query[:, :3], ValueError, "query"),
        ("query", call.query[..., :8], ValueError, "query"),
        ("keys", call.keys.bfloat16(), TypeError, "keys"),
        ("keys", call.keys.transpose(1, 2), ValueError, "keys"),
        ("values", call.values[:-1], ValueError, "values"),
        ("values", call.values[:, :, ::2], ValueError, "values"),
        ("values", call.values.transpose(1, 2).contiguous().transpose(1, 2), ValueError, "values"),
        ("block_table", call.block_table.long(), TypeError, "block_table"),
        ("block_table", call.block_table[:, :2], ValueError, "block_table"),
        ("block_table", torch.full_like(call.block_table, -1), IndexError, "block_table"),
        ("query_start", call.query_start[:1], ValueError, "query_start"),
        ("query_start", call.query_start + 1, ValueError, "query_start"),
        ("context_len", call.context_len - 15, ValueError, "context_len"),
        ("context_len", call.context_len.long(), TypeError, "context_len"),
    ]
    for name, value, error, message in bad:
        with pytest.raises(error, match=message):
            replace(call, **{name: value}).run(cpu)
