"""Transformers' module in two halves: its base model, and what makes scores of hidden states."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from quire.errors import UnsupportedModelError


class Output(dict[str, Any]):
    """What a base model returns: hidden states, and None for all else that is asked for."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__(last_hidden_state=hidden)
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return (self.last_hidden_state,)[key]
        return self.last_hidden_state if key in (0, "last_hidden_state") else None


class _Given(nn.Module):
    """In the place of the base model: hands on the hidden states that it is given as embeddings."""

    def forward(self, input_ids: Any = None, *_: Any, inputs_embeds: torch.Tensor | None = None, **__: Any) -> Output:
        hidden = input_ids if inputs_embeds is None else inputs_embeds
        assert hidden is not None
        return Output(hidden)

    @property
    def decoder(self) -> _Given:
        """Some modules call a part of their base model."""
        return self


def _base_of(module: Any) -> str:
    """The name of a module's base model. Raises UnsupportedModelError."""
    from transformers import PreTrainedModel

    inner = [name for name, part in module.named_children() if isinstance(part, PreTrainedModel)]
    if module.base_model_prefix in module._modules:
        return str(module.base_model_prefix)
    if len(inner) != 1:
        raise UnsupportedModelError(f"{type(module).__name__} does not say which of its parts is its base model.")
    return inner[0]


class Top:
    """The halves of a module. Calling it is the upper one: hidden states [1, R, C] -> scores [1, R, V]."""

    def __init__(self, module: Any) -> None:
        prefix = _base_of(module)
        self.model: Any = module._modules[prefix]
        self.upper = copy.copy(module)
        self.upper.__dict__["_modules"] = {**module._modules, prefix: _Given()}

    def base(self, embeddings: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """embeddings [1, T, E] and positions [1, T] (None: as the module counts them) -> hidden states [1, T, C]."""
        out = self.model(inputs_embeds=embeddings, position_ids=positions, use_cache=False, return_dict=True)
        hidden: torch.Tensor = out[0] if isinstance(out, tuple) else out.last_hidden_state
        return hidden

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.upper(inputs_embeds=hidden, use_cache=False, return_dict=True)
        scores: torch.Tensor = out.logits
        return scores
