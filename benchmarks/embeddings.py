"""Embeddings beside what users would take: embeddings.py [--model small|base] [--dtype D] [--rounds N] [--peers FOLDER]

256 texts of 16 to 256 tokens, by a BERT of random weights: `small`, of 22 M parameters (all-MiniLM-L6's sizes), or
`base`, of 110 M (BERT base's). Contenders take turns, each in a process of its own that stands still while the others
run: sentence-transformers on torch, ONNX Runtime (float32 alone) and OpenVINO, which all sort texts by length and pad
batches of 32; quire computes no padding. Each makes tokens of the texts, and normalized means of their hidden states.
Printed are medians of the rounds' ratios, and the range. Peers live in environments of their own, PEERS/NAME with NAME
sentence (sentence-transformers), onnx (transformers, onnx, onnxscript, onnxruntime) and openvino; those that are not
there are named and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import torch
from machine import processor
from peers.contender import HERE, Absent, Contender, find, made
from peers.texts import SPECIAL, WORDS, texts, word

MODELS = {
    "small": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
SCRIPTS = {
    "quire": "run_quire_embeddings.py",
    "sentence-transformers": "run_sentence_transformers.py",
    "ONNX Runtime": "run_onnxruntime.py",
    "OpenVINO": "run_openvino_embeddings.py",
}
HOMES = {"sentence-transformers": "sentence", "ONNX Runtime": "onnx", "OpenVINO": "openvino"}
TARGETS = {
    "float32": {"sentence-transformers": 1.3, "ONNX Runtime": 1.0, "OpenVINO": 1.0},
    "bfloat16": {"sentence-transformers": 1.3, "OpenVINO": 1.2},
}
PATIENCE = 300.0  # seconds for a start or a run


def make_bert(folder: Path, sizes: dict[str, int], dtype: torch.dtype) -> Path:
    """A BERT of random weights, as sentence-transformers keeps one: with a tokenizer, mean pooling and a norm."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    vocabulary = {text: number for number, text in enumerate((*SPECIAL, *map(word, range(WORDS))))}
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes)).to(dtype).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **named).save_pretrained(folder)
    kind = "sentence_transformers.models"
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": path, "type": f"{kind}.{name}"}
                for i, (path, name) in enumerate(modules)
            ]
        )
    )
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": sizes["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def openvino_model(python: str, model: Path) -> Path:
    """What OpenVINO makes of a model, beside it. Raises Absent."""
    export = ["export", "openvino", "--task", "feature-extraction", "--weight-format", "fp32", "--model", str(model)]
    return made(model.with_name("openvino"), [str(Path(python).with_name("optimum-cli")), *export])


@contextmanager
def contenders(model: Path, dtype: str, home: Path) -> Iterator[list[Contender]]:
    """Those that are there, quire first; they end with the context."""
    with ExitStack() as stack:
        found = []
        for name, script in SCRIPTS.items():
            if name != "quire" and name not in TARGETS[dtype]:
                continue
            try:
                python = sys.executable if name == "quire" else find(home, HOMES[name])
                more = [str(openvino_model(python, model))] if name == "OpenVINO" else []
                found.append(Contender(name, [python, str(HERE / script), str(model), dtype, *more], PATIENCE))
                stack.callback(found[-1].close)
            except Absent as reason:
                if name == "quire":
                    raise SystemExit(f"quire {reason}") from None
                print(f"{name}: {reason}; left out", flush=True)
        yield found


def measure(model: Path, dtype: str, home: Path, rounds: int, requests: list[tuple[str, int]]) -> None:
    """Print tokens a second of each, and quire's over theirs."""
    with contenders(model, dtype, home) as all_of_them:
        rates: dict[str, list[float]] = {one.name: [] for one in all_of_them}
        for turn in range(-1, rounds):
            for one in all_of_them:
                rate = one.rate("embed", requests[:16] if turn < 0 else requests)
                rates[one.name] += [rate] if turn >= 0 else []
    for name, found in rates.items():
        line = f"{name:22} {median(found):10.0f} tokens/s"
        if name != "quire":
            ratios = sorted(ours / theirs for ours, theirs in zip(rates["quire"], found, strict=True))
            spread = f"({ratios[0]:.2f} - {ratios[-1]:.2f})"
            line += f"   quire / this {median(ratios):5.2f} {spread}, wanted {TARGETS[dtype][name]}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--dtype", choices=TARGETS, nargs="+", default=list(TARGETS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--peers", type=Path, default=Path("~/.cache/quire-peers"))
    args = parser.parse_args()
    print(processor())
    for name in args.model:
        for dtype in args.dtype:
            with tempfile.TemporaryDirectory() as folder:
                model = make_bert(Path(folder) / name, MODELS[name], getattr(torch, dtype))
                print(f"{name}, {dtype}, {args.texts} texts of 16 - 256 tokens", flush=True)
                measure(model, dtype, args.peers.expanduser(), args.rounds, texts(args.texts, 16, 256))


if __name__ == "__main__":
    main()
