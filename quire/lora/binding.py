"""An adapter's tensors, bound to the modules of a model: completely, or not at all.

Raises AdapterError throughout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from quire.errors import AdapterError
from quire.layers import Embedding, ExpertLinear, LatentProjection, LayerNorm, Linear, RMSNorm
from quire.layers.adapters import EmbeddingChange, LinearChange, NormChange
from quire.layers.latent import LatentChange
from quire.lora.base import Base
from quire.lora.files import TOKENS, Parts
from quire.lora.fold import changed_parameter, embedding_change, linear_change, norm_change, scaled_change, token_rows
from quire.lora.targets import Naming, Targets

_SLACK = 16
_MOST_UNUSED = 1 << 20  # elements of a tensor that no parameter of the model's is known for

Change = LinearChange | LatentChange | EmbeddingChange | NormChange


@dataclass(frozen=True, slots=True)
class Kinds:
    """What a module with LoRA has beside A and B. dora: a magnitude vector; bias: B's own."""

    dora: bool = False
    bias: bool = False


@dataclass
class Binding:
    """One adapter's tensors on their way to the modules: what is left over, what is missing."""

    base: Base
    kinds: Kinds
    targets: Targets
    naming: Naming
    parts: dict[str, Parts]
    plain: dict[str, torch.Tensor]
    where: str
    problems: list[str] = field(default_factory=list)
    # What it changes that another process computes: modules of quire's layers, and parameters of others, by name.
    elsewhere: list[str] = field(default_factory=list)

    def check_sizes(self, unused: Mapping[str, torch.Tensor]) -> None:
        """Raise AdapterError for tensors, of which the shapes alone are known, that cannot be this model's.

        Names are checked as `run` does it, and no tensor may be far too large; `run` says which shape each must have.
        unused: those that `run` does not look at, by the published parameters that they repeat.
        """
        for name, tensor in unused.items():
            own = self.naming.parameters.get(name)
            if tensor.numel() > max(_MOST_UNUSED, 0 if own is None else self.base.shape(own).numel()):
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
        leaves = [leaf for leaf, parameter in self.base.parameters[own].items() if parameter is not None]
        shapes = [self.base.shape(f"{own}.{leaf}") for leaf in leaves]
        module = self.base.modules[own]
        if isinstance(module, Linear):  # whose format may have no parameter of the numbers' shape
            shapes.append(torch.Size((module.out_features, module.in_features)))
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
            module = self.base.modules[name]
            if name in self.base.model.elsewhere:
                leaves = [leaf for leaf in self.base.parameters[name] if f"{name}.{leaf}" in own_plain]
                own = isinstance(module, (Linear, Embedding, RMSNorm, LayerNorm))
                self.elsewhere += [name] if own else [f"{name}.{leaf}" for leaf in leaves or ["weight"]]
                continue
            try:
                given = {leaf: own_plain.get(f"{name}.{leaf}") for leaf in self.base.parameters[name]}
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
            layer = self.base.modules[name]
            if not isinstance(change, LatentChange) or change.key_scale is None:
                continue
            assert isinstance(layer, LatentProjection)
            query = f"{name.rpartition('.')[0]}.{layer.query_layer}"
            own, rows = changes.get(query), self.base.modules[query]
            assert isinstance(rows, Linear) and (own is None or isinstance(own, LinearChange))
            scale = torch.ones(layer.heads, rows.out_features // layer.heads)
            scale[:, : layer.key] = change.key_scale
            changes[query] = scaled_change(own, scale.flatten())
            changes[name] = replace(change, key_scale=None)

    def _change(
        self, name: str, module: nn.Module, parts: Parts, given: Mapping[str, torch.Tensor | None], tokens: Any
    ) -> Change | dict[str, torch.Tensor] | None:
        rank = self.targets.lora.get(name)
        dtype = self.base.dtype_for(name)
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
        if not self.base.model.is_visual(name):
            raise AdapterError(f"{self.where}: {name}: a {type(module).__name__} cannot be changed by an adapter.")
        return changed_parameter(self.base.parameters[name], rank, parts, given, dtype)

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
            tensor = tensor.contiguous().to(self.base.dtype_of(own))
            elsewhere = own.rpartition(".")[0] in self.base.model.elsewhere
            if own in self.targets.saved or not (elsewhere or self.base.equals(own, tensor)):
                found[own] = tensor
        return found

    def _owned(self) -> dict[str, torch.Tensor]:
        """What may replace parameters, by the model's own names, in the shapes that they have there."""
        found = {}
        targets, transposed = self.targets, self.base.model.checkpoint_transposed
        for name, tensor in self.plain.items():
            own = self.naming.parameters.get(name, "")
            module = self.base.modules.get(own.rpartition(".")[0])
            is_table = own.endswith(".weight") and (isinstance(module, Embedding) or own.endswith("lm_head.weight"))
            if not own or not (own in targets.saved or own in targets.biases or is_table):
                self.problems.append(name)
                continue
            shape = self.base.shape(own)
            if any(re.fullmatch(pattern, own) for pattern in transposed) and tensor.dim() == 2:
                tensor = tensor.t()
            if tensor.shape != shape:
                hint = " (a resized vocabulary is not served)" * is_table
                raise AdapterError(
                    f"{self.where}: {name} has shape {list(tensor.shape)}, the model's is {list(shape)}{hint}: "
                    "it was trained on another base model."
                )
            found[own] = tensor
        return found

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
        is_table = isinstance(self.base.modules[own], (Embedding, nn.Embedding))
        wanted += ["lora_embedding_A", "lora_embedding_B"] if is_table else ["lora_A.weight", "lora_B.weight"]
        wanted += ["lora_magnitude_vector"] if self.kinds.dora else []
        wanted += ["lora_B.bias"] if self.kinds.bias and not is_table else []
        return wanted

    def _follows_embedding(self, own: str) -> bool:
        """Whether the table is tied to one whose rows are trained: it takes the same ones."""
        model = self.base.model
        tied = model.tied_weights.get(f"{own}.weight", "").removesuffix(".weight")
        ids = self.targets.tokens.get(tied)
        return bool(model.is_tied and ids is not None and self.targets.tokens.get(own, ids) == ids)

    def _tokens(self, parts: Mapping[str, Parts]) -> dict[str, Any]:
        rows = {}
        for own, ids in self.targets.tokens.items():
            delta = parts.get(own, {}).get(TOKENS)
            if delta is not None:
                table = f"{own}.weight"
                try:
                    rows[own] = token_rows(ids, delta, self.base.shape(table), self.base.dtype_of(table))
                except ValueError as error:
                    raise AdapterError(f"{self.where}: {own}: {error}") from None
        for name, shared in self.base.model.tied_weights.items():
            own, embedding = name.removesuffix(".weight"), shared.removesuffix(".weight")
            if embedding in rows and own not in rows and self._follows_embedding(own):
                rows[own] = rows[embedding]
        return rows


def _listed(names: list[str], most: int = 10) -> str:
    more = ", ..." if len(names) > most else ""
    return f"{len(names)} ({', '.join(sorted(names)[:most])}{more})"
