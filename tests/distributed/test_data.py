"""Rows of datasets answered: a stage of `ray.data`, and jobs that are stopped and go on."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.demo import adapter_path
from quire.distributed.data import Columns, Generate, Job, _begin, _lines, _read, run
from quire.errors import AdapterError, QuireError
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
    found = stage.add_answers(columns_of(ROWS))
    assert list(found["generated_text"]) == want and found["id"] == list(range(10))
    assert set(found["why"]) <= {"length", "stop"}
    ids = stage.add_answers({"prompt": [[5, 6, 7]], "lora": [None]})
    assert ids["generated_text"][0]


REFUSED = [
    ({"prompt": "a " * 400}, "maximum context length is 256 tokens. However, your prompt resulted in 402"),
    ({"prompt": None}, "a text, or token ids, and not 'None'"),
    ({"prompt": 3}, "a text, or token ids, and not '3'"),
    ({"prompt": b"abc"}, "a text, or token ids"),
    ({"prompt": [1, 2.5]}, "a text, or token ids"),
    ({"prompt": ["a"]}, "a text, or token ids"),
    ({"prompt": [1, 10**9]}, "prompt token 1 is 1000000000"),
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": "a", "lora": "german"}, "there is no adapter 'german'; there are french"),
    ({"prompt": "a", "lora": 7}, "there is no adapter '7'"),
]


def test_a_row_that_is_refused_ends_nothing(want: list[str]) -> None:
    """It says why, and the others have their answers."""
    stage = Generate(**{**GENERATE, "llm": {**LLM_ARGUMENTS, "max_model_len": 256}})
    rows = [row for pair in zip(ROWS, (one for one, _ in REFUSED), strict=True) for row in pair]
    found = stage.add_answers({name: [row.get(name) for row in rows] for name in ("prompt", "lora")})
    assert list(found["generated_text"][0::2]) == want and set(found["error"][0::2]) == {None}
    assert set(found["generated_text"][1::2]) == set(found["why"][1::2]) == {None}
    for (_, why), told in zip(REFUSED, found["error"][1::2], strict=True):
        assert why in told and "row " not in told
    assert list(stage.add_answers(columns_of(ROWS))["generated_text"]) == want  # nothing is left of the others
    none = stage.add_answers({"prompt": [None], "lora": [None]})
    assert none["generated_text"].tolist() == [None] and none["error"].shape == (1,)


def test_what_concerns_all_rows_is_raised(tmp_path: Path) -> None:
    columns = Columns(lora="lora", error=None)
    stage = Generate(LLM_ARGUMENTS, SAMPLING, columns, {**ADAPTERS, "lost": str(tmp_path / "lost")})
    with pytest.raises(QuireError, match="there is no column 'prompt'; there are text"):
        stage.add_answers({"text": ["a"]})
    with pytest.raises(QuireError, match="there is no column 'lora'; there are prompt"):
        stage.add_answers({"prompt": ["a"]})
    with pytest.raises(QuireError, match="there is a column 'generated_text'"):
        stage.add_answers({"prompt": ["a"], "lora": [""], "generated_text": ["mine"]})
    with pytest.raises(AdapterError, match="lost"):
        stage.add_answers({"prompt": ["a", "b"], "lora": ["", "lost"]})
    with pytest.raises(QuireError, match="a row has no answer: the prompt is empty"):
        stage.add_answers({"prompt": ["a", []], "lora": ["", ""]})
    assert stage.add_answers({"prompt": ["a"], "lora": [""], "error": ["mine"]})["error"] == ["mine"]
    with pytest.raises(QuireError, match="there is a column 'error'"):
        Generate(LLM_ARGUMENTS, SAMPLING).add_answers({"prompt": ["a"], "error": ["mine"]})
    with pytest.raises(QuireError, match="max_tokens"):
        Generate(LLM_ARGUMENTS, {"max_tokens": -1})


def test_a_source_is_read_once_for_all_places(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b'{"a": 1}\n\n{"a": "\xc3\xa9"}\r\n  \n{"a": 3}\n{"a": 4}\n{"a": 5}')
    found = _read(source, 2)
    assert found.rows == 5
    parts = [[json.loads(line)["a"] for line in islice(_lines(source, place), 2)] for place in found.places]
    assert parts == [[1, "é"], [3, 4], [5]]


def test_a_target_has_answers_of_one_kind_to_one_file(tmp_path: Path) -> None:
    """Nothing is answered with another model, or from another file, beside what is there."""
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "a"}\n')
    job = Job(source, tmp_path / "out", GENERATE)
    _begin(job, _read(source, job.rows))
    _begin(job, _read(source, job.rows))
    other = {**GENERATE, "sampling": {"max_tokens": 7, "temperature": 0}}
    with pytest.raises(QuireError, match="was begun with"):
        _begin(Job(source, job.target, other), _read(source, job.rows))
    source.write_text('{"prompt": "b"}\n')
    with pytest.raises(QuireError, match="was begun with"):
        _begin(job, _read(source, job.rows))


@pytest.mark.ray
def test_a_job_goes_on_where_it_was_stopped(want: list[str], tmp_path: Path) -> None:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        source = tmp_path / "rows.jsonl"
        refused = {"id": 10, "prompt": "a", "lora": "german"}
        source.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, refused]))
        job = Job(source, tmp_path / "out", GENERATE, rows=4, concurrency=2)
        parts = run(job)
        rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
        assert [row["id"] for row in rows[:10]] == list(range(10))
        assert [row["generated_text"] for row in rows] == [*want, None]
        assert [row["error"] is None for row in rows] == [True] * 10 + [False] and "german" in rows[10]["error"]
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


@pytest.mark.ray
def test_files_of_a_job_without_and_with_errors_have_one_schema(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        long = "a " * 400
        prompts = [{"prompt": prompt} for prompt in ["a", "b", long, long]]
        rows = ray.data.from_items(prompts, override_num_blocks=2)
        arguments = {"llm": {"max_model_len": 256}, "sampling": SAMPLING, "columns": Columns(finish_reason="why")}
        answered = rows.map_batches(Generate, fn_constructor_kwargs=arguments, batch_size=2, concurrency=1, num_cpus=1)
        answered.write_parquet(str(tmp_path / "answers"))
    finally:
        ray.shutdown()
    files = sorted((tmp_path / "answers").iterdir())
    assert len(files) == 2
    for file in files:
        schema = pyarrow.parquet.read_schema(file)
        assert {schema.field(name).type for name in ("generated_text", "why", "error")} == {pyarrow.string()}
    table = pyarrow.parquet.read_table(tmp_path / "answers").to_pydict()
    assert [one is None for one in table["error"]] == [prompt != long for prompt in table["prompt"]]
    assert [one is None for one in table["generated_text"]] == [prompt == long for prompt in table["prompt"]]
