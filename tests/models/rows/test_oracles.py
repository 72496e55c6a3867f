"""The oracles of `oracles.py` against transformers' own relatives: the same weights, the same scores."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GlmConfig, GlmForCausalLM

from tests.models import tiny


def agree(one: Any, other: Any) -> None:
    ids = torch.tensor([tiny.token_ids()])
    with torch.inference_mode():
        torch.testing.assert_close(
            one.double()(ids).logits, other.double()(ids).logits, rtol=1e-4, atol=1e-4
        )  # softmax in float32


def fill(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    model.load_state_dict({name: tensor.clone() for name, tensor in weights.items()})
    return model.eval()


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
