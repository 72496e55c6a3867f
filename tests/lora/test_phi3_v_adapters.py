"""Adapters of Phi-3-vision: two names of the table of embeddings, and two namings of its tower."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from quire.errors import AdapterError
from tests.lora.conftest import Worlds

NAME, VARIANT = "Phi3VForCausalLM", "published"


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["qkv_proj", "embed_tokens"]},
        {"target_modules": ["qkv_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["qkv_proj"], "trainable_token_indices": [5, 60]},
    ],
    ids=["lora", "saved", "tokens"],
)
def test_embeddings_are_refused(worlds: Worlds, fields: dict[str, Any]) -> None:
    """With PEFT, the published code would read prompts with images by another table than those without."""
    world = worlds(NAME, VARIANT)
    path = world.train(LoraConfig(r=4, **fields))
    # PEFT saves the second name too, where the table is replaced.
    words = r"embed_tokens: the published code .* merge the adapter into|vision_embed_tokens\.wte\.weight"
    with pytest.raises(AdapterError, match=words):
        world.load(path)


def test_an_adapter_that_names_the_tower_as_transformers_5_does(worlds: Worlds) -> None:
    world = worlds(NAME, VARIANT)
    path = world.train(LoraConfig(r=4, target_modules=["q_proj", "fc1", "img_projection.0", "qkv_proj"]))
    tensors = load_file(path / "adapter_model.safetensors")
    named = {name.replace("img_processor.vision_model.", "img_processor."): one for name, one in tensors.items()}
    assert named.keys() != tensors.keys()
    folder = path.with_name("renamed")
    folder.mkdir()
    (folder / "adapter_config.json").write_text((path / "adapter_config.json").read_text())
    save_file(named, folder / "adapter_model.safetensors")
    assert world.agree(folder, expected=path)
