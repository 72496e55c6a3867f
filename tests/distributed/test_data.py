"""Rows of datasets answered: a stage of `ray.data`, and jobs that are stopped and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.demo import adapter_path
from quire.distributed.data import Columns, Generate, Job, run
from quire.errors import QuireError
from quire.lora import LoRARequest

SAMPLING = {"max_tokens": 6, "temperature": 0}
ADAPTERS = {"french": str(adapter_path("french"))}
LLM_ARGUMENTS = {"enable_lora": True}
ROWS = [{"id": place, "prompt": f"What do you see, {place}?", "lora": ["", "french"][place % 2]} for place in range(10)]
GENERATE = {
    "llm": LLM_ARGUMENTS, "sampling": SAMPLING, "columns": Columns(lora="lora", finish_reason="why"),
    "adapters": ADAPTERS,
}  # fmt: skip


@pytest.fixture(scope="module")
def want() -> list[str]:
    """What an engine answers to each row alone."""
    llm, params = LLM(**LLM_ARGUMENTS), SamplingParams(**SAMPLING)
    found = []
    for row in ROWS:
        lora = LoRARequest("french", lora_path=ADAPTERS["french"]) if row["lora"] else None
        (output,) = llm.generate([str(row["prompt"])], params, lora_request=lora, use_tqdm=False)
        found.append(output.outputs[0].text)
    return found


def columns_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def test_a_stage_answers_rows_in_their_order(want: list[str]) -> None:
    stage = Generate(**GENERATE)
    found = stage(columns_of(ROWS))
    assert list(found["generated_text"]) == want and found["id"] == list(range(10))
    assert set(found["why"]) <= {"length", "stop"}
    ids = stage({"prompt": [[5, 6, 7]], "lora": [None]})
    assert ids["generated_text"][0]
    with pytest.raises(QuireError, match="there is no column 'prompt'; there are text"):
        stage({"text": ["a"]})
    with pytest.raises(QuireError, match="there is no adapter 'german'; there are french"):
        stage({"prompt": ["a"], "lora": ["german"]})


@pytest.mark.ray
def test_a_job_goes_on_where_it_was_stopped(want: list[str], tmp_path: Path) -> None:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        job = Job(source, tmp_path / "out", GENERATE, rows=4, concurrency=2)
        parts = run(job)
        rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
        assert [row["id"] for row in rows] == list(range(10)) and [row["generated_text"] for row in rows] == want
        kept = parts[0].stat().st_mtime_ns
        parts[1].unlink()  # as if it had been stopped in the midst of this one
        (tmp_path / "out" / ".part-000001.jsonl.77").write_text('{"id": 4')
        assert run(job) == parts and parts[0].stat().st_mtime_ns == kept
        again = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
        assert again == rows
        with pytest.raises(QuireError, match="was begun with"):
            run(Job(source, tmp_path / "out", GENERATE, rows=5))
    finally:
        ray.shutdown()
