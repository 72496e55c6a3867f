"""A server of a model that pools does what its own document says, whatever is sent."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.server.api_server import LocalServer
from tests.server.test_openapi import EXAMPLES

pytestmark = pytest.mark.slow

OF_PAIRS = ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/pooling", "/invocations", "/v1/embeddings")


@pytest.fixture(scope="module")
def documents(pairs: LocalServer, classes: LocalServer) -> dict[str, Any]:
    config = schemathesis.Config.from_dict({"seed": 7})
    servers = {"pairs": pairs, "classes": classes}
    return {
        name: schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=config)
        for name, server in servers.items()
    }


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
@pytest.mark.parametrize(
    ("kind", "path"), [*(("pairs", path) for path in OF_PAIRS), ("classes", "/classify"), ("classes", "/pooling")]
)
def test_the_server_does_what_its_document_says(documents: dict[str, Any], kind: str, path: str, mode: Any) -> None:
    operation = documents[kind][path]["POST"]
    seen = []

    @seed(7)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = case.call(timeout=30)
        seen.append(answer.status_code)
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])

    check()
    assert seen
