"""Processes of an exchange, as threads of this one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import torch

from quire.kernels.exchange import SharedExchange, shared_memory
from quire.kernels.group_exchange import CollectiveExchange, GroupExchange, join_group, meeting_store


def shared(size: int) -> Iterator[list[SharedExchange]]:
    memory = shared_memory(size)
    yield [SharedExchange(memory, rank, size) for rank in range(size)]
    os.close(memory)


def by_messages(size: int) -> Iterator[list[GroupExchange]]:
    store = meeting_store("127.0.0.1")
    yield together(size, lambda rank: _join(store.port, rank, size))


def by_collectives(size: int) -> Iterator[list[CollectiveExchange]]:
    for parties in by_messages(size):
        yield [CollectiveExchange(one.group, one.rank, size, torch.device("cpu")) for one in parties]


def _join(port: int, rank: int, size: int) -> GroupExchange:
    return GroupExchange(join_group("127.0.0.1", port, "127.0.0.1", rank, size, 60), rank, size)


def together(size: int, act) -> list:
    """act(rank) of each, at the same time. Raises what goes wrong in one."""
    results: list = [None] * size
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60 if errors else 600)
    if errors:
        raise errors[0]
    return results
