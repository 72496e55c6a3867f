"""Prompts that come as embeddings: those of token ids answer, bit for bit, as the tokens do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, LoRARequest, RequestError, SamplingParams, StructuredOutputsParams
from quire.platform.engine.llm_engine import LLMEngine
from tests.lora import adapter_files
from tests.models import rows, tiny
from tests.platform.conftest import make_llama
from tests.platform.engine.parity import engine

pytestmark = pytest.mark.usefixtures("one_thread")

REQUESTS = 16


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("embeds")
    made = make_llama(path, request.param, max_position_embeddings=512)
    made.path = str(path)
    return made


@torch.inference_mode()
def embedded(model: Any, ids: list[int]) -> torch.Tensor:
    return model.get_input_embeddings()(torch.tensor(ids)).clone()


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 320) for _ in range(140)]
    own = [[rng.randrange(3, 320) for _ in range(rng.randint(1, 40))] for _ in range(REQUESTS)]
    return [shared[: rng.choice([0, 17, 129, 140])] + ids for ids in own]


def params(index: int) -> SamplingParams:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": index, "n": 3},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "seed": index, "stop": ["e"]},
        {"temperature": 0.0, "frequency_penalty": 0.4, "bad_words": ["a"]},
    ]
    return SamplingParams(max_tokens=12 + index % 7, ignore_eos=True, logprobs=3, **kinds[index % 4])


def answers(outputs: list[Any]) -> list[Any]:
    shown = [[(c.token_ids, c.logprobs, c.text, c.finish_reason) for c in output.outputs] for output in outputs]
    assert all(len(output.outputs) for output in outputs)
    return shown


def generate(llm: LLM, batch: list[Any], given: Any = None) -> list[Any]:
    given = given or [params(i) for i in range(len(batch))]
    outputs = llm.generate(batch, given, use_tqdm=False)
    llm.llm_engine.check_integrity()
    assert llm.llm_engine.pool.num_owned == 0
    return outputs


@pytest.fixture(scope="module")
def expected(model):
    """What the tokens answer, each prompt alone."""
    llm = LLM(model.path, enable_prefix_caching=False)
    return [answers(generate(llm, [ids], params(i)))[0] for i, ids in enumerate(prompts())]


def test_rows_of_tokens_answer_as_the_tokens(model, expected):
    """Beside prompts of tokens, cut into chunks, with preemptions, forks and hits in the prefix cache."""
    small = {"max_num_batched_tokens": 45, "block_size": 4, "num_gpu_blocks_override": 110}
    llm = LLM(model.path, enable_prompt_embeds=True, debug=True, **small)
    batch = prompts()
    mixed = [{"prompt_embeds": embedded(model, ids)} if i % 3 else ids for i, ids in enumerate(batch)]
    outputs = generate(llm, mixed)
    assert answers(outputs) == expected
    again = generate(llm, [{"prompt_embeds": embedded(model, ids)} for ids in batch])
    assert answers(again) == expected
    preempted = [output.metrics.num_preemptions for output in outputs + again]
    assert sum(count for i, count in enumerate(preempted) if i >= REQUESTS or i % 3) > 0
    assert sum(output.num_cached_tokens for output in again) > 128
    assert [output.prompt_token_ids for output in again] == [[0] * len(ids) for ids in batch]


def test_beams(model):
    llm = LLM(model.path, enable_prompt_embeds=True, num_gpu_blocks_override=64)
    search = BeamSearchParams(beam_width=3, max_tokens=8)
    ids = prompts()[3]
    (tokens,) = llm.beam_search([ids], search)
    (rows_,) = llm.beam_search([{"prompt_embeds": embedded(model, ids)}], search)
    assert [(s.tokens[len(ids) :], s.cum_logprob) for s in tokens.sequences] == [
        (s.tokens[len(ids) :], s.cum_logprob) for s in rows_.sequences
    ]


def test_blocks_are_found_by_the_rows(model):
    """And never by the zeros that stand for their tokens, nor across salts."""
    llm = LLM(model.path, enable_prompt_embeds=True, num_gpu_blocks_override=400, block_size=4)
    rng = torch.Generator().manual_seed(1)
    first = torch.randn(160, 64, generator=rng)
    other_end, other = first.clone(), first.clone()
    other_end[130] += 1
    other[3] += 1
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    fresh = LLM(model.path, enable_prompt_embeds=True, enable_prefix_caching=False, num_gpu_blocks_override=128)

    def ask(given: Any) -> int:
        (output,) = generate(llm, [given], greedy)
        assert answers([output]) == answers(generate(fresh, [given], greedy))
        return output.num_cached_tokens

    assert ask([0] * 160) == 0
    assert ask({"prompt_embeds": first}) == 0
    assert ask({"prompt_embeds": first.double()}) == 156  # equal ones in the model's dtype are one
    assert ask({"prompt_embeds": other_end}) == 128
    assert ask({"prompt_embeds": other}) == 0
    assert ask({"prompt_embeds": first, "cache_salt": "a"}) == 0
    assert ask([0] * 160) == 156


def test_penalties_count_what_is_generated_alone(model):
    """Rows are no tokens: nothing of the prompt is penalized."""
    llm = LLM(model.path, enable_prompt_embeds=True, num_gpu_blocks_override=64)
    given = {"prompt_embeds": embedded(model, [9, 9, 9, 9]), "prompt": "shown"}
    both = [
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, **more)
        for more in ({"presence_penalty": 0.7}, {"presence_penalty": 0.7, "repetition_penalty": 1.0})
    ]
    first, second = generate(llm, [given, [9, 9, 9, 9]], both)
    assert answers([first]) == answers([second])
    strong = SamplingParams(temperature=0, max_tokens=1, repetition_penalty=1e4)
    plain = SamplingParams(temperature=0, max_tokens=1)
    assert answers(generate(llm, [given], strong)) == answers(generate(llm, [given], plain))
    assert first.prompt == "shown"


def test_adapters(model, tmp_path):
    """What they change in the layers holds for rows too; a row stays what it is."""
    settings = {"enable_prompt_embeds": True, "enable_lora": True, "num_gpu_blocks_override": 128, "debug": True}
    llm = LLM(model.path, **settings)
    wanted = [LoRARequest("a", lora_path=str(adapter_files.plain(tmp_path / "a", 1))), None]
    wanted.append(LoRARequest("b", lora_path=str(adapter_files.dora(tmp_path / "b", 2))))
    batch = [ids for ids in prompts()[:4] for _ in wanted]
    adapters = wanted * 4
    given = [params(i) for i in (0, 1, 2) for _ in range(4)]

    def run(asked: list[Any]) -> list[Any]:
        return answers(llm.generate(asked, given, lora_request=adapters, use_tqdm=False))

    expected = run(batch)
    assert run([{"prompt_embeds": embedded(model, ids)} for ids in batch]) == expected
    assert run([{"prompt_embeds": embedded(model, ids)} for ids in batch]) == expected, "from the prefix cache"
    assert expected[0] != expected[1]


def test_shapes_and_stops(model):
    llm = LLM(model.path, enable_prompt_embeds=True, num_gpu_blocks_override=64)
    shape = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["star", "circle"]))
    outputs = generate(llm, [[7, 8, 9], {"prompt_embeds": embedded(model, [7, 8, 9])}], [shape] * 2)
    assert outputs[0].outputs[0].text == outputs[1].outputs[0].text in ("star", "circle")


# Gemma 2 multiplies a token's row where it is looked up, and Granite whatever is given.
@pytest.mark.parametrize(
    "architecture", ["Gemma2ForCausalLM", "GraniteForCausalLM", "BloomForCausalLM", "GPT2LMHeadModel"]
)
def test_greedy_answers_are_transformers_own(tmp_path, architecture):
    variant = next(iter(rows.entry(architecture)[2]))
    oracle = tiny.make(architecture, variant)
    path = tiny.save(oracle, tmp_path)
    llm = engine(path, enable_prompt_embeds=True)
    rng = torch.Generator().manual_seed(2)
    table = oracle.get_input_embeddings()
    with torch.inference_mode():
        scale = table(torch.arange(50)).std()
        given = [torch.randn(length, table.weight.shape[1], generator=rng) * scale for length in (1, 5, 13, 30)]
        wanted = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        outputs = llm.generate([{"prompt_embeds": one} for one in given], wanted, use_tqdm=False)
        for one, output in zip(given, outputs, strict=True):
            expected = oracle.generate(
                inputs_embeds=one[None], max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=-1
            )
            assert output.outputs[0].token_ids == expected[0].tolist()
        ids = tiny.token_ids(20)
        (tokens,), (rows_,) = (
            llm.generate([one], wanted, use_tqdm=False) for one in (ids, {"prompt_embeds": table(torch.tensor(ids))})
        )
    assert tokens.outputs[0].token_ids == rows_.outputs[0].token_ids


BAD = {
    "width": (torch.zeros(9, 63), "must be a dense float tensor [tokens, 64], not [9, 63]"),
    "no tokens": (torch.zeros(0, 64), "not [0, 64]"),
    "one dimension": (torch.zeros(64), "not [64]"),
    "several": (torch.zeros(2, 3, 64), "not [2, 3, 64]"),
    "whole numbers": (torch.zeros(9, 64, dtype=torch.int64), "not torch.int64"),
    "sparse": (torch.zeros(9, 64).to_sparse(), "torch.sparse_coo"),
    "NaN": (torch.full((9, 64), torch.nan), "infinite or no numbers"),
    "infinite in the model's dtype": (torch.full((9, 64), 1e300, dtype=torch.float64), "infinite or no numbers"),
    "a list": ([[0.0] * 64], "not list"),
    "nested": (torch.nested.nested_tensor([torch.zeros(64)] * 2), "cannot be read"),
    "without values": (torch.zeros(9, 64, device="meta"), "cannot be read"),
    "too long": (torch.zeros(1, 64).expand(100_000, 64), "512"),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tmp_path_factory.mktemp("served")
    make_llama(path, max_position_embeddings=512)
    return LLM(str(path), enable_prompt_embeds=True, num_gpu_blocks_override=64).llm_engine


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(served: LLMEngine, name):
    tensor, message = BAD[name]
    with pytest.raises(RequestError) as error:
        served.add_request("a", {"prompt_embeds": tensor}, SamplingParams(max_tokens=1))
    assert message in str(error.value) and "request a" in str(error.value)
    assert not served.has_unfinished_requests()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"multi_modal_data": {"image": None}}, "multi_modal_data"),
        ({"prompt": [1]}, "'prompt' (the text to show)"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_cannot_stand_beside_rows(served: LLMEngine, more, message):
    with pytest.raises(RequestError, match="(?s)" + message.replace("(", r"\(").replace(")", r"\)")):
        served.add_request("a", {"prompt_embeds": torch.zeros(2, 64), **more})


def test_prompt_logprobs_are_refused(served: LLMEngine):
    with pytest.raises(RequestError, match="prompt_logprobs: a prompt of embeddings has no tokens"):
        served.add_request("a", {"prompt_embeds": torch.zeros(2, 64)}, SamplingParams(prompt_logprobs=0))


def test_rows_are_refused_unless_they_are_to_be_served(tiny_llm):
    with pytest.raises(RequestError, match="enable_prompt_embeds"):
        tiny_llm.generate({"prompt_embeds": torch.zeros(2, 64)}, use_tqdm=False)


def test_rows_need_room(tiny_path):
    with pytest.raises(ValueError, match=r"media_cache_bytes=30,000: is too little for enable_prompt_embeds"):
        LLM(str(tiny_path), enable_prompt_embeds=True, media_cache_bytes=30_000, num_gpu_blocks_override=16)


def test_rows_may_be_changed_once_they_were_given(served: LLMEngine):
    given = torch.zeros(2, 64)
    greedy = SamplingParams(temperature=0, max_tokens=4)
    served.add_request("a", {"prompt_embeds": given}, greedy)
    expected = given.clone()
    given.fill_(torch.nan)
    served.add_request("b", {"prompt_embeds": expected}, greedy)
    answered = {}
    while served.has_unfinished_requests():
        answered |= {output.request_id: output.outputs[0].token_ids for output in served.step()}
    assert answered["a"] == answered["b"]
