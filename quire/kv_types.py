"""What layers ask of the KV pool; imported from `quire.types`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention computes: causal, over the keys and values that its sequence has in the KV pool.

    num_heads: of queries; num_kv_heads: of keys and of values, each of which serves num_heads / num_kv_heads of them.
    head_dim: size of one query or key. scale: of a query's product with a key, or one for each head of queries; None:
    1 / sqrt(head_dim). window: keys that a token sees, its own the last; 0: all before it. alibi_slopes: one for each
    head of queries (arXiv:2108.12409), or none. value_dim: size of one value; None: head_dim. softcap: scores become
    softcap * tanh(score / softcap), before slopes are added; 0: they stay. sinks: each head has one more score, a
    parameter of the model's, whose value is 0. latent: values are the first value_dim numbers of the keys' own rows,
    and no other tensor has them (arXiv:2405.04434). chunk: positions are cut into chunks of so many, and a token sees
    the keys of its own alone; 0: they are not. biases: scores get a number of the model's by head and distance.

    Each field is an argument of `kernels.paged_attention`; any may be combined. What no kernel computes has no field.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | tuple[float, ...] | None = None
    window: int = 0
    alibi_slopes: tuple[float, ...] = ()
    value_dim: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    latent: bool = False
    chunk: int = 0
    biases: bool = False

    @property
    def reach(self) -> int:
        """Keys that a token sees at most, its own the last; 0: all before it."""
        return min((keys for keys in (self.window, self.chunk) if keys), default=0)

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        for name, keys in (("window", self.window), ("chunk", self.chunk)):
            if keys < 0:
                raise ValueError(f"{name}={keys}: must be a number of keys, or 0 for all")
        if self.alibi_slopes and len(self.alibi_slopes) != self.num_heads:
            raise ValueError(f"alibi_slopes has {len(self.alibi_slopes)} numbers for num_heads={self.num_heads}")
        if isinstance(self.scale, tuple) and len(self.scale) != self.num_heads:
            raise ValueError(f"scale has {len(self.scale)} numbers for num_heads={self.num_heads}")
        if self.value_dim is not None and self.value_dim < 1:
            raise ValueError(f"value_dim={self.value_dim}: must be the size of a value, or None for head_dim")
        if self.latent and (self.value_dim or self.head_dim) > self.head_dim:
            raise ValueError(f"value_dim={self.value_dim}: a part of the keys has at most head_dim={self.head_dim}")
        if not 0.0 <= self.softcap < float("inf"):
            raise ValueError(f"softcap={self.softcap}: must be a number above 0, or 0 for none")


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same tokens, in blocks of one shape: one block table serves them all.

    layers: their numbers, ascending. window: tokens that are kept, the next one to compute among them; 0: all. The
    others are fields of `KVSpec`.
    """

    layers: Sequence[int]
    num_kv_heads: int
    head_dim: int
    window: int = 0
    value_dim: int | None = None
    latent: bool = False


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a layer with a state instead of keys keeps of a sequence: one state, whatever its length (arXiv:2405.21060).

    num_heads, head_dim, state_size: of the state, float32. channels, kernel: of the convolution before it, whose last
    `kernel` - 1 inputs are kept in the model's dtype.
    """

    num_heads: int
    head_dim: int
    state_size: int
    channels: int
    kernel: int

    def __post_init__(self) -> None:
        if min(self.num_heads, self.head_dim, self.state_size, self.channels) < 1 or self.kernel < 2:
            raise ValueError(f"{self}: sizes must be 1 at least, and the convolution's 2")

    def shapes(self, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]]:
        """Of `StateCache.states`, of its tails and of the ends of both, for so many blocks."""
        states = blocks, 2, self.num_heads, self.state_size, self.head_dim
        return states, (blocks, 2, self.kernel - 1, self.channels), (blocks, 2)


# In the place of a group's window: its layers have states.
STATE = -1

# Where the size of groups is chosen: a layer that keeps all keeps so many times what one with a window does. A group
# has a block table in every step, which is worth one such part of the memory.
_FULL_IN_WINDOWS = 8
_PARTS_TO_A_GROUP = 32


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model asks of the KV pool; the model says it, the engine allocates by it.

    head_dim is the size of one key, and of one value unless `value_dim` is; every layer has the same. windows: the
    `reach` of each layer's `AttentionSpec`; empty: all see all before them. latent: as of `AttentionSpec`: a row has a
    key alone.
    num_states: layers that have states, counted by themselves, which are as `state` says; None: there are none.
    int8: rows are kept as `KVCache.of_rows` has them, and not in the model's dtype; the engine says so, no model does.
    own: the layers that this process keeps something of, where others compute the rest; None: all. Groups are those of
    the whole model: a block has one number, whoever keeps a part of it.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...] = ()
    value_dim: int | None = None
    latent: bool = False
    num_states: int = 0
    state: StateSpec | None = None
    int8: bool = False
    own: range | None = None

    @classmethod
    def of(cls, layers: Iterable[AttentionSpec]) -> KVSpec:
        """What layers of these specs ask for. Raises ValueError where blocks of one shape would not serve them all."""
        specs = list(layers)
        kept = {(spec.num_kv_heads, spec.head_dim, _value_dim(spec), spec.latent) for spec in specs}
        if len(kept) > 1:
            raise ValueError(
                "its layers keep different things of a token, (key heads, size of a key, of a value, whether that is a "
                f"part of the key): {sorted(kept)}"
            )
        windows = tuple(spec.reach for spec in specs)
        heads, key, value, latent = kept.pop() if kept else (0, 0, 0, False)
        return cls(len(specs), heads, key, windows if any(windows) else (), None if value == key else value, latent)

    def bytes_a_token(self, itemsize: int) -> int:
        """How many a layer keeps of a token. itemsize: of the model's dtype."""
        sizes = (self.head_dim,) if self.latent else (self.head_dim, self.value_dim or self.head_dim)
        return self.num_kv_heads * sum(int8_row_bytes(size) if self.int8 else size * itemsize for size in sizes)

    def within(self, length: int) -> KVSpec:
        """The same for sequences of at most `length` tokens: a window that none of them leaves is none."""
        windows = tuple(window if window < length else 0 for window in self.windows)
        return replace(self, windows=windows if any(windows) else ())

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """The layers by the tokens that they keep, those that keep all first.

        Groups have the same number of layers, so that a block of any group takes the same memory; the last of those
        with one window may have fewer. Where that wastes more than windows save, there is one group that keeps all.
        """
        if not self.windows:
            return (self._group(range(self.num_layers), 0),)
        alike = {
            window: [layer for layer, own in enumerate(self.windows) if own == window]
            for window in sorted(set(self.windows), key=lambda window: (window > 0, -window))
        }
        size = _layers_a_group({window: len(layers) for window, layers in alike.items()})
        if size > max(map(len, alike.values())):
            alike = {0: list(range(self.num_layers))}
        return tuple(
            self._group(tuple(layers[first : first + size]), window)
            for window, layers in alike.items()
            for first in range(0, len(layers), size)
        )

    @property
    def layers_a_block(self) -> int:
        """Layers that this process keeps something of in a block, at most."""
        return max(sum(self.keeps(layer) for layer in group.layers) for group in self.groups)

    def keeps(self, layer: int) -> bool:
        """Whether the layer is one of `own`."""
        return self.own is None or layer in self.own

    @property
    def group_windows(self) -> tuple[int, ...]:
        """Of each group, as the caches number them; STATE for that of the layers with states, which is the last."""
        states = () if self.state is None else (STATE,)
        return (*(group.window for group in self.groups), *states)

    def _group(self, layers: Sequence[int], window: int) -> KVGroup:
        return KVGroup(layers, self.num_kv_heads, self.head_dim, window, self.value_dim, self.latent)


def _value_dim(spec: AttentionSpec) -> int:
    return spec.value_dim or spec.head_dim


def _layers_a_group(counts: Mapping[int, int]) -> int:
    """How many layers a group has, for so many layers of each window: what takes little memory in few groups. All
    layers, where windows save less than they cost."""
    weights = {window: 1 if window else _FULL_IN_WINDOWS for window in counts}

    def cost(size: int) -> int:
        groups = {window: -(-count // size) for window, count in counts.items()}
        memory = sum(size * groups[window] * weights[window] for window in counts)
        return memory * (_PARTS_TO_A_GROUP + sum(groups.values()))

    total = sum(counts.values())
    best = min(range(max(counts.values()), 0, -1), key=cost)
    return best if cost(best) <= total * max(weights.values()) * (_PARTS_TO_A_GROUP + 1) else total


def int8_row_bytes(dim: int) -> int:
    """Of a row of int8: its numbers, up to a multiple of 4, and its scale."""
    return (dim + 3) // 4 * 4 + 4
