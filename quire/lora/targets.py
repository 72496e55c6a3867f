"""Which modules an adapter's configuration means, at which rank: PEFT's rules on the model's published names.

A module has one name for each naming that Hugging Face's versions had (`CausalLM.published_names`). An adapter uses
one of them throughout: the one in which all modules that its file names exist.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from torch import nn

from quire.checkpoint.joined import PREFIX
from quire.checkpoint.patterns import Patterns
from quire.errors import AdapterError
from quire.layers import Embedding, ExpertLinear, Linear, Router
from quire.lora.fused import fused_parameters
from quire.lora.tasks import CLASSES, HEADS
from quire.models.base import CausalLM

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True, slots=True)
class Naming:
    """One of the namings of a model.

    modules: published name -> the model's own, of those with parameters of their own. parameters: the same of
    parameters. linear: published names of the matrices that "all-linear" means. fused: published name of a parameter
    that has the weights of several modules -> these modules' own names.
    """

    modules: Mapping[str, str]
    parameters: Mapping[str, str]
    linear: frozenset[str]
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rank:
    """alpha: what `scaling` was made of; None: unknown."""

    rank: int
    scaling: float
    alpha: float | None


@dataclass(frozen=True, slots=True)
class Targets:
    """What a configuration asks for, by the model's own names.

    lora: modules with LoRA. saved: parameters that are replaced. biases: those that are trained. tokens: tables whose
    rows `ids` are trained.
    """

    lora: Mapping[str, Rank]
    saved: frozenset[str]
    biases: frozenset[str]
    tokens: Mapping[str, tuple[int, ...]]


def namings(model: CausalLM) -> list[Naming]:
    """All namings of a model, the newest first.

    Of a model with experts, each without these and their routers comes before the one with them: where a file names
    none, its configuration does not mean them, whatever else is called as their layers are.
    """
    head = next((name for name, module in model.named_modules() if module is _output(model)), "")
    found = []
    owners = {
        name: module
        for name, module in model.named_modules()
        if (_own(module) or _is_linear(module)) and not name.startswith(PREFIX)  # which the adapted model lies before
    }
    count = len(model.published_names(next(iter(owners))))
    apart = {name for name, module in owners.items() if isinstance(module, (ExpertLinear, Router))}
    experts = fused_parameters(model)
    for version, left_out in product(reversed(range(count)), (apart, set()) if apart else (apart,)):
        modules = {model.published_names(name)[version]: name for name in owners if name not in left_out}
        parameters = {
            f"{published}.{leaf}": f"{own}.{leaf}" for published, own in modules.items() for leaf in _own(owners[own])
        }
        linear = frozenset(published for published, own in modules.items() if own != head and _is_linear(owners[own]))
        fused = {
            f"{model.published_names(path)[version]}.{leaf}": parameter.names(path)
            for path, own in experts.items()
            for leaf, parameter in own.items()
            if version == count - 1 and not left_out
        }
        naming = Naming(modules, parameters, linear, fused)
        if naming not in found:
            found.append(naming)
    return found


def _output(model: CausalLM) -> nn.Module:
    inner = getattr(model, "language_model", model)
    return inner.output_projection


def _own(module: nn.Module) -> list[str]:
    return [name for name, parameter in module._parameters.items() if parameter is not None]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, (Linear, nn.Linear))


def choose_naming(names: Sequence[Naming], modules: Iterable[str], parameters: Iterable[str]) -> Naming:
    """The naming that knows most of what a file names; the newest of several."""
    modules, parameters = list(modules), list(parameters)
    return max(
        names,
        key=lambda naming: sum(m in naming.modules for m in modules) + sum(p in naming.parameters for p in parameters),
    )


def find_targets(config: LoraConfig, naming: Naming, model: CausalLM, where: str, task: str | None = None) -> Targets:
    """Apply the configuration's rules. task: PEFT's task_type. Raises AdapterError for one that matches nothing."""
    patterns = Patterns(where)
    lora = {naming.modules[name]: _rank(config, name, patterns) for name in _targeted(config, naming, patterns)}
    saved = _saved(config, naming, patterns, where, HEADS if task in CLASSES else ())
    parameters = _targeted_parameters(config, naming, model, patterns, where)
    if not lora.keys().isdisjoint(parameters):
        twice = sorted(lora.keys() & parameters.keys())[0]
        raise AdapterError(f"{where}: target_modules and target_parameters both name {twice}.")
    lora.update(parameters)
    if not lora and not saved:
        raise AdapterError(
            f"{where}: target_modules={config.target_modules!r} and target_parameters={config.target_parameters!r} "
            "name no module of this model."
        )
    tokens = _tokens(config, naming, model, patterns, where)
    lora.update(_tied(config, naming, model, lora, patterns))
    biases = {
        "none": frozenset[str](),
        "all": frozenset(own for name, own in naming.parameters.items() if "bias" in name.rpartition(".")[2]),
        "lora_only": frozenset(f"{name}.bias" for name in lora if f"{name}.bias" in set(naming.parameters.values())),
    }[config.bias]
    return Targets(lora, saved, biases, tokens)


def _targeted(config: LoraConfig, naming: Naming, patterns: Patterns) -> list[str]:
    """As PEFT's check_target_module_exists says."""
    targets = config.target_modules
    if isinstance(targets, str) and targets.lower() == "all-linear":
        targets = naming.linear
    if not targets:
        return []
    found = [name for name in naming.modules if _is_meant(targets, name, config, patterns)]
    return [name for name in found if not _is_excluded(name, config, patterns)]


