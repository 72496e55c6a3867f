"""How a model is shared out among processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.layers import Linear
from quire.layers.shards import HeadShare, Shard, cut
from quire.models.loader import load_model
from quire.platform.execution.numa import nodes, processors_for
from quire.types import AttentionSpec
from tests.models.tiny import build


@pytest.mark.parametrize(
    ("count", "size", "unit", "ends"),
    [
        (96, 3, 32, [0, 32, 64, 96]),
        (97, 2, 32, [0, 64, 97]),
        (97, 4, 32, [0, 32, 64, 96, 97]),
        (32, 2, 32, [0, 0, 32]),
        (1, 3, 32, [0, 0, 0, 1]),
        (7, 3, 1, [0, 2, 4, 7]),
    ],
)
def test_cut(count: int, size: int, unit: int, ends: list[int]) -> None:
    assert cut(count, size, unit) == ends


def shares(heads: int, kv_heads: int, size: int, **more: object) -> list[tuple[int, int, int, int]] | None:
    found = [HeadShare.of(AttentionSpec(heads, kv_heads, 8, **more), Shard(rank, size, None)) for rank in range(size)]
    if None in found:
        return None
    return [(one.first, one.end, one.kv_first, one.kv_end) for one in found]


def test_heads() -> None:
    """Each head of queries is one process's, with the head of keys that it looks at."""
    assert shares(8, 4, 2) == [(0, 4, 0, 2), (4, 8, 2, 4)]
    assert shares(6, 3, 2) == [(0, 2, 0, 1), (2, 6, 1, 3)]
    assert shares(8, 2, 4) == [(0, 2, 0, 1), (2, 4, 0, 1), (4, 6, 1, 2), (6, 8, 1, 2)]
    assert shares(5, 1, 2) == [(0, 2, 0, 1), (2, 5, 0, 1)]
    assert shares(4, 4, 3) == [(0, 1, 0, 1), (1, 2, 1, 2), (2, 4, 2, 4)]
    assert shares(2, 2, 4) is None  # one query a head of keys: nothing to share out among four
    assert shares(6, 2, 3) is None


def test_numbers_of_heads_go_with_them() -> None:
    spec = AttentionSpec(4, 2, 8, scale=(1.0, 2.0, 3.0, 4.0), alibi_slopes=(0.1, 0.2, 0.3, 0.4))
    share = HeadShare.of(spec, Shard(1, 2, None))
    assert share is not None
    assert share.spec.scale == (3.0, 4.0) and share.spec.alibi_slopes == (0.3, 0.4)
    assert share.columns.of_process == [16, 16]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM"])
def test_a_process_reads_its_rows_alone(tmp_path: Path, architecture: str, rank: int) -> None:
    """As they lie in the files, transposed, and of parts of a tensor; the rest is never touched."""
    variant = {"LlamaForCausalLM": "gqa", "GPT2LMHeadModel": "relu", "MixtralForCausalLM": "odd_sizes"}[architecture]
    more = (
        {"n_embd": 128, "n_head": 4}
        if architecture.startswith("GPT2")
        else {"hidden_size": 128, "intermediate_size": 96}
    )
    build(architecture, variant, tmp_path, **more)
    whole = dict(load_model(tmp_path).named_parameters(remove_duplicate=False))
    model = load_model(tmp_path, shard=Shard(rank, 2, None))
    cut_rows = 0
    for name, module in model.named_modules():
        if not isinstance(module, Linear):
            continue
        first, end = Shard(rank, 2, None).rows_of(module.out_features)
        for leaf, own in module._parameters.items():
            if own is None:
                continue
            expected = whole[f"{name}.{leaf}"].clone()
            tied = name == "lm_head" and model.config.tie_word_embeddings  # with the table that tokens are looked up in
            if leaf == "weight" and not tied:
                expected[:first], expected[end:] = 0, 0
                cut_rows += 0 < end - first < len(own)
            assert torch.equal(own, expected), f"{name}.{leaf}"
    assert cut_rows >= 4


def test_processors() -> None:
    assert processors_for(2, [[0, 1, 2, 3]]) == [(0, 1), (2, 3)]
    assert processors_for(2, [[0, 1], [2, 3]]) == [(0, 1), (2, 3)]
    assert processors_for(4, [[0, 1, 2, 3], [4, 5, 6, 7]]) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert processors_for(2, [[0], [1], [2], [3]]) == [(0, 1), (2, 3)]
    assert processors_for(3, [[0, 1, 2], [3, 4, 5]]) == [(0, 1), (2, 3), (4, 5)]
    assert processors_for(2, [[0], [1, 2, 3]]) == [(0,), (1, 2, 3)]
    assert processors_for(4, [[0], [1, 2, 3]]) == [(0,), (1,), (2,), (3,)]
    assert processors_for(4, [[0, 1]]) == [()] * 4


def test_nodes_of_this_machine(tmp_path: Path) -> None:
    import os

    allowed = sorted(os.sched_getaffinity(0))
    assert sorted(number for own in nodes() for number in own) == allowed
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text(",".join(map(str, allowed)) + ",4000-4002\n")
    assert nodes(tmp_path) == [allowed]
    (tmp_path / "node0" / "cpulist").write_text("what\n")
    assert nodes(tmp_path) == [allowed]
