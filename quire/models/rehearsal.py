"""One small step of a model when it is loaded, so that what its kernels refuse is not found by the first request.

The step has no numbers (torch's meta device), so that a large model's takes milliseconds. Where a plug-in's code needs
some, or meets a tensor that has them, the step is run once more as it is, with the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from quire import kernels
from quire.errors import UnsupportedModelError
from quire.kernels.rehearsal import RefusedError, rehearsing
from quire.models.base import CausalLM
from quire.types import ForwardContext, KVCache, KVSpec, StateCache

_TOKENS = 2
_BLOCK = 16
_META = torch.device("meta")

logger = logging.getLogger("quire")


def rehearse(model: CausalLM, dtype: torch.dtype, device: torch.device) -> bool:
    """Go through a step of a model on the meta device, whose weights are to be of `dtype`, on `device`.

    False: it needs numbers, see `run_once`. Raises UnsupportedModelError for what a kernel refuses.
    """
    for name, module in model.named_modules():
        if not model.is_visual(name):
            for leaf, parameter in module._parameters.items():
                own = torch.float32 if model.keeps_float32(f"{name}.{leaf}") else dtype
                if parameter is not None and parameter.is_floating_point() and parameter.dtype is not own:
                    parameter.data = torch.empty(parameter.shape, dtype=own, device=_META)
    try:
        with rehearsing(device, kernels.paged_attention):
            _step(model, dtype, _META)
    except RefusedError as error:
        raise UnsupportedModelError(_text(model, error, device)) from error
    except Exception as error:
        logger.debug("%s: its step cannot be gone through without numbers: %r", type(model).__name__, error)
        return False
    return True


def run_once(model: CausalLM, device: torch.device) -> None:
    """The same with a loaded model's numbers. Raises UnsupportedModelError for whatever goes wrong."""
    try:
        _step(model, model.dtype, device)
    except Exception as error:
        raise UnsupportedModelError(_text(model, error, device)) from error


def _step(model: CausalLM, dtype: torch.dtype, device: torch.device) -> None:
    """The first tokens of one prompt."""
    spec = model.kv_spec
    tokens = min(_TOKENS, model.max_model_len)
    shape = (1, spec.num_kv_heads, _BLOCK)
    sizes = spec.head_dim, spec.value_dim or spec.head_dim

    def numbers(values: list[int] | list[list[int]], kind: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    context = ForwardContext(
        positions=numbers(list(range(tokens)), torch.int64),
        query_start=numbers([0, tokens], torch.int32),
        context_len=numbers([tokens], torch.int32),
        prompt_len=numbers([tokens], torch.int32),
        slot_mapping=numbers(list(range(tokens)), torch.int64),
        block_table=numbers([[0]], torch.int32),
        position_limit=_TOKENS,
        longest=tokens,
    )
    make: Callable[..., torch.Tensor] = torch.empty if device.type == "meta" else torch.zeros
    with torch.inference_mode():
        pairs = [[make((*shape, n), dtype=dtype, device=device) for n in sizes] for _ in range(spec.num_layers)]
        keys_of = [KVCache(keys, keys[..., : sizes[1]] if spec.latent else values) for keys, values in pairs]
        caches = [*keys_of, *_states(spec, dtype, device)]
        hidden = model(model.embed(numbers([0] * tokens, torch.int64)), context, caches)
        model.logits(hidden[-1:])


def _states(spec: KVSpec, dtype: torch.dtype, device: torch.device) -> list[StateCache]:
    """Of one block, for the layers that have states."""
    state = spec.state
    if state is None:
        return []
    states, tails, ends = (torch.zeros(shape, device=device) for shape in state.shapes(1))
    return [
        StateCache(states.clone(), tails.to(dtype, copy=True), ends.long(), ends.long(), _BLOCK)
        for _ in range(spec.num_states)
    ]


def _text(model: CausalLM, error: BaseException, device: torch.device) -> str:
    kind = type(model)
    return (
        f"{kind.__module__}.{kind.__qualname__}: {_place(model, error)} cannot run on this device ({device.type}), as "
        f"a step of {_TOKENS} tokens shows: {type(error.__cause__ or error).__name__}: {error}. Take a device or dtype "
        "that has it, or mend the model's class (docs/adding-a-model.md)."
    )


def _place(model: CausalLM, error: BaseException) -> str:
    """The innermost module of the model's that was at work, by name."""
    names = {id(module): name for name, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            found = names[id(owner)]
        trace = trace.tb_next
    return found or "its forward pass"
