"""benchmarks/gpu.py as far as it goes without a GPU: its arithmetic, and its cases on a tiny model on a CPU."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from quire import SamplingParams

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import gpu  # noqa: E402
import gpu_device  # noqa: E402
import gpu_engine  # noqa: E402
import gpu_experts  # noqa: E402
import gpu_kernels  # noqa: E402
import gpu_model  # noqa: E402
import gpu_peer  # noqa: E402

sys.path.remove(str(BENCHMARKS))  # its other modules have the names of packages

CPU = torch.device("cpu")
ROOFS = gpu_device.Roofs(copy=2e9, read=3e9, matrix=1e12)
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024, "rope_theta": 10000.0,
}  # fmt: skip
SCALE = gpu_engine.Scale(
    TINY, single=(16, 16), batch=(12, 6), streams=(2, 4), budgets=(16, 64), mixed=(8, 4), adapters=(1, 2),
    mixed_streams=4, rank=2, steady=(1, 2), steps=3,
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def bench(tmp_path) -> gpu_device.Bench:
    report = gpu_device.Report("test", tmp_path / "figures.jsonl")
    return gpu_device.Bench(CPU, report, rounds=2, roofs=ROOFS)


@pytest.fixture
def model(tmp_path) -> gpu_model.RandomModel:
    return gpu_model.RandomModel(tmp_path / "model", TINY, CPU, torch.float32)


def figures(bench: gpu_device.Bench) -> dict[str, dict]:
    lines = [json.loads(line) for line in bench.report.file.read_text().splitlines()]
    return {line["name"]: line for line in lines}


# -- figures and roofs --------------------------------------------------------------------------------------------


def test_a_figure_is_met_missed_or_neither(bench, capsys):
    assert bench.report.show("fast", [0.9, 0.8, 1.0], "x", 0.85, more={"us": 3.0})
    assert not bench.report.show("slow", [0.5], "x", 0.85)
    assert bench.report.show("idle", [0.04], "", 0.05, at_most=True)
    assert bench.report.show("only told", [7.0], "s")
    found = figures(bench)
    assert [found[name]["met"] for name in ("fast", "slow", "idle", "only told")] == [True, False, True, None]
    assert found["fast"]["value"] == 0.9 and (found["fast"]["low"], found["fast"]["high"]) == (0.8, 1.0)
    lines = capsys.readouterr().out.splitlines()
    assert ">= 0.85  met" in lines[0] and "us 3" in lines[0] and ">= 0.85  missed" in lines[1]


def test_a_failure_leaves_the_next_figure(bench, capsys):
    with bench.report.trying("this"):
        raise ValueError("broken")
    bench.deadline = 0.0
    with bench.report.trying("that"):
        bench.check_time()
    assert bench.report.failures == 1
    out = capsys.readouterr().out
    assert "this: failed: ValueError: broken" in out and "that: left out, time is up" in out
    assert list(bench.turns()) == [0]


def test_rates_are_amounts_a_second(monkeypatch):
    monkeypatch.setattr(gpu_device, "seconds", lambda run, device, loops=1: run() is not None and loops * 0.5)
    found = gpu_device.rates(CPU, size=4096, side=8, repeats=2)
    roofs = gpu_device.roofs_of(found)
    assert (roofs.copy, roofs.read, roofs.matrix) == (2 * 4096 / 0.5, 4096 / 0.5, 2 * 8**3 / 0.5)
    assert ROOFS.seconds(1e12, 1e9) == 1.0 and ROOFS.seconds(1e11, 1e9) == 0.5


def test_clock_takes_turns(bench):
    calls: list[tuple[str, int]] = []
    sides = {name: (lambda number, name=name: calls.append((name, number)), 3) for name in "ab"}
    spent = bench.clock(sides)
    assert {name: len(found) for name, found in spent.items()} == {"a": 2, "b": 2}
    assert set(calls) == {(name, number) for name in "ab" for number in range(3)}


class FakeEvent:
    """An event of a GPU on which each replay takes 0.3 ms."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = FakeEvent.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.time - self.time


