"""Promises 1 and 2 with adapters: tokens and logprobs are bitwise those of a request that is alone.

Whatever runs beside it: the base model, other adapters, other ranks, mixtures; and whether adapters are served at all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams, kernels
from tests.lora import adapter_files as files
from tests.lora.adapter_files import ALL, nothing_left, open_llm
from tests.models.tiny import build
from tests.multimodal import tiny_vision
from tests.multimodal.open_engine import KINDS as KINDS_THAT_SEE
from tests.multimodal.open_engine import room_for
from tests.platform.conftest import make_llama

REQUESTS = 30
RECORDABLE = ("one", "four", "many", "dora", "mix")
KINDS = (None, *RECORDABLE, None, "saved", "words", "tokens", "turned")
Answers = dict[int, tuple[Any, ...]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_llama(folder, getattr(torch, request.param))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of all kinds and of ranks that are no multiple of anything."""
    base = tmp_path_factory.mktemp("adapters")
    return {
        "one": files.plain(base / "one", 1, rank=1, targets=("self_attn.v_proj",)),
        "four": files.plain(base / "four", 2, rank=4, targets=ALL),
        "many": files.plain(base / "many", 3, rank=133, targets=ALL[1:]),
        "dora": files.dora(base / "dora", 4),
        "saved": files.saved(base / "saved", 5),
        "words": files.words(base / "words", 6),
        "tokens": files.trained_tokens(base / "tokens", 7),
    }


def adapter(index: int, kinds: Sequence[str | None] = KINDS) -> LoRARequest | None:
    name = kinds[index % len(kinds)]
    if name == "mix":
        return LoRARequest("mix", adapters=[("four", 0.7), ("one", -1.5), ("many", 0.3)])
    if name == "turned":
        return LoRARequest("turned", adapters=[("many", -0.4), ("four", 1.0)])
    return None if name is None else LoRARequest(name)


