"""Every benchmark that runs on a CPU, at its smallest: that it runs to its end, not what it measures.

They run in this process, where torch is imported already, with their constants made small. Those of GPUs have a test of
their own (test_gpu_benchmark.py); peers are engines in environments of their own, and are left out here.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from quire.demo import model_path
from tests.benchmarks.benchmarks import BENCHMARKS, FOLDER, imported
from tests.benchmarks.conftest import TINY, Call
from tests.server.api_server import LocalServer, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import machine

    monkeypatch.setattr(machine, "_BYTES", 1 << 20)
    operands = {dtype: torch.ones(64, 64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    measure = machine.Machine.measure

    def quick(self: Any) -> float:
        self._operands = operands
        return measure(self)

    monkeypatch.setattr(machine.Machine, "measure", quick)


def test_all_of_them_are_here() -> None:
    # GPUs; a load for minutes; real weights; test_simulate.py; test_ray_benchmarks.py
    elsewhere = {"gpu", "soak", "kv_quality", "simulate", "replicas"}
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(BENCHMARKS) <= tested | elsewhere


def test_throughput(llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(llama), "--case", "batch", "--requests", "1", "--rounds", "1", "--no-transformers", "--json"]
    monkeypatch.setattr(sys, "argv", ["throughput.py", *words])
    with pytest.raises(SystemExit) as end:
        exec(compile((FOLDER / "throughput.py").read_text(), "throughput.py", "exec"), {"__name__": "__main__"})
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out)["lines"][0]["out_tok_s"] > 0


def test_startup(llama: Path, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("startup") as startup:
        monkeypatch.setattr(startup, "fresh", startup.measure)
        call(startup)
        assert "LLM(model) ready" in capsys.readouterr().out
        call(startup, "--json")
        assert json.loads(capsys.readouterr().out)["rss_bytes"] > 0


def test_executor(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("executor") as executor:
        call(executor, "--streams", 2, "--steps", 2, "--turns", 4)
        shown = capsys.readouterr().out
        assert all(kind in shown for kind in executor.KINDS) and "us; in the calmest" in shown


def test_kv_disk(
    llama: Path, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with imported("kv_disk") as kv_disk:
        monkeypatch.setattr(kv_disk, "fresh", kv_disk.measure)
        words = [llama, "--tokens", 200, "--rounds", 1, "--folder", tmp_path]
        call(kv_disk, *words)
        shown = capsys.readouterr().out
        assert "200 tokens, of which 192 were loaded" in shown and "loaded is" in shown
        with pytest.raises(AssertionError):
            call(kv_disk, *words)  # the folder is not empty: nothing is computed
        call(kv_disk, *words[:-1], tmp_path / "cold", "--cold", "--json")
        assert json.loads(capsys.readouterr().out)["cached"] == 192


def test_attention(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("attention") as attention:
        monkeypatch.setattr(attention, "SHAPES", [(4, 2, 64)])
        monkeypatch.setattr(attention, "CONTEXT", 40)
        monkeypatch.setattr(attention, "BUFFER", 1 << 16)
        monkeypatch.setattr(attention, "TEXTS", 3)
        monkeypatch.setattr(attention, "LONGEST", 20)
        call(attention, "--rounds", 1, "--tokens", 8)
    out = capsys.readouterr().out
    assert out.count("4,2,64") == 9  # decode, with a window too, and prefill; in three dtypes
    assert out.count("12,12,64") == out.count("12,12,32") == 2  # encoders


def test_embeddings(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With quire as the only contender."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    with imported("embeddings") as embeddings:
        monkeypatch.setattr(embeddings, "MODELS", {"tiny": sizes})
        call(embeddings, "--model", "tiny", "--rounds", 1, "--texts", 3, "--peers", tmp_path)
    out = capsys.readouterr().out
    assert out.count("left out") == 5 and len(re.findall(r"quire +\d+ tokens/s", out)) == 2


def test_serve_embeddings(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a server in this process, which takes no seconds to start; the clients are the benchmark's."""

    class Local(LocalServer):
        def __init__(self, model: str, *_: str) -> None:
            super().__init__({"model": model, "dtype": "bfloat16"})

        def __enter__(self) -> Local:
            super().__enter__()
            self.host, self.port = self.url.removeprefix("http://").split(":")
            return self

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    with imported("serve_embeddings") as module:
        monkeypatch.setattr(module, "MODELS", {"tiny": sizes})
        monkeypatch.setattr(module, "Server", Local)
        monkeypatch.setattr(module, "CASES", ((3, 1), (2, 4)))
        call(module, "--model", "tiny", "--rounds", 1, "--texts", 9, "--longest", 20)
    out = capsys.readouterr().out
    assert out.count("texts/s") == 3 and out.count("of LLM.embed") == 2 and out.count("of a core") == 2


