"""What a GGUF file's keys say is computed, or refused by name: nothing is ignored, and nothing is made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire.checkpoint.gguf.config import config_of
from quire.checkpoint.gguf.families import FAMILIES
from quire.checkpoint.gguf.file import GgufFile
from quire.checkpoint.gguf.folder import gguf_folder
from quire.checkpoint.gguf.header import GgufTensor
from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.loader import load_model
from tests.checkpoint import gguf_models
from tests.models import run_model, tiny


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


# Headers alone, of every family

BASE = {
    "block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48,
    "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
}  # fmt: skip
EXPERTS = {"expert_count": 8, "expert_used_count": 2}
WINDOW = {"attention.sliding_window": 16}
STATE = {
    "ssm.inner_size": 64, "ssm.time_step_rank": 4, "ssm.state_size": 8, "ssm.group_count": 1, "ssm.conv_kernel": 4,
}  # fmt: skip
LATENT = {
    "attention.kv_lora_rank": 16, "rope.dimension_count": 4, "attention.key_length": 12, "attention.value_length": 8,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "deepseek2": {**LATENT, **EXPERTS}, "minicpm3": LATENT, "gptneox": {"use_parallel_residual": True},
    "granite": {"logit_scale": 4.0}, "granitemoe": {"logit_scale": 4.0, **EXPERTS},
    "cohere2": {"logit_scale": 4.0, **WINDOW}, "gpt-oss": {**EXPERTS, **WINDOW, "expert_feed_forward_length": 48},
    "exaone-moe": {**EXPERTS, **WINDOW}, "mpt": {"attention.max_alibi_bias": 8.0},
    "ernie4_5-moe": {"interleave_moe_layer_step": 1, **EXPERTS},
    "falcon": {"attention.head_count_kv": 1}, "falcon-h1": STATE,
    "granitehybrid": {"logit_scale": 4.0, "attention.head_count_kv": [4, 0], **STATE}, "qwen3vlmoe": EXPERTS,
    **dict.fromkeys(("qwen2moe", "qwen3moe", "olmoe", "glm4moe", "dots1", "hunyuan-moe", "minimax-m2"), EXPERTS),
}  # fmt: skip
# What changes no number: llama.cpp reads it for sizes that tensors show, as a note, or not in these families.
NOTES = {
    "vocab_size", "tensor_data_layout", "classifier.output_labels", "rope.scaling.original_context_length",
    "leading_dense_block_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "feed_forward_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "attention.sliding_window_pattern",  # without a window
}  # fmt: skip


def header(arch: str, pairs: dict[str, Any], tensors: dict[str, tuple[int, ...]] | None = None) -> GgufFile:
    """Without a file. Kinds are those that files have: float32 numbers are no float64."""
    metadata = {f"{arch}.{key}": one for key, one in pairs.items()}
    shapes = {
        "token_embd.weight": (50, 32), "blk.0.attn_q.weight": (32, 32), "blk.1.attn_q.weight": (32, 32),
        "blk.0.ffn_up.weight": (128, 32), "blk.0.attn_kv_b.weight": (64, 16), "blk.0.ffn_gate.weight": (48, 32),
        **({"output.weight": (50, 32)} if arch == "falcon-h1" else {}), **(tensors or {}),
    }  # fmt: skip
    made = {name: GgufTensor(0, shape, 0, 0) for name, shape in shapes.items()}
    return GgufFile((Path("m.gguf"),), {"general.architecture": arch, **metadata}, made, {})


def all_keys() -> Iterator[str]:
    """Of the package's list, all that belong to an architecture."""
    for group in vars(gguf.Keys).values():
        for key in vars(group).values() if isinstance(group, type) else ():
            if isinstance(key, str) and key.startswith("{arch}."):
                yield key.removeprefix("{arch}.")


def is_ignored(arch: str, key: str, base: dict[str, Any], plain: dict[str, Any]) -> bool:
    """Whether each value of each kind leaves the configuration as it is."""
    values = ["yarn", "none"] if key == "rope.scaling.type" else [3, 0.37, True, False]
    for value in values:
        try:
            found = config_of(header(arch, {**base, key: value}))
        except (UnsupportedModelError, CheckpointError) as error:
            assert "m.gguf" in str(error)
            return False
        if found != plain:
            return False
    return True


