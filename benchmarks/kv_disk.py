"""How soon a prompt is answered whose blocks are on disk, beside one that is computed.

    python benchmarks/kv_disk.py [MODEL] [--tokens 2000] [--rounds 3] [--folder FOLDER] [--threads N] [--cold] [--json]

Each figure is of an engine in a process of its own: one computes the prompt and stores its blocks (`computed`), others
find them (`loaded`), as after a restart. Seconds to the first token, from the call on, once the engine is there and a
short prompt of other tokens was answered; median and range of the rounds. All answers must be the same bits. Beside
that stand what a start takes longer for the identity of the model, whose files are read and hashed, and what a step
waits for while blocks are stored. --cold: the system forgets the files of blocks before each round (`posix_fadvise`),
else they come from its cache.

MODEL: a folder; default: a Llama of 254 M random parameters in bf16, that of `benchmarks/cpu.py`. FOLDER: where blocks
go; default: a new one, in the system's place for such.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

TARGET = 10.0  # times as fast
MAX_BYTES = 4 << 30


def measure(model: str, folder: str | None, tokens: int, threads: int) -> dict[str, Any]:
    """Seconds of a start and to the first token of a prompt; folder: of its blocks, None: they are nowhere."""
    import torch

    from quire import LLM, SamplingParams

    if threads:
        torch.set_num_threads(threads)
    settings: dict[str, Any] = {}
    if folder is not None:
        extra = {"path": folder, "max_bytes": MAX_BYTES}
        settings["kv_transfer_config"] = {"kv_connector": "DiskConnector", "kv_connector_extra_config": extra}
    begun = time.perf_counter()
    llm = LLM(model, skip_tokenizer_init=True, num_gpu_blocks_override=2 * tokens // 8 + 64, max_num_seqs=4, **settings)
    ready = time.perf_counter()
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False)
    llm.generate({"prompt_token_ids": [7, 5, 3] * 5}, greedy, use_tqdm=False)  # threads and pages are there
    rng = random.Random(1)
    prompt = {"prompt_token_ids": [rng.randrange(3, 300) for _ in range(tokens)]}
    output = llm.generate(prompt, greedy, use_tqdm=False)[0]
    assert output.metrics is not None and output.metrics.first_token_time is not None
    seconds = output.metrics.first_token_time - output.metrics.arrival_time
    llm.llm_engine.close()
    counts = llm.llm_engine.stats().transfers
    return {
        "start": ready - begun,
        "first_token": seconds,
        "cached": output.num_cached_tokens,
        "answer": [output.outputs[0].token_ids, repr(output.outputs[0].logprobs)],
        "bytes": counts.loaded_bytes or counts.stored_bytes,
        "failed": counts.failed + counts.refused + counts.dropped,
    }


def fresh(model: str, folder: str | None, tokens: int, threads: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    given = json.dumps([model, folder, tokens, threads])
    command = [sys.executable, __file__, "--child", given]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return found


def forget_files(folder: Path) -> None:
    """Have the system drop what it has cached of them."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def run(model: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of three engines: one without blocks beside the pool, one that stores them, one that finds them."""
    kinds: dict[str, list[dict[str, Any]]] = {"without": [], "computed": [], "loaded": []}
    for number in range(args.rounds):
        store = folder / str(number)
        kinds["without"].append(fresh(model, None, args.tokens, args.threads))
        kinds["computed"].append(fresh(model, str(store), args.tokens, args.threads))
        if args.cold:
            forget_files(store)
        kinds["loaded"].append(fresh(model, str(store), args.tokens, args.threads))
    answers = {json.dumps(one["answer"]) for some in kinds.values() for one in some}
    assert len(answers) == 1, "answers differ"
    assert all(one["cached"] > 0 for one in kinds["loaded"]) and not any(one["cached"] for one in kinds["computed"])
    assert not any(one["failed"] for some in kinds.values() for one in some)
    ratios = [
        computed["first_token"] / loaded["first_token"]
        for computed, loaded in zip(kinds["without"], kinds["loaded"], strict=True)
    ]
    return {
        "tokens": args.tokens,
        "cached": kinds["loaded"][0]["cached"],
        "bytes": kinds["loaded"][0]["bytes"],
        "start": {kind: [one["start"] for one in some] for kind, some in kinds.items()},
        "first_token": {kind: [one["first_token"] for one in some] for kind, some in kinds.items()},
        "ratio": median(ratios),
        "ratios": ratios,
    }


def report(found: dict[str, Any]) -> None:
    print(f"prompt of {found['tokens']} tokens, of which {found['cached']} were loaded: {found['bytes'] / 1e6:.1f} MB")
    for what, name in (("first_token", "to the first token"), ("start", "a start")):
        for kind, seconds in found[what].items():
            low, high = 1e3 * min(seconds), 1e3 * max(seconds)
            print(f"{name:<20}{kind:<10}{1e3 * median(seconds):>9.1f} ms  ({low:.1f} .. {high:.1f})")
    verdict = "ok" if found["ratio"] >= TARGET else "UNDER"
    print(f"loaded is {found['ratio']:.1f} x as fast as without  (target {TARGET:g}: {verdict})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a folder; default: a Llama of 254 M random parameters")
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where blocks go")
    parser.add_argument("--threads", type=int, default=0, help="of an engine; 0: as many as torch takes")
    parser.add_argument("--cold", action="store_true", help="files come from the disk itself")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(*args.child)))
        return
    with tempfile.TemporaryDirectory() as made:
        model = args.model
        if model is None:
            from cpu import make_llama

            model = str(make_llama(Path(made) / "model"))
        folder = args.folder or Path(made) / "blocks"
        found = run(model, folder, args)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        report(found)
    sys.exit(found["ratio"] < TARGET)


if __name__ == "__main__":
    main()
