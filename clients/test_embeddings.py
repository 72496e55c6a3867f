"""Vectors, scores and reranking: openai, langchain, llama-index, litellm and cohere."""

from __future__ import annotations

import asyncio
import math

import cohere
import httpx
import litellm
import numpy as np
import openai
import pytest
from conftest import LOUD, MODEL
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

litellm.telemetry = False
litellm.suppress_debug_info = True

STORY = "There was a {0}. The {0} ran to the garden."
TEXTS = [STORY.format(hero) for hero in ("red circle", "blue square", "black star")]
QUERY = "One day, a red circle woke up. The red circle found a coin."
LONG = "A red star. " * 300


@pytest.fixture(scope="session")
def expected(embedder: str) -> np.ndarray:
    """What the route itself answers, [texts, numbers]."""
    answer = httpx.post(f"{embedder}/v1/embeddings", json={"input": TEXTS}, timeout=60).json()
    return np.array([one["embedding"] for one in answer["data"]], np.float32)


@pytest.fixture(scope="session")
def client(embedder: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{embedder}/v1", api_key="none", max_retries=0)


def same(found: list, expected: np.ndarray) -> bool:
    return np.array_equal(np.array(found, np.float32), expected)


# -- openai --------------------------------------------------------------------------------------------------------


def test_openai_in_base64_unasked_and_in_floats(client: openai.OpenAI, expected) -> None:
    for options in ({}, {"encoding_format": "float"}, {"user": "me"}):
        answer = client.embeddings.create(model=MODEL, input=TEXTS, **options)
        assert same([one.embedding for one in answer.data], expected)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    packed = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="base64")
    assert isinstance(packed.data[0].embedding, str)


def test_openai_async_token_ids_and_adapters(embedder: str, client: openai.OpenAI, expected) -> None:
    async def ask() -> list:
        async with openai.AsyncOpenAI(base_url=f"{embedder}/v1", api_key="none") as other:
            answers = await asyncio.gather(*(other.embeddings.create(model=MODEL, input=text) for text in TEXTS))
            return [answer.data[0].embedding for answer in answers]

    assert same(asyncio.run(ask()), expected)
    ids = httpx.post(f"{embedder}/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    assert same([client.embeddings.create(model=MODEL, input=ids).data[0].embedding], expected[:1])
    assert not same([client.embeddings.create(model=LOUD, input=TEXTS[0]).data[0].embedding], expected[:1])


def test_openai_is_told_what_is_wrong(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input=[TEXTS[0], LONG * 20])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=MODEL, input="a", dimensions=7)
    with pytest.raises(openai.BadRequestError, match="makes vectors"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])
    generator = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="--runner pooling"):
        generator.embeddings.create(model=MODEL, input="a")


# -- langchain -----------------------------------------------------------------------------------------------------


def made(embedder: str, **options) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(model=MODEL, base_url=f"{embedder}/v1", api_key="none", **options)


def test_langchain_sends_texts(embedder: str, expected) -> None:
    model = made(embedder, check_embedding_ctx_length=False)
    assert same(model.embed_documents(TEXTS), expected)
    assert same([model.embed_query(TEXTS[1])], expected[1:2])
    assert same(asyncio.run(model.aembed_documents(TEXTS)), expected)
    many = [f"text {number}" for number in range(1500)]  # a thousand in a request
    assert len(model.embed_documents(many)) == 1500


def test_langchain_sends_token_ids_by_the_models_own_tokenizer(embedder: str, expected, tokenizer) -> None:
    """Long texts come in pieces, whose vectors langchain joins."""
    options = dict(tiktoken_enabled=False, tiktoken_model_name=str(tokenizer), embedding_ctx_length=1024)
    model = made(embedder, check_embedding_ctx_length=True, **options)
    assert np.allclose(np.array(model.embed_documents(TEXTS)), expected, atol=0.2)  # its ids have no BOS
    assert len(model.embed_documents([LONG])[0]) == expected.shape[1]


# -- llama-index ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OpenAIEmbedding, OpenAILikeEmbedding])
def test_llama_index(embedder: str, expected, kind) -> None:
    model = kind(model_name=MODEL, api_base=f"{embedder}/v1", api_key="none", max_retries=0)
    assert same(model.get_text_embedding_batch(TEXTS), expected)
    assert same([model.get_query_embedding(TEXTS[0])], expected[:1])
    assert same(asyncio.run(model.aget_text_embedding_batch(TEXTS)), expected)
    assert math.isclose(model.similarity(expected[0].tolist(), expected[0].tolist()), 1.0, rel_tol=1e-6)


# -- litellm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_embeds(embedder: str, expected, provider: str) -> None:
    settings = dict(model=f"{provider}/{MODEL}", api_base=f"{embedder}/v1", api_key="none", num_retries=0)
    answer = litellm.embedding(input=TEXTS, **settings)
    assert same([one["embedding"] for one in answer.data], expected)
    assert answer.usage.prompt_tokens > 0
    assert same([one["embedding"] for one in asyncio.run(litellm.aembedding(input=TEXTS, **settings)).data], expected)
    with pytest.raises(litellm.BadRequestError):
        litellm.embedding(input=[TEXTS[0], LONG * 20], **settings)


@pytest.mark.parametrize("provider", ["hosted_vllm", "jina_ai", "cohere"])
def test_litellm_reranks(embedder: str, provider: str) -> None:
    base = {"hosted_vllm": embedder, "jina_ai": f"{embedder}/v1/rerank", "cohere": f"{embedder}/v1/rerank"}[provider]
    settings = dict(model=f"{provider}/{MODEL}", api_base=base, api_key="none")
    answer = litellm.rerank(query=QUERY, documents=TEXTS, top_n=2, **settings)
    assert answer.results[0]["index"] == 0 and len(answer.results) == 2
    assert answer.results[0]["relevance_score"] > answer.results[1]["relevance_score"]


# -- cohere --------------------------------------------------------------------------------------------------------


def test_cohere_reranks(embedder: str) -> None:
    client = cohere.ClientV2(api_key="none", base_url=embedder)
    answer = client.rerank(model=MODEL, query=QUERY, documents=TEXTS, top_n=2)
    assert answer.id and len(answer.results) == 2 and answer.results[0].index == 0
    assert answer.results[0].relevance_score > answer.results[1].relevance_score
    assert answer.meta is not None and answer.meta.tokens is not None and answer.meta.tokens.input_tokens > 0
    with pytest.raises(cohere.BadRequestError):
        client.rerank(model=MODEL, query=QUERY, documents=[])


def test_coheres_first_client_reranks(embedder: str) -> None:
    client = cohere.Client(api_key="none", base_url=embedder)
    answer = client.rerank(model=MODEL, query=QUERY, documents=TEXTS, return_documents=True)
    assert answer.results[0].index == 0
    assert answer.results[0].document.text == TEXTS[0]
    assert len(client.rerank(model=MODEL, query=QUERY, documents=[{"text": text} for text in TEXTS]).results) == 3
