"""Forms that are refused: by their names, fields and sizes, and because the adapter does not bind. Nothing is left."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import pytest
from safetensors.torch import load, save

from tests.server.api_answers import error_of
from tests.server.api_server import LocalServer
from tests.server.uploads.helpers import (
    ADAPTERS,
    MOST,
    claiming,
    files_of,
    form,
    names_of,
    parts,
    send,
    stored,
    upload,
    zipped,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = files_of("french")


def refused(http: Any, server: LocalServer, body: bytes, status: int = 400, **headers: str) -> dict[str, Any]:
    """The error of an upload of which nothing may be left."""
    before = names_of(http)
    answer = send(http, body, **headers)
    assert answer.status_code == status, answer.text
    assert stored(server) == [] and names_of(http) == before == []
    assert str(server.app.state.context.served.store().folder) not in answer.text
    return error_of(answer)


@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.bin", "adapter_model.pt", "training_args.bin", "x/optimizer.PT", "weights.pkl", "a.ckpt",
        "adapter_model.safetensors.sh", "ADAPTER_CONFIG.JSON", "adapter_config.json ", "adapter_config.json.",
        "x.npz", "x.gguf",
        "../adapter_config.json", "/adapter_config.json", "/etc/passwd", "a/../adapter_config.json", "./README.md",
        "a//adapter_config.json", "a/b/adapter_config.json", "..", ".", "", "C:adapter_config.json",
        "C:/README.md",
        "..\\adapter_config.json", "a\\adapter_config.json", "\\\\host\\adapter_config.json", "adapter_config.json\0",
        "adapter_config.json\u202e", "\ud7ffx", "~/adapter_config.json/x", "__MACOSX/../adapter_config.json",
        "a" * 2000, "con", "a/.ssh", "page.js", "model.safetensors.index.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
def test_other_names_than_an_adapters_are_refused(http: Any, server: LocalServer, name: str, packed: bool) -> None:
    files = [*FILES.items(), (name, b"x")]
    body = form("mine", [(file.replace("\\", "\\\\"), data) for file, data in files])
    if packed:
        body = form("mine", {"a.zip": zipped([(info(file), data) for file, data in files])})
    assert refused(http, server, body)["param"] == "files"


def info(name: str, mode: int = 0o100644) -> zipfile.ZipInfo:
    """A member whose name stands in the archive as it is given."""
    member = zipfile.ZipInfo("x")
    member.filename = member.orig_filename = name
    member.external_attr = mode << 16
    member.compress_type = zipfile.ZIP_DEFLATED
    return member


@pytest.mark.parametrize("mode", [0o120777, 0o020666, 0o060666, 0o010666, 0o140777])
def test_links_and_devices_are_refused(http: Any, server: LocalServer, mode: int) -> None:
    members = [(info(CONFIG), FILES[CONFIG]), (info(WEIGHTS, mode), b"/etc/passwd")]
    assert "link" in refused(http, server, form("mine", {"a.zip": zipped(members)}))["message"]
    beside = [*((info(name), data) for name, data in FILES.items()), (info("README.md", mode), b"/etc/passwd")]
    assert "link" in refused(http, server, form("mine", {"a.zip": zipped(beside)}))["message"]


def test_names_that_come_twice_are_refused(http: Any, server: LocalServer) -> None:
    for name, data in (*FILES.items(), ("README.md", b"")):
        files = [*FILES.items(), ("README.md", b""), (name, data)]
        assert "twice" in refused(http, server, form("mine", files))["message"]
        assert "twice" in refused(http, server, form("mine", {"a.zip": zipped(files)}))["message"]
    split = [(f"a/{CONFIG}", FILES[CONFIG]), (f"b/{WEIGHTS}", FILES[WEIGHTS])]
    assert "one folder" in refused(http, server, form("mine", split))["message"]
    both = [*FILES.items(), *((f"a/{name}", data) for name, data in FILES.items())]
    for files in (split, both):
        assert "one folder" in refused(http, server, form("mine", {"a.zip": zipped(files)}))["message"]


def test_there_are_64_files_at_most(http: Any, server: LocalServer) -> None:
    many = [(f"__MACOSX/{number}", b"") for number in range(63)]
    for files in (form("mine", [*FILES.items(), *many]), form("mine", {"a.zip": zipped([*FILES.items(), *many])})):
        assert "64" in refused(http, server, files)["message"]
    upload(http, "mine", {"a.zip": zipped([*FILES.items(), *many[:62]])})


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([("lora_name", None, b"mine")], "files"),
        ([("lora_name", None, b"mine"), ("files", CONFIG, FILES[CONFIG])], "files"),
        ([("lora_name", None, b"mine"), ("files", WEIGHTS, FILES[WEIGHTS])], "files"),
        ([("files", name, data) for name, data in FILES.items()], "lora_name"),
        ([("lora_name", None, b"a"), ("lora_name", None, b"b")], "lora_name"),
        ([("lora_name", None, b"x" * 5000)], "lora_name"),
        ([("lora_name", None, b"\xff")], "lora_name"),
        ([("load_inplace", None, b"perhaps")], "load_inplace"),
        ([("path", None, b"/etc")], "path"),
        ([("lora_path", None, b"/etc")], "lora_path"),
        ([("files", None, b"{}")], "files"),
        ([], "lora_name"),
    ],
)  # fmt: skip
def test_forms_that_are_not_whole(
    http: Any, server: LocalServer, given: list[tuple[str, str | None, bytes]], param: str
) -> None:
    assert refused(http, server, parts(*given))["param"] == param


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"name": ""}, 400, "lora_name"), ({"name": "x" * 257}, 400, "lora_name"), ({"name": "a\nb"}, 400, "lora_name"),
        ({"name": "quire-demo"}, 400, "lora_name"), ({"name": "."}, 400, "lora_name"),
        ({"name": ".."}, 400, "lora_name"),
        ({"name": "a/../b"}, 400, "lora_name"), ({"name": "  "}, 400, "lora_name"),
        ({"name": "\x7f"}, 400, "lora_name"),
        ({"name": "new", "base_model_name": "other"}, 404, "base_model_name"),
    ],
)  # fmt: skip
def test_names_that_cannot_be(http: Any, server: LocalServer, fields: dict[str, str], status: int, param: str) -> None:
    assert refused(http, server, form(files=FILES, **fields), status)["param"] == param


def broken(how: str) -> Mapping[str, bytes]:
    tensors, config = load(FILES[WEIGHTS]), json.loads(FILES[CONFIG])
    first = min(tensors)
    if how == "cut":
        return {**FILES, WEIGHTS: FILES[WEIGHTS][:1000]}
    if how == "pickle":
        return {**FILES, WEIGHTS: b"\x80\x04\x95" + FILES[WEIGHTS]}
    if how == "long header":
        return {**FILES, WEIGHTS: struct.pack("<Q", 1 << 40) + b"{}"}
    if how == "missing":
        return {**FILES, WEIGHTS: save({name: tensor for name, tensor in tensors.items() if name != first})}
    if how == "more":
        return {**FILES, WEIGHTS: save({**tensors, "x.lora_A.weight": tensors[first].clone()})}
    if how == "nan":
        return {**FILES, WEIGHTS: save({**tensors, first: tensors[first] * float("nan")})}
    if how == "code":
        return {**FILES, CONFIG: json.dumps({**config, "auto_mapping": {"x": "y"}, "arrow_config": {"a": 1}}).encode()}
    if how == "no JSON":
        return {**FILES, CONFIG: b"\xff\xfe{"}
    if how == "deep":
        return {**FILES, CONFIG: b"[" * 100_000}
    return {**FILES, CONFIG: json.dumps({**config, "r": 4}).encode()}


HOWS = ["cut", "pickle", "long header", "missing", "more", "nan", "code", "no JSON", "deep", "rank"]


@pytest.mark.parametrize("how", HOWS)
def test_what_does_not_bind_leaves_nothing(http: Any, server: LocalServer, how: str) -> None:
    for files in (broken(how), {"a.zip": zipped(broken(how))}):
        error = refused(http, server, form("mine", files), 422)
        assert error["code"] == "adapter_refused"


def test_what_does_not_bind_replaces_nothing(http: Any, server: LocalServer) -> None:
    upload(http, "mine", FILES)
    before = stored(server), http.get(ADAPTERS).json()["uploads"]
    for how in HOWS:
        assert send(http, form("mine", broken(how), load_inplace="true")).status_code == 422
    assert (stored(server), http.get(ADAPTERS).json()["uploads"]) == before
    assert names_of(http) == ["mine"]


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_a_bomb_is_given_up_at_the_limit(http: Any, server: LocalServer) -> None:
    bomb = zipped({CONFIG: FILES[CONFIG], WEIGHTS: bytes(50 * MOST)})
    assert len(bomb) < MOST // 2
    assert "--max-adapter-upload-bytes" in refused(http, server, form("mine", {"a.zip": bomb}), 413)["message"]
    for size in (0, 1, 1000, MOST, 0xFFFFFFFE):  # whatever its table says
        lying = claiming(bomb, WEIGHTS, size)
        status = send(http, form("mine", {"a.zip": lying})).status_code
        assert status in (400, 413, 422), size
        assert stored(server) == []
    config = zipped({CONFIG: b" " * (4 << 20) + FILES[CONFIG], WEIGHTS: FILES[WEIGHTS]})
    assert refused(http, server, form("mine", {"a.zip": config}), 413)["param"] == "files"


def test_what_lies_beside_is_never_unpacked(http: Any) -> None:
    """So that it may claim what it likes."""
    members = {**FILES, "README.md": bytes(50 * MOST), "tokenizer.json": b"{}"}
    archive = claiming(zipped(members), "tokenizer.json", 0xFFFFFFFE)
    assert upload(http, "mine", {"a.zip": archive})["ignored_files"] == ["README.md", "tokenizer.json"]


@pytest.mark.parametrize("size", [MOST - 10_000, MOST + 1])
def test_the_body_is_bounded(http: Any, server: LocalServer, size: int) -> None:
    body = form("mine", {CONFIG: FILES[CONFIG], WEIGHTS: bytes(size)})
    error = refused(http, server, body, 422 if size < MOST else 413)
    assert size < MOST or "--max-adapter-upload-bytes" in error["message"]


def test_the_store_is_bounded(http: Any, server: LocalServer) -> None:
    archive = {"a.zip": zipped(FILES)}
    names = []
    while True:
        names.append(f"mine-{len(names)}")
        answer = send(http, form(names[-1], archive))
        if answer.status_code != 200:
            break
    error = error_of(answer)
    assert answer.status_code == 413 and "--adapter-store-bytes" in error["message"]
    assert names_of(http) == names[:-1]
    assert http.get(ADAPTERS).json()["uploads"]["stored_bytes"] == sum(map(len, FILES.values())) * len(names[:-1])
    assert http.delete(f"{ADAPTERS}/{names[0]}").status_code == 200
    assert http.delete(f"{ADAPTERS}/{names[1]}").status_code == 200
    upload(http, names[-1], archive)


# -- archives --------------------------------------------------------------------------------------------------------


def tampered(how: str) -> bytes:
    """An archive that is not what it should be."""
    good = zipped(FILES)
    end = good.rindex(b"PK\x05\x06")
    if how == "no archive":
        return b"PK\x03\x04" + bytes(1000)
    if how == "empty":
        return b""
    if how == "cut":
        return good[:-30]
    if how == "no table":
        return good[:end] + good[end:].replace(good[end + 12 : end + 20], bytes(8))
    if how == "table without end":
        return good[: end + 12] + struct.pack("<I", 0xFFFFFFF0) + good[end + 16 :]
    if how == "table before the start":
        return good[: end + 16] + struct.pack("<I", 0xFFFFFFF0) + good[end + 20 :]
    if how == "long table":
        names = [(f"{'x' * 60_000}{number}", b"") for number in range(10)]
        return zipped([*FILES.items(), *names])
    if how == "damaged":
        middle = good.index(WEIGHTS.encode()) + 2000
        return good[:middle] + bytes(64) + good[middle + 64 :]
    if how == "other name":  # before the file, than in the table
        return good.replace(CONFIG.encode(), b"adapter_konfig.json", 1)
    if how == "encrypted":
        table = good.rindex(WEIGHTS.encode()) - 46
        return good[: table + 8] + struct.pack("<H", 1) + good[table + 10 :]
    if how == "lzma":
        return zipped(FILES, zipfile.ZIP_LZMA)
    if how == "bzip2":
        return zipped(FILES, zipfile.ZIP_BZIP2)
    if how == "in an archive":
        return zipped({"a.zip": good})
    assert how == "many entries"
    return zipped([*FILES.items(), *((f"__MACOSX/{number}", b"") for number in range(3000))])


@pytest.mark.parametrize(
    "how",
    [
        "no archive", "empty", "cut", "no table", "table without end", "table before the start", "long table",
        "damaged", "other name", "encrypted", "lzma", "bzip2", "in an archive", "many entries",
    ],
)  # fmt: skip
def test_archives_that_are_not_what_they_say(http: Any, server: LocalServer, how: str) -> None:
    error = refused(http, server, form("mine", {"a.zip": tampered(how)}))
    assert error["param"] == "files" and (how != "long table" or "table of contents" in error["message"])


def test_members_may_not_overlap_into_a_bomb(http: Any, server: LocalServer) -> None:
    """Both of the table's lines lead to one stream of bytes; each is counted."""
    size = MOST * 3 // 4
    archive = bytearray(zipped({CONFIG: bytes(100), WEIGHTS: bytes(size)}))
    table = archive.rindex(CONFIG.encode()) - 46
    weights = archive.rindex(WEIGHTS.encode()) - 46
    archive[table + 10 : table + 28] = archive[weights + 10 : weights + 28]  # method to unpacked size
    archive[table + 42 : table + 46] = archive[weights + 42 : weights + 46]  # where it begins
    refused(http, server, form("mine", {"a.zip": bytes(archive)}))