@pytest.mark.parametrize("arch", sorted(FAMILIES))
def test_no_key_is_ignored(arch):
    """Whatever the gguf package has a name for: another configuration, or an error; or it is a note."""
    base = {**BASE, **MORE.get(arch, {})}
    plain = config_of(header(arch, base))
    ignored = {key for key in all_keys() if is_ignored(arch, key, base, plain)}
    notes = set(NOTES)
    if "attention.layer_norm_epsilon" in ignored:  # of a norm that the family does not have: never both
        notes.add("attention.layer_norm_epsilon")
    else:
        notes.add("attention.layer_norm_rms_epsilon")
    if arch in ("bloom", "gpt2", "mpt", "starcoder"):  # they turn nothing
        notes.add("rope.freq_base")
    if "vl" in arch:  # what is of images alone
        notes |= {"rope.dimension_sections", *(("n_deepstack_layers",) if arch != "qwen2vl" else ())}
    if not arch.startswith("granite"):  # which turn nothing where it is false
        notes.add("rope.scaling.finetuned")
    assert {"vocab_size", "tensor_data_layout"} <= ignored <= notes


NEEDED = (
    "block_count", "context_length", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon",
    "feed_forward_length",
)  # fmt: skip


@pytest.mark.parametrize("key", NEEDED)
def test_what_must_be_there(key):
    """A class's own default would be another model's."""
    base = {name: one for name, one in BASE.items() if name != key}
    with pytest.raises(CheckpointError, match=rf"has no llama\.{key}, which a model of this kind needs"):
        config_of(header("llama", base))


def test_experts_that_nobody_says_how_many_are_taken():
    with pytest.raises(CheckpointError, match=r"has no llama\.expert_used_count"):
        config_of(header("llama", {**BASE, "expert_count": 8}))


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ("deepseek2", {"routed_scaling_factor": 1.0, "norm_topk_prob": False, "n_group": 1}),
        ("glm4moe", {"routed_scaling_factor": 1.0, "norm_topk_prob": False, "n_group": 1}),
        ("granite", {"attention_multiplier": 8**-0.5, "residual_multiplier": 1.0, "embedding_multiplier": 1.0}),
        ("command-r", {"logit_scale": 1.0}),
        ("gemma2", {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
        ("qwen2", {"num_key_value_heads": 4, "rope_theta": 10000.0}),
    ],
)
def test_files_that_are_older_than_a_key(arch, fields):
    """What llama.cpp takes then, and not a published model's."""
    found = config_of(header(arch, {**BASE, **MORE.get(arch, {})}))
    assert {name: found[name] for name in fields} == fields


