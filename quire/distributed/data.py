"""Answers to the rows of a dataset, by engines on a cluster of Ray's: a stage for `ray.data`, and jobs that go on where
they were stopped.

Needs Ray Data: pip install 'quire-llm[ray-data]'.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import QuireError, RequestError
from quire.lora import LoRARequest
from quire.platform.engine.llm import LLM
from quire.platform.sampling.params import RequestOutputKind, SamplingParams

Batch = dict[str, Any]  # column -> array


@dataclass(frozen=True)
class Columns:
    """Names of columns. prompt: a text, or token ids. lora: an adapter's name, of `adapters`; None: there is no such
    column. output: what is added: the text; finish_reason: and why it ended; None: not wanted. error: and why a row has
    no answer (its other two are None then); None: such a row ends the job."""

    prompt: str = "prompt"
    output: str = "generated_text"
    lora: str | None = None
    finish_reason: str | None = None
    error: str | None = "error"


class Generate:
    """For `Dataset.map_batches(Generate, fn_constructor_kwargs={...}, concurrency=(1, 8), num_cpus=4)`.

    Each of its actors is an engine. Rows keep their order, and each answer is bitwise what it would be alone.
    """

    def __init__(
        self,
        llm: Mapping[str, Any],
        sampling: Mapping[str, Any] | None = None,
        columns: Columns = Columns(),
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """llm: arguments of `LLM`. sampling: of `SamplingParams`. adapters: name -> path. Raises QuireError, also for
        parameters that the engine refuses whatever the prompt is."""
        self._engine = LLM(**llm).llm_engine
        self._params = SamplingParams(**(sampling or {}), output_kind=RequestOutputKind.FINAL_ONLY)
        self._columns = columns
        self._adapters = {name: LoRARequest(name, lora_path=path) for name, path in (adapters or {}).items()}
        self._engine.read_request("of one token", {"prompt_token_ids": [0]}, self._params).discard()

    def __call__(self, batch: Batch) -> Batch:
        """What Ray takes: as `add_answers`, what is added as columns of text. A column that has nothing but None in one
        batch would else be of another type in that batch's file."""
        import pyarrow

        answered = self.add_answers(batch)
        text = {name: pyarrow.array(answered[name], pyarrow.string()) for name in answered if name not in batch}
        return {**answered, **text}

    def add_answers(self, batch: Batch) -> Batch:
        """The batch with its answers, arrays of objects. Raises QuireError for what concerns all rows: a column that
        there is not, or is there already, an adapter that cannot be loaded."""
        columns = self._columns
        for name in (columns.output, columns.finish_reason, columns.error):
            if name is not None and name in batch:
                raise QuireError(f"there is a column {name!r}: give the answers another name (Columns).")
        for name in (columns.prompt, columns.lora):
            if name is not None and name not in batch:
                raise QuireError(f"there is no column {name!r}; there are {', '.join(batch)}.")
        answers = self._answers(batch)
        added = {columns.output: [one.text for one in answers]}
        if columns.finish_reason is not None:
            added[columns.finish_reason] = [one.finish_reason for one in answers]
        if columns.error is not None:
            added[columns.error] = [one.error for one in answers]
        return {**batch, **{name: _column(values) for name, values in added.items()}}

    def _answers(self, batch: Batch) -> list[_Answer]:
        prompts = batch[self._columns.prompt]
        adapters = [None] * len(prompts) if self._columns.lora is None else batch[self._columns.lora]
        answers: dict[str, _Answer] = {}
        names = [f"row {place}" for place in range(len(prompts))]
        try:
            for name, prompt, adapter in zip(names, prompts, adapters, strict=True):
                try:
                    lora = self._adapter(adapter)
                    if lora is not None:
                        self._engine.lora.load_for(lora)  # else who cannot be read would be the row's fault
                    self._engine.add_request(name, _prompt(prompt), self._params, lora)
                except RequestError as error:
                    answers[name] = self._refused(str(error).removeprefix(f"request {name}: "))
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    answers[output.request_id] = self._answer(output)
        finally:  # what is raised concerns all of them
            self._engine.abort_request(names)
        return [answers[name] for name in names]

    def _answer(self, output: Any) -> _Answer:
        (one,) = output.outputs[:1]
        if one.finish_reason == "error":
            return self._refused(str(one.stop_reason))
        return _Answer(one.text, one.finish_reason)

    def _refused(self, why: str) -> _Answer:
        if self._columns.error is None:
            raise QuireError(f"a row has no answer: {why}")
        return _Answer(None, None, why)

    def _adapter(self, name: Any) -> LoRARequest | None:
        """Raises RequestError."""
        if name is None or name == "":
            return None
        if not isinstance(name, str) or name not in self._adapters:
            raise RequestError(f"there is no adapter {str(name)[:200]!r}; there are {', '.join(self._adapters)}.")
        return self._adapters[name]


