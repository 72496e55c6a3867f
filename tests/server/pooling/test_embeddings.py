"""/v1/embeddings: what is embedded, and how it is answered."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse

from quire import LLM, LoRARequest, PoolingParams
from quire.demo import picture_path
from quire.server.batch.answers import Answered
from quire.server.batch.plan import make_plan
from tests.server.api_answers import post, refusal, strict
from tests.server.api_server import LocalServer, ServerProcess
from tests.server.pooling.helpers import EMBEDDINGS, POOLING, TEXTS, engine, vector

pytestmark = pytest.mark.usefixtures("one_thread")


def offline(llm: LLM, prompts: Any, **params: Any) -> list[np.ndarray]:
    outputs = llm.encode(prompts, PoolingParams(**params), use_tqdm=False)
    return [one.outputs.data.numpy() for one in outputs]


def same(answer: dict[str, Any], expected: list[np.ndarray], name: str = "embedding") -> bool:
    assert [one["index"] for one in answer["data"]] == list(range(len(expected)))
    return all(np.array_equal(vector(one[name]), row) for one, row in zip(answer["data"], expected, strict=True))


def ids_of(llm: LLM, text: str) -> list[int]:
    return list(llm.get_tokenizer()(text)["input_ids"])


def test_texts_have_the_vectors_that_they_have_without_a_server(http: Any, llm: LLM) -> None:
    answer = post(http, EMBEDDINGS, input=TEXTS, model="quire-demo")
    found = strict(CreateEmbeddingResponse, answer)
    assert (found.model, found.object, found.data[0].object) == ("quire-demo", "list", "embedding")
    assert same(answer, offline(llm, TEXTS))
    tokens = sum(len(ids_of(llm, text)) for text in TEXTS)
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (tokens, tokens)
    assert answer["id"].startswith("embd-")
    for place, text in enumerate(TEXTS):
        assert post(http, EMBEDDINGS, input=text)["data"][0]["embedding"] == answer["data"][place]["embedding"]


def test_token_ids_and_lists_of_them(http: Any, llm: LLM) -> None:
    ids = [ids_of(llm, text) for text in TEXTS]
    expected = offline(llm, TEXTS)
    assert same(post(http, EMBEDDINGS, input=ids), expected)
    assert same(post(http, EMBEDDINGS, input=ids[1]), expected[1:2])


def test_base64_holds_the_same_bits(http: Any, embedder: ServerProcess, llm: LLM) -> None:
    answer = post(http, EMBEDDINGS, input=TEXTS, encoding_format="base64")
    rows = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer["data"]]
    assert all(map(np.array_equal, rows, offline(llm, TEXTS)))
    with embedder.client() as client:  # which asks for base64 unless it is told otherwise
        plain = client.embeddings.create(model="quire-demo", input=TEXTS)
        floats = client.embeddings.create(model="quire-demo", input=TEXTS, encoding_format="float")
    assert [one.embedding for one in plain.data] == [one.embedding for one in floats.data]


def test_messages_are_embedded_as_the_template_writes_them(http: Any, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    for opened in (False, True):
        ids = post(http, "/tokenize", messages=messages, add_generation_prompt=opened)["tokens"]
        answer = post(http, EMBEDDINGS, messages=messages, add_generation_prompt=opened)
        assert same(answer, offline(llm, [{"prompt_token_ids": ids}]))
        assert opened or answer["data"] == post(http, EMBEDDINGS, messages=messages)["data"]


def test_pictures_of_a_model_that_sees(http: Any) -> None:
    picture = "data:image/png;base64," + base64.b64encode(picture_path().read_bytes()).decode()
    content: list[Any] = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What is it?"}]
    asked = {"messages": [{"role": "user", "content": content}]}
    seen = post(http, EMBEDDINGS, **asked)
    assert seen["usage"]["prompt_tokens"] > 20
    assert vector(seen["data"][0]["embedding"]).any()
    told = refusal(http, EMBEDDINGS, **asked, truncate_prompt_tokens=4)
    assert told["param"] == "truncate_prompt_tokens"
    content[0]["image_url"]["url"] = "data:image/png;base64,aaaa"
    told = refusal(http, EMBEDDINGS, **asked)
    assert told["message"].startswith("messages: image 0") and told["param"] == "messages"


@pytest.mark.parametrize("model", ["french", "shout"])
def test_an_adapter_by_its_name(http: Any, llm: LLM, model: str) -> None:
    answer = post(http, EMBEDDINGS, input=TEXTS, model=model)
    outputs = llm.encode(TEXTS, lora_request=LoRARequest(model), use_tqdm=False)
    assert same(answer, [one.outputs.data.numpy() for one in outputs])
    assert not same(answer, offline(llm, TEXTS))
    assert refusal(http, EMBEDDINGS, 404, input="a", model="nobody")["code"] == "model_not_found"


def test_cut_and_bare(http: Any, llm: LLM) -> None:
    ids = ids_of(llm, TEXTS[0])
    cut = post(http, EMBEDDINGS, input=TEXTS[0], truncate_prompt_tokens=3)
    assert cut["usage"]["prompt_tokens"] == 3
    assert same(cut, offline(llm, [{"prompt_token_ids": ids[:3]}]))
    long = post(http, EMBEDDINGS, input="red " * 3000, truncate_prompt_tokens=-1)
    assert long["usage"]["prompt_tokens"] == 2048
    for fields in ({"normalize": False}, {"use_activation": False}):
        bare = post(http, EMBEDDINGS, input=TEXTS, **fields)
        assert same(bare, offline(llm, TEXTS, normalize=False)) and not same(bare, offline(llm, TEXTS))


def test_a_row_for_each_token(http: Any, llm: LLM) -> None:
    answer = post(http, POOLING, input=TEXTS, task="token_embed")
    expected = offline(llm, TEXTS, task="token_embed")
    assert [np.array(one["data"]).shape for one in answer["data"]] == [row.shape for row in expected]
    assert same(answer, expected, "data")
    packed = post(http, POOLING, input=TEXTS, task="token_embed", encoding_format="base64")
    rows = [np.frombuffer(base64.b64decode(one["data"]), "<f4").reshape(-1, 192) for one in packed["data"]]
    assert all(map(np.array_equal, rows, expected))
    assert same(post(http, POOLING, input=TEXTS), offline(llm, TEXTS), "data")
    assert refusal(http, POOLING, input="a", task="classify")["param"] == "task"


def test_more_texts_than_the_engine_holds(llm: LLM) -> None:
    """They come to it in parts; a bad one among them ends all, by its place."""
    texts = [f"There is a red circle, number {number}." for number in range(150)]
    with LocalServer(engine(convert="embed", max_num_seqs=4), max_queue=3) as server, server.http() as http:
        assert same(post(http, EMBEDDINGS, input=texts), offline(llm, texts))
        server.until_idle()
        told = refusal(http, EMBEDDINGS, input=[*texts, "red " * 3000, *texts])
        assert (
            "your input[150] resulted in 3002 tokens" in told["message"] and "truncate_prompt_tokens" in told["message"]
        )
        assert (told["param"], told["code"]) == ("input", "context_length_exceeded")
        server.until_idle()


def test_a_batch_file_of_embeddings(tmp_path: Path) -> None:
    urls = ("/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")
    lines = [json.dumps({"custom_id": url, "method": "POST", "url": url, "body": {"input": "a"}}) for url in urls]
    file = tmp_path / "batch.jsonl"
    file.write_text("\n".join(lines))
    assert make_plan(file, Answered(b"", b"", 0), 1 << 20).total == len(urls)
