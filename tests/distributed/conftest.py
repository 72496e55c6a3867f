from __future__ import annotations

import pytest

from quire.distributed import changes, ledger, participant


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times for a test."""
    for module in (changes, ledger):
        monkeypatch.setattr(module, "LEASE", 0.3)
    for module in (ledger, participant):
        monkeypatch.setattr(module, "BEAT", 0.02)
    monkeypatch.setattr(ledger, "_SILENT", 0.1)
    monkeypatch.setattr(ledger, "_POLL", 0.005)
