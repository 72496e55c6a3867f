"""An adapter's files -> what it changes in each layer, in the model's dtype, bound completely or refused.

The format is PEFT's (`files.py`), with Hugging Face's module names
(https://huggingface.co/docs/peft/developer_guides/checkpoint).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from quire.errors import AdapterError
from quire.layers import Embedding, ExpertLinear, LatentProjection, LayerNorm, Linear, RMSNorm, Router
from quire.layers.adapters import EmbeddingChange, LinearChange, NormChange
from quire.layers.latent import LatentChange
from quire.lora.block import in_one_block
from quire.lora.files import (
    TOKENS,
    WEIGHTS_FILE,
    Parts,
    read_tensors,
    read_text,
    sorted_tensors,
    unused_tensors,
    weights_file,
)
from quire.lora.fold import changed_parameter, embedding_change, linear_change, norm_change, scaled_change, token_rows
from quire.lora.fused import fused_parameters, split_parts
from quire.lora.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, read_config
from quire.lora.targets import Naming, Targets, choose_naming, find_targets, namings
from quire.models.base import CausalLM

_MOST_PLANS = 64
_SLACK = 16
_MOST_UNUSED = 1 << 20  # elements of a tensor that no parameter of the model's is known for

Change = LinearChange | LatentChange | EmbeddingChange | NormChange


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter's weights.

    digest: SHA-256 over both files. changes: by module of quire's layers. parameters: of other modules (a tower's), by
    name, in the place of theirs. visual: it changes what works on images. ranks: of its LoRA modules.
    """

    digest: bytes
    nbytes: int
    changes: Mapping[str, Change]
    parameters: Mapping[str, torch.Tensor]
    visual: bool
    ranks: tuple[int, ...]

    @property
    def modules(self) -> int:
        """How many layers it changes."""
        return len(self.changes) + len(self.parameters)

    @property
    def mixable(self) -> bool:
        """Whether it is plain LoRA, whose shares can be weighted and added."""
        return not self.parameters and all(_is_plain(change) for change in self.changes.values())

    @property
    def recordable(self) -> bool:
        """Whether the kernel does all of it."""
        return all(
            isinstance(change, LatentChange)
            or (isinstance(change, LinearChange) and change.weight is None and change.tokens is None)
            for change in self.changes.values()
        )


def _is_plain(change: Change) -> bool:
    if isinstance(change, LinearChange):
        lora = change.lora
        plain = change.weight is None and change.tokens is None
        return plain and lora is not None and lora.scale is None and lora.shift is None
    if isinstance(change, LatentChange):
        return change.is_plain
    if isinstance(change, EmbeddingChange):
        return change.weight is None and change.tokens is None and change.scale is None
    return False


class LoadedAdapter(Protocol):
    """What stands for an adapter's weights: an `Adapter`, or what is said of one that is in another process."""

    @property
    def digest(self) -> bytes: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def modules(self) -> int: ...
    @property
    def visual(self) -> bool: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def mixable(self) -> bool: ...


class Reader(Protocol):
    """Reads adapters where the weights of the model are. Any number of threads may do so at once."""

    def read(self, directory: Path) -> LoadedAdapter:
        """Read the adapter in a directory. Raises AdapterError."""
        ...


