"""From a step's tensors to its hidden states: `Forward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from quire.kernels.transfer import send
from quire.layers.stages import Stage
from quire.models.base import CausalLM
from quire.models.pooling.base import PoolingModel
from quire.models.vision.base import MediaModel
from quire.platform.execution import batch
from quire.platform.execution.sequences import WorkerSequence
from quire.platform.execution.step_recordings import StepRecordings
from quire.platform.scheduling.plan import Chunk
from quire.types import ForwardContext, KVCache, StateCache


class Forward:
    """The model's forward pass of a step with any chunks.

    features: of images and other media, by their digests. stage: see `ModelRunner`.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: Sequence[KVCache | StateCache],
        device: torch.device,
        features: Mapping[bytes, torch.Tensor],
        stage: Stage | None,
        enforce_eager: bool,
    ) -> None:
        self._model, self._caches, self._device, self._features = model, caches, device, features
        pools = model if isinstance(model, PoolingModel) else None
        self._sees = isinstance(model, MediaModel) or (pools is not None and pools.bidirectional)
        self._types = pools is not None and pools.token_types
        self._padding = None if pools is None else pools.padding
        # The shortest of the layers' windows that whole prompts may exceed; 0: there is none.
        whole = isinstance(model, MediaModel) and model.prompt_sees
        self._whole_window = min((one for one in model.kv_spec.windows if one > 0), default=0) if whole else 0
        towers = None if pools is None else pools.pooling.towers
        # A later stage is handed rows that have them; where an image's features are what is told, they stand nowhere.
        self._takes_features = (stage is None or stage.is_first) and (towers is None or towers.image is None)
        levels = model.feature_levels if isinstance(model, MediaModel) else 0
        # On a GPU, whose rows these are would have to be waited for where a step has adapters.
        self._narrows = model.narrows and stage is None and device.type == "cpu" and levels < model.kv_spec.num_layers
        self._recordings = StepRecordings(model, caches, device, enforce_eager or stage is not None)

    def forget(self) -> None:
        """Weights or pool have other addresses from now on. Only while nothing runs."""
        self._recordings.forget()

    def __call__(
        self,
        inputs: batch.StepInputs,
        chunks: Sequence[Chunk],
        sequences: Sequence[WorkerSequence],
        wanted: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, C], with whatever adapters the layers work with now; or [R, C], of the step's tokens that
        are wanted, in their order."""
        context = self._context(inputs.context, chunks, sequences)
        if wanted is None:
            return self._hidden(inputs.token_ids, context, chunks, sequences)
        rows = send(torch.tensor(wanted or [0], dtype=torch.int64), self._device)
        if self._narrows and 2 * len(rows) <= len(inputs.token_ids):
            hidden = self._hidden(inputs.token_ids, replace(context, wanted=rows), chunks, sequences)
        else:
            hidden = self._hidden(inputs.token_ids, context, chunks, sequences)[rows]
        return hidden[: len(wanted)]

    def _hidden(
        self,
        token_ids: torch.Tensor,
        context: ForwardContext,
        chunks: Sequence[Chunk],
        sequences: Sequence[WorkerSequence],
    ) -> torch.Tensor:
        rows, parts = batch.media_rows(chunks, sequences)
        if rows:
            return self._run(*self._with_features(token_ids, context, rows, parts))
        if any(sequence.adapters for sequence in sequences):
            return self._run(self._model.embed(token_ids), context)
        return self._recordings(token_ids, context)

    def _run(self, embeddings: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden: torch.Tensor = self._model(embeddings, context, self._caches)
        return hidden

    def _context(
        self, context: ForwardContext, chunks: Sequence[Chunk], sequences: Sequence[WorkerSequence]
    ) -> ForwardContext:
        """The context, with what the model wants to know besides."""
        visible = batch.visible_ends(chunks, sequences) if self._sees else None
        if visible is not None:
            context = replace(context, visible_end=send(torch.from_numpy(visible), self._device))
            if self._whole_window:
                whole = batch.whole_prompts(chunks, sequences, self._whole_window, self._device)
                context = replace(context, whole_prompts=whole)
        if self._types:
            context = replace(context, token_types=send(batch.token_types(chunks, sequences), self._device))
        places = batch.position_rows(chunks, sequences, self._padding)
        if places is not None:
            context = replace(context, position_rows=send(places, self._device))
        return context

    def _with_features(
        self,
        token_ids: torch.Tensor,
        context: ForwardContext,
        rows: Sequence[int],
        parts: Sequence[tuple[bytes, int, int]],
    ) -> tuple[torch.Tensor, ForwardContext]:
        """The tokens' embeddings [T, E], with features for placeholders; and the context, with what else these give.

        rows, parts: as of `batch.media_rows`.
        """
        places = send(torch.tensor(rows, dtype=torch.int64), self._device)
        token_ids[places] = 0  # a placeholder need not be in the vocabulary
        embeddings = self._model.embed(token_ids)
        if not self._takes_features:
            return embeddings, context
        width = embeddings.shape[1]
        features = [self._features[digest][first:end] for digest, first, end in parts]
        embeddings[places] = torch.cat([some[:, :width] for some in features])
        levelled = [some.shape[1] > width for some in features]
        if any(levelled):  # rows that a caller gave have none
            takes = torch.tensor([flag for flag, some in zip(levelled, features, strict=True) for _ in some])
            levels = torch.cat([some[:, width:] for some in features if some.shape[1] > width])
            context = replace(
                context,
                level_rows=places if all(levelled) else places[send(takes, self._device)],
                level_features=levels.unflatten(1, (-1, width)).transpose(0, 1).contiguous(),
            )
        return embeddings, context
