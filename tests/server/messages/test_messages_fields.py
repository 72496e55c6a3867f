"""Every field that Anthropic's package knows is known here; and what the server costs that nobody asks so."""

from __future__ import annotations

import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from anthropic.types.beta import message_create_params as beta
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming

from quire.server.schemas.anthropic.fields import (
    ACCEPTED_IN_MESSAGES,
    COUNT_FIELDS,
    MESSAGES_FIELDS,
    REFUSED_IN_MESSAGES,
    CountTokensRequest,
    MessagesRequest,
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "server.md"


@pytest.mark.parametrize(
    ("params", "model"),
    [
        (MessageCreateParamsNonStreaming, MessagesRequest),
        (beta.MessageCreateParamsNonStreaming, MessagesRequest),
        (MessageCountTokensParams, CountTokensRequest),
    ],
)
def test_each_field_of_the_package_is_served_accepted_or_refused(params: Any, model: Any) -> None:
    headers = {"betas"}
    assert set(typing.get_type_hints(params)) - headers <= set(model.model_fields)


def test_the_documents_table_has_them_all() -> None:
    text = DOCUMENT.read_text().partition("\n## Anthropic's API\n")[2].partition("\n## ")[0]
    for status, names in (("accepted", ACCEPTED_IN_MESSAGES), ("refused", REFUSED_IN_MESSAGES)):
        for name in names:
            assert f"| `{name}` | {status} |" in text, name
    for name in {*MESSAGES_FIELDS, *COUNT_FIELDS}:
        assert f"`{name}`" in text, name


def test_the_package_is_imported_when_it_is_needed() -> None:
    code = "import sys, quire.server.app, quire.server.launch; print('anthropic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
