"""Adapters that are not where they should be, names, limits, and requests that name them wrongly."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest
from quire.errors import AdapterError, QuireError, RequestError
from tests.lora import adapter_files as files
from tests.lora.adapter_faults import PROMPTS, refused
from tests.lora.adapter_files import ask, no_adapters, open_llm, tokens

pytestmark = pytest.mark.usefixtures("unharmed")


# -- files --------------------------------------------------------------------------------------------------------


def test_missing_files(llm, tmp_path):
    files.plain(tmp_path)
    (tmp_path / "adapter_config.json").rename(tmp_path / "config.json")
    refused(llm, tmp_path, "adapter_config.json: there is no such file")
    (tmp_path / "config.json").rename(tmp_path / "adapter_config.json")
    (tmp_path / "adapter_model.safetensors").unlink()
    assert "pickle" not in refused(llm, tmp_path, "adapter_model.safetensors: there is no such file")


class _Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(_Bomb.mark),)

    mark = Path()


def test_a_pickle_is_never_opened(llm, tmp_path):
    _Bomb.mark = tmp_path / "opened"
    files.plain(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(_Bomb()))
    refused(llm, tmp_path, "there is no such file", "adapter_model.bin is a pickle", "never opened")
    (tmp_path / "adapter_model.bin").rename(tmp_path / "adapter_model.safetensors")
    refused(llm, tmp_path, "is damaged")
    assert not _Bomb.mark.exists()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "unreadable"])
def test_what_is_no_file(llm, tmp_path, name, kind):
    files.plain(tmp_path)
    (tmp_path / name).unlink()
    if kind == "folder":
        (tmp_path / name).mkdir()
    elif kind == "pipe":  # to read it would never end
        os.mkfifo(tmp_path / name)
    elif kind == "device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / name).symlink_to(tmp_path / name)
    refused(llm, tmp_path, name)


@pytest.mark.parametrize("where", ["", "a\0b", "~nobody-of-this-name/adapter", "/" + "x" * 5000, "/no/such/folder"])
@pytest.mark.parametrize("roots", [False, True])
def test_a_path_that_leads_nowhere(llm, path, tmp_path, where, roots):
    chosen = open_llm(path, lora_roots=[str(tmp_path)], num_gpu_blocks_override=20) if roots else llm
    with pytest.raises(QuireError):
        chosen.load_lora_adapter("bad", where)
    with pytest.raises(QuireError):
        ask(chosen, [PROMPTS[0]], LoRARequest("bad", lora_path=where))
    no_adapters(chosen)


def test_a_file_as_path(llm, tmp_path):
    files.plain(tmp_path)
    refused(llm, tmp_path / "adapter_model.safetensors", "is no folder")


def test_paths_outside_the_allowed_folders(path, tmp_path):
    inside, outside = tmp_path / "in", files.plain(tmp_path / "out" / "adapter")
    files.plain(inside / "good")
    (inside / "linked").symlink_to(outside)
    half = files.plain(inside / "half")
    (half / "adapter_model.safetensors").unlink()
    (half / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    loop = files.plain(inside / "loop")
    (loop / "adapter_loop").symlink_to(loop / "adapter_loop")
    twin = tmp_path / "in-twin"
    files.plain(twin)
    (tmp_path / "door").symlink_to(inside)

    llm = open_llm(path, lora_roots=[str(inside)], num_gpu_blocks_override=20)
    for folder in (outside, inside / ".." / "out" / "adapter", inside / "linked", half, twin):
        refused(llm, folder, "lies outside the folders")
    with pytest.raises(AdapterError):
        llm.load_lora_adapter("some/hub-id", "some/hub-id")  # which is never asked for
    with pytest.raises(AdapterError, match="loop"):
        llm.load_lora_adapter("loop", str(loop))
    for folder in (inside / "good", tmp_path / "door" / "good", inside / "good" / ".." / "good"):
        llm.load_lora_adapter("fine", str(folder))
        llm.unload_lora_adapter("fine")
    no_adapters(llm)


def test_the_kernels_links_lead_nowhere(path, tmp_path):
    """What lies behind them is another process's, and their text does not say so."""
    inside = tmp_path / "in"
    good, linked = files.plain(inside / "good"), files.plain(inside / "linked")
    (linked / "adapter_model.safetensors").unlink()
    (linked / "adapter_model.safetensors").symlink_to(f"/proc/self/root{good}/adapter_model.safetensors")
    (inside / "folder").symlink_to(f"/proc/thread-self/root{good}")
    llm = open_llm(path, lora_roots=[str(inside)], num_gpu_blocks_override=20)
    for folder in (Path(f"/proc/self/root{good}"), Path(f"/proc/{os.getpid()}/root{good}"), linked, inside / "folder"):
        refused(llm, folder, "lies outside the folders")
    no_adapters(llm)