def prompts() -> list[list[int]]:
    """With beginnings in common, also between adapters."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 320) for _ in range(40)]
    own = [[rng.randrange(3, 320) for _ in range(rng.randint(1, 30))] for _ in range(REQUESTS)]
    return [shared[: rng.choice([0, 17, 40])] + ids for ids in own]


def params(index: int) -> SamplingParams:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": index},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    ]
    more: dict[str, Any] = {"prompt_logprobs": 2} if index % 7 == 3 else {}
    more |= {"n": 2} if index % 3 == 1 else {}
    return SamplingParams(max_tokens=6 + index % 5, ignore_eos=True, logprobs=3, **kinds[index % 3], **more)


def opened(path: Path, folders: dict[str, Path], **more: Any) -> LLM:
    llm = open_llm(path, **more)
    for name, folder in folders.items():
        llm.load_lora_adapter(name, str(folder))
    return llm


def answers(llm: LLM, chosen: Sequence[int], kinds: Sequence[str | None] = KINDS) -> Answers:
    """What each chosen request gives when they all run together."""
    batch = prompts()
    outputs = llm.generate(
        [{"prompt_token_ids": batch[i]} for i in chosen], [params(i) for i in chosen],
        lora_request=[adapter(i, kinds) for i in chosen] if llm.llm_engine.adapters else None, use_tqdm=False,
    )  # fmt: skip
    if llm.llm_engine.adapters:
        nothing_left(llm)
    assert all(c.finish_reason == "length" for output in outputs for c in output.outputs)
    return {
        i: ([(c.token_ids, c.logprobs) for c in output.outputs], output.prompt_logprobs)
        for i, output in zip(chosen, outputs, strict=True)
    }


@pytest.fixture(scope="module")
def alone(path: Path, folders: dict[str, Path]) -> Answers:
    llm = opened(path, folders, enable_prefix_caching=False, max_num_batched_tokens=512, debug=False)
    found = {i: answers(llm, [i])[i] for i in range(REQUESTS)}
    assert not llm.llm_engine.scheduler.num_preemptions
    return found


def recorded(llm: LLM) -> int:
    """How many shapes of decode steps with adapters were recorded."""
    shapes = llm.llm_engine.executor.runner._decode._shapes
    return sum(bool(shape[-1]) and recording is not None for shape, recording in shapes.items())


def test_every_adapter_shows(path, folders):
    """Else equality would say nothing."""
    llm = opened(path, folders)
    ids, wanted = prompts()[2], files.greedy(4, logprobs=1)
    adapters = [adapter(index) for index in range(len(KINDS)) if index != 6]
    outputs = llm.generate([ids] * len(adapters), wanted, lora_request=adapters, use_tqdm=False)
    firsts = [next(iter(output.outputs[0].logprobs[0].values())).logprob for output in outputs]
    assert len(set(firsts)) == len(KINDS) - 1


def test_base_requests_with_and_without_adapters(path, folders, alone):
    """With enable_lora on or off, with adapters loaded, and with their requests as neighbours."""
    base = [i for i in range(REQUESTS) if adapter(i) is None]
    off = LLM(str(path), skip_tokenizer_init=True, num_gpu_blocks_override=200, enable_prefix_caching=False)
    expected = {i: answers(off, [i])[i] for i in base}
    assert {i: alone[i] for i in base} == expected
    assert answers(open_llm(path), base) == expected
    crowd = answers(opened(path, folders), range(REQUESTS))
    assert {i: crowd[i] for i in base} == expected


@pytest.mark.parametrize("budget", [5, 13, 64, 2048])
@pytest.mark.parametrize("cached", [False, True])
def test_a_crowd_and_any_chunking(path, folders, alone, budget, cached):
    llm = opened(path, folders, max_num_batched_tokens=budget, enable_prefix_caching=cached)
    assert answers(llm, range(REQUESTS)) == alone
    if cached:
        assert answers(llm, range(REQUESTS)[::-1]) == alone
        again = llm.generate([prompts()[1]], files.greedy(), lora_request=adapter(1), use_tqdm=False)[0]
        assert again.num_cached_tokens > 0, "the second round was to hit the prefix cache"


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_preemption_and_eviction(path, folders, alone, block_size):
    llm = opened(path, folders, block_size=block_size, num_gpu_blocks_override=160 // block_size, max_loras=3,
                 max_cpu_loras=4)  # fmt: skip
    assert answers(llm, range(REQUESTS)) == alone
    assert llm.llm_engine.scheduler.num_preemptions > 0
    hits = llm.llm_engine.scheduler.adapters.device.hits
    assert hits["host"] + hits["disk"] > len(folders), "nothing was evicted"


def test_other_neighbours(path, folders, alone):
    llm = opened(path, folders, max_num_seqs=7)
    for seed in range(4):
        order = random.Random(seed).sample(range(REQUESTS), 4 + 3 * seed)
        assert answers(llm, order) == {i: alone[i] for i in order}


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_matter(path, folders, alone, threads):
    torch.set_num_threads(threads)
    try:
        assert answers(opened(path, folders, debug=False), range(12)) == {i: alone[i] for i in range(12)}
    finally:
        torch.set_num_threads(1)


def test_recorded_steps(path, folders, monkeypatch):
    """Of adapters that the kernel alone serves, decode steps are recorded and replayed, for any mixture of owners."""
    kinds = (None, *RECORDABLE)
    eager = opened(path, folders, enforce_eager=True)
    expected = {i: answers(eager, [i], kinds)[i] for i in range(REQUESTS)}
    assert recorded(eager) == 0
    llm = opened(path, folders)
    replays = _count_replays(llm, monkeypatch)
    for seed in range(3):
        order = random.Random(seed).sample(range(REQUESTS), 9)
        assert answers(llm, order, kinds) == {i: expected[i] for i in order}
    assert recorded(llm) > 0 and sum(replays) > 0
    assert answers(eager, range(REQUESTS), kinds) == expected


def test_recordings_survive_other_adapters_in_their_slots(path, folders, tmp_path, monkeypatch):
    """A recording reads tables: it serves whoever is in them now, also once they have grown and been moved."""
    extra = {f"x{seed}": files.plain(tmp_path / str(seed), seed, rank=1 + seed, targets=ALL[:2]) for seed in range(12)}
    llm = opened(path, extra, enable_prefix_caching=False)
    replays = _count_replays(llm, monkeypatch)
    eager = opened(path, extra, enforce_eager=True, enable_prefix_caching=False)
    wanted, ids = files.greedy(7, logprobs=1), prompts()[:2]

    def ask(one: LLM, names: Sequence[str]) -> list[Any]:
        outputs = one.generate(ids, wanted, lora_request=[LoRARequest(name) for name in names], use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    for first in range(12):
        names = [f"x{first}", f"x{(first * 5 + 1) % 12}"]
        assert ask(llm, names) == ask(eager, names), names
        if first in (3, 8):  # and with other weights under the same name, in another's slot
            for name in ("x0", "x3"):
                for one in (llm, eager):
                    one.unload_lora_adapter(name)
                    one.load_lora_adapter(name, str(extra["x7" if name == "x0" else "x11"]))
            assert ask(llm, ["x0", "x3"]) == ask(eager, ["x7", "x11"]) == ask(llm, ["x7", "x11"])
    assert recorded(llm) > 0 and sum(replays) > 12


def _count_replays(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that grows by one for each replayed step: whether it had adapters."""
    from quire.platform.execution import decode_graphs

    shapes, found = llm.llm_engine.executor.runner._decode._shapes, []
    run = decode_graphs._Recorded.run

    def counted(self: Any, *arguments: Any) -> Any:
        if any(one is self for one in shapes.values()):
            found.append(self.segments is not None)
        return run(self, *arguments)

    monkeypatch.setattr(decode_graphs._Recorded, "run", counted)
    return found


