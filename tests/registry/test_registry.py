"""Rows, and a real package that adds some: installed with pip, its model checked against transformers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire import registry
from quire.errors import UnsupportedModelError
from quire.registry import plugins
from tests.models import tiny
from tests.models.rows import all_rows
from tests.multimodal.families import FAMILIES, HEARING

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PACKAGE = TESTS / "plugin_package"


def refused(*architectures: str) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        registry.resolve(list(architectures))
    return str(caught.value)


def test_built_in_rows_resolve() -> None:
    from quire.models.base import CausalLM

    aliases = {alias for row in all_rows().values() for alias in row.aliases}
    text = {*tiny.TABLE, *all_rows(), *aliases}  # each is compared with transformers
    seeing = {family.architecture or name for name, family in FAMILIES.items()}
    alone = {row.architecture for row in registry.BUILT_IN if row.text_alone}  # tests/models/rows/test_llama4.py
    assert alone == {"Llama4ForConditionalGeneration"}
    assert {row.architecture for row in registry.BUILT_IN} == text | seeing | alone | HEARING.keys()
    for row in registry.BUILT_IN:
        assert issubclass(registry.resolve([row.architecture]), CausalLM)
        more = {"image"} if row.architecture in seeing else {"audio"} if row.architecture in HEARING else set()
        assert row.capabilities == {"text"} | more


def test_rows_are_data() -> None:
    code = (
        "import sys; from quire import registry; registry.rows(); registry.find(['LlamaForCausalLM'])\n"
        "print([m for m in ('torch', 'transformers', 'quire.models') if m in sys.modules])"
    )
    assert run(code) == "[]"


@pytest.mark.parametrize(
    ("architecture", "parts"),
    [
        (
            "LlamaForCausalML",
            ["'LlamaForCausalML'", "nearest supported one is LlamaForCausalLM", "adding-a-model"],
        ),
        ("OptForCausalLM", ["nearest supported one is OPTForCausalLM"]),
        ("GPT2Model", ["nearest supported one is GPT2LMHeadModel", "no language-modelling head"]),
        ("LlamaForSequenceClassification", ["does not classify", "LlamaForCausalLM"]),
        ("Kosmos2ForConditionalGeneration", ["not a text-only decoder", "never serves a part"]),
        ("Qwen9VLForConditionalGeneration", ["not a text-only decoder"]),
        ("LlavaLlamaForCausalLM", ["not a text-only decoder"]),
        ("T5ForConditionalGeneration", ["not a text-only decoder"]),
        ("MolmoForCausalLM", ["code that comes with the checkpoint, which is never run"]),
        ("Molmo2ForConditionalGeneration", ["image processor", "computes with torchvision alone"]),
        ("Zzz", ["no row", "GPT2LMHeadModel", "LlamaForCausalLM", "OPTForCausalLM", "Qwen2ForCausalLM"]),
    ],
)
def test_what_is_not_supported_says_why_and_what_is_near(architecture: str, parts: list[str]) -> None:
    message = refused(architecture)
    for part in parts:
        assert part in message


def test_only_the_first_architecture_counts() -> None:
    assert "Kosmos2ForConditionalGeneration" in refused("Kosmos2ForConditionalGeneration", "LlamaForCausalLM")
    assert "no architecture" in refused()


# A package in the environment, seen from another process.


def run(code: str, *paths: Path, **variables: str) -> str:
    """What a fresh interpreter prints, with `paths` in front of its own."""
    search = os.pathsep.join([*map(str, paths), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": search} | variables
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=TESTS)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plug-in package, built and installed by pip without a network."""
    source = tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    target = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-build-isolation",
        "--no-deps",
    ]
    done = subprocess.run([*command, "--target", str(target), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


REFUSALS = {
    "BrokenForCausalLM": [
        "quire_persimmon.broken:BrokenForCausalLM",
        "package 'quire-persimmon'",
        "ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
    ],
    "NoSuchClassForCausalLM": ["NoSuchClass", "AttributeError"],
    "NotAClassForCausalLM": ["is not a class, but 7"],
    "MisspeltForCausalLM": ["'module:Class'", "'quire_persimmon.PersimmonForCausalLM'"],
}


def test_a_broken_row_shows_its_root_cause_and_harms_no_other(installed: Path) -> None:
    code = f"""
import json
from quire import registry
from quire.errors import UnsupportedModelError
messages = {{}}
for name in {list(REFUSALS)!r}:
    try:
        registry.resolve([name])
    except UnsupportedModelError as error:
        messages[name] = str(error)
names = [registry.resolve([name]).__name__ for name in ("LlamaForCausalLM", "PersimmonForCausalLM")]
seen = sorted(registry.find(["SeeingForConditionalGeneration"]).capabilities)
print(json.dumps([messages, names, seen, sorted(registry.find(["PersimmonForCausalLM"]).capabilities)]))
"""
    messages, names, seen, plain = json.loads(run(code, installed))
    for name, parts in REFUSALS.items():
        for part in parts:
            assert part in messages[name]
    assert names == ["LlamaForCausalLM", "PersimmonForCausalLM"]
    assert (seen, plain) == (["image", "text"], ["text"])


def test_listing_imports_no_plug_in(installed: Path) -> None:
    code = (
        "import sys; from quire import registry; names = [row.architecture for row in registry.rows()]\n"
        "print('PersimmonForCausalLM' in names, 'quire_persimmon' in sys.modules)"
    )
    assert run(code, installed) == "True False"


def test_the_package_s_model_equals_transformers(installed: Path, tmp_path: Path) -> None:
    """Every switch of its configuration; whole and in chunks; through the whole loader."""
    code = """
import json, sys
sys.path.insert(0, "models")
import torch, transformers, tiny, run_model
from quire.errors import UnsupportedModelError
from quire.models.loader import load_model
variants = (
    {}, {"tie_word_embeddings": True}, {"num_attention_heads": 1}, {"qk_layernorm": False},
    {"layer_norm_eps": 1e-2}, {"hidden_act": "relu"},
    # As in adept/persimmon-8b-base, but for sizes.
    {"hidden_act": "relu2", "layer_norm_eps": 1e-5, "qk_layernorm": True, "max_position_embeddings": 16384,
     "rope_theta": 25000.0, "partial_rotary_factor": 0.5, "hidden_dropout": 0.0, "attention_dropout": 0.0},
)
for number, settings in enumerate(variants):
    config = transformers.PersimmonConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        **{"num_attention_heads": 4, "max_position_embeddings": 128, **settings},
    )
    torch.manual_seed(0)
    theirs = transformers.PersimmonForCausalLM(config).eval()
    tiny.randomise(theirs)
    path = tiny.save(theirs, f"{sys.argv[1]}/{number}")
    ids = tiny.token_ids()
    ours = load_model(path)
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0]
    for chunks in (None, [5, 1, 34]):
        error = (run_model.logits(ours, ids, chunks) - want).abs().max() / want.abs().max()
        assert error < 1e-4, error
print(type(ours).__module__)
for field, value in (("sliding_window", 8), ("num_attention_heads", 3)):
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(json.dumps(json.loads(text) | {field: value}))
    try:
        load_model(path)
    except UnsupportedModelError as error:
        print(f"{field}={value}" in str(error))
    (path / "config.json").write_text(text)
"""
    printed = run(code.replace("sys.argv[1]", repr(str(tmp_path))), installed).split()
    assert printed == ["quire_persimmon", "True", "True"]


def test_the_engine_runs_it_by_name_only(installed: Path, tmp_path: Path) -> None:
    """Without the package the very same checkpoint is refused, and a class of another kind always is."""
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["PersimmonForCausalLM"], "model_type": "persimmon"})
    )
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"architectures": ["NotOursForCausalLM"], "model_type": "persimmon"}))
    code = f"""
from quire.errors import UnsupportedModelError
from quire.models.loader import load_model
for path in ({str(tmp_path)!r}, {str(other)!r}):
    try:
        load_model(path, impl='quire')
    except UnsupportedModelError as error:
        print(error)
    except ValueError as error:
        print(type(error).__name__)
"""
    bare, with_package = run(code).splitlines(), run(code, installed).splitlines()
    assert "'PersimmonForCausalLM' is not supported" in bare[0]
    assert with_package[0] == "CheckpointError"  # on to the weights, of which there are none
    assert "does not derive from quire.models.base.CausalLM" in with_package[1]


