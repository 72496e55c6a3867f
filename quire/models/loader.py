"""From a directory to a model with the checkpoint's parameters.

The model's class is found and built on the meta device, gone through once, and filled with the tensors that
`checkpoint/matching.py` matches with its parameters.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quire import registry
from quire.checkpoint.config_numbers import check_numbers
from quire.checkpoint.files import Checkpoint, read_json, resolve_checkpoint
from quire.checkpoint.joined import PREFIX
from quire.checkpoint.matching import Matches, NameRules, Place, match_tensors
from quire.checkpoint.opening import open_checkpoint
from quire.checkpoint.overrides import OverriddenConfig, check_taken, overridden
from quire.checkpoint.plain_config import read_plain
from quire.checkpoint.weights import read_into, read_weights
from quire.errors import CheckpointError, QuireError, UnsupportedModelError
from quire.layers.shards import Shard
from quire.layers.stages import Stage
from quire.models import quantization
from quire.models.base import CausalLM
from quire.models.conformity import check_buffers, check_class, check_model, check_size, filled_by_files
from quire.models.packing import as_rows, pack_weights
from quire.models.pooling.base import PoolingModel
from quire.models.pooling.of_decoders import pooled_of
from quire.models.pooling.purpose import GENERATE, Purpose
from quire.models.pooling.settings import pooling_of
from quire.models.quantization import QuantizationPlan
from quire.models.quantization.devices import check_device
from quire.models.quantization.of_floats import plan_of_floats
from quire.models.rehearsal import rehearse, run_once
from quire.models.sharded import rows_read, share_out, with_rows
from quire.models.staged import cut, leave_out
from quire.models.vision.broken_torchvision import hide_if_broken
from quire.registry.pooling import PoolingRow, find_pooling

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger("quire")

_CPU = torch.device("cpu")

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
# Rows whose configuration may be one of `checkpoint/plain_config.py`.
_PLAIN_ROWS = {
    f"quire.models.{name}"
    for name in (
        "llama:LlamaForCausalLM", "mistral:MistralForCausalLM", "mixtral:MixtralForCausalLM", "gpt2:GPT2LMHeadModel",
        "qwen2:Qwen2ForCausalLM", "qwen3:Qwen3ForCausalLM", "gemma:GemmaForCausalLM", "phi3:Phi3ForCausalLM",
        "opt:OPTForCausalLM",
    )
}  # fmt: skip
# Fields by which a configuration tells that the model takes more than text.
_MEDIA_FIELDS = ("vision_config", "audio_config", "mm_vision_tower", "image_token_id", "image_token_index")


def load_model(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: torch.device = _CPU,
    load_format: str = "auto",
    overrides: Mapping[str, Any] = MappingProxyType({}),
    impl: str = "auto",
    quantized: str | None = None,
    purpose: Purpose = GENERATE,
    shard: Shard | None = None,
    stage: Stage | None = None,
) -> CausalLM:
    """Load the model of a local directory to a device, in eval mode and without gradients.

    dtype: "auto" (config.json's, or else the files' own), a name of DTYPES, or a torch.dtype among them. load_format:
    see `Checkpoint`. overrides: of fields of config.json. impl: whose modules run it, see `registry.find`.
    quantized: as the setting `quantization`. purpose: whether it generates, or makes vectors or classes. shard: this
    process's place among those that compute it together: it reads its rows of the weights alone, unless adapters may
    need them all. stage: its place in a pipeline: it reads what it computes.
    Raises UnsupportedModelError for what quire does not run, CheckpointError for files that do not fit.
    """
    path = Path(path)
    model, checkpoint, raw = _build(path, load_format, overrides, impl, purpose)
    wanted = _dtype(dtype, raw, checkpoint)
    _quantize(model, checkpoint, raw, wanted, quantized, device)
    check_device(model, device)
    # Transformers' own code has tables with numbers, which do not go with tensors that have none.
    rehearsed = not model.computes_itself("") and rehearse(model, wanted, device)
    # Adapters are compared and folded with whole weights: norms of rows, saved modules, trained tokens.
    if shard is not None and not purpose.adapters:
        model.rows_read = rows_read(model, shard)
    if stage is not None:
        leave_out(model, stage)
    fill(model, checkpoint, wanted, device)
    if shard is not None:  # before anything looks its weights up
        share_out(model, shard)
    pack_weights(model)
    if not rehearsed and stage is None:  # which has not the numbers of all layers
        run_once(model, device)
    model.check_loaded()
    if stage is not None:
        cut(model, stage)
    model.read_from = checkpoint.stamp()
    return model.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What loading a checkpoint would read, and nothing of it read. dtype: the model's."""

    checkpoint: Checkpoint
    raw: Mapping[str, Any]
    matches: Matches
    dtype: torch.dtype


