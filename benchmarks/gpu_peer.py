"""transformers' own ways to generate, as a peer of `gpu.py`: continuous batching, or else plain batches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from quire.cli.workload import Requests

_TOGETHER = 64  # streams of a plain batch


class Peer:
    """Takes the first way that works, and says which in `way`.

    All prompts of a call have one length, and so have all outputs: plain batches need no padding and waste nothing.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.model.generation_config.pad_token_id = 0
        self._ways = ["generate_batch", "generate_batch without flash attention", "generate"]

    @property
    def way(self) -> str:
        return self._ways[0]

    @contextmanager
    def session(self) -> Iterator[None]:
        """Calls inside share what they set up: the manager with its graphs, made for the size of the first call."""
        try:
            yield
        finally:
            self._forget()

    def seconds(self, requests: Requests) -> float:
        """That all requests take, without what is done before the first and after the last."""
        prompts, wanted = [token_ids for token_ids, _ in requests], requests[0][1]
        while True:
            begin = time.perf_counter()
            try:
                made, spent = self._run(prompts, wanted)
                if made != len(prompts) * wanted:
                    raise RuntimeError(f"{made} tokens were generated, not {len(prompts) * wanted}")
                return min(spent, time.perf_counter() - begin)
            except Exception as error:
                if len(self._ways) == 1:
                    raise
                print(f"transformers' {self.way} fails: {type(error).__name__}: {str(error)[:300]}", flush=True)
            self._forget()  # not inside the handler, whose traceback keeps what it held
            del self._ways[0]

    def _run(self, prompts: Sequence[list[int]], wanted: int) -> tuple[int, float]:
        """(tokens made, seconds of it)"""
        if self.way == "generate":
            with torch.inference_mode():
                return self._plain(prompts, wanted), math.inf
        return self._continuous(prompts, wanted, self.way == "generate_batch")

    def _continuous(self, prompts: Sequence[list[int]], wanted: int, flash: bool) -> tuple[int, float]:
        from transformers import GenerationConfig

        options: dict[str, Any] = {}
        if not flash:
            options = self._without_flash()
        # No token ends a sequence.
        settings = GenerationConfig(max_new_tokens=wanted, do_sample=False, eos_token_id=-1, pad_token_id=0)
        found = self.model.generate_batch(
            list(prompts), generation_config=settings, progress_bar=False, persistent_manager=True, **options
        )
        outputs = list(found.values())
        made = sum(len(output.generated_tokens) for output in outputs)
        if not outputs or any(output.lifespan[1] < 0 for output in outputs):
            return made, math.inf
        return made, max(one.lifespan[1] for one in outputs) - min(one.created_time for one in outputs)

    def _without_flash(self) -> dict[str, Any]:
        """What keeps it from attention kernels that it would have to fetch; versions have different ways."""
        try:
            from transformers import ContinuousBatchingConfig
        except ImportError:
            from transformers.generation.configuration_utils import ContinuousBatchingConfig
        try:
            return {"continuous_batching_config": ContinuousBatchingConfig(auto_switch_to_flash=False)}
        except TypeError:
            self.model.set_attn_implementation("paged|sdpa")
            return {}

    def _plain(self, prompts: Sequence[list[int]], wanted: int) -> int:
        self.model.set_attn_implementation("sdpa")
        made = 0
        for first in range(0, len(prompts), _TOGETHER):
            ids = torch.tensor(prompts[first : first + _TOGETHER], device=self.model.device)
            found = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=wanted,
                min_new_tokens=wanted,
                do_sample=False,
            )
            made += (found.shape[1] - ids.shape[1]) * len(ids)
        return made

    def _forget(self) -> None:
        with suppress(Exception):
            self.model.destroy_cached_continuous_batching_manager()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
