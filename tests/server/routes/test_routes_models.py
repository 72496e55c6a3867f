"""Other routes: models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from openai.types import Model

from quire.demo import adapter_path
from tests.server.api_answers import refusal, strict
from tests.server.routes.helpers import CHAT, COMPLETIONS, PROMPT, WHO

pytestmark = pytest.mark.usefixtures("one_thread")


def test_models_are_the_base_and_its_adapters(client: OpenAI, http: Any) -> None:
    assert [model.id for model in client.models.list()] == ["quire-demo", "org/quire", "french", "shout"]
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    by_name = {strict(Model, model).id: model for model in listed["data"]}
    for name in ("quire-demo", "org/quire"):
        assert (by_name[name]["root"], by_name[name]["parent"]) == ("quire-demo", None)
        assert (by_name[name]["object"], by_name[name]["max_model_len"]) == ("model", 2048)
    for name in ("french", "shout"):
        assert Path(by_name[name]["root"]) == adapter_path(name)
        assert by_name[name]["parent"] == "quire-demo"
        assert by_name[name]["adapter"]["ranks"] == [8]


@pytest.mark.parametrize("name", ["quire-demo", "org/quire", "french"])
def test_one_model(client: OpenAI, http: Any, name: str) -> None:
    assert client.models.retrieve(name).id == name
    (same,) = (model for model in http.get("/v1/models").json()["data"] if model["id"] == name)
    assert http.get(f"/v1/models/{name}").json() == same


@pytest.mark.parametrize("name", ["nobody", "org/nobody", "org"])
def test_a_model_that_is_not_there(client: OpenAI, http: Any, name: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.models.retrieve(name)
    assert caught.value.code == "model_not_found"
    for path, body in (
        (COMPLETIONS, {"prompt": PROMPT}),
        (COMPLETIONS, {"prompt": PROMPT, "stream": True}),
        (CHAT, {"messages": WHO}),
        ("/tokenize", {"prompt": PROMPT}),
        ("/detokenize", {"tokens": [1]}),
    ):
        error = refusal(http, path, 404, model=name, **body)
        assert (error["param"], error["code"], error["type"]) == ("model", "model_not_found", "not_found_error")
        assert name in error["message"]
