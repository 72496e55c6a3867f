"""Keys cover every route, limits hold before anything is computed, and nothing is told that is nobody's business."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.demo import adapter_path, picture_path
from quire.server.schemas import prompts
from tests.server.api_server import LocalServer, ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
KEYS, ADMIN = ("first-key", "second-key"), "the-admin-key"
CLOSED = (LOAD, UNLOAD, "/sleep", "/wake_up", "/reset_prefix_cache")  # without a flag that opens them
OPEN = {"/health", "/ready", "/ping"}
USER = [{"role": "user", "content": "a"}]


def asked(
    server: LocalServer | ServerProcess,
    method: str,
    path: str,
    key: str | None = None,
    body: Any = None,
    **headers: str,
) -> tuple[int, str]:
    """(status, body) of a request whose path is sent as it stands here."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    content = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **headers}
    if key is not None:
        sent.setdefault("Authorization", f"Bearer {key}")
    connection.request(method, path, content, sent)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.fixture(scope="module")
def guarded(plain_model: Path) -> Iterator[LocalServer]:
    with LocalServer({"model": str(plain_model)}, api_keys=KEYS) as server:
        yield server


@pytest.fixture(scope="module")
def governed(plain_model: Path) -> Iterator[LocalServer]:
    """With an admin's key."""
    engine = {"model": str(plain_model), "enable_lora": True}
    with LocalServer(engine, api_keys=KEYS, admin_api_key=ADMIN, allow_runtime_lora=True) as server:
        yield server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that adapters may be loaded from, with a good one in it."""
    path = tmp_path_factory.mktemp("root")
    shutil.copytree(adapter_path("french"), path / "good")
    return path


@pytest.fixture(scope="module")
def bundled(root: Path) -> Iterator[LocalServer]:
    engine = {"enable_lora": True, "lora_roots": (str(root),), "num_gpu_blocks_override": 1024}
    with LocalServer(engine, allow_runtime_lora=True, lora_roots=(str(root),)) as server:
        yield server


# -- keys ----------------------------------------------------------------------------------------------------------


def _routes(server: LocalServer) -> list[tuple[str, str]]:
    with server.http() as client:
        document = client.get("/openapi.json", headers={"Authorization": f"Bearer {KEYS[0]}"}).json()
    listed = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    for route in server.app.routes:
        listed |= {(method, route.path) for method in getattr(route, "methods", None) or ()}
    return sorted((method, path.replace("{model:path}", "x").replace("{model}", "x")) for method, path in listed)


def test_every_route_but_the_probes_needs_a_key(guarded: LocalServer) -> None:
    routes = _routes(guarded)
    assert {"/v1/models", COMPLETIONS, CHAT, "/tokenize", "/metrics", LOAD, "/openapi.json"} <= {p for _, p in routes}
    for method, path in routes:
        if path in OPEN:
            assert asked(guarded, method, path)[0] == 200
            continue
        for key in (None, "wrong", "", "first-key2", "FIRST-KEY", ADMIN):
            status, text = asked(guarded, method, path, key)
            assert status == 401, (method, path, key)
            assert method == "HEAD" or json.loads(text)["error"]["code"] == "invalid_api_key"
        for key in KEYS:
            assert asked(guarded, method, path, key)[0] not in (401, 403) or path in CLOSED


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])
def test_no_spelling_of_a_path_gets_around_the_key(guarded: LocalServer, method: str) -> None:
    for path in (
        "/v1/models", "/v1/models/", "//v1/models", "/v1//models", "/V1/MODELS", "/./v1/models", "/%2e/v1/models",
        "/health/../v1/models", "/health/%2e%2e/v1/models", "/health%2f..%2fv1/models", "/health/v1/models",
        "/v1/models?/health", "/health;/v1/models", "/v1/models#/health", "/healthy", "/readyz", "/HEALTH", "/",
        "/v1/models%00/health", "/health%00", "/%68ealth/x", "/\\health", "/v1/models\\..\\health",
    ):  # fmt: skip
        assert asked(guarded, method, path)[0] == 401, path


def test_probes_are_open_in_their_usual_spellings_only(guarded: LocalServer) -> None:
    assert asked(guarded, "GET", "/%68ealth")[0] == 200  # the same path
    status, _ = asked(guarded, "GET", "/health/")
    assert status in (307, 404)
    assert asked(guarded, "POST", "/health")[0] == 405


@pytest.mark.parametrize("value", ["Basic first-key", "first-key", "Bearer", "Bearer  ", "Bearer first-key x", "Token"])
def test_other_schemes_are_refused(guarded: LocalServer, value: str) -> None:
    status, text = asked(guarded, "GET", "/v1/models", Authorization=value)
    assert status == 401 and "first-key" not in text


def test_the_scheme_may_be_written_as_one_likes(guarded: LocalServer) -> None:
    assert asked(guarded, "GET", "/v1/models", Authorization="bEARER second-key")[0] == 200


def test_the_admin_key(governed: LocalServer) -> None:
    for path in (LOAD, UNLOAD, LOAD + "/", UNLOAD + "//", "/v1/%6coad_lora_adapter"):
        body = {"lora_name": "x", "lora_path": "/x"} if "oad_lora" in path and "un" not in path else {"lora_name": "x"}
        assert asked(governed, "POST", path, None, body)[0] == 401
        assert asked(governed, "POST", path, "wrong", body)[0] == 401
        status, text = asked(governed, "POST", path, KEYS[1], body)
        assert status == 403 and json.loads(text)["error"]["code"] == "admin_key_needed"
        assert asked(governed, "POST", path, ADMIN, body)[0] in (403, 404, 307)
    assert "--lora-root" in asked(governed, "POST", LOAD, ADMIN, {"lora_name": "x", "lora_path": "/x"})[1]
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        assert asked(governed, "GET", path, ADMIN)[0] == asked(governed, "GET", path, KEYS[0])[0] == 200
        assert asked(governed, "GET", path)[0] == 401


@pytest.mark.parametrize("root_path", ["/", "/api", "/api/", "/v1"])
def test_the_admin_key_under_a_root_path(plain_model: Path, root_path: str) -> None:
    engine = {"model": str(plain_model), "enable_lora": True}
    with LocalServer(engine, admin_api_key=ADMIN, allow_runtime_lora=True, root_path=root_path) as server:
        for prefix in ("", root_path, root_path.rstrip("/"), root_path * 2):
            status, _ = asked(server, "POST", prefix + LOAD, "another", {"lora_name": "x", "lora_path": "/x"})
            assert status in (401, 404), prefix
        assert asked(server, "GET", "/version")[0] == 200


# -- adapters over HTTP --------------------------------------------------------------------------------------------


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


# -- templates and images ------------------------------------------------------------------------------------------


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
        assert time.monotonic() - begun < 5


# -- limits --------------------------------------------------------------------------------------------------------

MANY = 150_000  # more than any list of quire's may have

TOO_MUCH = {
    "n": (COMPLETIONS, {"prompt": "a", "n": 129}),
    "n, hugely": (COMPLETIONS, {"prompt": "a", "n": 10**30}),
    "best_of": (COMPLETIONS, {"prompt": "a", "best_of": 10_000}),
    "n of a conversation": (CHAT, {"messages": USER, "n": 129}),
    "beams": (COMPLETIONS, {"prompt": "a", "n": 10_000, "use_beam_search": True}),
    "max_tokens": (COMPLETIONS, {"prompt": "a", "max_tokens": 10**12}),
    "logprobs": (COMPLETIONS, {"prompt": "a", "logprobs": 10_000}),
    "prompts": (COMPLETIONS, {"prompt": ["a"] * 257}),
    "very many prompts": (COMPLETIONS, {"prompt": ["a"] * MANY}),
    "very many prompts of tokens": (COMPLETIONS, {"prompt": [[1]] * MANY}),
    "a long text": (COMPLETIONS, {"prompt": "a" * 20_000_000}),
    "many long texts": (COMPLETIONS, {"prompt": ["a" * 1_000_000] * 20}),
    "many tokens": (COMPLETIONS, {"prompt": [1] * 2_000_000}),
    "no tokens": (COMPLETIONS, {"prompt": [1.5] * MANY}),
    "no prompts": (COMPLETIONS, {"prompt": [[1.5] * MANY, ["a"]]}),
    "stops": (COMPLETIONS, {"prompt": "a", "stop": ["a"] * MANY}),
    "stops that are none": (COMPLETIONS, {"prompt": "a", "stop": [1] * MANY}),
    "a long stop": (COMPLETIONS, {"prompt": "a", "stop": "a" * 1_000_000}),
    "bad words": (COMPLETIONS, {"prompt": "a", "bad_words": ["a"] * MANY}),
    "stop tokens": (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * MANY}),
    "biases": (COMPLETIONS, {"prompt": "a", "logit_bias": {str(n): 1.0 for n in range(300_001)}}),
    "fields": (COMPLETIONS, {"prompt": "a", **{f"x{n}": 1 for n in range(MANY)}}),
    "messages": (CHAT, {"messages": USER * MANY}),
    "messages that are none": (CHAT, {"messages": [1] * MANY}),
    "a long message": (CHAT, {"messages": [{"role": "user", "content": "a" * 20_000_000}]}),
    "many parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 99}] * 99_000}]}),
    "empty parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 700_000}]}),
    "parts that are none": (CHAT, {"messages": [{"role": "user", "content": [{}] * 700_000}]}),
    "more sequences than may ever wait": (COMPLETIONS, {"prompt": ["a"] * 200, "n": 8}),
    "images": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}] * 9_000}]},
    ),
    "a salt": (COMPLETIONS, {"prompt": "a", "cache_salt": "a" * 1_000_000}),
    "a name": (COMPLETIONS, {"prompt": "a", "request_id": "a" * 1_000_000}),
    "tokens to be text": ("/detokenize", {"tokens": [1] * 2_000_000}),
    "a text to be tokens": ("/tokenize", {"prompt": "a" * 20_000_000}),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_too_much_is_refused_before_anything_is_done(
    bundled: LocalServer, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    def tokenized(*_: Any, **__: Any) -> Any:
        raise AssertionError("tokenized")

    monkeypatch.setattr("quire.platform.inputs.processor.encode_prompt", tokenized)
    for name in ("encode_prompt", "encode_rendered"):
        monkeypatch.setattr(prompts, name, tokenized)
    if case != "images":  # which are counted when the messages have been rendered
        monkeypatch.setattr(prompts, "render_chat", tokenized)
    path, body = TOO_MUCH[case]
    content = json.dumps(body).encode()
    begun = time.process_time()  # the server's is this process's, and other processes do not count
    status, text = asked(bundled, "POST", path, body=content)
    taken = time.process_time() - begun
    assert status == 400, text
    assert taken < 1.5 and len(text) < 3000


def test_large_bodies_are_few_at_once(plain_model: Path) -> None:
    """What has come of them counts until they are answered."""
    with LocalServer({"model": str(plain_model)}, max_request_bytes=100_000, body_timeout=20) as server:
        host, port = server.url.removeprefix("http://").split(":")
        half = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n" + b" " * 95_000
        held = [socket.create_connection((host, int(port))) for _ in range(9)]
        for connection in held:
            connection.sendall(half)
        end = time.monotonic() + 10
        while asked(server, "POST", COMPLETIONS, body={"prompt": "a", "max_tokens": 1})[0] != 429:
            assert time.monotonic() < end, "all of them were taken"
        assert asked(server, "GET", "/health")[0] == 200
        for connection in held:
            connection.close()
        end = time.monotonic() + 10
        while asked(server, "POST", COMPLETIONS, body={"prompt": "a", "max_tokens": 1})[0] != 200:
            assert time.monotonic() < end, "their place is not given back"


def test_a_field_with_a_very_long_name(guarded: LocalServer) -> None:
    status, text = asked(guarded, "POST", COMPLETIONS, KEYS[0], {"prompt": "a", "x" * 1_000_000: 1})
    assert status == 400 and len(text) < 3000


# -- what is told --------------------------------------------------------------------------------------------------


def test_errors_tell_nothing_of_the_inside(bundled: LocalServer, root: Path) -> None:
    bodies: list[Any] = [
        b"{", b"\xff", {}, {"prompt": None}, {"prompt": {"a": 1}}, {"prompt": "a", "model": "x"}, {"messages": USER},
        {"messages": [{}]}, {"messages": [{"role": 1}]}, {"prompt": "a", "temperature": "hot"}, {"prompt": [-1]},
        {"prompt": "a", "logit_bias": {"x": 1}}, {"prompt": "a", "stop": [""]}, {"lora_name": "x", "lora_path": "x"},
        {"lora_name": "x", "lora_path": str(root)}, {"lora_name": "nobody"}, {"tokens": [10**9]}, {"tokens": "a"},
        {"messages": [{"role": "wizard", "content": "a"}]}, {"messages": USER, "mm_processor_kwargs": {"x": "a"}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]}]},
    ]  # fmt: skip
    told = set()
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize", LOAD, UNLOAD, "/v1/models/x", "/nowhere"):
        for body in bodies:
            status, text = asked(bundled, "POST", path, body=body)
            if status != 200:
                told.add(status)
                error = json.loads(text)["error"]
                assert status < 500 and set(error) == {"message", "type", "param", "code"} and error["message"], text
                assert not any(word in text for word in ("Traceback", "0x7", ".py", "site-packages", "/quire/")), text
    assert told >= {400, 404, 405, 422}


def test_a_salt_separates(guarded: LocalServer) -> None:
    def cached(salt: Any) -> int:
        body = {"prompt": [5, 6, 7, 8] * 20, "max_tokens": 1, "cache_salt": salt}
        status, text = asked(guarded, "POST", COMPLETIONS, KEYS[0], body)
        assert status == 200, text
        return int(json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("one"), cached("two"), cached(None), cached("One")] == [0, 0, 0, 0]
    assert min(cached("one"), cached("two"), cached(None)) > 0


@pytest.mark.parametrize("salt", ["", 5, ["a"], {"a": 1}, True, "a" * 1025])
def test_a_salt_that_is_none_is_refused(guarded: LocalServer, salt: Any) -> None:
    for path, field in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        status, text = asked(guarded, "POST", path, KEYS[0], {**field, "cache_salt": salt})
        assert status == 400 and json.loads(text)["error"]["param"] == "cache_salt"


def test_request_ids(guarded: LocalServer) -> None:
    with guarded.http(headers={"Authorization": f"Bearer {KEYS[0]}"}) as client:
        for good in ("a", "trace-1:2.3_4", "x" * 128):
            assert client.get("/version", headers={"X-Request-Id": good}).headers["X-Request-Id"] == good
        for bad in ("x" * 129, "a b", "a\tb", "<script>", "é", "a,b", "", '"'):
            given = {"X-Request-Id": bad.encode()}
            answered = client.get("/version", headers={**given}).headers["X-Request-Id"]
            assert answered != bad and len(answered) == 24
        refused = client.get("/version", headers={"Authorization": "x", "X-Request-Id": "mine"})
        assert refused.status_code == 401 and refused.headers["X-Request-Id"] == "mine"
        named = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "request_id": "my.name"})
        assert named.json()["id"] == "cmpl-my.name"
        bad = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "request_id": "a\nb"})
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "request_id"


SECRET, PROMPT, FORGED = "a-very-secret-key", "the quick brown secret", "FORGED LINE"


@pytest.mark.parametrize("form", ["text", "json"])
def test_logs_and_keys_of_a_process(plain_model: Path, form: str) -> None:
    server = ServerProcess(
        "--model", str(plain_model), "--log-format", form, "--api-key", SECRET, "--admin-api-key", ADMIN,
        "--enable-lora", "--allow-runtime-lora", "--log-level", "debug",
    )  # fmt: skip
    if form == "text":
        server._command.insert(1, "-O")
    with server:  # as text, it runs without assertions
        assert asked(server, "GET", "/v1/models")[0] == asked(server, "GET", "/v1/models", "wrong-secret-key")[0] == 401
        assert asked(server, "GET", "/v1/models", SECRET)[0] == 200
        load = {"lora_name": "x", "lora_path": str(adapter_path("french"))}
        assert [asked(server, "POST", LOAD, key, load)[0] for key in (None, SECRET, ADMIN)] == [401, 403, 403]
        body = {"prompt": PROMPT, "max_tokens": 20, "user": f"me\n{FORGED}\u2028{FORGED} \x1b[31m" + "u" * 5000}
        status, text = asked(server, "POST", COMPLETIONS, SECRET, body)
        assert status == 200
        answer = json.loads(text)["choices"][0]["text"]
        assert asked(server, "POST", COMPLETIONS, SECRET, {**body, "request_id": f"a\n{FORGED}"})[0] == 400
        assert asked(server, "POST", COMPLETIONS, SECRET, {"prompt": PROMPT, "temperature": PROMPT})[0] == 400
        assert asked(server, "POST", COMPLETIONS, SECRET, {"prompt": PROMPT, "model": f"x\n{FORGED}"})[0] == 404
        for path in (f"/a%0a{FORGED.replace(' ', '%20')}%0d%1b[31m", "/a%E2%80%A8b", "/" + "a" * 3000):
            assert asked(server, "GET", path, SECRET)[0] == 404
        asked(server, "GET", "/version", SECRET, **{"X-Request-Id": FORGED})
        assert server.stop() == 0
    log = server.log
    for secret in (SECRET, "wrong-secret-key", ADMIN, PROMPT, answer):
        assert secret not in log, log
    lines = log.split("\n")
    assert not any(line.startswith(FORGED) for line in lines) and "\x1b" not in log and "\r" not in log
    assert max(map(len, lines)) < 2000
    access = [line for line in lines if "/v1/completions" in line]
    assert len(access) == 4
    if form == "json":
        assert all(isinstance(json.loads(line), dict) for line in lines if line)
        assert json.loads(access[0])["user"].startswith("me\n")
    assert "Traceback" not in log
