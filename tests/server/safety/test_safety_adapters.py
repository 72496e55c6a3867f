"""Safety: adapters over HTTP; templates and images."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from quire.demo import adapter_path, picture_path
from tests.server.api_server import LocalServer
from tests.server.safety.helpers import CHAT, LOAD, UNLOAD, USER, asked

pytestmark = pytest.mark.slow


def test_adapters_are_not_changed_over_http_by_default(plain_model: Path) -> None:
    with LocalServer({"model": str(plain_model), "enable_lora": True}) as server:
        assert asked(server, "POST", LOAD, body={"lora_name": "x", "lora_path": "/tmp"})[0] == 403
        assert asked(server, "POST", UNLOAD, body={"lora_name": "x"})[0] == 403


def _load(server: LocalServer, path: Any, name: str = "x") -> tuple[int, str]:
    return asked(server, "POST", LOAD, body={"lora_name": name, "lora_path": str(path)})


def test_adapters_come_from_the_allowed_folders_alone(
    bundled: LocalServer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(adapter_path("shout"), outside)
    monkeypatch.setenv("HOME", str(tmp_path))
    (root / "out").symlink_to(outside)
    (root / "in").symlink_to(root / "good")
    (root / "sly").mkdir()
    (root / "sly" / "adapter_config.json").write_bytes((outside / "adapter_config.json").read_bytes())
    (root / "sly" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    (tmp_path / "into").symlink_to(root / "good")
    beside = root.parent / (root.name + "-beside")
    shutil.copytree(outside, beside)
    refused = {
        "out": 404, "sly": 404, "./good": 400, "../outside": 400, "org/adapter": 404, "~/outside": 400, "~": 400,
        "": 400,
        "file:///etc": 400, f"{root}/../{beside.name}": 403, str(beside): 403, str(outside): 403, "/": 403, "/etc": 403,
        str(root / "out"): 403, str(root / "sly"): 403, f"{root}/good/../../..": 403, f"{root}/out/../outside": 403,
        "/nowhere/at/all": 403, "/nowhere/secret": 403, f"{root}/nothing": 404, f"{root}/good\x00": 404,
        f"{root}/" + "a" * 3000: 404, f"{root}/" + "a/" * 1500: 404, "/" + "a" * 5000: 400,
        f"{root}/good/adapter_config.json": 404, str(root): 422,
    }  # fmt: skip
    for path, expected in refused.items():
        status, text = _load(bundled, path)
        assert status == expected, (path[:80], text)
        # What lies outside is not told, existing or not; nor where links lead.
        for hidden in {str(outside), str(beside), str(root)} - {
            h for h in (str(outside), str(beside), str(root)) if h in path
        }:
            assert hidden not in text, path
    assert "'x'" not in json.dumps(bundled.engine.list_lora_adapters(), default=str)
    for number, path in enumerate((root / "good", root / "in", tmp_path / "into", f"{root}/sly/../good")):
        status, text = _load(bundled, path, f"good-{number}")
        assert status == 200, text


@pytest.mark.parametrize("name", ["", "a" * 257])
def test_names_of_adapters_are_bounded(bundled: LocalServer, root: Path, name: str) -> None:
    assert _load(bundled, root / "good", name)[0] == 400


@pytest.mark.parametrize("name", [".", "..", "org/..", "./a", " ", "\t", "a\x00", "\x1b[31mred"])
def test_names_that_no_url_has_are_refused_with_the_rule(bundled: LocalServer, root: Path, name: str) -> None:
    mixture = {"lora_name": name, "adapters": [{"name": "x"}]}
    for status, text in (_load(bundled, root / "good", name), asked(bundled, "POST", LOAD, body=mixture)):
        assert status == 400 and "give it another name" in text, text
        assert json.loads(text)["error"]["param"] == "lora_name"
        assert not set(map(chr, range(32))) & set(json.loads(text)["error"]["message"])


def test_templates_never_come_from_requests(bundled: LocalServer) -> None:
    template = "{% for i in range(9) %}INJECTED{% endfor %}"
    for path in (CHAT, "/tokenize"):
        assert asked(bundled, "POST", path, body={"messages": USER, "chat_template": template})[0] == 400
        for name in ("messages", "tools", "add_generation_prompt"):
            refused = {"messages": USER, "chat_template_kwargs": {name: template}}
            assert asked(bundled, "POST", path, body=refused)[0] == 400
    plain = json.loads(asked(bundled, "POST", "/tokenize", body={"messages": USER})[1])["tokens"]
    for name in ("chat_template", "template", "tokenizer", "bos_token_", "self", "environment", "range", "dict"):
        body = {"messages": USER, "chat_template_kwargs": {name: template}}
        status, text = asked(bundled, "POST", "/tokenize", body=body)
        assert status == 400 or json.loads(text)["tokens"] == plain, name


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/", "http://169.254.169.254/latest/meta-data", "https://localhost/a.png", "ftp://localhost/a",
        "http://[::1]/", "HTTP://127.1/", f"file://{picture_path()}", "file:///etc/passwd", "FILE:///etc/passwd",
        "/etc/passwd", "../../etc/passwd", "gopher://localhost", "javascript:1", "data:text/html,a", "",
    ],
)  # fmt: skip
def test_addresses_of_images_are_not_followed(bundled: LocalServer, url: str) -> None:
    for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "image", "image": url}):
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        begun = time.monotonic()
        status, text = asked(bundled, "POST", CHAT, body=body)
        assert status == 400 and "root:" not in text, text
        assert time.monotonic() - begun < 40
