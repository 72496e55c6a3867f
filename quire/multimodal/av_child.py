"""The process in which files of video and sound are decoded: FFmpeg by PyAV, and nothing of quire.

It is started for one file, which it has as an open descriptor, with limits on memory, processor time and files; it has
no other descriptor but its pipes. It writes JSON, what the file has in it; reads a line of it, which frames are wanted,
or how many samples; and writes these, each piece with its size.

Run as a script, so that it imports nothing but the standard library and PyAV.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from bisect import bisect_right
from contextlib import suppress
from typing import Any, BinaryIO

# What follows: b"F", a frame of a width and a height, to be turned by so many quarters; b"S", so many samples of so
# many channels, one channel after the other, as float32; b"X", so many bytes of words on
# what is wrong; b"{", so many of JSON; b"E", nothing more.
HEAD = struct.Struct("<cIIB")
_MOST_PACKETS = 1_000_000
_MOST_STREAMS = 64
_PROBED = 5_000_000  # bytes that are looked at for what a header does not say
_DAMAGED = "cannot be decoded: the file is damaged, or it ends before that; save it anew, or ask for fewer frames"
_NICE = 5  # so that whoever waits for a token goes first
_LIFE = 60, 40  # seconds by the clock, and more for each of processor time: an end, should nobody be there to make one
CODECS = {
    "h264", "hevc", "av1", "libdav1d", "libaom-av1", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4", "mjpeg",
    "mpeg1video", "mpeg2video", "gif", "theora", "h263", "msmpeg4v3", "msmpeg4", "ffv1", "rawvideo", "png",
}  # fmt: skip
SOUND_CODECS = {
    "aac", "alac", "flac", "mp3", "mp3float", "mp2", "mp2float", "opus", "libopus", "vorbis", "libvorbis", "pcm_u8",
    "pcm_s8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be", "pcm_f32le", "pcm_f32be",
    "pcm_f64le", "pcm_f64be", "pcm_alaw", "pcm_mulaw", "adpcm_ms", "adpcm_ima_wav", "adpcm_ima_qt", "gsm_ms",
}  # fmt: skip
_LESS = 0.5  # seconds that a file may have fewer than it says: what encoders put before and behind


class Unusable(Exception):
    """What is wrong with the file, in words for whoever sent it."""


def limit(memory: int, seconds: int) -> None:
    """No more than so many bytes of address space and seconds of processor time; nothing is written to files.

    The priority is a low one, and a process that sleeps on when whoever started it has gone ends by itself.
    """
    os.nice(_NICE)
    with suppress(OSError), open("/proc/self/autogroup", "w") as file:  # where a session's priority stands above it
        file.write(str(_NICE))
    signal.alarm(_LIFE[0] + _LIFE[1] * seconds)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def open_container(av: Any, file: BinaryIO, form: str) -> Any:
    """The file, as the container that its first bytes say it is, and no other."""
    options = {
        "max_streams": str(_MOST_STREAMS), "probesize": str(_PROBED), "protocol_whitelist": "none",
        "format_whitelist": form,
    }  # fmt: skip
    return av.open(file, mode="r", format=form, options=options)


def chosen_stream(container: Any) -> Any:
    """The first stream of frames that is no cover picture."""
    streams = [one for one in container.streams if one.type == "video"]
    streams = [one for one in streams if not _is_cover(one)] or streams
    if not streams:
        raise Unusable("it has no stream of pictures in it: send a file that has one")
    stream = streams[0]
    name = stream.codec_context.name if stream.codec_context is not None else "unknown"
    if name not in CODECS:
        raise Unusable(f"its codec is {name}, which is not taken: save it with H.264, HEVC, VP8, VP9 or AV1")
    stream.codec_context.thread_count = 1
    return stream


def _is_cover(stream: Any) -> bool:
    """FFmpeg's AV_DISPOSITION_ATTACHED_PIC: the one picture of a sound's album."""
    return bool(int(stream.disposition) & 0x400)


def look_at_video(container: Any, stream: Any) -> tuple[dict[str, Any], list[int | None], list[int]]:
    """(what it is, the time of each frame in the order in which they are shown, None where no packet says it, the times
    of key frames, ascending)

    Frames are counted, whatever the header says: packets are gone through, without decoding them.
    """
    times: list[int | None] = []
    keys: list[int] = []
    for packet in container.demux(stream):
        if packet.size == 0 or getattr(packet, "is_discard", False):
            continue
        times.append(packet.pts)
        if packet.is_keyframe and packet.pts is not None:
            keys.append(packet.pts)
        if len(times) > _MOST_PACKETS:
            raise Unusable(f"it has more than the {_MOST_PACKETS:,} frames that are looked at: cut it")
    if not times:
        raise Unusable("it has no frames: it is empty, or cut off before the first of them")
    known = [time for time in times if time is not None]
    in_order: list[int | None] = [None] * len(times)
    if len(set(known)) == len(times):
        in_order = [*sorted(known)]
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    if not 0 < rate < 100_000:
        seconds = float((max(known) - min(known)) * stream.time_base) if known else 0.0
        rate = (len(times) - 1) / seconds if seconds > 0 else 0.0
    context = stream.codec_context
    found = {"frames": len(times), "rate": rate, "width": context.width, "height": context.height}
    return found, in_order, sorted(keys)


def send_frames(
    container: Any, stream: Any, times: list[int | None], keys: list[int], wanted: dict[str, Any], out: BinaryIO
) -> None:
    """The frames of these places, ascending; each is decoded from the last key frame before it, or from the one before.

    times, keys: as `look_at_video` has them.
    """
    places, most = wanted["places"], wanted["pixels"]
    # FFmpeg counts what it rounds sides up to; `_send` counts what is there.
    stream.codec_context.options = {"max_pixels": str(2 * most + 65536)}
    if times[0] is None or not _by_times(container, stream, times, keys, places, most, out):
        container.seek(0)
        pending = iter([*places, None])
        place = next(pending)
        for number, frame in enumerate(container.decode(stream)):
            while place == number:
                _send(frame, most, out)
                place = next(pending)
            if place is None:
                break
        if place is not None:
            raise Unusable(f"frame {place} {_DAMAGED}")
    out.write(HEAD.pack(b"E", 0, 0, 0))


def _by_times(
    container: Any,
    stream: Any,
    times: list[int | None],
    keys: list[int],
    places: list[int],
    most: int,
    out: BinaryIO,
) -> bool:
    """Whether all places were found by their times. False, before anything is sent, where the first was not."""
    frames: Any = None
    last: Any = None
    for number, place in enumerate(places):
        wanted = times[place]
        if number and place == places[number - 1]:
            _send(last, most, out)
            continue
        # Going on costs less than a key frame that is not far, and always less where none is between: one for 10,000
        # frames would be gone back to for each that is wanted.
        passed = bisect_right(keys, _time(wanted)) > bisect_right(keys, _time(times[places[max(0, number - 1)]]))
        if frames is None or (passed and place - places[number - 1] > 48):
            container.seek(wanted, stream=stream)
            frames = container.decode(stream)
        last = next((frame for frame in frames if frame.pts is not None and frame.pts >= wanted), None)
        if last is None or last.pts != wanted:
            if number == 0:
                return False
            raise Unusable(f"frame {place} {_DAMAGED}")
        _send(last, most, out)
    return True


def _time(known: int | None) -> int:
    return known or 0


def _send(frame: Any, most: int, out: BinaryIO) -> None:
    if frame.width * frame.height > most:
        raise Unusable(
            f"a frame has {frame.width} x {frame.height} pixels, and {most:,} in all are allowed: scale it down, or "
            "raise max_image_pixels"
        )
    turned = int(getattr(frame, "rotation", 0) or 0) // 90 % 4
    picture = frame.reformat(format="rgb24")
    plane, row = picture.planes[0], picture.width * 3
    data = memoryview(plane)
    out.write(HEAD.pack(b"F", picture.width, picture.height, turned))
    if plane.line_size == row:
        out.write(data[: row * picture.height])
        return
    for line in range(picture.height):
        out.write(data[line * plane.line_size : line * plane.line_size + row])


def sound_stream(container: Any) -> Any:
    """The first stream of sound."""
    stream = next((one for one in container.streams if one.type == "audio"), None)
    if stream is None:
        raise Unusable("it has no sound in it")
    name = stream.codec_context.name if stream.codec_context is not None else "unknown"
    if name not in SOUND_CODECS:
        raise Unusable(f"its codec is {name}, which is not taken")
    stream.codec_context.thread_count = 1
    return stream


def look_at_sound(container: Any, stream: Any) -> dict[str, Any]:
    """What it is. Its length is added up over its packets, whatever the header says, without decoding them."""
    count, lasting, first, last = 0, 0, None, None
    for packet in container.demux(stream):
        if packet.size == 0:
            continue
        count, length = count + 1, packet.duration or 0
        lasting += length
        if packet.pts is not None:
            first = packet.pts if first is None else min(first, packet.pts)
            last = packet.pts + length if last is None else max(last, packet.pts + length)
        if count > _MOST_PACKETS:
            raise Unusable(f"it has more than {_MOST_PACKETS:,} packets")
    if not count:
        raise Unusable("it has no samples")
    span = 0 if first is None or last is None else last - first
    seconds = max(lasting, span, 0) * float(stream.time_base)
    context = stream.codec_context
    return {"seconds": seconds, "rate": context.sample_rate, "channels": context.layout.nb_channels}


def send_samples(container: Any, stream: Any, form: str, found: dict[str, Any], most: int, out: BinaryIO) -> None:
    """The first samples, `most` of each channel, at the file's own rate."""
    from av import AudioResampler

    rate, channels, sent = found["rate"], found["channels"], 0
    resampler: Any = None
    container.seek(0)
    for frame in container.decode(stream):
        if frame.sample_rate != rate or frame.layout.nb_channels != channels:
            raise Unusable("its rate or its channels change on the way: save it anew")
        frame.pts = None
        if resampler is None:
            resampler = AudioResampler(format="fltp", layout=frame.layout, rate=rate)
        for piece in resampler.resample(frame):
            count = min(piece.samples, most - sent)
            if count > 0:
                out.write(HEAD.pack(b"S", count, channels, 0))
                for plane in piece.planes:
                    out.write(memoryview(plane)[: 4 * count])
            sent += count
        if sent >= most:
            break
    # What containers of these forms say of their length is exact.
    said = float((stream.duration or 0) * stream.time_base) if form in ("flac", "mov", "wav", "aiff") else 0.0
    if sent < most and said > sent / rate + _LESS:
        raise Unusable(f"it says that it lasts {said:.1f} s, and ends after {sent / rate:.1f} s: it is cut, or it lies")
    out.write(HEAD.pack(b"E", 0, 0, 0))