def prepare(path: Path, load_format: str, quantized: str) -> Prepared:
    """Do all that `load_model` does before it reads weights. Raises as that."""
    model, checkpoint, raw = _build(path, load_format, {}, "auto")
    dtype = _dtype("auto", raw, checkpoint)
    _quantize(model, checkpoint, raw, dtype, quantized)
    if not model.computes_itself(""):
        rehearse(model, dtype, _CPU)
    return Prepared(checkpoint, raw, _matches(model, checkpoint, filled_by_files(model)), dtype)


def load_structure(
    path: str | Path,
    load_format: str = "auto",
    overrides: Mapping[str, Any] = MappingProxyType({}),
    impl: str = "auto",
    purpose: Purpose = GENERATE,
) -> CausalLM:
    """The model of a local directory on the meta device: without weights, to be asked for what needs none.

    Raises as `load_model`.
    """
    return _build(Path(path), load_format, overrides, impl, purpose)[0].eval().requires_grad_(False)


def _build(
    path: Path, load_format: str, overrides: Mapping[str, Any], impl: str, purpose: Purpose = GENERATE
) -> tuple[CausalLM, Checkpoint, dict[str, Any]]:
    """(the model on the meta device, its files, config.json with the overrides)"""
    raw = quantization.with_own_file(overridden(read_json(path / "config.json"), overrides), path)
    model_class = _model_class(raw, impl, purpose.of(path, raw), purpose.runner == "generate")
    check_class(model_class)
    checkpoint = open_checkpoint(path, load_format)
    check_numbers(raw, checkpoint, path / "config.json")
    config = _overridden_config(path, raw, overrides) if overrides else _plain_config(path, raw, impl)
    if config is None:
        config = load_config(path)
    try:
        with torch.device("meta"):
            model = model_class(config)
            if isinstance(model, PoolingModel):
                model.pooling = pooling_of(model, path, purpose.pooler)
                checkpoint = model.as_named(checkpoint)
                if purpose.adapters:
                    model.leave_head_to_adapters(checkpoint)
    except QuireError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / 'config.json'}: no model can be built of it: {error!r}") from error
    check_model(model)
    check_buffers(model)
    check_size(path / "config.json", model)
    return model, checkpoint, raw


def _quantize(
    model: CausalLM,
    checkpoint: Checkpoint,
    raw: Mapping[str, Any],
    dtype: torch.dtype,
    wanted: str | None,
    device: torch.device = _CPU,
) -> None:
    """Give the layers the formats of their weights in the files, or those that are wanted. dtype: the model's. device:
    the one that it is for."""
    quantization.check_wanted(wanted, raw)
    found = quantization.method_of(raw)
    if found is not None:
        plan = found[0](model, checkpoint, found[1])
    elif wanted is not None:
        plan = plan_of_floats(model, checkpoint, _matches(model, checkpoint, filled_by_files(model)), wanted)
    else:
        return
    model.quantization = plan.for_model(model, device)
    model.quantization.apply(model, dtype)


