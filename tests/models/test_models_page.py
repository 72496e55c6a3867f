"""docs/models.md is what the registry and its classes say."""

from __future__ import annotations

from quire.models import write


def test_the_page_is_up_to_date() -> None:
    text = write.PAGE.read_text(encoding="utf-8")
    assert write.models_page(text) == text, "run: python -m quire.models.write"