class AdapterReader:
    """Reads adapters for one model. Any number of threads may do so at once.

    max_rank: the largest rank that is taken; max_bytes: of a weights file, and of an adapter in memory.
    """

    def __init__(self, model: CausalLM, max_rank: int | None, max_bytes: int) -> None:
        self._model = model
        self._max_rank = max_rank
        self._max_bytes = max_bytes
        self._dtype = model.dtype
        self._namings = namings(model)
        # By what transformers' newer versions call the modules: the older ones have no such parameters.
        self._fused = {model.published_names(name)[-1]: own for name, own in fused_parameters(model).items()}
        self._modules = dict(model.named_modules())
        # The base model's own: while an image is encoded, a tower's modules may have an adapter's for a moment.
        self._base = {name: dict(module._parameters) for name, module in self._modules.items()}
        self._plans: dict[tuple[bytes, int], tuple[Any, Targets]] = {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def read(self, directory: Path) -> Adapter:
        """Read the adapter in a directory. Raises AdapterError: it binds completely, or not at all."""
        where = str(directory)
        config_data = read_text(directory / CONFIG_FILE, MAX_CONFIG_BYTES)
        with weights_file(directory / WEIGHTS_FILE, 2 * self._max_bytes) as (file, described):
            # What the header says is looked at first: nobody's file is read whole to be refused.
            parts, plain = self._sorted(described, where)
            naming = choose_naming(self._namings, parts, plain)
            config, targets = self._plan(config_data, naming, where)
            _Binding(self, config, targets, naming, parts, plain, where).check_sizes(unused_tensors(described))
            digest, tensors = read_tensors(file, config_data, where)
        parts, plain = self._sorted(tensors, where)
        changes, parameters = _Binding(self, config, targets, naming, parts, plain, where).run()
        changes, parameters, nbytes = in_one_block(changes, parameters, self._max_bytes, where)
        names = [*changes, *(name.rpartition(".")[0] for name in parameters)]
        return Adapter(
            digest=digest,
            nbytes=nbytes,
            changes=changes,
            parameters=parameters,
            visual=any(self._model.is_visual(name) for name in names),
            ranks=tuple(sorted({target.rank for target in targets.lora.values()})),
        )

    def _sorted(
        self, tensors: Mapping[str, torch.Tensor], where: str
    ) -> tuple[dict[str, Parts], dict[str, torch.Tensor]]:
        parts, plain = sorted_tensors(tensors, where)
        return split_parts(parts, self._fused, where), plain

    def _plan(self, data: bytes, naming: Naming, where: str) -> tuple[Any, Targets]:
        """The configuration and what it means; remembered, since many adapters have the same."""
        key = hashlib.sha256(data).digest(), self._namings.index(naming)
        plan = self._plans.get(key)
        if plan is None:
            config = read_config(data, f"{where}/{CONFIG_FILE}")
            plan = config, find_targets(config, naming, self._model, where)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        largest = max((target.rank for target in plan[1].lora.values()), default=0)
        if self._max_rank is not None and largest > self._max_rank:
            raise AdapterError(f"{where}: has rank {largest}, and max_lora_rank={self._max_rank}: raise it.")
        return plan


@dataclass
class _Binding:
    """One adapter's tensors on their way to the modules: what is left over, what is missing."""

    reader: AdapterReader
    config: Any
    targets: Targets
    naming: Naming
    parts: dict[str, Parts]
    plain: dict[str, torch.Tensor]
    where: str
    problems: list[str] = field(default_factory=list)

    def check_sizes(self, unused: Mapping[str, torch.Tensor]) -> None:
        """Raise AdapterError for tensors, of which the shapes alone are known, that cannot be this model's.

        Names are checked as `run` does it, and no tensor may be far too large; `run` says which shape each must have.
        unused: those that `run` does not look at, by the published parameters that they repeat.
        """
        for name, tensor in unused.items():
            own = self.naming.parameters.get(name)
            if tensor.numel() > max(_MOST_UNUSED, 0 if own is None else self._parameter(own).numel()):
                raise AdapterError(
                    f"{self.where}: {name} has an original_module of shape {list(tensor.shape)}, which is not this "
                    "model's and of no use: take it out."
                )
        own_parts = self._own_parts()
        self._check_complete(own_parts, self._owned())
        for own, kinds in own_parts.items():
            most = self._most_elements(own)
            for kind, tensor in kinds.items():
                if tensor.numel() > most:
                    raise AdapterError(
                        f"{self.where}: {own}: {kind} has shape {list(tensor.shape)}, and model and configuration ask "
                        f"for at most {most:,} elements: it was trained on another base model, or its configuration "
                        "is not its own."
                    )

    def _most_elements(self, own: str) -> int:
        """Of any tensor that an adapter has for a module: far more than fit, by its rank and the module's sides."""
        module = self.reader._modules[own]
        if isinstance(module, Linear):
            side = max(module.in_features, module.out_features)
        else:
            shapes = [parameter.shape for parameter in self.reader._base[own].values() if parameter is not None]
            side = max(max(shape[:1].numel(), shape[1:].numel()) for shape in shapes)
        rank = self.targets.lora.get(own)
        return _SLACK * side * max(1 if rank is None else rank.rank, len(self.targets.tokens.get(own, ())))

    def run(self) -> tuple[dict[str, Change], dict[str, torch.Tensor]]:
        own_parts = self._own_parts()
        own_plain = self._own_plain()
        self._check_complete(own_parts, own_plain)
        changes: dict[str, Change] = {}
        parameters: dict[str, torch.Tensor] = {}
        owners = {*own_parts, *(name.rpartition(".")[0] for name in own_plain)}
        tokens = self._tokens(own_parts)
        for name in sorted(owners | set(tokens)):
            module = self.reader._modules[name]
            try:
                given = {leaf: own_plain.get(f"{name}.{leaf}") for leaf in self.reader._base[name]}
                change = self._change(name, module, own_parts.get(name, {}), given, tokens)
            except ValueError as error:
                raise AdapterError(f"{self.where}: {name}: {error}") from None
            if isinstance(change, dict):
                parameters.update({f"{name}.{leaf}": tensor for leaf, tensor in change.items()})
            elif change is not None:
                changes[name] = change
        self._scale_queries(changes)
        return changes, parameters

    def _scale_queries(self, changes: dict[str, Change]) -> None:
        """What a change of latents multiplies keys by, the queries are multiplied by."""
        for name, change in list(changes.items()):
            layer = self.reader._modules[name]
            if not isinstance(change, LatentChange) or change.key_scale is None:
                continue
            assert isinstance(layer, LatentProjection)
            query = f"{name.rpartition('.')[0]}.{layer.query_layer}"
            own, rows = changes.get(query), self.reader._modules[query]
            assert isinstance(rows, Linear) and (own is None or isinstance(own, LinearChange))
            scale = torch.ones(layer.heads, rows.out_features // layer.heads)
            scale[:, : layer.key] = change.key_scale
            changes[query] = scaled_change(own, scale.flatten())
            changes[name] = replace(change, key_scale=None)

    def _change(
        self, name: str, module: nn.Module, parts: Parts, given: Mapping[str, torch.Tensor | None], tokens: Any
    ) -> Change | dict[str, torch.Tensor] | None:
        rank = self.targets.lora.get(name)
        dtype = module.weight.dtype if isinstance(module, Router) else self.reader._dtype
        if isinstance(module, Linear):
            if isinstance(module, ExpertLinear) and (given.get("weight") is not None or name in tokens):
                raise AdapterError(f"{self.where}: {name}: an expert's weights take LoRA, and cannot be replaced.")
            made = linear_change(module, rank, parts, given, tokens.get(name), dtype)
            return module.by_head(made) if isinstance(module, LatentProjection) else made
        if isinstance(module, Embedding):
            return embedding_change(module, rank, parts, given, tokens.get(name), dtype)
        if name in tokens or (parts and isinstance(module, (RMSNorm, LayerNorm))):
            kinds = ", ".join(sorted(parts)) or TOKENS
            raise AdapterError(f"{self.where}: {name}: a {type(module).__name__} takes no {kinds}.")
        if isinstance(module, (RMSNorm, LayerNorm)):
            return norm_change(module, given, dtype)
        if not self.reader._model.is_visual(name):
            raise AdapterError(f"{self.where}: {name}: a {type(module).__name__} cannot be changed by an adapter.")
        return changed_parameter(self.reader._base[name], rank, parts, given, dtype)

    def _own_parts(self) -> dict[str, Parts]:
        found = {}
        for name, kinds in self.parts.items():
            own = self.naming.modules.get(name)
            if own is None or (own not in self.targets.lora and own not in self.targets.tokens):
                why = "" if own is None else " (the configuration does not target it)"
                self.problems += [f"{name}.{kind}{why}" for kind in kinds]
            else:
                found[own] = kinds
        return found

    def _own_plain(self) -> dict[str, torch.Tensor]:
        """What replaces parameters; embeddings that equal the model's are left out."""
        found = {}
        for own, tensor in self._owned().items():
            base = self._parameter(own)
            tensor = tensor.contiguous().to(base.dtype)
            if not torch.equal(tensor.to(base.device), base) or own in self.targets.saved:
                found[own] = tensor
        return found

    def _owned(self) -> dict[str, torch.Tensor]:
        """What may replace parameters, by the model's own names, in the shapes that they have there."""
        found = {}
        targets, transposed = self.targets, self.reader._model.checkpoint_transposed
        for name, tensor in self.plain.items():
            own = self.naming.parameters.get(name, "")
            module = self.reader._modules.get(own.rpartition(".")[0])
            is_table = own.endswith(".weight") and (isinstance(module, Embedding) or own.endswith("lm_head.weight"))
            if not own or not (own in targets.saved or own in targets.biases or is_table):
                self.problems.append(name)
                continue
            base = self._parameter(own)
            if any(re.fullmatch(pattern, own) for pattern in transposed) and tensor.dim() == 2:
                tensor = tensor.t()
            if tensor.shape != base.shape:
                hint = " (a resized vocabulary is not served)" * is_table
                raise AdapterError(
                    f"{self.where}: {name} has shape {list(tensor.shape)}, the model's is {list(base.shape)}{hint}: "
                    "it was trained on another base model."
                )
            found[own] = tensor
        return found

    def _parameter(self, own: str) -> nn.Parameter:
        name, _, leaf = own.rpartition(".")
        parameter: nn.Parameter | None = self.reader._base[name][leaf]
        assert parameter is not None
        return parameter

    def _check_complete(self, parts: Mapping[str, Parts], plain: Mapping[str, torch.Tensor]) -> None:
        """Nothing is left over, and nothing that the configuration names is missing."""
        published = {own: name for name, own in self.naming.modules.items()}
        missing = []
        for own in {**self.targets.lora, **self.targets.tokens}:
            kinds, wanted = parts.get(own, {}), self._wanted_kinds(own)
            missing += [f"{published[own]}.{kind}" for kind in wanted if kind not in kinds]
            self.problems += [f"{published[own]}.{kind}" for kind in kinds if kind not in wanted and kind != TOKENS]
        given = {self.naming.parameters.get(name) for name in self.plain}
        names = {own: name for name, own in self.naming.parameters.items()}
        # PEFT no longer saves biases that are called otherwise (an in_proj_bias); files of older versions have them.
        biases = {own for own in self.targets.biases if own.endswith(".bias")}
        missing += [names[own] for own in sorted(self.targets.saved | biases) if own not in given]
        texts = [f"missing: {_listed(missing)}"] if missing else []
        texts += [f"of no use here: {_listed(self.problems)}"] if self.problems else []
        if texts:
            raise AdapterError(f"{self.where}: does not fit this model and its own configuration; {'; '.join(texts)}.")

    def _wanted_kinds(self, own: str) -> list[str]:
        wanted = [TOKENS] if own in self.targets.tokens and not self._follows_embedding(own) else []
        if own not in self.targets.lora:
            return wanted
        is_table = isinstance(self.reader._modules[own], (Embedding, nn.Embedding))
        wanted += ["lora_embedding_A", "lora_embedding_B"] if is_table else ["lora_A.weight", "lora_B.weight"]
        wanted += ["lora_magnitude_vector"] if self.config.use_dora else []
        wanted += ["lora_B.bias"] if self.config.lora_bias and not is_table else []
        return wanted

    def _follows_embedding(self, own: str) -> bool:
        """Whether the table is tied to one whose rows are trained: it takes the same ones."""
        model = self.reader._model
        tied = model.tied_weights.get(f"{own}.weight", "").removesuffix(".weight")
        ids = self.targets.tokens.get(tied)
        return bool(model.is_tied and ids is not None and self.targets.tokens.get(own, ids) == ids)

    def _tokens(self, parts: Mapping[str, Parts]) -> dict[str, Any]:
        rows = {}
        for own, ids in self.targets.tokens.items():
            delta = parts.get(own, {}).get(TOKENS)
            if delta is not None:
                table = self._parameter(f"{own}.weight")
                try:
                    rows[own] = token_rows(ids, delta, table)
                except ValueError as error:
                    raise AdapterError(f"{self.where}: {own}: {error}") from None
        for name, shared in self.reader._model.tied_weights.items():
            own, embedding = name.removesuffix(".weight"), shared.removesuffix(".weight")
            if embedding in rows and own not in rows and self._follows_embedding(own):
                rows[own] = rows[embedding]
        return rows


def _listed(names: list[str], most: int = 10) -> str:
    more = ", ..." if len(names) > most else ""
    return f"{len(names)} ({', '.join(sorted(names)[:most])}{more})"
