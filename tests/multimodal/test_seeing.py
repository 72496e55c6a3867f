"""Promise 1 where tokens see later ones, and where features have levels: answers are bitwise those of a request that is
alone in a fresh engine, however its prompt is cut, found, computed again or swapped, and in whatever process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import LLM
from quire.errors import RequestError, UnsupportedModelError
from quire.platform.execution import host_cache, model_runner, worker
from tests.multimodal import seeing_models
from tests.multimodal.open_engine import ask, ask_at_once, error_of, greedy, nothing_left, one, open_llm, prompt, tokens
from tests.multimodal.test_image_promise import answers
from tests.multimodal.test_image_promise import requests as mixed
from tests.multimodal.tiny_vision import IMAGE, picture
from tests.platform.engine.test_ahead import begin_there


def requests(kind: str) -> list[tuple[dict[str, Any], Any]]:
    """Those of the tests of images; where all of a prompt is seen, those with images."""
    return [(given, params) for given, params in mixed() if kind == "seeing" or "multi_modal_data" in given]


LONGEST = {"seeing": 5, "whole": 60}  # ranges of tokens that see one another


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The folder of a checkpoint of a kind."""
    site = seeing_models.install(tmp_path_factory.mktemp("site"))
    sys.path.insert(0, site)  # a worker's process has the path too
    made: dict[str, str] = {}

    def path(kind: str) -> str:
        if kind not in made:
            made[kind] = str(seeing_models.make(tmp_path_factory.mktemp(kind), kind))
        return made[kind]

    yield path
    sys.path.remove(site)


@pytest.fixture(scope="module")
def alone(seeing: Any) -> Callable[[str], list[tuple]]:
    known: dict[str, list[tuple]] = {}

    def of(kind: str) -> list[tuple]:
        if kind not in known:
            llm = open_llm(seeing(kind), enable_prefix_caching=False)
            known[kind] = [answers(llm, [each])[0] for each in requests(kind)]
        return known[kind]

    return of


@pytest.mark.parametrize(
    ("kind", "budget", "size", "cached"),
    [
        ("seeing", 5, 4, True),
        ("seeing", 7, 8, False),
        ("seeing", 2048, 4, True),
        ("whole", 61, 4, True),
        pytest.param("seeing", 13, 3, True, marks=pytest.mark.slow),
        pytest.param("whole", 2048, 8, False, marks=pytest.mark.slow),
    ],
)
def test_a_crowd_and_any_chunking(seeing, alone, kind, budget, size, cached):
    more = {"max_num_batched_tokens": budget, "block_size": size, "enable_prefix_caching": cached}
    llm = open_llm(seeing(kind), num_gpu_blocks_override=400, **more)
    assert answers(llm, requests(kind)) == alone(kind)
    assert answers(llm, requests(kind)[::-1]) == alone(kind)[::-1]
    kv = llm.llm_engine.scheduler.kv
    # A prompt's last token is computed anew, and all that it sees with it.
    assert (kv.prefix_hits > 0) is (cached and kind == "seeing")
    assert kind == "whole" or len(kv.windows) > 1, "there are no groups with a window"


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("kind", ["seeing", "whole"])
def test_preemption(seeing, alone, kind, swapped, monkeypatch):
    if swapped:
        monkeypatch.setattr(worker, "count_swap_blocks", lambda *_: 200)
        monkeypatch.setattr(host_cache, "_PIECE_BYTES", 30_000)
    llm = open_llm(
        seeing(kind), max_num_batched_tokens=LONGEST[kind] + 12, block_size=4, num_gpu_blocks_override=22,
        enable_prefix_caching=not swapped,
    )  # fmt: skip
    assert answers(llm, requests(kind) * 3, ask_at_once) == alone(kind) * 3
    scheduler = llm.llm_engine.scheduler
    assert scheduler.num_preemptions > 0 and (scheduler.num_swaps > 0) is swapped