@pytest.mark.parametrize(
    "key",
    ["block_count", "attention.head_count", "attention.head_count_kv", "attention.key_length", "embedding_length",
     "expert_count", "nextn_predict_layers", "rope.freq_base", "rope.scaling.factor", "rope.dimension_count",
     "attention.layer_norm_rms_epsilon", "attention.kv_lora_rank", "attention.q_lora_rank", "expert_group_count",
     "expert_weights_norm", "expert_gating_func", "expert_weights_scale", "rope.scaling.yarn_log_multiplier"],
)  # fmt: skip
@pytest.mark.parametrize("value", ["text", -1, [], [1, 2], float("nan"), 1 << 62])
def test_values_of_another_kind(key, value):
    """An error that names the key, and none of Python's own."""
    base = {**BASE, **MORE["deepseek2"], "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, key: value}
    if key == "rope.freq_base" and value == 1 << 62:
        value = base[key] = 0.0
    if (key, value) in (("rope.scaling.factor", 1 << 62), ("rope.scaling.yarn_log_multiplier", -1)):
        return  # odd numbers, and numbers
    if key in ("attention.layer_norm_rms_epsilon", "expert_weights_scale", "rope.scaling.yarn_log_multiplier") and (
        type(value) is int
    ):
        return
    with pytest.raises((CheckpointError, UnsupportedModelError), match=key.rpartition(".")[2]):
        config_of(header("deepseek2", base))


# Layers


def test_layers_are_those_of_the_tensors():
    file = header("gemma3", {**BASE, "block_count": 1 << 31})
    with pytest.raises(CheckpointError, match=r"block_count is 2,147,483,648, .* up to 1,024"):
        config_of(file)
    with pytest.raises(CheckpointError, match="block_count is 3, and there is no tensor of layer 2"):
        config_of(header("llama", {**BASE, "block_count": 3}))
    with pytest.raises(CheckpointError, match="tensors of a layer 1: layers would be left out"):
        config_of(header("llama", {**BASE, "block_count": 1}))
    with pytest.raises(CheckpointError, match="tensors of a layer 999,999,999,999"):
        config_of(header("llama", BASE, {"blk.999999999999.attn_q.weight": (1, 1)}))


def test_layers_that_guess_tokens_are_said_to():
    more = {"block_count": 3, "nextn_predict_layers": 1}
    guess = {"blk.2.attn_q.weight": (32, 32)}
    assert config_of(header("llama", {**BASE, **more}, guess))["num_hidden_layers"] == 2
    assert config_of(header("llama", {**BASE, **more}))["num_hidden_layers"] == 2  # left out of the file
    with pytest.raises(CheckpointError, match="of which 3 guess"):
        config_of(header("llama", {**BASE, **more, "nextn_predict_layers": 3}))


# Whole models


def built(tmp_path: Path, architecture: str, variant: str, arch: str, change: dict[str, Any], **more) -> Path:
    """The file of a tiny model with other keys; None takes one away. more: further tensors."""
    made = tiny.make(architecture, variant)
    folder = tiny.save(made, tmp_path / "hf")
    pairs = {**gguf_models.metadata_of(arch, made.config), **change}
    tensors = {**gguf_models.tensors_of(folder, arch, made.config), **gguf_models.factors_of(arch, made.config), **more}
    kept = {name: one for name, one in pairs.items() if one is not None}
    return gguf_models.write(tmp_path / "m.gguf", arch, kept, tensors, gguf_models.plain)


LLAMA = ("LlamaForCausalLM", "gqa", "llama")
MIXTRAL = ("MixtralForCausalLM", "as_published", "llama")


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        *((LLAMA, key, value) for key, value in {
            "attention.sliding_window": 8, "logit_scale": 0.5, "attention.clamp_kqv": 1.0, "attention.scale": 0.5,
            "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0, "attention.causal": False,
            "embedding_scale": 2.0, "rope.dimension_count": 4, "rope.scaling.attn_factor": 1.5,
            "of_tomorrow": 1}.items()),
        (LLAMA, "expert_used_count", 2), (MIXTRAL, "expert_gating_func", 2), (MIXTRAL, "expert_weights_scale", 5.0),
        (MIXTRAL, "expert_weights_norm", False),
        (("Qwen3MoeForCausalLM", "as_published", "qwen3moe"), "expert_weights_norm", False),
        (("Qwen2MoeForCausalLM", "as_published", "qwen2moe"), "expert_weights_norm", True),
        (("DeepseekV3ForCausalLM", "v3", "deepseek2"), "expert_gating_func", 1),
        (("Qwen2ForCausalLM", "gqa", "qwen2"), "rope.dimension_count", 4),
        (("Phi3ForCausalLM", "window", "phi3"), "rope.scaling.attn_factor", 1.5),
        (("FalconForCausalLM", "falcon_7b", "falcon"), "attention.max_alibi_bias", 8.0),
    ],
)  # fmt: skip
def test_a_key_that_the_class_does_not_compute(tmp_path, model, key, value):
    gguf_folder(built(tmp_path, *model, {}))
    with pytest.raises(UnsupportedModelError, match=key.rpartition(".")[2]):
        gguf_folder(built(tmp_path, *model, {key: value}))


def test_what_asks_for_nothing_is_read(tmp_path):
    """Keys that llama.cpp's own writer puts into every file, with the values that ask for nothing."""
    change = {
        "rope.dimension_count": 8, "attention.key_length": 8, "attention.value_length": 8, "attention.causal": True,
        "attention.scale": 0.0, "expert_count": 0, "logit_scale": 0.0, "rope.scaling.attn_factor": 1.0,
        "rope.scaling.type": "linear", "rope.scaling.factor": 0.0, "rope.freq_base_swa": 10000.0, "ssm.inner_size": 0,
        "attention.sliding_window": 0, "pooling_type": 0, "use_parallel_residual": False,
        "attention.layer_norm_epsilon": 0.0, "rope.scaling.yarn_ext_factor": -1.0, "quantize.imatrix.entries": 224,
    }  # fmt: skip
    path = built(tmp_path, *LLAMA, change)
    ids = tiny.token_ids(20)
    expected = run_model.logits(load_model(tmp_path / "hf"), ids)
    assert (run_model.logits(load_model(gguf_folder(path)), ids) - expected).abs().max() < 1e-4


def test_what_is_of_images_alone(tmp_path):
    """As files of Gemma 3 have it that others than llama.cpp's converter wrote, for a tower that stands elsewhere."""
    change = {
        "mm.tokens_per_image": 256, "vision.block_count": 27, "vision.attention.layer_norm_epsilon": 1e-6,
        "rope.local.freq_base": 10000.0, "rope.global.freq_base": 1e6,
    }  # fmt: skip
    gemma = ("Gemma3ForCausalLM", "as_published", "gemma3")
    gguf_folder(built(tmp_path, *gemma, change))
    with pytest.raises(UnsupportedModelError, match=r"rope\.local\.freq_base"):
        gguf_folder(built(tmp_path, *gemma, {**change, "rope.local.freq_base": 5000.0}))


