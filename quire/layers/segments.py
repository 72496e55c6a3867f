"""Attention of rows that all see one another within their segment: a window of an image, an image, a video's frame."""

from __future__ import annotations

import torch
from torch.nn import functional

from quire import kernels


class Segments:
    """Which rows of a call form each segment: those from starts[s] up to starts[s + 1].

    starts: [S + 1] of whole numbers, from 0 to the number of rows, each larger than the one before. They may be on the
    CPU wherever the rows are; then no GPU is waited for.
    """

    def __init__(self, starts: torch.Tensor) -> None:
        self.starts = starts.to(torch.int32, copy=True)  # who asks may keep this by its tensor, weakly
        lengths = self.starts.diff()
        self._counts: list[int] = lengths.tolist()
        self._lengths = lengths.contiguous()
        # A row's key is a block of one: the table's rows count on from where their segment begins.
        longest = torch.arange(max(self._counts, default=0), dtype=torch.int32, device=starts.device)
        self._table = self.starts[:-1, None] + longest
        self._seen = self._lengths.repeat_interleave(self._lengths)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """query, key, value: [T, H, D], heads contiguous. Returns [T, H, D], contiguous.

        On a CPU, a row's bits do not depend on the other segments.
        """
        if query.device.type != "cpu":
            return self._by_torch(query, key, value, scale)
        keys, values = (one.contiguous().unsqueeze(2) for one in (key, value))
        return kernels.paged_attention(
            query, keys, values, self._table, self.starts, self._lengths, scale, visible_end=self._seen
        )

    def _by_torch(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Blocks of one key are not what the GPU's kernels are made for."""
        if len(set(self._counts)) == 1:  # one call for all
            parts_of = (len(self._counts), -1)
            q, k, v = (one.unflatten(0, parts_of).transpose(1, 2) for one in (query, key, value))
            attended = functional.scaled_dot_product_attention(q, k, v, scale=scale)
            return attended.transpose(1, 2).flatten(0, 1).contiguous()
        heads = [one.transpose(0, 1)[None].split(self._counts, dim=2) for one in (query, key, value)]
        parts = [functional.scaled_dot_product_attention(q, k, v, scale=scale) for q, k, v in zip(*heads, strict=True)]
        return torch.cat(parts, dim=2)[0].transpose(0, 1).contiguous()
