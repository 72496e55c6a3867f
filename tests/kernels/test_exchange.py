"""Columns that several processes have computed: here, threads take the processes' parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from quire import kernels
from quire.kernels.exchange import Columns, Exchange, ExchangeError
from tests.kernels.exchange_parties import by_collectives, by_messages, shared, together

pytestmark = pytest.mark.skipif(kernels.backend().__name__ != "quire.kernels.native", reason="needs the extension")


Kind = Callable[[int], Iterator[list[Exchange]]]


@pytest.fixture(params=[shared, by_messages, by_collectives])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(params=[1, 2, 3, 5])
def parties(
    request: pytest.FixtureRequest, kind: Callable[[int], Iterator[list[Exchange]]]
) -> Iterator[list[Exchange]]:
    yield from kind(request.param)


def test_everybody_has_all_columns(parties: list[Exchange]) -> None:
    """Parts of uneven widths, some of them nobody's; many turns, of rows of all dtypes."""
    rng, size = random.Random(len(parties)), len(parties)
    turns = []
    for _ in range(60):
        sizes = [[rng.choice((0, 1, 3, 32, 40)) for _ in range(size)] for _ in range(rng.randint(1, 3))]
        dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16, torch.uint8))
        columns = Columns(sizes)
        whole = torch.randint(0, 100, (rng.choice((0, 1, 7, 300)), columns.total)).to(dtype)
        turns.append((columns, whole))

    def act(rank: int) -> bool:
        for columns, whole in turns:
            own = [whole[:, part[rank] : part[rank + 1]] for part in columns.bounds.tolist()]
            if not torch.equal(parties[rank].gather(torch.cat(own, 1).contiguous(), columns), whole):
                return False
        return True

    assert together(len(parties), act) == [True] * size


def test_more_rows_than_a_place_takes(parties: list[Exchange]) -> None:
    columns = Columns([[1024] * len(parties)])
    whole = torch.randn(9000, columns.total)  # more than twice what a place holds, with one party already

    def act(rank: int) -> bool:
        own = whole[:, 1024 * rank : 1024 * (rank + 1)].contiguous()
        return torch.equal(parties[rank].gather(own, columns), whole)

    assert together(len(parties), act) == [True] * len(parties)


def test_the_least(parties: list[Exchange]) -> None:
    numbers = [2**40 + 7 * (rank - 1) ** 2 for rank in range(len(parties))]
    assert together(len(parties), lambda rank: parties[rank].least(numbers[rank])) == [min(numbers)] * len(parties)


@pytest.mark.parametrize("kind", [shared, by_messages], indirect=True)
def test_processes_at_different_places_are_told(parties: list[Exchange]) -> None:
    """And get nothing of one another."""
    columns = Columns([[4] * len(parties)])

    def act(rank: int) -> str:
        try:
            parties[rank].gather(torch.zeros(2 + rank, 4), columns)
        except RuntimeError as error:
            return str(error)
        return ""

    found = together(len(parties), act)
    assert all("not at the same place" in one for one in found) or len(parties) == 1


def test_a_process_that_is_gone() -> None:
    """The others are told, at once and from then on."""
    (parties,) = by_messages(3)
    columns = Columns([[4] * 3])
    last = parties.pop()
    last.group.shutdown()
    del last

    def act(rank: int) -> list[str]:
        found = []
        for _ in range(2):
            with pytest.raises(ExchangeError) as error:
                parties[rank].gather(torch.zeros(2, 4), columns)
            found.append(str(error.value))
        return found

    for found in together(2, act):
        assert "is gone" in found[0] and found[0] == found[1]


def test_what_does_not_fit_is_refused(parties: list[Exchange]) -> None:
    columns = Columns([[4] * len(parties)])
    for wrong in (torch.zeros(2, 5), torch.zeros(4, 2).t()):
        with pytest.raises(ValueError, match="expected 4 columns"):
            parties[0].gather(wrong, columns)
    wide = Columns([[5 << 20, *[0] * (len(parties) - 1)]])
    with pytest.raises(ValueError, match="rows of 8,388,608 at most"):
        parties[0].gather(torch.zeros(1, 5 << 20, dtype=torch.float32), wide)
