"""`vllm_xargs`: arguments for the logits processors that the server was started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.server.api_answers import post, refusal
from tests.server.api_server import LocalServer

LEAST: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
MASKS = "tests.platform.sampling.masks"


def test_requests_give_arguments_to_processors(plain_model: Path) -> None:
    engine = {"model": str(plain_model), "logits_processors": [f"{MASKS}:Cycle", f"{MASKS}:Faulty"]}
    path = "/v1/completions"
    with LocalServer(engine) as server, server.http() as http:
        body = {"prompt": "Once", **LEAST}
        answer = post(http, path, **body, vllm_xargs={"cycle": [70, 71]})
        assert answer["choices"][0]["token_ids"] == [70, 71, 70, 71]
        assert post(http, path, **body, vllm_xargs={})["choices"] == post(http, path, **body)["choices"]
        error = refusal(http, path, **body, vllm_xargs={"colour": 1})
        assert "no logits processor takes 'colour'" in error["message"]
        error = refusal(http, path, **body, vllm_xargs={"cycle": "x"})
        assert "Cycle: cycle='x' is refused" in error["message"]
        assert (
            "use_beam_search" in refusal(http, path, **body, use_beam_search=True, vllm_xargs={"cycle": [7]})["message"]
        )
        for where in ("apply", "init"):
            response = http.post(path, json={**body, "vllm_xargs": {"faulty": where}})
            assert response.status_code == 500, response.text
        server.until_idle()
        assert post(http, path, **body, vllm_xargs={"cycle": [7]})["choices"][0]["token_ids"] == [7] * 4