def _targeted_parameters(
    config: LoraConfig, naming: Naming, model: CausalLM, patterns: Patterns, where: str
) -> dict[str, Rank]:
    """Parameters that LoRA is trained for as such: those of all experts, and weights of single layers.

    PEFT's rules for their names: whole, or their last parts.
    """
    wanted = frozenset(config.target_parameters or ())
    if not wanted:
        return {}
    found: dict[str, Rank] = {}
    for name, modules in naming.fused.items():
        if _ends_in(name, wanted):
            found.update(dict.fromkeys(modules, _rank(config, name, patterns)))
    for name, own in naming.parameters.items():
        if _ends_in(name, wanted):
            path, _, leaf = own.rpartition(".")
            if leaf != "weight" or not isinstance(model.get_submodule(path), Linear):
                raise AdapterError(f"{where}: target_parameters names {name}, which is no linear layer's weight.")
            found[path] = _rank(config, name, patterns)
    if not found:
        raise AdapterError(f"{where}: target_parameters={sorted(wanted)} names no parameter of this model.")
    return found


def _is_meant(targets: str | Collection[str], name: str, config: LoraConfig, patterns: Patterns) -> bool:
    if isinstance(targets, str):
        return patterns.match(targets, name, "(?:", r")\Z") is not None
    if name in targets:
        return True
    if not _ends_in(name, targets):
        return False
    layers = config.layers_to_transform
    if layers is None or layers == []:
        return True
    wanted = config.layers_pattern or [r"[^.]*"]
    before = r"(?:^|.*?\.)" if config.layers_pattern else r".*?\."
    for pattern in [wanted] if isinstance(wanted, str) else wanted:
        match = patterns.match(pattern, name, before, r"\.(?P<idx>\d+)\.")
        if match is not None:
            index = match["idx"]
            return index.isdecimal() and int(index) in ([layers] if isinstance(layers, int) else layers)
    return False


def _is_excluded(name: str, config: LoraConfig, patterns: Patterns) -> bool:
    excluded = config.exclude_modules or ()
    if isinstance(excluded, str):
        if patterns.match(excluded, name, "(?:", r")\Z"):
            return True
    elif _ends_in(name, excluded):
        return True
    saved = config.modules_to_save or ()
    return any(patterns.match(one, name, r"(?:^|.*\.)", r"(?:$|\..*)") is not None for one in saved)