@pytest.mark.parametrize("kind", ["seeing", "whole"])
def test_steps_in_flight(seeing, kind, monkeypatch):
    """As on a GPU, a step is planned and started while the one before it runs."""
    given = [each for each, _ in requests(kind)] * 2
    calm = open_llm(seeing(kind), enable_prefix_caching=False)
    expected = [tokens(calm, each)[0] for each in given]
    monkeypatch.setattr(model_runner, "begin", begin_there)
    llm = open_llm(
        seeing(kind), max_num_batched_tokens=LONGEST[kind] + 12, block_size=4, num_gpu_blocks_override=22,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine, ahead = llm.llm_engine, []
    early = engine.scheduler.advance_early
    monkeypatch.setattr(engine.scheduler, "advance_early", lambda plan: (ahead.append(plan), early(plan)))
    engine.executor.runner.looks_ahead = True
    assert tokens(llm, *given, ask=ask_at_once) == expected
    assert len(ahead) > 10 and (engine.scheduler.num_preemptions > 0 or kind == "seeing")
    nothing_left(llm)


@pytest.mark.parametrize("kind", ["seeing", pytest.param("whole", marks=pytest.mark.slow)])
def test_in_another_process(seeing, alone, kind):
    llm = LLM(
        seeing(kind), executor="process", skip_tokenizer_init=True, num_gpu_blocks_override=200,
        max_num_batched_tokens=LONGEST[kind] + 2,
    )  # fmt: skip
    try:
        given = requests(kind)
        outputs = ask(llm, [prompt for prompt, _ in given], [params for _, params in given])
        found = [([(c.token_ids, c.logprobs) for c in output.outputs], output.prompt_logprobs) for output in outputs]
        assert found == alone(kind)
    finally:
        llm.llm_engine.close()


def test_later_tokens_and_levels_are_seen(seeing, monkeypatch):
    """Else the tests above would show nothing."""
    given = [one(picture(number, (24, 24))) for number in range(4)]
    before = tokens(open_llm(seeing("seeing")), *given)
    with monkeypatch.context() as patch:
        patch.setattr(seeing_models, "SPANS", ())
        assert tokens(open_llm(seeing("seeing")), *given) != before
    with monkeypatch.context() as patch:
        encode = seeing_models.SeeingLlava.encode
        patch.setattr(seeing_models.SeeingLlava, "encode", lambda model, inputs: encode(model, inputs)[:, :32])
        patch.setattr(seeing_models.SeeingLlava, "feature_levels", 0)
        assert tokens(open_llm(seeing("seeing")), *given) != before
    causal = tokens(open_llm(seeing("whole")), *given)
    monkeypatch.setattr(seeing_models.WholeLlava, "prompt_sees", False)
    assert tokens(open_llm(seeing("whole")), *given) != causal


def test_a_prefix_of_another_prompt_is_none(seeing):
    """Where all of a prompt is seen, its first tokens differ with its last."""
    llm, image = open_llm(seeing("whole"), block_size=2), picture(0, (24, 24))
    fresh = [prompt([5, 6, IMAGE, 7, 8, last], [image]) for last in (9, 10)]
    expected = [tokens(open_llm(seeing("whole"), enable_prefix_caching=False), each)[0] for each in fresh]
    assert [tokens(llm, each)[0] for each in fresh] == expected
    assert llm.llm_engine.scheduler.kv.prefix_hits == 0
    nothing_left(llm)


@pytest.mark.parametrize(
    ("kind", "settings", "most"),
    [("seeing", {"max_num_batched_tokens": 4}, 4), ("whole", {"max_num_batched_tokens": 13}, 13)],
)
def test_what_no_step_can_compute_is_refused(seeing, kind, settings, most):
    llm = open_llm(seeing(kind), **settings)
    whole = {"seeing": 5, "whole": 14}[kind]
    refused, *answered = ask(llm, [one(picture(0, (24, 24)), after=(7, 8, 9)), *[prompt([5, 6])] * (kind == "seeing")])
    assert f"{whole} of its tokens see one another" in error_of(refused) and f"takes {most} here" in error_of(refused)
    assert all(len(output.outputs[0].token_ids) == 6 for output in answered)
    if kind == "whole":
        with pytest.raises(RequestError, match="with an image among them: give one"):
            llm.generate([prompt([5, 6])], greedy(), use_tqdm=False)
    nothing_left(llm)


def test_a_window_that_is_shorter_than_a_range(seeing, tmp_path):
    """What it leaves out, transformers would let the tokens see."""
    path = seeing_models.make(tmp_path / "model", "seeing")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["sliding_window"] = 4
    (path / "config.json").write_text(json.dumps(config))
    llm = open_llm(str(path))
    assert "takes 4 here" in error_of(ask(llm, one(picture(0, (24, 24))))[0])


def test_levels_that_nobody_would_add(seeing, tmp_path, monkeypatch):
    monkeypatch.setattr(seeing_models.SeeingLlava, "feature_levels", 4)
    with pytest.raises(UnsupportedModelError, match="4 levels, and text_config has fewer layers"):
        open_llm(seeing("seeing"))
    path = seeing_models.make(tmp_path / "model", "seeing", "opt")
    with pytest.raises(UnsupportedModelError, match="OPTForCausalLM adds nothing behind its layers"):
        open_llm(str(path))


def test_images_that_must_be_seen_at_once_and_do_not_fit(seeing):
    image = picture(0, (24, 24))
    llm = open_llm(seeing("whole"), media_cache_bytes=10 * 32 * 4 * 4 // 3)
    given = [one(image), prompt([5, IMAGE, IMAGE], [image, picture(1, (24, 24))])]
    answered, refused = ask(llm, given)
    assert len(answered.outputs[0].token_ids) == 6
    assert "which this model must see at once" in error_of(refused)
    nothing_left(llm)
