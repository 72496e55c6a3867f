"""Executors: the same bits."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from quire import LLM, BeamSearchParams, LoRARequest, QuireError, SamplingParams
from quire.errors import AdapterError
from tests.lora import adapter_files
from tests.multimodal import open_engine, tiny_vision
from tests.multimodal.test_image_promise import answers as image_answers
from tests.multimodal.test_image_promise import requests as image_requests
from tests.platform.engine import parity
from tests.platform.engine import test_promise as promise
from tests.platform.execution.executors.helpers import ELSEWHERE, GREEDY, QUICK, elsewhere, processes

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_promise(remote: LLM, local: LLM) -> None:
    """Logprobs, prompt logprobs, penalties and filters, in a crowd that is preempted, twice: with prefix hits then."""
    chosen = list(range(promise.REQUESTS))
    expected = promise.answers(local, chosen)
    for _ in range(2):
        assert promise.answers(remote, chosen) == expected
    assert remote.llm_engine.scheduler.num_preemptions > 0


def test_transformers(remote: LLM, tiny_path: Path) -> None:
    oracle = LlamaForCausalLM.from_pretrained(tiny_path).double().eval()
    batch = promise.prompts(6)
    outputs = remote.generate([{"prompt_token_ids": ids} for ids in batch], GREEDY, use_tqdm=False)
    for ids, output in zip(batch, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        assert parity.by_transformers(oracle, ids, answer, token_by_token=True)[0] == answer


def test_prompts_as_embeddings(remote: LLM, local: LLM, tiny_path: Path) -> None:
    """Their rows go through memory that both processes map, again after a preemption."""
    table = LlamaForCausalLM.from_pretrained(tiny_path).get_input_embeddings()
    ids = promise.prompts()[:12]
    params = [promise.params(5 * i + 1) for i in range(12)]
    before = remote.llm_engine.scheduler.num_preemptions

    def run(llm: LLM, batch: Any) -> Any:
        outputs = llm.generate(batch, params, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    with torch.inference_mode():
        given = [{"prompt_embeds": table(torch.tensor(one))} for one in ids]
    plain = [i for i, one in enumerate(params) if one.repetition_penalty == 1]  # which would count the prompt
    expected = run(local, given)
    assert run(remote, given) == expected
    assert [expected[i] for i in plain] == [run(local, ids)[i] for i in plain] and plain
    assert remote.llm_engine.scheduler.num_preemptions > before


def test_forks_and_beams(remote: LLM, local: LLM) -> None:
    params = [
        SamplingParams(n=3, temperature=1.0, seed=i, max_tokens=5 + i, logprobs=2, frequency_penalty=0.5)
        for i in range(5)
    ]
    batch = [{"prompt_token_ids": ids} for ids in promise.prompts(5)]

    def run(llm: LLM) -> Any:
        forks = llm.generate(batch, params, use_tqdm=False)
        beams = llm.beam_search(batch, BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True))
        return [[(c.token_ids, c.logprobs) for c in o.outputs] for o in forks], [o.sequences for o in beams]

    assert run(remote) == run(local)


def test_stop_strings_and_aborts(remote: LLM, local: LLM) -> None:
    whole = local.generate("Once upon", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=[whole[2:4]])
    found = [llm.generate("Once upon", stop, use_tqdm=False)[0].outputs[0] for llm in (remote, local)]
    assert found[0].text == found[1].text and found[0].stop_reason == whole[2:4]
    engine = remote.llm_engine
    for name in "abcd":
        engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    engine.abort_request(["a", "c"])
    engine.step()
    engine.abort_request(["b", "d"])
    assert promise.answers(remote, [3, 4]) == promise.answers(local, [3, 4])


@pytest.mark.parametrize(
    "where", [pytest.param(one, marks=[pytest.mark.slow] * (one != QUICK[1])) for one in ELSEWHERE]
)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(open_engine.KINDS[0], marks=pytest.mark.slow), open_engine.KINDS[2]],
    ids=lambda kind: kind.name,
)
def test_images(tmp_path: Path, kind: Any, where: str) -> None:
    """Features that come and go, pixels by way of shared memory; the model with three positions a token among them."""
    tiny_vision.build(kind.architecture, kind.variant, tmp_path)
    more = {"media_cache_bytes": open_engine.room_for(kind.most_tokens), "max_num_batched_tokens": 23}
    expected = image_answers(open_engine.open_llm(str(tmp_path), **more), image_requests())
    with elsewhere(where) as settings:
        llm = open_engine.open_llm(str(tmp_path), **settings, **more)
    assert image_answers(llm, image_requests()) == expected
    assert image_answers(llm, image_requests()[::-1]) == expected[::-1]
    llm.llm_engine.close()


def test_adapters(remote: LLM, local: LLM, tmp_path: Path) -> None:
    """Of all kinds, mixed, reloaded and unloaded while they run; one that does not fit is refused as here."""
    folders = {
        "plain": adapter_files.plain(tmp_path / "plain", 1),
        "dora": adapter_files.dora(tmp_path / "dora", 4),
        "saved": adapter_files.saved(tmp_path / "saved", 5),
        "words": adapter_files.words(tmp_path / "words", 6),
    }
    again = adapter_files.plain(tmp_path / "again", 9, rank=7, targets=adapter_files.ALL)
    wrong = adapter_files.write(tmp_path / "wrong", adapter_files.config(), b"nothing")
    batch = [{"prompt_token_ids": ids} for ids in promise.prompts(10)]
    mix = LoRARequest("mix", adapters=[("plain", 0.5), ("other", -1.0)])
    wanted = [None, *map(LoRARequest, folders), mix, LoRARequest("other"), None, LoRARequest("dora"), mix]
    params = [promise.params(i) for i in range(10)]

    def run(llm: LLM) -> list[Any]:
        for name, folder in folders.items():
            llm.load_lora_adapter(name, str(folder))
        llm.load_lora_adapter("other", str(again))
        found = [[(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs)
                  for o in llm.generate(batch, params, lora_request=wanted, use_tqdm=False)]]  # fmt: skip
        engine = llm.llm_engine
        engine.add_request("runs", batch[0], GREEDY, LoRARequest("plain"))
        engine.step()
        llm.load_lora_adapter("plain", str(again), load_inplace=True)
        found.append([list(adapter_files.drive(engine)["runs"].outputs[0].token_ids)])
        found.append(adapter_files.tokens(llm, [ids["prompt_token_ids"] for ids in batch[:1]], LoRARequest("plain")))
        with pytest.raises(AdapterError) as error:
            llm.load_lora_adapter("wrong", str(wrong))
        found.append(str(error.value))
        adapter_files.nothing_left(llm)
        for name in [*folders, "other"]:
            llm.unload_lora_adapter(name)
        assert llm.list_lora_adapters() == []
        return found

    expected = run(local)
    assert run(remote) == expected
    assert expected[1] != expected[2]
    gc.collect()
    remote.generate(batch[:1], GREEDY, use_tqdm=False)
    assert not any(one._forgotten for one in processes(remote)), "the worker was not told which adapters are gone"


def test_an_adapter_that_is_unloaded_leaves_the_worker_too(remote: LLM, tmp_path: Path) -> None:
    """Though no request comes: what `freed_bytes` says is given back over there as well."""
    engine = remote.llm_engine
    gc.collect()  # adapters that other tests were refused
    engine.core.settle()
    remote.load_lora_adapter("gone", str(adapter_files.plain(tmp_path / "gone", 1)))
    remote.generate("a", GREEDY, lora_request=LoRARequest("gone"), use_tqdm=False)
    number = engine.unload_lora_adapter("gone")
    engine.core.settle()
    assert engine.freed_bytes(number)
    assert not any(one._forgotten for one in processes(remote)), "the worker was not told"


def test_sleep(remote: LLM, local: LLM) -> None:
    expected = promise.answers(local, [0, 1, 2])
    assert promise.answers(remote, [0, 1, 2]) == expected
    remote.sleep()
    with pytest.raises(QuireError, match="sleeps"):
        remote.generate("a", GREEDY, use_tqdm=False)
    remote.wake_up()
    assert promise.answers(remote, [0, 1, 2]) == expected


def test_one_request_fails_in_the_worker(remote: LLM, local: LLM) -> None:
    """A kernel refuses a token: the step runs again, one sequence at a time, and the others go on."""
    engine = remote.llm_engine
    for name in "abc":  # a step with one whose tokens must be seen is waited for
        params = replace(GREEDY, logprobs=1) if name == "b" else GREEDY
        engine.add_request(name, {"prompt_token_ids": [5, 6, 7 + ord(name)]}, params)
    engine.step()
    (sequence,) = engine.core.requests["b"].sequences
    while not sequence.output_ids:  # steps of a pipeline are some calls long
        engine.step()
    sequence.token_ids[-1] = 10_000
    outputs = adapter_files.drive(engine)
    assert [outputs[name].outputs[0].finish_reason for name in "abc"] == ["length", "error", "length"]
    assert "ids" in outputs["b"].outputs[0].stop_reason
    alone = local.generate({"prompt_token_ids": [5, 6, 7 + ord("c")]}, GREEDY, use_tqdm=False)[0].outputs[0]
    assert outputs["c"].outputs[0].token_ids == alone.token_ids
    # And a row that cannot be drawn, which fails no step.
    nothing = SamplingParams(max_tokens=3, min_tokens=2, allowed_token_ids=[2])
    one, other = remote.generate(["a", "b"], [nothing, GREEDY], use_tqdm=False)
    assert one.outputs[0].finish_reason == "error" and "no token" in one.outputs[0].stop_reason
    assert other.outputs[0].finish_reason == "length"