def test_a_file_that_becomes_a_link_to_the_outside_is_not_read_again(path, tmp_path):
    inside = tmp_path / "in"
    first, second = files.plain(inside / "a", seed=1), files.plain(inside / "b", seed=2)
    llm = open_llm(path, lora_roots=[str(inside)], max_cpu_loras=1)
    llm.load_lora_adapter("a", str(first))
    llm.load_lora_adapter("b", str(second))  # a is gone from memory
    weights = first / "adapter_model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    (output,) = ask(llm, [PROMPTS[0]], "a")
    assert "lies outside the folders" in files.error_of(output)
    weights.unlink()
    (tmp_path / "elsewhere").rename(weights)
    assert len(tokens(llm, [PROMPTS[0]], "a")) == 1


# -- names and limits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", None, 5, b"x"])
def test_a_name_that_is_none(llm, tmp_path, name):
    with pytest.raises(AdapterError, match="non-empty string"):
        llm.load_lora_adapter(name, str(files.plain(tmp_path)))
    with pytest.raises(RequestError, match="lora_name"):
        LoRARequest(name)


@pytest.mark.parametrize(
    "name", [".", "..", "a/../b", "./a", "a/.", " ", "   ", "a\nb", "\x1b[2J", "\x00", "a\u202eb", "\ud800", "x\x7f"]
)
def test_a_name_that_no_url_or_log_could_have(llm, tmp_path, name):
    with pytest.raises(AdapterError, match="give it another name"):
        llm.load_lora_adapter(name, str(files.plain(tmp_path)))
    with pytest.raises(RequestError, match=r"lora_name.*give it another name"):
        LoRARequest(name, lora_path=str(tmp_path))


@pytest.mark.parametrize("name", ["...", ".hidden", "a..b", "a/b.c", " a", "mein Adapter", "\u00e9t\u00e9", "\u540d"])
def test_odd_names_are_names(llm, tmp_path, name):
    llm.load_lora_adapter(name, str(files.plain(tmp_path)))
    assert [info.name for info in llm.list_lora_adapters()] == [name]
    llm.unload_lora_adapter(name)


def test_names_and_numbers_stand_for_one_adapter(llm, tmp_path):
    first, second = files.plain(tmp_path / "a", seed=1), files.plain(tmp_path / "b", seed=2)
    llm.load_lora_adapter("a", str(first), lora_int_id=7)
    with pytest.raises(AdapterError, match=r"'a' is loaded already, from .*/a"):
        llm.load_lora_adapter("a", str(second))
    with pytest.raises(AdapterError, match="lora_int_id=7 is adapter 'a''s"):
        llm.load_lora_adapter("b", str(second), lora_int_id=7)
    with pytest.raises(RequestError, match=r"loaded from .*/a, and the request names .*/b"):
        ask(llm, [PROMPTS[0]], LoRARequest("a", 7, str(second)))
    with pytest.raises(RequestError, match="lora_int_id=7, not 8"):
        ask(llm, [PROMPTS[0]], LoRARequest("a", 8))
    llm.load_lora_adapter("b", str(second))
    with pytest.raises(QuireError, match="lora_int_id=7 is adapter 'a''s"):
        ask(llm, [PROMPTS[0]], LoRARequest("b", 7))
    assert [(info.name, info.lora_int_id) for info in llm.list_lora_adapters()] == [("a", 7), ("b", None)]
    llm.unload_lora_adapter("a")
    assert len(tokens(llm, [PROMPTS[0]], [LoRARequest("b", 7)])) == 1
    llm.unload_lora_adapter("b")
    for unknown in ("a", "b"):
        with pytest.raises(AdapterError, match=f"no adapter '{unknown}' is loaded"):
            llm.unload_lora_adapter(unknown)
        with pytest.raises(AdapterError, match=f"no adapter '{unknown}' is loaded"):
            llm.pin_lora_adapter(unknown)
        with pytest.raises(RequestError, match=f"no adapter '{unknown}' is loaded"):
            ask(llm, [PROMPTS[0]], unknown)


def test_a_hub_id_is_looked_up_once(llm, tmp_path, monkeypatch):
    from quire.platform.engine import builder

    folder, asked = files.plain(tmp_path), []

    def found(name: str, files: Any, hub: Any) -> Path:
        asked.append(name)
        return folder

    monkeypatch.setattr(builder, "resolve_checkpoint", found)
    first = tokens(llm, [PROMPTS[0]], [LoRARequest("hub", 1, "owner/name")])
    assert tokens(llm, [PROMPTS[0]], [LoRARequest("hub", 1, "owner/name")]) == first
    assert tokens(llm, [PROMPTS[0]], [LoRARequest("hub", 1, str(folder))]) == first
    assert asked == ["owner/name"]
    llm.unload_lora_adapter("hub")


