"""Rotation against transformers' own, for each way in which families of decoders turn their heads."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from quire import kernels
from quire.errors import UnsupportedModelError
from quire.layers import PagedAttention, RotaryEmbedding
from quire.layers.rotary import RotaryTable, check_rope, rope_parameters
from quire.types import ForwardContext

Rotated = tuple[torch.Tensor, torch.Tensor]
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 5.0, 9.0]}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500000.0,
}  # fmt: skip


def context(positions: torch.Tensor, length: int, rotary_positions: torch.Tensor | None = None) -> ForwardContext:
    """One sequence's step, the end of a prompt of `length` tokens."""
    tokens = positions.shape[-1]

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return ForwardContext(
        positions=positions,
        query_start=numbers(0, tokens),
        context_len=numbers(length),
        prompt_len=numbers(length),
        slot_mapping=positions,
        block_table=numbers(0)[None],
        position_limit=4096,
        longest=length,
        rotary_positions=rotary_positions,
    )


def heads(size: int, tokens: int = 40) -> Rotated:
    """Query [T, 3, size] and key [T, 2, size]."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(tokens, 3, size, generator=generator), torch.randn(tokens, 2, size, generator=generator)


def module_of(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def cosines(family: str, config: Any, positions: torch.Tensor, **layer: Any) -> Any:
    """What transformers' rotary class of the family returns for those positions."""
    module = module_of(family)
    name = next(name for name in vars(module) if name.endswith("RotaryEmbedding") and "Vision" not in name)
    return getattr(module, name)(config)(torch.zeros(1), positions, **layer)


