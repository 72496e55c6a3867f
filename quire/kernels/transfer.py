"""Tensors sent to a GPU without waiting: a plain `.to` from pageable memory waits for all work before it."""

from __future__ import annotations

import torch


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`, for whatever the current stream does next.

    What it holds now is what arrives: it may be changed as soon as this returns.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # torch keeps the pinned copy until it was read


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor of the host's into one that lies anywhere."""
    if target.is_cuda:
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
