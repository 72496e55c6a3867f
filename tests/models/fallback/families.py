"""Tiny random models of all causal families of the installed transformers, whatever their configurations are like.

`python -m tests.models.fallback.families` tries each and writes what came of it, for docs/models.md and `quire models`.
"""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import quire.registry
from quire.errors import QuireError
from quire.models.loader import load_model
from tests.models import run_model, tiny
from tests.models.rows import all_rows
from tests.models.test_parity import CHUNKS, relative_error

FOUND = Path(quire.registry.__file__).parent / "families.json"
# What configurations of any family may call their sizes; each takes those that it has.
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8, "num_experts": 8, "num_local_experts": 8,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 24, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128,
    "ffn_hidden_size": 48, "sliding_window": 8, "is_decoder": True, "first_k_dense_replace": 1, "type_vocab_size": 2,
    "moe_num_experts": 8, "moe_topk": 2, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 64,
}  # fmt: skip
_MOST_PARAMETERS = 40_000_000
_LONGEST = 150  # characters of a reason


def families() -> dict[str, str]:
    """Architecture -> the first model type that has it."""
    found: dict[str, str] = {}
    for kind, names in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        found.setdefault(names if isinstance(names, str) else names[0], kind)
    return {name: kind for name, kind in found.items() if not name.endswith("ForConditionalGeneration")}


def make(architecture: str, **others: Any) -> Any:
    """A tiny random model, float32; of a family with a row, one of the variants that its tests compare.

    others: settings of one without a row, beside `SIZES`.
    """
    row = all_rows().get(architecture)
    if row is not None and row.oracle is None:
        return tiny.make(architecture, row.compared[1] if architecture == "PhimoeForCausalLM" else row.first)
    kind, config_class = getattr(transformers, architecture), CONFIG_MAPPING[families()[architecture]]
    known: set[str] = set()
    for base in config_class.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
        known |= set(inspect.signature(base.__init__).parameters)
    settings = {name: value for name, value in SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:
        settings.pop("head_dim", None)
    settings |= others
    torch.manual_seed(0)
    chosen = {"experts_implementation": "eager"} if kind._can_set_experts_implementation() else {}
    with torch.device("meta"):
        size = sum(p.numel() for p in kind._from_config(config_class(**settings)).parameters())
    assert size < _MOST_PARAMETERS, f"{size} parameters"
    torch.manual_seed(0)
    model = kind._from_config(config_class(**settings), attn_implementation="eager", **chosen).float().eval()
    if hasattr(model.config, "hidden_size"):
        tiny.randomise(model, 2.0)
    return model


def outcome(architecture: str) -> dict[str, Any]:
    """{"runs": what is whose}, {"refused": why} or {"untried": why}. Raises AssertionError for what is wrong."""
    if not getattr(getattr(transformers, architecture, None), "_supports_attention_backend", False):
        return {"refused": "does not go through transformers' attention interface"}
    ids = tiny.token_ids()
    try:
        oracle = make(architecture)
        with torch.inference_mode():
            want = oracle(input_ids=torch.tensor([ids])).logits[0]
    except Exception as error:  # no such configuration is one of that family
        return {"untried": f"{type(error).__name__}: {error}".splitlines()[0][:_LONGEST]}
    with tempfile.TemporaryDirectory() as folder:
        tiny.save(oracle, folder)
        try:
            model: Any = load_model(folder, "float32", impl="transformers")
        except QuireError as error:
            return {"refused": _short(architecture, str(error))}
    whole = run_model.logits(model, ids)
    assert relative_error(whole, want) < 1e-4, f"{architecture}: {relative_error(whole, want)}"
    assert torch.equal(whole.argmax(-1), want.argmax(-1)) or relative_error(whole, want) < 1e-5, architecture
    assert torch.equal(run_model.logits(model, ids, CHUNKS), whole), architecture
    return {"runs": json.loads(json.dumps(model.promise._asdict()))}


def _short(architecture: str, text: str) -> str:
    text = re.sub(r"^\S*config\.json: ", "", text)
    text = re.sub(r" \(modeling_\w+\.py, line \d+\)", "", text.removeprefix(architecture).lstrip(": "))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def write() -> None:
    found = {name: outcome(name) for name in sorted(families(), key=str.lower)}
    FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write()
