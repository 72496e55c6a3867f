"""What a model pools and how, of its class, of sentence-transformers' files and of the settings that were given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.checkpoint.files import read_json
from quire.errors import QuireError
from quire.models.pooling.base import PoolingModel, class_activation
from quire.models.pooling.sentence_transformers import (
    SentenceModules,
    activation_named,
    is_there,
    read_cross_encoder,
    read_modules,
)
from quire.pooling_types import Activation, PoolingKind, PoolingSpec

# vLLM's names of kinds, in capitals.
_KINDS: Mapping[str, PoolingKind] = {
    "LAST": "last", "CLS": "cls", "MEAN": "mean", "ALL": "all", "STEP": "step",
}  # fmt: skip
_KNOWN = frozenset({
    "pooling_type", "seq_pooling_type", "tok_pooling_type", "normalize", "use_activation", "softmax", "activation",
    "step_tag_id", "returned_token_ids",
})  # fmt: skip
# torch's classes that sentence-transformers' cross-encoders name.
_OF_CROSS_ENCODERS: Mapping[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}


def pooling_of(model: PoolingModel, path: Path, given: Mapping[str, Any]) -> PoolingSpec:
    """All that the engine has to know of a model that was built; its dense layers are built too.

    given: the setting `pooler_config`. Raises QuireError for one that makes no sense, CheckpointError for damaged files
    and UnsupportedModelError for what is not served.
    """
    _check_pooler_config(given)
    modules = SentenceModules() if model.convert == "embed" else read_cross_encoder(path)
    if model.convert == "embed" and is_there(path):
        modules = read_modules(path)
    kind = _kind(given, ("pooling_type", "seq_pooling_type")) or modules.kind or model.kind
    if model.tower_prompts is not None and (kind != model.kind or modules.dense):
        raise QuireError(
            f"pooling_type={kind.upper()}: {model.architecture} has a vector of its own of a text and of an image, and "
            "nothing else is pooled of it."
        )
    token_kind = _kind(given, ("tok_pooling_type",)) or model.token_kind
    if token_kind not in ("all", "step"):
        raise QuireError(f"pooler_config: tok_pooling_type={given['tok_pooling_type']!r} must be ALL or STEP.")
    step_token = _step_token(model, given)
    if "step" in (kind, token_kind) and step_token is None:
        raise QuireError("pooler_config: pooling_type STEP needs step_tag_id, the token that ends a step.")
    model.add_dense(modules.dense)
    if kind == "splade":
        model.add_vocabulary()
    embeds = model.convert == "embed"
    width = model.width
    for layer in modules.dense:
        if layer.in_features != width:
            raise QuireError(
                f"{layer.folder}: in_features={layer.in_features}, and the row before has {width} numbers."
            )
        width = layer.out_features
    returned = tuple(given.get("returned_token_ids") or ())
    if returned and embeds:
        raise QuireError("pooler_config: returned_token_ids: names classes, and this model makes vectors.")
    if any(type(one) is not int or not 0 <= one < model.num_labels for one in returned):
        raise QuireError(
            f"pooler_config: returned_token_ids={list(returned)}: this model has {model.num_labels} labels."
        )
    return PoolingSpec(
        convert=model.convert,
        kind=kind,
        token_kind=token_kind,
        activation=_activation(model, modules, path, given),
        width=width if embeds else len(returned) or model.num_labels,
        dimensions=_dimensions(model) if embeds else None,
        labels=() if embeds else model.labels,
        token_types=model.token_types,
        bidirectional=model.bidirectional,
        step_token=step_token,
        labels_returned=returned,
        dense=modules.dense,
        prompts=modules.prompts,
        default_prompt=modules.default_prompt,
        max_tokens=modules.max_tokens,
        lower_case=modules.lower_case,
        trailing_padding=model.trailing_padding,
        towers=model.tower_prompts,
    )


def _step_token(model: PoolingModel, given: Mapping[str, Any]) -> int | None:
    """The token that ends a step, the model's own unless settings name one. Raises QuireError for what is no token."""
    wanted = given.get("step_tag_id")
    if wanted is None:
        return model.step_token
    if wanted >= model.vocab_size:
        raise QuireError(
            f"pooler_config: step_tag_id={wanted}: is no token: the vocabulary ends at {model.vocab_size - 1}."
        )
    return int(wanted)


def _check_pooler_config(given: Mapping[str, Any]) -> None:
    """Raise QuireError for a setting that is none, or makes no sense."""
    unknown = sorted(map(str, set(given) - _KNOWN))
    if unknown:
        raise QuireError(f"pooler_config: {', '.join(unknown)} is not taken; taken are {', '.join(sorted(_KNOWN))}.")
    for name in ("normalize", "use_activation", "softmax", "activation"):
        if given.get(name) not in (None, True, False):
            raise QuireError(f"pooler_config: {name}={given[name]!r} must be true, false or null.")
    step = given.get("step_tag_id")
    if step is not None and (type(step) is not int or step < 0):
        raise QuireError(f"pooler_config: step_tag_id={step!r} must be a token's number.")
    if not isinstance(given.get("returned_token_ids") or [], (list, tuple)):
        raise QuireError("pooler_config: returned_token_ids must be a list of numbers.")


def _kind(given: Mapping[str, Any], names: tuple[str, ...]) -> PoolingKind | None:
    for name in names:
        wanted = given.get(name)
        if wanted is not None:
            if not isinstance(wanted, str) or wanted.upper() not in _KINDS:
                raise QuireError(f"pooler_config: {name}={wanted!r} must be one of {', '.join(_KINDS)}.")
            return _KINDS[wanted.upper()]
    return None


def _activation(model: PoolingModel, modules: SentenceModules, path: Path, given: Mapping[str, Any]) -> Activation:
    wanted = next(
        (
            given[name]
            for name in ("use_activation", "normalize", "softmax", "activation")
            if given.get(name) is not None
        ),
        None,
    )
    if model.convert == "embed":
        normalize = modules.normalize if modules.kind is not None else True
        return "normalize" if (normalize if wanted is None else wanted) else "none"
    if wanted is False:
        return "none"
    if model.convert == "reward" and wanted is None:
        return "softmax" if model.kind == "step" else "none"
    own = _of_cross_encoder(path)
    return own or class_activation(model.config, model.num_labels)


def _of_cross_encoder(path: Path) -> Activation | None:
    """What sentence-transformers' files say, where they do: in a file of their own, or in config.json, by two names."""
    raw = read_json(path / "config.json")
    within = raw.get("sentence_transformers")
    of_config = within.get("activation_fn") if isinstance(within, dict) else None
    name = activation_named(path) or of_config or raw.get("sbert_ce_default_activation_function")
    if name is None:
        return None
    known = _OF_CROSS_ENCODERS.get(str(name).rpartition(".")[2])
    if known is None:
        raise QuireError(f"{path}: activation_fn={name!r} is not served; Identity and Sigmoid are.")
    return known


def _dimensions(model: PoolingModel) -> tuple[int, ...] | None:
    config: Any = model.config
    listed = getattr(config, "matryoshka_dimensions", None)
    if isinstance(listed, (list, tuple)) and listed and all(type(one) is int and one > 0 for one in listed):
        return tuple(listed)
    return () if getattr(config, "is_matryoshka", None) is True else None
