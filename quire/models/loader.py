"""From a directory to a model with the checkpoint's parameters, checked both ways.

Nothing is missing, nothing is left over, every shape and dtype fits, or the load is refused with the list.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quire import registry
from quire.checkpoint.config_numbers import check_numbers
from quire.checkpoint.files import Checkpoint, listed, read_json, resolve_checkpoint
from quire.checkpoint.overrides import OverriddenConfig, check_taken, overridden
from quire.checkpoint.weights import Wanted, read_into, read_weights
from quire.errors import CheckpointError, QuireError, UnsupportedModelError
from quire.layers.weight_formats import check_format
from quire.models.base import CausalLM
from quire.models.conformity import check_buffers, check_class, check_model, filled_by_files
from quire.models.rehearsal import rehearse, run_once
from quire.models.torchvision import hide_if_broken

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
# A tensor of any of these may be cast to the model's dtype; integers and 8-bit floats are no plain weights.
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# Fields by which a configuration tells that the model takes more than text.
_MEDIA_FIELDS = ("vision_config", "audio_config", "mm_vision_tower", "image_token_id", "image_token_index")


def load_model(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: torch.device = _CPU,
    load_format: str = "auto",
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> CausalLM:
    """Load the model of a local directory to a device, in eval mode and without gradients.

    dtype: "auto" (config.json's, or else the files' own), a name of DTYPES, or a torch.dtype among them. load_format:
    see `Checkpoint`. overrides: of fields of config.json.
    Raises UnsupportedModelError for what quire does not run, CheckpointError for files that do not fit.
    """
    path = Path(path)
    raw = overridden(read_json(path / "config.json"), overrides)
    model_class = _model_class(raw)
    check_class(model_class)
    checkpoint = Checkpoint(path, load_format)
    check_numbers(raw, checkpoint, path / "config.json")
    config = _overridden_config(path, raw, overrides) if overrides else load_config(path)
    wanted = _dtype(dtype, raw, checkpoint)
    try:
        with torch.device("meta"):
            model = model_class(config)
    except QuireError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / 'config.json'}: no model can be built of it: {error!r}") from error
    check_model(model)
    check_buffers(model)
    _check_size(path / "config.json", model)
    rehearsed = rehearse(model, wanted, device)
    fill(model, checkpoint, wanted, device)
    if not rehearsed:
        run_once(model, device)
    model.read_from = checkpoint.stamp()
    return model.eval().requires_grad_(False)


def _check_size(file: Path, model: CausalLM) -> None:
    """What follows from several fields together must hold at least one token, head and layer."""
    spec = model.kv_spec
    sizes = {
        "layers": spec.num_layers,
        "key/value heads": spec.num_kv_heads,
        "dimensions of a head": spec.head_dim,
        "positions": model.max_model_len,
    }
    for what, size in sizes.items():
        if size < 1:
            raise UnsupportedModelError(f"{file}: the model that it describes has {size} {what}; it needs at least 1.")


def _overridden_config(path: Path, raw: dict[str, Any], overrides: Mapping[str, Any]) -> PretrainedConfig:
    """raw: config.json's content with the overrides."""
    with OverriddenConfig(raw) as folder:
        config = load_config(folder)
    check_taken(config, load_config(path), overrides)
    return config


def load_config(path: str | Path) -> PretrainedConfig:
    """Read config.json through transformers, never running code that comes with the checkpoint."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    path = Path(path)
    raw = read_json(path / "config.json")
    if "auto_map" in raw and str(raw.get("model_type")) not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{path / 'config.json'}: model_type {raw.get('model_type')!r} is unknown to "
            "transformers and brings its own code (auto_map). quire never runs code that comes with a "
            "checkpoint; a plug-in package can add the model: see docs/adding-a-model.md."
        )
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises all kinds for a configuration that it cannot take
        raise CheckpointError(
            f"{path / 'config.json'}: transformers cannot read it: {registry.root_cause(error)}"
        ) from error


def _model_class(raw: dict[str, Any]) -> type[CausalLM]:
    """The class for a config.json.

    Found before transformers reads the file: a plug-in may have to register its configuration class first.
    """
    check_format(raw)
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"config.json: architectures={architectures!r} must be a list of names.")
    row = registry.find(architectures)
    media = [field for field in _MEDIA_FIELDS if raw.get(field) is not None]
    if media and "image" not in row.capabilities:
        raise UnsupportedModelError(
            f"config.json has {', '.join(media)}, but {row.architecture} is served as text only: a "
            "vision-language model is never quietly served without its eyes."
        )
    if "image" in row.capabilities:
        hide_if_broken()
    model_class = registry.resolve(architectures)
    if not issubclass(model_class, CausalLM):
        raise UnsupportedModelError(
            f"{row.architecture}: {row.target} does not derive from quire.models.base.CausalLM."
        )
    return model_class


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
    source, partner = _sources(model, checkpoint, filled)
    tensors = [_wanted(model, name, source[name], filled[name]) for name in source]
    loaded = read_weights(checkpoint, tensors, dtype, device)
    for name, old in filled.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(old, nn.Parameter):
            setattr(module, leaf, loaded[name if name in loaded else partner[name]])
        elif name in loaded:
            module._buffers[leaf] = loaded[name].data
    for part in model.modules():  # what a tower has computed for itself
        for leaf, buffer in part._buffers.items():
            part._buffers[leaf] = None if buffer is None else buffer.to(device)


def fill_again(model: CausalLM, checkpoint: Checkpoint) -> None:
    """Read all numbers once more, into the memory that they have. Raises CheckpointError."""
    filled = filled_by_files(model)
    source, _ = _sources(model, checkpoint, filled)
    read_into(checkpoint, [(_wanted(model, n, source[n], filled[n]), filled[n].data) for n in source])


def _sources(
    model: CausalLM, checkpoint: Checkpoint, filled: Mapping[str, torch.Tensor]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return (parameter or buffer -> the checkpoint's name for it, the other of each tied pair), all of it checked.

    Of a tied pair one may be absent, and so may a buffer that has its numbers.
    """
    source, unused = _match(model, checkpoint, filled)
    pairs = model.tied_weights if model.is_tied else {}
    partner = {
        **pairs,
        **{shared: name for name, shared in pairs.items()},
    }  # the absent one takes the other's
    wanted = [name for name, old in filled.items() if isinstance(old, nn.Parameter) or old.is_meta]
    missing = [name for name in wanted if name not in source and partner.get(name) not in source]
    _report(model, checkpoint, missing, unused)
    _check_tensors(model, checkpoint, filled, source)
    for name, shared in pairs.items():
        if name in source and shared in source and _is_tied(checkpoint, source, name, shared):
            del source[name]
    return source, partner


