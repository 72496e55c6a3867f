"""Every variant gives transformers' logits, and the same bits however the sequence is cut."""

from __future__ import annotations

import copy

import pytest
import torch

from quire.models.loader import load_model
from quire.types import ForwardContext
from tests.models import run_model, tiny
from tests.models.rows import llama

LENGTH_DEPENDENT = [v for v in tiny.TABLE["LlamaForCausalLM"][2] if "dynamic" in v or "longrope" in v]
CHUNKS = [7, 1, 1, 20, 1, 10]


def reference(model, ids, **options):
    with torch.inference_mode():
        return model(torch.tensor([ids]), **options)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def test_every_rope_type_of_transformers_has_a_variant():
    assert not llama.ROPE_TYPES_WITHOUT_VARIANT


@pytest.mark.parametrize(("architecture", "variant"), tiny.cases())
def test_logits(checkpoint, architecture, variant):
    model = load_model(checkpoint(architecture, variant))
    ids = tiny.token_ids()
    want = reference(tiny.make(architecture, variant), ids).logits[0]
    whole = run_model.logits(model, ids)
    assert whole.dtype == torch.float32
    assert relative_error(whole, want) < 1e-4
    assert torch.equal(run_model.logits(model, ids, CHUNKS), whole)


@pytest.mark.parametrize(("architecture", "variant"), tiny.cases())
def test_bfloat16_is_as_close_to_float64_as_transformers_is(checkpoint, architecture, variant):
    theirs = tiny.make(architecture, variant).bfloat16()
    ids = tiny.token_ids()
    wide = copy.deepcopy(theirs).double()
    for module in wide.modules():
        if hasattr(module, "reorder_and_upcast_attn"):
            module.reorder_and_upcast_attn = False  # it insists on float32; in float64 there is nothing to upcast
    exact = reference(wide, ids).logits[0]
    ours = run_model.logits(load_model(checkpoint(architecture, variant), torch.bfloat16), ids)

    def error(logits: torch.Tensor) -> float:
        return float((logits.double() - exact).square().mean().sqrt())

    assert error(ours) <= 1.25 * error(reference(theirs, ids).logits[0])


@pytest.mark.parametrize("prompt", [10, 23, 24, 25, 33])
@pytest.mark.parametrize("variant", LENGTH_DEPENDENT)
def test_length_dependent_rope_is_that_of_a_request_alone(checkpoint, variant, prompt):
    """Transformers reads the prompt at once, then token by token; the threshold (24) may fall anywhere."""
    theirs = tiny.make("LlamaForCausalLM", variant)
    ids = tiny.token_ids()
    out = reference(theirs, ids[:prompt], use_cache=True)
    want = [out.logits[0]]
    for token in ids[prompt:]:
        out = reference(theirs, [token], past_key_values=out.past_key_values, use_cache=True)
        want.append(out.logits[0])
    model = load_model(checkpoint("LlamaForCausalLM", variant))
    steps = [prompt] + [1] * (len(ids) - prompt)
    got = run_model.logits(model, ids, steps, prompt_len=prompt)
    assert relative_error(got, torch.cat(want)) < 1e-4
    # Preempted after its last token and recomputed in other chunks: the same.
    assert torch.equal(run_model.logits(model, ids, CHUNKS, prompt_len=prompt), got)


@pytest.mark.parametrize("variant", ["gqa", *LENGTH_DEPENDENT])
def test_neighbours_change_nothing(checkpoint, variant):
    """Three sequences in one step, at and beyond their prompts' ends, some past the rotary threshold."""
    model = load_model(checkpoint("LlamaForCausalLM", variant))
    sequences = [(tiny.token_ids(n, seed=n), prompt) for n, prompt in ((9, 9), (40, 30), (31, 12))]
    alone = [run_model.logits(model, ids, prompt_len=prompt) for ids, prompt in sequences]
    together = run_together(model, sequences)
    for got, want in zip(together, alone, strict=True):
        assert torch.equal(got, want)


def run_together(model, sequences, block_size: int = 4) -> list[torch.Tensor]:
    sizes = [len(ids) for ids, _ in sequences]
    caches, table = run_model.pool(model, sum(size + block_size for size in sizes), block_size)
    parts, at = [], 0
    for ids, prompt in sequences:
        blocks = -(-len(ids) // block_size)
        parts.append(run_model.context(table[:, at : at + blocks], 0, len(ids), prompt, block_size))
        at += blocks
    width = max(part.block_table.shape[1] for part in parts)
    tables = [torch.nn.functional.pad(part.block_table, (0, width - part.block_table.shape[1])) for part in parts]
    ctx = ForwardContext(
        positions=torch.cat([part.positions for part in parts]),
        query_start=torch.tensor([0, *sizes]).cumsum(0).to(torch.int32),
        context_len=torch.cat([part.context_len for part in parts]),
        prompt_len=torch.cat([part.prompt_len for part in parts]),
        slot_mapping=torch.cat([part.slot_mapping for part in parts]),
        block_table=torch.cat(tables),
        position_limit=2048,
        longest=max(part.longest for part in parts),
    )
    with torch.inference_mode():
        ids = torch.tensor([token for ids, _ in sequences for token in ids])
        hidden = model(model.embed(ids), ctx, caches)
        return list(model.logits(hidden).split(sizes))


def test_limits_are_the_configuration_s(checkpoint):
    limits = {
        variant: (model.max_model_len, model.rope_threshold)
        for variant in ("gqa", "rope_linear", "rope_dynamic", "rope_yarn", "rope_longrope", "rope_llama3")
        for model in [load_model(checkpoint("LlamaForCausalLM", variant))]
    }
    assert limits == {
        "gqa": (128, None),
        "rope_linear": (384, None),
        "rope_dynamic": (96, 24),
        "rope_yarn": (128, None),
        "rope_longrope": (128, 24),
        "rope_llama3": (128, None),
    }
    assert load_model(checkpoint("OPTForCausalLM", "pre_norm")).max_model_len == 128
    assert load_model(checkpoint("GPT2LMHeadModel", "relu")).max_model_len == 128


def test_a_position_s_rotation_does_not_depend_on_when_its_page_was_made(checkpoint):
    from quire.layers import RotaryEmbedding

    config = load_model(checkpoint("LlamaForCausalLM", "gqa")).config
    config.max_position_embeddings = 8192
    early, late = RotaryEmbedding(config), RotaryEmbedding(config)
    for length in (1, 2049, 5000):
        grown = early._static(length, torch.device("cpu"))
    at_once = late._static(5000, torch.device("cpu"))
    assert torch.equal(grown, at_once)
    assert len(grown) == 6144


def test_settings_of_transformers_4(checkpoint):
    """`rope_scaling` and `rope_theta` instead of `rope_parameters`, and "type" for "rope_type"."""
    from types import SimpleNamespace

    from quire.layers.rotary import rope_parameters

    old = SimpleNamespace(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=500.0)
    assert rope_parameters(old) == {
        "type": "linear",
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 500.0,
        "partial_rotary_factor": 1.0,
    }
    assert rope_parameters(SimpleNamespace(rope_scaling=None))["rope_type"] == "default"
