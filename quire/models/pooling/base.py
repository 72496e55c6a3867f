"""What a model that generates nothing is to the engine: one that makes numbers of its prompts' hidden states."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.checkpoint.gguf.tensors import GgufCheckpoint
from quire.checkpoint.renamed import RenamedCheckpoint
from quire.checkpoint.weights import StoredPart
from quire.errors import UnsupportedModelError
from quire.layers import Embedding, Linear, activation
from quire.models.base import CausalLM
from quire.pooling_types import Activation, Convert, DenseSpec, PoolingKind, PoolingSpec, TowerPrompts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quire.checkpoint.files import Checkpoint

# Modules of a model that are no part of its body: the first part of their parameters' names.
_HEAD_MODULES = frozenset({
    "score", "classifier", "pre_classifier", "v_head", "prediction_head", "classifier_dense", "lm_head", "cls",
    "linear", "sentence_dense", "vocab_transform", "vocab_layer_norm", "vocab_projector",
})  # fmt: skip
# Parameters of the layers behind the pooled rows, as families call them.
_HEAD_PARAMETER = re.compile(r"(?:.+\.)?(?:pooler|pre_classifier|classifier|score|v_head|head)\..+")
# Tensors of heads for other tasks, which files may have.
_OTHER_HEAD_TENSORS = r"(?:cls|lm_head|vocab_\w+|qa_outputs|predictions|generator_\w+|discriminator_\w+)\..+"


class PoolingModel(CausalLM):
    """A model with the engine's pool of blocks and layers, whose hidden states are pooled and not continued.

    A subclass builds its parameters for what it is converted to, and defines `head` where that is classes.

    convert: what it was loaded to do; `specialized` sets it. bidirectional: whether all tokens of a prompt see one
    another, so that a prompt is computed in one step. token_types: whether a second text's tokens are told from the
    first's. padding: the token that has a position of its own, if one has. kind: the rows that are pooled unless files
    or settings say otherwise. tower_prompts: what a prompt is to a model with a tower of its own for texts. pooling:
    all that the engine has to know, once it was read. head_absent: parameters of the head that the files do not have,
    and adapters bring.
    """

    convert: ClassVar[Convert] = "embed"
    architecture: ClassVar[str] = ""
    pooling: PoolingSpec
    # (pattern, what is in its place): of names in the files, all of which are searched, one after the other
    stored_names: ClassVar[Sequence[tuple[str, str]]] = ()
    bidirectional: bool = False
    token_types: bool = False
    padding: int | None = None
    kind: PoolingKind = "cls"
    token_kind: PoolingKind = "all"
    step_token: int | None = None
    tower_prompts: TowerPrompts | None = None
    head_absent: frozenset[str] = frozenset()

    @property
    def per_token(self) -> bool:
        """Whether its classes are those of single tokens."""
        return self.architecture.endswith("ForTokenClassification")

    def no_head(self) -> UnsupportedModelError:
        """The error of an architecture without classes."""
        return UnsupportedModelError(
            f"convert={self.convert!r}: {self.architecture} has no head that gives classes; take convert='embed'."
        )

    @property
    def width(self) -> int:
        """Numbers of a hidden state."""
        config: Any = self.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return int(text.hidden_size)

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """The classes' numbers [R, labels] float32 of rows [R, C] in the model's dtype, before softmax or sigmoid."""
        raise NotImplementedError

    def pool(self, rows: torch.Tensor) -> torch.Tensor:
        """What is told of pooled hidden states, of rows [R, C] in the model's dtype: [R, width or labels] float32.

        Each row by itself, by kernels that treat rows so: no other row changes a bit of it.
        """
        if self.convert != "embed":
            return self.head(rows)
        for layer in self.dense:
            rows = layer(rows)
        return rows.float()

    def add_vocabulary(self) -> None:
        """Build what gives a number for each word of the vocabulary, before any weight is read: SPLADE's head
        (arXiv:2109.10086), whose numbers `pool` tells from then on. Raises UnsupportedModelError."""
        raise UnsupportedModelError(
            f"SpladePooling: {self.architecture} has no projection to the vocabulary here; BertForMaskedLM and "
            "DistilBertForMaskedLM have."
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What stands in the place of scores: `pool`'s rows."""
        return self.pool(hidden)

    @property
    def dense(self) -> Sequence[nn.Module]:
        """What sentence-transformers puts behind the pooled vector."""
        layers: Any = self._modules.get("sentence_dense") or ()
        return tuple(layers)

    def add_dense(self, specs: Sequence[DenseSpec]) -> None:
        """Build these layers, before any weight is read."""
        if specs:
            self.add_module("sentence_dense", nn.ModuleList(Dense(spec) for spec in specs))

    def as_named(self, checkpoint: Checkpoint) -> Checkpoint:
        """The files' tensors by the names that transformers has for them beside a head. Raises CheckpointError."""
        if isinstance(checkpoint, GgufCheckpoint):  # whose names are the format's
            return checkpoint
        patterns = [(re.compile(old), new) for old, new in self.stored_names]
        ignored = [re.compile(pattern) for pattern in self.checkpoint_ignored]
        parts = dict.fromkeys(name.partition(".")[0] for name, _ in self.named_parameters())
        bodies = [f"{name}." for name in parts if name not in _HEAD_MODULES]

        def plain(name: str) -> str:
            for old, new in patterns:
                name = old.sub(new, name)
            return name

        bare = len(bodies) == 1 and not any(plain(name).startswith(bodies[0]) for name in checkpoint.names())

        def renamed(stored: str) -> str:
            name = plain(stored)
            kept = name.partition(".")[0] in _HEAD_MODULES or any(one.fullmatch(name) for one in ignored)
            return bodies[0] + name if bare and not kept else name

        return RenamedCheckpoint(checkpoint, renamed) if bare or patterns else checkpoint

    def leave_head_to_adapters(self, checkpoint: Checkpoint) -> None:
        """Do without a head that the files do not have: it is all zeros, and nobody is answered with it."""
        stored = {*checkpoint.names(), *self.see_files(checkpoint).values()}
        heads = (
            (name for name, _ in self.named_parameters() if _HEAD_PARAMETER.fullmatch(name))
            if self.convert != "embed"
            else ()
        )
        self.head_absent = frozenset(heads) - stored
        if self.head_absent:
            self.pooling = replace(self.pooling, headless=True)
            self.checkpoint_ignored = (*self.checkpoint_ignored, _OTHER_HEAD_TENSORS)

    def checkpoint_parts(self) -> Mapping[str, StoredPart]:
        shapes = {name: self.get_parameter(name).shape for name in self.head_absent}
        made = {name: StoredPart({}, partial(torch.zeros, shape)) for name, shape in shapes.items()}
        return {**super().checkpoint_parts(), **made}

    def published_names(self, name: str) -> tuple[str, ...]:
        """Also as transformers' *Model has them: without the name of the body before them."""
        own = super().published_names(name)
        return (own[-1].removeprefix(self._body_prefix), *own)

    @cached_property
    def _body_prefix(self) -> str:
        """What published names of the body's modules begin with."""
        table = next(name for name, module in self.named_modules() if isinstance(module, Embedding))
        first, dot, _ = super().published_names(table)[-1].partition(".")
        return first + dot if dot else ""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, by number; "?" for what no text can have: answers hold them."""
        config: Any = self.config
        names = dict(getattr(config, "id2label", None) or {})
        found = (str(names.get(number, f"LABEL_{number}")) for number in range(self.num_labels))
        return tuple(one.encode("utf-8", "replace").decode() for one in found)

    @property
    def trailing_padding(self) -> int | None:
        """The token that is left out where it ends a prompt; see `PoolingSpec`."""
        return None

    @property
    def num_labels(self) -> int:
        """How many classes there are."""
        config: Any = self.config
        return int(getattr(config, "num_labels", None) or 2)

    @property
    def output_projection(self) -> nn.Module:
        return nn.Identity()  # there is none: no module of the model's is it


class Dense(nn.Module):
    """act(W x + b) of a pooled vector."""

    def __init__(self, spec: DenseSpec) -> None:
        super().__init__()
        self.linear = Linear(spec.in_features, spec.out_features, spec.bias)
        self.activate = None if spec.activation == "identity" else activation(spec.activation)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [R, in_features] -> [R, out_features]."""
        y: torch.Tensor = self.linear(rows)
        return y if self.activate is None else self.activate(y)


def specialized(base: type[PoolingModel], convert: Convert, architecture: str) -> type[PoolingModel]:
    """A class of models for one task. architecture: config.json's, by which heads are called."""
    return type(
        base.__name__, (base,), {"convert": convert, "architecture": architecture, "__module__": base.__module__}
    )


def class_activation(config: PretrainedConfig, labels: int) -> Activation:
    """What makes probabilities of classes: what config.json's problem_type says, or else the sigmoid for one and the
    softmax for more."""
    kind = getattr(config, "problem_type", None)
    if kind == "regression":
        return "none"
    if kind == "multi_label_classification":
        return "sigmoid"
    return "softmax" if labels > 1 else "sigmoid"
