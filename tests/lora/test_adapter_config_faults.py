"""Whatever is wrong with an adapter's configuration is refused soon, in a sentence that names it."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from typing import Any

import pytest

from quire.errors import AdapterError
from tests.lora import adapter_files as files
from tests.lora.adapter_faults import PROMPTS, good, refused
from tests.lora.adapter_files import config, tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unharmed")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ('{"peft_type": "LORA", "r": 4,}', "is not valid JSON"),
        (b"\xff\xfe\xfa", "is not valid JSON"),
        ("[" * 200_000, "is not valid JSON"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "is not valid JSON"),
        ('{"peft_type": "LORA", "r": ' + "9" * 5000 + "}", "adapter_config.json"),
        ('{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "r": 8}', "the key 'r' is there twice"),
        ("[]", "holds a JSON list"),
        ('"LORA"', "holds a JSON str"),
        ("null", "holds a JSON NoneType"),
        (" " * (4 << 20) + "{}", "bytes, and at most"),
    ],
    ids=["empty", "open", "comma", "bytes", "lists", "objects", "digits", "twice", "list", "text", "null", "long"],
)
def test_what_is_no_configuration(llm, tmp_path, text, says):
    files.write(tmp_path, text, good())
    refused(llm, tmp_path, says)


FIELDS = [
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias", "lora_bias",
    "modules_to_save", "trainable_token_indices", "fan_in_fan_out", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "ensure_weight_tying", "peft_type", "init_lora_weights",
]  # fmt: skip
VALUES = [
    None, True, 0, -1, 3, 2.5, 10**400, float("nan"), float("inf"), 1e300, "", "q_proj", "\ud800", [], [[]], [1], [-1],
    [None], ["x"], [""], ["", 3], {}, {"": 4}, {"x": "y"}, {"q_proj": 10**400}, {"q_proj": None}, {"q_proj": [3, 3]},
    {"lm_head": []}, {"": [1]},
]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_any_value_of_any_field_is_taken_or_refused(llm, tmp_path, field):
    """And never anything else; what is taken can be served."""
    taken = []
    for value in VALUES:
        files.write(tmp_path, json.dumps(config() | {field: value}), good())
        try:
            llm.load_lora_adapter("odd", str(tmp_path))
        except AdapterError as error:
            assert str(tmp_path) in str(error)
            continue
        assert len(tokens(llm, [PROMPTS[0]], "odd")[0]) == 6
        llm.unload_lora_adapter("odd")
        taken.append(value)
    assert len(taken) < len(VALUES), "nothing is wrong for this field"


@pytest.mark.parametrize(
    ("field", "value"),
    [("r", 0), ("r", "4"), ("r", True), ("r", 10**9), ("lora_alpha", "x"), ("lora_alpha", float("nan")),
     ("bias", "some"), ("rank_pattern", [1]), ("rank_pattern", []), ("rank_pattern", {"q_proj": 0}),
     ("alpha_pattern", {"q_proj": "1"}), ("alpha_pattern", 0), ("use_dora", "yes"),
     ("target_modules", 5), ("target_modules", [5]), ("modules_to_save", "lm_head"), ("layers_to_transform", "0"),
     ("trainable_token_indices", [1.5]), ("trainable_token_indices", {"embed_tokens": 3}), ("layers_pattern", 3),
     ("trainable_token_indices", [])],
)  # fmt: skip
def test_a_wrong_value_is_named(llm, tmp_path, field, value):
    files.write(tmp_path, config() | {field: value}, good())
    refused(llm, tmp_path, field, "must be")


UNKNOWN = ["alora_invocation_tokens", "use_qalora", "layer_replication", "arrow_config", "made_up"]
NEUTRAL = (None, False, [], {}, "")


@pytest.mark.parametrize(
    ("field", "complaint", "neutral"),
    [(field, f"the field {field}=['x'] is not served", NEUTRAL) for field in UNKNOWN]
    + [("target_parameters", "target_parameters=['x'] names no parameter of this model", (None, []))],
)
def test_an_unknown_field_is_refused_unless_it_says_nothing(llm, tmp_path, field, complaint, neutral):
    files.write(tmp_path, config() | {field: ["x"]}, good())
    refused(llm, tmp_path, complaint)
    expected = None
    for value in neutral:
        files.write(tmp_path, config() | {field: value}, good())
        llm.load_lora_adapter("fine", str(tmp_path))
        got = tokens(llm, [PROMPTS[0]], "fine")
        assert expected in (None, got)
        expected = got
        llm.unload_lora_adapter("fine")


@pytest.mark.parametrize("kind", ["IA3", "lora", None, 3, ["LORA"]])
def test_another_method_than_lora(llm, tmp_path, kind):
    files.write(tmp_path, config() | {"peft_type": kind}, good())
    refused(llm, tmp_path, f"peft_type={kind!r}")


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "loftq", "corda", "lora_ga", "x", ["gaussian"]])
def test_a_start_that_changes_the_base_model(llm, tmp_path, start):
    files.write(tmp_path, config() | {"init_lora_weights": start}, good())
    refused(llm, tmp_path, f"init_lora_weights={start!r}", "changes the base model")


CATASTROPHES = [
    r"(?:\w*\.?)*!",  # `regex` sees at once that there is no "!", and `re` does not
    r"(x+x+)+y",
    r"(?:(?:[a-z]|_)*(?:[a-z]|_|\.|\d)*)*\d{3}",
    r"(?:(.)|.)*\1\1\1\1\1\1x?",
    r"((((a{1000}){1000}){1000}){1000})",
    r"(?:(?:a{60000}){60000}){60000}",
    r"(?R)",
    r"(a|(?1))*b|.*",
    r"(?:(?R)|a)*",
    "(" * 900 + "a" + ")" * 900,
    "a" * 3000,
    "a{9}" * 400_000,
    "(a|b",
    r"\p{X",
]


@pytest.mark.parametrize("field", ["target_modules", "rank_pattern", "alpha_pattern", "modules_to_save",
                                   "exclude_modules", "layers_pattern"])  # fmt: skip
def test_patterns_that_take_for_ever(llm, tmp_path, before, field):
    """Each is refused (or, by luck, harmless) soon, and another thread generates meanwhile."""
    chosen = CATASTROPHES if field == "target_modules" else CATASTROPHES[:6]
    ticks: list[float] = [time.process_time()]  # in which other processes do not count
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.005):
            ticks.append(time.process_time())

    answers: list[Any] = []
    thread, clock = threading.Thread(target=lambda: answers.append(tokens(llm, PROMPTS))), threading.Thread(target=tick)
    clock.start()
    thread.start()
    for pattern in chosen:
        more: dict[str, Any] = {field: pattern}
        if field.endswith("_pattern") and field != "layers_pattern":
            more = {field: {pattern: 4}}
        elif field == "modules_to_save":
            more = {field: [pattern]}
        elif field == "layers_pattern":
            more = {field: [pattern], "layers_to_transform": [0, 1]}
        files.write(tmp_path, config() | more, good())
        begin = time.monotonic()
        try:
            llm.load_lora_adapter("odd", str(tmp_path))
        except AdapterError as error:
            assert str(tmp_path) in str(error)
        else:
            assert field in ("rank_pattern", "alpha_pattern", "exclude_modules"), "it matches nothing"
            llm.unload_lora_adapter("odd")
        assert time.monotonic() - begin < 30, pattern  # it is bounded, on a busy machine too
    done.set()
    thread.join(30)
    clock.join()
    assert answers == [before]
    assert max(b - a for a, b in itertools.pairwise(ticks)) < 4, "other threads stood still"


@pytest.mark.parametrize("field", ["rank_pattern", "target_modules", "modules_to_save", "trainable_token_indices"])
def test_a_hundred_thousand_names(llm, tmp_path, field):
    names = [f"m{number}" for number in range(100_000)]
    value: Any = names
    if field == "rank_pattern":
        value = dict.fromkeys(names, 4)
    elif field == "trainable_token_indices":
        value = {name: [1] for name in names}
    files.write(tmp_path, config() | {field: value}, good())
    begin = time.process_time()
    with pytest.raises(AdapterError):
        llm.load_lora_adapter("odd", str(tmp_path))
    assert time.process_time() - begin < 8


def test_names_and_patterns_mean_what_they_mean_to_peft(llm):
    """Which modules a configuration targets, and at which rank: against PEFT's own functions."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    from quire.checkpoint.patterns import Patterns
    from quire.lora.targets import _rank, _targeted

    naming = llm.llm_engine.adapters._reader._namings[0]
    names = ["q_proj", "v_proj", "proj", "self_attn.k_proj", "layers.1.mlp.up_proj", "model.layers.0.mlp.gate_proj",
             "mlp", "lm_head", "1.self_attn.q_proj", "layers_1.mlp.up_proj", "embed_tokens", ""]  # fmt: skip
    patterns = [r".*q_proj", r"q_proj", r".*\.(q|v)_proj", r"model\.layers\.\d+\.mlp\..*", r".*layers\.[1-9]\..*proj",
                r"lm_head|.*down_proj", r"^.*(?<!gate)_proj$", r"(?!.*mlp).*proj", r"(?i:.*Q_PROJ)",
                r".*\.1\..{3,9}_proj", r"layers.1.self_attn.\w+", r"q_proj|v_proj"]  # fmt: skip
    rng = random.Random(1)
    found = 0
    for _ in range(400):
        is_text = rng.random() < 0.4
        fields: dict[str, Any] = {
            "target_modules": rng.choice(patterns) if is_text else rng.sample(names, rng.randint(1, 4)),
            "exclude_modules": rng.choice([None, None, rng.choice(patterns), rng.sample(names, 2)]),
            "modules_to_save": rng.choice([None, None, ["lm_head"], ["mlp", "q_proj"], ["layers.0"]]),
            "rank_pattern": {key: rank for rank, key in enumerate(rng.sample(patterns[:-1] + names[:-1], 3), 20)},
            "alpha_pattern": {key: rank for rank, key in enumerate(rng.sample(patterns[:-1] + names[:-1], 2), 30)},
        }
        if not is_text and rng.random() < 0.5:
            fields["layers_to_transform"] = rng.choice([0, 1, [1], [0, 1], [], [7]])
            fields["layers_pattern"] = rng.choice([None, "layers", ["layers"], ["h", "layers"], r"l\w+", []])
        one = LoraConfig(**fields)
        theirs = [name for name in naming.modules if check_target_module_exists(one, name)]
        assert _targeted(one, naming, Patterns("x")) == theirs, fields
        for name in theirs:
            rank = one.rank_pattern.get(get_pattern_key(list(one.rank_pattern), name), one.r)
            alpha = one.alpha_pattern.get(get_pattern_key(list(one.alpha_pattern), name), one.lora_alpha)
            ours = _rank(one, name, Patterns("x"))
            assert (ours.rank, ours.scaling) == (rank, alpha / rank), (fields, name)
        found += len(theirs)
    assert found > 400
