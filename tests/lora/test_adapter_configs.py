"""Any LoRA configuration that PEFT takes is served as PEFT serves it: hypothesis looks for one that is not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from tests.lora.conftest import Worlds

pytestmark = pytest.mark.slow

EXAMPLES = 25


@dataclass(frozen=True)
class Names:
    """Of an architecture's modules. path: a layer's, with {} for its number; tokens: ids that prompts have."""

    linear: tuple[str, ...]
    embedding: str
    saved: tuple[str, ...]  # beside the ends
    path: str
    ends: tuple[str, ...] = ()  # other tables
    tied: bool = False


LLAMA = Names(
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), "embed_tokens",
    ("norm", "input_layernorm", "mlp", "o_proj", "k_proj", "layers.1"), "model.layers.{}",
)  # fmt: skip
OPT = Names(
    ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"), "embed_tokens",
    ("final_layer_norm", "self_attn_layer_norm", "self_attn", "fc2", "embed_positions"), "model.decoder.layers.{}",
    tied=True,
)  # fmt: skip
GPT2 = Names(
    ("c_attn", "c_fc", "c_proj", "attn.c_proj", "mlp.c_proj"), "wte", ("ln_1", "ln_f", "mlp", "c_attn", "wpe"),
    "transformer.h.{}", ends=("wpe",), tied=True,
)  # fmt: skip
LLAVA = Names(
    ("q_proj", "v_proj", "up_proj", "down_proj", "out_proj", "fc1", "fc2", "linear_1", "linear_2"), "embed_tokens",
    ("norm", "mlp", "fc2", "layer_norm1", "multi_modal_projector", "patch_embedding", "embeddings"),
    "model.language_model.layers.{}", ends=("patch_embedding", "position_embedding"),
)  # fmt: skip


def subset(names: tuple[str, ...], least: int = 0, most: int = 3) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), unique=True, min_size=least, max_size=most)


def often(value: st.SearchStrategy[Any], otherwise: Any = None) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(otherwise), value)


@st.composite
def fields_of(draw: st.DrawFn, names: Names) -> dict[str, Any]:
    ends = draw(often(subset((names.embedding, "lm_head", *names.ends), 1), []))
    linear = draw(subset(names.linear, 1, 5))
    full = [f"{names.path.format(draw(st.integers(0, 1)))}.{draw(st.sampled_from(['mlp', 'attn']))}"]
    targets: Any = draw(st.sampled_from(["list", "list", "regex", "all-linear"]))
    if targets == "list":
        targets = [*linear, *ends]
    elif targets == "regex":
        layer = draw(often(st.integers(0, 1).map(lambda number: rf"{number}\..*"), ""))
        targets = rf".*\.{layer}({'|'.join(map(re.escape, linear))})"
    given_ends = ends if isinstance(targets, list) else []
    patterns = st.sampled_from(
        [*linear, f"^{names.path.format(0)}.*", names.path.format(1) + ".*", rf".*\.1\..*{linear[0]}", *full, *ends]
    )
    fields: dict[str, Any] = {
        "r": draw(st.integers(1, 9)),
        "lora_alpha": draw(st.integers(6, 40)),
        "target_modules": targets,
        "use_rslora": draw(st.booleans()),
        "use_dora": draw(st.booleans()),
        "fan_in_fan_out": draw(st.booleans()),
        # PEFT sorts them when it saves them.
        "rank_pattern": dict(sorted(draw(often(st.dictionaries(patterns, st.integers(1, 9), max_size=1), {})).items())),
        "alpha_pattern": dict(sorted(draw(st.dictionaries(patterns, st.integers(6, 40), max_size=3)).items())),
        "bias": draw(st.sampled_from(["none", "none", "all", "lora_only"])),
        "modules_to_save": draw(often(subset((*names.saved, names.embedding, "lm_head"), 1, 2))),
    }
    if not fields["use_dora"] and fields["bias"] == "none":
        fields["lora_bias"] = draw(st.booleans())
    if isinstance(targets, list):
        fields["layers_to_transform"] = draw(often(st.one_of(st.integers(0, 1), st.just([0]), st.just([0, 1]))))
        if len(linear) > 1:
            fields["exclude_modules"] = draw(
                often(st.sampled_from([linear[:1], rf".*\.0\..*{linear[0]}", [f"{names.path.format(1)}.{linear[0]}"]]))
            )
    busy = {*given_ends, *(fields["modules_to_save"] or ())}
    if names.embedding not in busy and not (names.tied and "lm_head" in busy):
        ids = st.lists(st.integers(0, 96), unique=True, min_size=1, max_size=20)
        tables = {names.embedding} if names.tied or "lm_head" in busy else {names.embedding, "lm_head"}
        fields["trainable_token_indices"] = draw(
            often(st.one_of(ids, st.dictionaries(st.sampled_from(sorted(tables)), ids, min_size=1)))
        )
    # PEFT itself forgets a head that is tied to a GPT-2's embedding when it reads its own file.
    if names.tied and (names.embedding == "embed_tokens" or "lm_head" not in busy):
        fields["ensure_weight_tying"] = draw(st.booleans())
    return fields


@pytest.mark.parametrize(
    ("architecture", "variant", "changes", "names"),
    [
        ("LlamaForCausalLM", "mha", {"attention_bias": True, "mlp_bias": True}, LLAMA),
        ("OPTForCausalLM", "pre_norm", {}, OPT),
        ("GPT2LMHeadModel", "gelu_new", {}, GPT2),
        ("LlavaForConditionalGeneration", "clip", {}, LLAVA),
    ],
    ids=["llama", "opt", "gpt2", "llava"],
)
def test_any_configuration(
    worlds: Worlds, architecture: str, variant: str, changes: dict[str, Any], names: Names
) -> None:
    world = worlds(architecture, variant, **changes)
    differs = []

    @settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(fields_of(names), st.integers(0, 9))
    def compare(fields: dict[str, Any], seed: int) -> None:
        try:
            path = world.train(LoraConfig(**fields), seed)
        except ValueError:  # what PEFT itself refuses: nothing left to target, and the like
            assume(False)
        differs.append(world.agree(path))

    compare()
    assert len(differs) >= EXAMPLES
    assert sum(differs) >= 0.9 * len(differs)  # some change only one layer, a little
