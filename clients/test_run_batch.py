"""`quire run-batch`, with a file as OpenAI's documents write it, and its answers as OpenAI's package reads them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import DRAW, MODEL, QUESTION, SCENE, TOOLS, Scene, check_scene, check_star
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

FORMAT = {"type": "json_schema", "json_schema": {"name": "scene", "strict": True, "schema": Scene.model_json_schema()}}


def asked(content: str, **more) -> dict:
    messages = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 300, **more}


REQUESTS = {
    "request-1": ("/v1/chat/completions", asked(QUESTION)),
    "request-2": ("/v1/chat/completions", asked(SCENE, response_format=FORMAT)),
    "request-3": ("/v1/chat/completions", asked(DRAW, tools=TOOLS, tool_choice="required")),
    "request-4": ("/v1/completions", {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 9}),
    "request-5": ("/v1/responses", {"model": MODEL, "input": QUESTION, "temperature": 0}),
    "request-6": ("/v1/chat/completions", asked(QUESTION, model="absent")),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The lines of the answers' file, by custom_id."""
    folder = tmp_path_factory.mktemp("batch")
    lines = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name, (url, body) in REQUESTS.items()]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [os.environ["QUIRE_PYTHON"], "-m", "quire", "run-batch", "-i", "in.jsonl", "-o", "out.jsonl"]
    root = str(Path(__file__).resolve().parent.parent)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    environment = {**kept, "PYTHONPATH": root}
    done = subprocess.run(
        [*command, "--served-model-name", MODEL], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr  # one of the answers is an error
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert sorted(line["custom_id"] for line in found) == sorted(REQUESTS)
    return {line["custom_id"]: line for line in found}


def body(answers: dict[str, dict], name: str) -> dict:
    response = answers[name]["response"]
    assert response["status_code"] == 200 and response["request_id"] and answers[name]["error"] is None
    return response["body"]


def test_chat_completions(answers) -> None:
    assert ChatCompletion.model_validate(body(answers, "request-1")).choices[0].message.content
    check_scene(ChatCompletion.model_validate(body(answers, "request-2")).choices[0].message.content)
    (call,) = ChatCompletion.model_validate(body(answers, "request-3")).choices[0].message.tool_calls
    assert call.function.name == "draw"
    check_star(call.function.arguments)


def test_completions_and_responses(answers) -> None:
    assert Completion.model_validate(body(answers, "request-4")).usage.completion_tokens == 9
    assert Response.model_validate(body(answers, "request-5")).output[0].content[0].text == "Red."


def test_errors(answers) -> None:
    line = answers["request-6"]
    assert line["response"]["status_code"] == 404 and "absent" in line["response"]["body"]["error"]["message"]
