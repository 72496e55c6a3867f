"""What a file asks of its decoder is known before, and bounded; what is left out of it changes no pixel."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from transformers.image_utils import load_image

from quire.config import MediaConfig
from quire.errors import QuireError, RequestError
from quire.multimodal import images, load_picture
from quire.multimodal.formats import read_encoded
from quire.multimodal.images import AbandonedError, Watch, decode, open_picture

CONFIG = MediaConfig()


def picture(width: int = 24, height: int = 16, mode: str = "RGB", seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(values, "RGBA").convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def with_chunk(data: bytes, name: bytes, body: bytes, at: int = 33) -> bytes:
    """A PNG with one more chunk behind its header, or before its end (at=-12)."""
    return data[:at] + chunk(name, body) + data[at:]


def with_segment(data: bytes, marker: int, body: bytes) -> bytes:
    return data[:2] + struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body + data[2:]


def exif(orientation: int, order: str = "<", kind: int = 3) -> bytes:
    number = struct.pack(order + ("HH" if kind == 3 else "I"), *([orientation, 0] if kind == 3 else [orientation]))
    entries = struct.pack(order + "HHI", 0x010F, 2, 2) + b"q\0\0\0" + struct.pack(order + "HHI", 0x0112, kind, 1)
    return {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "IH", 8, 2) + entries + number + bytes(4)


def xmp(orientation: int) -> bytes:
    return b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>' % orientation


def scans(side: int, count: int) -> bytes:
    """A progressive JPEG whose last scan comes so many times."""
    data = encoded(Image.new("L", (side, side)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


def rle(width: int, height: int, body: bytes) -> bytes:
    offset = 54 + 1024
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(body), 0, 0, 256, 256)
    return struct.pack("<2sIHHI", b"BM", offset + len(body), 0, 0, offset) + header + bytes(range(256)) * 4 + body


# What is left out changes no pixel


def turned(number: int) -> dict[str, bytes]:
    jpeg, png, webp = (encoded(picture(), kind) for kind in ("JPEG", "PNG", "WEBP"))
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp(number).decode(), zip=True)
    raw = "\nexif\n  40\n" + (b"Exif\0\0" + exif(number)).hex()
    return {
        "JPEG, EXIF": encoded(picture(), "JPEG", exif=b"Exif\0\0" + exif(number)),
        "JPEG, EXIF of large ends": with_segment(jpeg, 0xE1, b"Exif\0\0" + exif(number, ">")),
        "JPEG, EXIF in long": with_segment(jpeg, 0xE1, b"Exif\0\0" + exif(number, "<", 4)),
        "JPEG, EXIF in two segments": with_segment(
            with_segment(jpeg, 0xE1, b"Exif\0\0" + exif(number)[20:]), 0xE1, b"Exif\0\0" + exif(number)[:20]
        ),
        "JPEG, XMP": with_segment(jpeg, 0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp(number)),
        "PNG, eXIf": with_chunk(png, b"eXIf", exif(number)),
        "PNG, eXIf at its end": with_chunk(png, b"eXIf", exif(number), -12),
        "PNG, iTXt": encoded(picture(), "PNG", pnginfo=text),
        "PNG, raw profile": with_chunk(
            png, b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw.encode())
        ),
        "WebP, EXIF": encoded(picture(), "WEBP", lossless=True, exif=b"Exif\0\0" + exif(number)),
        "WebP, XMP": encoded(picture(), "WEBP", lossless=True, xmp=xmp(number)),
        "WebP": webp,
    }  # fmt: skip


@pytest.mark.parametrize("name", turned(1))
def test_pictures_are_turned_as_pillow_turns_them(name: str) -> None:
    sizes = set()
    for number in (0, *range(1, 9), 9):
        data = turned(number)[name]
        ours, theirs = load_picture(data, CONFIG).image, load_image(Image.open(io.BytesIO(data)))
        assert ours.size == theirs.size and ours.tobytes() == theirs.tobytes()
        sizes.add(ours.size)
    assert len(sizes) == (1 if name == "WebP" else 2)


def files() -> dict[str, bytes]:
    palette = picture(mode="P")
    frames = [picture(seed=seed) for seed in range(3)]
    gif = encoded(palette, "GIF", comment=b"words " * 300, transparency=7, loop=3, save_all=True, append_images=frames)
    screen = gif[:6] + struct.pack("<HH", 60, 50) + gif[10:]  # the frame leaves some of it transparent
    profile = bytes(range(256)) * 700
    return {
        "JPEG": encoded(picture(), "JPEG"),
        "JPEG, progressive": encoded(picture(90, 70), "JPEG", progressive=True),
        "JPEG, grey": encoded(picture(mode="L"), "JPEG"),
        "JPEG, CMYK": encoded(picture(mode="CMYK"), "JPEG"),
        "JPEG, 4:4:4 with a profile, a comment": encoded(
            picture(), "JPEG", subsampling=0, icc_profile=profile, comment="\N{PILE OF POO}" * 99
        ),
        "JPEG, restarts": encoded(picture(300, 200), "JPEG", restart_marker_blocks=1),
        "JPEG, RGB": encoded(picture(), "JPEG", keep_rgb=True),
        "JPEG with junk behind": encoded(picture(), "JPEG") + b"\xff\xda" * 3000,
        "JPEG with bytes between": encoded(picture(), "JPEG").replace(b"\xff\xdb", b"\xff\xff\xff\xff\xdb", 1),
        "MPO": encoded(frames[0], "MPO", save_all=True, append_images=frames[1:]),
        **{f"PNG, {mode}": encoded(picture(mode=mode), "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA")},
        "PNG, transparent colours": encoded(palette, "PNG", transparency=bytes(range(200))),
        "PNG, a transparent colour": encoded(picture(), "PNG", transparency=(3, 4, 5)),
        "PNG, profile and text": with_chunk(encoded(picture(), "PNG", icc_profile=profile), b"tEXt", b"a\0" + profile),
        "PNG in many pieces": pieces(encoded(picture(200, 100), "PNG"), 100),
        "APNG": encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "APNG with a picture of its own": encoded(
            frames[0], "PNG", save_all=True, append_images=frames[1:], default_image=True
        ),
        "GIF": gif,
        "GIF with a larger screen": screen,
        "WebP, lossy": encoded(picture(), "WEBP"),
        "WebP, transparent": encoded(picture(mode="RGBA"), "WEBP"),
        "WebP, animated": encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], icc_profile=profile),
        "BMP": encoded(picture(), "BMP"),
        "BMP, run lengths": rle(4, 2, b"\4\7\0\0" + b"\2\1\2\2" + b"\0\1"),
    }  # fmt: skip


def pieces(data: bytes, size: int) -> bytes:
    """A PNG whose pixels come in chunks of so many bytes."""
    start = data.index(b"IDAT") - 4
    (length,) = struct.unpack_from(">I", data, start)
    body = data[start + 8 : start + 8 + length]
    split = [chunk(b"IDAT", body[at : at + size]) for at in range(0, length, size)]
    return data[:start] + b"".join(split) + data[start + 12 + length :]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", files())
def test_what_is_left_out_changes_no_pixel(name: str) -> None:
    data = files()[name]
    ours, theirs = load_picture(data, CONFIG).image, load_image(Image.open(io.BytesIO(data)))
    assert ours.mode == "RGB" and ours.size == theirs.size and ours.tobytes() == theirs.tobytes()


def test_no_metadata_reaches_a_decoder() -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("k", "v" * 10_000)
    profile = bytes(5000)
    for data in (
        encoded(picture(), "JPEG", exif=b"Exif\0\0" + exif(3), icc_profile=profile, comment="c" * 900),
        encoded(picture(), "PNG", pnginfo=text, icc_profile=profile, exif=b"Exif\0\0" + exif(3)),
        encoded(picture(mode="P"), "GIF", comment=b"c" * 5000),
    ):
        kept = read_encoded(data, 10**6).data
        assert len(kept) < len(data) - 500
        assert not {"exif", "icc_profile", "comment", "k"} & set(Image.open(io.BytesIO(kept)).info)


# Attacks: little to send, much to decode


COSTLY: dict[str, tuple[bytes, str]] = {
    "900 scans": (scans(7000, 900), "scans of 49,000,000 pixels, and 1,000,000,000 in all are allowed"),
    "scans hidden in a segment": (
        scans(7000, 1)[:-2] + b"\xff\xed\xff\xff" + scans(7000, 30)[20:] + b"\xff\xd9",
        "scans of 49,000,000 pixels",
    ),
    "a million segments": (b"\xff\xd8" + b"\xff\xe5\0\2" * 1_000_000 + b"\xff\xd9", "65,536 parts"),
    "segments between scans": (scans(64, 1)[:-2] + b"\xff\xe5\0\2" * 100_000 + b"\xff\xd9", "65,536 parts"),
    "EXIF without end": (
        b"\xff\xd8" + (b"\xff\xe1\xff\xff" + b"Exif\0\0" + bytes(65_527)) * 30 + encoded(picture(), "JPEG")[2:],
        "bytes of EXIF",
    ),
    "a PNG of empty chunks": (
        encoded(picture(), "PNG")[:33] + chunk(b"abCd", b"") * 100_000 + encoded(picture(), "PNG")[33:],
        "65,536 parts",
    ),
    "a GIF's comment in pieces": (b"GIF89a\1\0\1\0\0\0\0!\xfe" + b"\1a" * 200_000, "65,536 parts"),
    "ends of lines": (rle(7000, 7000, b"\1\1\0\0" * 7000), "run-length-encoded BMP of 7000 x 7000 pixels"),
    "runs of one": (rle(1000, 1000, b"\1\7" * 1_000_000), "save it as PNG"),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
def test_what_asks_for_too_much_is_refused_before_it_is_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a decoder has seen it")

    data, reason = COSTLY[name]
    monkeypatch.setattr(Image, "open", never)
    with pytest.raises(RequestError, match="image 0: ") as refused:
        load_picture(data, CONFIG)
    assert reason in str(refused.value)


def test_ordinary_progressive_pictures_of_any_size_are_served() -> None:
    config = MediaConfig(max_image_pixels=24 * 16)  # as large as may be
    data = encoded(picture(), "JPEG", progressive=True)
    assert read_encoded(data, config.max_image_pixels).passes > 5
    assert load_picture(data, config).image.size == (24, 16)
    assert load_picture(scans(64, 1000), CONFIG).image.size == (64, 64)  # a small one may have more


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF"])
def test_decoding_has_a_limit_of_cpu_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(images.time, "thread_time", lambda: next(ticks))  # a second each time that one looks
    data = encoded(picture(1200, 900).convert("P" if kind == "GIF" else "RGB"), kind)
    with pytest.raises(RequestError, match=r"image 4: .*takes more than 12 s of CPU time"):
        load_picture(data, MediaConfig(max_image_seconds=12), item=4)
    assert load_picture(encoded(picture(), kind), MediaConfig(max_image_seconds=1000), item=4)


def test_decoding_stops_when_nobody_waits() -> None:
    looks = []

    def gone() -> bool:
        looks.append(1)
        return len(looks) > 80

    opened = open_picture(encoded(picture(900, 900), "JPEG"), CONFIG, 0, Watch(60, gone))
    with pytest.raises(AbandonedError):
        decode(opened, 0)
    assert len(looks) == 81


@pytest.mark.parametrize("value", [0, -1, 1e9, float("nan"), "1"])
def test_the_limit_of_cpu_time_is_checked(value: Any) -> None:
    with pytest.raises(QuireError, match="max_image_seconds"):
        MediaConfig(max_image_seconds=value)


def test_arithmetic_coding_is_fed_in_one_piece() -> None:
    """Its decoder cannot stop half-way: in pieces, files of over one piece were found broken."""
    data = encoded(picture(200, 200), "JPEG", progressive=True)
    assert len(data) > 2 * 4096
    for kind, marker, whole in (("as it is", 0xC2, False), ("arithmetic", 0xCA, True)):
        opened = open_picture(data.replace(b"\xff\xc2", bytes((0xFF, marker)), 1), CONFIG, 0, Watch(60))
        assert (opened.image.decodermaxblock >= len(read_encoded(data, 10**9).data)) is whole, kind
