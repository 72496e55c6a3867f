"""quire-demo: the small model that quire brings along, so that it runs before any download.

It knows a world of coloured shapes; ``model/README.md`` says what it can do and how well.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_path"]


def model_path() -> Path:
    """The folder of the bundled model, laid out as Hugging Face lays out a model."""
    return Path(__file__).resolve().parent / "model"
