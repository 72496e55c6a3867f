"""Files of images, looked at from outside before a decoder sees them.

A small file can ask for a great deal of work: hundreds of passes over all pixels, millions of empty segments, comments
in pieces of a byte. So what makes no pixels (metadata, comments, previews, further frames' settings) is left out, the
orientation is read here, and what is left is bounded. Nothing here takes longer than a few passes over the bytes, which
are bounded before. Sources: ITU-T T.81 (JPEG), the PNG and WebP container specifications, GIF89a, Exif 2.3.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from quire.errors import RequestError

_MOST_PARTS = 65_536  # segments, chunks or blocks of a file: more than any encoder writes into max_image_bytes
# A JPEG's passes times its pixels, over max_image_pixels. Encoders make about ten passes.
_MOST_PASSES = 20
# Pixels and bytes of a run-length-encoded BMP, which Pillow decodes in Python.
_MOST_RUNS = 2_000_000
_MOST_TEXT = 1 << 20  # bytes of a compressed text, as Pillow has it

# Pillow's decoders that are used; it has dozens, some of them old and little used.
FORMATS = {
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "WEBP": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "GIF": re.compile(rb"GIF8[79]a"),
    "BMP": re.compile(rb"BM"),
}

# JPEG: a marker that is not a restart, of which there may be millions.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
_SOI, _EOI, _SOS, _APP1 = 0xD8, 0xD9, 0xDA, 0xE1
_ARITHMETIC = {0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}  # frames that are coded so: their decoder cannot stop on its way
_FRAMES = {0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
# Those that make pixels: frames, tables, restart interval; and what says how colours are stored (JFIF's, Adobe's).
_KEPT = _FRAMES | {0xC4, 0xCC, 0xDB, 0xDD, 0xE0, 0xEE}
_XMP = b"http://ns.adobe.com/xap/1.0/\x00"

_ORIENTATION = 0x0112
_NUMBERS = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}  # TIFF's types of whole numbers that fit an entry
_IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


@dataclass(frozen=True, slots=True)
class Encoded:
    """A file without what makes no pixels.

    kind: its format, as Pillow calls it. orientation: EXIF's, or 1. passes: how often its decoder goes over all pixels.
    whole: its decoder must get it in one piece.
    """

    kind: str
    data: bytes
    orientation: int = 1
    passes: int = 1
    whole: bool = False


def read_encoded(data: bytes, most_pixels: int) -> Encoded:
    """Look at a file of at most `max_image_bytes`. Raises RequestError for what is no image or asks for too much."""
    kind = next((name for name, magic in FORMATS.items() if magic.match(data)), None)
    if kind is None:
        raise RequestError(f"it is not an image in one of the formats {', '.join(FORMATS)}")
    try:
        if kind == "JPEG":
            return _jpeg(data, most_pixels)
        if kind == "PNG":
            return _png(data)
        if kind == "GIF":
            return Encoded(kind, _gif(data))
        if kind == "WEBP":
            return Encoded(kind, data, _webp_orientation(data))
        _check_bmp(data)
        return Encoded(kind, data)
    except (struct.error, IndexError):
        raise RequestError("it cannot be decoded: its file ends too early") from None


def _check_parts(count: int) -> None:
    if count > _MOST_PARTS:
        raise RequestError(f"its file is in more than {_MOST_PARTS:,} parts: save it anew")


# -- JPEG -------------------------------------------------------------------------------------------------------------


def _jpeg(data: bytes, most_pixels: int) -> Encoded:
    kept, exif, xmp = [data[:2]], b"", b""
    pixels, at, end, whole = 0, 2, 2, False
    for count, (marker, at, end) in enumerate(_segments(data, 2)):
        _check_parts(count)
        if marker in (_SOS, _EOI):
            break
        body = data[at + 4 : end]
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", body, 1)
            pixels, whole = max(pixels, height * width), whole or marker in _ARITHMETIC
        if marker == _APP1 and body.startswith(b"Exif\0\0"):
            exif = exif + body[6:] if exif else body
            if len(exif) > _MOST_TEXT:
                raise RequestError(f"it has more than {_MOST_TEXT:,} bytes of EXIF: save it without")
        elif marker == _APP1 and body.startswith(_XMP):
            xmp = body[len(_XMP) :]
        if marker in _KEPT:
            kept.append(data[at:end])
    else:
        raise RequestError("it cannot be decoded: its file has no picture in it")
    scans = data[at : _end_of_scans(data, at)]
    # Whatever a decoder makes of damaged scans, it begins no more of them than this.
    passes = max(1, scans.count(bytes((0xFF, _SOS))))
    if passes * pixels > _MOST_PASSES * most_pixels:
        raise RequestError(
            f"it has {passes:,} scans of {pixels:,} pixels, and {_MOST_PASSES * most_pixels:,} in all are allowed: "
            "save it as an ordinary JPEG"
        )
    return Encoded("JPEG", b"".join((*kept, scans)), _orientation(exif, xmp), passes, whole)


def _segments(data: bytes, at: int) -> Iterator[tuple[int, int, int]]:
    """(marker, where it begins, where its segment ends), of all from `at` on; bytes between them are passed over."""
    while (found := _MARKER.search(data, at)) is not None:
        marker, begin = data[found.start() + 1], found.start()
        at = begin + 2
        if marker >= 0xC0 and marker not in (_SOI, _EOI):
            (length,) = struct.unpack_from(">H", data, at)
            at += max(2, length)
        yield marker, begin, at


def _end_of_scans(data: bytes, at: int) -> int:
    for count, (marker, _, end) in enumerate(_segments(data, at)):
        _check_parts(count)
        if marker == _EOI:
            return end
    return len(data)


# -- PNG --------------------------------------------------------------------------------------------------------------


def _png(data: bytes) -> Encoded:
    """Header, palette and pixels; these as one chunk."""
    head, pixels, exif = [data[:8]], list[bytes](), b""
    texts: dict[bytes, bytes] = {}
    at, count, ended = 8, 0, False
    while at + 8 <= len(data):
        count += 1
        _check_parts(count)
        size, name = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + size]
        if name == b"IEND":
            break
        if name in (b"IHDR", b"PLTE") and not pixels:
            head.append(data[at : at + 12 + size])  # its checksum is the decoder's to check
        elif name == b"IDAT" and not ended:
            pixels.append(body)
        elif name == b"eXIf":
            exif = body
        elif name in (b"tEXt", b"zTXt", b"iTXt"):
            key, text = _png_text(name, body)
            texts[key] = text
        ended = bool(pixels) and name != b"IDAT"
        at += 12 + size
    if not pixels:
        raise RequestError("it cannot be decoded: its file has no picture in it")
    body = b"".join(pixels)
    check = zlib.crc32(body, zlib.crc32(b"IDAT"))
    parts = (*head, struct.pack(">I4s", len(body), b"IDAT"), body, struct.pack(">I", check), _PNG_END)
    return Encoded("PNG", b"".join(parts), _orientation(exif or texts.get(b"exif", b""), texts.get(b"xmp", b"")))


_PNG_END = struct.pack(">I4sI", 0, b"IEND", zlib.crc32(b"IEND"))


def _png_text(name: bytes, body: bytes) -> tuple[bytes, bytes]:
    """("exif" or "xmp" or nothing, the text), for the two that may say how a picture is turned."""
    key, _, text = body.partition(b"\0")
    what = {b"Raw profile type exif": b"exif", b"XML:com.adobe.xmp": b"xmp"}.get(key, b"")
    if not what:
        return b"", b""
    packed = name == b"zTXt"
    if packed:
        text = text[1:]
    elif name == b"iTXt":
        packed, text = text[:1] == b"\1", text[2:].split(b"\0", 2)[-1]
    if packed:
        try:
            text = zlib.decompressobj().decompress(text, _MOST_TEXT)
        except zlib.error:
            return b"", b""
    if what == b"exif":  # in lines of hexadecimal digits, behind three others
        try:
            text = bytes.fromhex(b"".join(text.split(b"\n")[3:]).decode("ascii"))
        except ValueError:
            return b"", b""
    return what, text


# -- GIF, WebP, BMP ---------------------------------------------------------------------------------------------------


def _gif(data: bytes) -> bytes:
    """Without the extensions before the first picture, but for those that say what is transparent in it."""
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    kept, count = [data[:at]], 0
    while (found := _GIF_BLOCK.search(data, at)) is not None and found[0] == b"!":
        begin = found.start()
        at = begin + 2
        while size := data[at]:
            at += 1 + size
            count += 1
            _check_parts(count)
        at += 1
        count += 1
        if data[begin + 1] == 0xF9:
            kept.append(data[begin:at])
    if found is None or found[0] == b";":
        raise RequestError("it cannot be decoded: its file has no picture in it")
    return b"".join((*kept, data[found.start() :]))


_GIF_BLOCK = re.compile(rb"[!,;]")


def _webp_orientation(data: bytes) -> int:
    """Of an extended file (VP8X), whose flags say whether there is EXIF (8) or XMP (4)."""
    if data[12:16] != b"VP8X":
        return 1
    flags, at, count = data[20], 12, 0
    found: dict[bytes, bytes] = {}
    while at + 8 <= len(data):
        count += 1
        _check_parts(count)
        name, size = struct.unpack_from("<4sI", data, at)
        if name in (b"EXIF", b"XMP "):
            found.setdefault(name, data[at + 8 : at + 8 + size])
        at += 8 + size + size % 2
    return _orientation(found.get(b"EXIF", b"") if flags & 8 else b"", found.get(b"XMP ", b"") if flags & 4 else b"")


def _check_bmp(data: bytes) -> None:
    (header,) = struct.unpack_from("<I", data, 14)
    if header < 40:
        return
    width, height = struct.unpack_from("<ii", data, 18)
    (compression,) = struct.unpack_from("<I", data, 30)
    if compression in (1, 2) and abs(width * height) + len(data) > _MOST_RUNS:
        raise RequestError(
            f"it is a run-length-encoded BMP of {abs(width)} x {abs(height)} pixels in {len(data):,} bytes, and "
            f"{_MOST_RUNS:,} of both together are decoded: save it as PNG"
        )


# -- orientation ------------------------------------------------------------------------------------------------------


def _orientation(exif: bytes, xmp: bytes) -> int:
    """1 to 8, as EXIF or else XMP says; 1 for what says nothing or no such number."""
    try:
        found = _in_exif(re.sub(rb"^(Exif\0\0){1,2}", b"", exif))
    except struct.error:  # it ends before its entries do
        found = None
    if found is None:
        said = _IN_XMP.search(xmp)
        found = 1 if said is None else int(said[1])
    return found if 1 <= found <= 8 else 1


def _in_exif(data: bytes) -> int | None:
    order = {b"II": "<", b"MM": ">"}.get(data[:2])
    if order is None:
        return None
    (first,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, first)
    for place in range(count):
        tag, kind, number = struct.unpack_from(order + "HHI", data, first + 2 + 12 * place)
        if tag == _ORIENTATION and number == 1 and kind in _NUMBERS:
            value: int = struct.unpack_from(order + _NUMBERS[kind], data, first + 10 + 12 * place)[0]
            return value
    return None