@dataclass(frozen=True)
class _Answer:
    """Of a row. error: why it has none."""

    text: str | None
    finish_reason: str | None
    error: str | None = None


def _column(values: list[str | None]) -> Any:
    """Of texts, each of which may be missing."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _prompt(given: Any) -> Any:
    """Raises RequestError for what is neither a text nor token ids."""
    if isinstance(given, str):
        return given
    try:
        if isinstance(given, bytes):
            raise TypeError
        return {"prompt_token_ids": [index(one) for one in given]}
    except TypeError:
        raise RequestError(f"a prompt is a text, or token ids, and not {str(given)[:200]!r}.") from None


@dataclass(frozen=True)
class Job:
    """Rows of a file, answered part by part.

    source: JSON lines. target: a folder of JSON lines, one file a part: part-000000.jsonl and so on, in the order of
    the rows. rows: of a part. generate: arguments of `Generate`. concurrency: engines at most, each with cpus and gpus.
    Source and target are where all machines of the cluster see them.
    """

    source: Path
    target: Path
    generate: Mapping[str, Any]
    rows: int = 1000
    concurrency: int = 1
    cpus: float = 1.0
    gpus: float = 0.0


def run(job: Job) -> list[Path]:
    """Answer what has no answer yet; all parts, in order. Each row has one answer, however often this is called.

    A part's file is written whole, under another name, and given its own then: it is there wholly or not at all. Raises
    QuireError for a target that was begun with other rows, or arguments, and what Ray raises where a part fails.
    """
    import ray.data

    source = _read(job.source, job.rows)
    names = [job.target / f"part-{number:06d}.jsonl" for number in range(len(source.places))]
    _begin(job, source)
    missing = [number for number, name in enumerate(names) if not name.exists()]
    if missing:
        parts = ray.data.from_items(
            [{"part": number, "place": source.places[number]} for number in missing], override_num_blocks=len(missing)
        )
        done = parts.map_batches(
            _Part,
            fn_constructor_args=(job,),
            batch_size=1,
            concurrency=(1, job.concurrency),
            num_cpus=job.cpus,
            num_gpus=job.gpus,
        )
        for _ in done.iter_rows():
            pass
    return names


@dataclass(frozen=True)
class _Source:
    """A file of rows. places: bytes before each part's first. digest: of all that it holds."""

    rows: int
    places: list[int]
    digest: str


def _read(path: Path, rows_of_a_part: int) -> _Source:
    """Raises OSError."""
    digest, places, rows, place = hashlib.sha256(), list[int](), 0, 0
    with path.open("rb") as file:
        for line in file:
            digest.update(line)
            if line.strip():
                if rows % rows_of_a_part == 0:
                    places.append(place)
                rows += 1
            place += len(line)
    return _Source(rows, places, digest.hexdigest())


def _begin(job: Job, source: _Source) -> None:
    """Write down, or compare, what the parts are parts of, and how they are answered: answers to one file's rows, by
    one model."""
    job.target.mkdir(parents=True, exist_ok=True)
    wanted = {
        "source": str(job.source), "rows": source.rows, "sha256": source.digest, "rows_of_a_part": job.rows,
        "generate": json.loads(json.dumps(dict(job.generate), default=_plain)),
    }  # fmt: skip
    manifest = job.target / "job.json"
    if not manifest.exists():
        _write(manifest, json.dumps(wanted))
    found = json.loads(manifest.read_text())
    if found != wanted:
        raise QuireError(f"{job.target}: was begun with {found}, and this is {wanted}: take another folder.")


class _Part:
    """An actor: an engine that answers parts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._generate = Generate(**job.generate)

    def __call__(self, batch: Batch) -> Batch:
        for number, place in zip(batch["part"], batch["place"], strict=True):
            job = self._job
            rows = [json.loads(line) for line in islice(_lines(job.source, int(place)), job.rows)]
            names = list(dict.fromkeys(name for row in rows for name in row))
            answered = self._generate.add_answers({name: [row.get(name) for row in rows] for name in names})
            added = [name for name in answered if name not in names]
            for place, row in enumerate(rows):
                row.update({name: answered[name][place] for name in added})
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            _write(job.target / f"part-{int(number):06d}.jsonl", text)
        return batch


def _plain(given: Any) -> Any:
    return vars(given) if isinstance(given, Columns) else str(given)


def _lines(source: Path, place: int) -> Iterator[bytes]:
    """Lines that hold something, from this byte on. Raises OSError."""
    with source.open("rb") as file:
        file.seek(place)
        yield from (line for line in file if line.strip())


def _write(path: Path, text: str) -> None:
    """Wholly or not at all."""
    other = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # another machine may have this process's number
    with other.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    other.replace(path)
