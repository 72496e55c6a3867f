"""What the tests of this folder share: adapters and forms as bytes, and what lies where uploads go."""

from __future__ import annotations

import io
import os
import struct
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quire.demo import adapter_path
from quire.lora import CONFIG_FILE, WEIGHTS_FILE
from tests.server.api_server import LocalServer

ADAPTERS, CHAT = "/v1/adapters", "/v1/chat/completions"
WHO = [{"role": "user", "content": "Who are you?"}]
BOUNDARY = "a-boundary"
MOST = 2 << 20  # bytes of an upload to the server of these tests


def files_of(name: str) -> dict[str, bytes]:
    """A bundled adapter's two files."""
    return {file: (adapter_path(name) / file).read_bytes() for file in (CONFIG_FILE, WEIGHTS_FILE)}


def zipped(members: Mapping[str, bytes] | Iterable[tuple[str | zipfile.ZipInfo, bytes]], method: int = 8) -> bytes:
    """A .zip of these; a name may come twice."""
    pairs = members.items() if isinstance(members, Mapping) else members
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as archive:
        warnings.simplefilter("ignore")  # of names that come twice
        for name, data in pairs:
            archive.writestr(name, data, method)
    return file.getvalue()


def claiming(archive: bytes, name: str, size: int) -> bytes:
    """An archive whose table says that a member, unpacked, has another size."""
    found = archive.rindex(name.encode(), 0, archive.rindex(b"PK\x05\x06")) - 46  # its line in the table
    return archive[: found + 24] + struct.pack("<I", size) + archive[found + 28 :]


def parts(*given: tuple[str, str | None, bytes], boundary: str = BOUNDARY) -> bytes:
    """A form of (field, filename, content)."""
    body = b""
    for field, filename, content in given:
        file = "" if filename is None else f'; filename="{filename}"'
        body += (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"{file}\r\n\r\n'.encode() + content + b"\r\n"
        )
    return body + f"--{boundary}--\r\n".encode()


def form(name: str, files: Mapping[str, bytes] | Iterable[tuple[str, bytes]], **fields: str) -> bytes:
    """The form that brings an adapter."""
    pairs = files.items() if isinstance(files, Mapping) else files
    texts = {"lora_name": name, **fields}
    return parts(
        *((field, None, text.encode()) for field, text in texts.items()),
        *(("files", file, content) for file, content in pairs),
    )


def send(http: Any, body: bytes, boundary: str = BOUNDARY, **headers: str) -> Any:
    """What the server answers to a form."""
    kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    return http.post(ADAPTERS, content=body, headers={**kind, **headers})


def upload(http: Any, name: str, files: Mapping[str, bytes], **fields: str) -> dict[str, Any]:
    """The answer to an upload that must be taken."""
    answer = send(http, form(name, files, **fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stored(server: LocalServer) -> list[Path]:
    """All that lies in the server's folder for uploads: folders of adapters, and their files."""
    folder: Path = server.app.state.context.served.store().folder
    found = [Path(place) / name for place, folders, files in os.walk(folder) for name in (*folders, *files)]
    return sorted(path.relative_to(folder) for path in found)


def names_of(http: Any) -> list[str]:
    return [one["name"] for one in http.get(ADAPTERS).json()["data"]]


def said(http: Any, model: str) -> str:
    """What an adapter answers."""
    body = {"model": model, "messages": WHO, "temperature": 0, "max_tokens": 24}
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text
