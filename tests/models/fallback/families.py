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
from quire import LLM, SamplingParams
from quire.errors import QuireError
from quire.models.fallback.construct import refusal_of
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
_NO_SHARING = {"num_key_value_heads": 4}
_PICTURES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
# What single families need beside, or instead.
OWN: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": _NO_SHARING,
    "AXK2ForCausalLM": _NO_SHARING,
    "CohereCompassForCausalLM": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4}
                            for kind in ("full_attention", "sliding_attention")},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "DbrxForCausalLM": {
        "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "DeepseekV32ForCausalLM": _NO_SHARING,
    "Dots3NoteForCausalLM": {**_NO_SHARING, "qk_rope_head_dim": 8, "index_head_dim": 8},
    "FuyuForCausalLM": {
        "patch_size": 4,
        "text_config": {"model_type": "persimmon", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
                        "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128},
    },
    "Gemma3nForCausalLM": {
        "num_kv_shared_layers": 0, "laurel_rank": 8, "altup_num_inputs": 2, "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0, 0.0],
        "intermediate_size": [48, 48],
    },
    "GlmMoeDsaForCausalLM": _NO_SHARING,
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "LongcatFlashForCausalLM": {
        "num_layers": 2, "num_key_value_heads": 4, "expert_ffn_hidden_size": 24, "zero_expert_num": 4, "head_dim": 8,
    },
    "MllamaForCausalLM": {"cross_attention_layers": [1]},
    "Phi4MultimodalForCausalLM": {
        "vision_config": {**_PICTURES, "image_size": 28, "crop_size": 28, "patch_size": 14},
        "audio_config": {**_PICTURES, "num_blocks": 1, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32,
                         "nemo_conv_channels": 32},
    },
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1, "router_hidden_size": 16},
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
    kind = getattr(transformers, architecture)
    config_class = kind.config_class or CONFIG_MAPPING[families()[architecture]]
    known: set[str] = set()
    for base in config_class.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
        known |= set(inspect.signature(base.__init__).parameters)
    settings = {name: value for name, value in SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:
        settings.pop("head_dim", None)
    settings |= OWN.get(architecture, {}) | others
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
    why = refusal_of(getattr(transformers, architecture, None))
    if why is not None:
        return {"refused": re.split(r" \(|[:.]", why)[0]}
    ids = tiny.token_ids()
    try:
        oracle = make(architecture)
    except Exception as error:  # no such configuration is one of that family
        return {"untried": f"{type(error).__name__}: {error}".splitlines()[0][:_LONGEST]}
    with tempfile.TemporaryDirectory() as folder:
        tiny.save(oracle, folder)
        try:
            model: Any = load_model(folder, "float32", impl="transformers")
        except QuireError as error:
            return {"refused": _short(architecture, str(error))}
    with torch.inference_mode():
        want = oracle(input_ids=torch.tensor([ids])).logits[0]
    whole = run_model.logits(model, ids)
    assert relative_error(whole, want) < 1e-4, f"{architecture}: {relative_error(whole, want)}"
    assert torch.equal(whole.argmax(-1), want.argmax(-1)) or relative_error(whole, want) < 1e-5, architecture
    assert torch.equal(run_model.logits(model, ids, CHUNKS), whole), architecture
    return {"runs": json.loads(json.dumps(model.promise._asdict()))}


def check_recorded(path: Path, dtype: str) -> None:
    """Steps of one token a sequence are replayed, and have the bits of those that run through Python."""
    prompts = [{"prompt_token_ids": tiny.token_ids(4 + seed, seed=seed)} for seed in range(3)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, logprobs=3, ignore_eos=True) for n in (12, 7, 9)]
    found = []
    for eager in (False, True):
        llm = LLM(
            str(path), dtype=dtype, skip_tokenizer_init=True, model_impl="transformers", enforce_eager=eager,
            max_num_batched_tokens=64,
        )  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs])
        shapes = llm.llm_engine.executor.runner._decode._shapes  # nothing public says it
        assert any(shapes.values()) != eager
    assert found[0] == found[1]


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