def serve() -> None:
    """One file. argv: its descriptor, its form, bytes of memory, seconds of processor time, its kind."""
    descriptor, form, memory, seconds, kind = sys.argv[1:6]
    limit(int(memory), int(seconds))
    out = sys.stdout.buffer
    try:
        import av

        av.logging.set_level(av.logging.PANIC)
        with os.fdopen(int(descriptor), "rb") as file, open_container(av, file, form) as container:
            {"video": _serve_video, "audio": _serve_audio}[kind](container, form, out)
    except BrokenPipeError:
        return
    except Unusable as error:
        _tell(out, str(error))
    except MemoryError:
        _tell(
            out,
            f"decoding it takes more than {int(memory) >> 30} GiB of memory, which is the limit of a decoder: scale it "
            "down, or save it with fewer reference frames",
        )
    except Exception as error:  # FFmpeg's many, of damaged files
        _tell(
            out,
            f"it cannot be decoded (FFmpeg says {type(error).__name__}): it is damaged, or cut off; save it anew, "
            "whole, and see that it plays",
        )
    out.flush()


def _serve_video(container: Any, form: str, out: BinaryIO) -> None:
    stream = chosen_stream(container)
    found, times, keys = look_at_video(container, stream)
    wanted = _asked(found, out)
    if wanted is not None:
        send_frames(container, stream, times, keys, wanted, out)


def _serve_audio(container: Any, form: str, out: BinaryIO) -> None:
    stream = sound_stream(container)
    found = look_at_sound(container, stream)
    wanted = _asked(found, out)
    if wanted is not None:
        send_samples(container, stream, form, found, wanted["samples"], out)


def _asked(found: dict[str, Any], out: BinaryIO) -> dict[str, Any] | None:
    """What of it is wanted, once it is told what there is; None: nothing."""
    told = json.dumps(found).encode()
    out.write(HEAD.pack(b"{", len(told), 0, 0) + told)
    out.flush()
    line = sys.stdin.buffer.readline()
    return dict(json.loads(line)) if line else None


def _tell(out: BinaryIO, words: str) -> None:
    """What is wrong, wherever the other side is in its reading."""
    text = words.encode()[:500]
    out.write(HEAD.pack(b"X", len(text), 0, 0) + text)


if __name__ == "__main__":
    serve()
