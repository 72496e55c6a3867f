"""What tests of adapters that are refused share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire import LLM, LoRARequest
from quire.errors import AdapterError
from tests.lora import adapter_files as files
from tests.lora.adapter_files import ask, prompt, tensors

PROMPTS = [prompt(1), prompt(2, 30)]
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def refused(llm: LLM, folder: Path, *texts: str, name: str = "bad") -> str:
    """The error, which says all of the texts; by a load and by a request alike."""
    with pytest.raises(AdapterError) as caught:
        llm.load_lora_adapter(name, str(folder))
    for text in texts:
        assert text in str(caught.value), caught.value
    with pytest.raises(AdapterError, match=re.escape(texts[0])):
        ask(llm, [PROMPTS[0]], LoRARequest(name, lora_path=str(folder)))
    assert llm.list_lora_adapters() == []
    return str(caught.value)


def good() -> files.Tensors:
    return tensors()