# Metadata that no build tool would write, but that may lie around.


def distribution(site: Path, name: str, entry_points: str) -> Path:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    return site


def test_a_package_may_replace_a_built_in_and_the_log_says_so(tmp_path: Path) -> None:
    distribution(tmp_path, "other-llama", "[quire.models]\nLlamaForCausalLM = collections:OrderedDict\n")
    code = "import logging; logging.basicConfig(format='%(message)s')\nfrom quire import registry\n"
    code += "import sys; sys.stderr = sys.stdout; logging.getLogger().handlers[0].setStream(sys.stdout)\n"
    code += "print(registry.resolve(['LlamaForCausalLM']).__name__)"
    log, name = run(code, tmp_path).splitlines()
    assert name == "OrderedDict"
    assert "other-llama takes the place of quire's own" in log


def test_two_packages_for_one_architecture_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "one", "[quire.models]\nFooForCausalLM = collections:OrderedDict\n")
    distribution(tmp_path, "two", "[quire.models]\nFooForCausalLM = collections:Counter\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = refused("FooForCausalLM")
    assert "one (collections:OrderedDict)" in message and "two (collections:Counter)" in message


def test_of_two_copies_of_a_package_the_first_on_the_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, target in (("late", "Counter"), ("early", "OrderedDict")):
        site = distribution(tmp_path / place, "one", f"[quire.models]\nFooForCausalLM = collections:{target}\n")
        monkeypatch.syspath_prepend(str(site))
    assert registry.resolve(["FooForCausalLM"]).__name__ == "OrderedDict"


def test_unreadable_metadata_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = distribution(tmp_path, "one", "[quire.models]\nFooForCausalLM = collections:OrderedDict\n")
    distribution(tmp_path, "rubbish", "[quire.models\nno equals sign")
    (tmp_path / "binary-1.0.dist-info").mkdir()
    (tmp_path / "binary-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe[quire.models]\x00")
    monkeypatch.syspath_prepend(str(site))
    assert registry.resolve(["FooForCausalLM"]).__name__ == "OrderedDict"
    assert registry.resolve(["LlamaForCausalLM"]).__name__ == "LlamaForCausalLM"
    assert "metadata cannot be read" in caplog.text


def test_root_cause_stops_where_a_context_is_suppressed() -> None:
    def chained() -> BaseException:
        try:
            try:
                raise KeyError("inner")
            except KeyError:
                raise ValueError("outer") from None
        except ValueError as error:
            return error

    assert plugins.root_cause(chained()) == "ValueError: outer"


# The page that tells how.


def test_the_page_shows_the_very_code() -> None:
    page = (ROOT / "docs" / "adding-a-model.md").read_text()
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", page, re.DOTALL)
    source = (PACKAGE / "src" / "quire_persimmon" / "__init__.py").read_text()
    assert source in blocks
    entry = re.search(r'PersimmonForCausalLM = "[^"]*"', (PACKAGE / "pyproject.toml").read_text())
    assert entry is not None
    assert any(entry.group() in block for block in blocks)