def _wanted(model: CausalLM, name: str, stored: str, old: torch.Tensor) -> Wanted:
    transposed = any(re.fullmatch(pattern, name) for pattern in model.checkpoint_transposed)
    own_dtype = None if isinstance(old, nn.Parameter) else old.dtype
    return Wanted(name, stored, old.shape, transposed and old.dim() == 2, own_dtype)


def _match(
    model: CausalLM, checkpoint: Checkpoint, filled: Mapping[str, torch.Tensor]
) -> tuple[dict[str, str], list[str]]:
    """Return (parameter or buffer -> the checkpoint's name for it, names that belong to none)."""
    source: dict[str, str] = {}
    unused = []
    for stored in checkpoint.names():
        name = _renamed(stored, model.checkpoint_renames)
        if name in source:
            raise CheckpointError(f"{checkpoint.directory}: {source[name]!r} and {stored!r} are both {name!r}.")
        if name in filled:
            source[name] = stored
        elif not any(re.fullmatch(pattern, name) for pattern in model.checkpoint_ignored):
            unused.append(stored)
    return source, unused


def _renamed(name: str, renames: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(replacement)
    return name


def _report(model: CausalLM, checkpoint: Checkpoint, missing: list[str], unused: list[str]) -> None:
    parts = [f"missing: {listed(missing)}"] if missing else []
    parts += [f"of no use: {listed(unused)}"] if unused else []
    if parts:
        raise CheckpointError(f"{checkpoint.directory}: not the tensors of {type(model).__name__}; {'; '.join(parts)}.")


def _check_tensors(
    model: CausalLM, checkpoint: Checkpoint, filled: Mapping[str, torch.Tensor], source: dict[str, str]
) -> None:
    """Every tensor has the shape and a dtype that its place can take; nothing of it is read yet."""
    problems = []
    for name, stored in source.items():
        tensor, old = checkpoint.tensor(stored), filled[name]
        shape = old.shape
        if _wanted(model, name, stored, old).transposed:
            tensor = tensor.t()
        if tensor.shape != shape:
            problem = f"has shape {tuple(tensor.shape)}, config.json asks for {tuple(shape)}"
        elif not old.is_floating_point() and tensor.dtype is not old.dtype:
            problem = f"is of dtype {_short(tensor.dtype)}, and the model's buffer is of {_short(old.dtype)}"
        elif old.is_floating_point() and tensor.dtype not in _CASTABLE:
            problem = f"is of dtype {_short(tensor.dtype)}, no floating-point weight"
        else:
            continue
        problems.append(f"{stored} in {checkpoint.file_of(stored)} {problem}")
    if problems:
        raise CheckpointError(f"{checkpoint.directory}: tensors that do not fit: {listed(problems)}.")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_tied(checkpoint: Checkpoint, source: dict[str, str], name: str, shared: str) -> bool:
    """Where the files hold both of a tied pair: one, if they are equal; both, as they are, if not.

    So does transformers: the tensors in the files outweigh the configuration's word.
    """
    if torch.equal(checkpoint.tensor(source[name]), checkpoint.tensor(source[shared])):
        return True
    logger.warning("tie_word_embeddings is set, but the files' %s and %s differ: not tied", name, shared)
    return False


__all__ = ["DTYPES", "fill", "fill_again", "load_config", "load_model", "resolve_checkpoint"]