@pytest.mark.parametrize(("architecture", "arch"), [("Gemma2ForCausalLM", "gemma2"), ("Gemma3ForCausalLM", "gemma3")])
@pytest.mark.parametrize("pattern", [1, 3, [False, True, True, False, True, True, True]])
def test_which_layers_have_windows(tmp_path, architecture, arch, pattern):
    settings = {"query_pre_attn_scalar": 16} if arch == "gemma2" else {}
    made = tiny.make(architecture, "as_published", **settings)
    layers = made.config.num_hidden_layers
    own = pattern[:layers] if isinstance(pattern, list) else [(one + 1) % pattern != 0 for one in range(layers)]
    assert own != [one == "sliding_attention" for one in made.config.layer_types]
    made.config.layer_types = ["sliding_attention" if one else "full_attention" for one in own]
    folder = tiny.save(made, tmp_path / "hf")
    said = own if isinstance(pattern, list) else pattern
    pairs = {**gguf_models.metadata_of(arch, made.config), "attention.sliding_window_pattern": said}
    tensors = gguf_models.tensors_of(folder, arch, made.config)
    path = gguf_models.write(tmp_path / "m.gguf", arch, pairs, tensors, gguf_models.plain)
    ids = tiny.token_ids(30)
    expected = run_model.logits(load_model(folder), ids)
    assert (run_model.logits(load_model(gguf_folder(path)), ids) - expected).abs().max() < 1e-4


# Rotations


@pytest.mark.parametrize(
    "change",
    [{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope.scaling.factor": 4.0},
     {"rope.scale_linear": 4.0}],
)  # fmt: skip
def test_a_factor_without_a_type_is_linear(tmp_path, change):
    path = built(tmp_path, "LlamaForCausalLM", "rope_default", "llama", change)
    made = tiny.make("LlamaForCausalLM", "rope_default")
    made.config.rope_parameters = {**made.config.rope_parameters, "rope_type": "linear", "factor": 4.0}
    ids = tiny.token_ids(20)
    expected = run_model.logits(load_model(tiny.save(made, tmp_path / "other")), ids)
    assert (run_model.logits(load_model(gguf_folder(path)), ids) - expected).abs().max() < 1e-4


def test_a_factor_beside_none_does_nothing():
    plain = config_of(header("llama", BASE))
    assert config_of(header("llama", {**BASE, "rope.scaling.type": "none", "rope.scaling.factor": 4.0})) == plain


ONES = np.ones(4)


@pytest.mark.parametrize(
    ("change", "tensors", "part"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_freqs.weight": ONES}, "factor 4"),
        ({"rope.scaling.type": "yarn"}, {"rope_freqs.weight": ONES}, "type 'yarn'"),
        ({}, {"rope_factors_long.weight": ONES}, "has rope_factors_long.weight"),
        ({}, {"rope_freqs.weight": ONES, "rope_factors_short.weight": ONES}, "alone"),
        ({}, {"rope_freqs.weight": np.zeros(4)}, "4 numbers above 0"),
        ({}, {"rope_freqs.weight": np.array([1, 1, 1, np.nan])}, "4 numbers above 0"),
        ({}, {"rope_freqs.weight": np.ones(3)}, "4 numbers above 0"),
        ({"rope.freq_base": 0.0}, {}, "freq_base is 0"),
        ({"rope.scaling.factor": -2.0}, {}, "factor is -2"),
        ({"rope.scaling.type": "of-tomorrow"}, {}, "'of-tomorrow' is not read"),
        ({"rope.scaling.type": 3}, {}, "3 is not read"),
    ],
)
def test_rotations_that_are_not_served(tmp_path, change, tensors, part):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=part):
        gguf_folder(built(tmp_path, *LLAMA, change, **tensors))


def test_factors_of_a_family_that_turns_nothing(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"has no use for rope_freqs\.weight"):
        gguf_folder(built(tmp_path, "GPT2LMHeadModel", "gelu_new", "gpt2", {}, **{"rope_freqs.weight": ONES}))


def test_factors_of_one_layer_are_of_no_use(tmp_path):
    path = built(tmp_path, *LLAMA, {}, **{"blk.0.rope_freqs.weight": ONES})
    with pytest.raises(CheckpointError, match=r"of no use: 1 \(blk\.0\.rope_freqs\.weight\)"):
        load_model(gguf_folder(path))
