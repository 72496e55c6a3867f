"""Files whose tensors are in blocks of many kinds: logits are those of transformers' model of the numbers.

Its products round their inputs as whole-number products do: layer by layer, of the same inputs, they are the engine's.
Through the whole model, a number that lies between two of 8 bits may be rounded to the other one, which moves what
follows of its own prompt, and more numbers across such borders: so an eighth of all tokens are as close as float32 is,
and none is far off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from quire.checkpoint.gguf.folder import gguf_folder
from quire.checkpoint.gguf.tensors import GgufCheckpoint
from quire.checkpoint.opening import open_checkpoint
from quire.models.loader import load_model, load_structure
from quire.models.quantization.gguf import plan_of
from tests.checkpoint.gguf_blocks import blocks_like
from tests.checkpoint.gguf_quantized import K_QUANTS, quantized_file
from tests.lora.quantized_world import RoundedLinear
from tests.models import run_model, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
LATENTS = {"moe_intermediate_size": 256, "q_lora_rank": 256, "kv_lora_rank": 256, "v_head_dim": 64,
           "qk_nope_head_dim": 32}  # fmt: skip
# Gate and what it multiplies are one layer there, of one kind.
STATES = {"shared_intermediate_size": 256, "mamba_n_heads": 8, "mamba_d_head": 64,
          "kinds": {**K_QUANTS, "ffn_gate.": "Q4_K"}}  # fmt: skip
EXACT, LOOSE = 1e-4, 5.0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("architecture", "variant", "arch", "settings"),
    [
        ("LlamaForCausalLM", "gqa", "llama", {}),
        ("LlamaForCausalLM", "tied", "llama", {}),
        ("Qwen2ForCausalLM", "gqa", "qwen2", {}),
        ("Gemma3ForCausalLM", "as_published", "gemma3", {"head_dim": 64, "query_pre_attn_scalar": 64}),
        ("Phi3ForCausalLM", "window", "phi3", {}),
        ("MixtralForCausalLM", "as_published", "llama", {}),
        ("Qwen3MoeForCausalLM", "as_published", "qwen3moe", {"head_dim": 64, "moe_intermediate_size": 256}),
        ("DeepseekV3ForCausalLM", "v3", "deepseek2", LATENTS),
        ("ApertusForCausalLM", "as_published", "apertus", {"num_attention_heads": 4}),
        ("GraniteMoeHybridForCausalLM", "h_micro", "granitehybrid", STATES),
    ],
)
def test_every_k_quant_in_one_file(tmp_path, architecture: str, variant: str, arch: str, settings: dict[str, Any]):
    theirs, path = quantized_file(tmp_path, architecture, variant, arch, **settings)
    kinds = {one.tensor_type.name for one in gguf.GGUFReader(path).tensors}
    assert kinds >= {"Q3_K", "Q5_K", "Q6_K"} and kinds <= {"F32", *K_QUANTS.values()}
    check(theirs, path)


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0"])
def test_experts_with_biases(tmp_path, kind: str):
    """gpt-oss as it is published in GGUF files, and as it is quantized further."""
    kinds = {"_exps.weight": kind, "attn_q.": "Q4_1", "attn_output": "Q5_0", "token_embd": "Q5_1"}
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    theirs, path = quantized_file(tmp_path, "GptOssForCausalLM", "as_published", "gpt-oss", kinds, **sizes)
    found = {one.tensor_type.name for one in gguf.GGUFReader(path).tensors if "_exps.weight" in one.name}
    assert found == {kind}
    check(theirs, path, stay=("k_proj.weight", "v_proj.weight", "lm_head.weight"))


def check(theirs: Any, path: Path, stay: tuple[str, ...] = ()) -> None:
    """stay: floats in the file."""
    model = load_model(gguf_folder(path))
    floats = [name for name, one in model.named_parameters() if one.dim() > 1 and one.dtype is not torch.uint8]
    assert all(
        name.endswith(("kv_b_proj.weight", "mlp.gate.weight", "conv1d.weight", "router.weight", *stay))
        for name in floats
    ), floats
    for name, layer in theirs.named_modules():
        if isinstance(layer, RoundedLinear):
            x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(len(name)))
            with torch.no_grad():
                wanted = layer(x)
            found = model.get_submodule(name)(x)
            assert (found - wanted).abs().max() < EXACT * wanted.abs().max(), name
    errors: list[float] = []
    for seed in range(4):
        ids = tiny.token_ids(12, seed=seed)
        found = run_model.logits(model, ids)
        assert torch.equal(run_model.logits(model, ids, [5, 1, 6]), found)
        with torch.no_grad():
            wanted = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
        errors += (found.log_softmax(-1) - wanted).abs().amax(-1).tolist()
    errors.sort()
    assert errors[len(errors) // 8] < EXACT, errors
    assert errors[-1] < LOOSE, errors


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_the_blocks_of_these_tests_are_of_the_size_that_is_wanted(kind: str):
    array = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).numpy() * 0.3
    numbers = gguf.dequantize(blocks_like(array, gguf.GGMLQuantizationType[kind]), gguf.GGMLQuantizationType[kind])
    assert numbers.shape == array.shape
    assert 0.2 < numbers.std() < 0.4 and abs(numbers.mean()) < 0.05


def test_experts_stay_in_blocks_where_they_are_multiplied(tmp_path):
    """A GPU multiplies floats, which are the blocks' own."""
    _, path = quantized_file(tmp_path, "MixtralForCausalLM", "as_published", "llama", num_hidden_layers=1)
    folder = gguf_folder(path)
    checkpoint, structure = open_checkpoint(folder), load_structure(folder)
    assert isinstance(checkpoint, GgufCheckpoint)
    plan = plan_of(structure, checkpoint, {})
    experts = {name for name in plan.layers if ".experts." in name}
    assert len(experts) == 3 * structure.config.num_local_experts
    assert plan.for_model(structure).layers == plan.layers
    wide = plan.for_model(structure, torch.device("cuda"))
    assert wide.layers.keys() == plan.layers.keys() - experts
    part = wide.parts["model.layers.0.mlp.experts.3.down_proj.weight"]
    stored = checkpoint.tensor("blk.0.ffn_down_exps.weight")
    numbers = gguf.dequantize(stored.numpy(), gguf.GGMLQuantizationType.Q5_K)
    assert torch.equal(part.make(stored), torch.from_numpy(numbers[3]))
