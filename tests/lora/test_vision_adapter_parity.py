"""Vision-language models' adapters against PEFT: on the text model, the tower, the projector and all of them.

As in test_adapter_parity.py; two of three prompts have images, whose features are the adapter's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from quire.errors import AdapterError
from tests.lora.conftest import Worlds
from tests.lora.peft_world import World

pytestmark = pytest.mark.usefixtures("one_thread")

TOWER = ["out_proj", "fc1", "fc2"]  # and q_proj, k_proj, v_proj, which are the text model's too
FIELDS: dict[str, dict[str, Any]] = {
    "text": {"target_modules": r".*language_model.*\.(q_proj|v_proj|down_proj)"},
    "short_names_mean_both": {"target_modules": ["q_proj", "v_proj"]},
    "tower": {"target_modules": TOWER},
    "tower_dora": {"target_modules": r".*vision_tower.*(k_proj|fc1)", "use_dora": True},
    "tower_bias_all": {"target_modules": r".*vision_tower.*fc1", "bias": "all"},
    "tower_bias_lora_only": {"target_modules": TOWER, "bias": "lora_only"},
    "tower_lora_bias": {"target_modules": [*TOWER, "patch_embedding"], "lora_bias": True},
    "patches": {"target_modules": ["patch_embedding"]},
    "patches_rslora": {"target_modules": ["patch_embedding"], "use_rslora": True, "alpha_pattern": {"patch.*": 3}},
    "patches_dora": {"target_modules": ["patch_embedding"], "use_dora": True},
    "positions": {"target_modules": ["position_embedding"]},
    "positions_dora": {"target_modules": ["position_embedding"], "use_dora": True},
    "projector": {"target_modules": ["linear_1", "linear_2"]},
    "projector_dora_bias": {"target_modules": ["linear_1", "linear_2"], "use_dora": True, "bias": "lora_only"},
    "all_linear": {"target_modules": "all-linear"},
    "all_linear_but_tower": {"target_modules": "all-linear", "exclude_modules": r".*vision_tower.*"},
    "everywhere": {"target_modules": [*TOWER, "q_proj", "patch_embedding", "position_embedding", "linear_1",
                                      "gate_proj", "embed_tokens", "lm_head"]},
    "everywhere_dora": {"target_modules": [*TOWER, "patch_embedding", "position_embedding", "linear_1", "up_proj"],
                        "use_dora": True, "bias": "all"},
    "one_layer_of_both": {"target_modules": ["q_proj", "fc1"], "layers_to_transform": 1},
    "save_projector": {"target_modules": ["q_proj"], "modules_to_save": ["multi_modal_projector"]},
    "save_tower_parts": {"target_modules": ["gate_proj"], "modules_to_save": ["patch_embedding", "position_embedding",
                                                                             "fc1", "layer_norm2"]},
    "save_tower_layer": {"target_modules": ["gate_proj"], "modules_to_save": ["vision_tower.encoder.layers.1"]},
    "save_tower": {"target_modules": ["gate_proj"], "modules_to_save": ["vision_tower"]},
    "save_ends": {"target_modules": ["fc2"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"target_modules": ["q_proj", "fc1"], "trainable_token_indices": [5, 60, 200, 299]},
    "tokens_with_marker": {"target_modules": ["linear_1"], "trainable_token_indices": {"embed_tokens": [5, 383]}},
}  # fmt: skip
CLIP_ONLY: dict[str, dict[str, Any]] = {
    "save_class_embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embeddings"]},
    "save_tower_norm": {"target_modules": ["q_proj"], "modules_to_save": ["pre_layrnorm"]},
}
# SigLIP's attention pooling is in the checkpoint, and LLaVA does not use it.
SIGLIP: dict[str, dict[str, Any]] = {
    name: FIELDS[name]
    for name in ("tower", "tower_bias_all", "patches_dora", "positions", "all_linear", "everywhere_dora", "save_tower")
}
TIED: dict[str, dict[str, Any]] = {
    "tokens": FIELDS["tokens"],
    "lora_on_embedding_tied": {"target_modules": ["embed_tokens", "fc1"], "ensure_weight_tying": True},
    "save_embedding_tied": {"target_modules": ["fc1"], "modules_to_save": ["embed_tokens"],
                            "ensure_weight_tying": True},
    "save_head": {"target_modules": ["fc1"], "modules_to_save": ["lm_head"]},
    "bias_all": {"target_modules": ["q_proj"], "bias": "all"},
}  # fmt: skip
GPT2: dict[str, dict[str, Any]] = {
    "everywhere": {"target_modules": ["c_attn", "c_proj", "fc1", "q_proj", "wte", "wpe"]},
    "save_conv": {"target_modules": ["fc1"], "modules_to_save": ["c_attn", "wpe"]},
}
QWEN2_VL: dict[str, dict[str, Any]] = {
    "text": {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"},
    "tower": {"target_modules": ["qkv", "attn.proj", "fc1", "fc2"]},
    "tower_dora": {"target_modules": ["qkv", "fc1", "mlp.0"], "use_dora": True, "bias": "all"},
    "patches": {"target_modules": ["patch_embed.proj"]},
    "merger": {"target_modules": ["merger.mlp.0", "merger.mlp.2"]},
    "save_merger": {"target_modules": ["q_proj"], "modules_to_save": ["merger"]},
    "all_linear": {"target_modules": "all-linear"},
    "tokens": {"target_modules": ["qkv"], "trainable_token_indices": [5, 60, 200]},
}
QWEN2_5_VL: dict[str, dict[str, Any]] = {
    "all_linear": {"target_modules": "all-linear"},
    "save_merger": {"target_modules": ["q_proj", "gate_proj"], "modules_to_save": ["merger", "norm2"]},
    "text": {"target_modules": r".*language_model.*(q_proj|down_proj)", "use_rslora": True},
    "tower": {"target_modules": r".*visual.*(qkv|attn.proj|gate_proj|up_proj|down_proj)", "use_dora": True},
    "patches_and_merger": {"target_modules": ["patch_embed.proj", "merger.mlp.0", "merger.mlp.2"], "bias": "all"},
    "tokens": {"target_modules": ["qkv", "lm_head"], "trainable_token_indices": [5, 60, 200]},
}
QWEN3_VL: dict[str, dict[str, Any]] = {
    "all_linear": {"target_modules": "all-linear"},
    "save_mergers": {"target_modules": ["q_proj"], "modules_to_save": ["merger", "deepstack_merger_list.1", "q_norm"]},
    "text": {"target_modules": r".*language_model.*(q_proj|down_proj)", "use_rslora": True},
    "tower": {"target_modules": r".*visual.*(qkv|attn.proj|linear_fc1|linear_fc2)", "use_dora": True},
    "places": {"target_modules": ["pos_embed", "patch_embed.proj"]},
    "levels": {"target_modules": r".*deepstack_merger_list.*linear_fc.", "bias": "all"},
    "tokens": {"target_modules": ["qkv", "lm_head"], "trainable_token_indices": [5, 60, 200]},
}
GLM4V: dict[str, dict[str, Any]] = {
    "all_linear": {"target_modules": "all-linear"},
    "save_merger": {"target_modules": ["q_proj"], "modules_to_save": ["merger", "post_layernorm", "norm1"]},
    "text": {"target_modules": r".*language_model.*(q_proj|gate_up_proj|down_proj)", "use_rslora": True},
    "tower": {"target_modules": r".*visual.*(qkv|attn.proj|gate_proj|up_proj|down_proj)", "use_dora": True},
    "patches": {"target_modules": ["patch_embed.proj", "downsample"], "bias": "all"},
    "merger": {"target_modules": r".*merger\.(proj|gate_proj|down_proj)"},
    "tokens": {"target_modules": ["qkv", "lm_head"], "trainable_token_indices": [5, 60, 200]},
}

ROWS: dict[str, dict[str, Any]] = {  # of Pixtral's tower
    "all_linear": {"target_modules": "all-linear"},
    "text": {"target_modules": r".*language_model.*(q_proj|down_proj)", "use_rslora": True},
    "tower": {"target_modules": r".*vision_tower.*(q_proj|o_proj|gate_proj|down_proj)", "use_dora": True},
    "patches": {"target_modules": ["patch_conv"]},
    "projector": {"target_modules": ["linear_1", "linear_2"], "bias": "all"},
    "save_norms": {"target_modules": ["o_proj"], "modules_to_save": ["ln_pre", "ffn_norm", "attention_norm"]},
    "tokens": {"target_modules": ["k_proj", "lm_head"], "trainable_token_indices": [5, 60, 200, 382]},
}
MISTRAL3: dict[str, dict[str, Any]] = {
    "save_projector": {"target_modules": ["k_proj"], "modules_to_save": ["multi_modal_projector"]},
    **ROWS,
    "merger": {"target_modules": ["merging_layer", "linear_2"], "use_dora": True},
}

INTERNVL: dict[str, dict[str, Any]] = {
    "all_linear": {"target_modules": "all-linear"},
    "save_projector": {"target_modules": ["q_proj", "fc1"], "modules_to_save": ["multi_modal_projector"]},
    "text": {"target_modules": r".*language_model.*(q_proj|down_proj)", "use_rslora": True},
    "tower": {"target_modules": r".*vision_tower.*(q_proj|projection_layer|fc1|fc2)", "use_dora": True, "bias": "all"},
    "patches": {"target_modules": ["projection"]},
    "projector": {"target_modules": ["linear_1", "linear_2"], "bias": "lora_only"},
    "save_norms": {"target_modules": ["o_proj"], "modules_to_save": ["layernorm_before", "layer_norm"]},
    "tokens": {"target_modules": ["k_proj", "lm_head"], "trainable_token_indices": [5, 60, 200, 382]},
}
GEMMA3: dict[str, dict[str, Any]] = {
    "all_linear": {"target_modules": "all-linear"},
    "save_projector": {"target_modules": ["out_proj", "q_proj"], "modules_to_save": ["multi_modal_projector"]},
    "text": {"target_modules": r".*language_model.*(q_proj|down_proj)", "use_rslora": True},
    "tower": {"target_modules": ["out_proj", "fc1", "fc2"], "use_dora": True, "bias": "all"},
    "patches": {"target_modules": ["patch_embedding", "position_embedding"]},
    "save_norms": {"target_modules": ["o_proj"], "modules_to_save": ["mm_soft_emb_norm", "post_layernorm"]},
    "tokens": {"target_modules": ["k_proj", "lm_head"], "trainable_token_indices": [5, 60, 200, 381]},
}
PALIGEMMA: dict[str, dict[str, Any]] = {
    "all_linear": {"target_modules": "all-linear"},
    "save_projector": {"target_modules": ["out_proj", "q_proj"], "modules_to_save": ["multi_modal_projector"]},
    "text": {"target_modules": r".*language_model.*(q_proj|down_proj)", "use_rslora": True},
    "tower": {"target_modules": ["out_proj", "fc1", "fc2"], "use_dora": True, "bias": "all"},
    "patches": {"target_modules": ["patch_embedding", "position_embedding"]},
    "projector": {"target_modules": ["linear"], "use_dora": True, "bias": "lora_only"},
    "save_norms": {"target_modules": ["o_proj"], "modules_to_save": ["input_layernorm", "post_layernorm"]},
    "tokens": {"target_modules": ["k_proj", "lm_head"], "trainable_token_indices": [5, 60, 200, 382]},
}

LLAVA_NEXT: dict[str, dict[str, Any]] = {
    "everywhere": FIELDS["everywhere"],
    "everywhere_dora": FIELDS["everywhere_dora"],
    "save_projector": FIELDS["save_projector"],
}

IDEFICS: dict[str, dict[str, Any]] = {
    "text": {"target_modules": r".*text_model.*\.(q_proj|v_proj|down_proj)"},
    "tower": {"target_modules": r".*vision_model.*\.(q_proj|out_proj|fc1|fc2)", "bias": "lora_only"},
    "connector": {"target_modules": ["modality_projection.proj"], "use_dora": True},
    "all_linear": {"target_modules": "all-linear"},
    "everywhere_dora": {"target_modules": ["q_proj", "fc1", "patch_embedding", "position_embedding", "proj",
                                           "gate_proj"], "use_dora": True, "bias": "all"},
    "save_connector": {"target_modules": ["q_proj"], "modules_to_save": ["connector"]},
    "save_tower": {"target_modules": ["gate_proj"], "modules_to_save": ["vision_model"]},
    "tokens": {"target_modules": ["fc1"], "trainable_token_indices": [5, 60, 200, 299]},
}  # fmt: skip
ONEVISION: dict[str, dict[str, Any]] = {
    name: FIELDS[name] for name in ("text", "tower", "projector", "all_linear", "everywhere_dora", "save_projector")
}

PHI3_V: dict[str, dict[str, Any]] = {
    "all_linear": {"target_modules": "all-linear"},
    "text": {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"], "use_rslora": True},
    "text_by_pattern": {"target_modules": r"model\.layers\.\d+\.(self_attn\.qkv_proj|mlp\.down_proj)", "bias": "all"},
    "tower": {"target_modules": r".*img_processor.*(q_proj|out_proj|fc1|fc2)", "use_dora": True, "bias": "lora_only"},
    "projection": {"target_modules": ["img_projection.0", "img_projection.2"], "bias": "all"},
    "projection_dora": {"target_modules": r".*img_projection\.[02]", "use_dora": True},
    "patches": {"target_modules": ["patch_embedding", "position_embedding"]},
    "save_projection": {"target_modules": ["qkv_proj", "fc1"], "modules_to_save": ["img_projection"]},
    "save_tower": {"target_modules": ["down_proj"], "modules_to_save": ["img_processor", "lm_head"]},
}

LLAVA, NEXT, QWEN, QWEN25, QWEN3, GLM = (
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Glm4vForConditionalGeneration",
)
IDEFICS3, SMOLVLM, ONE, VIDEO = (
    f"{name}ForConditionalGeneration" for name in ("Idefics3", "SmolVLM", "LlavaOnevision", "LlavaNextVideo")
)
MODELS: list[tuple[str, str, dict[str, dict[str, Any]]]] = [
    (LLAVA, "clip", {**FIELDS, **CLIP_ONLY}),
    (LLAVA, "siglip", SIGLIP),
    (LLAVA, "qwen2_tied", TIED),
    (LLAVA, "gpt2", GPT2),
    (NEXT, "clip", LLAVA_NEXT),
    (QWEN, "mrope", QWEN2_VL),
    (QWEN25, "windows", QWEN2_5_VL),
    ("Mistral3ForConditionalGeneration", "merged", MISTRAL3),
    ("Mistral3ForConditionalGeneration", "ministral", {"all_linear": ROWS["all_linear"]}),
    ("LlavaOfPixtral", "pixtral", ROWS),
    ("InternVLForConditionalGeneration", "tiles", INTERNVL),
    ("Gemma3ForConditionalGeneration", "untied", GEMMA3),
    ("PaliGemmaForConditionalGeneration", "untied", PALIGEMMA),
    ("PaliGemmaForConditionalGeneration", "gemma2", {"all_linear": PALIGEMMA["all_linear"]}),
    (GLM, "half", GLM4V),
    (IDEFICS3, "one_patch", IDEFICS),
    (SMOLVLM, "squares", IDEFICS),
    (ONE, "scaled", ONEVISION),
    (VIDEO, "average", ONEVISION),
    (QWEN3, "deepstack", QWEN3_VL),
    ("Phi3VForCausalLM", "published", PHI3_V),
    ("Qwen3VLMoeForConditionalGeneration", "experts", {"all_linear": {"target_modules": "all-linear"}}),
]
QUICK = {
    QWEN25: ("all_linear", "save_merger"), "Mistral3ForConditionalGeneration": ("all_linear", "save_projector"),
    "LlavaOfPixtral": ("all_linear",), GLM: ("all_linear", "save_merger"),
    IDEFICS3: ("all_linear",), SMOLVLM: ("everywhere_dora", "save_connector"), ONE: ("everywhere_dora",),
    VIDEO: ("all_linear",),
    QWEN3: ("all_linear", "save_mergers"), "Qwen3VLMoeForConditionalGeneration": (),
    "Phi3VForCausalLM": ("all_linear", "save_projection"),
    "InternVLForConditionalGeneration": ("all_linear",), "Gemma3ForConditionalGeneration": ("save_projector",),
    "PaliGemmaForConditionalGeneration": ("save_projector",),
}  # fmt: skip  # of these, the others are slow
CASES = [
    pytest.param(
        architecture, variant, fields, id=f"{architecture}-{variant}-{name}",
        marks=() if name in QUICK.get(architecture, table) else pytest.mark.slow,
    )
    for architecture, variant, table in MODELS
    for name, fields in table.items()
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "variant", "fields"), CASES)
def test_a_field_does_what_it_does_in_peft(
    worlds: Worlds, architecture: str, variant: str, fields: dict[str, Any]
) -> None:
    world = worlds(architecture, variant)
    assert world.agree(world.train(LoraConfig(r=4, **fields), seed=len(fields)))


@pytest.mark.parametrize(("architecture", "variant"), [(LLAVA, "clip"), (LLAVA, "siglip"), (QWEN, "mrope")])
def test_all_linear_in_the_file_itself(worlds: Worlds, architecture: str, variant: str) -> None:
    world = worlds(architecture, variant)
    assert world.agree(world.train(LoraConfig(r=3, target_modules="all-linear"), target_modules="all-linear"))


def test_biases_of_older_files(worlds: Worlds) -> None:
    """With bias="all", PEFT once saved all that is called some bias, and now what is called just that."""
    world = worlds(LLAVA, "siglip")
    path = world.train(LoraConfig(r=4, target_modules=["q_proj"], bias="all"))
    older = renamed(world, path, "same")
    tensors = load_file(path / "adapter_model.safetensors")
    name = "model.vision_tower.head.attention.in_proj_bias"
    assert f"base_model.model.{name}" not in tensors
    tensors[f"base_model.model.{name}"] = world.theirs.get_parameter(name).detach() + 0.1
    save_file(tensors, older / "adapter_model.safetensors")
    assert world.agree(older, expected=path)


def old_name(name: str, naming: str) -> str:
    """A module's or tensor's name in transformers 5, as one of the releases before had it."""
    if naming == "same":
        return name
    if naming == "qwen2-vl before 4.52":
        return name.replace("model.visual", "visual").replace("model.language_model", "model")
    name = name.replace("model.vision_tower", "model.vision_tower.vision_model")
    if naming == "before 4.52":
        name = name.replace("lm_head", "language_model.lm_head").replace("model.language_model", "language_model.model")
        name = name.replace("model.vision_tower", "vision_tower").replace("model.multi_modal", "multi_modal")
    return name


def renamed(world: World, path: Path, naming: str, **written: Any) -> Path:
    """A copy of an adapter whose tensors and targets have their old names."""
    world.made += 1
    copy = path.with_name(f"adapter{world.made}")
    copy.mkdir()
    prefix = "base_model.model."
    tensors = load_file(path / "adapter_model.safetensors")
    named = {prefix + old_name(name.removeprefix(prefix), naming): tensor for name, tensor in tensors.items()}
    assert naming == "same" or named.keys() != tensors.keys()
    save_file(named, copy / "adapter_model.safetensors")
    config = json.loads((path / "adapter_config.json").read_text())
    for field in ("target_modules", "modules_to_save"):
        if isinstance(config[field], list):
            config[field] = [old_name(name, naming) for name in config[field]]
    for field in ("rank_pattern", "alpha_pattern"):
        config[field] = {old_name(name, naming): value for name, value in config[field].items()}
    (copy / "adapter_config.json").write_text(json.dumps({**config, **written}))
    return copy


FULL = {
    "r": 4,
    "target_modules": [
        "model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.1.mlp.up_proj", "lm_head",
        "model.language_model.embed_tokens", "model.vision_tower.encoder.layers.0.mlp.fc1",
        "model.vision_tower.embeddings.patch_embedding", "model.multi_modal_projector.linear_1",
    ],
    "rank_pattern": {"^model.language_model.layers.0.self_attn.q_proj": 7},
    "modules_to_save": ["model.multi_modal_projector.linear_2", "model.vision_tower.encoder.layers.1.layer_norm1"],
}  # fmt: skip


@pytest.mark.parametrize("naming", ["before 4.52", "before 5"])
@pytest.mark.parametrize(("architecture", "variant"), [(LLAVA, "clip"), (LLAVA, "siglip"), (NEXT, "clip")])
def test_old_names(worlds: Worlds, architecture: str, variant: str, naming: str) -> None:
    """Adapters trained before Hugging Face renamed the modules of LLaVA, which name each in full."""
    world = worlds(architecture, variant)
    path = world.train(LoraConfig(**FULL))
    assert world.agree(renamed(world, path, naming), expected=path)


def test_old_names_by_pattern(worlds: Worlds) -> None:
    """Patterns for the old names match the old names: the one here is from LLaVA fine-tuning scripts of 2024."""
    world = worlds(LLAVA, "clip")
    path = world.train(LoraConfig(r=4, target_modules=r".*(language_model|vision_tower).*(q_proj|fc1)"))
    pattern = r"(language_model\.model\.layers|vision_tower\.vision_model\.encoder)\..*(q_proj|fc1)"
    assert world.agree(renamed(world, path, "before 4.52", target_modules=pattern), expected=path)


def test_old_names_with_everything_linear(worlds: Worlds) -> None:
    world = worlds(LLAVA, "clip")
    path = world.train(LoraConfig(r=4, target_modules="all-linear", use_dora=True, bias="all"))
    old = renamed(world, path, "before 4.52", target_modules="all-linear")
    assert world.agree(old, expected=path)


def test_old_names_of_qwen2_vl(worlds: Worlds) -> None:
    world = worlds(QWEN, "mrope")
    targets = ["model.language_model.layers.0.self_attn.q_proj", "model.visual.blocks.1.attn.qkv", "lm_head"]
    path = world.train(LoraConfig(r=4, target_modules=targets, modules_to_save=["model.visual.merger"]))
    assert world.agree(renamed(world, path, "qwen2-vl before 4.52"), expected=path)


def test_names_of_two_releases_do_not_mix(worlds: Worlds) -> None:
    """A file with old names whose configuration has the new ones is refused: it would be served in part."""
    world = worlds(LLAVA, "clip")
    path = world.train(LoraConfig(**FULL))
    targets = json.loads((path / "adapter_config.json").read_text())["target_modules"]
    with pytest.raises(AdapterError):
        world.load(renamed(world, path, "before 4.52", target_modules=targets))
