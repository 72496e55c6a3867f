"""benchmarks/simulate.py: it decides what an engine decides, its steps take what was measured, and it ends."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.benchmarks.benchmarks import imported
from tests.platform.conftest import make_llama

pytestmark = pytest.mark.usefixtures("one_thread")

REQUESTS = [(37, 9), (5, 30), (120, 3), (64, 12), (8, 25), (90, 17), (33, 1), (70, 20)]  # tokens in, and out


def drive(replica: Any, requests: list[Any]) -> tuple[float, list[list[tuple[int, int]]]]:
    """The time when all requests have ended, that come at once; and the chunks of each step: (first token, tokens)."""
    for request in requests:
        replica.add(request)
    now, steps = 0.0, []
    while replica.scheduler.has_work:
        end = replica.begin(now)
        if end is None:
            now = replica.tiers.next_ready()
            continue
        steps.append([(chunk.start, chunk.length) for chunk in replica.plan.chunks])
        now = end
        replica.finish()
    replica.scheduler.check_integrity()
    return now, steps


def test_a_replica_makes_the_steps_of_an_engine(tmp_path: Path) -> None:
    make_llama(tmp_path)
    llm = LLM(
        str(tmp_path), block_size=16, num_gpu_blocks_override=10, max_num_seqs=4, max_num_batched_tokens=48,
        skip_tokenizer_init=True,
    )  # fmt: skip
    engine = llm.llm_engine
    prompts = [[3 + (7 * place + token) % 300 for token in range(count)] for place, (count, _) in enumerate(REQUESTS)]
    for place, (_, answer) in enumerate(REQUESTS):
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        engine.add_request(str(place), {"prompt_token_ids": prompts[place]}, params)
    real, plan = [], engine.scheduler.plan
    engine.scheduler.plan = lambda: real.append(plan()) or real[-1]  # type: ignore[method-assign,func-returns-value]
    while engine.has_unfinished_requests():
        engine.step()
    with imported("simulated") as simulated:
        profile = replace(simulated.H100, blocks=10, max_num_seqs=4, max_num_batched_tokens=48)
        requests = [
            simulated.make_request(place, prompts[place], answer, None) for place, (_, answer) in enumerate(REQUESTS)
        ]
        _, steps = drive(simulated.Replica(profile), requests)
    assert engine.scheduler.num_preemptions > 0
    assert steps == [[(chunk.start, chunk.length) for chunk in one.chunks] for one in real if one.chunks]


def test_steps_take_what_was_measured() -> None:
    """The figures of docs/gpu.md that its model is fitted to."""
    with imported("simulated") as simulated:

        def seconds(streams: int, prompt: int, answer: int, adapters: int = 0) -> float:
            replica = simulated.Replica(replace(simulated.H100, fetch=0.0, install=0.0))
            requests = [
                simulated.make_request(n, [n, *range(prompt - 1)], answer, 1 + n % adapters if adapters else None)
                for n in range(streams)
            ]
            return drive(replica, requests)[0]

        assert 64 * 256 / seconds(64, 512, 256) == pytest.approx(3204, rel=0.05)
        assert 256 / seconds(1, 8, 256) == pytest.approx(158, rel=0.05)
        none = seconds(64, 8, 256)
        for adapters, share in ((1, 0.85), (8, 0.83), (64, 0.65)):
            assert none / seconds(64, 8, 256, adapters) == pytest.approx(share, abs=0.04)


def test_adapters_come_and_go() -> None:
    with imported("simulated") as simulated:
        profile = replace(simulated.H100, device=2, host=3, max_num_seqs=2)
        replica = simulated.Replica(profile)
        end, _ = drive(replica, [simulated.make_request(n, [n, 1, 2], 4, 1 + n % 5) for n in range(20)])
        assert end > 5 * profile.fetch / profile.workers
        assert replica.tiers.gone and sum(replica.budget.hits.values()) == 20
        assert replica.budget.hits["disk"] >= 5


def test_all_rules(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("simulate") as simulate:
        monkeypatch.setattr(simulate, "CAPACITY_REQUESTS", 40)
        words = ["--replicas", "1", "3", "--requests", "24", "--adapters", "40"]
        monkeypatch.setattr(sys, "argv", ["simulate.py", *words])
        simulate.main()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 + 2 * len(simulate.RULES)
        monkeypatch.setattr(sys, "argv", ["simulate.py", *words, "--json"])
        simulate.main()
        cases = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_rule = {case["rule"]: case for case in cases if case["replicas"] == 3}
    for case in cases:
        assert case["device"] + case["host"] + case["disk"] == pytest.approx(1)
        assert 0 < case["first_token_median"] <= case["first_token_p99"] and case["imbalance"] >= 1
    alone = [case for case in cases if case["replicas"] == 1]
    assert len({case["first_token_p99"] for case in alone}) == 1, "one replica: no rule has a choice"
    assert by_rule["hash"]["disk"] < by_rule["round_robin"]["disk"]
    assert by_rule["residency"]["disk"] < by_rule["random"]["disk"]
