"""Families of decoders beside a Llama of the same bytes: families.py [FAMILY ...] [--rounds N] [--models FOLDER]

Each family's model has some 250 M random parameters in bf16, in the shape of its published ones, and is made on the
spot beside a Llama with the same sizes: the same bytes, but for norms. The two take turns in one process on the same
requests. What is printed are output tokens per second (medians of the rounds) and the ratio within a round: what a
family's norms, windows, activations and rotation cost beside the reading of the weights.

single      one request of 248 prompt and 128 output tokens
batch       32 requests of mixed lengths (`quire bench`'s)
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lora import compare

from quire import LLM
from quire.cli.workload import SINGLE_OUTPUT, Requests, workload

SIZES: Mapping[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2816, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Family: (architecture, its configuration's class, what of it is not as in `SIZES`).
FAMILIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 4096}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    # Five layers with a window to one without, and a head that is not hidden_size / heads.
    "gemma3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        {"sliding_window": 512, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 4,
         "query_pre_attn_scalar": 128, "tie_word_embeddings": True, "vocab_size": 64000},
    ),
    "phi3": (
        "Phi3ForCausalLM", "Phi3Config",
        {"sliding_window": 2047, "original_max_position_embeddings": 2048},
    ),
}  # fmt: skip
BATCH = 32  # requests


def make(folder: Path, architecture: str, config_class: str, settings: Mapping[str, Any]) -> Path:
    """A model of random weights, unless it is there."""
    import transformers

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**settings)
        getattr(transformers, architecture)(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def long_rope(head_dim: int) -> dict[str, Any]:
    """Factors that grow with the dimension, as Phi-3's do."""
    short = [1.0 + i / 8 for i in range(head_dim // 2)]
    return {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": [4 * f for f in short],
    }  # fmt: skip


def pair(folder: Path, family: str) -> tuple[Path, Path]:
    """(a Llama, the family's model), of the same sizes."""
    architecture, config_class, own = FAMILIES[family]
    settings = {**SIZES, **own}
    if family == "phi3":  # every head has a key of its own
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    llama = {name: settings[name] for name in SIZES}
    if family == "phi3":
        settings["rope_parameters"] = long_rope(settings["head_dim"])
    return (
        make(folder / f"llama-for-{family}", "LlamaForCausalLM", "LlamaConfig", llama),
        make(folder / family, architecture, config_class, settings),
    )


def parameter_bytes(llm: LLM) -> int:
    model = llm.llm_engine.executor.runner.model
    return sum(parameter.nbytes for parameter in {id(p): p for p in model.parameters()}.values())


def cases(vocab: int) -> Iterator[tuple[str, Requests]]:
    batch = workload(BATCH, vocab=vocab)
    yield "single", [(batch[0][0], SINGLE_OUTPUT)]
    yield "batch", batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--models", type=Path, help="a folder for the models, which stay there; default: a temporary one"
    )
    args = parser.parse_args()
    wrong = sorted(set(args.family) - set(FAMILIES))
    if wrong:
        parser.error(f"unknown family {', '.join(wrong)}: choose from {', '.join(FAMILIES)}")
    with tempfile.TemporaryDirectory(prefix="quire-families-") as temporary:
        for family in args.family or FAMILIES:
            llms = [
                LLM(str(path), dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=64)
                for path in pair(args.models or Path(temporary), family)
            ]
            mega = [parameter_bytes(llm) / 1e6 for llm in llms]
            print(f"{family:8} {mega[1]:.1f} MB of weights, its Llama {mega[0]:.1f} MB", flush=True)
            sides: dict[str, tuple[LLM, list[Any]]] = {"llama": (llms[0], [None]), family: (llms[1], [None])}
            for case, requests in cases(SIZES["vocab_size"]):
                compare(case, sides, requests, args.rounds)


if __name__ == "__main__":
    main()
