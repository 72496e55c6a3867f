"""What a GGUF file says of itself: as the gguf package reads it; refused where it lies, in little memory."""

from __future__ import annotations

import io
import random
import struct
import tracemalloc

import gguf
import numpy as np
import pytest

from quire.checkpoint.gguf.header import GgufHeader, block_of, kind_name, read_gguf_header
from tests.checkpoint.gguf_bytes import ARRAY, STRING, info, text, value, whole

F32, Q8_0 = 0, 8
PAIRS = {
    "general.architecture": value(STRING, "llama"),
    "general.alignment": value(4, 32),
    "llama.block_count": value(4, 2),
    "llama.rope.freq_base": value(6, 10000.0),
    "a.bool": value(7, True),
    "a.long": value(11, -(1 << 40)),
    "tokens": value(ARRAY, (STRING, ["a", "", "ü€𝄞"])),
    "numbers": value(ARRAY, (5, [1, -2, 3])),
    "nothing": value(ARRAY, (6, [])),
    "truths": value(ARRAY, (7, [True, False])),
}
TENSORS = [info("norm.weight", [8], F32, 0), info("blk.0.up.weight", [32, 3], Q8_0, 32)]
DATA = bytes(range(32)) + b"\1" * (3 * 34)
FILE = whole(PAIRS, TENSORS, DATA)


def read(data: bytes) -> GgufHeader:
    return read_gguf_header(io.BytesIO(data), len(data))


