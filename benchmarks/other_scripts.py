"""The cases of `cpu.py` that are scripts of their own: each is run with few rounds, and prints its own lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# By the case's name: the script and its arguments. MODEL and ROUNDS stand for those of `cpu.py`.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "linear": ("kernels.py", "--only", "linear", "--rounds", "2"),
    "adapters": ("lora.py", "MODEL", "--case", "four", "--rounds", "ROUNDS"),
    "images": ("images.py", "--dtype", "bfloat16", "--rounds", "1"),
    "http": ("serve.py", "MODEL", "--case", "throughput", "--rounds", "ROUNDS"),
    "speculation": ("speculation.py", "--case", "edit", "summary", "plain", "--rounds", "ROUNDS"),
}


def run_script(case: str, model: Path, rounds: int) -> None:
    """Print what a case's script prints, behind its name; one that fails ends nobody else."""
    script, *arguments = SCRIPTS[case]
    words = {"MODEL": str(model), "ROUNDS": str(rounds)}
    line = [sys.executable, str(Path(__file__).with_name(script)), *(words.get(one, one) for one in arguments)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            print(f"{case:10} {text.rstrip()}", flush=True)
    if process.returncode not in (0, 1):  # 1: a target of its own is missed, or what the lines above say
        print(f"{case:10} {script} ended with {process.returncode}", flush=True)
