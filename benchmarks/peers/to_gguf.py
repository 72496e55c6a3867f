"""Write a Llama checkpoint in bf16 as GGUF, for timing only (no tokenizer): to_gguf.py MODEL OUT.gguf

Runs in llama.cpp's environment: needs gguf (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and numpy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tensors(path: Path):
    """(name, float32 array) of each tensor of a safetensors file that holds bf16."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    size = int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(bytes(data[8 : 8 + size])).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        first, end = entry["data_offsets"]
        halves = data[8 + size + first : 8 + size + end].view(np.uint16)
        yield name, (halves.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[rest]}.weight"


def main() -> None:
    model, out = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    count = config["vocab_size"]
    writer.add_vocab_size(count)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>".encode() for i in range(count)])
    writer.add_token_scores([float(-i) for i in range(count)])
    writer.add_token_types([1] * count)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    kind = gguf.GGMLQuantizationType.BF16
    for name, values in tensors(model / "model.safetensors"):
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