def halves_or_pairs(family: str, config: Any, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> Rotated:
    """By transformers' function of the family, of batches [1, heads, T, size]."""
    cos, sin = cosines(family, config, positions[None])
    size = cos.shape[-1]
    turn = module_of(family).apply_rotary_pos_emb
    turned = turn(q.transpose(0, 1)[None, ..., :size], k.transpose(0, 1)[None, ..., :size], cos, sin)
    return tuple(
        torch.cat([new[0].transpose(0, 1), old[..., size:]], -1) for new, old in zip(turned, (q, k), strict=True)
    )


def check(config: Any, want: Rotated, q: torch.Tensor, k: torch.Tensor, ctx: ForwardContext, **how: Any) -> None:
    rope = RotaryEmbedding(config, **how)(ctx)
    q, k = q.clone(), k.clone()
    PagedAttention(q.shape[1], q.shape[1], q.shape[2]).rotate(q, k, rope)
    for got, expected in zip((q, k), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# (family, configuration's class, what it is made of, how quire's table is made)
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "LlamaConfig", {}, {}),
    "llama3": ("llama", "LlamaConfig", {"rope_parameters": LLAMA3}, {}),
    "linear": ("llama", "LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, {}),
    "proportional": (
        "llama", "LlamaConfig",
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}}, {},
    ),
    "yarn": ("qwen3", "Qwen3Config", {"rope_parameters": {**YARN, "rope_theta": 1e6}, "head_dim": 24}, {}),
    "glm": ("glm", "GlmConfig", {"partial_rotary_factor": 0.5}, {"interleaved": True}),
    "glm4": ("glm4", "Glm4Config", {"partial_rotary_factor": 0.5}, {"interleaved": True}),
    "cohere": ("cohere", "CohereConfig", {"rope_theta": 8e6}, {"interleaved": True}),
    "cohere2": ("cohere2", "Cohere2Config", {"head_dim": 16}, {"interleaved": True}),
    "ernie4_5": ("ernie4_5", "Ernie4_5Config", {"rope_theta": 500000.0}, {"interleaved": True}),
    "phi": ("phi", "PhiConfig", {"partial_rotary_factor": 0.5}, {}),
    "stablelm": ("stablelm", "StableLmConfig", {"partial_rotary_factor": 0.25}, {}),
    "nemotron": ("nemotron", "NemotronConfig", {"partial_rotary_factor": 0.5}, {}),
    "gpt_neox": ("gpt_neox", "GPTNeoXConfig", {"rotary_pct": 0.25}, {}),
    "phi3": ("phi3", "Phi3Config", {"original_max_position_embeddings": 20, "rope_parameters": LONG}, {}),
    "phi4": (
        "phi3", "Phi3Config",
        {"original_max_position_embeddings": 60, "partial_rotary_factor": 0.5, "rope_parameters": {
            **LONG, "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0], "partial_rotary_factor": 0.5}}, {},
    ),
    "gpt_oss": (
        "gpt_oss", "GptOssConfig",
        {"head_dim": 16, "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False}}, {},
    ),
}  # fmt: skip
_SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "max_position_embeddings": 128, "vocab_size": 64, "pad_token_id": 0,
}  # fmt: skip


def make(name: str, **settings: Any) -> Any:
    given = {**_SIZES, **settings}
    return getattr(transformers, name)(**{key: value for key, value in given.items()})


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_family_turns_as_in_transformers(name: str) -> None:
    family, kind, settings, how = FAMILIES[name]
    config = make(kind, **settings)
    positions, (q, k) = torch.arange(40) + 7, heads(getattr(config, "head_dim", None) or 8)
    if family == "gpt_oss":  # its cosines are those of half a head, and so is what it turns by
        cos, sin = cosines(family, config, positions[None])
        turned = module_of(family).apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
        want = tuple(one[0].transpose(0, 1) for one in turned)
    else:
        want = halves_or_pairs(family, config, q, k, positions)
    check(config, want, q, k, context(positions, 47), **how)


@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
def test_gemma_3_has_two_tables(layer_type: str) -> None:
    given = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    config = make("Gemma3TextConfig", head_dim=16, num_hidden_layers=6, rope_parameters=given)
    positions, (q, k) = torch.arange(40) + 7, heads(16)
    cos, sin = cosines("gemma3", config, positions[None], layer_type=layer_type)
    turned = module_of("gemma3").apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    want = tuple(one[0].transpose(0, 1) for one in turned)
    ctx = context(positions, 47)
    check(config, want, q, k, ctx, layer_type=layer_type)
    check(config, want, q, k, ctx, parameters=given[layer_type])
    with pytest.raises(UnsupportedModelError, match=r"by type of layer: .*full_attention"):
        RotaryEmbedding(config)
    with pytest.raises(UnsupportedModelError, match="no rotation for layers 'other'"):
        RotaryEmbedding(config, layer_type="other")


def test_parameters_by_type_of_layer_are_checked() -> None:
    config = SimpleNamespace(
        model_type="gemma3_text",
        rope_parameters={"full_attention": {"rope_type": "default"}, "sliding_attention": {"alpha": 3.0}},
    )
    layers = {"rope_parameters.full_attention", "rope_parameters.sliding_attention"}
    with pytest.raises(UnsupportedModelError, match="full_attention="):
        check_rope(config, ())
    with pytest.raises(UnsupportedModelError, match=r"alpha=3\.0"):
        check_rope(config, layers)
    check_rope(config, {*layers, "rope_parameters.alpha"})
    assert rope_parameters(config, "sliding_attention")["rope_theta"] == 10000.0


def test_gpt_j_turns_pairs_of_the_first_dimensions() -> None:
    config = transformers.GPTJConfig(n_embd=64, n_head=4, n_layer=1, n_positions=128, rotary_dim=8, vocab_size=64)
    positions, (q, k) = torch.arange(40) + 7, heads(16)
    gptj = module_of("gptj")
    sin, cos = gptj.create_sinusoidal_positions(128, 8)[positions].chunk(2, -1)
    want = tuple(
        torch.cat([gptj.apply_rotary_pos_emb(x[None, ..., :8], sin[None], cos[None])[0], x[..., 8:]], -1)
        for x in (q, k)
    )
    check(config, want, q, k, context(positions, 47), interleaved=True, head_dim=config.rotary_dim)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_deepseek_turns_the_last_dimensions(family: str) -> None:
    """A query's last 8 of 24 dimensions, and a key by itself; scores alone count, for v3 sorts what it has turned."""
    rope = {**YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.0}
    kind = {"deepseek_v2": "DeepseekV2Config", "deepseek_v3": "DeepseekV3Config"}[family]
    config = make(kind, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, kv_lora_rank=16, rope_parameters=rope)
    positions, (q, _), (_, k) = torch.arange(40) + 7, heads(24), heads(8)
    old = q[..., 16:].transpose(0, 1)[None], k.transpose(0, 1)[None]
    made = cosines(family, config, positions[None])
    if family == "deepseek_v2":
        turned_q, turned_k = module_of(family).apply_rotary_emb(*old, made)
    else:
        turned_q, turned_k = module_of(family).apply_rotary_pos_emb_interleave(*old, *made)
    want = turned_q[0] @ turned_k[0, :1].mT  # [heads, T, T]
    ctx, how = context(positions, 47), {"interleaved": True, "head_dim": config.qk_rope_head_dim}
    for first, x in ((16, q), (0, k)):
        table = RotaryEmbedding(config, first=first, **how)(ctx)
        assert (table.interleaved, table.first) == (True, first)
        before = x.clone()
        kernels.rotary(x, None, table.rows, table.cos_sin, table.interleaved, table.first)
        assert torch.equal(x[..., :first], before[..., :first])
    torch.testing.assert_close(q[..., 16:].transpose(0, 1) @ k[:, 0].mT, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("sections", [[4, 2, 2], [3, 3, 2], [8, 0, 0]])
def test_qwen3_vl_takes_the_axes_in_turn(sections: list[int]) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, "mrope_interleaved": True}
    config = make("Qwen3VLTextConfig", head_dim=16, rope_parameters=rope)
    q, k = heads(16)
    axes = torch.stack([torch.full((40,), 9), torch.arange(40) // 7, torch.arange(40) % 7])
    cos, sin = cosines("qwen3_vl", config, axes[:, None])
    turned = module_of("qwen3_vl").apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    want = tuple(one[0].transpose(0, 1) for one in turned)
    check(config, want, q, k, context(torch.arange(40), 40, axes))
    wrong = make("Qwen3VLTextConfig", head_dim=16, rope_parameters={**rope, "mrope_section": [4, 4]})
    with pytest.raises(UnsupportedModelError, match="three"):
        RotaryEmbedding(wrong)


@pytest.mark.parametrize(("length", "factor"), [(19, 1.2), (30, 1.4)])
def test_phi_3_5_moe_has_a_factor_for_each_set(length: int, factor: float) -> None:
    parameters = {**LONG, "short_mscale": 1.2, "long_mscale": 1.4, "original_max_position_embeddings": 20}
    config = make("LlamaConfig", max_position_embeddings=80)
    rope = RotaryEmbedding(config, parameters=parameters)
    positions = torch.arange(length)
    table = rope(context(positions, length))
    assert rope.threshold == 20
    divisors = torch.tensor(LONG["long_factor" if length > 20 else "short_factor"])
    angles = positions[:, None] / (divisors * 10000 ** (torch.arange(4) / 4))
    want = torch.cat([angles.cos(), angles.sin()], -1) * factor
    torch.testing.assert_close(table.cos_sin[table.rows], want, rtol=1e-5, atol=1e-5)


def test_a_theta_of_one_s_own() -> None:
    """ChatGLM3's rope_ratio, with half of a head in pairs."""
    config = make("LlamaConfig")
    parameters = {"rope_type": "default", "partial_rotary_factor": 0.5}
    positions = torch.arange(9)
    table = RotaryEmbedding(config, interleaved=True, parameters=parameters, theta=50 * 1e4)(context(positions, 9))
    want = positions[:, None] / (50e4 ** (torch.arange(2) / 2))
    torch.testing.assert_close(table.cos_sin[:9], torch.cat([want.cos(), want.sin()], -1))
    assert table.interleaved and table.first == 0


def test_a_table_says_how_it_turns() -> None:
    """And those of lengths and axes do, too."""
    config = make("LlamaConfig", rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    table = RotaryEmbedding(config, interleaved=True, first=3, head_dim=4)(context(torch.arange(150), 150))
    assert (table.interleaved, table.first, table.cos_sin.shape) == (True, 3, (150, 4))
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    axes = torch.arange(30).view(3, 10)
    config = make("LlamaConfig", rope_parameters=rope)
    table = RotaryEmbedding(config, interleaved=True)(context(torch.arange(10), 10, axes))
    assert table.interleaved
    assert RotaryTable(table.rows, table.cos_sin).interleaved is False


@pytest.mark.parametrize(
    "make_table",
    [
        lambda config: RotaryEmbedding(config, head_dim=7),
        lambda config: RotaryEmbedding(config, theta=0.0),
        lambda config: RotaryEmbedding(config, parameters={"rope_type": "yarn"}),
        lambda config: RotaryEmbedding(config, parameters={"rope_type": "twisted"}),
    ],
)
def test_what_makes_no_table_is_refused(make_table: Callable[[Any], RotaryEmbedding]) -> None:
    with pytest.raises(UnsupportedModelError):
        make_table(make("LlamaConfig"))


@pytest.mark.parametrize("size", [16, 80, 128])
@pytest.mark.parametrize("theta", [10000, 123456.7])
@pytest.mark.parametrize("settings", [{"rope_type": "linear"}, LLAMA3, {**LLAMA3, "high_freq_factor": 8.5}])
def test_frequencies_made_here_are_transformers_to_the_bit(settings: dict[str, Any], theta: float, size: int) -> None:
    functions = importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    for factor in (1, 1.5, 8, 32.0):
        parameters = {**settings, "rope_theta": theta, "factor": factor}
        config = transformers.LlamaConfig(head_dim=size, rope_parameters=parameters)
        expected, _ = functions[settings["rope_type"]](config, torch.device("cpu"))
        assert torch.equal(RotaryEmbedding(config)._base[0], expected)  # private: tables show them rounded
