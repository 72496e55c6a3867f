"""Write a Llama checkpoint in bf16 as GGUF, without a tokenizer: to_gguf.py MODEL [--kind BF16] OUT.gguf

--kind: of the linears' and the embedding's weights. F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 are made by the
package gguf and are the same in all tensors; any other (Q4_K_M, Q5_K_M, Q6_K, ...) by llama.cpp's own quantizer, which
mixes kinds as its files have them. Rows of queries and keys are in the order in which llama.cpp rotates them.

Needs gguf (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and numpy; the other kinds llama_cpp too.
"""

from __future__ import annotations

import argparse
import json
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
OWN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # kinds that gguf quantizes to


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


def rotated(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head with those of its two halves in turns: llama.cpp rotates neighbours."""
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def write(model: Path, out: Path, kind: gguf.GGMLQuantizationType) -> None:
    config = json.loads((model / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
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
    for name, values in tensors(model / "model.safetensors"):
        values = rotated(values, heads[part]) if (part := name.split(".")[-2]) in heads else values
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, out: Path, kind: str, pure: bool = False) -> None:
    """By llama.cpp's own quantizer."""
    import llama_cpp as lib

    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.pure = pure
    params.allow_requantize = True
    code = lib.llama_model_quantize(str(source).encode(), str(out).encode(), params)
    if code:
        raise SystemExit(f"llama.cpp does not make {kind} of {source}: {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder of safetensors, or a file of GGUF for llama.cpp's quantizer")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", default="BF16")
    parser.add_argument("--pure", action="store_true", help="llama.cpp's quantizer mixes no kinds")
    args = parser.parse_args()
    if args.model.is_file():
        quantize(args.model, args.out, args.kind, args.pure)
    elif args.kind in OWN:
        write(args.model, args.out, gguf.GGMLQuantizationType[args.kind])
    else:
        whole = args.out.with_suffix(".bf16")
        write(args.model, whole, gguf.GGMLQuantizationType.BF16)
        quantize(whole, args.out, args.kind, args.pure)
        whole.unlink()


if __name__ == "__main__":
    main()
