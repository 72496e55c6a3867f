"""Blocks beside the pool under adapters and images, by connectors of packages, and settings of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image

from quire import LLM, LoRARequest, QuireError, SamplingParams
from quire.config.kv_transfer import kv_transfer
from quire.demo import adapter_path, picture_path
from quire.platform.engine import llm_engine
from quire.platform.kv import transfers
from quire.platform.kv.connector import ConnectorCounts, MergedReports, TransferReport
from quire.platform.kv.transfers import TransferAccount
from tests.platform.engine.kept import FaultyConnector, MemoryConnector, account, engine, on_disk

pytestmark = pytest.mark.usefixtures("one_thread", "patient")

GREEDY = SamplingParams(temperature=0, max_tokens=10, logprobs=2)
TOLD = [{"role": "user", "content": "There is a red star and a blue circle by the lake. What color is the star?"}]


def seen() -> list[dict[str, Any]]:
    picture = {"type": "image_pil", "image_pil": Image.open(picture_path())}
    return [{"role": "user", "content": [picture, {"type": "text", "text": "What do you see?"}]}]


def ask(llm: LLM, conversation: list[dict[str, Any]], adapter: str | None = None) -> tuple[Any, ...]:
    request = LoRARequest(adapter) if adapter else None
    output = llm.chat(conversation, GREEDY, use_tqdm=False, lora_request=request)[0]
    return output.outputs[0].token_ids, output.outputs[0].logprobs, output.num_cached_tokens


def adapters(llm: LLM, **paths: str) -> LLM:
    for name, folder in paths.items():
        llm.load_lora_adapter(name, adapter_path(folder))
    return llm


def test_adapters_of_one_name_are_told_apart_and_images_are_found(tmp_path: Path) -> None:
    alone = adapters(LLM(enable_lora=True, enable_prefix_caching=False), french="french", shout="shout")
    expected = {name: ask(alone, TOLD, name)[:2] for name in ("french", "shout", None)}
    picture = ask(alone, seen())[:2]
    with engine(None, tmp_path, enable_lora=True) as llm:
        adapters(llm, french="french")
        assert ask(llm, TOLD, "french") == (*expected["french"], 0)
        assert ask(llm, seen()) == (*picture, 0)
    with engine(None, tmp_path, enable_lora=True) as llm:
        adapters(llm, french="shout", other="french")
        assert ask(llm, TOLD) == (*expected[None], 0), "the base model"
        assert ask(llm, TOLD, "french") == (*expected["shout"], 0), "another version of the name"
        told = ask(llm, TOLD, "other")
        assert told[:2] == expected["french"] and told[2] > 0, "the version, by another name"
        shown = ask(llm, seen())
        assert shown[:2] == picture and shown[2] > 0
        other = seen()
        other[0]["content"][0]["image_pil"] = Image.new("RGB", Image.open(picture_path()).size, "green")
        assert ask(llm, other)[2] < shown[2], "another picture"
        assert account(llm).counts.refused == 0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for kind in (MemoryConnector, FaultyConnector):
        monkeypatch.setattr(kind, "kept", {})
        monkeypatch.setattr(kind, "layouts", [])
    yield


def by(name: str, **extra: Any) -> dict[str, Any]:
    connector = f"tests.platform.engine.kept:{name}"
    return {"kv_transfer_config": {"kv_connector": connector, "kv_connector_extra_config": {"min_tokens": 1, **extra}}}


LONG = {"prompt_token_ids": [3 + place % 300 for place in range(60)]}


def test_memory_of_a_read_serves_the_next(tiny_path: Path, memory: None) -> None:
    """`_spare` is private: nothing but time tells what memory was read into."""
    first = LLM(str(tiny_path), **by("MemoryConnector"))
    prompts = [{"prompt_token_ids": [3 + (place + start) % 300 for place in range(60)]} for start in (0, 100)]
    expected = [first.generate(one, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for one in prompts]
    first.llm_engine.close()
    llm = LLM(str(tiny_path), **by("MemoryConnector"))
    transfers = cast(Any, llm.llm_engine.executor).runner.transfers
    deadline = time.monotonic() + 60
    while transfers._spare is None and time.monotonic() < deadline:
        time.sleep(0.01)
    spare = transfers._spare
    assert spare is not None, "it is made beside the start"
    for one, tokens in zip(prompts, expected, strict=True):
        output = llm.generate(one, GREEDY, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == tokens and output.num_cached_tokens
    llm.llm_engine.core.settle()
    assert transfers._spare is spare
    llm.llm_engine.close()


def test_an_engine_is_told_when_blocks_have_been_read(
    tiny_path: Path, memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not look by itself until it is too late."""

    def read(connector: MemoryConnector, key: bytes, into: memoryview) -> bool:
        time.sleep(0.05)  # so that the engine waits by then
        into[:] = MemoryConnector.kept[connector.identity, key]
        return True

    first = LLM(str(tiny_path), **by("MemoryConnector"))
    expected = first.generate(LONG, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    first.llm_engine.close()
    monkeypatch.setattr(MemoryConnector, "read", read)
    monkeypatch.setattr(llm_engine, "_READ_SECONDS", 300.0)
    llm = LLM(str(tiny_path), **by("MemoryConnector"))
    begun = time.monotonic()
    output = llm.generate(LONG, GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == expected and output.num_cached_tokens
    assert time.monotonic() - begun < 200
    llm.llm_engine.close()


def generate(llm: LLM) -> tuple[Any, ...]:
    output = llm.generate(LONG, GREEDY, use_tqdm=False)[0]
    llm.llm_engine.check_integrity()
    return output.outputs[0].token_ids, output.outputs[0].logprobs, output.num_cached_tokens


@pytest.mark.usefixtures("memory")
def test_the_connector_of_a_package(tiny_path: Path) -> None:
    expected = generate(LLM(str(tiny_path), enable_prefix_caching=False))[:2]
    for cached in (0, 56):
        llm = LLM(str(tiny_path), debug=True, **by("MemoryConnector", url="somewhere"))
        assert generate(llm) == (*expected, cached)
        llm.llm_engine.close()
    layout = MemoryConnector.layouts[0]
    assert layout.settings == {"url": "somewhere"} and (layout.rank, layout.size) == (0, 1)
    assert {len(block) for block in MemoryConnector.kept.values()} == {layout.block_bytes}
    llm = LLM(str(tiny_path), **by("MemoryConnector", min_tokens=57))
    assert generate(llm) == (*expected, 0), "so few are computed"


@pytest.mark.usefixtures("memory")
def test_a_connector_that_raises(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(LLM(str(tiny_path), enable_prefix_caching=False))[:2]
    for fails, cached in ({"write"}, 0), (set(), 0), ({"read"}, 0), (set(), 56):
        monkeypatch.setattr(FaultyConnector, "fails", fails)
        caplog.clear()
        llm = LLM(str(tiny_path), debug=True, **by("FaultyConnector"))
        assert generate(llm) == (*expected, cached)
        assert (account(llm).counts.failed > 0) == bool(fails)
        assert caplog.text.count("the network is gone") == len(fails)
        llm.llm_engine.close()


def test_settings_that_are_refused(tiny_path: Path) -> None:
    disk = {"path": "x", "max_bytes": 10}
    for given, why in (
        ("DiskConnector", "must be an object"),
        ({}, "kv_connector=None: is DiskConnector, or that of a package"),
        ({"kv_connector": "DiskConnector", "port": 1}, "'port' is unknown"),
        ({"kv_connector": "DiskConnector", "kv_port": 1}, "blocks are not sent between engines"),
        ({"kv_connector": "DiskConnector", "kv_role": "kv_producer"}, "stores loads too"),
        ({"kv_connector": "m:Class", "kv_role": "kv_consumer"}, "kv_role='kv_consumer': is DiskConnector's alone"),
        (
            {"kv_connector": "DiskConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": disk},
            "max_bytes: a kv_consumer writes nothing",
        ),
        ({"kv_connector": "DiskConnector", "kv_connector_extra_config": 1}, "must be an object"),
        ({"kv_connector": "DiskConnector"}, "path=None: must be a folder"),
        ({"kv_connector": "DiskConnector", "kv_connector_extra_config": {"path": "x"}}, "max_bytes: must say"),
        *(
            ({"kv_connector": "DiskConnector", "kv_connector_extra_config": {**disk, name: value}}, why)
            for name, value, why in (
                ("size", 1, "'size' is unknown to DiskConnector"),
                ("max_bytes", 0, "max_bytes=0"),
                ("max_bytes", True, "max_bytes=True"),
                ("max_bytes", 1.5, "max_bytes=1.5"),
                ("min_tokens", "many", "min_tokens='many'"),
            )
        ),
    ):
        with pytest.raises(QuireError, match=why):
            LLM(str(tiny_path), kv_transfer_config=given)
    for name in ("LMCacheConnectorV1", "NixlConnector", "no.such.module:Class"):
        with pytest.raises(QuireError, match=f"kv_transfer_config: '{name}'"):
            LLM(str(tiny_path), kv_transfer_config={"kv_connector": name})
    taken = {
        "kv_connector": "DiskConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**disk, "max_bytes": 1e9},
    }
    assert kv_transfer(taken).max_bytes == 10**9


def test_parts_of_a_block_that_several_workers_have() -> None:
    reports, key, other = MergedReports(2), b"key", b"other"
    counts = ConnectorCounts(stored=1, held_bytes=5)
    first = reports.merge([TransferReport(stored=(key,), counts=counts), TransferReport(counts=counts)])
    assert first.stored == () and first.counts == ConnectorCounts(stored=2, held_bytes=10)
    assert reports.merge([TransferReport(), TransferReport(stored=(key, other))]).stored == (key,)
    assert reports.merge([TransferReport(removed=(key,)), TransferReport()]).removed == (key,)
    assert reports.merge([TransferReport(stored=(key,)), TransferReport()]).stored == (key,), "the other's is there yet"
    fetched = [TransferReport(fetched=((1, (True, True)),)), TransferReport(fetched=((1, (True, False)),))]
    assert reports.merge([fetched[0], TransferReport()]).fetched == ()
    assert reports.merge([TransferReport(), fetched[1]]).fetched == ((1, (True, False)),)


def test_an_account_of_what_is_read() -> None:
    account = TransferAccount(min_blocks=2, most_loading=3)
    keys = [bytes([number]) for number in range(6)]
    account.reported(TransferReport(stored=tuple(keys)))
    assert not account.waits(1, lambda: keys[:1]), "too few"
    assert (
        account.waits(2, lambda: keys[:3])
        and account.waits(3, lambda: keys[1:4])
        and account.waits(4, lambda: keys[4:])
    )
    plan = account.take()
    assert plan is not None and [fetch.keys for fetch in plan.fetch] == [tuple(keys[:3])], "one after the other"
    assert account.take() is None and account.is_reading and account.is_due()
    account.reported(TransferReport(removed=(keys[1], keys[5])))
    assert keys[1] not in account.held and keys[5] not in account.held
    account.reported(TransferReport(stored=(keys[1], keys[5])))
    account.reported(TransferReport(fetched=((plan.fetch[0].job, (True, False, True)),)))
    assert not account.waits(2, list) and keys[0] in account.there(2) and keys[1] not in account.there(2)
    assert keys[1] in account.held, "it came again while the job went on"
    account.load(2, [(keys[0], 7)])
    plan = account.take()
    assert plan is not None and plan.load == ((1, 0, 7),) and plan.forget == (1,)
    assert account.waits(3, lambda: keys[2:4]) and account.waits(4, lambda: keys[4:])
    account.drop(3)  # before anybody was told
    assert account.take() is None or not account.take()
    assert account.waits(4, lambda: keys[4:])
    plan = account.take()
    assert plan is not None and [fetch.keys for fetch in plan.fetch] == [tuple(keys[4:])]


def test_what_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(transfers, "time", SimpleNamespace(monotonic=lambda: now))
    account, keys = TransferAccount(min_blocks=1, most_loading=9), [b"a", b"b", b"c"]
    account.reported(TransferReport(stored=tuple(keys)))
    assert account.waits(1, lambda: keys[:1]) and account.waits(2, lambda: keys[:1])
    plan = account.take()
    assert plan is not None and len(plan.fetch) == 1
    now += transfers.PATIENCE_SECONDS + 1
    assert not account.waits(1, list) and not account.waits(2, list)
    account.drop(1)
    account.drop(2)
    assert not account.waits(3, lambda: keys[1:]), "which is computed at once"
    account.drop(3)
    account.reported(TransferReport(fetched=((plan.fetch[0].job, (False,)),)))
    assert account.waits(4, lambda: keys[1:]), "the disk is back"
    account.check_integrity({4: 0})


def test_the_account_is_checked() -> None:
    """What `debug` would find."""
    account = TransferAccount(1, 10)
    account.held.add(b"key")
    assert account.waits(1, lambda: [b"key"])
    account.check_integrity({1: 5})
    with pytest.raises(AssertionError, match="does not wait"):
        account.check_integrity({})


def test_what_cannot_be_kept_is_refused(tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="enable_prefix_caching=False"):
        LLM(str(tiny_path), enable_prefix_caching=False, **on_disk(tmp_path))
    with engine(tiny_path, tmp_path), pytest.raises(QuireError, match="another engine has it"):
        LLM(str(tiny_path), **on_disk(tmp_path))
    with pytest.raises(QuireError, match="draft model"):
        LLM(str(tiny_path), speculative_config={"model": str(tiny_path)}, **on_disk(tmp_path))