def _ends_in(name: str, names: Collection[str]) -> bool:
    """Whether it is one of the names, or ends in a dot and one of them."""
    parts = name.split(".")
    return any(".".join(parts[first:]) in names for first in range(len(parts)))


def _rank(config: LoraConfig, name: str, patterns: Patterns) -> Rank:
    rank = _of_pattern(config.rank_pattern, name, config.r, patterns)
    alpha = _of_pattern(config.alpha_pattern, name, config.lora_alpha, patterns)
    return Rank(rank, alpha / math.sqrt(rank) if config.use_rslora else alpha / rank, alpha)


def _of_pattern(table: Mapping[str, Any], name: str, default: Any, patterns: Patterns) -> Any:
    """What the first pattern says that the name ends in: PEFT's get_pattern_key."""
    for pattern, value in table.items():
        if patterns.match(pattern, name, r"(?:.*\.)?(?:", ")$") is not None:
            return value
    return table.get(name, default)


def _tied(
    config: LoraConfig, naming: Naming, model: CausalLM, lora: Mapping[str, Rank], patterns: Patterns
) -> dict[str, Rank]:
    """`ensure_weight_tying`: tables tied to an embedding with LoRA have it too, of its rank, scaled as their name says.

    PEFT does so only where the configuration calls one of them by one of its EMBEDDING_LAYER_NAMES.
    """
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    targets = config.target_modules or ()
    if isinstance(targets, str):
        named = any(patterns.match(targets, name, "(?:", r")\Z") for name in EMBEDDING_LAYER_NAMES)
    else:
        named = any(name.rpartition(".")[2] in EMBEDDING_LAYER_NAMES for name in targets)
    saved = any(name.rpartition(".")[2] in EMBEDDING_LAYER_NAMES for name in config.modules_to_save or ())
    embedding = lora.get(_embedding(model))
    if embedding is None or not config.ensure_weight_tying or not model.is_tied or not named or saved:
        return {}
    published = {own: name for name, own in naming.modules.items()}
    tied = [name.removesuffix(".weight") for name in model.tied_weights]
    return {own: replace(_rank(config, published[own], patterns), rank=embedding.rank) for own in tied}


def _saved(config: LoraConfig, naming: Naming, patterns: Patterns, where: str, heads: Sequence[str]) -> frozenset[str]:
    """The parameters of all modules whose name ends in one of `modules_to_save`. heads: of which one is enough."""
    saved: set[str] = set()
    has_head = any(parent.endswith(tuple(heads)) for name in naming.parameters for parent in _parents(name))
    for wanted in config.modules_to_save or ():
        patterns.check_time(wanted)
        found = {own for name, own in naming.parameters.items() if any(p.endswith(wanted) for p in _parents(name))}
        if not found and not (wanted in heads and has_head):
            raise AdapterError(f"{where}: modules_to_save names {wanted!r}, and this model has no such module.")
        saved |= found
    return frozenset(saved)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _tokens(
    config: LoraConfig, naming: Naming, model: CausalLM, patterns: Patterns, where: str
) -> dict[str, tuple[int, ...]]:
    wanted = config.trainable_token_indices
    if wanted is None:
        return {}
    pairs = [
        (name.removesuffix(".weight"), own.removesuffix(".weight"))
        for name, own in naming.parameters.items()
        if name.endswith(".weight")
    ]
    embedding = _embedding(model)
    if not isinstance(wanted, Mapping):
        return {embedding: tuple(wanted)}
    tokens: dict[str, tuple[int, ...]] = {}
    for target, ids in wanted.items():
        patterns.check_time(target)
        found = [own for name, own in pairs if name.endswith(target)]
        if not found:
            raise AdapterError(f"{where}: trainable_token_indices names {target!r}, and this model has no such module.")
        tokens.update(dict.fromkeys(found, tuple(ids)))
    return tokens


def _embedding(model: CausalLM) -> str:
    """The name of the table of tokens' embeddings."""
    if model.tied_weights:
        return next(iter(model.tied_weights.values())).removesuffix(".weight")
    return next((name for name, module in model.named_modules() if isinstance(module, Embedding)), "")
