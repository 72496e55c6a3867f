"""Self-attention over the KV pool. It has no parameters: the projections belong to the model.

A layer's attention is five steps: *project* and, where a family has them, *norms of heads*, which are the model's;
then *rotate*, *store* and *attend*, which are these. A model calls `PagedAttention` for a merged projection, `of` for
query, key and value that it has made itself, or the three steps one by one.
"""

from __future__ import annotations

import dataclasses

import torch

from quire import kernels
from quire.layers.rotary import RotaryTable
from quire.layers.shards import HeadShare
from quire.types import AttentionSpec, ForwardContext, KVCache


class PagedAttention:
    """Rotate, store and attend, as a spec says; the arguments are the fields of `AttentionSpec`.

    spec: what it computes. scale: what a query's product with a key is multiplied by, 1 where each head has its own.
    look_ahead: tokens behind itself that a token sees at most, where the step lets it see any; None: all of these.
    Raises ValueError for a spec that makes no sense. What the device's kernel does not compute is refused when the
    model is loaded.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | tuple[float, ...] | None = None,
        window: int = 0,
        alibi_slopes: tuple[float, ...] = (),
        value_dim: int | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        latent: bool = False,
        chunk: int = 0,
        biases: bool = False,
    ) -> None:
        spec = AttentionSpec(
            num_heads, num_kv_heads, head_dim, scale, window, alibi_slopes, value_dim, softcap, sinks, latent, chunk,
            biases,
        )  # fmt: skip
        self.spec = spec
        self.head_dim, self.value_dim = head_dim, value_dim or head_dim
        self.sections = [num_heads, num_kv_heads, num_kv_heads]
        self.size = num_heads * self.value_dim
        self.scale = head_dim**-0.5 if scale is None else 1.0 if isinstance(scale, tuple) else scale
        self.look_ahead: int | None = None
        self._share: HeadShare | None = None
        self._take_numbers(spec)
        self._sinks: dict[tuple[torch.device, int], torch.Tensor] = {}

    def _take_numbers(self, spec: AttentionSpec) -> None:
        """Those of the heads that are computed here."""
        self._slopes = _PerHead(spec.alibi_slopes)
        self._head_scales = _PerHead(spec.scale if isinstance(spec.scale, tuple) else ())

    def share(self, share: HeadShare) -> None:
        """Store and attend with some of the heads, the caches' own; other processes do the rest."""
        self._share = share
        self._take_numbers(share.spec)

    @classmethod
    def from_spec(cls, spec: AttentionSpec) -> PagedAttention:
        return cls(*(getattr(spec, field.name) for field in dataclasses.fields(spec)))

    def __call__(
        self,
        qkv: torch.Tensor,
        ctx: ForwardContext,
        cache: KVCache,
        rope: RotaryTable | None = None,
        sinks: torch.Tensor | None = None,
        biases: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """qkv: [T, num_heads * head_dim + num_kv_heads * (head_dim + value_dim)], all queries, then all keys, then all
        values -> [T, num_heads * value_dim]."""
        query, key, value = self.split(qkv)
        return self.of(query, key, value, ctx, cache, rope, sinks, biases)

    def of(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        ctx: ForwardContext,
        cache: KVCache,
        rope: RotaryTable | None = None,
        sinks: torch.Tensor | None = None,
        biases: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query: [T, num_heads, head_dim]; key: [T, num_kv_heads, head_dim]; value: [T, num_kv_heads, value_dim], or
        None where values are a part of the keys -> [T, num_heads * value_dim].

        A token's heads lie one behind the other; tokens may be strided. query and key are rotated in place. sinks,
        biases: as of `attend`.
        """
        if rope is not None:
            self.rotate(query, key, rope)
        self.store(key, value, ctx, cache)
        return self.attend(query, ctx, cache, sinks, biases)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of query, key and value, each [T, its heads, its size], of qkv as `__call__` takes it."""
        if self.value_dim == self.head_dim:
            return qkv.view(qkv.shape[0], -1, self.head_dim).split(self.sections, 1)
        sizes = [self.head_dim, self.head_dim, self.value_dim]
        parts = qkv.split([heads * size for heads, size in zip(self.sections, sizes, strict=True)], 1)
        return tuple(part.unflatten(1, (-1, size)) for part, size in zip(parts, sizes, strict=True))

    def rotate(self, query: torch.Tensor, key: torch.Tensor, rope: RotaryTable) -> None:
        """Turn query and key by their positions, in place."""
        kernels.rotary(query, key, rope.rows, rope.cos_sin, rope.interleaved, rope.first)

    def store(self, key: torch.Tensor, value: torch.Tensor | None, ctx: ForwardContext, cache: KVCache) -> None:
        """Write key, [T, num_kv_heads, head_dim], and value, [T, num_kv_heads, value_dim], to the pool.

        value None: cache.values are a part of the rows of cache.keys, which are written.
        """
        if self._share is not None:
            own = slice(self._share.kv_first, self._share.kv_end)
            key, value = key[:, own], None if value is None else value[:, own]
        slots = ctx.slots_of(cache.group)
        values, scales = (None, None) if value is None else (cache.values, cache.value_scales)
        kernels.write_kv(key, value, cache.keys, values, slots, cache.key_scales, scales)

    def attend(
        self,
        query: torch.Tensor,
        ctx: ForwardContext,
        cache: KVCache,
        sinks: torch.Tensor | None = None,
        biases: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query: [T, num_heads, head_dim] -> [T, num_heads * value_dim]. The step's own keys and values are stored.

        sinks: [num_heads], a parameter of the model's; a spec with `sinks` needs it. biases: as of
        `kernels.paged_attention`; a spec with `biases` needs them. Raises ValueError where one is missing, or not asked
        for.
        """
        spec = self.spec
        if spec.sinks is not (sinks is not None):
            raise ValueError(f"sinks: the spec says {spec.sinks}, and {'none' if sinks is None else 'some'} were given")
        if spec.biases is not (biases is not None):
            given = "none" if biases is None else "some"
            raise ValueError(f"biases: the spec says {spec.biases}, and {given} were given")
        share = self._share
        if share is not None:
            query = query[:, share.first : share.end]
            sinks = None if sinks is None else sinks[share.first : share.end]
            biases = None if biases is None else biases[share.first : share.end]
        more = (
            self._slopes.on(query.device), spec.softcap, None if sinks is None else self._float_sinks(sinks),
            self._head_scales.on(query.device),
        )  # fmt: skip
        table = ctx.table_of(cache.group)
        out = kernels.paged_attention(
            query, cache.keys, cache.values, table, ctx.query_start, ctx.context_len, self.scale, spec.window, *more,
            self._visible_end(ctx), spec.chunk, cache.key_scales, cache.value_scales, biases,
        )  # fmt: skip
        whole = ctx.whole_prompts
        if whole is not None and (spec.window or spec.chunk):
            out[whole.rows] = kernels.paged_attention(
                query[whole.rows], cache.keys, cache.values, table[whole.sequences], whole.query_start,
                whole.context_len, self.scale, 0, *more, whole.visible_end, 0, cache.key_scales, cache.value_scales,
                biases,
            )  # fmt: skip
        if share is not None:
            return share.gather(out.flatten(1))
        return out.view(query.shape[0], self.size)

    def _visible_end(self, ctx: ForwardContext) -> torch.Tensor | None:
        """`visible_end` [T] int32, as far as this layer sees."""
        if self.look_ahead is None or ctx.visible_end is None:
            return ctx.visible_end
        return torch.minimum(ctx.visible_end, (ctx.positions + self.look_ahead + 1).to(torch.int32))

    def _float_sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        """[num_heads] float32. A parameter of another dtype is converted once: recorded steps know the result by its
        address, and could not convert it again."""
        if sinks.dtype is torch.float32 or sinks.is_meta:
            return sinks.float()
        place = sinks.device, sinks.data_ptr()
        made = self._sinks.get(place)
        if made is None:
            made = self._sinks[place] = sinks.detach().float()
        return made


class _PerHead:
    """A number for each head of queries, on whatever device it is asked for. Recorded steps know it by its address: it
    stays."""

    def __init__(self, numbers: tuple[float, ...]) -> None:
        self._numbers = numbers
        self._tensors: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor | None:
        """[num_heads] float32, or None where there are none."""
        if not self._numbers:
            return None
        tensor = self._tensors.get(device)
        if tensor is None:
            tensor = self._tensors[device] = torch.tensor(self._numbers, dtype=torch.float32, device=device)
        return tensor
