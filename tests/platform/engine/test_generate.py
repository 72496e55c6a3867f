"""What callers see: forms of prompts, n > 1, stops, streams, metrics, faults."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.config import CacheConfig, EngineConfig, ModelConfig
from quire.platform.engine.llm_engine import LLMEngine
from quire.platform.sampling.params import RequestOutputKind
from quire.platform.sampling.results import Failure

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


@pytest.fixture(autouse=True)
def nothing_leaks(tiny_llm):
    yield
    assert not tiny_llm.llm_engine.has_unfinished_requests()
    assert tiny_llm.llm_engine.pool.num_owned == 0
    tiny_llm.llm_engine.check_integrity()


def generate(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def drain(engine: LLMEngine) -> dict[str, list]:
    outputs: dict[str, list] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_all_forms_of_a_prompt_mean_the_same(tiny_llm):
    text = "The red circle"
    ids = tiny_llm.get_tokenizer()(text).input_ids
    forms = [
        text,
        ids,
        tuple(ids),
        {"prompt": text},
        {"prompt_token_ids": ids},
        {"prompt": text, "prompt_token_ids": ids},
    ]
    outputs = generate(tiny_llm, forms)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert [o.prompt for o in outputs] == [text, None, None, text, None, text]
    assert all(o.prompt_token_ids == ids and o.finished for o in outputs)
    assert generate(tiny_llm, text)[0].outputs[0].text == outputs[0].outputs[0].text
    assert generate(tiny_llm, ids)[0].outputs[0].text == outputs[0].outputs[0].text
    assert generate(tiny_llm, []) == []


def test_text_is_that_of_the_tokenizer(tiny_llm):
    output = generate(tiny_llm, "Once upon")[0]
    assert output.outputs[0].text == tiny_llm.get_tokenizer().decode(
        output.outputs[0].token_ids, skip_special_tokens=True
    )


def test_parameters_for_each_prompt(tiny_llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = generate(tiny_llm, [[5], [6], [7]], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5, 3]
    assert all(o.outputs[0].finish_reason == "length" for o in outputs)


def test_n_sequences_share_the_prompt_and_differ(tiny_llm):
    prompt = list(range(3, 40))
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True, logprobs=1)
    output = generate(tiny_llm, [prompt], params)[0]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    assert all(len(c.token_ids) == 12 for c in output.outputs)
    again = generate(tiny_llm, [prompt, [5, 6]], params)[0]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]
    one = generate(tiny_llm, [prompt], dataclasses.replace(params, n=1))[0]
    assert one.outputs[0].token_ids == output.outputs[0].token_ids


def test_greedy_sequences_are_equal_and_computed_once(tiny_llm):
    """With logprobs, penalties and stops; as one alone, in one piece and in a stream."""
    prompt = list(range(3, 40))
    alone = dataclasses.replace(GREEDY, logprobs=2, repetition_penalty=1.3, max_tokens=12)
    want = generate(tiny_llm, [prompt], alone)[0].outputs[0]
    params = dataclasses.replace(alone, n=3)
    before = tiny_llm.llm_engine.scheduler.generated_tokens
    output, other = generate(tiny_llm, [prompt, [5, 6]], params)
    assert [dataclasses.replace(c, index=0) for c in output.outputs] == [want] * 3
    assert [c.index for c in output.outputs] == [c.index for c in other.outputs] == [0, 1, 2]
    assert tiny_llm.llm_engine.scheduler.generated_tokens == before + 2 * 12
    assert output.outputs[0].token_ids is not output.outputs[1].token_ids
    engine = tiny_llm.llm_engine
    engine.add_request("a", prompt, dataclasses.replace(params, output_kind=RequestOutputKind.DELTA))
    parts = drain(engine)["a"]
    for index in range(3):
        assert [t for part in parts for t in part.outputs[index].token_ids] == want.token_ids
        assert "".join(part.outputs[index].text for part in parts) == want.text
        assert [part.outputs[index].finish_reason for part in parts] == [None] * 11 + ["length"]


def test_forks_share_blocks_until_they_write(tiny_path):
    llm = LLM(str(tiny_path), block_size=8, num_gpu_blocks_override=32, debug=True)
    engine = llm.llm_engine
    engine.add_request("a", list(range(3, 46)), SamplingParams(n=4, seed=1, max_tokens=20, ignore_eos=True))
    engine.step()
    # 43 tokens are 6 blocks, which all four share before any has written its own token
    assert engine.pool.num_owned == 6
    engine.step()
    assert engine.pool.num_owned == 6 + 3, "the three forks copy the block they write to, and no other"
    drain(engine)
    assert engine.pool.num_owned == 0


def test_unseeded_requests_differ_and_a_seeded_engine_repeats(tiny_path):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    first, second = (generate(LLM(str(tiny_path), seed=5), [[5, 6], [5, 6]], params) for _ in range(2))
    tokens = [[o.outputs[0].token_ids for o in outputs] for outputs in (first, second)]
    assert tokens[0] == tokens[1] and tokens[0][0] != tokens[0][1]


def test_stop_string_ends_and_cuts(tiny_llm):
    full = generate(tiny_llm, "Once upon")[0].outputs[0]
    stop = full.text[4:6]
    cut = generate(tiny_llm, "Once upon", dataclasses.replace(GREEDY, stop=stop))[0].outputs[0]
    assert cut.finish_reason == "stop" and cut.stop_reason == stop
    assert cut.text == full.text[: full.text.index(stop)]
    kept = generate(tiny_llm, "Once upon", dataclasses.replace(GREEDY, stop=[stop], include_stop_str_in_output=True))
    assert kept[0].outputs[0].text == full.text[: full.text.index(stop) + len(stop)]
    assert len(cut.token_ids) < len(full.token_ids)


def test_stop_token_ends_and_is_named(tiny_llm):
    full = generate(tiny_llm, "Once upon")[0].outputs[0]
    token = full.token_ids[3]
    first = full.token_ids.index(token)
    cut = generate(tiny_llm, "Once upon", dataclasses.replace(GREEDY, stop_token_ids=[token]))[0].outputs[0]
    assert cut.token_ids == full.token_ids[: first + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", token)
    assert cut.text == tiny_llm.get_tokenizer().decode(full.token_ids[:first], skip_special_tokens=True)
    later = dataclasses.replace(GREEDY, stop_token_ids=[token], min_tokens=7)
    assert len(generate(tiny_llm, "Once upon", later)[0].outputs[0].token_ids) >= 7


def test_end_token_ends_unless_ignored(tiny_llm):
    force = {"temperature": 0, "logit_bias": {2: 100.0}, "max_tokens": 4}
    ended = generate(tiny_llm, [[5, 6]], SamplingParams(**force))[0].outputs[0]
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == ([2], "", "stop", None)
    ignored = generate(tiny_llm, [[5, 6]], SamplingParams(**force, ignore_eos=True))[0].outputs[0]
    assert ignored.token_ids == [2, 2, 2, 2] and ignored.finish_reason == "length"
    waited = generate(tiny_llm, [[5, 6]], SamplingParams(**force, min_tokens=2))[0].outputs[0]
    assert len(waited.token_ids) == 3 and waited.token_ids[-1] == 2 and 2 not in waited.token_ids[:2]


def test_logprobs_name_the_token_and_its_rivals(tiny_llm):
    output = generate(tiny_llm, [[5, 6, 7]], dataclasses.replace(GREEDY, logprobs=3, prompt_logprobs=2))[0]
    completion = output.outputs[0]
    assert len(completion.logprobs) == 10
    for token, known in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(known) == 3 and known[token].rank == 1
        assert known[token].decoded_token is not None
    total = sum(known[token].logprob for token, known in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 3
    assert all(token in known for token, known in zip([6, 7], output.prompt_logprobs[1:], strict=True))
    plain = generate(tiny_llm, [[5, 6, 7]])[0]
    assert plain.outputs[0].logprobs is None and plain.outputs[0].cumulative_logprob is None
    assert plain.prompt_logprobs is None and plain.outputs[0].token_ids == completion.token_ids


def test_metrics_tell_the_requests_story(tiny_llm):
    metrics = generate(tiny_llm, [[9] * 20])[0].metrics
    times = [
        metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time,
        metrics.finished_time,
    ]  # fmt: skip
    assert times == sorted(times)
    assert metrics.time_in_queue == metrics.first_scheduled_time - metrics.arrival_time
    assert metrics.num_preemptions == 0
    assert generate(tiny_llm, [[9] * 20])[0].num_cached_tokens == 16


def test_salts_share_no_blocks(tiny_llm):
    ids = [8] * 30
    cached = [
        generate(tiny_llm, {"prompt_token_ids": ids, "cache_salt": salt})[0].num_cached_tokens
        for salt in ("a", "b", "a")
    ]
    assert cached == [0, 0, 24]


def test_streamed_pieces_add_up(tiny_llm):
    engine = tiny_llm.llm_engine
    whole = generate(tiny_llm, ["Once upon"], dataclasses.replace(GREEDY, logprobs=1))[0].outputs[0]
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        engine.add_request("s", "Once upon", dataclasses.replace(GREEDY, logprobs=1, output_kind=kind))
        outputs = drain(engine)["s"]
        assert len(outputs) == 10 and [o.finished for o in outputs] == [False] * 9 + [True]
        last = outputs[-1].outputs[0]
        if kind is RequestOutputKind.DELTA:
            assert "".join(o.outputs[0].text for o in outputs) == whole.text
            assert [t for o in outputs for t in o.outputs[0].token_ids] == whole.token_ids
            assert sum(len(o.outputs[0].logprobs) for o in outputs) == 10
        else:
            assert (last.text, last.token_ids) == (whole.text, whole.token_ids)


def test_without_detokenizing(tiny_llm):
    output = generate(tiny_llm, "Once upon", dataclasses.replace(GREEDY, detokenize=False))[0].outputs[0]
    assert output.text == "" and len(output.token_ids) == 10


def test_chat_uses_the_given_template(tiny_llm):
    messages = [{"role": "user", "content": "Hello"}]
    output = tiny_llm.chat(messages, GREEDY, chat_template=TEMPLATE, use_tqdm=False)[0]
    expected = tiny_llm.get_tokenizer()("<s>user: Hello<s>", add_special_tokens=False).input_ids
    assert output.prompt_token_ids == expected
    two = tiny_llm.chat([messages, messages], GREEDY, chat_template=TEMPLATE, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in two] == [output.outputs[0].token_ids] * 2


def test_abort_frees_at_once_and_says_nothing(tiny_llm):
    engine = tiny_llm.llm_engine
    for name in "abc":
        engine.add_request(name, [5] * 30, SamplingParams(n=2, max_tokens=20, ignore_eos=True))
    engine.step()
    engine.abort_request(["a", "nobody"])
    outputs = drain(engine)
    assert set(outputs) == {"b", "c"}


def test_an_id_in_use_is_refused(tiny_llm):
    engine = tiny_llm.llm_engine
    engine.add_request("a", [5], GREEDY)
    with pytest.raises(ValueError, match="unfinished request of this id"):
        engine.add_request("a", [5], GREEDY)
    engine.abort_request("a")
    engine.add_request("a", [5], GREEDY)
    drain(engine)


@pytest.mark.parametrize("where", ["embedding", "nan"])
def test_a_failing_request_fails_alone(tiny_path, where, monkeypatch):
    model = ModelConfig(str(tiny_path), enforce_eager=True)  # embed is replaced below
    engine = LLMEngine(EngineConfig(model, CacheConfig(num_blocks=64), debug=True))
    good = [[5, 6, 7], [8, 9]]
    expected = {}
    for place, ids in enumerate(good):
        engine.add_request(str(place), ids, GREEDY)
        expected |= {k: v[-1].outputs[0].token_ids for k, v in drain(engine).items()}
    model, embed = engine.executor.runner.model, engine.executor.runner.model.embed

    def faulty(input_ids):
        embeddings = embed(input_ids)
        if (input_ids == 383).any():
            if where == "embedding":
                raise RuntimeError("broken row")
            embeddings[input_ids == 383] = float("nan")
        return embeddings

    monkeypatch.setattr(model, "embed", faulty)
    engine.add_request("bad", [383], GREEDY)
    for place, ids in enumerate(good):
        engine.add_request(str(place), ids, GREEDY)
    outputs = drain(engine)
    bad = outputs["bad"][-1]
    assert bad.finished and bad.outputs[0].finish_reason == "error"
    assert ("broken row" if where == "embedding" else "NaN") in bad.outputs[0].stop_reason
    assert {k: v[-1].outputs[0].token_ids for k, v in outputs.items() if k != "bad"} == expected
    engine.check_integrity()
    assert engine.pool.num_owned == 0


def test_beams_in_a_crowd_and_under_pressure(tiny_path):
    calm = LLM(str(tiny_path), debug=True)
    tight = LLM(str(tiny_path), num_gpu_blocks_override=10, max_num_seqs=2, max_num_batched_tokens=7, debug=True)
    prompts = [[5 + i] * (3 + 4 * i) for i in range(5)]
    params = BeamSearchParams(beam_width=3, max_tokens=10)
    expected = [calm.beam_search([p], params)[0] for p in prompts]
    got = tight.beam_search(prompts, params)
    assert [[b.tokens for b in o.sequences] for o in got] == [[b.tokens for b in o.sequences] for o in expected]
    assert tight.llm_engine.scheduler.num_preemptions > 0
    assert tight.llm_engine.pool.num_owned == 0
    for output in got:
        scores = [b.cum_logprob for b in output.sequences]
        assert len(scores) == 3 and all(b.text for b in output.sequences)


def test_without_a_tokenizer(tiny_path):
    llm = LLM(str(tiny_path), skip_tokenizer_init=True)
    assert generate(llm, [[5, 6]])[0].outputs[0].text == ""
    with pytest.raises(ValueError, match="must be token ids, not text"):
        generate(llm, "text")
    with pytest.raises(ValueError, match="stop and bad_words"):
        generate(llm, [[5]], SamplingParams(stop="x"))


def test_default_sampling_params_come_from_the_checkpoint(tmp_path, tiny_path):
    import shutil

    shutil.copytree(tiny_path, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 7, "max_new_tokens": 9}')
    params = LLM(str(tmp_path / "m")).get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 7, 9)


def test_prompt_logprobs_are_streamed_once(tiny_llm):
    params = dataclasses.replace(GREEDY, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA)
    tiny_llm.llm_engine.add_request("s", [5, 6, 7], params)
    outputs = drain(tiny_llm.llm_engine)["s"]
    assert [o.prompt_logprobs is None for o in outputs] == [False] + [True] * 9
    assert len(outputs[0].prompt_logprobs) == 3


def test_a_beam_without_a_result_ends_the_search(tiny_llm, monkeypatch):
    engine = tiny_llm.llm_engine
    execute = engine.executor.runner.execute

    def faulty(plan):
        execution = execute(plan)
        if len(plan.chunks) == 3:  # all three beams run: the last one fails
            result = execution.result()
            broken = result.sampled[2][0]._replace(token_id=-1, logprobs=None, error=Failure("broken", False))
            result = dataclasses.replace(result, sampled=[*result.sampled[:2], [broken]])
            return SimpleNamespace(result=lambda: result, known_there=False)
        return execution

    monkeypatch.setattr(engine.executor.runner, "execute", faulty)
    output = tiny_llm.beam_search([[5, 6]], BeamSearchParams(beam_width=3, max_tokens=8))[0]
    assert output.error == "broken"


def test_beams_end_with_the_end_token(tmp_path):
    from tests.platform.conftest import make_llama

    make_llama(tmp_path, initializer_range=0.02, vocab_size=320)  # nearly uniform: end tokens are soon among the best
    llm = LLM(str(tmp_path), debug=True)
    for include in (False, True):
        params = BeamSearchParams(beam_width=160, max_tokens=3, include_stop_str_in_output=include)
        beams = llm.beam_search([[5, 6]], params)[0].sequences
        ended = [b for b in beams if b.finish_reason == "stop"]
        assert ended and all(b.stop_reason == 2 for b in ended)
        assert all((b.tokens[-1] == 2) is include for b in ended)
        assert all(b.stop_reason is None and b.finish_reason == "length" for b in beams if b not in ended)


def test_an_id_is_free_as_soon_as_its_request_has_failed(tiny_llm):
    """Even before that is said: the new request keeps its place when the old one's last output is made."""
    engine = tiny_llm.llm_engine
    expected = generate(tiny_llm, [[7, 8]], GREEDY)[0].outputs[0].token_ids
    engine.add_request("same", [5, 6], GREEDY)
    engine.step()
    engine.core.fail(engine.core.requests["same"], RuntimeError("broken"))  # as a step does that is then interrupted
    engine.add_request("same", [7, 8], GREEDY)
    outputs = drain(engine)["same"]
    assert [output.failure is not None for output in outputs].count(True) == 1
    assert list(outputs[-1].outputs[0].token_ids) == list(expected) and outputs[-1].failure is None
