"""No configuration field that changes the arithmetic is ignored: the tables against the installed transformers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from transformers.modeling_rope_utils import RopeParameters

from quire import registry
from quire.errors import UnsupportedModelError
from quire.layers.rotary import ROPE_KEYS, ROTARY_FIELDS, SILENT_ROPE_KEYS
from quire.models import fields
from tests.models import rows, tiny
from tests.models.rows import llama

LLAMA, QWEN2, OPT, GPT2 = tiny.TABLE
KNOWN = {*fields.OTHERS, *fields.NEUTRAL_VALUES, *fields.EVERYWHERE, *fields.SILENT, *ROTARY_FIELDS, "layer_types"}


def unknown(sources: Iterator[str]) -> set[str]:
    """The fields of all configuration classes whose names say that they matter, and that no table has."""
    found: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            for part in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    found.add(part.target.id)
                elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    found.update(argument.arg for argument in (*part.args.args, *part.args.kwonlyargs))
    matter = {name for name in found if fields.WORDS.search(name) and not fields.TRAINING_WORDS.search(name)}
    return matter - KNOWN


def sources() -> Iterator[str]:
    root = Path(transformers.__file__).parent
    files = [*sorted(root.glob("models/*/configuration_*.py")), root / "configuration_utils.py"]
    assert len(files) > 300
    return (file.read_text(encoding="utf-8") for file in files)


def test_every_field_of_transformers_is_in_a_table() -> None:
    """A new one is to be implemented, or to be put where it belongs in `quire/models/fields.py`."""
    assert sorted(unknown(sources())) == []


def test_the_walk_sees_a_new_field() -> None:
    new = "class C:\n    rope_twist: float = 1.0\n    hidden_size: int = 8\n    attention_dropout: float = 0.0\n"
    old = "class C:\n    def __init__(self, attn_twist=None, vocab_size=5, *, qk_twist=1): ...\n"
    assert unknown(iter([new, old])) == {"rope_twist", "attn_twist", "qk_twist"}


def test_every_rotary_parameter_of_transformers_is_in_a_table() -> None:
    """What its functions read, a RotaryEmbedding has; what single models read beside, is refused."""
    assert set(RopeParameters.__annotations__) <= ROPE_KEYS
    source = (Path(transformers.__file__).parent / "modeling_rope_utils.py").read_text(encoding="utf-8")
    read = set(re.findall(r"rope_parameters(?:_dict)?(?:\[|\.get\()\s*['\"](\w+)['\"]", source))
    assert len(read) > 5
    assert read <= ROPE_KEYS | SILENT_ROPE_KEYS | {"full_attention", "sliding_attention"}


def config_of(architecture: str, **settings: Any) -> Any:
    kind, base, _ = tiny.TABLE[architecture]
    config = getattr(transformers, kind)(**base)
    vars(config).update(settings)  # past transformers' checks of types
    return config


def check(architecture: str, config: Any) -> None:
    registry.resolve([architecture]).check_config(config)


@pytest.mark.parametrize("architecture", [LLAMA, QWEN2, OPT, GPT2])
def test_what_a_class_does_not_implement_is_refused(architecture: str) -> None:
    served = registry.resolve([architecture]).supported_fields
    config, taken = config_of(architecture), []
    check(architecture, config)
    for field in sorted(fields.OTHERS - fields.COMMON - served - set(config.attribute_map)):
        before = dict(vars(config))
        vars(config)[field] = 7
        try:
            fields.check_fields(config, served)
            taken.append(field)
        except UnsupportedModelError as error:
            assert f"{field}=7" in str(error)
        vars(config)[field] = None
        fields.check_fields(config, served)
        vars(config).clear()
        vars(config).update(before)
    assert not taken


@pytest.mark.parametrize("field", sorted(fields.COMMON))
def test_common_names_mean_something_where_a_class_has_them(field: str) -> None:
    check(LLAMA, config_of(LLAMA, **{field: "swiglu"}))
    own = type("Own", (transformers.LlamaConfig,), {field: "swiglu"})(**tiny.TABLE[LLAMA][1])
    vars(own)[field] = "swiglu"
    with pytest.raises(UnsupportedModelError, match=f"{field}='swiglu'"):
        check(LLAMA, own)


def test_what_a_class_says_that_it_implements_is_in_a_table() -> None:
    """Or is a rotary parameter, of which `check_rope` refuses all that nobody names."""
    for row in registry.BUILT_IN:
        own = {field for field in registry.resolve([row.architecture]).supported_fields if "." not in field}
        assert own <= KNOWN


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"qk_norm_twist": True}, "qk_norm_twist=True"),
        ({"rope_ratio": 2.0}, "rope_ratio=2.0"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"residual_multiplier": 0.22}, "residual_multiplier=0.22"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ({"alibi": True}, "alibi=True"),
        ({"parallel_attn": True}, "parallel_attn=True"),
    ],
)
def test_fields_that_a_llama_does_not_have(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(named)):
        check(LLAMA, config_of(LLAMA, **settings))


ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"mrope_section": [1, 1, 2], "mrope_interleaved": True}, "mrope_interleaved=True"),
        ({"alpha": 1000.0}, "alpha=1000.0"),
        ({"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta=0.1"),
        ({"xdrope_section": [1, 1, 1, 1]}, "xdrope_section"),
        ({"short_mscale": 1.2}, "short_mscale=1.2"),
        ({"full_attention": dict(ROPE), "sliding_attention": dict(ROPE)}, "full_attention="),
    ],
)
@pytest.mark.parametrize("architecture", [LLAMA, QWEN2])
def test_rotary_parameters_that_would_be_ignored(architecture, parameters, named) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(named)):
        check(architecture, config_of(architecture, rope_parameters={**ROPE, **parameters}))


def test_neutral_rotary_parameters_are_taken() -> None:
    check(
        LLAMA, config_of(LLAMA, rope_parameters={**ROPE, "mrope_interleaved": False, "alpha": None, "finetuned": True})
    )


def test_a_class_may_implement_a_rotary_parameter() -> None:
    class Interleaved(registry.resolve([QWEN2])):
        supported_fields = registry.resolve([QWEN2]).supported_fields | {"rope_parameters.mrope_interleaved"}

    Interleaved.check_config(config_of(QWEN2, rope_parameters={**ROPE, "mrope_interleaved": True}))


def test_qwen3_vls_rotation_is_refused(tmp_path: Path) -> None:
    """It says so by one more rotary parameter; without it, the axes would be those of Qwen2-VL."""
    text = {**llama.BASE, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2], "mrope_interleaved": True}}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(vision_config=vision, text_config=text, image_token_id=5)
    with pytest.raises(UnsupportedModelError, match="mrope_interleaved=True"):
        registry.resolve(["Qwen2VLForConditionalGeneration"])(config)


@pytest.mark.parametrize("outside", [{}, {"sliding_window": 8, "rope_scaling": {"type": "mrope"}, "clip_qkv": None}])
def test_the_text_models_fields_outside_it_are_nobodys(outside: dict[str, Any]) -> None:
    """Transformers 4.52 to 4.56 wrote a Qwen2-VL's text fields twice, and read those in text_config."""
    rope = {**ROPE, "mrope_section": [1, 1, 2]}
    text = {**llama.BASE, "rope_parameters": rope, "use_sliding_window": False}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(vision_config=vision, text_config=text, image_token_id=5)
    vars(config).update({"rope_parameters": rope, "use_sliding_window": True, "max_window_layers": 28, **outside})
    check("Qwen2VLForConditionalGeneration", config)
    vars(config)["clip_qkv"] = 8.0
    with pytest.raises(UnsupportedModelError, match=r"clip_qkv=8\.0"):
        check("Qwen2VLForConditionalGeneration", config)