def test_beams(path, folders):
    search = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    batch, adapters = prompts()[:10], [adapter(i) for i in range(10)]
    calm = opened(path, folders, enable_prefix_caching=False)
    expected = [calm.beam_search([ids], search, lora_request=one)[0].sequences
                for ids, one in zip(batch, adapters, strict=True)]  # fmt: skip
    llm = opened(path, folders, block_size=4, num_gpu_blocks_override=70, max_num_batched_tokens=13, max_loras=4)
    assert [output.sequences for output in llm.beam_search(batch, search, lora_request=adapters)] == expected
    nothing_left(llm)


def test_an_adapter_of_zeros_is_the_base_model(path, tmp_path):
    """B starts as zeros in training: such an adapter changes no bit, whatever its A."""
    made = {name: t * ("lora_A" in name) for name, t in files.tensors(5, ALL, 1).items()}
    llm = opened(path, {"zero": files.write(tmp_path, files.config(5, ALL), made)}, enable_prefix_caching=False)
    wanted = files.greedy(8, logprobs=3, prompt_logprobs=1)
    batch = prompts()[:6]
    base, zero = (llm.generate(batch, wanted, lora_request=one, use_tqdm=False) for one in (None, LoRARequest("zero")))
    for one, two in zip(base, zero, strict=True):
        assert (one.outputs[0].token_ids, one.outputs[0].logprobs) == (
            two.outputs[0].token_ids,
            two.outputs[0].logprobs,
        )
        assert one.prompt_logprobs == two.prompt_logprobs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("architecture", "variant"),
    [("OPTForCausalLM", "post_norm"), ("GPT2LMHeadModel", "gelu_new"), ("Qwen2ForCausalLM", "gqa")],
)
def test_architectures_and_forks(tmp_path, architecture, variant, dtype):
    """Merged projections, biases, transposed weights and tied tables."""
    path = build(architecture, variant, tmp_path / "model")
    rng = random.Random(8)
    batch = [[rng.randrange(97) for _ in range(rng.randint(1, 40))] for _ in range(12)]
    wanted = [
        SamplingParams(n=1 + i % 3, temperature=1.0, seed=i, max_tokens=10, ignore_eos=True, logprobs=2)
        for i in range(12)
    ]
    mixture = LoRARequest("mix", adapters=[("a", 0.5), ("b", 0.5)])
    adapters = [[None, LoRARequest("a"), LoRARequest("b"), mixture, LoRARequest("a")][i % 5] for i in range(12)]

    def opened(**more: Any) -> LLM:
        llm = open_llm(path, dtype=dtype, **more)
        for name, rank in (("a", 2), ("b", 9)):
            llm.load_lora_adapter(name, str(files.for_model(llm, tmp_path / name, rank, rank)))
        return llm

    def run(llm: LLM, chosen: Sequence[int]) -> list[Any]:
        outputs = llm.generate([batch[i] for i in chosen], [wanted[i] for i in chosen],
                               lora_request=[adapters[i] for i in chosen], use_tqdm=False)  # fmt: skip
        nothing_left(llm)
        return [[(c.token_ids, c.logprobs) for c in output.outputs] for output in outputs]

    calm = opened(enable_prefix_caching=False)
    alone = [run(calm, [i])[0] for i in range(12)]
    tight = opened(block_size=4, num_gpu_blocks_override=24, max_num_batched_tokens=11)
    assert run(tight, range(12)) == alone
    assert tight.llm_engine.scheduler.num_preemptions > 0
    plain = calm.generate([batch[1]], wanted[1], use_tqdm=False)[0].outputs
    assert [(c.token_ids, c.logprobs) for c in plain] != alone[1], "the adapter changes nothing"


