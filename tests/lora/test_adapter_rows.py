"""Layers that see other rows than the step's tokens: heads, and tokens that a router sends somewhere."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from quire import LLM, LoRARequest, SamplingParams, kernels, registry
from quire.kernels.adapters import AllRows, LoraSegments, LoraTable, LoraWeights, Segment, pack
from quire.layers import Linear, gathered, repeated
from quire.layers.adapters import LinearAdapters, LinearChange, LoRAContext
from quire.layers.rows import current_segments
from quire.models.vision.towers import Projector
from tests.lora import adapter_files as files
from tests.lora import plugin_models
from tests.lora.peft_world import Expected, World, _world, ask, text_prompts
from tests.lora.test_adapter_images import seen
from tests.multimodal import tiny_vision

HEADS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "k_proj", "up_proj"]},
    "other": {"target_modules": ["q_proj", "v_proj", "o_proj"], "r": 5},
    "q_norm": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["q_norm"]},
    "norms": {"target_modules": ["k_proj", "down_proj"], "modules_to_save": ["q_norm", "k_norm", "norm"], "r": 3},
}
ROUTED: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["w1", "w2", "w3", "q_proj"]},
    "other": {"target_modules": ["experts.1.w1", "experts.2.w3", "gate", "o_proj"], "r": 7},
    "dora": {"target_modules": ["w2", "w3", "v_proj"], "use_dora": True, "r": 3},
    "saved": {"target_modules": ["w1"], "modules_to_save": ["w2"], "r": 2},
}
KINDS = {"heads": (plugin_models.make_qwen3, HEADS), "routed": (plugin_models.make_routed, ROUTED)}


@pytest.fixture(autouse=True, scope="module")
def plugins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "plugin_rows", lambda: plugin_models.ROWS)
        yield


@pytest.fixture(scope="module", params=list(KINDS))
def world(request: pytest.FixtureRequest, plugins: None, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(request.param, tmp_path_factory.mktemp(request.param))


def make_world(kind: str, folder: Path) -> World:
    theirs = KINDS[kind][0](folder / "base")
    theirs.name_or_path = theirs.config._name_or_path = str(folder / "base")
    made = _world(theirs, folder / "base", text_prompts(97), None, folder, skip_tokenizer_init=True, debug=True)
    for seed, (name, fields) in enumerate(KINDS[kind][1].items()):
        made.train(LoraConfig(**{"r": 4, **fields}), seed).rename(folder / name)
        made.llm.load_lora_adapter(name, str(folder / name))
    return made


def adapters_of(world: World) -> list[str]:
    return [adapter.name for adapter in world.llm.list_lora_adapters()]


def mixed(world: World) -> list[tuple[LoRARequest | None, Callable[[], Expected]]]:
    """The base model, each adapter and two mixtures, and PEFT's of each."""
    folder, names = world.folder, adapters_of(world)
    pairs = [[("plain", 0.6), ("other", 1.1)], [("other", -0.5), ("plain", 1.0)]]
    mixtures = [LoRARequest(f"mix{i}", adapters=parts) for i, parts in enumerate(pairs)]
    return [
        (None, lambda: Expected(world, None)),
        *((LoRARequest(name), lambda name=name: Expected(world, folder / name)) for name in names),
        *(
            (mix, lambda parts=parts: Expected(world, *(folder / n for n, _ in parts), weights=[w for _, w in parts]))
            for mix, parts in zip(mixtures, pairs, strict=True)
        ),
    ]


def test_all_in_one_batch_are_peft_s(world: World) -> None:
    owners = mixed(world)
    prompts = [prompt for _ in owners for prompt in world.prompts]
    outputs = ask(world.llm, prompts, [owner for owner, _ in owners for _ in world.prompts])
    distinct = set()
    for number, (_, oracle) in enumerate(owners):
        mine, expected = outputs[number * len(world.prompts) :][: len(world.prompts)], oracle()
        for output in mine:
            expected.check(output)
        distinct.add(str([output.outputs[0].token_ids for output in mine]))
    assert len(distinct) == len(owners)
    world.llm.llm_engine.check_integrity()


def answers(llm: LLM, chosen: Sequence[int], owners: Sequence[LoRARequest | None]) -> dict[int, Any]:
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 97) for _ in range(rng.randint(1, 25))] for _ in range(2 * len(owners))]
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=7, ignore_eos=True, logprobs=2)
    outputs = llm.generate(
        [{"prompt_token_ids": prompts[i]} for i in chosen], params,
        lora_request=[owners[i % len(owners)] for i in chosen], use_tqdm=False,
    )  # fmt: skip
    llm.llm_engine.check_integrity()
    return {i: (o.outputs[0].token_ids, o.outputs[0].logprobs) for i, o in zip(chosen, outputs, strict=True)}


