"""#adapters: a PEFT folder is uploaded, used, and unloaded; what is none is refused with the reason."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quire.demo import adapter_path
from tests.browser.playground import Playground
from tests.browser.proxy import PathProxy
from tests.browser.servers import ADMIN_KEY
from tests.browser.tabs import OpenTab, Tab
from tests.server.api_server import ServerProcess

STAR = "There is a green star and a black triangle. What color is the star?"
FILES = ("adapter_config.json", "adapter_model.safetensors")


def row(tab: Tab, name: str) -> str:
    return f"[data-test=adapter-row][data-name={name}]"


def upload(tab: Tab, name: str, files: list[Path]) -> None:
    tab.find("upload-files").set_input_files(files)
    tab.find("upload-name").fill(name)
    tab.find("upload-send").click()


def unload(tab: Tab, name: str) -> None:
    shown = tab.page.locator(row(tab, name))
    shown.get_by_test_id("unload").click()
    shown.get_by_test_id("unload-sure").click()
    tab.expect(shown).to_have_count(0)


@pytest.mark.parametrize("kind", ["files", "zip"])
def test_an_adapter_is_uploaded_used_and_unloaded(
    open_tab: OpenTab, demo: ServerProcess, tmp_path: Path, kind: str
) -> None:
    tab = open_tab(demo.url, "#adapters")
    folder = Path(adapter_path("shout"))
    packed = Path(shutil.make_archive(str(tmp_path / "mine"), "zip", folder))
    tab.expect("adapter-row").to_have_count(2)
    name = f"mine-{kind}"
    upload(tab, name, [packed] if kind == "zip" else [folder / file for file in FILES])
    shown = tab.page.locator(row(tab, name))
    tab.expect(shown).to_be_visible()
    tab.check_accessibility()
    shown.get_by_test_id("try").click()
    tab.expect("model-select").to_have_value(name)
    assert Playground(tab, temperature=0).ask(STAR) == "GREEN."
    tab.find("view-adapters").click()
    unload(tab, name)
    tab.expect("happened").to_contain_text(name)
    with demo.http() as client:
        assert name not in {model["id"] for model in client.get("/v1/models").json()["data"]}


def peft_folder(path: Path, name: str = "french") -> Path:
    """As a training leaves it: the two files, others beside them, and checkpoints with files of the same names."""
    path.mkdir()
    folder = Path(adapter_path(name))
    for file in FILES:
        shutil.copy(folder / file, path)
    (path / "README.md").write_text("# About it")
    (path / "training_args.bin").write_bytes(b"a pickle, which must not be sent")
    older = path / "checkpoint-10"
    older.mkdir()
    (older / "adapter_config.json").write_text("{}")
    (older / "optimizer.pt").write_bytes(b"another")
    return path


def test_a_folder_is_uploaded_as_it_lies(open_tab: OpenTab, demo: ServerProcess, tmp_path: Path) -> None:
    """By the button for folders: the adapter's two files are sent, under the folder's name, and nothing else of it."""
    tab = open_tab(demo.url, "#adapters")
    tab.find("upload-folder").set_input_files(peft_folder(tmp_path / "my-french"))
    tab.expect("upload-name").to_have_value("my-french")
    for file in FILES:
        tab.expect("upload-contents").to_contain_text(file)
    tab.expect("upload-contents").to_contain_text("4 other files are not sent")
    tab.check_accessibility()
    with tab.page.expect_response("**/v1/adapters") as response:
        tab.find("upload-send").click()
    assert response.value.json()["ignored_files"] == []
    shown = tab.page.locator(row(tab, "my-french"))
    tab.expect(shown).to_be_visible()
    tab.expect("loaded").to_contain_text("my-french")
    shown.get_by_test_id("try").click()
    tab.expect("model-select").to_have_value("my-french")
    assert Playground(tab, temperature=0).ask(STAR) == "Vert."
    tab.find("view-adapters").click()
    unload(tab, "my-french")


def test_a_folder_without_an_adapter_is_told(open_tab: OpenTab, demo: ServerProcess, tmp_path: Path) -> None:
    """Before anything is sent."""
    tab = open_tab(demo.url, "#adapters")
    folder = peft_folder(tmp_path / "incomplete")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    tab.find("upload-folder").set_input_files(folder)
    tab.expect("upload-contents").to_contain_text("There is no adapter_model.safetensors in this folder")
    tab.expect("upload-send").to_be_disabled()
    tab.check_accessibility()


def test_an_adapter_is_replaced(open_tab: OpenTab, demo: ServerProcess, tmp_path: Path) -> None:
    tab = open_tab(demo.url, "#adapters")
    shouts, french = Path(adapter_path("shout")), peft_folder(tmp_path / "other")
    upload(tab, "changing", [shouts / file for file in FILES])
    shown = tab.page.locator(row(tab, "changing"))
    shown.get_by_test_id("replace").click()
    tab.expect("upload-name").to_have_value("changing")
    tab.find("upload-folder").set_input_files(french)
    tab.expect("upload-send").to_have_text("Upload and replace")
    tab.find("upload-send").click()
    tab.expect("happened").to_contain_text("changing is replaced")
    tab.check_accessibility()
    shown.get_by_test_id("try").click()
    assert Playground(tab, temperature=0).ask(STAR) == "Vert."
    tab.find("view-adapters").click()
    unload(tab, "changing")


def test_what_is_no_adapter_is_refused_with_the_reason(open_tab: OpenTab, demo: ServerProcess, tmp_path: Path) -> None:
    tab = open_tab(demo.url, "#adapters")
    tab.expect_fault("status of 4")
    broken = tmp_path / "adapter_model.safetensors"
    broken.write_bytes(b"no tensors")
    upload(tab, "broken", [Path(adapter_path("shout")) / "adapter_config.json", broken])
    tab.expect("upload-error").to_contain_text("adapter_model.safetensors")
    tab.check_accessibility()
    tab.expect("adapter-row").to_have_count(2)


def test_an_upload_needs_the_admin_key(open_tab: OpenTab, proxy: PathProxy) -> None:
    """And is done with it, behind a path."""
    tab = open_tab(proxy.url, "#adapters")
    tab.expect_fault("status of 401")
    tab.give_key(ADMIN_KEY)
    folder = Path(adapter_path("french"))
    upload(tab, "admins", [folder / file for file in FILES])
    tab.expect(tab.page.locator(row(tab, "admins"))).to_be_visible()
    unload(tab, "admins")