class FakeGraph:
    def replay(self) -> None:
        FakeEvent.now += 0.3


def test_clock_of_a_gpu(bench, monkeypatch):
    """Calls are captured and their graph is replayed, often enough for the events to tell."""
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    bench.device = torch.device("cuda")
    spent = bench.clock({"": (calls.append, 3)})[""]
    assert spent == pytest.approx([1e-4] * 8)
    assert calls == [0, 1, 2] * 2  # to warm up, and while they are captured
    assert FakeEvent.now == pytest.approx(0.3 * (1 + 8 * 7))


# -- what a model must do -----------------------------------------------------------------------------------------


def test_work_of_a_model(model):
    with model.serving(num_gpu_blocks_override=8) as llm:
        work = gpu_model.Work.of(llm.llm_engine.executor.runner.model)
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
    head, norms = 512 * 64, 5 * 64
    assert work == gpu_model.Work(
        weights=4 * (2 * layer + head + norms), layers=4 * layer, head=2 * head, attention=4 * 2 * 4 * 16,
        kv=2 * 2 * 2 * 16 * 4,
    )  # fmt: skip


def test_a_batch_at_the_roof():
    work = gpu_model.Work(weights=1000, layers=10, head=4, attention=2, kv=8)
    roofs = gpu_device.Roofs(copy=100.0, read=1.0, matrix=50.0)
    assert work.prompt(3) == 3 * 10 + 4 + 2 * (1 + 2 + 3)
    assert work.step(5, 7) == (5 * (10 + 4 + 14), 1000 + 5 * 7 * 8)
    steps = [max(5 * (14 + 2 * c) / 50, (1000 + 40 * c) / 100) for c in (4, 5)]
    assert work.phases(roofs, 5, 3, 3) == pytest.approx(max(5 * 46 / 50, 10) + sum(steps))
    assert work.overlapped(roofs, 5, 3, 3) == pytest.approx(max((230 + 110 + 120) / 50, (3000 + 160 + 200) / 100))


def test_idle_share_of_intervals():
    assert gpu_engine.idle_share([(0, 4), (6, 10), (1, 3), (3, 5)]) == pytest.approx(0.1)
    assert gpu_engine.idle_share([(0, 4), (4, 8)]) == 0
    assert gpu_engine.idle_share([(0, 10), (11, 20), (30, 100)], least=5) == pytest.approx(0.1)
    with pytest.raises(RuntimeError, match="no work"):
        gpu_engine.idle_share([])


# -- the cases, small ---------------------------------------------------------------------------------------------


def test_kernels(bench):
    gpu_kernels.case_attention(bench, gpu_kernels.Heads(4, 2, 16), shrink=128, spread=1 << 16)
    products = (gpu_kernels.Product("qkv", (32, 16, 16), 32), gpu_kernels.Product("o", (32,), 32))
    gpu_kernels.case_linear(bench, products, (1, 5), spread=1 << 14)
    gpu_kernels.case_lora(bench, products, (2,), (1, 3), (1, 4), spread=1 << 14)
    gpu_experts.case_experts(bench, (gpu_experts.Experts("tiny", 4, 2, 32, 16),), (1, 40))
    assert not bench.report.failures
    found = figures(bench)
    assert found["tiny, T=40"]["experts"] == 4 and found["tiny, T=1"]["experts"] == 2
    assert found["decode, 16 streams at 64, blocks of 8"]["target"] == 0.85
    assert found["32 tokens at context 32, blocks of 16"]["target"] == 0.55
    assert found["qkv, T=5"]["value"] > 0 and "F.linear / quire" in found["o, T=1"]
    assert {name for name in found if name.startswith("r2")} == {
        f"r2, {adapters} adapters, T={tokens}: all / base - 1" for adapters, tokens in ((1, 1), (1, 4), (3, 4))
    }


