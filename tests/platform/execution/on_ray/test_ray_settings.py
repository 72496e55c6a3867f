"""Workers that are Ray's actors: the same bits, with images, quantized weights and drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from tests.models.tiny import build
from tests.multimodal import open_engine, tiny_vision
from tests.multimodal.test_image_promise import answers as image_answers
from tests.multimodal.test_image_promise import requests as image_requests
from tests.platform.execution.executors.test_sharded import WIDE, answers, settings_of
from tests.platform.execution.on_ray.conftest import WHERE

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("where", WHERE)
def test_images(tmp_path: Path, cluster: Any, where: str) -> None:
    kind = open_engine.KINDS[0]
    tiny_vision.build(kind.architecture, kind.variant, tmp_path)
    more = {"media_cache_bytes": open_engine.room_for(kind.most_tokens), "max_num_batched_tokens": 23}
    expected = image_answers(open_engine.open_llm(str(tmp_path), **more), image_requests())
    llm = open_engine.open_llm(str(tmp_path), distributed_executor_backend="ray", **WHERE[where], **more)
    assert image_answers(llm, image_requests()) == expected
    llm.llm_engine.close()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "more",
    [
        {"quantization": "int8"},
        {"quantization": "int4", "kv_cache_dtype": "int8"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["int8", "int4", "drafts"],
)
def test_settings(tmp_path: Path, cluster: Any, where: str, more: dict[str, Any]) -> None:
    build("LlamaForCausalLM", "gqa", tmp_path, **WIDE)
    settings = {**settings_of(""), **more}
    expected = answers(LLM(str(tmp_path), **settings), 10)
    llm = LLM(str(tmp_path), distributed_executor_backend="ray", **WHERE[where], **settings)
    assert answers(llm, 10) == expected
    llm.llm_engine.close()