@pytest.mark.parametrize("twins", [False, True], ids=["native", "reference"])
def test_company_changes_no_bit(world: World, monkeypatch: pytest.MonkeyPatch, twins: bool) -> None:
    if twins:
        monkeypatch.setenv("QUIRE_KERNELS", "reference")
    kernels.backend.cache_clear()
    try:
        owners = [owner for owner, _ in mixed(world)]
        everybody = range(2 * len(owners))

        def opened(**settings: Any) -> LLM:
            llm = files.open_llm(world.path, **settings)
            for name in adapters_of(world):
                llm.load_lora_adapter(name, str(world.folder / name))
            return llm

        calm, crowd = opened(enable_prefix_caching=False, enforce_eager=True), opened(max_num_batched_tokens=19)
        alone = {i: answers(calm, [i], owners)[i] for i in everybody}
        assert answers(crowd, everybody, owners) == alone
        base = [i for i in everybody if owners[i % len(owners)] is None]
        assert answers(crowd, base, owners) == {i: alone[i] for i in base}
    finally:
        monkeypatch.undo()
        kernels.backend.cache_clear()


@pytest.mark.skipif(kernels.backend().__name__ != "quire.kernels.native", reason="the twins are never recorded")
def test_steps_of_heads_are_recorded(plugins: None, tmp_path: Path) -> None:
    world = make_world("heads", tmp_path)
    owners = [None, *(LoRARequest(name) for name in ("plain", "other"))]
    eager = files.open_llm(world.path, enforce_eager=True)
    for name in ("plain", "other"):
        eager.load_lora_adapter(name, str(world.folder / name))
    expected = answers(eager, range(6), owners)
    for _ in range(3):
        assert answers(world.llm, range(6), owners) == expected
    shapes = world.llm.llm_engine.executor.runner._decode._shapes
    assert any(shape[-1] and made is not None for shape, made in shapes.items())


@pytest.mark.parametrize(
    ("architecture", "kind", "layer"),
    [
        ("FlatForCausalLM", "heads", r"model\.layers\.0\.self_attn\.q_norm: .*rows"),
        ("LostForCausalLM", "routed", r"model\.layers\.0\.mlp\.experts\.0\.w1: .*rows"),
    ],
)
def test_rows_that_nobody_named_are_an_error(plugins, tmp_path, architecture: str, kind: str, layer: str) -> None:
    """Of the request with the adapter; the base model's go on beside it."""
    theirs = KINDS[kind][0](tmp_path / "base")
    theirs.config.architectures = [architecture]
    theirs.config.save_pretrained(tmp_path / "base")
    llm = files.open_llm(tmp_path / "base")
    if kind == "heads":
        names = [f"base_model.model.model.layers.{layer}.self_attn" for layer in range(2)]
        saved = {f"{name}.q_norm.weight": torch.rand(8) + 0.5 for name in names}
        lora = files.tensors(2, ["self_attn.o_proj"])
        lora = {name: tensor[:32, :32].contiguous() for name, tensor in lora.items()}
        files.write(tmp_path / "x", files.config(2, ["o_proj"], modules_to_save=["q_norm"]), {**saved, **lora})
    else:
        files.for_model(llm, tmp_path / "x", 1, part="experts.0.w1")
    prompts = [[token % 97 for token in files.prompt(seed, 9)] for seed in range(3)]
    plain = files.tokens(llm, prompts)
    llm.load_lora_adapter("x", str(tmp_path / "x"))
    outputs = files.ask(llm, prompts, [None, "x", None])
    assert [files.result(outputs[i]) for i in (0, 2)] == [plain[0], plain[2]]
    error = files.error_of(outputs[1])
    assert re.search(layer, error) and "docs/adding-a-model.md" in error, error
    assert files.tokens(llm, prompts) == plain
    files.nothing_left(llm)


# -- the rows themselves -----------------------------------------------------------------------------------------------

STEP: list[Segment] = [(0, 2, 0, 1.0), (3, 4, 1, 0.5), (3, 4, 2, 0.5), (4, 6, 1, 1.0)]


def owners_of(segments: LoraSegments, count: int) -> list[list[tuple[int, float]]]:
    """Of each row of a call."""
    rows = segments.for_rows(count).rows
    assert all(a[1] <= b[0] or a[:2] == b[:2] for a, b in pairwise(rows))
    return [[(slot, weight) for start, end, slot, weight in rows if start <= row < end] for row in range(count)]


def test_repeated_and_gathered_rows() -> None:
    step = LoraSegments.of(STEP, 7)
    own = owners_of(step, 7)
    assert own[2] == own[6] == [] and own[3] == [(1, 0.5), (2, 0.5)]
    with repeated(3):
        assert owners_of(current_segments(step), 21) == [one for one in own for _ in range(3)]
        with gathered([20, 0, 9, 9]):
            assert owners_of(current_segments(step), 4) == [own[6], own[0], own[3], own[3]]
    rng = random.Random(1)
    for places in (
        [],
        [3],
        [6, 2],
        [5, 3, 3, 4, 0, 1, 6, 2, 0],
        *([rng.randrange(7) for _ in range(n)] for n in (7, 50)),
    ):
        with gathered(torch.tensor(places, dtype=torch.int64)):
            assert owners_of(current_segments(step), len(places)) == [own[place] for place in places]
            with repeated(2):
                assert owners_of(current_segments(step), 2 * len(places)) == [own[p] for p in places for _ in range(2)]
    assert current_segments(step) is step


