"""The server does what its own document says, whatever is sent: by schemathesis, from /openapi.json."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.server.api_server import LocalServer

pytestmark = pytest.mark.slow

EXAMPLES = 60  # for each route


@pytest.fixture(scope="module")
def served(chat_model: Path) -> Iterator[LocalServer]:
    # A short context: what is generated here is not looked at.
    engine = {"model": str(chat_model), "max_model_len": 64, "enable_lora": True, "num_gpu_blocks_override": 256}
    with LocalServer(engine, allow_runtime_lora=True, body_timeout=5, response_store_bytes=1 << 20) as server:
        yield server


@pytest.fixture(scope="module")
def document(served: LocalServer) -> Any:
    config = schemathesis.Config.from_dict({"seed": 7})
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json", config=config)


ROUTES = {
    "/health": "GET", "/ready": "GET", "/version": "GET", "/metrics": "GET", "/v1/models": "GET",
    "/v1/models/{model}": "GET", "/v1/completions": "POST", "/v1/chat/completions": "POST", "/tokenize": "POST",
    "/detokenize": "POST", "/v1/load_lora_adapter": "POST", "/v1/unload_lora_adapter": "POST", "/": "GET",
    "/sleep": "POST", "/wake_up": "POST", "/is_sleeping": "GET", "/reset_prefix_cache": "POST",
    "/ping": "GET", "/load": "GET", "/server_info": "GET", "/tokenizer_info": "GET", "/generate": "POST",
    "/result/{request_id}": "GET", "/invocations": "POST", "/v1/messages": "POST",
    "/v1/messages/count_tokens": "POST", "/v1/responses": "POST",
    "/v1/responses/{response_id}": "GET DELETE", "/v1/responses/{response_id}/cancel": "POST",
    "/v1/responses/{response_id}/input_items": "GET", "/v1/engine/events": "GET",
    "/v1/adapters": "GET POST", "/v1/adapters/{name}": "DELETE",
    "/v1/embeddings": "POST", "/pooling": "POST", "/classify": "POST", "/score": "POST", "/v1/score": "POST",
    "/rerank": "POST", "/v1/rerank": "POST", "/v2/rerank": "POST",
}  # fmt: skip
# The others have nothing to get wrong.
OPERATIONS = [(path, method) for path, methods in ROUTES.items() for method in methods.split()]
# Of models that pool: tests/server/pooling. Here they are refused, whatever is sent.
POOLS = {"/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
TAKES_SOMETHING = {(path, method) for path, method in OPERATIONS if method == "POST"} - {
    ("/reset_prefix_cache", "POST"), ("/v1/responses/{response_id}/cancel", "POST"),
}  # fmt: skip

# Tested beside the others, by whoever leaves it: tests/server/events.
ENDLESS = {"/v1/engine/events"}


def test_the_document_has_these_routes(served: LocalServer) -> None:
    with served.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
    assert {path: [method.upper() for method in methods] for path, methods in paths.items()} == {
        path: methods.split() for path, methods in ROUTES.items()
    }


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [
        (path, method, mode)
        for path, method in OPERATIONS
        if path not in ENDLESS | POOLS
        for mode in schemathesis.GenerationMode
        if (path, method) in TAKES_SOMETHING or mode is schemathesis.GenerationMode.POSITIVE
    ],
)
def test_the_server_does_what_its_document_says(document: Any, path: str, method: str, mode: Any) -> None:
    operation = document[path][method]
    seen = []

    @seed(7)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = case.call(timeout=30)
        seen.append(answer.status_code)
        # A body can fit its schema and ask for too much: what a schema cannot say is answered with 400.
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])

    check()
    assert seen


def test_nothing_is_left_of_all_that(served: LocalServer) -> None:
    served.until_idle()
    assert served.engine.step_loop.health_error(60) is None


def test_every_route_names_its_errors(served: LocalServer) -> None:
    with served.http() as http:
        found = http.get("/openapi.json").json()
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            responses = operation["responses"]
            anthropic = path.startswith("/v1/messages")
            overloaded, answer = ("529", "AnthropicErrorAnswer") if anthropic else ("503", "ErrorAnswer")
            assert {"200", "400", "401", "404", "413", "429", "500", overloaded} <= set(responses), (path, method)
            for status, response in responses.items():
                if not status.startswith("2"):
                    shape = response["content"]["application/json"]["schema"]
                    assert shape == {"$ref": f"#/components/schemas/{answer}"}, (path, status)
    assert "HTTPValidationError" not in found["components"]["schemas"]
