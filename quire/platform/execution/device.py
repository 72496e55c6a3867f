"""Where a model lies and computes."""

from __future__ import annotations

import logging
import os
import re
import warnings

import torch

from quire.errors import QuireError
from quire.kernels import cuda_backend

logger = logging.getLogger("quire")


def choose(name: str) -> torch.device:
    """The device that a setting names: "cpu", "cuda", "cuda:1", or "auto": what QUIRE_DEVICE says, or a GPU that quire
    can use, or else the CPU.

    Raises QuireError for a GPU that is not there or that cannot run the kernels.
    """
    what = f"device={name!r}"
    if name == "auto" and os.environ.get("QUIRE_DEVICE"):
        name = os.environ["QUIRE_DEVICE"]
        what = f"QUIRE_DEVICE={name}"
    if name == "cpu":
        return torch.device("cpu")
    if name == "auto":
        return _best()
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", name)
    if match is None:
        raise QuireError(f"{what}: must be 'auto', 'cpu', 'cuda' or 'cuda:' and a number.")
    if not torch.cuda.is_available():
        raise QuireError(
            f"{what}: torch finds no GPU (torch {torch.__version__}, built for CUDA {torch.version.cuda}): "
            "look at the driver with nvidia-smi, or choose the device 'cpu'."
        )
    index = torch.cuda.current_device() if match[1] is None else int(match[1])
    if index >= torch.cuda.device_count():
        raise QuireError(f"{what}: this machine has {torch.cuda.device_count()} GPUs, counted from 0.")
    device = torch.device("cuda", index)
    cuda_backend().check_device(device)
    return device


def for_processes(name: str, count: int) -> list[str]:
    """Each GPU of `count` processes that compute one model: from the one that the setting names on, and from the first
    again behind the last; where there are fewer than processes, several have the same. Empty: they compute on the CPU.

    Raises what `choose` raises, and QuireError for GPUs of several kinds, whose bits may differ.
    """
    first = choose(name)
    if first.type == "cpu":
        return []
    there = torch.cuda.device_count()
    gpus = [torch.device("cuda", (first.index + number) % there) for number in range(count)]
    kinds = {
        f"{torch.cuda.get_device_name(gpu)}, sm_{'{}{}'.format(*torch.cuda.get_device_capability(gpu))}" for gpu in gpus
    }
    if len(kinds) > 1:
        raise QuireError(
            f"device={name!r}: {count} processes would compute one model on GPUs of several kinds "
            f"({'; '.join(sorted(kinds))}), whose bits may differ: set CUDA_VISIBLE_DEVICES to some of one kind."
        )
    if count > there:
        logger.warning(
            "%d processes share %d GPUs, and exchange through main memory: slower than one process for each GPU",
            count,
            there,
        )
    return [str(gpu) for gpu in gpus]


def _best() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        cuda_backend().check_device(device)
    except QuireError as error:
        warnings.warn(f"there is a GPU, but {error}; running on the CPU.", RuntimeWarning, stacklevel=4)
        return torch.device("cpu")
    return device
