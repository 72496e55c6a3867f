"""Whether a loaded model gives the same bits whole, in chunks and in company: asked of random tokens at load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from quire.errors import UnsupportedModelError
from quire.models.base import CausalLM
from quire.types import ForwardContext, KVCache

_BLOCK = 4
_LENGTH, _CUT = 7, 5
_OTHER = 3


def self_test(model: CausalLM) -> None:
    """Raise UnsupportedModelError for a model whose bits depend on how a sequence is cut, or on who shares its step."""
    vocabulary, longest = model.vocab_size, model.max_model_len
    length = min(_LENGTH, longest)
    generator = torch.Generator().manual_seed(3)
    ids, other = (
        torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in (length, min(_OTHER, longest))
    )
    together = _Pool(model, 2)
    whole = together.step([(0, 0, ids), (1, 0, other)])[:length]
    apart = _Pool(model, 2)
    cuts = [0, min(_CUT, length - 1), length - 1, length] if length > 1 else [0, 1]
    parts = [apart.step([(0, a, ids[a:b])]) for a, b in pairwise(cuts) if b > a]
    if not torch.equal(torch.cat(parts), whole):
        error = float((torch.cat(parts) - whole).abs().max())
        raise UnsupportedModelError(
            f"{(model.config.architectures or ['It'])[0]} gives other scores in chunks than whole, or alone than in "
            f"company (by up to {error:.2g}): it keeps something of a sequence beside keys "
            "and values, or computes across tokens."
        )
    if not bool(torch.isfinite(whole).all()):
        raise UnsupportedModelError("its scores are not finite.")


class _Pool:
    """Keys and values of a few short sequences."""

    def __init__(self, model: CausalLM, sequences: int) -> None:
        weight = next(model.parameters())
        self.model, self.device = model, weight.device
        self.blocks = -(-_LENGTH // _BLOCK)
        spec = model.kv_spec
        shape = (self.blocks * sequences + 1, spec.num_kv_heads, _BLOCK)

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros((*shape, size), dtype=model.dtype, device=self.device)

        self.caches = [
            KVCache(zeros(spec.head_dim), zeros(spec.value_dim or spec.head_dim)) for _ in range(spec.num_layers)
        ]

    def step(self, chunks: Sequence[tuple[int, int, list[int]]]) -> torch.Tensor:
        """chunks: (the sequence's number, its first position, ids). Returns the scores of all tokens."""
        table = torch.arange(1, self.blocks * 2 + 1).view(2, -1).flip(1)
        positions = torch.cat([torch.arange(first, first + len(ids)) for _, first, ids in chunks])
        owner = torch.cat([torch.full((len(ids),), own) for own, _, ids in chunks])
        slots = table[owner, positions // _BLOCK] * _BLOCK + positions % _BLOCK
        ends = [first + len(ids) for _, first, ids in chunks]

        def on(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            return x.to(self.device, dtype)

        starts = torch.tensor([0, *(len(ids) for _, _, ids in chunks)]).cumsum(0)
        ctx = ForwardContext(
            positions=on(positions, torch.int64),
            query_start=on(starts, torch.int32),
            context_len=on(torch.tensor(ends), torch.int32),
            prompt_len=on(torch.tensor(ends), torch.int32),
            slot_mapping=on(slots, torch.int64),
            block_table=on(table[[own for own, _, _ in chunks]], torch.int32),
            position_limit=_LENGTH + 1,
            longest=max(ends),
        )
        with torch.inference_mode():
            ids = torch.tensor([one for _, _, own in chunks for one in own], device=self.device)
            hidden = self.model(self.model.embed(ids), ctx, self.caches)
            return self.model.logits(hidden)