def test_families(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each family's model and its Llama are made, and have the same bytes but for norms."""
    with imported("families") as families:
        monkeypatch.setattr(families, "SIZES", {**families.SIZES, **TINY, "head_dim": 16})
        monkeypatch.setattr(families, "BATCH", 2)
        call(families, "--rounds", 1)
        out = capsys.readouterr().out
        weights = re.findall(r"([\d.]+) MB of weights, its Llama ([\d.]+) MB", out)
        assert len(weights) == len(families.FAMILIES)
        assert all(abs(float(own) / float(llama) - 1) < 0.01 for own, llama in weights)
        assert all(out.count(f"{name} ") >= 3 for name in families.FAMILIES)


def test_fallback(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The same model by its row and by transformers' module, in both cases."""
    with imported("families") as families, imported("fallback") as fallback:
        monkeypatch.setattr(fallback, "SIZES", {**families.SIZES, **TINY, "head_dim": 16})
        monkeypatch.setattr(families, "BATCH", 2)
        call(fallback, "--rounds", 1)
    out = capsys.readouterr().out
    assert all(out.count(f"{name} by {impl} ") == 2 for name in fallback.MODELS for impl in ("quire", "transformers"))


def test_experts(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What a token goes through is 2 of 8 experts."""
    with imported("experts") as experts:
        small_machine(monkeypatch)
        monkeypatch.setattr(experts, "MIXTRAL", {**experts.MIXTRAL, **TINY})
        monkeypatch.setattr(experts, "BATCH", 2)
        monkeypatch.setattr(experts, "STEPS", 3)
        call(experts, "--rounds", 1)
    out = capsys.readouterr().out
    assert "quire / transformers" in out and "decode" in out


def test_kernels(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("kernels") as kernels:
        monkeypatch.setattr(kernels, "SPREAD", 1 << 16)
        monkeypatch.setattr(kernels, "REPEATS", 10)
        monkeypatch.setattr(kernels, "LINEARS", [(name, 64, 32, (1, 13)) for name in kernels.DTYPES])
        call(kernels, "--rounds", 1)
    assert capsys.readouterr().out.count("64x32") == 6


def test_balance(llama: Path, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("balance") as balance:
        monkeypatch.setattr(balance, "CASES", {"decode": (1, 20), "batch": (3, 20), "prefill": (1, 300)})
        call(balance, llama, "--threads", 2, 8, "--case", "decode", "batch", "prefill")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["decode", "batch", "prefill"]
    assert all(0 < float(line.split()[1]) <= 1 for line in lines[-3:])


def test_roofline(llama: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with imported("roofline") as roofline:
        small_machine(monkeypatch)
        monkeypatch.setattr(roofline, "TOKENS", (1, 13))
        monkeypatch.setattr(roofline, "STREAMS", (1, 2))
        call(roofline, llama, "--rounds", 1, "--out", tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").stat().st_size > 1000


def test_cpu(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With quire as the only contender: in a process of its own, as it is beside others."""
    with imported("cpu") as cpu:
        small_machine(monkeypatch)
        monkeypatch.setattr(cpu, "LLAMA", TINY)
        monkeypatch.setattr(cpu, "BATCH", 2)
        monkeypatch.setattr(cpu, "ATTENTION", ((4, 2, 64), torch.bfloat16, 2, 1, 40))
        cases = ["single", "decode", "prefill", "attention", "outside"]
        call(cpu, "--rounds", 1, "--peers", tmp_path, "--case", *cases)
    out = capsys.readouterr().out
    assert out.count("left out") == 3 and all(f"\n{case} " in out for case in cases)


def test_quantized(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A GGUF file made of the model, and the model in int8, each without its peer."""
    with imported("cpu") as cpu, imported("startup") as startup, imported("quantized") as quantized:
        small_machine(monkeypatch)
        monkeypatch.setattr(cpu, "LLAMA", TINY)
        monkeypatch.setattr(cpu, "BATCH", 2)
        monkeypatch.setattr(quantized, "fresh", startup.measure)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the contenders: two threads wait long for each other under load
        for name, value in (("PROMPT", 4), ("OUTPUT", 6), ("PREFILL", 20)):
            monkeypatch.setattr(quantized, name, value)
        cases = ["prefill", "start"]
        call(quantized, "--rounds", 1, "--peers", tmp_path, "--kinds", "Q8_0", "int8", "--case", *cases)
    out = capsys.readouterr().out
    assert "not installed" in out
    assert all(f"\n{case} " in out for case in cases)
    assert "int8 - bf16" in out


def test_exactness(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without llama.cpp; what its quantizer makes is left out."""
    with imported("exactness") as exactness:
        monkeypatch.setattr(exactness, "LLAMA", {**TINY, "vocab_size": 512})
        monkeypatch.setattr(exactness, "PROMPTS", 2)
        monkeypatch.setattr(exactness, "LENGTH", 9)
        call(exactness, "--kinds", "Q8_0", "Q4_1", "Q4_K_M", "--peers", tmp_path, "--dtype", "float32", "bfloat16")
    out = capsys.readouterr().out
    found = {
        (kind, dtype): float(error)
        for kind, dtype, error in re.findall(r"^(\S+) +quire, (\w+) +error (\S+)", out, re.MULTILINE)
    }
    assert set(found) == {(kind, dtype) for kind in ("Q8_0", "Q4_1") for dtype in ("float32", "bfloat16")}
    assert all(error < 0.05 for error in found.values()), found
    assert "Q4_K_M: not installed" in out


def test_perplexity(
    llama: Path, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of random weights it is about the size of the vocabulary, whatever the bits."""
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    for file in model_path().glob("tokenizer*.json"):
        shutil.copy(file, model)
    with imported("perplexity") as perplexity:
        monkeypatch.setattr(perplexity, "PIECE", 16)
        call(perplexity, model, "--tokens", 100)
    out = capsys.readouterr().out
    found = {name: float(value) for name, value in re.findall(r"^(\S+) +([\d.]+)  ", out, re.MULTILINE)}
    assert list(found) == ["bf16", "float32", "int8", "int4", "kv8", "int8+kv8"] and "100 tokens in 7 pieces" in out
    assert all(abs(value / TINY["vocab_size"] - 1) < 0.1 for value in found.values()), found


def test_lora(llama: Path, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("lora") as lora:
        full = lora.workload
        monkeypatch.setattr(
            lora, "workload", lambda n=32, **more: full(min(n, 6), **{**more, "prompt": (4, 8), "output": (3, 6)})
        )
        call(lora, llama, "--rounds", 1, "--registered", 100)
    out = capsys.readouterr().out
    assert all(f"\n{case} " in f"\n{out}" for case in ("four", "many", "ranks", "load", "scale"))


def test_images(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("images") as images:
        monkeypatch.setattr(images, "ANSWER", 2)
        call(images, model_path(), "--rounds", 1, "--requests", 4)
        assert capsys.readouterr().out.count("images/s") == 4
        monkeypatch.setattr(images, "TURN", 4)
        monkeypatch.setattr(images, "READING", 8)
        call(images, model_path(), "--memory", 8)
        assert "8 images" in capsys.readouterr().out


def test_sampling(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("sampling") as sampling:
        monkeypatch.setattr(sampling, "STEPS", 2)
        monkeypatch.setattr(sampling, "SEQUENCES", 2)
        call(sampling, "--rounds", 1)
    assert "bad_words" in capsys.readouterr().out


def test_structured(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("structured") as structured:
        monkeypatch.setattr(structured, "STREAMS", 2)
        monkeypatch.setattr(structured, "LENGTH", 12)
        with suppress(SystemExit):  # which says whether it was fast enough
            call(structured, model_path(), "--case", "streams", "forced", "--rounds", 1)
    shown = capsys.readouterr().out
    assert "streams" in shown and "forced" in shown and shown.count("ratio") == 2


def running(server: ServerProcess) -> type:
    """Stands for the benchmarks' `Server`."""

    class Running:
        host, port = server.url.removeprefix("http://").split(":")

        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Running:
            return self

        def __exit__(self, *_: object) -> None: ...

        def cpu(self) -> float:
            times = psutil.Process(server.process.pid).cpu_times()
            return float(times.user + times.system)

    return Running


def test_events(
    demo: ServerProcess, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with imported("events") as events:
        monkeypatch.setattr(events, "Server", running(demo))
        call(events, model_path(), "--streams", 2, "--rounds", 2, "--tokens", 40)
    out = capsys.readouterr().out
    assert out.count("out tok/s, watched") == 2 and "2 streams, 3 pages" in out and "watched / not: " in out


def test_serve(
    demo: ServerProcess,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """With the tests' server instead of servers of its own, which take seconds each to start."""
    with imported("serve") as serve:
        full = serve.workload_for
        monkeypatch.setattr(serve, "Server", running(demo))
        monkeypatch.setattr(serve, "COUNTS", (2,))
        monkeypatch.setattr(serve, "SECONDS", 0.2)
        monkeypatch.setattr(serve, "IDLE_STREAMS", 2)
        monkeypatch.setattr(
            serve, "workload_for", lambda *which, **more: full(*which, **{**more, "prompt": (4, 60), "output": (3, 6)})
        )
        options = ("--rounds", 1, "--rates", 50, "--requests", 3, "--out", tmp_path / "serve.png")
        call(serve, model_path(), *options)
    out = capsys.readouterr().out
    assert out.count("of LLM.generate") == 3 and "requests/s" in out and "idle streams" in out
    assert (tmp_path / "serve.png").exists()


def test_speculation(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("speculation") as speculation:
        few = {name: (texts[:1], {**given, "max_tokens": 8}) for name, (texts, given) in speculation.CASES.items()}
        monkeypatch.setattr(speculation, "CASES", few)
        call(speculation, model_path(), "--rounds", 1, "--case", "edit", "random", "batch", "--streams", 3)
    assert capsys.readouterr().out.count("with / without") == 3


def test_the_scripts_that_are_cases_of_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with imported("other_scripts") as scripts:
        assert all((FOLDER / script).is_file() for script, *_ in scripts.SCRIPTS.values())
        monkeypatch.setitem(scripts.SCRIPTS, "help", ("kernels.py", "--help"))
        scripts.run_script("help", Path("model"), 1)
        monkeypatch.setitem(scripts.SCRIPTS, "wrong", ("kernels.py", "--nothing"))
        scripts.run_script("wrong", Path("model"), 1)
    out = capsys.readouterr().out
    assert "help       usage: kernels.py" in out and "wrong      kernels.py ended with 2" in out
