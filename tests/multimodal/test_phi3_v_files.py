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

from quire.config import MediaConfig
from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.loader import load_config, load_model
from quire.models.phi3_v import Phi3VForCausalLM
from quire.multimodal import ImageProcessor, load_picture
from tests.models.test_published import PUBLISHED
from tests.multimodal.families.phi3_v import NAME, Processor
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


@pytest.mark.parametrize("most", [1, 4, 16])
def test_the_published_size(most: int, tmp_path: Path) -> None:
    """Crops of 336 pixels, of which the tower that the files name makes 144 features each."""
    Processor(336, most).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["microsoft/Phi-3.5-vision-instruct"]))
    with torch.device("meta"):
        model = Phi3VForCausalLM(load_config(tmp_path))
    assert model.image_token_id == 32044 and len(model.vision_embed_tokens.img_processor.encoder.layers) == 24
    ours = ImageProcessor(tmp_path, MediaConfig(), None, model.processor_settings)
    model.check_processor(ours.known)
    counts = []
    for number, (width, height) in enumerate([(1920, 1080), (700, 1300), (336, 336), (50, 400), (337, 335)]):
        image = picture(number, (width, height))
        theirs, made = Processor(336, most)(image), ours(load_picture(image, MediaConfig()), {})
        tall, wide = theirs["image_sizes"][0].tolist()
        rows, columns = tall // 336, wide // 336
        assert made["image_sizes"].tolist() == [[tall, wide]]
        assert made["pixel_values"].shape == (1, 1 + rows * columns, 3, 336, 336)
        assert (made["pixel_values"] - theirs["pixel_values"][:, : 1 + rows * columns]).abs().max() < 1e-5
        layout = model.planned_layout((height, width), ours.plan(height, width, {}).final)
        assert layout == model.image_layout(made)
        assert layout is not None and layout.tokens == (rows * columns + 1) * 144 + 1 + (rows + 1) * 12
        counts.append(layout.tokens)
    assert counts[0] == {1: 313, 4: 757, 16: 2353}[most]


@pytest.mark.parametrize(
    ("field", "value"), [("max_position_embeddings", 512), ("hidden_act", "gelu"), ("rope_theta", 500.0)]
)
def test_fields_may_be_overridden(path: Path, field: str, value: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(path, tmp_path / "model")
    overridden = open_llm(str(folder), hf_overrides={field: value})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    written = open_llm(str(folder))
    ids = {"prompt_token_ids": [5, 6, 7, 8, 9]}
    given = [llm.generate(ids, greedy(8, logprobs=1), use_tqdm=False)[0] for llm in (overridden, written)]
    assert given[0].outputs[0].logprobs == given[1].outputs[0].logprobs
    limits = [llm.llm_engine.limits.max_model_len for llm in (overridden, written)]
    assert limits == [512 if field == "max_position_embeddings" else 1536] * 2


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
