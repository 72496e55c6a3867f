"""GGUF files of each family: the numbers are the model's that the file was made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quire.checkpoint.gguf.folder import gguf_folder
from quire.checkpoint.opening import open_checkpoint
from quire.errors import CheckpointError, UnsupportedModelError
from quire.kernels.quantized import QuantizedWeight
from quire.layers import Embedding
from quire.layers.quantization.rows import weight_of
from quire.models.loader import fill_again, load_model
from tests.checkpoint import gguf_models
from tests.models import run_model, tiny

# (architecture, variant, general.architecture, settings instead of the variant's)
FAMILIES = [
    ("LlamaForCausalLM", "gqa", "llama", {}),
    ("LlamaForCausalLM", "tied", "llama", {}),
    ("LlamaForCausalLM", "rope_llama3", "llama", {}),
    ("LlamaForCausalLM", "attention_bias", "llama", {}),
    ("LlamaForCausalLM", "head_dim_apart", "llama", {}),
    ("MixtralForCausalLM", "as_published", "llama", {}),
    ("Qwen2ForCausalLM", "gqa", "qwen2", {}),
    ("Qwen2MoeForCausalLM", "as_published", "qwen2moe", {}),
    ("Qwen3ForCausalLM", "head_dim_apart", "qwen3", {}),
    ("Qwen3MoeForCausalLM", "as_published", "qwen3moe", {}),
    ("GemmaForCausalLM", "mqa", "gemma", {}),
    ("Gemma2ForCausalLM", "as_published", "gemma2", {"query_pre_attn_scalar": 16}),
    ("Gemma3ForCausalLM", "as_published", "gemma3", {}),
    ("PhiForCausalLM", "phi_2", "phi2", {}),
    ("Phi3ForCausalLM", "window", "phi3", {}),
    ("Phi3ForCausalLM", "longrope_never_long", "phi3", {}),
    ("FalconForCausalLM", "falcon_7b", "falcon", {}),
    ("FalconForCausalLM", "falcon_40b", "falcon", {}),
    ("FalconForCausalLM", "falcon2_11b", "falcon", {}),
    ("GPT2LMHeadModel", "gelu_new", "gpt2", {}),
    ("GPTNeoXForCausalLM", "pythia", "gptneox", {}),
    ("Starcoder2ForCausalLM", "full", "starcoder2", {}),
    ("StableLmForCausalLM", "as_published", "stablelm", {}),
    ("StableLmForCausalLM", "parallel", "stablelm", {}),
    ("Olmo2ForCausalLM", "as_published", "olmo2", {}),
    ("CohereForCausalLM", "as_published", "command-r", {}),
    ("CohereForCausalLM", "qk_norm", "command-r", {}),
    ("GraniteForCausalLM", "as_published", "granite", {}),
    ("NemotronForCausalLM", "as_published", "nemotron", {}),
    ("BloomForCausalLM", "bloom", "bloom", {}),
    ("DeepseekV2ForCausalLM", "lite", "deepseek2", {}),
    ("DeepseekV3ForCausalLM", "v3", "deepseek2", {}),
    ("ApertusForCausalLM", "as_published", "apertus", {}),
    ("ApertusForCausalLM", "biases", "apertus", {}),
    ("MistralForCausalLM", "head_dim_apart", "mistral3", {}),
    ("Ministral3ForCausalLM", "ministral", "mistral3", {}),
    ("Ministral3ForCausalLM", "devstral", "mistral3", {}),
    ("Ministral3ForCausalLM", "past_the_prompt", "mistral3", {}),
    ("GraniteMoeHybridForCausalLM", "h_tiny", "granitehybrid", {}),
    ("GraniteMoeHybridForCausalLM", "h_micro", "granitehybrid", {}),
    ("GraniteMoeHybridForCausalLM", "groups", "granitehybrid", {}),
    ("GraniteMoeHybridForCausalLM", "rotations", "granitehybrid", {}),
    ("GraniteMoeHybridForCausalLM", "biases", "granitehybrid", {}),
    ("GraniteMoeHybridForCausalLM", "untied", "granitehybrid", {}),
    ("FalconH1ForCausalLM", "as_published", "falcon-h1", {}),
    ("FalconH1ForCausalLM", "norm", "falcon-h1", {}),
    ("FalconH1ForCausalLM", "one_group_a_head", "falcon-h1", {}),
    ("Qwen2ForCausalLM", "gqa", "qwen2vl", {}),
    ("Qwen3ForCausalLM", "head_dim_apart", "qwen3vl", {}),
    ("Qwen3MoeForCausalLM", "as_published", "qwen3vlmoe", {}),
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


def build(tmp_path: Path, architecture: str, variant: str, **settings) -> tuple[Path, object]:
    model = tiny.make(architecture, variant, **settings)
    return tiny.save(model, tmp_path / "hf"), model.config


@pytest.mark.parametrize(("architecture", "variant", "arch", "settings"), FAMILIES)
def test_a_file_of_floats_is_the_model(tmp_path, architecture, variant, arch, settings):
    folder, config = build(tmp_path, architecture, variant, **settings)
    path = gguf_models.convert(folder, arch, config, tmp_path / "model.gguf")
    ids = tiny.token_ids(30)
    expected = run_model.logits(load_model(folder), ids)
    logits = run_model.logits(load_model(gguf_folder(path)), ids)
    assert (logits - expected).abs().max() < 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


# Quantized files


def in_blocks(kind: gguf.GGMLQuantizationType) -> Callable[[str, np.ndarray], gguf.GGMLQuantizationType]:
    """Matrices in blocks, as llama.cpp has them: norms, biases and routers stay floats."""

    def kind_of(name: str, array: np.ndarray) -> gguf.GGMLQuantizationType:
        floats = array.ndim < 2 or "norm" in name or "ffn_gate_inp" in name or "rope" in name
        return gguf.GGMLQuantizationType.F32 if floats else kind

    return kind_of


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1"])
@pytest.mark.parametrize(
    ("architecture", "variant", "arch"),
    [
        ("LlamaForCausalLM", "tied", "llama"),
        ("MixtralForCausalLM", "as_published", "llama"),
        ("GemmaForCausalLM", "mqa", "gemma"),
        ("Phi3ForCausalLM", "window", "phi3"),
        ("FalconForCausalLM", "falcon_40b", "falcon"),
        ("GPT2LMHeadModel", "gelu_new", "gpt2"),
        ("BloomForCausalLM", "bloom", "bloom"),
    ],
)
def test_a_quantized_file_is_the_model_of_its_numbers(tmp_path, architecture, variant, arch, kind):
    """Held against the numbers that the file's blocks mean, each parameter's to the bit: rows went where they belong.
    What is left is the rounding of what the products take in."""
    sizes = {"hidden_size": 64, "intermediate_size": 96} if arch not in ("gpt2", "bloom", "falcon") else {}
    sizes |= {"n_embd": 64} if arch == "gpt2" else {"hidden_size": 64}
    folder, config = build(tmp_path, architecture, variant, **sizes)
    kind_of = in_blocks(gguf.GGMLQuantizationType[kind])
    path = gguf_models.convert(folder, arch, config, tmp_path / "model.gguf", kind_of)
    numbers = {}
    for tensor in gguf.GGUFReader(path).tensors:
        numbers[tensor.name] = gguf.dequantize(tensor.data, tensor.tensor_type)
    plain = gguf_models.write(
        tmp_path / "plain.gguf", arch, gguf_models.metadata_of(arch, config), numbers, gguf_models.plain
    )
    ids = tiny.token_ids(30)
    floats, model = load_model(gguf_folder(plain)), load_model(gguf_folder(path))
    expected = run_model.logits(floats, ids)
    wanted = dict(floats.named_parameters())
    for name, one in model.named_parameters():
        layer = model.get_submodule(name.rpartition(".")[0])
        is_bytes = one.dtype is torch.uint8
        found = one
        if is_bytes:
            rows = QuantizedWeight(one.data, layer.layout) if isinstance(layer, Embedding) else weight_of(layer)
            found = rows.dequantize()
        assert torch.equal(found, wanted.pop(name)), name
    assert not wanted
    assert sum(one.dtype is torch.uint8 for one in model.parameters()) > 4
    assert model.dtype is torch.float32
    logits = run_model.logits(model, ids)
    # Of experts, a rounded score may choose another one; rows in a wrong order are off by more than 1.
    limit = 0.5 if arch == "llama" and variant == "as_published" else 0.15
    assert (logits - expected).std() < limit * expected.std()


@pytest.mark.parametrize(
    ("architecture", "variant", "arch"),
    [
        ("ApertusForCausalLM", "as_published", "apertus"),
        ("GraniteMoeHybridForCausalLM", "h_tiny", "granitehybrid"),
        ("DeepseekV3ForCausalLM", "v3", "deepseek2"),
    ],
)
def test_a_file_is_read_again(tmp_path, architecture, variant, arch):
    """What stands in keys, or is made of tensors, too: as after a sleep."""
    folder, config = build(tmp_path, architecture, variant)
    path = gguf_folder(gguf_models.convert(folder, arch, config, tmp_path / "model.gguf"))
    model, again = load_model(path), load_model(path)
    for parameter in [*again.parameters(), *(one for one in again.buffers() if one.is_floating_point())]:
        parameter.data.fill_(77)
    fill_again(again, open_checkpoint(path))
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("F32", torch.float32)])
def test_plain_numbers_keep_their_dtype(tmp_path, kind, dtype):
    folder, config = build(tmp_path, "LlamaForCausalLM", "gqa")
    path = gguf_models.convert(
        folder, "llama", config, tmp_path / "model.gguf", in_blocks(gguf.GGMLQuantizationType[kind])
    )
    model = load_model(gguf_folder(path))
    assert model.dtype is dtype
    assert all(one.dtype is dtype for one in model.parameters())


# What is refused


def test_a_family_that_is_not_read(tmp_path):
    path = gguf_models.write(
        tmp_path / "a.gguf", "mamba", {}, {"token_embd.weight": np.zeros((4, 8))}, gguf_models.plain
    )
    with pytest.raises(UnsupportedModelError, match=r"'mamba' are not read; read are: apertus, arcee, .*llama"):
        gguf_folder(path)


@pytest.mark.parametrize(("arch", "part"), [("phimoe", "short_mscale"), ("llama4", "how many tokens a chunk has")])
def test_a_family_whose_files_do_not_say_all(tmp_path, arch, part):
    path = gguf_models.write(tmp_path / "a.gguf", arch, {}, {"token_embd.weight": np.zeros((4, 8))}, gguf_models.plain)
    with pytest.raises(UnsupportedModelError, match=rf"'{arch}' are not read: .*{part}.*Take the model's safetensors"):
        gguf_folder(path)


@pytest.mark.parametrize(
    ("heads", "more", "part"),
    [
        ((4, 4), (), "each of its heads has a key of its own"),
        ((4, 1), ("attn_qkv.bias",), "its layers have biases"),
        ((4, 2), ("ffn_up.bias", "attn_norm_2.weight"), "its layers have biases"),
        ((4, 4), ("attn_norm_2.weight",), None),
        ((4, 1), (), None),
    ],
)
def test_a_falcon_that_may_have_alibi(tmp_path, heads, more, part):
    pairs = {
        "block_count": 1, "embedding_length": 32, "context_length": 64, "attention.head_count": heads[0],
        "attention.head_count_kv": heads[1], "attention.layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    tensors = {
        "token_embd.weight": np.zeros((8, 32)),
        "blk.0.attn_qkv.weight": np.zeros((8 * sum(heads) + 8 * heads[1], 32)),
        "blk.0.ffn_up.weight": np.zeros((128, 32)),
        **{f"blk.0.{name}": np.zeros(32) for name in more},
    }
    path = gguf_models.write(tmp_path / "a.gguf", "falcon", pairs, tensors, gguf_models.plain)
    if part is None:
        assert '"alibi": false' in (gguf_folder(path) / "config.json").read_text()
        return
    with pytest.raises(UnsupportedModelError, match=f"{part}, as of Falcon-RW, whose positions are ALiBi's"):
        gguf_folder(path)


def changed(tmp_path, architecture: str, variant: str, arch: str, **pairs) -> Path:
    """A model's file with other keys; None leaves one out."""
    folder, config = build(tmp_path, architecture, variant)
    path = gguf_models.convert(folder, arch, config, tmp_path / "model.gguf")
    own = {field.name: field.contents() for field in gguf.GGUFReader(path).fields.values() if "." in field.name[4:]}
    metadata = {name.removeprefix(f"{arch}."): one for name, one in own.items() if not name.startswith("GGUF.")}
    del metadata["general.architecture"]
    kept = {name: one for name, one in {**metadata, **pairs}.items() if one is not None}
    tensors = {**gguf_models.tensors_of(folder, arch, config), **gguf_models.factors_of(arch, config)}
    return gguf_models.write(tmp_path / "changed.gguf", arch, kept, tensors, gguf_models.plain)


