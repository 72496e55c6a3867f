"""What is asked of every family's rows beside the engine's own comparisons (`tests/platform/engine/parity.py`)."""

from __future__ import annotations

import copy
from pathlib import Path
from statistics import median
from typing import Any

import torch

from quire import LLM
from quire.layers import Experts
from quire.models.base import CausalLM
from quire.models.loader import load_model
from tests.models import run_model
from tests.models.tiny import make, save
from tests.platform.engine.parity import prompts

DRAWS = 9  # of the weights of a model with experts


def bfloat16_error(architecture: str, variant: str, folder: Path) -> float:
    """quire's mean distance of all log-probabilities to those in float64, of the same weights, over transformers'.

    Where rounding sends a token to another expert, that outweighs all else, for the one or the other by chance: of
    models with experts it is the median over several draws of weights.
    """
    ratios = []
    for seed in range(DRAWS):
        theirs = make(architecture, variant, seed).to(torch.bfloat16)
        ours = load_model(save(theirs, folder / str(seed)), torch.bfloat16)
        exact = make(architecture, variant, seed).double()  # its tables of positions have not been rounded
        exact.load_state_dict(theirs.state_dict())
        own, other = _distances(ours, theirs, exact).tolist()
        ratios.append(own / other)
        if not any(isinstance(module, Experts) for module in ours.modules()):
            break
    return median(ratios)


def _distances(ours: CausalLM, theirs: Any, exact: Any) -> torch.Tensor:
    """[quire's, transformers']"""
    sums, count = torch.zeros(2, dtype=torch.float64), 0
    for ids in prompts(theirs.config.vocab_size):
        with torch.inference_mode():  # fresh: length-dependent rotary embeddings remember earlier calls
            truth, half = (
                copy.deepcopy(model)(torch.tensor([ids])).logits[0].double().log_softmax(-1)
                for model in (exact, theirs)
            )
        own = run_model.logits(ours, ids).double().log_softmax(-1)
        sums += torch.stack([(own - truth).abs().sum(), (half - truth).abs().sum()])
        count += truth.numel()
    return sums / count


def recorded_shapes(llm: LLM) -> list[Any]:
    """Shapes of decode steps that were recorded, and are replayed without Python."""
    shapes = llm.llm_engine.executor.runner._decode._shapes  # nothing public says it
    return [shape for shape, recording in shapes.items() if recording is not None]


def recorded_steps(llm: LLM) -> list[Any]:
    """Shapes of steps of any number of tokens that were recorded, of all threads' recordings."""
    own = llm.llm_engine.executor.runner._forward._recordings  # nothing public says it
    return [shape for some in own._free for shape in some.of]
