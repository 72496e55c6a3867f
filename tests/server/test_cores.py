"""How many threads compute."""

from __future__ import annotations

import pytest

from quire.server import cores


@pytest.mark.parametrize(
    ("share", "threads", "used"),
    [("100000 100000", 4, 1), ("250000 100000", 4, 2), ("max 100000", 1, None), ("50000 100000", 4, 1), ("", 1, None)],
)
def test_threads_keep_to_the_containers_share(
    monkeypatch, tmp_path, share: str, threads: int, used: int | None
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(cores, "_SHARE", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(share)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setattr("torch.set_num_threads", set_to.append)
    assert cores.use_share() == used and set_to == ([] if used is None else [used])
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    assert cores.use_share() is None
