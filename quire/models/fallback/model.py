"""A decoder without a row of its own: transformers' module, on quire's pool, kernels and layers."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from quire.checkpoint.files import Checkpoint
from quire.checkpoint.weights import StoredPart
from quire.errors import UnsupportedModelError
from quire.layers import Linear, PagedAttention
from quire.models.base import CausalLM
from quire.models.fallback import experts, names
from quire.models.fallback.attention import PagedStep, answering
from quire.models.fallback.build import Build, build
from quire.models.fallback.construct import causal_class, seeing
from quire.models.fallback.exact import RowExact
from quire.models.fallback.operations import RECORDED
from quire.models.fallback.self_test import self_test
from quire.models.fallback.top import Top
from quire.types import ForwardContext, KVCache

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger("quire")

# What configurations call the number of positions, the first that is there counts.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


class TransformersForCausalLM(CausalLM):
    """Any causal language model of transformers' whose attention goes through its interface.

    promise: what of it is quire's and what torch's.
    """

    recorded_operations = RECORDED
    _module: Any
    _bare: Any
    _top: Top
    _layers: Sequence[PagedAttention]

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        kind = causal_class((config.architectures or [""])[0])
        assert kind is not None
        made: Build = build(config, kind)
        module = made.module
        # Its parts become this model's, so that all are called as transformers calls them.
        self.__dict__.update(_module=module, _bare=made.bare, _top=Top(module), _layers=made.layers)
        self._modules.update(module._modules)
        self.promise = made.promise
        self._exact = RowExact() if made.by_row else None
        self._plain_top = made.plain_top
        self.tied_weights = _tied(module)
        self.checkpoint_transposed = made.transposed
        self._stored: names.Stored | None = None
        self.kv_spec = made.kv_spec
        self.max_model_len = _length(config)

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        """What makes no sense is found when transformers' module is gone through; its fields are its own."""
        name = (config.architectures or [""])[0]
        if name in seeing():
            raise UnsupportedModelError(
                f"{name} takes more than text, and is served by a row alone, where there is one: what a picture takes "
                "of prompt and memory must be known before it is decoded, which transformers' processors do not say."
            )
        if causal_class(name) is None:
            raise UnsupportedModelError(f"transformers has no causal language model called {name!r}.")
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModelError(f"{name}: encoder-decoders are not served.")

    @property
    def output_projection(self) -> Linear:
        """The projection to the vocabulary, whatever it is called."""
        return cast(Linear, self._module.get_output_embeddings())

    @property
    def vocab_size(self) -> int:
        return self.output_projection.out_features

    @property
    def is_tied(self) -> bool:
        return bool(getattr(self.config.get_text_config(), "tie_word_embeddings", False))

    def see_files(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        shapes = {name: checkpoint.tensor(name).shape for name in checkpoint.names()}
        self._stored = stored = names.stored_as(self._bare, shapes)
        for path, module in self._bare.named_modules():
            if experts.is_experts(module):
                names.take_apart(stored, shapes, experts.slices(module, path))
        return stored.renames

    @property
    def checkpoint_ignored(self) -> Sequence[str]:  # type: ignore[override]
        own = getattr(self._module, "_keys_to_ignore_on_load_unexpected", None) or ()
        return tuple(f".*(?:{pattern}).*" for pattern in (*own, r"rotary_emb\.inv_freq$"))

    def checkpoint_parts(self) -> Mapping[str, StoredPart]:
        return {} if self._stored is None else self._stored.parts

    def computes_itself(self, name: str) -> bool:
        return True

    def keeps_float32(self, name: str) -> bool:
        """What transformers never rounds to 16 bits: routers, above all, whose choice would change."""
        patterns = getattr(self._bare, "_keep_in_fp32_modules_strict", None) or ()
        return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        with self._exact or nullcontext():
            return cast(torch.Tensor, self._module.get_input_embeddings()(input_ids))

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        step = PagedStep(self._layers, ctx, kv, embeddings.dtype)
        with answering(step), self._exact or nullcontext():
            hidden = self._top.base(embeddings.unsqueeze(0), ctx.positions.unsqueeze(0))
        if step.calls != len(self._layers):
            raise RuntimeError(f"{step.calls} of {len(self._layers)} layers called the attention")
        return hidden[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._plain_top:
            return cast(torch.Tensor, self.output_projection(hidden, torch.float32))
        with self._exact or nullcontext():
            return self._top(hidden.unsqueeze(0))[0].float()

    def check_loaded(self) -> None:
        device = next(self.parameters()).device
        if device.type != "cpu":
            raise UnsupportedModelError(
                f"{type(self._module).__name__}: transformers' own module is run on CPUs alone. On a GPU torch's sums "
                "along rows depend on how many rows there are."
            )
        self_test(self)
        logger.warning("%s: run through transformers' own module. %s", type(self._module).__name__, self.promise)


def _tied(module: Any) -> dict[str, str]:
    tied = getattr(module, "_tied_weights_keys", None)
    return dict(tied) if isinstance(tied, dict) else {}


def _length(config: Any) -> int:
    text = config.get_text_config()
    for name in _LENGTHS:
        value = getattr(text, name, None)
        if type(value) is int and value > 0:
            return value
    raise UnsupportedModelError(
        f"{type(config).__name__} does not say how many positions the model has (max_position_embeddings): "
        "name it by hf_overrides."
    )
