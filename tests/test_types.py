"""What a model says of its attention and of the KV pool."""

from __future__ import annotations

import pytest

from quire.types import AttentionSpec, KVGroup, KVSpec


def test_layers_that_keep_the_same_form_one_group() -> None:
    layers = [AttentionSpec(4, 2, 8, scale=1 / (layer + 1)) for layer in range(3)]  # as GPT-2's may differ
    spec = KVSpec.of(layers)
    assert spec == KVSpec(num_layers=3, num_kv_heads=2, head_dim=8) == KVSpec(3, 2, 8)
    (group,) = spec.groups
    assert group == KVGroup(range(3), 2, 8) and list(group.layers) == [0, 1, 2]


@pytest.mark.parametrize("other", [AttentionSpec(4, 4, 8), AttentionSpec(4, 2, 16)])
def test_layers_that_keep_different_things_are_refused(other: AttentionSpec) -> None:
    with pytest.raises(ValueError, match="keep different things"):
        KVSpec.of([AttentionSpec(4, 2, 8), other])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 5}, "num_heads=5 is not a multiple of num_kv_heads=2"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"window": -1}, "window=-1"),
        ({"alibi_slopes": (0.5,)}, "alibi_slopes has 1 numbers for num_heads=4"),
        ({"scale": (0.5, 0.25)}, "scale has 2 numbers for num_heads=4"),
        ({"value_dim": 0}, "value_dim=0"),
        ({"softcap": -1.0}, "softcap=-1.0"),
    ],
)
def test_a_spec_that_makes_no_sense(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **fields})
