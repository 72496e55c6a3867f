"""quire-demo: the small model that quire brings along, so that it runs before any download.

It knows a world of coloured shapes, told and in pictures; ``model/README.md`` says what it can do and how well.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["ADAPTERS", "adapter_path", "model_path", "picture_path"]

# LoRA adapters for the bundled model: one answers in French, one SHOUTS.
ADAPTERS = ("french", "shout")


def model_path() -> Path:
    """The folder of the bundled model, laid out as Hugging Face lays out a model."""
    return Path(__file__).resolve().parent / "model"


def adapter_path(name: str) -> Path:
    """The folder of one of ADAPTERS, laid out as PEFT lays it out. Raises ValueError for other names."""
    if name not in ADAPTERS:
        raise ValueError(f"no adapter {name!r} is bundled; there are {', '.join(ADAPTERS)}.")
    return Path(__file__).resolve().parent / "adapters" / name


def picture_path() -> Path:
    """A picture that the bundled model can be asked about (drawn by training/pictures.py)."""
    return Path(__file__).resolve().parent / "picture.png"
