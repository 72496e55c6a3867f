"""The account of features: who holds what, what goes first, and that it adds up."""

from __future__ import annotations

import random

import pytest

from quire.multimodal import FeatureCache

A, B, C, D = (bytes([number]) for number in range(4))


def filled(capacity: int, *digests: bytes) -> FeatureCache:
    """Entries of one byte each that nobody holds, the first the least recently used."""
    cache = FeatureCache(capacity)
    for digest in digests:
        assert cache.insert(digest, 1)
        cache.release(digest)
    return cache


def test_the_least_recently_used_goes_first():
    cache = filled(3, A, B, C)
    assert cache.hold(A)
    cache.release(A)
    assert cache.insert(D, 2)
    assert [one in cache for one in (A, B, C, D)] == [True, False, False, True]
    assert cache.take_evicted() == (B, C) and cache.take_evicted() == ()
    assert cache.bytes == 3 and len(cache) == 2


def test_no_more_goes_than_must():
    cache = filled(3, A, B)
    assert cache.insert(C, 1) and cache.take_evicted() == ()
    assert cache.insert(D, 1) and cache.take_evicted() == (A,)


def test_what_is_held_stays_and_an_insert_without_room_changes_nothing():
    cache = filled(3, A, B)
    assert cache.hold(A) and cache.hold(A)
    assert not cache.insert(C, 3) and not cache.insert(C, 4)
    assert cache.take_evicted() == () and cache.bytes == 2 and len(cache) == 2 and cache.misses == 2
    cache.release(A)
    assert not cache.insert(C, 3), "it is held once more"
    assert cache.insert(C, 2) and cache.take_evicted() == (B,)
    cache.release(A)
    assert cache.insert(D, 1) and cache.take_evicted() == (A,)


def test_holding_what_is_not_there():
    cache = filled(1, A)
    assert not cache.hold(B) and cache.hits == 0
    assert cache.hold(A) and cache.hits == 1 and cache.misses == 1


def test_discarded_while_held():
    cache = filled(3, A, B)
    assert cache.hold(A)
    cache.discard(A)
    cache.discard(A)
    assert A not in cache and cache.bytes == 1 and cache.take_evicted() == (A,)
    cache.release(A)
    cache.check_integrity([[]])


def test_evicted_and_encoded_anew_before_anybody_was_told():
    cache = filled(1, A)
    assert cache.insert(B, 1)
    cache.release(B)
    assert cache.insert(A, 1)
    assert cache.take_evicted() == (B,), "the runner would let go of the features that it is to encode"


def test_integrity_sees_what_is_wrong():
    cache = filled(3, A)
    cache.check_integrity([])
    with pytest.raises(AssertionError, match="0 references, 1 holders"):
        cache.check_integrity([[A]])
    cache.hold(A)
    cache.hold(A)
    cache.check_integrity([[A], [], [A]])
    with pytest.raises(AssertionError, match="2 references, 1 holders"):
        cache.check_integrity([[A]])
    cache.release(A)
    cache.release(A)
    with pytest.raises(AssertionError, match="released more often"):
        cache.release(A)
    cache.bytes += 1
    with pytest.raises(AssertionError, match="do not add up"):
        cache.check_integrity([])
    cache.bytes -= 1
    cache.capacity = 0
    with pytest.raises(AssertionError, match="more than the budget"):
        cache.check_integrity([])


def test_random_lives_add_up():
    for seed in range(50):
        rng = random.Random(seed)
        cache, holders, sizes, runner = FeatureCache(10), [[] for _ in range(3)], {}, set()
        for _ in range(60):
            holder, digest = rng.choice(holders), bytes([rng.randrange(8)])
            if rng.random() < 0.4 and holder:
                cache.release(holder.pop(rng.randrange(len(holder))))
            elif cache.hold(digest):
                holder.append(digest)
            else:
                sizes[digest] = rng.randint(1, 6)
                if cache.insert(digest, sizes[digest]):
                    holder.append(digest)
                    runner.add(digest)
            if rng.random() < 0.3:
                runner -= set(cache.take_evicted())
            cache.check_integrity(holders)
            assert cache.bytes == sum(sizes[one] for one in sizes if one in cache) <= 10
        runner -= set(cache.take_evicted())
        assert runner == {one for one in sizes if one in cache}