def _overridden_config(path: Path, raw: dict[str, Any], overrides: Mapping[str, Any]) -> PretrainedConfig:
    """raw: config.json's content with the overrides."""
    with OverriddenConfig(raw) as folder:
        config = load_config(folder)
    check_taken(config, load_config(path), overrides)
    return config


def _plain_config(path: Path, raw: Mapping[str, Any], impl: str) -> Any:
    """What a row of quire's own can read of config.json without transformers; None where that is not certain.

    Other packages' rows, and transformers' own models, get what transformers makes of it.
    """
    architectures = _architectures(raw)
    known = [row for row in registry.rows() if row.architecture in architectures[:1]]
    if not known or registry.find(architectures, impl).target not in _PLAIN_ROWS:
        return None
    _check_dtype(path / "config.json", raw)
    return read_plain(path, read_json(path / "config.json"))


def load_config(path: str | Path) -> PretrainedConfig:
    """Read config.json through transformers, never running code that comes with the checkpoint.

    An architecture whose configuration transformers does not know may have a class of quire's for it (`Row.config`).
    """
    from transformers import AutoConfig

    path = Path(path)
    raw = read_json(path / "config.json")
    own: Any = registry.config_class(_architectures(raw))
    if own is None:
        _check_known(path / "config.json", raw)
    _check_dtype(path / "config.json", raw)
    try:
        if own is not None:
            return own.from_pretrained(path, local_files_only=True)
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises all kinds for a configuration that it cannot take
        raise CheckpointError(
            f"{path / 'config.json'}: transformers cannot read it: {registry.root_cause(error)}"
        ) from error


def _check_known(file: Path, raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a model_type of which transformers has no configuration class."""
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return
    if "auto_map" in raw:
        why = (
            "and brings its own code (auto_map). quire never runs code that comes with a checkpoint; a plug-in package "
            "can add the model: see docs/adding-a-model.md."
        )
    else:
        why = f"{__version__}; a newer version may know it, and hf_overrides={{'model_type': ...}} names another one."
    raise UnsupportedModelError(f"{file}: model_type {kind!r} is unknown to transformers {why}")


def _check_dtype(file: Path, raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a dtype that torch does not have; an object has those of a model's parts."""
    for field in ("dtype", "torch_dtype"):
        given = raw.get(field)
        if given is None or isinstance(given, dict):
            continue
        known = isinstance(given, str) and getattr(torch, given.removeprefix("torch."), None)
        if not isinstance(known, torch.dtype):
            raise CheckpointError(f"{file}: {field}={given!r} is no dtype of torch's.")


def _model_class(raw: dict[str, Any], impl: str, pooling: PoolingRow | None, generates: bool) -> type[CausalLM]:
    """The class for a config.json. generates: whether it must be one that does.

    Found before transformers reads the file: a plug-in may have to register its configuration class first.
    """
    quantization.method_of(raw)
    architectures = _architectures(raw)
    row = pooling.row if pooling else registry.find(architectures, impl)
    media = [field for field in _MEDIA_FIELDS if raw.get(field) is not None]
    if media and row.text_alone:
        logger.warning("%s: its text model is served alone; images are refused", row.architecture)
    elif media and not row.capabilities & {"image", "audio"}:
        raise UnsupportedModelError(
            f"config.json has {', '.join(media)}, but {architectures[0]} is served as text only: a "
            "vision-language model is never quietly served without its eyes."
        )
    if "image" in row.capabilities:
        hide_if_broken()
    model_class = registry.load_class(row) if pooling else registry.resolve(architectures, impl)
    if not issubclass(model_class, CausalLM):
        raise UnsupportedModelError(
            f"{row.architecture}: {row.target} does not derive from quire.models.base.CausalLM."
        )
    if pooling is None and issubclass(model_class, PoolingModel):  # a plug-in's, which its row does not tell
        if generates:
            raise UnsupportedModelError(
                f"runner='generate': {architectures[0]} makes vectors and classes of prompts, and generates nothing; "
                "take runner='pooling'."
            )
        pooling = find_pooling(architectures, registry.rows())
    return pooled_of(model_class, pooling, architectures[0]) if pooling else model_class


def _architectures(raw: Mapping[str, Any]) -> list[str]:
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"config.json: architectures={architectures!r} must be a list of names.")
    return architectures


