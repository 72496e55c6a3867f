"""A team of many threads, simulated: the same results, and how evenly the work fell."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_threads
import torch
from kernel_helpers import randn, same_bits

from quire import LLM, LoRARequest, SamplingParams
from quire.demo import adapter_path

native = pytest.importorskip("quire.kernels.native")


@pytest.fixture
def simulate() -> Iterator[object]:
    yield native.simulate_team
    native.simulate_team(0)


@pytest.mark.parametrize("threads", [2, 5, 64])
def test_results_stay_the_same(threads: int, simulate: object) -> None:
    before = native.num_threads()
    expected = test_threads.all_kernels()
    native.simulate_team(threads)
    assert native.num_threads() == threads
    found = test_threads.all_kernels()
    regions, work, last = native.simulated_time()
    assert regions > 0 and 0 < last <= work <= threads * last * (1 + 1e-9)
    native.simulate_team(0)
    assert native.simulated_time() == (0, 0, 0) and native.num_threads() == before
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


def test_a_call_is_a_region(simulate: object) -> None:
    x, weight = randn(64, 1024, dtype=torch.bfloat16), randn(4096, 1024, dtype=torch.bfloat16, seed=1)
    native.simulate_team(4)
    for _ in range(5):
        native.linear(x, [weight], [None])
    assert native.simulated_time()[0] == 5


def test_two_callers(simulate: object) -> None:
    """The second one's region is its own thread's."""
    expected = test_threads.all_kernels()
    native.simulate_team(4)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda _: test_threads.all_kernels(), range(6)):
            assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("threads", [-1, 65, 1_000_000])
def test_what_is_no_team(threads: int, simulate: object) -> None:
    with pytest.raises(ValueError, match=f"0 to 64 threads can be simulated, not {threads}"):
        native.simulate_team(threads)


def test_a_thread_that_waits_lets_others_go_on(simulate: object) -> None:
    """Adapters are expanded when all is multiplied: those who come first wait for the others."""
    llm = LLM(enable_lora=True, enforce_eager=True, enable_prefix_caching=False)
    llm.load_lora_adapter("shout", adapter_path("shout"))
    prompt = {"prompt_token_ids": [3 + place % 300 for place in range(300)]}
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)

    def answer() -> object:
        output = llm.generate(prompt, greedy, use_tqdm=False, lora_request=LoRARequest("shout"))[0].outputs[0]
        return output.token_ids, output.logprobs

    expected = answer()
    native.simulate_team(7)
    assert answer() == expected
    assert native.simulated_time()[0] > 0
