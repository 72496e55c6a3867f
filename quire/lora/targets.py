"""Which modules an adapter's configuration means, at which rank: PEFT's rules on the model's published names.

A module has one name for each naming that Hugging Face's versions had (`CausalLM.published_names`). An adapter uses
one of them throughout: the one in which all modules that its file names exist.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import regex
from torch import nn

from quire.errors import AdapterError
from quire.models.base import CausalLM
from quire.models.layers import Embedding, Linear

if TYPE_CHECKING:
    from peft import LoraConfig

_PATTERN_SECONDS = 1.0  # for an adapter's patterns over all modules
_MAX_PATTERN = 2000  # characters


@dataclass(frozen=True, slots=True)
class Naming:
    """One of the namings of a model.

    modules: published name -> the model's own, of those with parameters of their own. parameters: the same of
    parameters. linear: published names of the matrices that "all-linear" means.
    """

    modules: Mapping[str, str]
    parameters: Mapping[str, str]
    linear: frozenset[str]


@dataclass(frozen=True, slots=True)
class Rank:
    rank: int
    scaling: float


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
    """All namings of a model, the newest first."""
    head = next((name for name, module in model.named_modules() if module is _output(model)), "")
    found = []
    owners = {name: module for name, module in model.named_modules() if any(True for _ in _own(module))}
    count = len(model.published_names(next(iter(owners))))
    for version in reversed(range(count)):
        modules = {model.published_names(name)[version]: name for name in owners}
        parameters = {
            f"{published}.{leaf}": f"{own}.{leaf}" for published, own in modules.items() for leaf in _own(owners[own])
        }
        linear = frozenset(published for published, own in modules.items() if own != head and _is_linear(owners[own]))
        naming = Naming(modules, parameters, linear)
        if naming not in found:
            found.append(naming)
    return found


def _output(model: CausalLM) -> nn.Module:
    inner = getattr(model, "language_model", model)
    return inner.lm_head


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


def find_targets(config: LoraConfig, naming: Naming, model: CausalLM, where: str) -> Targets:
    """Apply the configuration's rules. Raises AdapterError for one that matches nothing."""
    _check_patterns(config, naming, where)
    lora = {naming.modules[name]: _rank(config, name) for name in _targeted(config, naming)}
    saved = _saved(config, naming, where)
    if not lora and not saved:
        raise AdapterError(f"{where}: target_modules={config.target_modules!r} names no module of this model.")
    tokens = _tokens(config, naming, model, where)
    embedding = _embedding(model)
    if config.ensure_weight_tying and model.is_tied and embedding in lora:
        for tied in model.tied_weights:
            lora.setdefault(tied.removesuffix(".weight"), lora[embedding])
    biases = {
        "none": frozenset[str](),
        "all": frozenset(own for name, own in naming.parameters.items() if "bias" in name.rpartition(".")[2]),
        "lora_only": frozenset(f"{name}.bias" for name in lora if f"{name}.bias" in set(naming.parameters.values())),
    }[config.bias]
    return Targets(lora, saved, biases, tokens)


def _targeted(config: LoraConfig, naming: Naming) -> list[str]:
    from peft.tuners.tuners_utils import check_target_module_exists

    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        config.target_modules = set(naming.linear)
    if not config.target_modules:
        return []
    return [name for name in naming.modules if check_target_module_exists(config, name)]


def _rank(config: LoraConfig, name: str) -> Rank:
    from peft.utils.other import get_pattern_key

    rank = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), name), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(list(config.alpha_pattern), name), config.lora_alpha)
    return Rank(rank, alpha / math.sqrt(rank) if config.use_rslora else alpha / rank)


def _saved(config: LoraConfig, naming: Naming, where: str) -> frozenset[str]:
    """The parameters of all modules whose name ends in one of `modules_to_save`."""
    saved = set()
    for wanted in config.modules_to_save or ():
        found = {own for name, own in naming.parameters.items() if any(p.endswith(wanted) for p in _parents(name))}
        if not found:
            raise AdapterError(f"{where}: modules_to_save names {wanted!r}, and this model has no such module.")
        saved |= found
    return frozenset(saved)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _tokens(config: LoraConfig, naming: Naming, model: CausalLM, where: str) -> dict[str, tuple[int, ...]]:
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


def _check_patterns(config: LoraConfig, naming: Naming, where: str) -> None:
    """Refuse what is no pattern, and what takes for ever to match: the loader must not hang on a stranger's file."""
    patterns = [*config.rank_pattern, *config.alpha_pattern, *(config.modules_to_save or ())]
    for one in (config.target_modules, config.exclude_modules, config.layers_pattern):
        patterns += [one] if isinstance(one, str) else (one or []) if one is config.layers_pattern else []
    deadline = time.monotonic() + _PATTERN_SECONDS
    for pattern in patterns:
        try:
            if len(pattern) > _MAX_PATTERN:
                raise TimeoutError
            compiled = regex.compile(rf"(?:.*?\.)?(?:{pattern})(?:\..*)?")
            for name in naming.modules:
                compiled.fullmatch(name, timeout=max(deadline - time.monotonic(), 1e-3), concurrent=True)
        except regex.error as error:
            raise AdapterError(f"{where}: {pattern!r} is no pattern: {error}") from None
        except TimeoutError:
            raise AdapterError(f"{where}: the pattern {pattern[:80]!r} is too long, or takes too long.") from None