def test_one_archive_and_nothing_beside_it(http: Any, server: LocalServer) -> None:
    good = zipped(FILES)
    for files in (
        [("a.zip", good), ("b.zip", good)],
        [("a.zip", good), *FILES.items()],
        [("a.zip", good), ("README.md", b"")],
    ):
        assert refused(http, server, form("mine", files))["param"] == "files"


def test_a_folder_that_is_a_file_too(http: Any, server: LocalServer) -> None:
    members = [(f"{CONFIG}/", b""), *FILES.items()]
    assert upload(http, "mine", {"a.zip": zipped(members)})["status"] == "loaded"  # folders are not made
    assert http.delete(f"{ADAPTERS}/mine").status_code == 200
    refused(http, server, form("other", [*FILES.items(), ("a/", b"")]))
    for folder in ("../", "/", "a/b/", "a/../", "x" * 2000 + "/"):
        refused(http, server, form("other", {"a.zip": zipped([(info(folder, 0o040755), b""), *FILES.items()])}))


def test_a_long_comment_is_no_way_in(http: Any) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in FILES.items():
            archive.writestr(name, data)
        archive.comment = b"PK\x05\x06" + bytes(60_000)
    assert send(http, form("mine", {"a.zip": file.getvalue()})).status_code in (200, 400)
