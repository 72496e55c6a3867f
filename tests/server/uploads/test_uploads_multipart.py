"""The reader of forms, alone: any cut of a body gives the same parts, and no body another error than its own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from quire.server.uploads.multipart import MultipartError, MultipartReader
from tests.server.uploads.helpers import BOUNDARY, parts

KIND = f"multipart/form-data; boundary={BOUNDARY}"
NEAR = [b"\r\n--a-boundary", b"\r\n--a-boundar", b"--a-boundary--", b"\r\n", b"\r", b"\n", b"-", b"", b"x" * 70]


class Taken:
    """Notes the parts."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, str | None, bytes]] = []
        self.open = False

    def begin(self, name: str, filename: str | None) -> None:
        assert not self.open
        self.open = True
        self.parts.append((name, filename, b""))

    def data(self, data: bytes) -> None:
        assert self.open and data
        name, filename, before = self.parts[-1]
        self.parts[-1] = (name, filename, before + data)

    def end(self) -> None:
        assert self.open
        self.open = False


def read(body: bytes, cuts: list[int]) -> Any:
    """The parts, or what was wrong."""
    taken = Taken()
    reader = MultipartReader(KIND, taken)
    try:
        for start, end in itertools.pairwise([0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]):
            reader.feed(body[start:end])
        reader.finish()
    except MultipartError as error:
        return str(error)
    assert not taken.open
    return taken.parts


CONTENT = st.lists(st.one_of(st.sampled_from(NEAR), st.binary(max_size=20)), max_size=6).map(b"".join)
NAME = st.text(st.characters(min_codepoint=32, exclude_characters='"\\', exclude_categories=["Cs", "Cc"]), max_size=9)
CUTS = st.lists(st.integers(0, 1 << 20), max_size=12)
QUICK = settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(st.lists(st.tuples(st.sampled_from(["lora_name", "files"]), st.none() | NAME, CONTENT), max_size=4), CUTS)
def test_any_cut_gives_the_same_parts(given: list[tuple[str, str | None, bytes]], cuts: list[int]) -> None:
    body = parts(*given)
    whole = read(body, [])
    assert read(body, cuts) == whole == read(body, list(range(len(body))))
    if all(b"\r\n--a-boundary" not in b"\r\n" + content for _, _, content in given):
        assert [(name, content) for name, _, content in whole] == [(name, content) for name, _, content in given]


@QUICK
@given(st.lists(st.one_of(st.sampled_from(NEAR), st.binary(max_size=30)), max_size=12).map(b"".join), CUTS)
@example(b"--a-boundary--", [])
def test_no_body_is_anything_else_than_wrong(body: bytes, cuts: list[int]) -> None:
    for begin in (b"", b"--a-boundary\r\n", b"--a-boundary\r\nContent-Disposition: form-data; name=a\r\n\r\n"):
        assert read(begin + body, cuts) == read(begin + body, [])


@QUICK
@given(st.text(st.characters(max_codepoint=255), max_size=60))
@example("; boundary*0*=a''b; boundary*1=c")
@example("; boundary*99999999999999999999=a")
def test_no_content_type_is_anything_else_than_wrong(more: str) -> None:
    for kind in (more, f"multipart/form-data{more}", f"multipart/form-data; boundary={more}"):
        try:
            MultipartReader(kind, Taken())
        except MultipartError:
            continue


@QUICK
@given(st.text(max_size=60))
@example("name*0*=a''b; name*1=c")
@example("filename*0*=''; filename*9=c; name=a")
@example("filename*=utf-8'%ff; name=a")
def test_no_header_is_anything_else_than_wrong(more: str) -> None:
    for head in (f"Content-Disposition: form-data; {more}", f"Content-Disposition: form-data; name={more}", more):
        read(f"--a-boundary\r\n{head}\r\n\r\nx\r\n--a-boundary--\r\n".encode("utf-8", "replace"), [])


def test_memory_does_not_grow_with_a_part() -> None:
    taken: list[int] = []

    class Counts(Taken):
        def data(self, data: bytes) -> None:
            taken.append(len(data))

    reader = MultipartReader(KIND, Counts())
    reader.feed(b"--a-boundary\r\nContent-Disposition: form-data; name=files; filename=x\r\n\r\n")
    for _ in range(64):
        reader.feed(b"\r\n--a-bound" * 10_000)
    assert sum(taken) > 63 * 110_000 and max(taken) < 2 * 110_000


@pytest.mark.parametrize("size", [8191, 8192, 100_000])
def test_a_parts_header_is_bounded(size: int) -> None:
    reader = MultipartReader(KIND, Taken())
    reader.feed(b"--a-boundary\r\n")
    if size < 8192:
        reader.feed(b"x" * size)
    with pytest.raises(MultipartError, match="8192"):
        reader.feed(b"x" * (size if size >= 8192 else 1))