def test_attention_counts():
    work = gpu_kernels.attention(gpu_kernels.Heads(4, 2, 16), 3, 2, 8, 4, CPU, spread=1)
    assert work.calls == 1 and work.size == 2 * 3 * 8 * 2 * 16 * 2
    assert work.flops == 4 * 4 * 16 * 3 * (7 + 8)
    assert work.call(0).shape == (6, 4, 16)


def test_engines(bench, monkeypatch):
    monkeypatch.setattr(gpu_engine, "Peer", plain_peer)
    for case in ("single", "batch", "adapters", "start"):
        getattr(gpu_engine, f"case_{case}")(bench, SCALE)
    assert not bench.report.failures
    found = figures(bench)
    assert found["exact products, bytes of weights"]["target"] == found["cuBLAS, bytes of weights"]["target"] == 0.85
    assert found["4 streams: quire / transformers"]["target"] == 3.0
    assert found["4 streams: quire / transformers"]["way"] == "generate"
    assert any(name.startswith("4 streams, the better (") for name in found)
    assert found["4 streams, enabled, not used / none"]["target"] == 0.99
    assert found["4 streams, 2 adapters / none"]["target"] == 0.92
    assert found["another: ready"]["value"] > 0


def plain_peer(model):
    peer = gpu_peer.Peer(model)
    peer._ways = ["generate"]
    return peer


def test_idle(bench, monkeypatch):
    def profiled(run):
        run()
        return [(0.0, 9.0), (10.0, 20.0)]

    monkeypatch.setattr(gpu_engine, "profiled", profiled)
    gpu_engine.case_idle(bench, SCALE)
    assert not bench.report.failures
    found = figures(bench)
    assert (
        found["graphs, 2 streams: idle share"]["value"] == pytest.approx(0.05)
        and found["graphs, 2 streams: idle share"]["met"]
    )
    assert found["enforce_eager, 1 streams: idle share"]["target"] is None


def test_transformers_runs_the_same_weights(model):
    with model.serving(num_gpu_blocks_override=32) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        ours = llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0].outputs[0].token_ids
    with torch.inference_mode():
        theirs = model.transformers().generate(
            input_ids=torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0
        )
    assert list(ours) == theirs[0, 4:].tolist()


# -- the command --------------------------------------------------------------------------------------------------


def test_cases_end_by_themselves_or_are_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "_GRACE", 0)
    args = gpu.parser().parse_args(["--case", "roofline", "linear", "lora", "single", "--json", str(tmp_path / "a")])
    args.limit = 5.0  # more than the first two take
    codes = {
        "roofline": "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{\"name\": 1}\\n')",
        "linear": "raise SystemExit(3)",
        "lora": "import time; time.sleep(60)",
    }
    begin = time.monotonic()
    found = gpu.run_all(args, lambda name, file, left: [sys.executable, "-S", "-c", codes[name], str(file)])
    assert time.monotonic() - begin < 40
    assert found["cases"] == {
        "roofline": "done", "linear": "failed, code 3", "lora": "ended, time is up", "single": "left out",
    }  # fmt: skip
    assert json.loads((tmp_path / "a").read_text())["figures"] == [{"name": 1}]
    assert "single    left out, time is up" in capsys.readouterr().out


def test_a_case_in_its_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rates = {"copy": [2e12], "read": [3e12], "matrix": [2e12]}
    monkeypatch.setattr(gpu_device, "rates", lambda device, repeats: rates)
    monkeypatch.setattr(gpu_kernels, "case_lora", lambda bench: bench.report.show("copy", [bench.roofs.copy]))
    args = gpu.parser().parse_args(["--figures", str(tmp_path / "figures"), "--quick"])
    assert gpu.run_case("lora", args, "cpu") == 0
    assert json.loads((tmp_path / "figures").read_text())["value"] == 2e12
    assert "roofs: 2000 GB/s copied, 2 TFLOP/s" in capsys.readouterr().out
    monkeypatch.setattr(gpu_kernels, "case_lora", lambda bench: 1 / 0)
    assert gpu.run_case("lora", args, "cpu") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 2
    assert "finds no GPU" in capsys.readouterr().err
