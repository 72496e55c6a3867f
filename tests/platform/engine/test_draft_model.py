"""A draft model changes how long an answer takes, and no bit of it, whatever it proposes."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.demo import adapter_path, picture_path
from quire.errors import QuireError
from quire.platform.execution import draft_runner
from quire.platform.scheduling.drafting import Drafting
from tests.models.tiny import build
from tests.platform.conftest import make_llama
from tests.platform.engine.test_promise import params, prompts
from tests.platform.engine.test_speculation import KINDS, Free, of_tokens, told, wanted_params

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def other_path(tmp_path_factory):
    """A smaller model of the same vocabulary, which is hardly ever right."""
    path = tmp_path_factory.mktemp("other")
    make_llama(path, hidden_size=32, num_hidden_layers=1, num_key_value_heads=1, num_attention_heads=2)
    return str(path)


def drafted(target: Any, draft: Any, most: int = 4, **more: Any) -> tuple[LLM, Drafting]:
    """An engine in which as many drafts are made as there can be, whatever they cost."""
    settings = {"model": str(draft), "num_speculative_tokens": most}
    llm = LLM(*([str(target)] if target else []), speculative_config=settings, debug=True, **more)
    drafting = llm.llm_engine.scheduler.drafting
    assert drafting is not None
    drafting._cost = Free()
    return llm, drafting


@pytest.mark.parametrize("sampled", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.7}])
def test_a_model_is_right_about_itself(tiny_path, sampled):
    """Sampled tokens too, as proposals are drawn with the numbers of the real draws; and behind a prefix hit."""
    batch = of_tokens(prompts()[:4])
    wanted = [SamplingParams(max_tokens=40, ignore_eos=True, seed=i, **sampled) for i in range(4)]
    expected = told(LLM(str(tiny_path)), batch, wanted)
    llm, drafting = drafted(tiny_path, tiny_path)
    for round_number in (1, 2):
        assert told(llm, batch, wanted) == expected
        assert drafting.num_draft_tokens > 80 * round_number
        assert drafting.num_accepted_tokens > 0.97 * drafting.num_draft_tokens
    counts = {one.name: one.value for one in llm.get_metrics() if one.name.startswith("vllm:spec_decode")}
    assert counts["vllm:spec_decode_num_accepted_tokens"] == drafting.num_accepted_tokens


CUTS: list[dict[str, Any]] = [
    {}, {"max_num_batched_tokens": 9}, {"num_gpu_blocks_override": 24}, {"max_num_seqs": 1, "block_size": 1},
    {"enforce_eager": True, "kv_cache_dtype": "int8"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("itself", "more"),
    [
        pytest.param(itself, more, marks=[pytest.mark.slow] if (place + itself) % 2 else [])
        for place, more in enumerate(CUTS)
        for itself in (True, False)
    ],
)
def test_any_parameters_and_any_cut(tiny_path, other_path, more, itself):
    batch = of_tokens(prompts()[:22])
    wanted = [wanted_params(i % len(KINDS), i, 14, (None, 0, 2)[i % 3], i % 4 == 3) for i in range(22)]
    same = {name: value for name, value in more.items() if name == "kv_cache_dtype"}
    expected = told(LLM(str(tiny_path), **same), batch, wanted)
    llm, drafting = drafted(tiny_path, tiny_path if itself else other_path, **more)
    for _ in range(2):
        assert told(llm, batch, wanted) == expected
    assert drafting.num_draft_tokens > 0
    if itself:
        assert drafting.num_accepted_tokens > 0.5 * drafting.num_draft_tokens
    if "num_gpu_blocks_override" in more:
        assert llm.llm_engine.scheduler.num_preemptions > 0


def test_keys_that_are_missing_are_made_up_for(tiny_path, monkeypatch):
    """Requests that wanted no drafts have left blocks without the draft model's keys, which later ones find."""
    monkeypatch.setattr(draft_runner, "_MOST_TOKENS", 7)
    batch = of_tokens(prompts()[:3])
    wanted = [SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)] * 3
    expected = told(LLM(str(tiny_path)), batch, wanted)
    llm, drafting = drafted(tiny_path, tiny_path)
    llm.llm_engine.scheduler.drafting = None
    first = told(llm, batch, wanted)
    assert first == expected
    llm.llm_engine.scheduler.drafting = drafting
    longer = of_tokens([*prompt, *completions[0][1]] for prompt, _, completions in first)
    expected = told(LLM(str(tiny_path)), longer, wanted)
    assert told(llm, longer, wanted) == expected
    assert drafting.num_accepted_tokens > 0.97 * drafting.num_draft_tokens > 50


def test_adapters_and_images(tmp_path):
    """Verified with their own; adapters are drafted without, and requests with images not at all."""
    from PIL import Image

    plain = LLM(enable_lora=True, max_model_len=512)
    make_llama(tmp_path, vocab_size=plain.llm_engine.limits.vocab_size, max_position_embeddings=512)
    seen = {"prompt": "<|image|>\nWhat do you see?", "multi_modal_data": {"image": Image.open(picture_path())}}
    batch: list[Any] = ["Once upon a time", "One day, a red circle", "Once upon a time", seen, seen]
    french, shout = LoRARequest("french", 1, adapter_path("french")), LoRARequest("shout", 2, adapter_path("shout"))
    adapters = [None, french, shout, None, french]
    wanted = [SamplingParams(temperature=0.5 * (i % 2), seed=i, max_tokens=20, logprobs=1) for i in range(5)]
    expected = told(plain, batch, wanted, adapters)
    llm, drafting = drafted(None, tmp_path, enable_lora=True, max_model_len=512)
    for _ in range(2):
        assert told(llm, batch, wanted, adapters) == expected
    assert drafting.num_drafts > 0


def test_in_another_process_and_after_sleep(tiny_path):
    batch, wanted = of_tokens(prompts()[:6]), [params(i) for i in range(6)]
    expected = told(LLM(str(tiny_path)), batch, wanted)
    for executor in ("in_process", "process"):
        llm, drafting = drafted(tiny_path, tiny_path, executor=executor)
        assert told(llm, batch, wanted) == expected
        llm.sleep()
        llm.wake_up()
        before = drafting.num_accepted_tokens
        assert told(llm, batch, wanted) == expected
        assert drafting.num_accepted_tokens > before > 0
        llm.llm_engine.close()


def test_what_is_refused(tiny_path, tmp_path):
    def refused(target: Any, draft: Any, why: str, **more: Any) -> None:
        with pytest.raises(QuireError, match=why):
            LLM(str(target), speculative_config={"model": str(draft)}, skip_tokenizer_init=True, **more)

    make_llama(tmp_path / "words", vocab_size=400)
    make_llama(tmp_path / "short", max_position_embeddings=128)
    refused(tiny_path, tmp_path / "words", "400 tokens and the model 384")
    refused(tiny_path, tmp_path / "short", "give max_model_len=128")
    LLM(str(tiny_path), speculative_config={"model": str(tmp_path / "short")}, max_model_len=128)
    windows = build("Gemma3ForCausalLM", "as_published", tmp_path / "windows")
    states = build("FalconH1ForCausalLM", "as_published", tmp_path / "states")
    refused(windows, windows, "the model has layers with windows")
    refused(states, states, "the model has layers that keep a state")
