"""Measure how soon quire answers and what it takes in memory: startup.py [MODEL] [--json].

Each figure comes from a fresh process. The weights are read once before, so that quire is what is measured;
all weights and the whole KV pool are touched before memory is read, so that both count in full.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

IMPORT_LIMIT = 0.3  # s, `import quire`
READY_LIMIT = 2.0  # s, LLM(MODEL) once torch and transformers are imported
MEMORY_LIMIT = 600e6  # bytes beside the weights and the KV pool
POOL_BYTES = 64 * 2**20


def import_seconds() -> float:
    """`import quire` in a fresh interpreter; the best of five."""
    code = "import time; t = time.perf_counter(); import quire; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(5)]
    return min(float(run.stdout) for run in runs)


def fresh(model: str | None, **options: object) -> dict[str, float]:
    """`measure` in a fresh interpreter."""
    command = [sys.executable, __file__, "--child", "--options", json.dumps(options), *([model] if model else [])]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def measure(model: str | None, **options: object) -> dict[str, float]:
    """Load the model, make one token, and read this process's memory. Seconds and bytes; options: more of LLM's."""
    begin = time.perf_counter()
    import torch
    import transformers  # noqa: F401

    imported = time.perf_counter()
    from quire import LLM, SamplingParams

    llm = LLM(model, kv_cache_memory_bytes=POOL_BYTES, seed=0, **options)
    ready = time.perf_counter()
    llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    answered = time.perf_counter()

    runner = llm.llm_engine.executor.runner
    weights = {p.data_ptr(): p for p in runner.model.parameters()}.values()
    with torch.inference_mode():
        for weight in weights:
            weight.sum()
        for cache in runner.caches:
            cache.keys.zero_()
            cache.values.zero_()
    memory = resident()
    return {
        "import_torch_transformers_s": imported - begin,
        "ready_s": ready - imported,
        "first_token_s": answered - ready,
        "weights_bytes": sum(weight.nbytes for weight in weights),
        "pool_bytes": sum(cache.keys.nbytes + cache.values.nbytes for cache in runner.caches),
        "rss_bytes": memory["VmRSS"],
        "rss_file_bytes": memory["RssFile"],
        "rss_anon_bytes": memory["RssAnon"],
    }


def resident() -> dict[str, int]:
    """The memory lines of /proc/self/status (Linux), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.endswith("kB"))
    return {name: 1024 * int(value.split()[0]) for name, value in pairs}


def report(found: dict[str, float]) -> bool:
    """Print the figures against their limits; return whether all are kept."""
    rest = found["rss_bytes"] - found["weights_bytes"] - found["pool_bytes"]
    checked = [
        ("import quire", found["import_quire_s"], IMPORT_LIMIT, "s", 1.0),
        ("LLM(model) ready", found["ready_s"], READY_LIMIT, "s", 1.0),
        ("memory beside weights and KV pool", rest, MEMORY_LIMIT, "MB", 1e6),
    ]
    for name, value, limit, unit, scale in checked:
        verdict = "ok" if value <= limit else "OVER"
        print(f"{name:<36}{value / scale:>9.2f} {unit:<3} limit {limit / scale:g} {unit}: {verdict}")
    for name in ("import_torch_transformers_s", "first_token_s"):
        print(f"{name.removesuffix('_s').replace('_', ' '):<36}{found[name]:>9.2f} s")
    for name in ("weights", "pool", "rss", "rss_file", "rss_anon"):
        print(f"{name.replace('_', ' '):<36}{found[f'{name}_bytes'] / 1e6:>9.2f} MB")
    return all(value <= limit for _, value, limit, _, _ in checked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a directory or hub id; default: the bundled model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, default={}, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.model, **args.options)))
        return
    fresh(args.model)  # reads the files once
    found = {"import_quire_s": import_seconds(), **fresh(args.model)}
    if args.json:
        print(json.dumps(found, indent=2))
    elif not report(found):
        sys.exit(1)


if __name__ == "__main__":
    main()