@pytest.mark.parametrize("kind", KINDS_THAT_SEE, ids=lambda kind: kind.name)
def test_images(tmp_path, kind):
    """Towers and projectors with adapters, one image in several prompts: each request sees by its own adapter."""
    path = tiny_vision.build(kind.architecture, kind.variant, tmp_path / "model")
    rng = random.Random(5)
    pictures = [tiny_vision.picture(0, (30, 40)), tiny_vision.picture(1, (24, 24))]
    mixture = LoRARequest("mix", adapters=[("x", 0.5), ("text", 1.0), ("y", -0.5)])
    owners = [None, *map(LoRARequest, ("x", "y", "text")), mixture]
    batch, adapters = [], []
    for number in range(15):
        ids = [5, 6, tiny_vision.IMAGE, *(rng.randrange(3, 300) for _ in range(rng.randint(1, 9)))]
        batch.append({"prompt_token_ids": ids, "multi_modal_data": {"image": [pictures[number // 5 % 2]]}})
        adapters.append(owners[number % 5])

    def opened(**more: Any) -> LLM:
        llm = open_llm(path, **more)
        for seed, (name, part) in enumerate((("x", ""), ("y", "vis"), ("text", "lang"))):
            llm.load_lora_adapter(name, str(files.for_model(llm, tmp_path / name, seed, 2 + seed, 0.5, part)))
        return llm

    def run(llm: LLM, chosen: Sequence[int]) -> list[Any]:
        outputs = llm.generate([batch[i] for i in chosen], files.greedy(14, logprobs=2),
                               lora_request=[adapters[i] for i in chosen], use_tqdm=False)  # fmt: skip
        nothing_left(llm)
        assert llm.llm_engine.media.preprocessor.pixel_bytes == 0
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    calm = opened(enable_prefix_caching=False)
    alone = [run(calm, [i])[0] for i in range(15)]
    firsts = {next(iter(alone[i][1][0].values())).logprob for i in range(5)}
    assert len(firsts) == len({str(alone[i][1]) for i in range(5)}) == 5
    crowd = opened()
    assert run(crowd, range(15)) == alone == run(crowd, range(15))
    # Of two images, the base model and "text" share features; "x", "y" and the mixture have their own.
    assert crowd.llm_engine.scheduler.encoder.features.misses == 8
    tight = opened(media_cache_bytes=room_for(kind.most_tokens), max_num_batched_tokens=9, block_size=4, max_loras=3,
                   num_gpu_blocks_override=2 * (kind.most_tokens + 12) // 4 + 1)  # fmt: skip
    for _ in range(5):  # images come when they are ready: beside other load, perhaps one after the other
        assert run(tight, range(15)) == alone
        if tight.llm_engine.scheduler.num_preemptions:
            break
    assert tight.llm_engine.scheduler.num_preemptions > 0


def test_the_reference_kernels(tmp_path, folders, monkeypatch):
    """They give the same greedy tokens, and keep the promise among themselves."""
    make_llama(tmp_path)
    batch, wanted = prompts()[:11], files.greedy(6, logprobs=2)
    adapters = [adapter(index) for index in range(11)]

    def run(llm: LLM, chosen: Sequence[int]) -> list[Any]:
        outputs = llm.generate([batch[i] for i in chosen], wanted, lora_request=[adapters[i] for i in chosen],
                               use_tqdm=False)  # fmt: skip
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    native = [ids for ids, _ in run(opened(tmp_path, folders), range(11))]
    monkeypatch.setenv("QUIRE_KERNELS", "reference")
    kernels.backend.cache_clear()
    try:
        assert kernels.backend().__name__.endswith("reference")
        crowd = run(opened(tmp_path, folders, max_num_batched_tokens=7), range(11))
        calm = opened(tmp_path, folders, enable_prefix_caching=False)
        assert crowd == [run(calm, [i])[0] for i in range(11)]
    finally:
        kernels.backend.cache_clear()
    assert [ids for ids, _ in crowd] == native
