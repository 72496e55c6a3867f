"""Where a model lies and computes."""

from __future__ import annotations

import os
import warnings

import torch

from quire.errors import QuireError
from quire.kernels import cuda_backend


def choose(name: str) -> torch.device:
    """The device that a setting names: "cpu", "cuda", "cuda:1", or "auto": what QUIRE_DEVICE says, or a GPU that quire
    can use, or else the CPU.

    Raises QuireError for a GPU that is not there or for which the kernels were not built.
    """
    if name == "auto":
        name = os.environ.get("QUIRE_DEVICE") or "auto"
    if name == "cpu":
        return torch.device("cpu")
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            cuda_backend().check_device(device)
        except QuireError as error:
            warnings.warn(f"there is a GPU, but {error}; running on the CPU.", RuntimeWarning, stacklevel=3)
            return torch.device("cpu")
        return device
    device = _parse(name)
    if not torch.cuda.is_available():
        raise QuireError(
            f"device={name!r}: torch finds no GPU (torch {torch.__version__}, built for CUDA {torch.version.cuda}): "
            "look at the driver with nvidia-smi, or set device='cpu'."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise QuireError(f"device={name!r}: this machine has {torch.cuda.device_count()} GPUs, counted from 0.")
    device = torch.device("cuda", index)
    cuda_backend().check_device(device)
    return device


def _parse(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("cpu")
    if device.type != "cuda":
        raise QuireError(f"device={name!r}: must be 'auto', 'cpu', 'cuda' or 'cuda:' and a number.")
    return device
