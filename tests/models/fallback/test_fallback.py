"""Transformers' own modules on quire's pool and layers: their logits, promise 1, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from quire import registry
from quire.errors import UnsupportedModelError
from quire.models.fallback.construct import causal_class, construct, seeing
from quire.models.fallback.model import TransformersForCausalLM
from quire.models.loader import load_model
from tests.models import run_model, tiny
from tests.models.fallback.families import make
from tests.models.rows import all_rows
from tests.models.test_parity import CHUNKS, reference, relative_error, run_together

pytestmark = pytest.mark.usefixtures("one_thread")

# A family of each kind: plain, windows with norms of heads and a scaled table, experts, latents and groups, fused
# weights [in, out] with learned positions.
QUICK = {
    "LlamaForCausalLM": "gqa",
    "Gemma2ForCausalLM": "as_published",
    "Qwen3MoeForCausalLM": "as_published",
    "GPT2LMHeadModel": "gelu_new",
}
# Why a family with a row is not run so, by a part of the error.
NO_INTERFACE, MIXES, LENGTHS = "attention interface", "mixes tokens", "by how long its sequence is"
REFUSED = {
    ("BloomForCausalLM", None): NO_INTERFACE,
    ("CodeGenForCausalLM", None): NO_INTERFACE,
    ("FalconForCausalLM", None): NO_INTERFACE,
    ("FalconH1ForCausalLM", None): NO_INTERFACE,
    ("GPTJForCausalLM", None): NO_INTERFACE,
    ("GraniteMoeHybridForCausalLM", None): MIXES,
    ("Llama4ForCausalLM", None): "bmm of",
    ("LlamaForCausalLM", "rope_dynamic"): LENGTHS,
    ("MiniCPM3ForCausalLM", None): LENGTHS,
    ("MptForCausalLM", None): NO_INTERFACE,
    ("PhimoeForCausalLM", "as_published"): LENGTHS,
    ("StableLmForCausalLM", None): NO_INTERFACE,
}
CASES = [
    pytest.param(name, variant, marks=[] if QUICK.get(name) == variant else [pytest.mark.slow])
    for name, row in all_rows().items()
    if row.oracle is None
    for variant in row.compared[:2]
]


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_it_is_the_row_and_transformers(architecture: str, variant: str, tmp_path: Path) -> None:
    """The same logits as transformers and as the row's; the same bits in chunks and in company."""
    why = REFUSED.get((architecture, None), REFUSED.get((architecture, variant)))
    path = tiny.build(architecture, variant, tmp_path)
    if why is not None:
        with pytest.raises(UnsupportedModelError, match=why):
            load_model(path, impl="transformers")
        return
    model, ids = load_model(path, "float32", impl="transformers"), tiny.token_ids()
    whole = run_model.logits(model, ids)
    assert whole.dtype == torch.float32
    assert relative_error(whole, reference(tiny.make(architecture, variant), ids).logits[0]) < 1e-4
    row = run_model.logits(load_model(path, "float32"), ids)
    assert relative_error(whole, row) < 1e-4 and torch.equal(whole.argmax(-1), row.argmax(-1))
    assert torch.equal(run_model.logits(model, ids, CHUNKS), whole)
    other = tiny.token_ids(9, seed=9)
    alone = run_model.logits(model, other)
    together = run_together(model, [(ids, len(ids)), (other, len(other))])
    assert torch.equal(together[0], whole) and torch.equal(together[1], alone)


def test_which_row_is_taken() -> None:
    assert registry.find(["LlamaForCausalLM"], "auto").architecture == "LlamaForCausalLM"
    assert registry.find(["LlamaForCausalLM"], "transformers") is registry.FALLBACK
    for name in ("BertLMHeadModel", "CTRLLMHeadModel"):
        assert registry.find([name], "auto") is registry.FALLBACK
    assert registry.find(["PersonsForCausalLM"], "auto") is registry.FALLBACK
    for impl in ("quire", "vllm"):
        with pytest.raises(UnsupportedModelError, match="no row of the registry"):
            registry.find(["PersonsForCausalLM"], impl)
    with pytest.raises(UnsupportedModelError, match="text-only decoder"):
        registry.find(["PersonsForConditionalGeneration"], "auto")


