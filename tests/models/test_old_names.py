"""Modules that plug-ins imported before they moved: the same objects, and a warning that names the new place."""

from __future__ import annotations

import subprocess
import sys

import pytest

MOVED = [
    ("quire.contracts", "quire.types", ("ForwardContext", "Grid", "ImageLayout", "KVCache", "KVSpec")),
    (
        "quire.models.layers",
        "quire.layers",
        ("ROTARY_FIELDS", "Embedding", "LayerNorm", "Linear", "MergedLinear", "PagedAttention", "RMSNorm",
         "RotaryEmbedding", "RotaryTable", "activation", "gated_activation", "gathered", "repeated"),
    ),
    ("quire.models.layers.rotary", "quire.layers.rotary", ("rope_parameters", "check_rope")),
    ("quire.models.layers.linear", "quire.layers.linear", ("Linear",)),
    ("quire.models.layers.rows", "quire.layers.rows", ("gathered",)),
    ("quire.models.multimodal", "quire.models.vision.base", ("VisionLanguageModel", "text_model", "ImageInputs")),
]  # fmt: skip
CODE = """
import importlib, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    exec("from {old} import {names}", there := {{}})
said = [one for one in caught if one.category is DeprecationWarning and "quire" in str(one.message)]
new = importlib.import_module("{new}")
assert all(there[name] is getattr(new, name) for name in "{names}".split(", ")), there
print([str(one.message) for one in said], said[0].filename)
"""


@pytest.mark.parametrize(("old", "new", "names"), MOVED, ids=[old for old, _, _ in MOVED])
def test_an_old_name_is_the_new_thing_and_says_so(old: str, new: str, names: tuple[str, ...]) -> None:
    code = CODE.format(old=old, new=new, names=", ".join(names))
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    package = "quire.models.layers" if "layers" in old else old
    assert said.startswith(f"['{package} is now {new.removesuffix('.base') if 'layers' not in new else 'quire.layers'}")
    assert said.count("is now") == 1 and said.strip().endswith("<string>")  # the line that imports it


def test_images_in_prompts_had_another_name() -> None:
    code = (
        "from quire.contracts import MediaItem; from quire.types import PlaceholderRange;"
        "assert MediaItem is PlaceholderRange"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_quire_itself_uses_none_of_them() -> None:
    code = (
        "import sys, quire.platform.engine.builder, quire.models.qwen2_vl, quire.models.llava_next, quire.server.app\n"
        f"print([name for name in {[old for old, _, _ in MOVED]!r} if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