def _dtype(dtype: str | torch.dtype, raw: dict[str, Any], checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that the model gets. "auto": config.json's, or else the files', as in transformers."""
    chosen: Any = dtype
    if dtype == "auto":
        chosen = raw.get("dtype") or raw.get("torch_dtype")
        name = next(checkpoint.names(), None)
        if name is None:
            raise CheckpointError(f"{checkpoint.directory}: its files hold no tensors.")
        chosen = chosen or checkpoint.tensor(name).dtype
    chosen = str(chosen).removeprefix("torch.")
    if chosen not in DTYPES:
        origin = "the checkpoint's dtype" if dtype == "auto" else "dtype"
        raise CheckpointError(f"{origin} is {chosen!r}; served are auto, {', '.join(DTYPES)}.")
    return DTYPES[chosen]


def fill(model: CausalLM, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device = _CPU) -> None:
    """Give every parameter of a model on the meta device its tensor, and every buffer that the files bring.

    A buffer keeps the dtype with which it was registered. Raises CheckpointError.
    """
    filled = filled_by_files(model)
    matches = _matches(model, checkpoint, filled)
    wanted = with_rows(matches, model)
    loaded = read_weights(checkpoint, wanted, dtype, device)
    model.rows_read = {one.name: one.rows for one in wanted if one.rows is not None}
    for name, old in filled.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(old, nn.Parameter):
            setattr(module, leaf, loaded[name if name in loaded else matches.shares[name]])
        elif name in loaded:
            module._buffers[leaf] = loaded[name].data
    for part in model.modules():  # what a tower has computed for itself
        for leaf, buffer in part._buffers.items():
            part._buffers[leaf] = None if buffer is None else buffer.to(device)
    model.loaded()


def fill_again(model: CausalLM, checkpoint: Checkpoint) -> None:
    """Read all numbers once more, into the memory that they have. Raises CheckpointError."""
    if isinstance(model, PoolingModel):
        checkpoint = model.as_named(checkpoint)
    with as_rows(model):
        filled = filled_by_files(model)
        wanted = with_rows(_matches(model, checkpoint, filled), model)
        read_into(checkpoint, [(one, filled[one.name].data) for one in wanted])
        model.loaded()


def _matches(model: CausalLM, checkpoint: Checkpoint, filled: Mapping[str, torch.Tensor]) -> Matches:
    """The tensors for parameters, and for buffers, of which those that have numbers may be absent."""

    def place(name: str, old: torch.Tensor) -> Place:
        if isinstance(old, nn.Parameter):
            fixed = torch.float32 if model.keeps_float32(name) else None
            return Place(old.shape, fixed if old.is_floating_point() else old.dtype)
        return Place(old.shape, old.dtype, not old.is_meta)

    places = {name: place(name, old) for name, old in filled.items()}
    plan = model.quantization or QuantizationPlan()
    exact = {**model.see_files(checkpoint), **plan.all_names()}
    dense = () if "sentence_dense" in dict(model.named_children()) else (rf"{re.escape(PREFIX)}.+",)
    rules = NameRules(
        type(model).__name__,
        model.checkpoint_renames,
        [*model.checkpoint_ignored, *dense, *map(re.escape, plan.ignored)],
        model.checkpoint_transposed,
        model.tied_weights if model.is_tied else {},
        {**model.checkpoint_parts(), **plan.all_parts()},
        exact,
    )
    return match_tensors(checkpoint, places, rules)


__all__ = ["DTYPES", "fill", "fill_again", "load_config", "load_model", "resolve_checkpoint"]