def refused(data: bytes, *parts: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as caught:
            read(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (16 << 20) + 8 * len(data)
    for part in parts:
        assert part in str(caught.value)


def test_it_reads_what_the_package_reads(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(FILE)
    header, reader = read(FILE), gguf.GGUFReader(path)
    fields = {name: one.contents() for name, one in reader.fields.items() if not name.startswith("GGUF.")}
    plain = {name: one.tolist() if isinstance(one, np.ndarray) else one for name, one in header.metadata.items()}
    assert plain == {**fields, "nothing": []}
    for tensor in reader.tensors:
        own = header.tensors[tensor.name]
        assert own.kind == int(tensor.tensor_type)
        assert own.shape == tuple(int(one) for one in reversed(tensor.shape))
        assert (own.start, own.nbytes) == (tensor.data_offset, tensor.n_bytes)
    assert header.size == reader.data_offset


def test_texts_that_lie_across_the_pieces_that_are_read():
    """Wherever a piece of a mebibyte ends: in a text, in its length, or between two; and texts longer than a piece."""
    rng = random.Random(3)
    texts = ["ü" * rng.choice((0, 1, 2, 7, 40)) for _ in range(90_000)]
    texts[40_000:40_000] = ["long" * (600 << 10), ""]
    for shift in range(4):
        pairs = {"first": value(STRING, "x" * shift), "tokens": value(ARRAY, (STRING, texts)), "last": value(4, 7)}
        header = read(whole(pairs))
        assert header.metadata["tokens"] == texts
        assert header.metadata["last"] == 7


def test_a_text_among_many_that_is_none():
    texts = ["a"] * 5000
    texts[3000] = b"\xff"
    refused(whole({"tokens": value(ARRAY, (STRING, texts))}), "a text of the array 'tokens' is not UTF-8")


def test_kinds_have_the_package_names():
    assert block_of(14) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q6_K]
    assert (kind_name(14), kind_name(999)) == ("Q6_K", "number 999")


@pytest.mark.parametrize("count", range(0, len(FILE) - 1, 7))
def test_cut_files(count):
    refused(FILE[:count])


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"", ("does not begin",)),
        (b"GGML" + FILE[4:], ("does not begin with GGUF",)),
        (whole(PAIRS, version=1), ("version 1",)),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ("byte order",)),
        (whole(counts=(1 << 60, 0)), ("tensors",)),
        (whole(counts=(0, 1 << 60)), ("keys",)),
        (whole(counts=(0, 1 << 15)), ("the file has",)),
        (whole([("a", value(4, 1)), ("a", value(4, 2))]), ("'a' is there twice",)),
        (whole([(b"\xff", value(4, 1))]), ("UTF-8",)),
        (whole({"a": struct.pack("<I", 77)}), ("kind 77",)),
        (whole({"a": struct.pack("<I", STRING) + struct.pack("<Q", 1 << 60)}), ("bytes",)),
        (whole({"a": struct.pack("<IIQ", ARRAY, 5, 1 << 60)}), ("values in arrays",)),
        (whole({"a": struct.pack("<IIQ", ARRAY, STRING, 1 << 23)}), ("the file ends before",)),
        (whole({"a": struct.pack("<IIQ", ARRAY, 5, 1 << 23)}), ("the file has",)),
        (whole({"a": struct.pack("<IIQ", ARRAY, ARRAY, 1)}), ("nested",)),
        (whole({"a": struct.pack("<IIQ", ARRAY, 99, 1)}), ("kind 99",)),
        (whole({"a": struct.pack("<IB", 7, 2)}), ("no truth value",)),
        (whole({"general.alignment": value(4, 0)}), ("alignment",)),
        (whole({"general.alignment": value(4, 24)}), ("alignment",)),
        (whole({"general.alignment": value(4, 1 << 31)}), ("alignment",)),
        (whole({"general.alignment": value(STRING, "32")}), ("alignment",)),
        (whole((), [info("a", [8], F32, 0)] * 2, b"\0" * 64), ("'a' is there twice",)),
        (whole((), [info("a", [8], F32, 0), info("b", [8], F32, 0)], b"\0" * 64), ("share bytes",)),
        (whole((), [info("a", [16], F32, 0), info("b", [8], F32, 32)], b"\0" * 64), ("share bytes",)),
        (whole((), [info("a", [8], F32, 8)], b"\0" * 64), ("multiple of the alignment",)),
        (whole((), [info("a", [8], F32, 1 << 60)], b"\0" * 64), ("bytes from byte",)),
        (whole((), [info("a", [1 << 40, 1 << 40], F32, 0)], b"\0" * 64), ("bytes from byte",)),
        (whole((), [info("a", [0], F32, 0)]), ("1 or more",)),
        (whole((), [info("a", [1 << 63], F32, 0)]), ("1 or more",)),
        (whole((), [info("a", [33], Q8_0, 0)], b"\0" * 64), ("blocks of 32",)),
        (whole((), [info("a", [8], 4, 0)], b"\0" * 64), ("kind 4",)),
        (whole((), [info("a", [8], 1 << 20, 0)], b"\0" * 64), ("unknown",)),
        (whole((), [info("a", [1] * 5, F32, 0)], b"\0" * 64), ("5 dimensions",)),
        (whole((), [text("a") + struct.pack("<I", 1 << 31)], b"\0" * 64), ("dimensions",)),
        (whole((), [info("a" * 300, [8], F32, 0)], b"\0" * 64), ("300",)),
    ],
)  # fmt: skip
def test_what_is_refused(data, parts):
    refused(data, *parts)


def test_an_alignment_of_its_own():
    data = whole({"general.alignment": value(4, 64)}, [info("a", [8], F32, 64)], b"\0" * 96, alignment=64)
    assert read(data).tensors["a"].start % 64 == 0


@pytest.mark.parametrize("seed", range(300))
def test_damaged_files_are_read_or_refused(seed):
    """Bytes flipped, numbers replaced, pieces left out or put in: an answer within the file, or a ValueError."""
    rng = random.Random(seed)
    data = bytearray(FILE)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        what = rng.randrange(4)
        if what == 0:
            data[place] ^= 1 << rng.randrange(8)
        elif what == 1:
            number = rng.choice([0, 1, 0xFF, 1 << 31, 1 << 60, (1 << 64) - 1])
            data[place : place + 8] = struct.pack("<Q", number)
        elif what == 2:
            del data[place : place + rng.randint(1, 40)]
        else:
            data[place:place] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 16)))
    try:
        header = read(bytes(data))
    except ValueError:
        return
    assert all(one.start + one.nbytes <= len(data) for one in header.tensors.values())
