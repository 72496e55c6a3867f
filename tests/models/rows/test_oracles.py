"""The oracles of `oracles.py` against transformers' own relatives, and what is refused of their families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GlmConfig, GlmForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt import modeling_mpt
from transformers.models.mpt.configuration_mpt import MptAttentionConfig

from quire import registry
from quire.checkpoint.files import Checkpoint
from quire.errors import UnsupportedModelError
from quire.models.chatglm import ChatGLMConfig, ChatGLMModel
from quire.models.loader import fill_again, load_model
from tests.models import run_model, tiny
from tests.models.rows import all_rows
from tests.models.rows.oracles import slopes_of


def agree(one: Any, other: Any) -> None:
    ids = torch.tensor([tiny.token_ids()])
    with torch.inference_mode():
        torch.testing.assert_close(
            one.double()(ids).logits, other.double()(ids).logits, rtol=1e-4, atol=1e-4
        )  # softmax in float32


def fill(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    model.load_state_dict({name: tensor.clone() for name, tensor in weights.items()})
    return model.eval()


def test_a_baichuan_with_rotary_positions_is_a_llama() -> None:
    theirs = tiny.make("BaichuanForCausalLM", "baichuan_7b")
    weights = dict(theirs.state_dict())
    for name in [name for name in weights if "W_pack" in name]:
        for part, own in zip(weights.pop(name).chunk(3), "qkv", strict=True):
            weights[name.replace("W_pack", f"{own}_proj")] = part
    fields = {k: v for k, v in all_rows()["BaichuanForCausalLM"].base.items() if k != "auto_map"}
    config = LlamaConfig(**fields, max_position_embeddings=128, attn_implementation="eager")
    agree(fill(LlamaForCausalLM(config), weights), theirs)


def test_a_normalised_head_has_rows_of_length_one() -> None:
    theirs = tiny.make("BaichuanForCausalLM", "baichuan2_7b")
    plain = tiny.make("BaichuanForCausalLM", "baichuan_7b")
    weights = dict(theirs.state_dict())
    weights["lm_head.weight"] = weights["lm_head.weight"] / weights["lm_head.weight"].norm(dim=1, keepdim=True)
    agree(fill(plain, weights), theirs)


def test_slopes_are_blooms() -> None:
    for heads in (1, 2, 6, 8, 12, 40, 71):
        mask = torch.ones(1, 2)
        theirs = modeling_bloom.build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]
        torch.testing.assert_close(torch.tensor(slopes_of(heads)), theirs)


def test_a_chatglm_is_a_glm() -> None:
    theirs = tiny.make("ChatGLMModel", "glm4_9b")
    fields = theirs.published
    weights: dict[str, torch.Tensor] = {}
    names = {
        "transformer.embedding.word_embeddings": "model.embed_tokens", "transformer.output_layer": "lm_head",
        "transformer.encoder.final_layernorm": "model.norm", "transformer.encoder.layers": "model.layers",
        "self_attention.dense": "self_attn.o_proj", "mlp.dense_h_to_4h": "mlp.gate_up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj", "self_attention": "self_attn",
    }  # fmt: skip
    sizes = theirs.transformer.encoder.layers[0].self_attention.widths
    for name, tensor in theirs.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        if "query_key_value" in name:
            for part, own in zip(tensor.split(sizes), "qkv", strict=True):
                weights[name.replace("query_key_value", f"{own}_proj")] = part
        else:
            weights[name] = tensor
    config = GlmConfig(
        vocab_size=fields["padded_vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["ffn_hidden_size"],
        num_hidden_layers=fields["num_layers"],
        num_attention_heads=fields["num_attention_heads"],
        num_key_value_heads=fields["multi_query_group_num"],
        head_dim=fields["kv_channels"],
        rms_norm_eps=fields["layernorm_epsilon"],
        attention_bias=True,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0 * 500, "partial_rotary_factor": 0.5},
        attn_implementation="eager",
    )
    agree(fill(GlmForCausalLM(config), weights), theirs)


def test_an_mpt_has_the_slopes_that_its_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' class always takes a largest exponent of 8; MosaicML's own code reads it (StoryWriter's is 16)."""
    theirs = tiny.make("MptForCausalLM", "six_heads", attn_config={"alibi_bias_max": 16, "clip_qkv": 2.0})
    ours = load_model(tiny.save(theirs, tmp_path))
    build = modeling_mpt.build_mpt_alibi_tensor
    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda heads, size, _, device: build(heads, size, 16))
    ids = tiny.token_ids()
    with torch.inference_mode():
        want = theirs.double()(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(run_model.logits(ours, ids).double(), want, rtol=1e-4, atol=1e-4)


def test_a_normalised_head_stays_so(tmp_path: Path) -> None:
    """When the numbers are read again, and where an adapter would replace them."""
    model = load_model(tiny.build("BaichuanForCausalLM", "baichuan2_7b", tmp_path))
    head = model.lm_head.weight.clone()
    torch.testing.assert_close(head.norm(dim=1), torch.ones(len(head)))
    fill_again(model, Checkpoint(tmp_path))
    assert torch.equal(model.lm_head.weight, head)
    assert model.published_names("lm_head") != ("lm_head",)


@pytest.mark.parametrize(
    ("architecture", "settings", "named"),
    [
        ("MptForCausalLM", {"attn_config": {"alibi": False}}, "attn_config.alibi"),
        ("MptForCausalLM", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln"),
        ("MptForCausalLM", {"expansion_ratio": 2}, "expansion_ratio"),
        ("FalconForCausalLM", {"alibi": True, "multi_query": True}, "alibi"),
        ("FalconForCausalLM", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ("FalconForCausalLM", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("GPTJForCausalLM", {"rotary_dim": 12}, "rotary_dim"),
        ("CodeGenForCausalLM", {"n_head": 2}, "n_head"),
        ("GPTNeoXForCausalLM", {"hidden_size": 33}, "num_attention_heads"),
    ],
)
def test_what_is_not_served_is_refused(architecture: str, settings: dict[str, Any], named: str) -> None:
    row = all_rows()[architecture]
    config = getattr(transformers, row.config)(**row.base)
    for field, value in settings.items():
        setattr(config, field, MptAttentionConfig(**value) if field == "attn_config" else value)
    with pytest.raises(UnsupportedModelError, match=named):
        registry.resolve([architecture]).check_config(config)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"position_encoding_2d": True}, "ChatGLM-6B, the first one"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ({"multi_query_group_num": 3}, "multi_query_group_num"),
        ({"rope_ratio": 0}, "rope_ratio"),
    ],
)
def test_what_of_chatglm_is_not_served_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        ChatGLMModel.check_config(ChatGLMConfig(**{**all_rows()["ChatGLMModel"].base, **fields}))