def test_what_sees_is_refused_by_its_name() -> None:
    """Transformers' image-text models without a row: with each way to choose who runs them."""
    own = {row.architecture for row in registry.rows()}
    assert {"AyaVisionForConditionalGeneration", "FuyuForCausalLM", "Emu3ForConditionalGeneration"} <= seeing() - own
    for name in seeing() - own:
        assert causal_class(name) is None
        with pytest.raises(UnsupportedModelError, match=f"^{name} takes more than text"):
            TransformersForCausalLM.check_config(SimpleNamespace(architectures=[name]))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="served by a row alone"):
        registry.find(["AyaVisionForConditionalGeneration"], "auto")


def test_what_drafts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="drafts for another model"):
        construct(None, transformers.Gemma4AssistantForCausalLM)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 5])
def test_bfloat16_differs_where_other_experts_are_chosen(seed: int, tmp_path: Path) -> None:
    """A tiny Qwen2Moe in bfloat16 is a quarter off transformers' float64 and more, and so is transformers' own: rounded
    scores choose other experts. With the same experts chosen, a tenth is left."""
    oracle = tiny.make("Qwen2MoeForCausalLM", "as_published", seed)
    path, ids = tiny.save(oracle, tmp_path), tiny.token_ids()
    chosen: list[torch.Tensor] = []
    with _routers(oracle.double(), lambda _, out: chosen.append(out[2])):
        want = reference(oracle, ids).logits[0].float()
    model = load_model(path, "bfloat16", impl="transformers")
    turn = iter(chosen)

    def as_float64(router: Any, out: Any) -> Any:
        experts = next(turn)
        shares = torch.softmax(out[0].float(), -1).gather(1, experts)
        return out[0], shares.to(out[1].dtype), experts

    with _routers(model, as_float64):
        assert relative_error(run_model.logits(model, ids), want) < 0.2
    assert next(turn, None) is None


@contextmanager
def _routers(model: Any, hook: Callable[[Any, Any], Any]) -> Iterator[None]:
    """While this lasts, `hook` sees, and may replace, what routers return."""
    parts = [part for part in model.modules() if type(part).__name__ == "Qwen2MoeTopKRouter"]
    handles = [part.register_forward_hook(lambda router, _, out: hook(router, out)) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_rotations_by_length_are_refused(tmp_path: Path) -> None:
    path = tiny.build("LlamaForCausalLM", "rope_dynamic", tmp_path)
    with pytest.raises(UnsupportedModelError, match=LENGTHS):
        load_model(path, impl="transformers")


def test_what_transformers_keeps_in_float32_is_not_rounded(tmp_path: Path) -> None:
    """Routers whose experts' rows are the same number as bfloat16: what they make of their inputs is float32's."""
    oracle = make("FlintForCausalLM", num_experts_per_tok=1)
    for name, parameter in oracle.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data.copy_(parameter[:1] * (1 + torch.randn(parameter.shape) / 2000))
    path = tiny.save(oracle, tmp_path)
    model = load_model(path, "bfloat16", impl="transformers")
    weights = [p.double() for n, p in oracle.named_parameters() if n.endswith("gate.weight")]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part in model.modules():
        if type(part).__name__ == "FlintTopKRouter":
            part.register_forward_hook(lambda _, given, out: seen.append((given[0].flatten(0, -2), out[0])))
    run_model.logits(model, tiny.token_ids())
    for (x, logits), weight in zip(seen, weights, strict=True):
        assert relative_error(logits, x.double() @ weight.t()) < 1e-5
