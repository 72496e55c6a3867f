"""Reward models of Qwen 2.5 and InternLM 2, whose heads transformers has not: made here of its own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quire import PoolingParams
from quire.errors import QuireError, RequestError
from tests.models import rows, tiny
from tests.models.pooling.worlds import Ids, change, classes, engine, given, hidden, largest_error, prompts

LENGTHS = (1, 5, 17, 30, 40)
QWEN = ("mqa", "windows", "odd_sizes", "rope_yarn", "tied")
INTERNLM = ("as_published", "biases", "mha", "mqa", "rope_linear")
BARE = PoolingParams(use_activation=False)
STEP = 96


def qwen(path: Path, architecture: str, variant: str, labels: int, **settings: Any) -> tuple[Any, nn.Module]:
    """(the decoder, its head), in float64; files as Qwen published them."""
    model = tiny.make("Qwen2ForCausalLM", variant, num_labels=labels, **settings)
    tiny.randomise(model, 1.25)
    base = model.base_model
    width = base.config.hidden_size
    head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, labels))
    base.save_pretrained(path)
    stored = {f"model.{name}": tensor for name, tensor in load_file(path / "model.safetensors").items()}
    stored |= {f"score.{name}": tensor.clone() for name, tensor in head.state_dict().items()}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    change(path, architectures=[architecture])
    return base.double(), head.double()


def rewards(base: Any, head: nn.Module, ids: Ids) -> torch.Tensor:
    """[T, labels]"""
    with torch.no_grad():
        found: torch.Tensor = head(hidden(base, ids))
    return found


@pytest.mark.parametrize("variant", QWEN)
def test_a_reward_of_an_answer(tmp_path: Path, variant: str) -> None:
    """Qwen2.5-Math-RM: the last token's number; each token has one."""
    base, head = qwen(tmp_path, "Qwen2ForRewardModel", variant, 1)
    batch = prompts(tiny.VOCAB, LENGTHS)
    expected = [rewards(base, head, ids) for ids in batch]
    llm = engine(tmp_path)
    found = llm.reward(given(batch), use_tqdm=False)
    assert largest_error([one.outputs.data for one in found], expected) < 1e-5
    last = llm.encode(given(batch), pooling_task="classify", use_tqdm=False)
    assert largest_error([one.outputs.data for one in last], [one[-1] for one in expected]) < 1e-5


@pytest.mark.parametrize("variant", QWEN)
@pytest.mark.parametrize("budget", [2048, 7])
def test_rewards_of_steps(tmp_path: Path, variant: str, budget: int) -> None:
    """Qwen2.5-Math-PRM: two classes for each token that ends a step; in chunks, too."""
    base, head = qwen(tmp_path, "Qwen2ForProcessRewardModel", variant, 2)
    batch = [[*ids, STEP, *ids[:3], STEP] for ids in prompts(STEP, LENGTHS)] + [[5, 6, 7]]
    expected = [rewards(base, head, ids)[[token == STEP for token in ids]] for ids in batch]
    assert [len(one) for one in expected] == [2] * len(LENGTHS) + [0]
    llm = engine(tmp_path, pooler_config={"step_tag_id": STEP}, max_num_batched_tokens=budget)
    bare = llm.reward(given(batch[:-1]), pooling_params=BARE, use_tqdm=False)
    assert largest_error([one.outputs.data for one in bare], expected[:-1]) < 1e-5
    found = llm.reward(given(batch), use_tqdm=False)
    assert found[-1].outputs.data.shape == (0, 2)
    with pytest.raises(RequestError, match="can token_classify"):  # an answer has as many rows as steps
        llm.classify(given(batch), use_tqdm=False)
    shares = [one.softmax(-1) for one in expected[:-1]]
    assert largest_error([one.outputs.data for one in found[:-1]], shares) < 1e-5
    only = {"step_tag_id": STEP, "returned_token_ids": [1]}
    found = engine(tmp_path, pooler_config=only).reward(given(batch[:-1]), pooling_params=BARE, use_tqdm=False)
    assert largest_error([one.outputs.data for one in found], [one[:, 1:] for one in expected[:-1]]) < 1e-5


def test_the_token_that_ends_a_step(tmp_path: Path) -> None:
    """Qwen2.5-Math-PRM's <extra_0>, unless settings say otherwise."""
    base, head = qwen(tmp_path, "Qwen2ForProcessRewardModel", "mqa", 2, vocab_size=151700)
    ids = [5, 6, 151651, 7, 151651, 8]
    found = engine(tmp_path).reward(given([ids]), pooling_params=BARE, use_tqdm=False)
    assert largest_error([found[0].outputs.data], [rewards(base, head, ids)[[2, 4]]]) < 1e-5
    with pytest.raises(QuireError, match="step_tag_id=151700: is no token"):
        engine(tmp_path, pooler_config={"step_tag_id": 151700})


@pytest.mark.parametrize("variant", INTERNLM)
def test_internlm_2(tmp_path: Path, variant: str) -> None:
    model = tiny.make("InternLM2ForCausalLM", variant)
    tiny.randomise(model, 1.25)
    width = rows.all_rows()["InternLM2ForCausalLM"].base["hidden_size"]
    model.save_pretrained(tmp_path)
    head = nn.Linear(width, 1, bias=False)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["output.weight"]
    save_file({**stored, "v_head.weight": head.weight.detach()}, tmp_path / "model.safetensors", {"format": "pt"})
    change(tmp_path, architectures=["InternLM2ForRewardModel"])
    model.output = head
    oracle = model.double()
    batch = prompts(tiny.VOCAB, LENGTHS)
    expected = [classes(oracle, ids) for ids in batch]
    llm = engine(tmp_path)
    found = llm.reward(given(batch), use_tqdm=False)
    assert largest_error([one.outputs.data for one in found], expected) < 1e-5
    last = llm.encode(given(batch), pooling_task="classify", use_tqdm=False)
    assert largest_error([one.outputs.data for one in last], [one[-1] for one in expected]) < 1e-5
