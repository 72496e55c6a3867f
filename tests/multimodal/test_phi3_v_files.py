"""Phi-3-vision's checkpoints: configurations that are refused, names of tensors, and where answers end."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.loader import load_model
from tests.multimodal.families.phi3_v import NAME
from tests.multimodal.open_engine import ask, greedy, nothing_left, open_llm
from tests.multimodal.tiny_vision import IMAGE, Oracle, build, make, picture


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(NAME, "published", tmp_path_factory.mktemp("phi3v"))


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("embd_layer", "default", "embd_layer='default'"),
        ("embd_layer", ..., "embd_layer=None"),
        ("embd_layer.projection_cls", "linear", "projection_cls='linear'"),
        ("embd_layer.hd_transform_order", "sub", "hd_transform_order='sub'"),
        ("embd_layer.use_hd_transform", False, "use_hd_transform=False"),
        ("embd_layer.with_learnable_separator", ..., "with_learnable_separator=None"),
        ("embd_layer.embedding_cls", "audio", "embedding_cls='audio'"),
        ("embd_layer.freeze", True, "embd_layer.freeze"),
        ("img_processor", None, "img_processor=None"),
        ("img_processor.name", "siglip", "img_processor.name='siglip'"),
        ("img_processor.model_name", "openai/clip-vit-base-patch16", "img_processor.model_name"),
        ("img_processor.type_feature", "cls_patch", "type_feature='cls_patch'"),
        ("img_processor.layer_idx", -5, "layer_idx=-5"),
        ("img_processor.layer_idx", "-2", "layer_idx='-2'"),
        ("img_processor.image_dim_out", 1024, "image_dim_out=1024"),
        ("img_processor.num_img_tokens", 144, "num_img_tokens=144"),
        ("vision_config.patch_size", 8, "patch_size=8"),
        ("vision_config.image_size", 0, "image_size=0"),
        ("rope_scaling.type", "yarn", "rope_scaling"),
        ("image_token_id", -1, "image_token_id=-1"),
        ("num_hidden_layers", 10**6, "num_hidden_layers=1000000"),
        ("vision_config.hidden_size", 2**40, "hidden_size=1099511627776"),
    ],
)
def test_configurations_are_refused_by_name(path: Path, field: str, value: Any, named: str, tmp_path: Path) -> None:
    folder = shutil.copytree(path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    *outer, name = field.split(".")
    part = config
    for each in outer:
        part = part[each]
    part.pop(name, None)
    if value is not ...:
        part[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=re.escape(named)):
        load_model(folder)


WTE = "model.vision_embed_tokens.wte.weight"


@pytest.mark.parametrize("kind", ["wte alone", "both", "differing", "tower without vision_model"])
def test_names_of_the_files(kind: str, tmp_path: Path) -> None:
    theirs = make(NAME, "whole_first")
    plain = load_model(build(NAME, "whole_first", tmp_path / "plain", theirs))
    folder = build(NAME, "whole_first", tmp_path / "named", theirs)
    tensors = load_file(folder / "model.safetensors")
    table = "model.embed_tokens.weight"
    if kind == "tower without vision_model":
        tensors = {name.replace("img_processor.vision_model.", "img_processor."): t for name, t in tensors.items()}
    else:
        tensors[WTE] = tensors[table] + (kind == "differing")
    if kind == "wte alone":
        del tensors[table]
    save_file(tensors, folder / "model.safetensors")
    if kind == "differing":
        with pytest.raises(CheckpointError, match=r"wte\.weight are one table in the model, and the files' differ"):
            load_model(folder)
        return
    named = load_model(folder)
    for (name, ours), (other, again) in zip(plain.named_parameters(), named.named_parameters(), strict=True):
        assert name == other and torch.equal(ours, again)


@pytest.mark.parametrize("text", [9, 40])
def test_answers_end_where_the_short_frequencies_do(text: int, tmp_path: Path) -> None:
    """Of a prompt with an image within them; one beyond them goes on."""
    oracle = Oracle(NAME, "published")
    original, image = 40, picture(1, (60, 20))
    for rope in (oracle.model.config.rope_parameters, vars(oracle.model.config)):
        rope["original_max_position_embeddings"] = original
    oracle.model.config.as_published["original_max_position_embeddings"] = original
    rebuilt = type(oracle.model)(oracle.model.config).eval()
    rebuilt.load_state_dict(oracle.model.state_dict())
    oracle.model = rebuilt
    llm = open_llm(str(build(NAME, "published", tmp_path, rebuilt)))
    ids = [*range(5, 5 + text), IMAGE, 7]
    expanded, answer = oracle.answer(ids, [image], 24)
    (output,) = ask(llm, [{"prompt_token_ids": ids, "multi_modal_data": {"image": [image]}}], greedy(24))
    assert output.prompt_token_ids == expanded
    room = 24 if len(expanded) > original else original - len(expanded) + 1
    assert (room < 24) == (text == 9)
    assert output.outputs[0].token_ids == answer[:room] and output.outputs[0].finish_reason == "length"
    nothing_left(llm)