def test_derived_rows_follow_the_step_s() -> None:
    """A recording reads them where they lie."""
    step = LoraSegments(4, 7, layers=2)
    step.fill(STEP)
    heads, some = step.repeated(2), step.gathered((5, 3, 0))
    addresses = heads.address, some.address
    step.fill([(2, 3, 3, 1.0), (2, 3, 0, 2.0), (3, 4, 1, 1.0)])
    assert heads is step.repeated(2) and some is step.gathered((5, 3, 0))
    assert addresses == (heads.address, some.address)
    assert owners_of(heads, 14)[4:8] == [[(3, 1.0), (0, 2.0)]] * 2 + [[(1, 1.0)]] * 2
    assert owners_of(some, 3) == [[], [(1, 1.0)], []]
    assert heads.entries["start"].tolist() == [4, 4, 6, 0] and some.entries["slot"].tolist()[:2] == [1, 0]


def test_rows_of_another_call_are_refused() -> None:
    step = LoraSegments.of(STEP, 7)
    for count in (0, 1, 6, 8, 14):
        with pytest.raises(ValueError, match=f"{count} rows, and adapters are known for 7"):
            step.for_rows(count)
        with repeated(2), pytest.raises(ValueError, match="known for 14"):
            current_segments(step).for_rows(7)
    for places in ([7], [-1, 0]):
        with gathered(places), pytest.raises(IndexError, match="there are 7"):
            current_segments(step)
    with pytest.raises(KeyError), repeated(2):
        raise KeyError
    assert current_segments(step) is step


def test_one_owner_of_all_rows_owns_them_whatever_they_are() -> None:
    everything = AllRows([(2, 0.5), (0, 1.0)])
    with repeated(4), gathered([3, 9]):
        assert owners_of(current_segments(everything), 5) == [[(2, 0.5), (0, 1.0)]] * 5


def test_an_encoding_s_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A projector that takes patches backwards and in pairs makes of an image what it made before."""
    path = tiny_vision.build("LlavaForConditionalGeneration", "clip", tmp_path / "llava")

    def run() -> list[list[int]]:
        llm = files.open_llm(path)
        folder = files.for_model(llm, tmp_path / "x", 3, part="multi_modal_projector")
        llm.load_lora_adapter("x", str(folder))
        return files.tokens(llm, [seen(0), seen(1)] * 2, [None, "x", "x", None], files.greedy(8))

    expected = run()
    assert expected[0] != expected[2]
    whole = Projector.forward

    def backwards(self: Projector, features: torch.Tensor) -> torch.Tensor:
        order = torch.arange(features.shape[-2] - 1, -1, -1)
        with repeated(1), gathered(order):
            return whole(self, features[..., order, :].contiguous())[..., order, :]

    monkeypatch.setattr(Projector, "forward", backwards)
    assert run() == expected


def test_the_documentation_shows_what_runs_here() -> None:
    page = (Path(__file__).parents[2] / "docs" / "adding-a-model.md").read_text()
    section = page.partition("## Rows\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    code = Path(plugin_models.__file__).read_text()
    assert len(blocks) == 2 and all(block in code for block in blocks)


@pytest.mark.skipif(kernels.backend().__name__ != "quire.kernels.native", reason="the twins are never recorded")
@torch.inference_mode()
def test_a_recording_s_heads_follow_the_step_s_adapters() -> None:
    """And rows that are always the same ones, of which no number need be read."""
    from quire.kernels import recording

    active, layer, x = LoRAContext(), Linear(8, 5, bias=False), torch.randn(4, 16)
    layer.weight.normal_()
    layer.adapters = LinearAdapters(active, "layer", LoraTable(8, 5, torch.float32))
    for slot in range(3):
        b = pack(torch.randn(5, 2))
        layer.adapters.put(slot, LinearChange(LoraWeights(torch.randn(2, 8), b)))

    def function() -> tuple[torch.Tensor, torch.Tensor]:
        with repeated(2):
            heads = layer(x.view(8, 8))
        with gathered([3, 1]):
            return heads, layer(x[1::2, :8])

    kept = active.segments = LoraSegments(4, 4, layers=2)
    kept.fill([(0, 2, 1, 1.0)])
    recorded = recording.record(function, recording.Workspace())
    seen: set[str] = set()
    for rows in ([(1, 2, 0, 1.0), (3, 4, 2, 0.5), (3, 4, 1, 2.0)], [(0, 4, 2, 1.0)], []):
        kept.fill(rows)
        recorded.replay()
        got = [result.clone() for result in recorded.results]
        active.segments = LoraSegments.of(rows, 4) if rows else None
        assert all(map(torch.equal, got, function()))
        seen.add(str(got))
    assert len(seen) == 3