def test_larger_than_the_budget(path, tmp_path):
    folder = files.plain(tmp_path, rank=8)
    size = open_llm(path, num_gpu_blocks_override=20).load_lora_adapter("fits", str(folder)).bytes
    on_disk = (folder / "adapter_model.safetensors").stat().st_size
    small = on_disk // 2 - 1  # for a file of twice that at most, which may hold float32 of a model in bfloat16
    for most, said in ((size - 1, size - 1), (small, 2 * small)):
        for name in ("lora_device_bytes", "lora_host_bytes"):
            llm = open_llm(path, num_gpu_blocks_override=20, **{name: most})
            refused(llm, folder, f"at most {said:,}")
            no_adapters(llm)


def test_a_larger_rank_than_allowed(path, tmp_path):
    llm = open_llm(path, max_lora_rank=8, num_gpu_blocks_override=20)
    llm.load_lora_adapter("fine", str(files.plain(tmp_path / "fine", rank=8)))
    refused_rank = files.plain(tmp_path / "large", rank=9)
    with pytest.raises(AdapterError, match=r"has rank 9, and max_lora_rank=8"):
        llm.load_lora_adapter("large", str(refused_rank))
    assert [info.name for info in llm.list_lora_adapters()] == ["fine"]


@pytest.mark.parametrize("wanted", ["name", 5, {"lora_name": "x"}, [1], LoRARequest])
def test_what_is_no_lora_request(llm, wanted):
    with pytest.raises(RequestError, match="lora_request"):
        llm.generate([PROMPTS[0]], files.greedy(), lora_request=wanted, use_tqdm=False)
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest"):
        llm.llm_engine.add_request("x", PROMPTS[0], files.greedy(), wanted)


@pytest.mark.parametrize(
    "adapters", [[], "ab", 3, [("a",)], [("a", "1")], [("a", float("nan"))], [("a", 10**400)], [("a", True)],
                 [(3, 1.0)], [("a", 1.0), ("a", 2.0)], [None], [("a", 1e308)], [("a", 0.5), ("b", -101)],
                 [("a", float("-inf"))], [("a", 10**5000)], [(10**5000, 10**5000)]],
)  # fmt: skip
def test_what_is_no_mixture(adapters):
    with pytest.raises(RequestError, match="adapters"):
        LoRARequest("mix", adapters=adapters)


def test_a_mixture_of_what_cannot_be_mixed(llm, tmp_path):
    llm.load_lora_adapter("a", str(files.plain(tmp_path / "a")))
    llm.load_lora_adapter("d", str(files.dora(tmp_path / "d")))
    with pytest.raises(RequestError, match="'d' is more than plain LoRA"):
        ask(llm, [PROMPTS[0]], LoRARequest("mix", adapters=[("a", 1.0), ("d", 1.0)]))
    with pytest.raises(RequestError, match="no adapter 'gone' is loaded"):
        ask(llm, [PROMPTS[0]], LoRARequest("mix", adapters=[("a", 1.0), ("gone", 1.0)]))
    llm.unload_lora_adapter("a")
    llm.unload_lora_adapter("d")


def test_without_enable_lora(path, tmp_path):
    blind = LLM(str(path), num_gpu_blocks_override=20, skip_tokenizer_init=True)
    folder = str(files.plain(tmp_path))
    with pytest.raises(RequestError, match="enable_lora is not set"):
        blind.generate([PROMPTS[0]], files.greedy(), lora_request=LoRARequest("a", 1, folder), use_tqdm=False)
    for call in (lambda: blind.load_lora_adapter("a", folder), lambda: blind.unload_lora_adapter("a"),
                 blind.list_lora_adapters):  # fmt: skip
        with pytest.raises(AdapterError, match="enable_lora is not set"):
            call()
    assert not blind.llm_engine.has_unfinished_requests()


def test_a_bad_prompt_gives_its_adapter_back(llm, tmp_path):
    llm.load_lora_adapter("a", str(files.plain(tmp_path)))
    for bad in ([], [10**9], list(range(3, 300))):
        with pytest.raises(RequestError):
            ask(llm, [PROMPTS[0], {"prompt_token_ids": bad}], "a")
    files.nothing_left(llm)
    assert llm.unload_lora_adapter("a") > 0