@pytest.mark.parametrize("alphas", [None, [0.5], [1, 2, 3], 0.5])
def test_activations_that_are_not_there(tmp_path, alphas):
    path = changed(tmp_path, "ApertusForCausalLM", "as_published", "apertus", **{"xielu.alpha_p": alphas})
    with pytest.raises(CheckpointError, match=r"xielu\.alpha_p must be an array with a number for each layer"):
        load_model(gguf_folder(path))


@pytest.mark.parametrize(
    ("pairs", "part"),
    [
        ({"attention.head_count_kv": 2}, "must say, for each of the 4 layers"),
        ({"attention.head_count_kv": [0, 0, 2]}, "must say, for each of the 4 layers"),
        ({"attention.head_count_kv": [0, 1, 2, 0]}, "differs between layers, and the class"),
        ({"attention.head_count_kv": [0, 0, 0, 0]}, "differs between layers, and the class"),
        ({"rope.scaling.finetuned": True, "rope.dimension_count": 4}, "turns a part of each head"),
        ({"ssm.time_step_rank": 7}, "no multiple of its 7 heads"),
    ],
)
def test_a_hybrid_that_is_not_clear(tmp_path, pairs, part):
    path = changed(tmp_path, "GraniteMoeHybridForCausalLM", "h_tiny", "granitehybrid", **pairs)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=part):
        gguf_folder(path)


