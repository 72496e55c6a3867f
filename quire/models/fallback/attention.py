"""Transformers' attention interface, answered by quire: what is asked is found out once, then done over the pool."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, cached_property, wraps
from typing import Any, Protocol

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.layers import PagedAttention
from quire.models.fallback.masks import Reach, reach_of
from quire.types import AttentionSpec, ForwardContext, KVCache

INTERFACE = "quire"
# What comes with every call and says nothing of the arithmetic.
_HARMLESS = frozenset({
    "position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "cache_position",
    "past_key_values", "past_key_value", "training", "layer_idx", "output_router_logits", "logits_to_keep",
})  # fmt: skip


class Attends(Protocol):
    """Who answers the interface's calls for the time being."""

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, options: Any
    ) -> torch.Tensor: ...


class _Now(threading.local):
    who: Attends | None = None


_now = _Now()


class answering:
    """While this lasts, `who` answers the calls of this thread."""

    def __init__(self, who: Attends) -> None:
        self._who = who

    def __enter__(self) -> None:
        self._before = _now.who
        _now.who = self._who

    def __exit__(self, *error: object) -> None:
        _now.who = self._before


def position_limit() -> int | None:
    """What every position of the step is below; None: nobody said."""
    return getattr(_now.who, "position_limit", None)


class SeenMask:
    """In the place of a mask: what it shows. It is no tensor, so that code that computes with it fails."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    @cached_property
    def reach(self) -> Reach:
        """Found out when a layer uses it. Raises UnsupportedModelError, see `reach_of`."""
        return Reach() if self._function is None else reach_of(self._function)


@cache
def register() -> None:
    """Tell transformers of the interface's name. Its masks have the same one."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(INTERFACE, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(INTERFACE, _mask)
    ALL_EXPERTS_FUNCTIONS.register(INTERFACE, _experts)
    _look_for_no_packing()


def _look_for_no_packing() -> None:
    """In quire's steps, transformers is not to look at positions for sequences laid end to end: the pool knows them.

    It would wait for a number each time, for a mask that nobody reads.
    """
    from transformers import masking_utils

    theirs = masking_utils.find_packed_sequence_indices

    @wraps(theirs)
    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if isinstance(_now.who, PagedStep) else theirs(position_ids)

    masking_utils.find_packed_sequence_indices = find


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """query: [1, H, T, D]; key: [1, G, T, D]; value: [1, G, T, DV] -> [1, T, H, DV]."""
    assert _now.who is not None, "quire's attention interface works within quire's steps"
    return _now.who.attend(module, query, key, value, attention_mask, options), None


def _mask(*, mask_function: Callable[..., Any], **_: Any) -> SeenMask:
    return SeenMask(mask_function) if isinstance(_now.who, LooksAtMasks) else _ANY


class LooksAtMasks:
    """Who answers and wants to know what masks show."""


_ANY = SeenMask()


def _experts(module: nn.Module, *_: Any, **__: Any) -> torch.Tensor:
    raise UnsupportedModelError(f"{type(module).__name__}: its experts were not found where transformers keeps them.")


def spec_of(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, options: dict[str, Any]
) -> AttentionSpec:
    """What a call asks for. Raises UnsupportedModelError for what quire's kernels do not compute, or nobody knows."""
    options = dict(options)
    scaling, softcap = options.pop("scaling", None), options.pop("softcap", None)
    sinks, window = options.pop("s_aux", None), options.pop("sliding_window", None)
    for name, neutral in (("dropout", (0, 0.0, None)), ("is_causal", (None, True))):
        if options.pop(name, neutral[0]) not in neutral:
            raise _refused(module, f"{name} is given")
    if getattr(module, "is_causal", True) is False:
        raise _refused(module, "it is not causal")
    others = sorted(name for name, given in options.items() if name not in _HARMLESS and _says_something(given))
    if others:
        raise _refused(module, f"it is given {', '.join(others)}, and what these do to it is not known")
    if mask is None and getattr(module, "is_causal", None) is not True:
        raise _refused(module, "it has no mask, and does not say that it is causal")
    if mask is not None and not isinstance(mask, SeenMask):
        raise _refused(module, f"its mask is a {type(mask).__name__} of its own making")
    reach = Reach(window=window or 0) if mask is None else mask.reach
    if scaling is not None and not isinstance(scaling, (int, float)):
        scaling = _number(module, scaling)
    tokens = query.shape[2]
    if query.dim() != 4 or query.shape[0] != 1 or not key.shape[2] == value.shape[2] == tokens:
        raise _refused(module, f"query {list(query.shape)} and key {list(key.shape)} are not of the same tokens")
    heads, groups, size, own = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    if sinks is not None and sinks.shape != (heads,):
        raise _refused(module, f"its sinks are {list(sinks.shape)}, and it has {heads} heads")
    return AttentionSpec(
        heads, groups, size, None if scaling is None else float(scaling), reach.window, value_dim=own,
        softcap=float(softcap or 0.0), sinks=sinks is not None, chunk=reach.chunk,
    )  # fmt: skip


def _says_something(given: Any) -> bool:
    return given is not None and given is not False


def _number(module: nn.Module, given: Any) -> float:
    if isinstance(given, torch.Tensor) and given.numel() == 1 and not given.is_meta:
        return float(given)
    raise _refused(module, "its scale is not one number")


def _refused(module: nn.Module, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(module).__name__}: {why}.")


class PagedStep:
    """Answers the calls of one step: the first is the first layer's, and so on."""

    def __init__(
        self, layers: Sequence[PagedAttention], ctx: ForwardContext, kv: Sequence[KVCache], dtype: torch.dtype
    ) -> None:
        """dtype: the model's, whatever its module makes of queries and keys on their way."""
        self._layers, self._ctx, self._kv, self._dtype = layers, ctx, kv, dtype
        self.calls, self.position_limit = 0, ctx.position_limit

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, options: Any
    ) -> torch.Tensor:
        layer, cache = self._layers[self.calls], self._kv[self.calls]
        self.calls += 1
        q, k, v = (x.squeeze(0).transpose(0, 1).to(self._dtype).contiguous() for x in (query, key, value))
        layer.store(k, v, self._ctx, cache)
        out = layer.attend(q, self._ctx, cache, options.get("s_aux"))
        return out.view(1, q.shape[0], q.shape[1], -1)
