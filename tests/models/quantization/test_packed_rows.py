"""Rows of every format given back in float are the numbers that the format says, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.layers.quantization import QuantizedRows
from quire.models.loader import load_model
from tests.models.quantization.formats import FORMATS, convert
from tests.models.tiny import build


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_numbers_of_the_format(tmp_path: Path, name: str) -> None:
    path = build("LlamaForCausalLM", "attention_bias", tmp_path, hidden_size=96, intermediate_size=160, head_dim=32)
    numbers = convert(path, FORMATS[name])
    model = load_model(path)
    for stored, wanted in numbers.items():
        layer = model.get_submodule(stored.removesuffix(".weight"))
        assert isinstance(layer.format, QuantizedRows)
        assert torch.equal(layer.format.rows(layer, 0, len(wanted)), wanted), stored
