"""What DeepSeek's files hold besides, what of its family is refused, and the memory of what is made of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import registry
from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.loader import load_model
from tests.models import run_model, tiny
from tests.models.rows import all_rows

pytestmark = pytest.mark.usefixtures("one_thread")


def test_layers_that_predict_further_tokens_are_left_in_the_files(tmp_path: Path) -> None:
    path = tiny.build("DeepseekV3ForCausalLM", "v3", tmp_path)
    ids = tiny.token_ids()
    want = run_model.logits(load_model(path), ids)
    weights = load_file(path / "model.safetensors")
    further = {
        name.replace("layers.2.", "layers.3."): one.clone() for name, one in weights.items() if "layers.2." in name
    }
    further |= {f"model.layers.3.{name}.weight": torch.ones(4) for name in ("enorm", "eh_proj", "shared_head.head")}
    save_file({**weights, **further}, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(run_model.logits(load_model(path), ids), want)
    config = json.loads((path / "config.json").read_text())
    config["num_nextn_predict_layers"] = 0
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"of no use: .*model\.layers\.3"):
        load_model(path)


@pytest.mark.parametrize(
    ("architecture", "settings", "named"),
    [
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("DeepseekV2ForCausalLM", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("DeepseekV2ForCausalLM", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("DeepseekV2ForCausalLM", {"kv_lora_rank": 0}, "kv_lora_rank"),
        ("DeepseekV2ForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 .*there are n_routed_experts=8"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}, "topk_method"),
        ("Glm4MoeLiteForCausalLM", {"first_k_dense_replace": 2}, "first_k_dense_replace"),
        ("Glm4MoeLiteForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("YoutuForCausalLM", {"sliding_window": 64}, "sliding_window"),
    ],
)
def test_what_is_not_served_is_refused(architecture: str, settings: dict[str, Any], named: str) -> None:
    row = all_rows()[architecture]
    config = getattr(transformers, row.config)(**row.base)
    for field, value in settings.items():
        setattr(config, field, value)
    with pytest.raises(UnsupportedModelError, match=named):
        registry.resolve([architecture]).check_config(config)


def test_experts_that_cannot_be_chosen_are_refused(tmp_path: Path) -> None:
    """Of groups with one expert each there are no two best."""
    path = tiny.build("DeepseekV3ForCausalLM", "v3", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "n_group": 16}))
    with pytest.raises(CheckpointError, match="experts: 8 of 16 cannot be chosen in 4 of 16 groups"):
        load_model(path)


def test_weights_in_eight_bits_with_measured_scales_of_inputs_are_refused(tmp_path: Path) -> None:
    """DeepSeek itself publishes V3 and R1 with inputs that are rounded as they come, which are not rounded here."""
    path = tiny.build("DeepseekV3ForCausalLM", "v3", tmp_path)
    config = json.loads((path / "config.json").read_text())
    fp8 = {"activation_scheme": "static", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": fp8}))
    with pytest.raises(UnsupportedModelError, match="activation_scheme='static'"):
        load_model(path)
