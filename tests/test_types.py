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


def test_what_a_token_takes() -> None:
    """Of a latent with 512 numbers and a part of keys with 64, a row alone."""
    latents = KVSpec.of([AttentionSpec(16, 1, 576, value_dim=512, latent=True)] * 3)
    assert latents == KVSpec(3, 1, 576, value_dim=512, latent=True) and latents.bytes_a_token(2) == 1152
    assert [group.latent for group in latents.groups] == [True]
    assert KVSpec(3, 2, 8).bytes_a_token(2) == 64 and KVSpec(3, 2, 8, value_dim=4).bytes_a_token(4) == 96


@pytest.mark.parametrize(
    "other", [AttentionSpec(4, 4, 8), AttentionSpec(4, 2, 16), AttentionSpec(4, 2, 8, latent=True)]
)
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
        ({"value_dim": 9, "latent": True}, "value_dim=9: a part of the keys has at most head_dim=8"),
    ],
)
def test_a_spec_that_makes_no_sense(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **fields})


def pattern(windows: str) -> list[tuple[int, int]]:
    """(window, layers) of each group of layers with these windows, a letter each: f keeps all, s 512 and l 4096."""
    sizes = tuple({"f": 0, "s": 512, "l": 4096}[letter] for letter in windows)
    return [(group.window, len(group.layers)) for group in KVSpec(len(sizes), 2, 8, sizes).groups]


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        ("ssssssss", [(512, 8)]),
        ("sf" * 13, [(0, 13), (512, 13)]),  # Gemma 2
        (("sssssf" * 5)[:26], [(0, 4), *[(512, 4)] * 5, (512, 2)]),  # Gemma 3 1B
        (("sssssf" * 6)[:34], [(0, 5), *[(512, 5)] * 5, (512, 4)]),  # Gemma 3 4B
        ("sssf" * 8, [(0, 8), *[(512, 8)] * 3]),  # Cohere 2
        ("sf" + "f" * 30, [(0, 32)]),  # one window saves less than an even size of groups costs
        ("slf" * 4, [(0, 4), (4096, 4), (512, 4)]),
    ],
)
def test_layers_with_windows_form_groups_of_one_size(layers: str, groups: list[tuple[int, int]]) -> None:
    assert pattern(layers) == groups


def test_each_layer_is_in_one_group() -> None:
    spec = KVSpec.of([AttentionSpec(4, 2, 8, window=512 * (layer % 3 != 2)) for layer in range(11)])
    assert spec.windows == tuple(512 * (layer % 3 != 2) for layer in range(11))
    assert sorted(layer for group in spec.groups for layer in group.layers) == list(range(11))
    for group in spec.groups:
        assert {spec.windows[layer] for layer in group.layers} == {group.window}
        assert (group.num_kv_heads, group.head_dim, group.value_dim) == (2, 8, None)
    assert spec.within(512) == KVSpec(11, 2, 8) and spec.within(513) == spec
