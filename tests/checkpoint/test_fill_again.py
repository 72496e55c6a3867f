"""Weights that were given up are read into the memory that they had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.checkpoint.files import Checkpoint
from quire.models.loader import fill_again, load_model
from tests.models import run_model, tiny

LLAMA, QWEN2, OPT, GPT2 = tiny.TABLE


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize(
    ("architecture", "variant"),
    [(LLAMA, "gqa"), (LLAMA, "tied"), (QWEN2, "gqa"), (OPT, "projected"), (GPT2, "gelu_new"), (GPT2, "untied")],
)
def test_the_same_weights_at_the_same_place(checkpoint, architecture, variant, dtype):
    path: Path = checkpoint(architecture, variant)
    model = load_model(path, dtype)
    expected = run_model.logits(model, tiny.token_ids(12))
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
    assert Checkpoint(path).stamp() == model.read_from
    fill_again(model, Checkpoint(path))
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert torch.equal(run_model.logits(model, tiny.token_ids(12)), expected)
