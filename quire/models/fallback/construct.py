"""Transformers' module for a configuration, its parameters on the meta device and its computed tables real."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quire.errors import UnsupportedModelError
from quire.models.fallback.attention import INTERFACE, register
from quire.models.fallback.positions import check_lengths

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MOST_COUNTED = 1 << 24  # numbers that a module computes for itself
_FACTORIES = (
    torch.arange, torch.tensor, torch.linspace, torch.logspace, torch.full, torch.outer, torch.as_tensor,
)  # fmt: skip


class _RealNumbers(TorchFunctionMode):
    """On the meta device, what is counted or written down is real all the same: no file brings it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            if func is torch.arange and func(*args, **{**kwargs, "device": "meta"}).numel() > _MOST_COUNTED:
                raise UnsupportedModelError(
                    f"config.json asks for more than {_MOST_COUNTED:,} positions or frequencies in one table: its "
                    "sizes cannot be right."
                )
            if func is not torch.outer:
                kwargs.setdefault("device", "cpu")
        return func(*args, **kwargs)


def causal_class(architecture: str) -> type[nn.Module] | None:
    """Transformers' class of this name, if it is a causal language model of text of one of its families."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = {one for name in names.values() for one in ([name] if isinstance(name, str) else name)}
    if architecture not in known - seeing() or architecture.endswith("ForConditionalGeneration"):
        return None
    kind: type[nn.Module] | None = getattr(transformers, architecture, None)
    return kind


def seeing() -> set[str]:
    """The names of transformers' classes that generate text of more than text."""
    from transformers.models.auto import modeling_auto as auto

    tables = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return {name for table in tables for name in table.values()}


def refusal_of(kind: Any) -> str | None:
    """Why no configuration of a class can be run, if none can."""
    if not getattr(kind, "_supports_attention_backend", False):
        return (
            "does not go through transformers' attention interface (_supports_attention_backend is not set), so its "
            "keys and values cannot live in quire's pool."
        )
    if kind.__name__.endswith("AssistantForCausalLM"):
        return "drafts for another model, whose keys and values it reads: it cannot be served by itself."
    return None


def construct(config: PretrainedConfig, kind: Any) -> Any:
    """Return transformers' module of a class for a configuration, in eval mode, without weights.

    Raises UnsupportedModelError for a module whose attention cannot be quire's, or that has tables which nobody fills.
    """
    why = refusal_of(kind)
    if why is not None:
        raise UnsupportedModelError(f"{kind.__name__} {why}")
    register()
    chosen = {"attn_implementation": INTERFACE}
    if kind._can_set_experts_implementation():
        chosen["experts_implementation"] = INTERFACE
    with torch.device("meta"), _RealNumbers():
        module = kind._from_config(config, dtype=torch.float32, **chosen)
    module.eval().requires_grad_(False)
    for part in module.modules():
        check_lengths(part)
    _fill_tables(module)
    return module


def _fill_tables(module: Any) -> None:
    """Tables that no file brings, and that were not computed: as transformers fills them when it loads a checkpoint.

    What is left has no numbers. Of real ones these are NaN: a step that reads them is refused for not being finite.
    Whole ones stay on the meta device: a step that reads them fails.
    """
    for part in module.modules():
        left = {
            name: buffer
            for name, buffer in part._buffers.items()
            if buffer is not None and buffer.is_meta and name in part._non_persistent_buffers_set
        }
        if not left:
            continue
        with torch.device("cpu"), suppress(Exception):
            for name, buffer in left.items():
                part._buffers[name] = _unfilled(buffer)
            module._init_weights(part)
        for name, buffer in left.items():
            filled: Any = part._buffers[name]
            if not filled.is_floating_point() and torch.equal(filled, _unfilled(buffer)):
                part._buffers[name] = buffer


def _unfilled(buffer: torch.Tensor) -> torch.Tensor:
    if buffer.dtype is torch.bool:
        return torch.ones(buffer.shape, dtype=buffer.dtype, device="cpu")
    value = torch.nan if buffer.is_floating_point() else 77
    return torch.full(buffer.shape, value, dtype=buffer.dtype, device="cpu")