# As published, but for sizes.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2": (LLAMA, {
        "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "is_llama_config": True,
        "mlp_bias": False, "pretraining_tp": 1, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 1e5,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": True,
    }),
    "Llama 3.1": (LLAMA, {
        "rope_theta": 5e5, "pretraining_tp": 1, "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
    }),
    "Yarn-Llama-2": (LLAMA, {"rope_scaling": {
        "factor": 16.0, "original_max_position_embeddings": 64, "type": "yarn", "finetuned": True,
    }}),
    "Yi": (LLAMA, {"rope_scaling": None, "sliding_window": None, "attention_bias": False, "pad_token_id": 0}),
    "Falcon3": (LLAMA, {
        "activation": "swiglu", "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
        "rope_scaling": None, "rope_theta": 1000042,
    }),
    "Qwen2.5": (QWEN2, {
        "attention_dropout": 0.0, "max_window_layers": 21, "rope_theta": 1e6, "sliding_window": 32768,
        "use_mrope": False, "use_sliding_window": False, "rms_norm_eps": 1e-6,
    }),
    "OPT": (OPT, {
        "_remove_final_layer_norm": False, "activation_dropout": 0.0, "attention_dropout": 0.0, "dropout": 0.1,
        "do_layer_norm_before": True, "init_std": 0.02, "layerdrop": 0.0, "prefix": "</s>",
    }),
    "Galactica": (OPT, {
        "enable_bias": False, "layer_norm_elementwise_affine": False, "learned_embeddings": True,
        "scale_embeddings": False, "layerdrop": 0.0,
    }),
    "GPT-2": (GPT2, {
        "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "n_ctx": 1024, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_taken(name: str) -> None:
    architecture, published = PUBLISHED[name]
    kind, base, _ = tiny.TABLE[architecture]
    check(architecture, getattr(transformers, kind).from_dict({**base, **published}))


@pytest.mark.parametrize("value", fields.NEUTRAL)
def test_a_field_without_a_value_is_none(value: Any) -> None:
    vars(config := config_of(LLAMA))["clip_qkv"] = value
    check(LLAMA, config)


def test_what_is_private_is_nobodys_setting() -> None:
    """`vars` of a configuration has more than its file."""
    fields.check_fields(SimpleNamespace(model_type="x", _attn_implementation="sdpa", rope_ratio=None), set())  # type: ignore[arg-type]


PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# What transformers' class computes in another way than its name says, or not at all.
ODD: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"rope_parameters": PARTIAL}, "partial_rotary_factor=0.5") for name in (
        "ApertusForCausalLM", "CohereForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "MistralForCausalLM",
        "Olmo2ForCausalLM", "Qwen3ForCausalLM", "Starcoder2ForCausalLM",
    )),
    ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": PARTIAL, "sliding_attention": {**PARTIAL,
        "partial_rotary_factor": 1.0}}}, "partial_rotary_factor=0.5"),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window=0"),
    ("Gemma2ForCausalLM", {"sliding_window": None}, "sliding_window=None"),
    ("Ministral3ForCausalLM", {"rope_parameters": {**ROPE, "original_max_position_embeddings": 8}},
     "llama_4_scaling_beta=None"),
    ("Ministral3ForCausalLM", {"rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1}},
     "original_max_position_embeddings=None"),
    ("Qwen3ForCausalLM", {"layer_types": ["sliding_attention"] * 3}, "sliding_window=None"),
    ("BloomForCausalLM", {"slow_but_exact": True, "pretraining_tp": 4}, "slow_but_exact=True"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "settings", "named"), ODD)
def test_what_transformers_computes_otherwise_is_refused(
    architecture: str, settings: dict[str, Any], named: str
) -> None:
    kind, base, _ = rows.entry(architecture)
    config = getattr(transformers, kind)(**base)
    check(architecture, config)
    vars(config).update(settings)
    with pytest.raises(UnsupportedModelError, match=re.escape(named)):
        check(architecture, config)


def test_a_rotation_of_an_odd_number_of_dimensions_is_refused() -> None:
    """Transformers would make heads of another size of it."""
    kind, base, _ = rows.entry("StableLmForCausalLM")
    config = getattr(transformers, kind)(**{**base, "num_attention_heads": 8})  # a quarter of 4 dimensions turns
    with pytest.raises(UnsupportedModelError, match="do not fit heads of 4"):
        registry.resolve(["StableLmForCausalLM"])(config)
