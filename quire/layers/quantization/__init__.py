"""Weights of fewer bits: rows of bytes, as their layouts say."""

from quire.layers.quantization.rows import QuantizedRows

__all__ = ["QuantizedRows"]
