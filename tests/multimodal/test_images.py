"""Every form of an image gives the same picture, and a bad one gives a RequestError that says which and why."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import load_image

from quire.config import MediaConfig
from quire.errors import QuireError, RequestError
from quire.multimodal import Picture, load_picture

CONFIG = MediaConfig()


def picture(width: int = 12, height: int = 7, mode: str = "RGB") -> Image.Image:
    values = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(values, "RGBA").convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def fails(source, *parts: str, config: MediaConfig = CONFIG) -> None:
    with pytest.raises(RequestError) as caught:
        load_picture(source, config, item=3)
    message = str(caught.value)
    assert message.startswith("image 3: ") and "0x" not in message and "object" not in message
    for part in parts:
        assert part in message


def same(a: Picture, b: Picture) -> bool:
    return a.digest == b.digest and a.image.tobytes() == b.image.tobytes() and a.image.size == b.image.size


# Forms


def test_every_form_is_the_same_picture(tmp_path) -> None:
    image = picture()
    data = encoded(image)
    (tmp_path / "a b.png").write_bytes(data)
    config = MediaConfig(allowed_local_media_path=str(tmp_path))
    forms = [
        image,
        np.asarray(image),
        np.asarray(image)[:, ::-1][:, ::-1],
        data,
        bytearray(data),
        memoryview(data),
        Image.open(io.BytesIO(data)),
        "data:image/png;base64," + base64.b64encode(data).decode(),
        (tmp_path / "a b.png").as_uri(),
        encoded(image, "BMP"),
        encoded(image, "WEBP", lossless=True),
    ]
    pictures = [load_picture(form, config) for form in forms]
    assert all(p.image.mode == "RGB" and same(p, pictures[0]) for p in pictures)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_modes_are_treated_as_transformers_does(mode: str) -> None:
    image = picture(mode=mode)
    assert load_picture(image, CONFIG).image.tobytes() == load_image(image.copy()).tobytes()


def test_palette_with_transparency_and_cmyk_files() -> None:
    palette = picture(mode="RGB").quantize(8)
    palette.info["transparency"] = 3
    for data in (encoded(palette, transparency=3), encoded(picture(mode="CMYK"), "JPEG")):
        expected = load_image(Image.open(io.BytesIO(data)))
        assert load_picture(data, CONFIG).image.tobytes() == expected.tobytes()


def test_orientation_is_applied() -> None:
    image = picture(30, 10)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert load_picture(encoded(image, "JPEG", exif=exif), CONFIG).image.size == (10, 30)


def test_an_animation_gives_its_first_frame() -> None:
    frames = [picture(20, 20 + 0 * i, "L").point(lambda v, i=i: (v + i) % 256) for i in range(5000)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    first = Image.open(io.BytesIO(data)).convert("RGB")
    assert load_picture(data, CONFIG).image.tobytes() == first.tobytes()


def test_digests_tell_shapes_apart() -> None:
    flat = np.zeros((30, 100, 3), np.uint8)
    digests = {load_picture(array, CONFIG).digest for array in (flat, flat.reshape(100, 30, 3), flat[:, :99])}
    assert len(digests) == 3


# Limits


def test_bytes_are_counted_first() -> None:
    config = MediaConfig(max_image_bytes=100)
    for source in (b"x" * 101, "data:image/png;base64," + base64.b64encode(b"x" * 104).decode()):
        fails(source, "more than the 100 bytes", "max_image_bytes", config=config)


def test_pixels_are_counted_before_they_are_decoded(monkeypatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("decoded")

    config = MediaConfig(max_image_pixels=100)
    wide, tall = encoded(picture(101, 1)), encoded(picture(1, 101))
    image = picture(11, 10)
    monkeypatch.setattr(Image.Image, "load", never)
    monkeypatch.setattr(Image.Image, "convert", never)
    for source in (wide, tall, image, np.zeros((11, 10), np.uint8)):
        fails(source, "100 in all are allowed", "max_image_pixels", config=config)


def header_only(width: int, height: int) -> bytes:
    """A PNG that declares a size and has next to nothing behind it."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_declared_bombs() -> None:
    fails(header_only(30_000, 30_000), "pixels")
    fails(header_only(10_000, 10_000), "10000 x 10000 pixels")


def test_extreme_shapes_are_images() -> None:
    assert load_picture(encoded(picture(1, 1)), CONFIG).image.size == (1, 1)
    assert load_picture(encoded(picture(1, 20_000)), CONFIG).image.size == (1, 20_000)


# What is no image


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (b"", "no bytes"),
        (b"just some text, renamed", "not an image in one of the formats PNG, JPEG"),
        (encoded(picture())[:60], "cannot be decoded"),
        (encoded(picture(90, 90))[:900], "cannot be decoded"),
        (header_only(50, 50), "cannot be decoded"),
        (encoded(picture(), "TIFF"), "not an image in one of the formats"),
        (encoded(Image.new("I;16", (3, 3), 9000)), "more than 8 bits"),
        (picture(mode="L").convert("F"), "more than 8 bits"),
        (Image.new("I;16", (3, 3)), "more than 8 bits"),
        (Image.new("RGB", (0, 5)), "no pixels (0 x 5)"),
        (np.zeros((0, 4, 3), np.uint8), "no pixels"),
        (np.zeros((3, 4, 5), np.uint8), "[3, 4, 5]"),
        (np.zeros((3, 4, 3), np.float32), "float32"),
        (np.zeros(5, np.uint8), "uint8"),
        (None, "got NoneType"),
        (object(), "got"),
        ("", "must be a URL"),
        ("ftp://host/a.png", "must be a URL"),
        ("data:text/plain;base64,AAAA", "data:image/png;base64"),
        ("data:image/png,AAAA", "data:image/png;base64"),
        ("data:image/png;base64,AA*A", "valid base64"),
        ("data:image/png;base64,", "no bytes"),
    ],
)
def test_what_is_no_image_is_named(source, part: str) -> None:
    if type(source) is object:
        with pytest.raises(RequestError, match=r"image 3: expected a PIL image.*got object"):
            load_picture(source, CONFIG, item=3)
    else:
        fails(source, part)


SEEDS = [
    encoded(picture(16, 16)),
    encoded(picture(16, 16, "P")),
    encoded(picture(16, 16), "JPEG"),
    encoded(picture(16, 16), "WEBP"),
    encoded(picture(16, 16, "P"), "GIF"),
    encoded(picture(16, 16), "BMP"),
]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.sampled_from(SEEDS),
    edits=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 2000),
)
def test_damaged_files_harm_nobody(seed: bytes, edits: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(seed)
    for place, value in edits:
        data[place % len(data)] = value
    data = data[: len(data) - cut % len(data)] if cut % 3 == 0 else data
    try:
        assert load_picture(bytes(data), MediaConfig(max_image_pixels=10_000)).image.mode == "RGB"
    except RequestError as error:
        assert str(error).startswith("image 0: ") and "0x" not in str(error)
    assert load_picture(SEEDS[0], CONFIG).image.size == (16, 16)


@pytest.mark.parametrize(
    "wrong",
    [{"max_image_bytes": 0}, {"max_image_pixels": 1.5}, {"media_fetch_timeout": 0}, {"allowed_media_domains": "host"}],
)
def test_wrong_settings_are_refused(wrong) -> None:
    with pytest.raises(QuireError, match=next(iter(wrong))):
        MediaConfig(**wrong)
