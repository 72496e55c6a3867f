"""Programs written for vLLM: the server."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI

from quire.server import launch as serve
from tests.cli.commands import Served
from tests.server.api_server import ONE_THREAD, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Served:
    return Served(monkeypatch, tmp_path)


def test_command_lines_of_the_pages(served: Served) -> None:
    task = served("NousResearch/Meta-Llama-3-8B-Instruct", "--dtype", "auto", "--api-key", "token-abc123")
    assert (task.settings["dtype"], task.settings["api_key"]) == ("auto", ["token-abc123"])
    task = served("M", "--task", "generate", "--trust-remote-code", "--max-model-len", "4096",
                  "--limit-mm-per-prompt", "image=2")  # fmt: skip
    assert (task.settings["max_model_len"], task.settings["limit_mm_per_prompt"]) == (4096, {"image": 2})
    task = served("M", "--trust-remote-code", "--enable-chunked-prefill", "--max_num_batched_tokens", "1024")
    assert task.settings["max_num_batched_tokens"] == 1024 and task.vllm == {"enable_chunked_prefill": True}
    task = served("M", "--enable-lora", "--lora-modules", "sql-lora=/somewhere/", "law=/elsewhere")
    assert [serve.Module.parse(text).name for text in task.settings["lora_modules"]] == ["sql-lora", "law"]
    task = served("SOME_MODEL", yaml='host: "127.0.0.1"\nport: 6379\nuvicorn-log-level: "info"\n')
    assert (task.settings["port"], task.settings["uvicorn_log_level"]) == (6379, "info")
    assert "task='embed'" in served.complaint("M", "--task", "embed")
    assert "vllm" not in served("--chat-template", "./template.jinja").engine


def test_the_server_pages_clients(demo: ServerProcess, client: OpenAI) -> None:
    model = client.models.list().data[0].id
    assert client.completions.create(model=model, prompt="San Francisco is a", max_tokens=7, temperature=0).choices
    chat = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "A joke."},
        ],
        max_tokens=4,
        extra_headers={"x-request-id": "sentiment-classification-00001"},
    )
    assert chat._request_id == "sentiment-classification-00001"
    sentiment = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Classify this sentiment: vLLM is wonderful!"}],
        extra_body={"guided_choice": ["positive", "negative"]},
    )
    assert sentiment.choices[0].message.content in ("positive", "negative")


def test_the_kubernetes_page_starts(plain_model: Path) -> None:
    line = [str(plain_model), "--trust-remote-code", "--enable-chunked-prefill", "--max_num_batched_tokens", "1024"]
    more = ["--served-model-name", "one", "two", "-tp", "1", "--disable-log-requests", "--uvicorn-log-level", "warning"]
    with ServerProcess(*line, *more, **ONE_THREAD, VLLM_API_KEY="secret") as server:
        assert "enable_chunked_prefill=True, disable_log_requests=True" in server.log
        assert "trust_remote_code=True: taken" in server.log
        with server.http() as http:
            assert http.get("/v1/models").status_code == 401
        with server.client(api_key="secret") as client:
            assert [model.id for model in client.models.list().data] == ["one", "two"]
        assert "/v1/models" not in server.log  # its line is below the level
