"""Features of images that callers have computed themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def is_embeds(source: Any) -> bool:
    """Whether an image is given as features: {"image_embeds": tensor, "image_grid_thw": ...}."""
    return isinstance(source, Mapping) and "image_embeds" in source


def checked_features(tensor: Any, width: int, room: int | None) -> torch.Tensor:
    """A copy of one image's features [tokens, width], tokens <= room. Raises ValueError for what is no such thing."""
    wanted = f"image_embeds must be a dense float tensor [tokens, {width}]"
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not tensor.is_floating_point():
        kind = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{wanted}, not {kind}")
    if tensor.dim() != 2 or tensor.shape[0] < 1 or tensor.shape[1] != width:
        raise ValueError(f"{wanted}, not {list(tensor.shape)}")
    if room is not None and len(tensor) > room:
        raise ValueError(f"image_embeds has {len(tensor)} rows, and max_model_len leaves room for {room}")
    features = tensor.detach().to("cpu", copy=True).contiguous()
    if not bool(features.isfinite().all()):
        raise ValueError("image_embeds has values that are infinite or no numbers")
    return features