def test_a_falcon_h1_whose_output_is_its_embeddings(tmp_path):
    folder, config = build(tmp_path, "FalconH1ForCausalLM", "steps_have_limits")
    path = gguf_models.convert(folder, "falcon-h1", config, tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match="by how much that is multiplied, no key says"):
        gguf_folder(path)


def test_tensors_that_do_not_fit(tmp_path):
    folder, config = build(tmp_path, "LlamaForCausalLM", "gqa")
    tensors = gguf_models.tensors_of(folder, "llama", config)
    for change, part in (
        ({"blk.0.ffn_up.weight": np.zeros((7, 32))}, r"blk\.0\.ffn_up\.weight has shape \(7, 32\)"),
        ({"blk.9.ffn_up.bias": np.zeros(8)}, "tensors of a layer 9"),
        ({"blk.0.extra.weight": np.zeros(8)}, r"of no use: 1 \(blk\.0\.extra\.weight\)"),
    ):
        pairs = gguf_models.metadata_of("llama", config)
        path = gguf_models.write(tmp_path / "b.gguf", "llama", pairs, {**tensors, **change}, gguf_models.plain)
        with pytest.raises(CheckpointError, match=part):
            load_model(gguf_folder(path))


def test_blocks_that_are_not_served(tmp_path):
    folder, config = build(tmp_path, "LlamaForCausalLM", "gqa", hidden_size=256)
    tensors = gguf_models.tensors_of(folder, "llama", config)
    writer = gguf.GGUFWriter(tmp_path / "c.gguf", "llama")
    for name, one in gguf_models.metadata_of("llama", config).items():
        (writer.add_float32 if isinstance(one, float) else writer.add_uint32)(f"llama.{name}", one)
    kind = gguf.GGMLQuantizationType.IQ4_XS
    for name, array in tensors.items():
        if name == "blk.0.attn_q.weight":
            rows = np.zeros((256, 256 // 256 * gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
            writer.add_tensor(name, rows, raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"not served: IQ4_XS \(1 tensors\).*Q4_K_M"):
        load_model(gguf_folder(tmp_path / "c.gguf"))
