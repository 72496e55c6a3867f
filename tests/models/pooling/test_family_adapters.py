"""LoRA adapters that PEFT has trained on models without a head, and on classifiers, of families of encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from quire import PoolingParams
from quire.lora import LoRARequest
from tests.models.pooling import test_decoders, test_modernbert, test_rotary_encoders
from tests.models.pooling.worlds import classes, engine, given, hidden, largest_error, prompts

BARE = PoolingParams(use_activation=False)
# Family -> (what makes its model, layers that an adapter changes).
ROTARY = ["q_proj", "v_proj", "o_proj", "down_proj"]
FAMILIES: dict[str, tuple[Any, list[str]]] = {
    "Gte": (lambda ending: test_rotary_encoders.made("Gte", ending, "odd"), [*ROTARY, "up_proj"]),
    "NomicBert": (lambda ending: test_rotary_encoders.made("NomicBert", ending, "odd"), [*ROTARY, "gate_proj"]),
    "Jina": (lambda ending: test_rotary_encoders.made("JinaEmbeddingsV3", ending, "odd"), ["k_proj", "fc1", "fc2"]),
    "ModernBert": (lambda ending: test_modernbert.made("ModernBert", ending, "odd"), ["Wqkv", "Wi", "attn.Wo"]),
    "EuroBert": (lambda ending: test_modernbert.made("EuroBert", ending, "grouped"), [*ROTARY, "up_proj"]),
    "Llama": (
        lambda ending: (
            test_decoders.bare("LlamaForCausalLM", "gqa").base_model
            if ending == "Model"
            else test_decoders.with_head("Llama", ending, "gqa", pad_token_id=0)
        ),
        [*ROTARY, "up_proj"],
    ),
}


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("ending", ["Model", "ForSequenceClassification"])
def test_an_adapter(tmp_path: Path, family: str, ending: str) -> None:
    make, targets = FAMILIES[family]
    model = make(ending).float().eval()
    model.save_pretrained(tmp_path / "model")
    torch.manual_seed(5)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    oracle = adapted.double().eval()
    batch = prompts(97, [1, 5, 17, 30])
    llm = engine(tmp_path / "model", runner="pooling", enable_lora=True, max_lora_rank=4)
    own = LoRARequest("own", 1, str(tmp_path / "adapter"))
    task, of = ("token_embed", hidden) if ending == "Model" else ("classify", classes)
    found = llm.encode(given(batch), BARE, pooling_task=task, lora_request=own, use_tqdm=False)
    expected = [of(oracle, ids) for ids in batch]
    assert largest_error([one.outputs.data for one in found], expected) < 2e-5
    with adapted.disable_adapter():
        plain = [of(oracle, ids) for ids in batch]
    found = llm.encode(given(batch), BARE, pooling_task=task, use_tqdm=False)
    assert largest_error([one.outputs.data for one in found], plain) < 2e-5
    assert all((one - other).abs().max() > 1e-2 for one, other in zip(expected, plain, strict=True))
